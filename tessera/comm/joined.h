#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

/// at::cat of what is moved between ranks, without autocast, which would cast the tensors or refuse their
/// dtype.
inline at::Tensor joined(at::TensorList parts, int64_t dim = 0) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::cat(parts, dim);
}

}  // namespace tessera
