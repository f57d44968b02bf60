#pragma once

#include <tessera/export.h>

#include <string>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace tessera::sharded {

/// The module of that dotted name below `module`, which itself has the empty name. Throws, listing the known
/// ones.
TESSERA_API torch::nn::Module& submodule(torch::nn::Module& module, const std::string& path);

/// Makes the parameter or buffer of that dotted name another tensor: in all lists and members of the module
/// and its submodules that are handles on it (tessera/nn/members.h). Returns whether nobody else holds the
/// old tensor, who would go on with it; if somebody does, and if `only_if_all`, nothing has changed.
TESSERA_API bool replace_parameter(torch::nn::Module& module, const std::string& name,
                                   const at::Tensor& tensor, bool only_if_all = false);

}  // namespace tessera::sharded
