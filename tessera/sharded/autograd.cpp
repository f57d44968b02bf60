#include <tessera/error.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

/// What autograd knows of a sharded tensor: its gradient is those of its local tensors.
namespace tessera::sharded {

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Stands for the tensor where an edge leads to the node that accumulates the gradient of its first local
/// tensor, whose own is input 0.
constexpr uint32_t kInputOfShardedTensor = 1;

/// Called before gradients come to the first of some local tensors, whose accumulators these are. Throws if
/// autograd was asked for the gradient of the sharded tensor in a way that these cannot answer.
void check_inputs(const std::vector<Node*>& accumulators) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!wanted || wanted->empty()) return;  // all there are
  const auto first = wanted->find(accumulators[0]);
  if (first != wanted->end() && first->second.captures_) {
    for (const auto& capture : *first->second.captures_) {
      TESSERA_CHECK(capture.input_idx_ != kInputOfShardedTensor,
                    "grad: gradients come to the local shards of a sharded tensor. Ask for those of "
                    "local_tensors().");
    }
    return;
  }
  for (Node* accumulator : accumulators) {
    const auto found = wanted->find(accumulator);
    TESSERA_CHECK(found != wanted->end() && found->second.should_execute(), "backward: 'inputs' name one of ",
                  accumulators.size(),
                  " local shards that a sharded tensor has on this rank. Pass all of local_tensors().");
  }
}

/// The history of a sharded tensor whose local tensors have one: hands its gradient to them.
struct ToLocalTensors final : torch::autograd::Node {
  ToLocalTensors(const ShardedTensorState& state, const std::vector<at::Tensor>& local_tensors)
      : tiling(state.metadata.shards_metadata), locals(local_tensors) {
    for (const at::Tensor& local : locals) {
      add_next_edge(local.requires_grad() ? torch::autograd::impl::gradient_edge(local)
                                          : torch::autograd::Edge());
    }
  }

  bool is_history_of(const std::vector<at::Tensor>& others) const {
    for (const size_t i : c10::irange(others.size())) {
      if (others[i].requires_grad() && next_edge(i) != torch::autograd::impl::gradient_edge(others[i]))
        return false;
    }
    return others.size() == num_outputs();
  }

  variable_list apply(variable_list&& gradients) override {
    TESSERA_CHECK(is_history_of(locals),
                  "backward: local shards of this sharded tensor were written in place since it was made. "
                  "Call backward on what was computed of local_tensors() instead.");
    if (!gradients[0].defined()) return variable_list(num_outputs());
    return local_tensors_as(tiling, gradients[0], "backward");
  }

  std::string name() const override { return "ToLocalTensors"; }

  std::vector<ShardMetadata> tiling;
  std::vector<at::Tensor> locals;
};

}  // namespace

/// What autograd asks for the gradient and requires_grad of the sharded tensor.
struct ShardedTensorImpl::Meta final : torch::autograd::AutogradMeta {
  explicit Meta(ShardedTensorImpl& impl) : tensor(impl) {}

  bool requires_grad() const override {
    tensor.agree_on_requires_grad();
    return AutogradMeta::requires_grad();
  }
  const at::Tensor& grad() const override {
    tensor.agree();
    return grad_;
  }
  at::Tensor& mutable_grad() override {
    tensor.agree();
    tensor.watch();
    return grad_;
  }

  /// Makes what names the tensor among the `inputs` of backward name its local tensors. libtorch looks for the
  /// accumulator of an input before it asks anything else.
  void accept_as_input(const std::vector<at::Tensor>& locals) {
    std::vector<c10::intrusive_ptr<Node>> found;
    for (const at::Tensor& local : locals) found.push_back(torch::autograd::impl::grad_accumulator(local));
    if (found == accumulators) return;
    accumulators = std::move(found);
    grad_accumulator_ = c10::weak_intrusive_ptr<Node>(accumulators[0]);
    output_nr_ = kInputOfShardedTensor;
    std::vector<Node*> nodes;
    for (const auto& accumulator : accumulators) nodes.push_back(accumulator.get());
    locals[0].register_hook([nodes = std::move(nodes)](const at::Tensor&) { check_inputs(nodes); });
  }

  ShardedTensorImpl& tensor;
  std::vector<c10::intrusive_ptr<Node>> accumulators;  // of the local tensors, if they are leaves
};

ShardedTensorImpl::Meta& ShardedTensorImpl::meta() {
  auto* known = dynamic_cast<Meta*>(autograd_meta());
  if (known) return *known;
  auto made = std::make_unique<Meta>(*this);
  // libtorch takes it away from what `data()` returns, and makes one of its own when that gets a gradient.
  if (auto* other = static_cast<torch::autograd::AutogradMeta*>(autograd_meta())) {
    made->requires_grad_ = other->requires_grad_;
    made->grad_ = std::move(other->grad_);
    made->hooks_ = std::move(other->hooks_);
    made->post_acc_grad_hooks_ = std::move(other->post_acc_grad_hooks_);
  }
  known = made.get();
  set_autograd_meta(std::move(made));
  return *known;
}

void ShardedTensorImpl::agree() {
  agree_on_requires_grad();
  TESSERA_CHECK(meta().hooks_.empty() && !meta().post_acc_grad_hooks_,
                "A hook on a sharded tensor is never called, since gradients come to its local shards: "
                "register hooks on local_tensors().");
  take_written_grad();
  agree_on_grad();
}

void ShardedTensorImpl::agree_on_requires_grad() {
  Meta& own = meta();
  bool& known = state_.metadata.tensor_properties.requires_grad;
  const std::vector<at::Tensor> locals = state_.local_tensors();
  if (!std::all_of(locals.begin(), locals.end(), [](const at::Tensor& local) { return local.is_leaf(); })) {
    const auto* history = static_cast<const ToLocalTensors*>(own.grad_fn_.get());
    if (!history || !history->is_history_of(locals)) {
      auto made = c10::make_intrusive<ToLocalTensors>(state_, locals);
      made->add_input_metadata(at::TensorOptions(dtype()).device(device()), sym_sizes(),
                               /*is_tensor_subclass=*/false, /*is_nested=*/false, std::nullopt);
      own.grad_fn_ = std::move(made);
      own.output_nr_ = 0;
      own.requires_grad_ = false;
    }
    known = true;
    if (own.retains_grad_) {
      for (const at::Tensor& local : locals) local.retain_grad();
    }
    return;
  }
  own.grad_fn_.reset();
  bool wanted = own.requires_grad_;
  if (wanted == known) {
    for (const at::Tensor& local : locals) {
      if (local.requires_grad() != known) wanted = !known;
    }
  }
  if (wanted != known || wanted != own.requires_grad_) {
    own.requires_grad_ = known = wanted;
    for (const at::Tensor& local : locals) local.set_requires_grad(wanted);
  }
  if (wanted) own.accept_as_input(locals);
}

void ShardedTensorImpl::take_written_grad() {
  at::Tensor& grad = meta().grad_;
  if (grad.is_same(agreed_grad_)) return;
  const at::Tensor written = std::exchange(grad, agreed_grad_);  // which stays if the new one is none
  const std::vector<at::Tensor> locals = state_.local_tensors();
  std::vector<at::Tensor> gradients(locals.size());
  if (written.defined()) gradients = local_tensors_as(state_.metadata.shards_metadata, written, "grad");
  for (const size_t i : c10::irange(locals.size())) locals[i].mutable_grad() = gradients[i];
  grad = agreed_grad_ = written;
}

void ShardedTensorImpl::agree_on_grad() {
  at::Tensor& grad = meta().grad_;
  const std::vector<at::Tensor> locals = state_.local_tensors();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& local : locals) gradients.push_back(local.unsafeGetTensorImpl()->grad());
  const auto is_defined = [](const at::Tensor& part) { return part.defined(); };
  if (std::none_of(gradients.begin(), gradients.end(), is_defined)) {
    grad = agreed_grad_ = at::Tensor();
    return;
  }
  for (const size_t i : c10::irange(gradients.size())) {
    if (!gradients[i].defined()) locals[i].mutable_grad() = gradients[i] = at::zeros_like(locals[i].detach());
  }
  if (grad.defined()) {
    const std::vector<at::Tensor> known = of(grad)->state_.local_tensors();
    if (std::equal(known.begin(), known.end(), gradients.begin(), gradients.end(),
                   [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); }))
      return;
  }
  ShardedTensorState state = state_;
  state.shared = {};
  state.init_rrefs = false;
  for (const size_t i : c10::irange(state.local_shards.size())) state.local_shards[i].tensor = gradients[i];
  if (state.local_shards.empty()) state.anchor = gradients[0];
  TensorProperties& properties = state.metadata.tensor_properties;
  properties.dtype = gradients[0].scalar_type();
  properties.requires_grad = gradients[0].requires_grad();
  properties.pin_memory = false;
  grad = agreed_grad_ = make_sharded_tensor(std::move(state));
}

void ShardedTensorImpl::become(ShardedTensorState state) {
  agree();
  Meta& own = meta();
  own.grad_.reset();
  own.grad_accumulator_.reset();
  own.accumulators.clear();
  agreed_grad_.reset();
  watches_ = false;
  state_ = std::move(state);
  agree();
}

void ShardedTensorImpl::watch() {
  const std::vector<at::Tensor> locals = state_.local_tensors();
  if (watches_ || !locals[0].requires_grad()) return;
  watches_ = true;
  const c10::weak_intrusive_ptr<TensorImpl> weak(c10::intrusive_ptr<TensorImpl>::reclaim_copy(this));
  for (const at::Tensor& local : locals) {
    local.register_hook([weak](const at::Tensor&) {
      if (const auto tensor = weak.lock()) static_cast<ShardedTensorImpl*>(tensor.get())->take_written_grad();
    });
  }
}

void ShardedTensorImpl::release_resources() {
  TensorImpl::release_resources();
  // The local tensors may know of this one weakly: see watch().
  state_.local_shards.clear();
  state_.anchor.reset();
  agreed_grad_.reset();
}

}  // namespace tessera::sharded
