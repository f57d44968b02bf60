#include <tessera/error.h>
#include <tessera/kernels/indices.h>

#include <string>

#include <ATen/ATen.h>

namespace tessera::kernels {

namespace {

/// The indices, none of them negative.
at::Tensor checked(const at::Tensor& global, int64_t size, IndexKind kind) {
  const at::Tensor indices =
      kind.wraps ? at::where(at::lt(global, 0), at::add(global, size), global) : global;
  if (indices.numel() == 0 || indices.is_meta()) return indices;
  const auto [lowest, highest] = at::aminmax(indices);
  if (!indices.is_cpu()) {
    // A look at them would wait for the device, which checks them by itself, as its own kernels do.
    at::_assert_async(at::logical_and(at::ge(lowest, 0), at::lt(highest, size)),
                      c10::str("an index is out of range in a dim of size ", size));
    return indices;
  }
  if (lowest.item<int64_t>() >= 0 && highest.item<int64_t>() < size) return indices;
  const std::string message = c10::str("an index is out of range: indices go from ", lowest.item<int64_t>(),
                                       " to ", highest.item<int64_t>(), " in a dim of size ", size, ".");
  TESSERA_CHECK_INDEX(!kind.is_index_error, message);
  TESSERA_CHECK(false, message);
}

}  // namespace

LocalIndices::LocalIndices(const at::Tensor& global, const Spec& spec, int64_t dim, int64_t other,
                           IndexKind kind) {
  indices = at::sub(checked(global, spec.shape()[dim], kind), spec.global_offset()[dim]);
  elsewhere = at::logical_or(at::lt(indices, 0), at::ge(indices, spec.local_shape()[dim]));
  indices = indices.masked_fill(elsewhere, other);
}

LocalElements::LocalElements(const at::Tensor& global, const Spec& spec) {
  at::Tensor rest = checked(global, spec.numel(), {.wraps = true});
  indices = at::zeros_like(rest);
  is_local = at::ones_like(rest, at::kBool);
  int64_t weight = 1;
  for (int64_t dim = spec.ndim(); dim-- > 0;) {
    const int64_t size = spec.shape()[dim], local_size = spec.local_shape()[dim];
    const at::Tensor index = at::sub(at::remainder(rest, size), spec.global_offset()[dim]);
    is_local.logical_and_(at::ge(index, 0)).logical_and_(at::lt(index, local_size));
    indices.add_(index, weight);
    weight *= local_size;
    rest = at::floor_divide(rest, size);
  }
  indices.masked_fill_(at::logical_not(is_local), 0);
}

}  // namespace tessera::kernels
