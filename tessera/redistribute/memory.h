#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>

#include <ATen/core/Tensor.h>

/// How local tensors lie in memory.
///
/// The invariant: **the local tensor of every DTensor lies in memory as its spec says.** libtorch chooses
/// kernels and formulas by the strides of the spec, and the kernel then reads the memory of the local tensor;
/// if the two differ, some kernels read elements that are not meant, in silence.
///   - If the spec is dense, the local tensor has the strides `spec.local_strides()`: dense, with its dims in
///     the same order.
///   - If it is not (the DTensor is a slice, a diagonal, an expanded tensor), local dims lie in the same
///     order, and are of stride 1 where the spec says so.
///   - Its memory holds its values: it is not conjugated or negated lazily, which the DTensor does not say.
/// Set TESSERA_CHECK_LAYOUT=1 to check this whenever a local tensor is used; debug builds always do.
namespace tessera {

TESSERA_API bool lies_as(const at::Tensor& local, const Spec& spec);

/// Whether `laid_out` would return a local tensor of a dense spec as it is, as it nearly always does.
inline bool lies_exactly_as(const at::Tensor& local, const Spec& spec) {
  return spec.is_dense() && local.strides() == spec.local_strides() && !local.is_conj() && !local.is_neg();
}

/// `local`, or a copy that lies as `spec` says. It shares the memory of `local` if that does.
TESSERA_API at::Tensor laid_out(const at::Tensor& local, const Spec& spec);

namespace detail {
/// TESSERA_CHECK_LAYOUT, or a debug build.
extern TESSERA_API const bool checks_layout;
TESSERA_API void check_layout(const at::Tensor& local, const Spec& spec);
}  // namespace detail

/// Throws unless `local` lies as `spec` says, if that is to be checked at all.
inline void check_layout(const at::Tensor& local, const Spec& spec) {
  if (detail::checks_layout) [[unlikely]]
    detail::check_layout(local, spec);
}

/// Throws unless `local` is defined and has the shape and dtype that `spec` gives this rank. The error begins
/// with `what`, and names the rank and both sides.
TESSERA_API void check_local(const at::Tensor& local, const Spec& spec, const char* what);

/// New memory whose values nobody has written yet. With TESSERA_FILL_MEMORY=1 it is filled with NaN (integers
/// with -1 or their largest value), so that results show where such values are read.
TESSERA_API at::Tensor new_memory(c10::IntArrayRef shape, const at::TensorOptions& options);
TESSERA_API at::Tensor new_memory(c10::IntArrayRef shape, c10::IntArrayRef strides,
                                  const at::TensorOptions& options);
/// For a local tensor of this rank; `options` say the device and the dtype.
TESSERA_API at::Tensor new_memory(const Spec& spec, const at::TensorOptions& options);

/// A tensor in the storage of `memory`, `offset` bytes behind where that begins. As views by operators, but autograd knows
/// nothing of it, and it costs less.
TESSERA_API at::Tensor view_of(const at::Tensor& memory, int64_t offset, c10::IntArrayRef shape,
                               c10::IntArrayRef strides, at::ScalarType dtype);

}  // namespace tessera
