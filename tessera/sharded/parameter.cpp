#include <tessera/error.h>
#include <tessera/sharded/parameter.h>

#include <vector>

#include <torch/nn/modules.h>

namespace tessera::sharded {

/// Stands for no module: a name for the friend of torch::nn::Module below.
struct ShardedLists;

}  // namespace tessera::sharded

/// torch::nn::Module lets Cloneable see its lists, and nobody else change them.
template <>
class torch::nn::Cloneable<tessera::sharded::ShardedLists> {
 public:
  static auto& parameters(Module& module) { return module.parameters_; }
  static auto& buffers(Module& module) { return module.buffers_; }
};

namespace tessera::sharded {

namespace {

using Lists = torch::nn::Cloneable<ShardedLists>;

/// The members of a module that may be handles on its parameters.
template <class Impl>
void add_weight_and_bias(torch::nn::Module& module, std::vector<at::Tensor*>& handles) {
  if (auto* known = dynamic_cast<Impl*>(&module))
    handles.insert(handles.end(), {&known->weight, &known->bias});
}

template <class Impl>
void add_table(torch::nn::Module& module, std::vector<at::Tensor*>& handles) {
  if (auto* known = dynamic_cast<Impl*>(&module))
    handles.insert(handles.end(), {&known->weight, &known->options._weight()});
}

std::vector<at::Tensor*> members_of(torch::nn::Module& module) {
  using namespace torch::nn;
  std::vector<at::Tensor*> handles;
  add_weight_and_bias<LinearImpl>(module, handles);
  add_weight_and_bias<BilinearImpl>(module, handles);
  add_weight_and_bias<LayerNormImpl>(module, handles);
  add_weight_and_bias<GroupNormImpl>(module, handles);
  add_weight_and_bias<Conv1dImpl>(module, handles);
  add_weight_and_bias<Conv2dImpl>(module, handles);
  add_weight_and_bias<Conv3dImpl>(module, handles);
  add_table<EmbeddingImpl>(module, handles);
  add_table<EmbeddingBagImpl>(module, handles);
  return handles;
}

}  // namespace

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
  at::Tensor* listed = Lists::parameters(owner).find(own);
  if (!listed) listed = Lists::buffers(owner).find(own);
  TESSERA_CHECK_VALUE(listed, owner.name(), " has no parameter or buffer \"", own, "\".");
  const at::Tensor old = *listed;
  std::vector<at::Tensor*> handles{listed};
  for (at::Tensor* member : members_of(owner)) {
    if (member->is_same(old)) handles.push_back(member);
  }
  const bool is_all = old.use_count() == handles.size() + 1;
  if (is_all || !only_if_all) {
    for (at::Tensor* handle : handles) *handle = tensor;
  }
  return is_all;
}

}  // namespace tessera::sharded
