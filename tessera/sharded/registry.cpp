#include <tessera/error.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <map>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::sharded {

namespace {

using c10::IValue;
using torch::jit::Stack;

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

c10::OperatorHandle find_op(const std::string& name) {
  const size_t dot = name.find('.');
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto op =
      dispatcher.findSchema({name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
  if (op) return *op;
  std::string overloads;
  for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
    if (each.name == name.substr(0, dot)) overloads += (overloads.empty() ? "" : ", ") + c10::toString(each);
  }
  TESSERA_CHECK_VALUE(
      false, "Sharded operators: there is no operator \"", name, "\"; ",
      overloads.empty() ? std::string("expected a name as in \"aten::linear\"") : "there are: " + overloads,
      ".");
}

/// Implementations are looked up far more often than added.
class Tables {
 public:
  using Op = std::shared_ptr<const BoxedOp>;

  void add(detail::Table table, std::type_index spec, const std::string& op, BoxedOp implementation) {
    const std::unique_lock lock(mutex_);
    auto& ops = table == detail::Table::custom ? custom_
                : table == detail::Table::spec ? by_spec_[spec]
                                               : builtin_;
    ops[op] = std::make_shared<const BoxedOp>(std::move(implementation));
  }

  Op find(const std::string& op, const ShardingSpec& spec) const {
    const std::shared_lock lock(mutex_);
    if (const auto found = custom_.find(op); found != custom_.end()) return found->second;
    if (const auto ops = by_spec_.find(typeid(spec)); ops != by_spec_.end()) {
      if (const auto found = ops->second.find(op); found != ops->second.end()) return found->second;
    }
    const auto found = builtin_.find(op);
    return found == builtin_.end() ? nullptr : found->second;
  }

  std::vector<std::string> names() const {
    const std::shared_lock lock(mutex_);
    std::map<std::string, Op> all(builtin_.begin(), builtin_.end());
    all.insert(custom_.begin(), custom_.end());
    std::vector<std::string> result;
    for (const auto& [name, op] : all) result.push_back(name);
    return result;
  }

 private:
  using Ops = std::unordered_map<std::string, Op>;
  mutable std::shared_mutex mutex_;
  Ops custom_, builtin_;
  std::unordered_map<std::type_index, Ops> by_spec_;
};

Tables& tables() {
  static auto& instance = *new Tables;
  return instance;
}

/// Calls `visit` with the position of each sharded tensor among the arguments.
template <class Visit>
void for_each_sharded(const c10::OperatorHandle& op, const Stack& stack, const Visit& visit) {
  const size_t count = op.schema().arguments().size();
  for (const size_t i : c10::irange(count)) {
    const IValue& value = stack[stack.size() - count + i];
    auto look = [&](const at::Tensor& tensor) {
      if (ShardedTensor::is_sharded_tensor(tensor)) visit(i, ShardedTensor(tensor));
    };
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    } else if (value.isList()) {
      for (const IValue& item : value.toListRef()) {
        if (item.isTensor()) look(item.toTensor());
      }
    }
  }
}

/// Every operator on a sharded tensor comes here.
void dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const std::string name = name_of(op);
  ShardedTensor first;
  size_t position = 0;
  for_each_sharded(op, *stack, [&](size_t i, const ShardedTensor& tensor) {
    if (!first.defined()) {
      first = tensor;
      position = i;
      return;
    }
    TESSERA_CHECK(tensor.process_group() == first.process_group(), name,
                  ": its sharded tensors are shared by different groups of ranks, ",
                  c10::IntArrayRef(first.process_group().ranks()), " and ",
                  c10::IntArrayRef(tensor.process_group().ranks()), "; they must be of one group.");
  });
  TESSERA_CHECK(first.defined(), name, ": called without a sharded tensor.");
  const Tables::Op known = tables().find(name, first.sharding_spec());
  TESSERA_CHECK(known, name, " does not work on sharded tensors, but argument '",
                op.schema().arguments()[position].name(), "' is one (", first.metadata().tensor_properties,
                " ", first.sizes(), ", ", first.sharding_spec(),
                "). Compute on its local_shards(), gather() it first, or register an implementation: "
                "tessera::sharded::custom_sharded_op(\"",
                name, "\", [](...) { ... }) with the signature ", op.schema(), ".");
  (*known)(op, stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

}  // namespace

namespace detail {

void register_op(Table table, std::type_index spec, const std::string& op, BoxedOp implementation,
                 const c10::FunctionSchema* inferred) {
  const c10::OperatorHandle handle = find_op(op);
  if (inferred) {
    const auto difference = c10::findSchemaDifferences(inferred->cloneWithRealTypes(false),
                                                       handle.schema().cloneWithRealTypes(false));
    TESSERA_CHECK_VALUE(!difference, "Sharded operators: the implementation of ", op,
                        " must have the operator's signature, ", handle.schema(), ": ", *difference);
  }
  tables().add(table, spec, name_of(handle), std::move(implementation));
}

}  // namespace detail

std::vector<std::string> sharded_ops() { return tables().names(); }

void on_local_shards(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  TESSERA_CHECK(count > 0 && (*stack)[first].isTensor() && op.schema().returns().size() == 1, name_of(op),
                ": on_local_shards is for operators whose first argument and only result are tensors.");
  const ShardedTensor tensor((*stack)[first].toTensor());
  TensorProperties properties = tensor.metadata().tensor_properties;
  properties.requires_grad &= at::GradMode::is_enabled();
  properties.pin_memory = false;
  std::vector<at::Tensor> results;
  for (const size_t i : c10::irange(tensor.local_shards().size())) {
    Stack local(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
    for (IValue& value : local) {
      if (!value.isTensor() || !ShardedTensor::is_sharded_tensor(value.toTensor())) continue;
      const ShardedTensor other(value.toTensor());
      TESSERA_CHECK(other.metadata().shards_metadata == tensor.metadata().shards_metadata, name_of(op),
                    ": its sharded tensors are cut differently: ", tensor.sharding_spec(), " and ",
                    other.sharding_spec(), "; reshard one of them.");
      value = other.local_shards()[i].tensor;
    }
    op.callBoxed(local);
    results.push_back(local.back().toTensor().contiguous());
    TESSERA_CHECK(results.back().sizes() == tensor.local_shards()[i].tensor.sizes(), name_of(op),
                  ": on_local_shards is for operators that keep the size.");
  }
  for (const at::Tensor& result : results) {
    properties.dtype = result.scalar_type();
    properties.requires_grad = result.requires_grad();
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(at::Tensor(with_local_tensors(tensor, std::move(results), properties)));
}

}  // namespace tessera::sharded
