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

/// libtorch says so of what computes each element from those at the same index. Random numbers must not
/// depend on the tiling.
bool is_elementwise(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded);
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
  if (!known && is_elementwise(op)) return on_local_shards(op, stack);
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
static_assert(kShardedTensorKey == c10::DispatchKey::DeferredInit);

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
  const std::string name = name_of(op);
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const Stack given(stack->end() - static_cast<std::ptrdiff_t>(arguments.size()), stack->end());
  ShardedTensor like;
  for_each_sharded(op, *stack, [&](size_t, const ShardedTensor& tensor) {
    if (!like.defined()) like = tensor;
  });
  TESSERA_CHECK(like.defined(), name, ": on_local_shards was called without a sharded tensor.");

  // The arguments of each call: one for each local tensor.
  const std::vector<at::Tensor> locals = like.local_tensors();
  std::vector<Stack> calls(locals.size(), given);
  for (const size_t i : c10::irange(arguments.size())) {
    TESSERA_CHECK(!given[i].isTensorList(), name,
                  ": on_local_shards is not for operators on lists of tensors.");
    if (!given[i].isTensor() || !given[i].toTensor().defined()) continue;
    const at::Tensor& tensor = given[i].toTensor();
    if (ShardedTensor::is_sharded_tensor(tensor)) {
      const auto locals = local_tensors_as(like.metadata().shards_metadata, tensor, name);
      for (const size_t call : c10::irange(calls.size())) calls[call][i] = locals[call];
    } else {
      TESSERA_CHECK(tensor.numel() == 1 && tensor.dim() <= like.dim(), name, ": argument '",
                    arguments[i].name(), "' is a plain tensor of size ", tensor.sizes(),
                    ", beside a sharded one of size ", like.sizes(),
                    ": shard it likewise with shard_tensor. Only of one element may it be plain.");
    }
  }
  std::vector<std::vector<at::Tensor>> results(returns.size());
  for (const size_t call : c10::irange(calls.size())) {
    op.callBoxed(calls[call]);
    for (const size_t i : c10::irange(returns.size())) {
      TESSERA_CHECK(calls[call][i].isTensor() && calls[call][i].toTensor().sizes() == locals[call].sizes(),
                    name,
                    ": on_local_shards is for operators whose results are tensors of the size of their "
                    "arguments.");
      results[i].push_back(calls[call][i].toTensor());
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (const size_t i : c10::irange(returns.size())) {
    const auto* written = returns[i].alias_info();
    size_t self = arguments.size();  // the argument that is returned, if one is
    for (size_t j = 0; written && written->isWrite() && j < arguments.size(); ++j) {
      if (arguments[j].alias_info() && *arguments[j].alias_info() == *written) self = j;
    }
    if (self < arguments.size()) {
      stack->push_back(given[self]);
    } else {
      for (at::Tensor& result : results[i]) result = result.contiguous();
      stack->emplace_back(at::Tensor(with_local_tensors(like, std::move(results[i]))));
    }
  }
}

}  // namespace tessera::sharded
