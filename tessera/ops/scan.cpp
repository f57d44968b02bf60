#include <tessera/kernels/exchange.h>
#include <tessera/kernels/scan.h>
#include <tessera/ops/family.h>

#include <ATen/ATen.h>
#include <ATen/ops/cumprod_backward_native.h>
#include <c10/util/irange.h>
#include <torch/library.h>

/// Running sums and their like along a dim. Where it is sharded, each rank continues from the ranks before
/// it.
namespace tessera::ops {

namespace {

Localize scanned(int64_t dim, size_t results, const Follow& follow) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    if (mesh_dims_of(x, dim).empty()) return local;
    local.communicates = true;
    local.compute = [=, ranks = ShardGroup(x, mesh_dims_of(x, dim), dim), offset = x.global_offset()[dim]](
                        const c10::OperatorHandle& op, Stack arguments) {
      Stack range = call_operator(op, std::move(arguments));
      if (results == 2) range[1] = at::add(range[1].toTensor(), offset);
      return scan(range, ranks, dim, follow);
    };
    return local;
  };
}

/// `results`: values, or values and their indices.
UnshardedDims scan_form(size_t results, const Follow& follow) {
  return {.dims = {"dim"},
          .results = results,
          .collective = Collective{
              .text = "each rank continues from those before it",
              .of = [=](const OpCall&, const Shape& dims) { return scanned(dims[0], results, follow); },
              .shards_results = true}};
}

UnshardedDims linear(UnshardedDims form) {
  form.linear = {{"self"}};
  return form;
}

template <at::Tensor (*combine)(const at::Tensor&, const at::Tensor&)>
Stack by(const Stack& before, const Stack& range) {
  return {combine(before[0].toTensor(), range[0].toTensor())};
}

at::Tensor sum(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
at::Tensor log_sum(const at::Tensor& a, const at::Tensor& b) { return at::logaddexp(a, b); }

/// The later one of two that are equal; once there is a NaN, the last of them.
template <at::Tensor (*reaches)(const at::Tensor&, const at::Tensor&)>
Stack extreme(const Stack& before, const Stack& range) {
  const at::Tensor old = before[0].toTensor(), now = range[0].toTensor();
  const at::Tensor later = at::logical_or(reaches(now, old), at::isnan(now));
  return {at::where(later, now, old), at::where(later, range[1].toTensor(), before[1].toTensor())};
}

at::Tensor at_least(const at::Tensor& a, const at::Tensor& b) { return at::ge(a, b); }
at::Tensor at_most(const at::Tensor& a, const at::Tensor& b) { return at::le(a, b); }

}  // namespace

Table scan_rules() {
  return tried({
      {{"cumsum"}, linear(scan_form(1, by<sum>))},
      {{"cumprod"}, scan_form(1, by<product>)},
      {{"logcumsumexp", "_logcumsumexp"}, scan_form(1, by<log_sum>)},
      {{"cummax"}, scan_form(2, extreme<at_least>)},
      {{"cummin"}, scan_form(2, extreme<at_most>)},
  });
}

}  // namespace tessera::ops

// --- autograd

namespace tessera {

namespace {

/// A gradient that is to have one itself, of products with zeros among them, is written into plain zeros by
/// libtorch. Here element k of the input gets the sum of what it is a factor of, but for itself.
at::Tensor cumprod_backward(const at::Tensor& gradient, const at::Tensor& input, int64_t dim,
                            const at::Tensor& output) {
  if (!at::GradMode::is_enabled() || input.dim() == 0 || input.numel() == 0)
    return at::native::cumprod_backward(gradient, input, dim, output);
  const at::Tensor factors = input.conj();
  std::vector<at::Tensor> gradients;
  for (const int64_t k : c10::irange(input.size(dim))) {
    const at::Tensor before = at::prod(factors.slice(dim, 0, k), dim, /*keepdim=*/true);
    const at::Tensor behind = at::cumprod(factors.slice(dim, k + 1), dim);
    const at::Tensor others = at::cat({before, before * behind}, dim);
    gradients.push_back((gradient.slice(dim, k) * others).sum(dim));
  }
  return at::stack(gradients, dim);
}

/// libtorch makes the zeros that this begins with as a plain tensor.
at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& indices,
                              int64_t dim) {
  return input.numel() == 0 ? input : input.new_zeros(input.sizes()).scatter_add(dim, indices, grad);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("cumprod_backward", cumprod_backward);
  library.impl("cummaxmin_backward", cummaxmin_backward);
}

}  // namespace

}  // namespace tessera
