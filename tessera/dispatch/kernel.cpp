#include <tessera/comm/collectives.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/error.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/overlap.h>
#include <tessera/redistribute/plan.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

/// The one kernel that all operators on distributed tensors reach: one pass over the arguments finds the
/// distributed ones and forms the key of the call; its recipe comes from a cache, or is made from the
/// operator's rule; then the operator runs on local tensors, and its results are wrapped.
namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

/// A distributed tensor among the arguments of a call.
struct Argument {
  uint32_t position;  // among the arguments
  bool written;
  bool moved = false;  // `local` does not share the tensor's memory
  at::Tensor tensor;   // the distributed one
  at::Tensor local;    // what the operator gets instead

  DTensorImpl& impl() const { return *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl()); }
  const Spec& spec() const { return impl().spec(); }
};

/// How a local tensor gets to where the operator needs it.
struct Way {
  Plan plan;
  /// Where the part that is kept begins, if nothing else has to be done: then it is a view.
  std::optional<c10::DimVector> slice = {};
};

/// How to carry out calls with one key.
struct Recipe {
  std::vector<Spec> inputs;   // of the call: keeps them alive, as their addresses are in the key
  bool by_rule = false;       // else on replicas
  rules::Decision decision;   // by_rule
  std::vector<Way> ways;      // of each input
  IValue local_sizes;         // what to put for decision.sizes_argument
  std::vector<Spec> outputs;  // of the last call, likely to be those of the next
};

std::atomic<size_t> cache_capacity{4096};

using RecipeCache = LeastRecentlyUsed<std::shared_ptr<Recipe>>;

RecipeCache& cache() {
  // Looked up through a plain pointer: an object with a destructor would be asked each time whether it exists
  // yet.
  thread_local RecipeCache* known = nullptr;
  if (!known) [[unlikely]] {
    thread_local RecipeCache instance(cache_capacity);
    known = &instance;
  }
  return *known;
}

/// The kernel of one operator, and what is known of it beforehand.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op)
      : schema_(op.schema()),
        name_(schema_.overload_name().empty() ? schema_.name()
                                              : schema_.name() + "." + schema_.overload_name()),
        is_random_(op.hasTag(at::Tag::nondeterministic_seeded)),
        reshapes_in_place_((op.hasTag(at::Tag::inplace_view) && name_ != "aten::detach_") ||
                           name_.starts_with("aten::resize") || name_.starts_with("aten::set_")),
        // Replicas must get the same random numbers, so these are drawn once for all.
        rule_(is_random_ ? nullptr : rules::find_rule(name_, op.hasTag(at::Tag::pointwise))) {
    for (const c10::Argument& argument : schema_.arguments()) written_.push_back(is_written(argument));
    for (const c10::Argument& result : schema_.returns()) {
      int64_t position = -1;
      for (const size_t i : c10::irange(schema_.arguments().size())) {
        const auto* given = schema_.arguments()[i].alias_info();
        if (is_written(result) && given && *given == *result.alias_info()) position = static_cast<int64_t>(i);
      }
      returned_argument_.push_back(position);
      is_view_.push_back(result.alias_info() && !is_written(result));
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  friend class OperatorCall;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const bool is_random_;
  const bool reshapes_in_place_;
  const rules::Rule* const rule_;
  std::vector<bool> written_;  // by argument
  std::vector<int64_t>
      returned_argument_;      // by result: the argument that is written and returned as it, or -1
  std::vector<bool> is_view_;  // by result
};

/// One call of one operator on distributed tensors.
class OperatorCall {
 public:
  OperatorCall(const Kernel& kernel, const c10::OperatorHandle& op, Stack& stack)
      : kernel_(kernel),
        op_(op),
        schema_(kernel.schema_),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    collect();
    if (const auto* known = cache().find(key_)) {
      recipe_ = *known;
    } else {
      check();
      recipe_ = std::make_shared<Recipe>(make_recipe());
      cache().insert(key_, recipe_);
    }
    for (const size_t i : c10::irange(arguments_.size())) place(arguments_[i], recipe_->ways[i]);
    if (recipe_->decision.sizes_argument) argument(*recipe_->decision.sizes_argument) = recipe_->local_sizes;
    substitute();
    op_.callBoxed(stack_);
    for (Argument& argument : arguments_) {
      if (argument.written) write_back(argument);
    }
    wrap();
  }

 private:
  IValue& argument(size_t position) { return stack_[first_ + position]; }
  const DeviceMesh& mesh() const { return arguments_[0].spec().mesh(); }
  Placements replicated() const { return Placements(mesh().ndim(), Replicate()); }
  const std::string& name_of(size_t position) const { return schema_.arguments()[position].name(); }

  // --- the pass over the arguments
  // -----------------------------------------------------------------------------------------

  /// Marks in the key of what is not a distributed tensor.
  enum Mark : uint64_t { kUndefined = 1, kPlain = 2, kList = 3, kValue = 4 };

  void collect() {
    key_.push_back(reinterpret_cast<uint64_t>(&kernel_));
    const bool values_matter = kernel_.rule_ && kernel_.rule_->reads_arguments;
    const size_t count = schema_.arguments().size();
    for (const size_t i : c10::irange(count)) {
      IValue& value = argument(i);
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        // A distributed one is taken from the stack, where a local one will be put in its place.
        tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(i, std::move(value).toTensor())
                                                    : add_other(i, tensor);
      } else if (value.isTensorList()) {
        has_lists_ = true;
        key_.push_back(kList);
        for (const at::Tensor& tensor : value.toTensorVector()) add(i, tensor);
      } else if (is_optional_tensor_list(value)) {
        has_lists_ = true;
        key_.push_back(kList);
        for (const IValue& item : value.toListRef()) {
          if (item.isTensor()) add(i, item.toTensor());
        }
      } else if (values_matter) {
        add_value(value);
      }
    }
    for (const auto& [position, tensor] : plain_) check_plain(position, tensor);
  }

  static bool is_optional_tensor_list(const IValue& value) {
    return value.isList() &&
           value.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::OptionalType;
  }

  void add(size_t position, const at::Tensor& tensor) {
    tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(position, tensor)
                                                : add_other(position, tensor);
  }

  void add_distributed(size_t position, at::Tensor tensor) {
    const auto& impl = *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
    key_.push_back(reinterpret_cast<uint64_t>(impl.spec().id()));
    const bool written = kernel_.written_[position];
    if (written && impl.is_detached_view()) [[unlikely]]
      refuse_detached_view(position, impl.spec());
    arguments_.push_back({static_cast<uint32_t>(position), written, false, std::move(tensor), impl.local()});
  }

  void add_other(size_t position, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      key_.push_back(kUndefined);
      return;
    }
    key_.push_back(kPlain | static_cast<uint64_t>(tensor.dim()) << 8 |
                   static_cast<uint64_t>(tensor.scalar_type()) << 32);
    plain_.emplace_back(position, tensor);
  }

  void add_value(const IValue& value) {
    key_.push_back(kValue);
    if (value.isNone()) return;
    if (value.isInt()) {
      key_.push_back(static_cast<uint64_t>(value.toInt()));
    } else if (value.isBool()) {
      key_.push_back(value.toBool());
    } else if (value.isIntList()) {
      const auto items = value.toListRef();
      key_.push_back(items.size());
      for (const IValue& item : items) key_.push_back(static_cast<uint64_t>(item.toInt()));
    }
  }

  /// What the specs alone tell, so that it is known to be right for all calls with this key.
  void check() const {
    TESSERA_CHECK(!kernel_.reshapes_in_place_, kernel_.name_,
                  ": the shape of a distributed tensor cannot be changed in place. Use "
                  "the operator that returns a new tensor, as in x = x.squeeze(0).");
    TESSERA_CHECK(!arguments_.empty(), kernel_.name_,
                  ": was dispatched to Tessera without a distributed tensor.");
    for (const Argument& argument : arguments_) {
      const DeviceMesh& other = argument.spec().mesh();
      TESSERA_CHECK_VALUE(other == mesh(), kernel_.name_, ": argument '", name_of(argument.position),
                          "' is on ", other, " of ranks ", c10::IntArrayRef(other.ranks()), ", but '",
                          name_of(arguments_[0].position), "' is on ", mesh(), " of ranks ",
                          c10::IntArrayRef(mesh().ranks()),
                          ". All distributed tensors of an operator must be on the same mesh: gather one "
                          "with full_tensor() and "
                          "distribute it anew.");
    }
    TESSERA_CHECK(mesh().is_member(), kernel_.name_, ": rank ", mesh().get_rank(), " is not in ", mesh(),
                  " of ranks ", c10::IntArrayRef(mesh().ranks()),
                  ", so it cannot compute on tensors there; ask mesh.is_member() first.");
  }

  void check_plain(size_t position, const at::Tensor& tensor) const {
    TESSERA_CHECK_VALUE(!kernel_.written_[position] && may_be_plain(tensor), kernel_.name_, ": argument '",
                        name_of(position), "' is a plain tensor of shape ", tensor.sizes(),
                        " among distributed ones",
                        arguments_.empty() ? "" : c10::str(" (", arguments_[0].spec(), ")"),
                        ". Distribute it with distribute_tensor or DTensor::from_local, or, if it is only "
                        "read and the same on "
                        "all ranks, keep a tessera::ImplicitReplicationGuard alive around the call.");
  }

  /// A number, or the same on all ranks: because the user says so, or because a formula of autograd made it
  /// (zeros for a gradient that is not there).
  static bool may_be_plain(const at::Tensor& tensor) {
    return tensor.dim() == 0 || implicit_replication() || torch::autograd::get_current_graph_task_id() != -1;
  }

  [[noreturn]] void refuse_detached_view(size_t position, const Spec& spec) const {
    throw c10::Error(
        c10::str(
            kernel_.name_, ": argument '", name_of(position),
            "' is a view that could not share the memory of its base, as it takes communication to make (",
            spec, "). Writing into it would be lost. Write into the base, or into a clone() of the view."),
        /*backtrace=*/nullptr);
  }

  // --- what to do
  // ----------------------------------------------------------------------------------------------------------

  Recipe make_recipe() const {
    Recipe recipe;
    for (const Argument& argument : arguments_) recipe.inputs.push_back(argument.spec());
    if (auto decision = decide()) {
      recipe.by_rule = true;
      recipe.decision = *std::move(decision);
    }
    for (const size_t i : c10::irange(arguments_.size())) {
      const Spec& from = recipe.inputs[i];
      const Spec to = recipe.by_rule ? from.with_placements(recipe.decision.inputs[i], recipe.decision.order)
                                     : from.with_placements(replicated());
      recipe.ways.push_back(way(from, to));
    }
    if (recipe.by_rule && recipe.decision.sizes_argument) {
      const rules::Decision& decision = recipe.decision;
      recipe.local_sizes = Spec(mesh(), decision.output, decision.output_shape, std::nullopt,
                                recipe.inputs[0].dtype(), decision.order)
                               .local_shape()
                               .vec();
    }
    return recipe;
  }

  static Way way(const Spec& from, const Spec& to) {
    Way result{plan(from, to)};
    const auto& steps = result.plan.steps;
    if (steps.empty() || std::any_of(steps.begin(), steps.end(),
                                     [](const Step& step) { return step.kind != StepKind::slice; })) {
      return result;
    }
    const auto held = from.local_pieces(), kept = to.local_pieces();
    c10::DimVector offsets;
    for (const size_t dim : c10::irange(held.size())) {
      const Pieces places = overlap(held[dim], kept[dim]).in_a;
      if (places.size() != 1) return result;
      offsets.push_back(places[0].offset);
    }
    result.slice = std::move(offsets);
    return result;
  }

  std::optional<rules::Decision> decide() const {
    const bool plain_is_scalar =
        std::all_of(plain_.begin(), plain_.end(), [](const auto& plain) { return plain.second.dim() == 0; });
    if (!kernel_.rule_ || has_lists_ || !plain_is_scalar) return std::nullopt;
    rules::Call call;
    for (const size_t i : c10::irange(arguments_.size())) {
      call.tensors.push_back(arguments_[i].spec());
      if (arguments_[i].written) call.written = i;
    }
    call.has_plain = !plain_.empty();
    call.arguments = c10::ArrayRef<IValue>(stack_.data() + first_, schema_.arguments().size());
    return kernel_.rule_->decide(call);
  }

  // --- doing it
  // ------------------------------------------------------------------------------------------------------------

  void place(Argument& argument, const Way& way) {
    if (way.plan.steps.empty()) return;
    if (implicit_communication() != ImplicitCommunication::allowed && way.plan.communicates())
      report(argument, way.plan);
    argument.local = way.slice ? sliced(argument.local, way) : execute(way.plan, argument.local);
    argument.moved = true;
    if (argument.written && argument.local.is_alias_of(argument.impl().local()))
      argument.local = argument.local.clone();
  }

  static at::Tensor sliced(const at::Tensor& local, const Way& way) {
    int64_t offset = local.storage_offset();
    for (const size_t dim : c10::irange(way.slice->size()))
      offset += (*way.slice)[dim] * local.strides()[dim];
    return local.as_strided(way.plan.to.local_shape(), local.strides(), offset);
  }

  void report(const Argument& argument, const Plan& way) const {
    const std::string what =
        c10::str(kernel_.name_, ": argument '", name_of(argument.position), "' has to be redistributed from ",
                 way.from, " to ", c10::ArrayRef<Placement>(way.to.placements()),
                 ". Do it with redistribute() before the call, or choose placements that need none.");
    TESSERA_CHECK(implicit_communication() != ImplicitCommunication::forbidden, what);
    TORCH_WARN(what);
  }

  void substitute() {
    size_t next = 0;
    auto take = [&]() -> at::Tensor {
      Argument& argument = arguments_[next++];
      return argument.written ? argument.local : std::move(argument.local);
    };
    auto local = [&](const at::Tensor& tensor) {
      return tensor.defined() && DTensorImpl::of(tensor) ? take() : tensor;
    };
    for (const size_t i : c10::irange(schema_.arguments().size())) {
      if (next == arguments_.size()) return;
      if (arguments_[next].position != i) continue;
      IValue& value = argument(i);
      if (value.isNone()) {
        value = take();
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = local(tensor);
        value = std::move(tensors);
      } else {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const IValue& item : value.toListRef()) {
          tensors.push_back(item.isTensor() ? std::optional(local(item.toTensor())) : std::nullopt);
        }
        value = std::move(tensors);
      }
    }
  }

  void write_back(Argument& argument) {
    const Spec& spec = argument.spec();
    const c10::IntArrayRef shape = argument.moved ? spec.shape() : spec.local_shape();
    TESSERA_CHECK(argument.local.sizes() == shape, kernel_.name_, ": would change the shape of '",
                  name_of(argument.position), "' from ", shape, " to ", argument.local.sizes(),
                  ", which a distributed tensor cannot do in place.");
    if (kernel_.is_random_) same_on_all_ranks(argument.local);
    if (!argument.moved) return;
    argument.impl().local().copy_(execute(plan(spec.with_placements(replicated()), spec), argument.local));
  }

  /// Random numbers drawn on each rank would differ: those of the first rank count.
  void same_on_all_ranks(const at::Tensor& replica) const {
    if (mesh().size() == 1) return;
    std::vector<MeshDim> all;
    for (const int64_t dim : c10::irange(mesh().ndim())) all.emplace_back(dim);
    comm::broadcast(replica, 0, mesh().get_group(all)).wait();
  }

  // --- results
  // -------------------------------------------------------------------------------------------------------------

  void wrap() {
    const size_t count = schema_.returns().size();
    const size_t first = stack_.size() - count;
    for (const size_t i : c10::irange(count)) {
      IValue& value = stack_[first + i];
      const int64_t returned = kernel_.returned_argument_[i];
      const auto argument =
          std::find_if(arguments_.begin(), arguments_.end(),
                       [&](const Argument& candidate) { return candidate.position == returned; });
      if (argument != arguments_.end()) {
        value = argument->tensor;
      } else if (value.isTensor()) {
        value = wrapped(std::move(value).toTensor(), i);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = wrapped(std::move(tensor), i);
        value = std::move(tensors);
      }
    }
  }

  at::Tensor wrapped(at::Tensor local, size_t index) {
    if (!local.defined()) return local;
    if (kernel_.is_random_) same_on_all_ranks(local);
    const Spec& spec = output_spec(local);
    const bool is_detached = kernel_.is_view_[index] && !shares_memory(local);
    at::Tensor result = make_dtensor(std::move(local), spec);
    if (is_detached) DTensorImpl::of(result)->mark_detached_view();
    return result;
  }

  const Spec& output_spec(const at::Tensor& local) {
    const size_t number = next_output_++;
    auto& known = recipe_->outputs;
    if (number < known.size() && known[number].dtype() == local.scalar_type() &&
        known[number].local_shape() == local.sizes() &&
        (recipe_->by_rule || known[number].strides() == local.strides())) {
      return known[number];
    }
    if (number >= known.size()) known.resize(number + 1);
    return known[number] = make_output_spec(local);
  }

  Spec make_output_spec(const at::Tensor& local) const {
    if (!recipe_->by_rule)
      return Spec(mesh(), replicated(), local.sizes(), local.strides(), local.scalar_type());
    const rules::Decision& decision = recipe_->decision;
    c10::OptionalIntArrayRef strides;
    if (!decision.output_strides.empty()) strides = decision.output_strides;
    Spec spec(mesh(), decision.output, decision.output_shape, strides, local.scalar_type(), decision.order);
    TESSERA_CHECK(spec.local_shape() == local.sizes(), kernel_.name_, ": its sharding rule is wrong: rank ",
                  mesh().get_rank(), " got ", local.sizes(), " where the rule says ", spec,
                  ". This is a fault of Tessera; please report it.");
    return spec;
  }

  bool shares_memory(const at::Tensor& local) const {
    return std::any_of(arguments_.begin(), arguments_.end(), [&](const Argument& argument) {
      return !argument.moved && local.is_alias_of(argument.impl().local());
    });
  }

  const Kernel& kernel_;
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const size_t first_;
  CacheKey key_;
  c10::SmallVector<Argument, 4> arguments_;
  c10::SmallVector<std::pair<size_t, at::Tensor>, 1> plain_;
  bool has_lists_ = false;
  std::shared_ptr<Recipe> recipe_;
  size_t next_output_ = 0;
};

void Kernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  OperatorCall(*this, op, *stack).run();
}

/// Of operators that are registered after us.
void late_kernel(const c10::OperatorHandle& op, Stack* stack) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Kernel>> kernels;
  const Kernel* kernel = nullptr;
  {
    std::lock_guard lock(mutex);
    auto& known = kernels[c10::toString(op.operator_name())];
    if (!known) known = std::make_unique<Kernel>(op);
    kernel = known.get();
  }
  OperatorCall(*kernel, op, *stack).run();
}

/// libtorch makes the zeros that this begins with as a plain tensor.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool is_reduced = !keepdim && !sizes.empty();
  const at::Tensor zeros = grad.new_zeros_symint(sizes);
  return is_reduced ? zeros.scatter(dim, indices.unsqueeze(dim), grad.unsqueeze(dim))
                    : zeros.scatter(dim, indices, grad);
}

/// At load: a kernel for every operator that does not decompose by itself, and for all that other libraries
/// add later. (A fallback alone is not enough: libtorch's composite kernels would be preferred to it.)
class Registration {
 public:
  Registration() {
    auto& dispatcher = c10::Dispatcher::singleton();
    constexpr auto key = c10::DispatchKey::PrivateUse3;
    handles_.push_back(dispatcher.registerFallback(
        key, c10::KernelFunction::makeFromBoxedFunction<&late_kernel>(), "tessera"));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
        continue;
      }
      handles_.push_back(dispatcher.registerImpl(
          name, key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)), std::nullopt,
          nullptr, "tessera"));
    }
    // Operators of other libraries that say nothing of autograd: as libtorch does for the backends it knows.
    all_.fallback(torch::autograd::basicAutogradNotImplementedFallback());
    aten_.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  }

 private:
  std::vector<c10::RegistrationHandleRAII> handles_;
  torch::Library all_{torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__};
  torch::Library aten_{torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__,
                       __LINE__};
};

/// Never undone: tensors in static variables may outlive any order of destruction.
[[maybe_unused]] const Registration& registration = *new Registration;

}  // namespace

CacheStatistics dispatch_cache_statistics() { return cache().statistics(); }

void set_dispatch_cache_capacity(size_t capacity) {
  cache_capacity = capacity;
  cache().set_capacity(capacity);
}

}  // namespace tessera
