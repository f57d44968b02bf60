#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// Whether autograd got the tensor from redistribute() or from_local(). Its gradient may then have any
/// placements: it is redistributed there, once for all that was computed with the tensor.
bool redistributes_gradient(const at::Tensor& tensor);

}  // namespace tessera
