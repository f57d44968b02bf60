#include <tessera/error.h>
#include <tessera/kernels/pooling.h>
#include <tessera/ops/family.h>
#include <tessera/ops/plain_gradients.h>

#include <algorithm>

#include <ATen/ops/max_pool1d_with_indices.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

bool is_average(Pool kind) { return kind == Pool::avg || kind == Pool::avg_backward; }

/// The planes of the input.
Shape plane_sizes(const Spec& input, int64_t inner) {
  return input.shape().slice(input.ndim() - inner).vec();
}

/// Whether the gradient's planes have these sizes.
bool has_planes(const OpCall& call, const Shape& sizes) {
  return plane_sizes(call.tensors[0], static_cast<int64_t>(sizes.size())) == sizes;
}

/// A value for each dim; one may be given for all.
Shape each_of(const OpCall& call, const char* name, int64_t inner, int64_t missing) {
  Shape values = call.position(name) ? call.integers(name) : Shape{};
  if (values.empty()) values = {missing};
  if (values.size() == 1) values.resize(inner, values[0]);
  return values;
}

/// Nothing if a call is not sane, which libtorch is to say.
std::optional<SpatialSharding> sliding(const OpCall& call, int64_t inner, Pool kind) {
  const auto self = call.tensor("self");
  if (!self || (is_average(kind) && !at::isFloatingType(call.tensors[0].dtype()))) return std::nullopt;
  const Spec& x = call.tensors[*self];
  SlidingPool pool{.first = x.ndim() - inner, .sizes = plane_sizes(x, inner)};
  const Shape kernel = each_of(call, "kernel_size", inner, 1), padding = each_of(call, "padding", inner, 0),
              dilation = each_of(call, "dilation", inner, 1);
  const Shape stride = call.integers("stride").empty() ? kernel : each_of(call, "stride", inner, 1);
  const bool ceil = call.flag("ceil_mode");
  Shape sizes;
  for (const int64_t i : c10::irange(inner)) {
    const Sliding window{kernel[i], stride[i], padding[i], dilation[i]};
    const bool sane = window.kernel > 0 && window.stride > 0 && window.dilation > 0 && window.padding >= 0 &&
                      window.padding <= (window.extent() + 1) / 2;
    if (!sane || window.size(pool.sizes[i], ceil) < 1) return std::nullopt;
    pool.windows.push_back(window);
    sizes.push_back(window.size(pool.sizes[i], ceil));
  }
  if (is_average(kind)) {
    pool.counts_padding = call.flag("count_include_pad");
    if (call.has("divisor_override")) pool.divisor = call.integer("divisor_override");
    if (pool.divisor == 0) return std::nullopt;
  }
  if (is_backward(kind) && !has_planes(call, sizes)) return std::nullopt;
  return SpatialSharding{sizes, pooled(pool, kind, *self)};
}

std::optional<SpatialSharding> adaptive(const OpCall& call, int64_t inner, Pool kind) {
  const auto self = call.tensor("self");
  if (!self || (is_average(kind) && !at::isFloatingType(call.tensors[0].dtype()))) return std::nullopt;
  const Spec& x = call.tensors[*self];
  const Shape wanted = is_backward(kind) ? plane_sizes(call.tensors[0], inner) : call.integers("output_size");
  const bool sane = static_cast<int64_t>(wanted.size()) == inner &&
                    std::all_of(wanted.begin(), wanted.end(), [](int64_t size) { return size > 0; });
  if (!sane) return std::nullopt;
  const AdaptivePool pool{x.ndim() - inner, plane_sizes(x, inner), wanted};
  return SpatialSharding{wanted, pooled(pool, kind, *self)};
}

using SpatialRule = std::optional<SpatialSharding> (*)(const OpCall&, int64_t inner, Pool kind);

/// Windows over planes of `inner` dims, which may be sharded too.
Planes pool_rule(int64_t inner, Pool kind, SpatialRule spatial, Names reads) {
  return {.inner = inner,
          .results = kind == Pool::max ? size_t{2} : size_t{1},
          .gradient = is_backward(kind),
          .linear = kind != Pool::max,
          .spatial = [=](const OpCall& call) { return spatial(call, inner, kind); },
          .spatial_reads = std::move(reads)};
}

Planes sliding_rule(int64_t inner, Pool kind) {
  return pool_rule(
      inner, kind, sliding,
      {"kernel_size", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override"});
}
Planes adaptive_rule(int64_t inner, Pool kind) { return pool_rule(inner, kind, adaptive, {"output_size"}); }

/// Averages in three dims, of which CPUs lack kernels of the smaller floats.
Rule of_large_floats(Rule rule) {
  rule.may_refuse_dtypes = [](Dtypes dtypes) {
    return not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]);
  };
  return rule;
}

}  // namespace

Table pooling_rules() {
  return {
      {{"max_pool2d_with_indices"}, sliding_rule(2, Pool::max)},
      {{"max_pool3d_with_indices"}, sliding_rule(3, Pool::max)},
      {{"max_pool2d_with_indices_backward"}, sliding_rule(2, Pool::max_backward)},
      {{"max_pool3d_with_indices_backward"}, sliding_rule(3, Pool::max_backward)},
      {{"avg_pool2d"}, sliding_rule(2, Pool::avg)},
      {{"avg_pool3d"}, of_large_floats(sliding_rule(3, Pool::avg))},
      {{"avg_pool2d_backward"}, sliding_rule(2, Pool::avg_backward)},
      {{"avg_pool3d_backward"}, of_large_floats(sliding_rule(3, Pool::avg_backward))},
      {{"_adaptive_avg_pool2d"}, adaptive_rule(2, Pool::avg)},
      {{"_adaptive_avg_pool3d"}, of_large_floats(adaptive_rule(3, Pool::avg))},
      {{"_adaptive_avg_pool2d_backward"}, adaptive_rule(2, Pool::avg_backward)},
      {{"_adaptive_avg_pool3d_backward"}, of_large_floats(adaptive_rule(3, Pool::avg_backward))},
      {{"adaptive_max_pool2d"}, adaptive_rule(2, Pool::max)},
      {{"adaptive_max_pool3d"}, adaptive_rule(3, Pool::max)},
      {{"adaptive_max_pool2d_backward"}, adaptive_rule(2, Pool::max_backward)},
      {{"adaptive_max_pool3d_backward"}, adaptive_rule(3, Pool::max_backward)},
      {{"fractional_max_pool2d"}, Planes{.inner = 2, .results = 2, .rows = "random_samples"}},
      {{"fractional_max_pool3d"}, Planes{.inner = 3, .results = 2, .rows = "random_samples"}},
      {{"fractional_max_pool2d_backward"}, Planes{.inner = 2, .gradient = true}},
      {{"fractional_max_pool3d_backward"}, Planes{.inner = 3, .gradient = true}},
      {{"max_unpool2d"}, Planes{.inner = 2}},
      {{"max_unpool3d"}, Planes{.inner = 3}},
  };
}

}  // namespace tessera::ops

// --- autograd and composites

namespace tessera {

namespace {

/// libtorch reads the memory of what needs no gradient. It takes floats only then.
at::Tensor max_pool1d(const at::Tensor& self, c10::IntArrayRef kernel_size, c10::IntArrayRef stride,
                      c10::IntArrayRef padding, c10::IntArrayRef dilation, bool ceil_mode) {
  TESSERA_CHECK_AS(c10::NotImplementedError, self.is_floating_point(), "max_pool1d: not implemented for ",
                   self.scalar_type(), ".");
  return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

void register_pooling_composites(torch::Library& library) { library.impl("max_pool1d", max_pool1d); }

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_pooling_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_pooling_composites(library);
  distribute_gradients(
      library, {"_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
                "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "avg_pool2d_backward",
                "avg_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
                "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"});
}

}  // namespace

}  // namespace tessera
