#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/export.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::comm {

enum class Write { copy, add };

/// outputs[r][i] = rank r's inputs[this rank][i], for all ranks r of the group and all i: one all-to-all of
/// lists of tensors, each packed into one message. With Write::add the values are added to what the outputs
/// have, those of this rank first and then in the order of the ranks.
///
/// What rank r sends and what this rank receives from it must be as many tensors, of the same shapes. They
/// may be views with any strides. Messages have the dtype and device of `options`, and values are converted.
/// What a rank has for itself is written directly; a null group is this rank alone. Collective; returns when
/// it is done. Autograd is not involved.
TESSERA_API void packed_all_to_all(const std::vector<Tensors>& outputs, const std::vector<Tensors>& inputs,
                                   const at::TensorOptions& options, const Group& group,
                                   Write write = Write::copy);

}  // namespace tessera::comm
