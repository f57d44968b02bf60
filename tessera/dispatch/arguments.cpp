#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/guards.h>
#include <tessera/error.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/plan_cache.h>

#include <algorithm>
#include <bit>
#include <iterator>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

namespace {

using c10::IValue;

/// Marks in the key of what is not a distributed tensor.
enum Mark : uint64_t { kUndefined = 1, kPlain = 2, kList = 3, kValue = 4 };

at::Tensor replica(const at::Tensor& value, const DeviceMesh& mesh) {
  return make_dtensor(value,
                      Spec(mesh, replicated(mesh), value.sizes(), value.strides(), value.scalar_type()));
}

/// Makes the list of tensors, which may have holes, a new one with each replaced.
template <class Replace>
void replace_items(IValue& value, const Replace& replacement) {
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = replacement(tensor);
    value = std::move(tensors);
  } else {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const IValue& item : value.toListRef()) {
      tensors.push_back(item.isTensor() ? std::optional(replacement(item.toTensor())) : std::nullopt);
    }
    value = std::move(tensors);
  }
}

/// Forward-mode AD makes these of one zero, expanded.
bool is_missing_tangent(const at::Tensor& tensor) {
  return std::all_of(tensor.strides().begin(), tensor.strides().end(),
                     [](int64_t stride) { return stride == 0; }) &&
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

}  // namespace

void Arguments::collect_given() {
  key_.push_back(reinterpret_cast<uint64_t>(&info_));
  const size_t count = info_.schema.arguments().size();
  for (const size_t i : c10::irange(count)) {
    IValue& value = (*this)[i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      // A distributed one is taken from the stack, where a local one will be put in its place.
      tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(i, std::move(value).toTensor(), false)
                                                  : add_other(i, tensor);
    } else if (value.isTensorList()) {
      key_.push_back(kList);
      for (const at::Tensor& tensor : value.toTensorVector()) add(i, tensor);
    } else if (info_.has_holes[i]) {
      key_.push_back(kList);
      for (const IValue& item : value.toListRef()) add(i, item.isTensor() ? item.toTensor() : at::Tensor());
    } else if (resolved_.reads[i]) {
      add_value(value);
    }
  }
}

void Arguments::add(size_t position, const at::Tensor& tensor) {
  tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(position, tensor, true)
                                              : add_other(position, tensor);
}

void Arguments::add_distributed(size_t position, at::Tensor tensor, bool in_list) {
  const auto& impl = *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
  key_.push_back(reinterpret_cast<uint64_t>(impl.spec().id()));
  const at::Tensor& local = impl.local();
  check_layout(local, impl.spec());
  distributed_.push_back(
      {static_cast<uint32_t>(position), info_.written[position], in_list, false, std::move(tensor), local});
}

void Arguments::add_other(size_t position, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key_.push_back(kUndefined);
    return;
  }
  check_plain(position, tensor);
  const bool written =
      info_.written[position] && implicit_replication() && !(tensor.dim() == 0 && resolved_.is_itemwise());
  writes_plain_ |= written;
  key_.push_back(kPlain | static_cast<uint64_t>(tensor.scalar_type()) << 32 | uint64_t{written} << 16);
  if (tensor.dim() > 0 && !written) with_dims_.push_back(position);
}

void Arguments::add_value(const IValue& value) {
  auto add = [&](uint64_t kind, uint64_t word) {
    key_.push_back(kValue | kind << 8);
    key_.push_back(word);
  };
  if (value.isInt()) {
    add(1, static_cast<uint64_t>(value.toInt()));
  } else if (value.isIntList()) {
    const auto items = value.toListRef();
    add(2, items.size());
    for (const IValue& item : items) key_.push_back(static_cast<uint64_t>(item.toInt()));
  } else if (value.isBool()) {
    add(3, value.toBool());
  } else if (value.isNone()) {
    add(4, 0);
  } else if (value.isDouble()) {
    add(5, std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {
    add(6, std::bit_cast<uint64_t>(value.toComplexDouble().real()));
    add(6, std::bit_cast<uint64_t>(value.toComplexDouble().imag()));
  } else if (value.isString()) {
    add(7, value.toStringRef().size());
    for (const char letter : value.toStringRef()) key_.push_back(static_cast<uint64_t>(letter));
  } else if (value.isDevice()) {
    add(8,
        static_cast<uint64_t>(value.toDevice().type()) << 8 | static_cast<uint8_t>(value.toDevice().index()));
  } else {
    TESSERA_CHECK(value.isList(), info_.name, ": its sharding rule reads an argument of type ",
                  value.type()->str(), ", which cannot be part of a key.");
    const auto items = value.toListRef();
    add(9, items.size());
    for (const IValue& item : items) add_value(item);
  }
}

bool Arguments::writes() const {
  return std::any_of(distributed_.begin(), distributed_.end(),
                     [](const DistributedArgument& a) { return a.written; });
}

void Arguments::replicate_plain() {
  TESSERA_CHECK(!distributed_.empty(), info_.name,
                ": was dispatched to Tessera without a distributed tensor.");
  const DeviceMesh mesh = distributed_[0].spec().mesh();
  const auto positions = std::exchange(with_dims_, {});
  collect_again(positions, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || DTensorImpl::of(tensor) || tensor.dim() == 0) return tensor;
    return replica(tensor, mesh);
  });
}

bool Arguments::unify_meshes() {
  if (distributed_.empty()) return false;
  const auto with_dims = std::find_if(distributed_.begin(), distributed_.end(),
                                      [](const DistributedArgument& a) { return a.tensor.dim() > 0; });
  const DeviceMesh mesh = (with_dims == distributed_.end() ? distributed_.front() : *with_dims).spec().mesh();
  std::vector<size_t> positions;
  for (const DistributedArgument& each : distributed_) {
    if (each.tensor.dim() > 0 || each.written || (resolved_.is_itemwise() && each.in_list) ||
        each.spec().mesh() == mesh)
      continue;
    if (positions.empty() || positions.back() != each.position) positions.push_back(each.position);
  }
  if (positions.empty()) return false;
  collect_again(positions, [&](const at::Tensor& tensor) {
    const DTensorImpl* impl = tensor.defined() ? DTensorImpl::of(tensor) : nullptr;
    if (!impl || tensor.dim() > 0 || impl->spec().mesh() == mesh) return tensor;
    return replica(execute(*cached_plan(impl->spec(), replicated(impl->spec())), impl->local()), mesh);
  });
  return true;
}

/// With the tensors at these positions replaced.
template <class Replace>
void Arguments::collect_again(c10::ArrayRef<size_t> positions, const Replace& replacement) {
  restore();
  for (const size_t position : positions) {
    IValue& value = (*this)[position];
    if (value.isTensor()) {
      value = replacement(value.toTensor());
    } else {
      replace_items(value, replacement);
    }
  }
  distributed_.clear();
  key_.clear();
  collect_given();
}

void Arguments::check_plain(size_t position, const at::Tensor& tensor) const {
  const bool written = info_.written[position];
  // What is written under implicit replication is computed from replicas, so that it stays the same on all
  // ranks.
  if (written ? implicit_replication() : may_be_plain(position, tensor)) [[likely]]
    return;
  // A scalar tensor that is written on every rank alike: computed from replicas, or beside the items of a
  // list (steps).
  if (tensor.dim() == 0 && (!resolved_.rule || resolved_.is_itemwise())) return;
  TESSERA_CHECK_VALUE(
      false, info_.name, ": argument '", info_.argument_name(position), "' is a plain tensor of shape ",
      tensor.sizes(), written ? ", to be written among distributed ones" : " among distributed ones",
      distributed_.empty() ? "" : c10::str(" (", distributed_[0].spec(), ")"),
      ". Distribute it with distribute_tensor or DTensor::from_local, ",
      written
          ? "or write what full_tensor() gives into it, or, if it is to have the same value on all ranks, "
          : "or, if it is the same on all ranks, ",
      "keep a tessera::ImplicitReplicationGuard alive around the call (in Python: with ",
      "tessera.experimental.implicit_replication()).");
}

/// A scalar tensor (of shape [] or [1], as torch.tensor([0.1]) for a learning rate), or the same on all ranks: because
/// the user says so, because a formula of autograd made it (zeros for a gradient or a tangent that is not there), or
/// because it is an index, as in x[[0, 2]].
bool Arguments::may_be_plain(size_t position, const at::Tensor& tensor) const {
  const bool is_scalar = tensor.dim() == 0 || (tensor.dim() == 1 && tensor.size(0) == 1);
  return is_scalar || info_.has_holes[position] || implicit_replication() ||
         torch::autograd::get_current_graph_task_id() != -1 || is_missing_tangent(tensor);
}

Stack Arguments::with_tensors() const {
  Stack all = values();
  for (const DistributedArgument& each : distributed_) {
    if (!each.in_list) all[each.position] = each.tensor;
  }
  return all;
}

rules::OpCall Arguments::call(const Stack& all) const {
  rules::OpCall call;
  call.schema = &info_.schema;
  for (const DistributedArgument& argument : distributed_) {
    call.tensors.push_back(argument.spec());
    call.positions.push_back(argument.position);
    call.written.push_back(argument.written);
  }
  call.arguments = all;
  if (resolved_.rule) call.readable = &resolved_.rule->reads;
  return call;
}

void Arguments::restore() {
  for (const DistributedArgument& each : distributed_) {
    if (!each.in_list) (*this)[each.position] = each.tensor;
  }
}

void Arguments::substitute_locals() {
  size_t next = 0;
  auto take = [&]() -> at::Tensor {
    DistributedArgument& argument = distributed_[next++];
    return argument.written ? argument.local : std::move(argument.local);
  };
  auto local = [&](const at::Tensor& tensor) {
    return tensor.defined() && DTensorImpl::of(tensor) ? take() : tensor;
  };
  for (const size_t i : c10::irange(info_.schema.arguments().size())) {
    if (next == distributed_.size()) return;
    if (distributed_[next].position != i) continue;
    IValue& value = (*this)[i];
    if (value.isNone()) {
      value = take();
    } else {
      replace_items(value, local);
    }
  }
}

Stack Arguments::take() {
  Stack arguments(std::make_move_iterator(begin()), std::make_move_iterator(stack_.end()));
  stack_.erase(begin(), stack_.end());
  return arguments;
}

void Arguments::replace_by(Stack results) {
  stack_.erase(begin(), stack_.end());
  for (IValue& result : results) stack_.push_back(std::move(result));
}

}  // namespace tessera
