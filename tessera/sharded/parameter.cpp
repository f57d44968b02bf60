#include <tessera/error.h>
#include <tessera/nn/tree.h>
#include <tessera/sharded/parameter.h>

#include <torch/nn/module.h>

namespace tessera::sharded {

torch::nn::Module& submodule(torch::nn::Module& module, const std::string& path) {
  if (path.empty()) return module;
  const auto modules = module.named_modules(/*name_prefix=*/"", /*include_self=*/false);
  if (const auto* found = modules.find(path)) return **found;
  std::string names;
  for (const auto& item : modules) names += (names.empty() ? "" : ", ") + item.key();
  TESSERA_CHECK_VALUE(false, module.name(), " has no submodule \"", path, "\"; it has: ", names, ".");
}

bool replace_parameter(torch::nn::Module& module, const std::string& name, const at::Tensor& tensor,
                       bool only_if_all) {
  const size_t dot = name.rfind('.');
  torch::nn::Module& owner = submodule(module, dot == std::string::npos ? "" : name.substr(0, dot));
  const std::string own = dot == std::string::npos ? name : name.substr(dot + 1);
  at::Tensor* listed = parameters_of(owner).find(own);
  if (!listed) listed = buffers_of(owner).find(own);
  TESSERA_CHECK_VALUE(listed, owner.name(), " has no parameter or buffer \"", own, "\".");
  return Tree(module).replace(*listed, tensor, only_if_all);
}

}  // namespace tessera::sharded
