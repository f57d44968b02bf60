#include <tessera/nn/members.h>
#include <tessera/nn/tree.h>

#include <map>
#include <mutex>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>

namespace tessera {

/// Stands for no module: a name for the friend of torch::nn::Module below.
struct ListsOfModule;

}  // namespace tessera

/// torch::nn::Module lets Cloneable see its lists, and nobody else change them.
template <>
class torch::nn::Cloneable<tessera::ListsOfModule> {
 public:
  static tessera::NamedTensors& parameters(Module& module) { return module.parameters_; }
  static tessera::NamedTensors& buffers(Module& module) { return module.buffers_; }
};

namespace tessera {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::type_index, detail::FindHandles> found;
};

Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

using detail::add_handles;
using detail::Handles;

/// Modules of which some handles are not plain members.
template <class M, class Find>
void register_handles(Find find) {
  detail::add_members(typeid(M), [find](torch::nn::Module& module, Handles& handles) {
    if (auto* known = dynamic_cast<M*>(&module)) find(*known, handles);
  });
}

/// Recurrent modules keep their weights once more, in a list that is protected.
template <class M>
struct FlatWeights : M {
  static std::vector<at::Tensor>& of(M& module) { return module.*(&FlatWeights::flat_weights_); }
};

template <class... M>
void register_weight_and_bias() {
  (register_members<M>(&M::weight, &M::bias), ...);
}

template <class... M>
void register_batch_norms() {
  (register_members<M>(&M::weight, &M::bias, &M::running_mean, &M::running_var, &M::num_batches_tracked),
   ...);
}

template <class... M>
void register_recurrent() {
  (register_handles<M>([](M& module, Handles& handles) { add_handles(FlatWeights<M>::of(module), handles); }),
   ...);
}

template <class... M>
void register_cells() {
  (register_members<M>(&M::weight_ih, &M::weight_hh, &M::bias_ih, &M::bias_hh), ...);
}

template <class... M>
void register_weights_in_options() {
  (register_handles<M>([](M& module, Handles& handles) { handles.push_back(&module.options.weight()); }),
   ...);
}

void register_libtorch() {
  using namespace torch::nn;
  register_weight_and_bias<LinearImpl, BilinearImpl, LayerNormImpl, GroupNormImpl, Conv1dImpl, Conv2dImpl,
                           Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>();
  register_batch_norms<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                       InstanceNorm2dImpl, InstanceNorm3dImpl>();
  register_recurrent<RNNImpl, LSTMImpl, GRUImpl>();
  register_cells<RNNCellImpl, LSTMCellImpl, GRUCellImpl>();
  register_members<PReLUImpl>(&PReLUImpl::weight);
  using Attention = MultiheadAttentionImpl;
  register_members<Attention>(&Attention::in_proj_weight, &Attention::in_proj_bias, &Attention::bias_k,
                              &Attention::bias_v, &Attention::q_proj_weight, &Attention::k_proj_weight,
                              &Attention::v_proj_weight);
  // Those that were given keep the given tensor in their options too.
  register_handles<EmbeddingImpl>([](EmbeddingImpl& module, Handles& handles) {
    handles.insert(handles.end(), {&module.weight, &module.options._weight()});
  });
  register_handles<EmbeddingBagImpl>([](EmbeddingBagImpl& module, Handles& handles) {
    handles.insert(handles.end(), {&module.weight, &module.options._weight()});
  });
  register_handles<NLLLossImpl>([](NLLLossImpl& module, Handles& handles) {
    handles.insert(handles.end(), {&module.weight, &module.options.weight()});
  });
  register_handles<CrossEntropyLossImpl>([](CrossEntropyLossImpl& module, Handles& handles) {
    handles.insert(handles.end(), {&module.weight, &module.options.weight()});
  });
  register_handles<BCEWithLogitsLossImpl>([](BCEWithLogitsLossImpl& module, Handles& handles) {
    handles.insert(handles.end(), {&module.weight, &module.pos_weight, &module.options.weight(),
                                   &module.options.pos_weight()});
  });
  register_weights_in_options<BCELossImpl, MultiMarginLossImpl, MultiLabelSoftMarginLossImpl>();
  register_members<FractionalMaxPool2dImpl>(&FractionalMaxPool2dImpl::_random_samples);
  register_members<FractionalMaxPool3dImpl>(&FractionalMaxPool3dImpl::_random_samples);
}

Handles handles_of(torch::nn::Module& module) {
  static const bool registered = (register_libtorch(), true);
  static_cast<void>(registered);
  Handles handles;
  for (auto& item : parameters_of(module)) handles.push_back(&item.value());
  for (auto& item : buffers_of(module)) handles.push_back(&item.value());
  const std::lock_guard lock(registry().mutex);
  for (const auto& [type, find] : registry().found) find(module, handles);
  return handles;
}

}  // namespace

void detail::add_members(std::type_index type, FindHandles find) {
  const std::lock_guard lock(registry().mutex);
  registry().found[type] = std::move(find);
}

NamedTensors& parameters_of(torch::nn::Module& module) {
  return torch::nn::Cloneable<ListsOfModule>::parameters(module);
}

NamedTensors& buffers_of(torch::nn::Module& module) {
  return torch::nn::Cloneable<ListsOfModule>::buffers(module);
}

std::string tensors_text(const torch::nn::Module& module) {
  std::string text;
  const auto parameters = module.named_parameters(), buffers = module.named_buffers();
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const auto& item : *tensors) {
      if (!text.empty()) text += ", ";
      text += item.key();
      if (item.value().defined()) text += c10::str(' ', item.value().scalar_type(), item.value().sizes());
    }
  }
  return text;
}

Tree::Tree(torch::nn::Module& root) : scope_(this) { add(root, ""); }

Tree::~Tree() = default;

void Tree::add(torch::nn::Module& module, const std::string& name) {
  if (!names_.emplace(&module, name).second) return;  // a module may be a child of several
  for (at::Tensor* handle : handles_of(module)) {
    if (handle->defined()) handles_[handle->unsafeGetTensorImpl()].push_back(handle);
  }
  for (const auto& child : module.named_children()) {
    add(*child.value(), name.empty() ? child.key() : name + "." + child.key());
  }
}

Tree* Tree::around(const torch::nn::Module& module) {
  Tree* tree = ThreadScope<Tree*, Tree>::current();
  while (tree && tree->names_.count(&module) == 0) tree = tree->scope_.outer();
  return tree;
}

std::string Tree::name_of(const torch::nn::Module& module) const { return names_.at(&module); }

bool Tree::replace(at::Tensor& handle, const at::Tensor& now, bool only_if_all) {
  const at::Tensor old = handle;
  const auto entry = handles_.find(old.unsafeGetTensorImpl());
  const std::vector<at::Tensor*> handles =
      entry == handles_.end() ? std::vector<at::Tensor*>{&handle} : entry->second;
  for (at::Tensor* each : handles) *each = now;
  const bool all = old.use_count() == 1;
  if (!all && only_if_all) {
    for (at::Tensor* each : handles) *each = old;
    return false;
  }
  if (entry != handles_.end()) handles_.erase(entry);
  handles_[now.unsafeGetTensorImpl()] = handles;
  return all;
}

}  // namespace tessera
