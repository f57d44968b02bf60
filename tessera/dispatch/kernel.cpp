#include <tessera/comm/collectives.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/refusal.h>
#include <tessera/dispatch/register.h>
#include <tessera/error.h>
#include <tessera/random/generator.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/overlap.h>
#include <tessera/redistribute/plan.h>
#include <tessera/rules/choose.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/forward_grad.h>
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
  bool in_list;
  bool moved = false;  // `local` does not share the tensor's memory
  at::Tensor tensor;   // the distributed one
  at::Tensor local;    // what the operator gets instead

  DTensorImpl& impl() const { return *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl()); }
  const Spec& spec() const { return impl().spec(); }
};

/// How a local tensor gets to where the operator needs it.
struct Way {
  Plan plan;
  /// Where the part that is kept begins, if nothing else has to be done and the operator may be given a view.
  std::optional<c10::DimVector> slice = {};
  /// Of a tensor that is written: the way back.
  std::optional<Plan> back = {};
};

/// How to carry out calls with one key.
struct Recipe {
  std::vector<Spec> inputs;  // of the call: keeps them alive, as their addresses are in the key
  bool by_rule = false;      // else on replicas
  rules::Decision decision;  // by_rule
  bool is_special = false;   // by_rule: see there
  bool in_doubt = false;     // on replicas, as the operator may refuse arguments that need not be in the key
  bool asks_dtypes = false;  // by_rule, on this rank: see check_dtypes_as_first_rank
  bool refuses_together = false;  // by_rule: see compute_or_refuse_together
  std::vector<Way> ways;          // of each input
  std::vector<Spec> outputs;      // of the last call, likely to be those of the next
  std::vector<int64_t> offsets;   // by_rule, of an operator that returns views: see view_offsets
};

std::atomic<size_t> cache_capacity{4096};

using RecipeCache = LeastRecentlyUsed<std::shared_ptr<Recipe>>;

RecipeCache& cache() {
  // Looked up through a plain pointer: an object with a destructor would be asked each time whether it exists
  // yet.
  thread_local RecipeCache* known = nullptr;
  thread_local uint64_t version = 0;
  if (!known) [[unlikely]] {
    thread_local RecipeCache instance(cache_capacity);
    known = &instance;
  }
  if (version != rules::registry_version()) [[unlikely]] {
    version = rules::registry_version();
    known->clear();
  }
  return *known;
}

Placements replicated(const DeviceMesh& mesh) { return Placements(mesh.ndim(), Replicate()); }

/// What there is to know of an operator that depends on the rules there are.
struct Resolved {
  uint64_t version;
  const rules::Rule* rule;  // or null
  std::vector<bool> reads;  // by argument: whether the rule does
};

/// The kernel of one operator, and what is known of it beforehand.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op)
      : schema_(op.schema()),
        name_(schema_.overload_name().empty() ? schema_.name()
                                              : schema_.name() + "." + schema_.overload_name()),
        is_random_(op.hasTag(at::Tag::nondeterministic_seeded)),
        is_pointwise_(op.hasTag(at::Tag::pointwise)),
        is_composite_(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                      !rules::find_rule(name_, false)),
        reshapes_in_place_(op.hasTag(at::Tag::inplace_view) && name_ != "aten::detach_"),
        reallocates_(name_.starts_with("aten::resize") || name_.starts_with("aten::set_")),
        is_as_strided_(name_ == "aten::as_strided"),
        is_cast_(name_ == "aten::_to_copy"),
        is_loss_(name_.starts_with("aten::nll_loss") || name_.starts_with("aten::_softmax") ||
                 name_.starts_with("aten::_log_softmax")) {
    for (const c10::Argument& argument : schema_.arguments()) {
      if (argument.name() == "generator") generator_ = written_.size();
      written_.push_back(is_written(argument));
      has_holes_.push_back(argument.type()->kind() == c10::TypeKind::ListType &&
                           argument.type()->expectRef<c10::ListType>().getElementType()->kind() ==
                               c10::TypeKind::OptionalType);
      has_out_ |= argument.is_out();
    }
    for (const c10::Argument& result : schema_.returns()) {
      int64_t position = -1;
      for (const size_t i : c10::irange(schema_.arguments().size())) {
        const auto* given = schema_.arguments()[i].alias_info();
        if (is_written(result) && given && *given == *result.alias_info()) position = static_cast<int64_t>(i);
      }
      returned_argument_.push_back(position);
      is_view_.push_back(result.alias_info() && !is_written(result));
      has_views_ |= is_view_.back();
    }
    const std::lock_guard lock(all_mutex());
    all().push_back(this);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

  const std::string& name() const { return name_; }
  uint64_t fallbacks() const { return fallbacks_; }
  uint64_t copies() const { return copies_; }

  /// All kernels there are. Hold the mutex.
  static std::vector<const Kernel*>& all() {
    static auto& kernels = *new std::vector<const Kernel*>;
    return kernels;
  }
  static std::mutex& all_mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }

 private:
  friend class OperatorCall;

  const Resolved& resolved() const {
    const Resolved* known = resolved_.load(std::memory_order_acquire);
    if (known && known->version == rules::registry_version()) [[likely]]
      return *known;
    return resolve();
  }

  const Resolved& resolve() const {
    const std::lock_guard lock(mutex_);
    auto result = std::make_unique<Resolved>();
    result->version = rules::registry_version();
    result->rule = rules::find_rule(name_, is_pointwise_);
    if (is_random_ && result->rule && !result->rule->for_random) result->rule = nullptr;
    for (const c10::Argument& argument : schema_.arguments()) {
      result->reads.push_back(result->rule &&
                              std::find(result->rule->reads.begin(), result->rule->reads.end(),
                                        argument.name()) != result->rule->reads.end());
    }
    resolved_.store(result.get(), std::memory_order_release);
    return *kept_.emplace_back(std::move(result));  // the one before may still be in use
  }

  /// The operator that returns new tensors instead of writing into arguments.
  const c10::OperatorHandle* functional() const {
    const std::lock_guard lock(mutex_);
    if (!searched_functional_) functional_ = find_functional();
    searched_functional_ = true;
    return functional_ ? &*functional_ : nullptr;
  }

  std::optional<c10::OperatorHandle> find_functional() const {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto fits = [&](const c10::OperatorHandle& op) {
      const auto& others = op.schema().arguments();
      size_t next = 0;
      for (const c10::Argument& argument : schema_.arguments()) {
        if (argument.is_out()) continue;
        if (next == others.size() || others[next].name() != argument.name() || is_written(others[next]) ||
            *others[next].type() != *argument.type())
          return false;
        ++next;
      }
      return next == others.size() && op.schema().returns().size() == schema_.returns().size();
    };
    std::string base = schema_.name();
    if (!has_out_) {
      if (!base.ends_with('_')) return std::nullopt;
      base.pop_back();
    }
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.name != base) continue;
      const auto op = dispatcher.findSchema(name);
      if (op && fits(*op)) return op;
    }
    return std::nullopt;
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  const bool is_random_;
  const bool is_pointwise_;
  const bool is_composite_;
  const bool reshapes_in_place_;
  const bool reallocates_;
  const bool is_as_strided_;
  const bool is_cast_;
  const bool is_loss_;
  std::optional<size_t> generator_;  // which argument is one
  bool has_out_ = false;
  bool has_views_ = false;
  std::vector<bool> written_;    // by argument
  std::vector<bool> has_holes_;  // by argument: a list of tensors that may be missing
  std::vector<int64_t>
      returned_argument_;      // by result: the argument that is written and returned as it, or -1
  std::vector<bool> is_view_;  // by result
  mutable std::atomic<uint64_t> fallbacks_{0};
  mutable std::atomic<uint64_t> copies_{0};

  mutable std::atomic<const Resolved*> resolved_{nullptr};
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const Resolved>> kept_;
  mutable bool searched_functional_ = false;
  mutable std::optional<c10::OperatorHandle> functional_;
};

/// While it lives, operators are called as parts of another one, whose name users know.
class Part {
 public:
  explicit Part(const std::string& whole) : previous_(whole_) {
    if (!whole_) whole_ = &whole;
  }
  ~Part() { whole_ = previous_; }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  /// Null if they are not.
  static const std::string* whole() { return whole_; }

 private:
  inline static thread_local const std::string* whole_ = nullptr;
  const std::string* previous_;
};

/// One call of one operator on distributed tensors.
class OperatorCall {
 public:
  OperatorCall(const Kernel& kernel, const c10::OperatorHandle& op, Stack& stack)
      : kernel_(kernel),
        resolved_(kernel.resolved()),
        op_(op),
        schema_(kernel.schema_),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (kernel_.reallocates_ && run_reallocation()) [[unlikely]]
      return;
    const bool by_functional =
        (kernel_.has_out_ || kernel_.reshapes_in_place_) && kernel_.functional() != nullptr;
    if (kernel_.is_composite_ && !by_functional) [[unlikely]]
      return op_.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack_);
    // The arguments are cast already. What is computed of them here is not to be cast again.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (by_functional) [[unlikely]]
      return run_functional();
    if (kernel_.is_as_strided_) [[unlikely]]
      offset_from_self();
    if (kernel_.is_cast_) [[unlikely]]
      check_not_in_cast_cache();
    collect();
    if (!with_dims_.empty()) [[unlikely]]
      replicate_plain();
    run_collected();
  }

 private:
  void run_collected() {
    RecipeCache& recipes = cache();
    if (const auto* known = recipes.find(key_)) {
      recipe_ = *known;
    } else {
      if (unify_meshes()) return run_collected();
      check();
      recipe_ = std::make_shared<Recipe>(make_recipe());
      if (!recipe_->in_doubt) recipes.insert(key_, recipe_);
    }
    const rules::Decision& decision = recipe_->decision;
    if (recipe_->is_special) [[unlikely]] {
      const bool by_functional = writes() && !decision.local.writes;
      if (decision.decompose || (decision.has_local && by_functional)) {
        restore();
        const Part part(kernel_.name_);
        return by_functional ? run_functional() : replace(decision.decompose);
      }
      if (decision.local.communicates && implicit_communication() != ImplicitCommunication::allowed)
        report(c10::str("has to move data between ranks", described_cuts()));
    }
    if (!recipe_->by_rule) kernel_.fallbacks_.fetch_add(1, std::memory_order_relaxed);
    for (const size_t i : c10::irange(arguments_.size())) place(arguments_[i], recipe_->ways[i]);
    if (kernel_.has_views_ && !(recipe_->by_rule && !decision.local.detached && !arguments_[0].moved))
        [[unlikely]]
      values_.assign(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    if (kernel_.has_views_ && !recipe_->by_rule) [[unlikely]]
      recipe_->offsets = view_offsets();
    Stack given;
    if (recipe_->asks_dtypes) [[unlikely]]
      given = given_arguments();
    for (const auto& [position, value] : decision.local.arguments) argument(position) = value;
    substitute();
    if (kernel_.is_random_ && !recipe_->by_rule && kernel_.generator_) [[unlikely]]
      seed(argument(*kernel_.generator_));
    const auto compute = [&] {
      if (recipe_->asks_dtypes) [[unlikely]] {
        check_dtypes_as_first_rank(op_, given, decision.inputs);
        recipe_->asks_dtypes = false;
      }
      decision.local.compute ? replace(decision.local.compute) : op_.callBoxed(stack_);
    };
    if (recipe_->refuses_together) [[unlikely]] {
      compute_or_refuse_together(kernel_.name_, mesh(), compute);
    } else {
      compute();
    }
    if (decision.local.sized) [[unlikely]]
      take_shapes();
    for (const size_t i : c10::irange(arguments_.size())) {
      if (arguments_[i].written) write_back(arguments_[i], recipe_->ways[i]);
    }
    wrap();
  }

  /// Autocast casts float32 leaves with its cache locked, which is one for the process: to wait for other
  /// ranks there, threads of the same process, would be to wait for ever. `run` therefore turns the cache
  /// off; this is for those who turned it on.
  void check_not_in_cast_cache() const {
    const at::Tensor& tensor = stack_[first_].toTensor();
    const auto* impl = DTensorImpl::of(tensor);
    if (!at::autocast::is_autocast_cache_enabled() || !impl || !impl->spec().has_partial() ||
        tensor.scalar_type() != at::kFloat || !tensor.requires_grad() || !tensor.is_leaf() ||
        !c10::impl::tls_is_dispatch_key_excluded(
            at::autocast::get_autocast_dispatch_key_from_device_type(tensor.device().type())) ||
        !has_current_world() || !current_world()->is_threads())
      return;
    TESSERA_CHECK(
        false, kernel_.name_, ": autocast cannot cast the parameter ", impl->spec(),
        " of partial values into its cache on ranks that are threads: it is one for the process, and is "
        "locked while their sum is formed. Leave out cache_enabled=True, or redistribute the parameter "
        "to Shard or Replicate.");
  }

  IValue& argument(size_t position) { return stack_[first_ + position]; }
  const DeviceMesh& mesh() const { return arguments_[0].spec().mesh(); }
  const std::string& name_of(size_t position) const { return schema_.arguments()[position].name(); }
  bool writes() const {
    return std::any_of(arguments_.begin(), arguments_.end(), [](const Argument& a) { return a.written; });
  }

  // --- the pass over the arguments
  // -----------------------------------------------------------------------------------------

  /// Marks in the key of what is not a distributed tensor.
  enum Mark : uint64_t { kUndefined = 1, kPlain = 2, kList = 3, kValue = 4 };

  void collect() {
    key_.push_back(reinterpret_cast<uint64_t>(&kernel_));
    const size_t count = schema_.arguments().size();
    for (const size_t i : c10::irange(count)) {
      IValue& value = argument(i);
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        // A distributed one is taken from the stack, where a local one will be put in its place.
        tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(i, std::move(value).toTensor(), false)
                                                    : add_other(i, tensor);
      } else if (value.isTensorList()) {
        key_.push_back(kList);
        for (const at::Tensor& tensor : value.toTensorVector()) add(i, tensor);
      } else if (kernel_.has_holes_[i]) {
        key_.push_back(kList);
        for (const IValue& item : value.toListRef()) add(i, item.isTensor() ? item.toTensor() : at::Tensor());
      } else if (resolved_.reads[i]) {
        add_value(value);
      }
    }
  }

  void add(size_t position, const at::Tensor& tensor) {
    tensor.defined() && DTensorImpl::of(tensor) ? add_distributed(position, tensor, true)
                                                : add_other(position, tensor);
  }

  void add_distributed(size_t position, at::Tensor tensor, bool in_list) {
    const auto& impl = *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
    key_.push_back(reinterpret_cast<uint64_t>(impl.spec().id()));
    const bool written = kernel_.written_[position];
    check_layout(impl.local(), impl.spec());
    arguments_.push_back(
        {static_cast<uint32_t>(position), written, in_list, false, std::move(tensor), impl.local()});
  }

  void add_other(size_t position, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      key_.push_back(kUndefined);
      return;
    }
    check_plain(position, tensor);
    const bool written =
        kernel_.written_[position] && implicit_replication() && !(tensor.dim() == 0 && is_itemwise());
    writes_plain_ |= written;
    key_.push_back(kPlain | static_cast<uint64_t>(tensor.scalar_type()) << 32 | uint64_t{written} << 16);
    if (tensor.dim() > 0 && !written) with_dims_.push_back(position);
  }

  void add_value(const IValue& value) {
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
      add(8, static_cast<uint64_t>(value.toDevice().type()) << 8 |
                 static_cast<uint8_t>(value.toDevice().index()));
    } else {
      TESSERA_CHECK(value.isList(), kernel_.name_, ": its sharding rule reads an argument of type ",
                    value.type()->str(), ", which cannot be part of a key.");
      const auto items = value.toListRef();
      add(9, items.size());
      for (const IValue& item : items) add_value(item);
    }
  }

  /// Puts the distributed tensors back where they were taken from.
  void restore() {
    for (Argument& each : arguments_) {
      if (!each.in_list) argument(each.position) = each.tensor;
    }
  }

  /// Plain tensors with dims that are the same everywhere become distributed ones, which are replicated.
  void replicate_plain() {
    TESSERA_CHECK(!arguments_.empty(), kernel_.name_,
                  ": was dispatched to Tessera without a distributed tensor.");
    const DeviceMesh mesh = this->mesh();
    const auto positions = std::exchange(with_dims_, {});
    collect_again(positions, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || DTensorImpl::of(tensor) || tensor.dim() == 0) return tensor;
      return replica(tensor, mesh);
    });
  }

  /// Numbers on other meshes than that of the first tensor with dims are brought there. Lists that are worked
  /// on item by item are left alone. Returns whether there were any.
  bool unify_meshes() {
    if (arguments_.empty()) return false;
    const auto with_dims = std::find_if(arguments_.begin(), arguments_.end(),
                                        [](const Argument& a) { return a.tensor.dim() > 0; });
    const DeviceMesh mesh = (with_dims == arguments_.end() ? arguments_.front() : *with_dims).spec().mesh();
    std::vector<size_t> positions;
    for (const Argument& each : arguments_) {
      if (each.tensor.dim() > 0 || each.written || (is_itemwise() && each.in_list) ||
          each.spec().mesh() == mesh)
        continue;
      if (positions.empty() || positions.back() != each.position) positions.push_back(each.position);
    }
    if (positions.empty()) return false;
    collect_again(positions, [&](const at::Tensor& tensor) {
      const DTensorImpl* impl = tensor.defined() ? DTensorImpl::of(tensor) : nullptr;
      if (!impl || tensor.dim() > 0 || impl->spec().mesh() == mesh) return tensor;
      const Spec& spec = impl->spec();
      return replica(execute(plan(spec, spec.with_placements(replicated(spec.mesh()))), impl->local()), mesh);
    });
    return true;
  }

  static at::Tensor replica(const at::Tensor& value, const DeviceMesh& mesh) {
    return make_dtensor(value,
                        Spec(mesh, replicated(mesh), value.sizes(), value.strides(), value.scalar_type()));
  }

  /// With the tensors at these positions replaced.
  template <class Replace>
  void collect_again(c10::ArrayRef<size_t> positions, const Replace& replacement) {
    restore();
    for (const size_t position : positions) {
      IValue& value = argument(position);
      if (value.isTensor()) {
        value = replacement(value.toTensor());
      } else {
        replace_items(value, replacement);
      }
    }
    arguments_.clear();
    key_.clear();
    collect();
  }

  /// Makes the list of tensors, which may have holes, a new one with each replaced.
  template <class Replace>
  static void replace_items(IValue& value, const Replace& replacement) {
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

  /// What the specs alone tell, so that it is known to be right for all calls with this key.
  void check() const {
    TESSERA_CHECK(!kernel_.reshapes_in_place_ && !kernel_.reallocates_, kernel_.name_,
                  ": the shape of a distributed tensor cannot be changed in place. Use "
                  "the operator that returns a new tensor, as in x = x.reshape(sizes).");
    TESSERA_CHECK(!arguments_.empty(), kernel_.name_,
                  ": was dispatched to Tessera without a distributed tensor.");
    if (!is_itemwise()) check_one_mesh();
    for (const Argument& argument : arguments_) {
      const DeviceMesh& mesh = argument.spec().mesh();
      TESSERA_CHECK(mesh.is_member(), kernel_.name_, ": rank ", mesh.get_rank(), " is not in ", mesh,
                    " of ranks ", c10::IntArrayRef(mesh.ranks()),
                    ", so it cannot compute on tensors there; ask mesh.is_member() first.");
    }
  }

  bool is_itemwise() const { return resolved_.rule && resolved_.rule->itemwise; }

  void check_one_mesh() const {
    for (const Argument& argument : arguments_) {
      const DeviceMesh& other = argument.spec().mesh();
      TESSERA_CHECK_VALUE(other == mesh(), kernel_.name_, ": argument '", name_of(argument.position),
                          "' is on ", other, " of ranks ", c10::IntArrayRef(other.ranks()), ", but '",
                          name_of(arguments_[0].position), "' is on ", mesh(), " of ranks ",
                          c10::IntArrayRef(mesh().ranks()),
                          ". All distributed tensors of an operator must be on the same mesh: gather one "
                          "with full_tensor() and distribute it anew.");
    }
  }

  void check_plain(size_t position, const at::Tensor& tensor) const {
    const bool written = kernel_.written_[position];
    // What is written under implicit replication is computed from replicas, so that it stays the same on all
    // ranks.
    if (written ? implicit_replication() : may_be_plain(position, tensor)) [[likely]]
      return;
    // A number that is written on every rank alike: computed from replicas, or beside the items of a list
    // (steps).
    if (tensor.dim() == 0 && (!resolved_.rule || is_itemwise())) return;
    TESSERA_CHECK_VALUE(
        false, kernel_.name_, ": argument '", name_of(position), "' is a plain tensor of shape ",
        tensor.sizes(), written ? ", to be written among distributed ones" : " among distributed ones",
        arguments_.empty() ? "" : c10::str(" (", arguments_[0].spec(), ")"),
        ". Distribute it with distribute_tensor or DTensor::from_local, ",
        written
            ? "or write what full_tensor() gives into it, or, if it is to have the same value on all ranks, "
            : "or, if it is the same on all ranks, ",
        "keep a tessera::ImplicitReplicationGuard alive around the call (in Python: with ",
        "tessera.experimental.implicit_replication()).");
  }

  /// A number, or the same on all ranks: because the user says so, because a formula of autograd made it
  /// (zeros for a gradient or a tangent that is not there), or because it is an index, as in x[[0, 2]].
  bool may_be_plain(size_t position, const at::Tensor& tensor) const {
    return tensor.dim() == 0 || kernel_.has_holes_[position] || implicit_replication() ||
           torch::autograd::get_current_graph_task_id() != -1 || is_missing_tangent(tensor);
  }

  /// Forward-mode AD makes these of one zero, expanded.
  static bool is_missing_tangent(const at::Tensor& tensor) {
    return std::all_of(tensor.strides().begin(), tensor.strides().end(),
                       [](int64_t stride) { return stride == 0; }) &&
           torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  }

  // --- what to do
  // ----------------------------------------------------------------------------------------------------------

  Recipe make_recipe() {
    Recipe recipe;
    for (const Argument& argument : arguments_) recipe.inputs.push_back(argument.spec());
    auto decided = decide_or_doubt(recipe.in_doubt);
    if (decided) recipe.in_doubt = may_refuse(*decided);
    if (decided && !recipe.in_doubt) {
      recipe.by_rule = true;
      recipe.decision = *std::move(decided);
      recipe.is_special = recipe.decision.is_special();
      if (recipe.decision.decompose) return recipe;
      recipe.asks_dtypes = !recipe.decision.has_local && !kernel_.is_random_ &&
                           may_refuse_dtypes_elsewhere(recipe.decision.inputs);
      recipe.refuses_together = sees_different_values(recipe.decision);
    } else {
      check_one_mesh();
    }
    if (kernel_.has_views_ && recipe.by_rule) recipe.offsets = view_offsets();
    const rules::Decision& decision = recipe.decision;
    for (const size_t i : c10::irange(arguments_.size())) {
      const Spec& from = recipe.inputs[i];
      recipe.ways.push_back(
          way(from, recipe.by_rule ? decision.inputs[i] : from.with_placements(replicated(from.mesh()))));
      if (!arguments_[i].written) continue;
      const Spec written =
          recipe.by_rule ? decision.written[i] : from.with_placements(replicated(from.mesh()));
      if (written != from) recipe.ways[i].back = plan(written, from);
    }
    return recipe;
  }

  Way way(const Spec& from, const Spec& to) const {
    Way result{plan(from, to)};
    const auto& steps = result.plan.steps;
    if (!resolved_.rule || !resolved_.rule->takes_slices || steps.empty() ||
        std::any_of(steps.begin(), steps.end(),
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

  /// Whether the operator may refuse what is computed in its place. The same on all ranks.
  bool may_refuse(const rules::Decision& decision) const {
    const rules::Rule& rule = *resolved_.rule;
    if (rule.itemwise || !(decision.has_local || decision.decompose)) return false;
    std::vector<at::ScalarType> dtypes;
    for (const Argument& each : arguments_) dtypes.push_back(each.spec().dtype());
    if (rule.may_refuse_dtypes && rule.may_refuse_dtypes(dtypes)) return true;
    const Stack all = given_arguments();
    if (kernel_.is_random_) {
      // On replicas the numbers would be others, so that doubts do not count.
      if (rule.can_be_tried && kernel_.generator_) check_dtypes(op_, all);
      return false;
    }
    return may_refuse_shapes(op_, all) || (rule.can_be_tried && may_refuse_dtypes(op_, all));
  }

  /// Whether some ranks alone may see values that the operator refuses: they hold different elements of
  /// these, or some hold nothing and do not look. The same on all ranks.
  bool sees_different_values(const rules::Decision& decision) const {
    const auto& names = resolved_.rule->checks_values_of;
    const auto is_argument = [&](const std::string& name) {
      return schema_.argumentIndexWithName(name).has_value();
    };
    if (!std::any_of(names.begin(), names.end(), is_argument) || decision.local.communicates ||
        !arguments_[0].tensor.is_cpu())
      return false;
    const auto is_integral = [](const Spec& spec) { return at::isIntegralType(spec.dtype(), false); };
    if (std::none_of(decision.inputs.begin(), decision.inputs.end(), is_integral)) return false;
    if (holds_nothing_somewhere(decision.inputs)) return true;
    for (const size_t i : c10::irange(arguments_.size())) {
      if (decision.inputs[i].is_sharded() &&
          std::find(names.begin(), names.end(), name_of(arguments_[i].position)) != names.end())
        return true;
    }
    return false;
  }

  /// Those of the call, before the distributed tensors among them are replaced.
  Stack given_arguments() const {
    Stack all(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    for (const Argument& each : arguments_) {
      if (!each.in_list) all[each.position] = each.tensor;
    }
    return all;
  }

  /// `in_doubt`: set where a rule of ours stumbles over an argument, of which the operator itself then says
  /// what is wrong.
  std::optional<rules::Decision> decide_or_doubt(bool& in_doubt) {
    try {
      return decide();
    } catch (const c10::ValueError&) {
      if (resolved_.rule->family.empty()) throw;
      in_doubt = true;
      return std::nullopt;
    }
  }

  std::optional<rules::Decision> decide() {
    if (!resolved_.rule || writes_plain_) return std::nullopt;
    rules::Call call;
    call.schema = &schema_;
    std::vector<int64_t> returned;
    for (const Argument& argument : arguments_) {
      call.tensors.push_back(argument.spec());
      call.positions.push_back(argument.position);
      call.written.push_back(argument.written);
      const auto& results = kernel_.returned_argument_;
      const auto found = std::find(results.begin(), results.end(), static_cast<int64_t>(argument.position));
      returned.push_back(found == results.end() || argument.in_list ? -1 : found - results.begin());
    }
    call.arguments = c10::ArrayRef<IValue>(stack_.data() + first_, schema_.arguments().size());
    call.readable = &resolved_.rule->reads;
    auto decision = rules::choose(*resolved_.rule, call, returned);
    // To compute otherwise and to write the result needs an operator that returns it.
    if (decision && (decision->decompose || decision->has_local) && writes() && !decision->local.writes &&
        !kernel_.functional())
      return std::nullopt;
    return decision;
  }

  // --- doing it
  // ------------------------------------------------------------------------------------------------------------

  void place(Argument& argument, const Way& way) {
    if (way.plan.steps.empty()) return;
    if (implicit_communication() != ImplicitCommunication::allowed &&
        (way.plan.communicates() || implicit_communication_is_strict())) {
      report(c10::str("argument '", name_of(argument.position), "' has to be redistributed from ",
                      way.plan.from, " to ", c10::ArrayRef<Placement>(way.plan.to.placements())));
    }
    if (kernel_.is_loss_ && loss_parallel()) check_not_gathered(argument, way);
    argument.local = way.slice ? sliced(argument.local, way) : execute(way.plan, argument.local);
    argument.moved = true;
    if (argument.written && argument.local.is_alias_of(argument.impl().local()))
      argument.local = argument.local.clone();
  }

  void check_not_gathered(const Argument& argument, const Way& way) const {
    const auto& steps = way.plan.steps;
    const bool gathers = std::any_of(steps.begin(), steps.end(), [](const Step& step) {
      return step.kind == StepKind::all_gather || step.kind == StepKind::all_to_all;
    });
    TESSERA_CHECK(
        !gathers, kernel_.name_, ": argument '", name_of(argument.position), "' would be gathered, from ",
        way.plan.from, " to ", c10::ArrayRef<Placement>(way.plan.to.placements()),
        ", which LossParallel forbids. Cut the targets as the samples of the logits, and weights as "
        "their classes.");
  }

  static at::Tensor sliced(const at::Tensor& local, const Way& way) {
    int64_t offset = local.storage_offset();
    for (const size_t dim : c10::irange(way.slice->size()))
      offset += (*way.slice)[dim] * local.strides()[dim];
    return local.as_strided(way.plan.to.local_shape(), local.strides(), offset);
  }

  std::string described_cuts() const {
    std::string text;
    for (const Argument& argument : arguments_) {
      if (argument.spec().is_sharded())
        text += c10::str(text.empty() ? ", as argument '" : ", and '", name_of(argument.position), "' is ",
                         argument.spec());
    }
    return text;
  }

  void report(const std::string& problem) const {
    const std::string what =
        c10::str(Part::whole() ? *Part::whole() + ", by " : "", kernel_.name_, ": ", problem,
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
      } else {
        replace_items(value, local);
      }
    }
  }

  /// Puts what the function makes of the arguments in their place.
  void replace(const rules::Function& function) {
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(first_);
    Stack arguments(std::make_move_iterator(begin), std::make_move_iterator(stack_.end()));
    stack_.erase(begin, stack_.end());
    for (IValue& result : function(op_, std::move(arguments))) stack_.push_back(std::move(result));
  }

  /// The shapes behind the results.
  void take_shapes() {
    const size_t count = schema_.returns().size();
    for (const size_t i : c10::irange(count))
      shapes_.push_back(stack_[stack_.size() - count + i].toIntVector());
    stack_.erase(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
  }

  /// What can be done of changing memory in place: to become another distributed tensor, or to stay as it is.
  bool run_reallocation() {
    const at::Tensor self = argument(0).toTensor();
    DTensorImpl* impl = DTensorImpl::of(self);
    if (kernel_.name_ == "aten::set_.source_Tensor") {
      const at::Tensor source = argument(1).toTensor();
      TESSERA_CHECK(impl && DTensorImpl::of(source), kernel_.name_, ": only a distributed tensor can become ",
                    "another distributed one, but '", impl ? "source" : "self",
                    "' is a plain tensor of shape ", impl ? source.sizes() : self.sizes(),
                    ". Distribute it with distribute_tensor first.");
      TESSERA_CHECK(self.scalar_type() == source.scalar_type(), kernel_.name_, ": 'source' is of type ",
                    source.scalar_type(), ", but 'self' of type ", self.scalar_type(), ".");
      if (!self.is_same(source)) impl->take(*DTensorImpl::of(source));
    } else if (!impl || kernel_.name_ != "aten::resize_" || !self.sizes().equals(argument(1).toIntVector()) ||
               !argument(2).isNone()) {
      return false;
    }
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(first_) + 1, stack_.end());
    return true;
  }

  /// By the operator that returns new tensors, whose results are then written into the arguments.
  void run_functional() {
    TESSERA_CHECK(!kernel_.reallocates_, kernel_.name_,
                  ": the memory of a distributed tensor cannot be changed in place.");
    const c10::OperatorHandle& functional = *kernel_.functional();
    Stack inputs;
    for (const size_t i : c10::irange(schema_.arguments().size())) {
      if (!schema_.arguments()[i].is_out()) inputs.push_back(argument(i));
    }
    if (kernel_.reshapes_in_place_) inputs[0] = as_it_was(inputs[0].toTensor());
    functional.callBoxed(inputs);
    if (kernel_.has_out_ && !kernel_.is_random_ && is_converted(inputs)) {
      collect();  // on replicas the operator says itself whether it converts
      return run_collected();
    }
    Stack results;
    for (const size_t i : c10::irange(schema_.returns().size())) {
      results.push_back(argument(kernel_.returned_argument_[i]));
      put(inputs[i].toTensor(), results.back().toTensor(), kernel_.returned_argument_[i]);
    }
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    for (IValue& result : results) stack_.push_back(std::move(result));
  }

  /// Whether a result is of another dtype than what it is to be written into.
  bool is_converted(const Stack& results) const {
    for (const size_t i : c10::irange(schema_.returns().size())) {
      const IValue& target = stack_[first_ + kernel_.returned_argument_[i]];
      if (results[i].toTensor().scalar_type() != target.toTensor().scalar_type()) return true;
    }
    return false;
  }

  /// The tensor with the shape and the memory it has now.
  static at::Tensor as_it_was(const at::Tensor& tensor) {
    const DTensorImpl& impl = *DTensorImpl::of(tensor);
    return at::Tensor(
        impl.shallow_copy_and_detach(impl.version_counter(), /*allow_tensor_metadata_change=*/true));
  }

  void put(const at::Tensor& result, const at::Tensor& target, size_t position) const {
    DTensorImpl* impl = DTensorImpl::of(target);
    if (kernel_.reshapes_in_place_) {
      impl->take(*DTensorImpl::of(result));
      return;
    }
    if (!impl && implicit_replication()) {
      const Spec& spec = DTensorImpl::of(result)->spec();
      const at::Tensor whole = execute(plan(spec, spec.with_placements(replicated(spec.mesh()))),
                                       DTensorImpl::of(result)->local());
      if (target.sizes() != whole.sizes()) target.resize_(whole.sizes());
      target.copy_(whole);
      return;
    }
    TESSERA_CHECK_VALUE(
        impl, kernel_.name_, ": argument '", name_of(position),
        "' is a plain tensor, but is to be written with a distributed one. Give it a distributed "
        "tensor.");
    TESSERA_CHECK(result.sizes() == target.sizes(), kernel_.name_, ": would change the shape of '",
                  name_of(position), "' from ", target.sizes(), " to ", result.sizes(),
                  ", which a distributed tensor cannot do in place.");
    TESSERA_CHECK(at::canCast(result.scalar_type(), target.scalar_type()), kernel_.name_,
                  ": its result is of type ", result.scalar_type(), ", which cannot be written into '",
                  name_of(position), "' of type ", target.scalar_type(), ".");
    target.copy_(result);
  }

  void write_back(Argument& argument, const Way& way) {
    const Spec& spec = argument.spec();
    const c10::IntArrayRef shape = way.back ? way.back->from.local_shape() : spec.local_shape();
    TESSERA_CHECK(argument.local.sizes() == shape, kernel_.name_, ": would change the shape of '",
                  name_of(argument.position), "' from ", shape, " to ", argument.local.sizes(),
                  ", which a distributed tensor cannot do in place.");
    if (draws_unseeded()) same_on_all_ranks(argument.local);
    if (way.back) argument.impl().local().copy_(execute(*way.back, argument.local));
    argument.impl().wrote();
  }

  /// On replicas, all ranks are to draw the same numbers: from a generator that depends on the call alone.
  void seed(IValue& generator) const {
    std::optional<at::Generator> given;
    if (generator.isGenerator()) given = generator.toGenerator();
    generator = random::make_generator(random::next_draw(mesh(), given), arguments_[0].tensor.device());
  }

  /// From libtorch's own generator, as the operator takes no other.
  bool draws_unseeded() const { return kernel_.is_random_ && !recipe_->by_rule && !kernel_.generator_; }

  /// Random numbers that each rank drew as it liked: those of the first rank count.
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
      if (returned >= 0 && !value.isTensorList()) {
        const auto found = std::lower_bound(arguments_.begin(), arguments_.end(), returned,
                                            [](const Argument& a, int64_t p) { return a.position < p; });
        // One that is plain is returned as it is.
        if (found != arguments_.end() && found->position == returned) value = found->tensor;
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
    const size_t number = next_output_++;
    if (!local.defined()) return local;
    TESSERA_CHECK(local.layout() == at::kStrided, kernel_.name_, ": its result has the layout ",
                  local.layout(),
                  ", which a distributed tensor of Tessera cannot have. Call it on what full_tensor() or "
                  "to_local() gives.");
    if (local.is_conj() || local.is_neg()) [[unlikely]]
      local = local.resolve_conj().resolve_neg();
    if (draws_unseeded()) [[unlikely]]
      same_on_all_ranks(local);
    const Spec& spec = output_spec(local, number);
    if (!lies_as(local, spec)) [[unlikely]]
      kernel_.copies_.fetch_add(1, std::memory_order_relaxed);
    if (!kernel_.is_view_[index]) return make_dtensor(std::move(local), spec);
    // A view of a tensor that is not one of inference mode is none either.
    std::optional<c10::InferenceMode> normal;
    if (c10::InferenceMode::is_enabled() && !arguments_[0].tensor.is_inference()) [[unlikely]]
      normal.emplace(false);
    at::Tensor result = make_dtensor(std::move(local), spec);
    result.unsafeGetTensorImpl()->set_storage_offset(arguments_[0].tensor.storage_offset() +
                                                     recipe_->offsets.at(number));
    set_origin(result, number);
    return result;
  }

  /// Where each view begins in the memory of a whole tensor, counted from where the base begins: as on one
  /// device, where a call that this refuses is refused too.
  std::vector<int64_t> view_offsets() const {
    Stack stack(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    const Spec& base = arguments_[0].spec();
    stack[arguments_[0].position] =
        at::empty_strided(base.shape(), base.strides(), at::TensorOptions(base.dtype()).device(at::kMeta));
    op_.callBoxed(stack);
    std::vector<int64_t> offsets;
    for (const IValue& result : stack) {
      if (result.isTensor()) offsets.push_back(result.toTensor().storage_offset());
      if (!result.isTensorList()) continue;
      for (const at::Tensor& each : result.toTensorVector()) offsets.push_back(each.storage_offset());
    }
    return offsets;
  }

  /// The storage offset of as_strided counts from where the storage of the base begins. A view has no memory
  /// of its base but its own elements.
  void offset_from_self() {
    const at::Tensor& self = argument(0).toTensor();
    IValue& offset = argument(3);
    if (offset.isNone()) return;
    TESSERA_CHECK(offset.toInt() >= self.storage_offset(), kernel_.name_, ": storage offset ", offset.toInt(),
                  " lies before 'self', a view that begins at ", self.storage_offset(),
                  " of its storage. Call as_strided on the base of the view.");
    offset = offset.toInt() - self.storage_offset();
  }

  const Spec& output_spec(const at::Tensor& local, size_t number) {
    auto& known = recipe_->outputs;
    if (number < known.size() && known[number] && known[number].dtype() == local.scalar_type() &&
        known[number].local_shape() == local.sizes() &&
        (shapes_.empty() || known[number].shape() == c10::IntArrayRef(shapes_[number])) &&
        (recipe_->by_rule || known[number].strides() == local.strides())) {
      return known[number];
    }
    if (number >= known.size()) known.resize(number + 1);
    return known[number] = make_output_spec(local, number);
  }

  Spec make_output_spec(const at::Tensor& local, size_t number) const {
    if (!recipe_->by_rule) {
      // Strides of replicas may be those of one rank only where nothing was ever decided by them.
      return Spec(mesh(), replicated(mesh()), local.sizes(), local.strides(), local.scalar_type());
    }
    const auto& outputs = recipe_->decision.outputs;
    TESSERA_CHECK(number < outputs.size() || outputs.size() == 1, kernel_.name_,
                  ": its sharding rule tells of ", outputs.size(), " results, but there is a number ", number,
                  ".");
    const rules::Decision::Output& output = outputs[outputs.size() == 1 ? 0 : number];
    std::vector<int64_t> shape = shapes_.empty() ? output.result.shape : shapes_[number];
    shape.resize(local.dim(), rules::kLocal);
    for (const size_t dim : c10::irange(shape.size())) {
      if (shape[dim] == rules::kLocal) shape[dim] = local.size(static_cast<int64_t>(dim));
    }
    c10::OptionalIntArrayRef strides;
    if (!output.result.strides.empty()) strides = output.result.strides;
    Spec spec(output.mesh, output.placements, shape, strides, local.scalar_type(), output.order);
    TESSERA_CHECK(spec.local_shape() == local.sizes(), kernel_.name_, ": its sharding rule is wrong: rank ",
                  mesh().get_rank(), " got ", local.sizes(), " where the rule says ", spec,
                  ". This is a fault of Tessera; please report it.");
    return spec;
  }

  /// Remembers what a view is of, if writing into it does not write into its base.
  void set_origin(const at::Tensor& view, size_t number) {
    const Argument& base = arguments_[0];
    const rules::Local& local = recipe_->decision.local;
    const bool shares = recipe_->by_rule && !local.detached && !base.moved &&
                        DTensorImpl::of(view)->local().is_alias_of(base.impl().local());
    if (shares) DTensorImpl::of(view)->share_writes(base.impl());
    if (shares && !base.impl().origin()) [[likely]]
      return;
    // As it is now: it may change its shape in place, but the view remains one of what it was.
    DTensorImpl::Origin origin{as_it_was(base.tensor), {}, {}, base.impl().writes()};
    if (!shares) {
      origin.write = local.write_back && !base.moved ? local.write_back : replay(number);
      origin.read = [op = op_, arguments = values_, number](const at::Tensor& of) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return view_of(op, arguments, of, number);
      };
    }
    DTensorImpl::of(view)->set_origin(std::make_shared<const DTensorImpl::Origin>(std::move(origin)));
  }

  /// One of the views that an operator makes of a tensor.
  static at::Tensor view_of(const c10::OperatorHandle& op, Stack arguments, const at::Tensor& base,
                            size_t number) {
    arguments[0] = base;
    // In `arguments` it counts from where the base begins; see offset_from_self.
    if (op.schema().name() == "aten::as_strided" && DTensorImpl::of(base) && !arguments[3].isNone())
      arguments[3] = arguments[3].toInt() + base.storage_offset();
    op.callBoxed(arguments);
    std::vector<at::Tensor> views;
    for (const IValue& result : arguments) {
      if (result.isTensor()) views.push_back(result.toTensor());
      if (result.isTensorList()) {
        for (const at::Tensor& each : result.toTensorVector()) views.push_back(each);
      }
    }
    return views.at(number);
  }

  /// Where elements of the target share memory, as in what was expanded, their values are one too.
  static void copy_into(at::Tensor to, at::Tensor from) {
    for (const int64_t dim : c10::irange(to.dim())) {
      if (to.stride(dim) != 0 || to.size(dim) < 2) continue;
      to = to.narrow(dim, 0, 1);
      from = from.narrow(dim, 0, 1);
    }
    to.copy_(from);
  }

  /// Makes the view of the whole base again, on every rank, and writes there.
  std::function<void(const at::Tensor&, const at::Tensor&)> replay(size_t number) {
    Spec of_base = arguments_[0].spec(), of_view = recipe_->outputs[number];
    return [op = op_, arguments = values_, of_base, of_view, number](const at::Tensor& base,
                                                                     const at::Tensor& view) mutable {
      const Spec whole_base = of_base.with_placements(replicated(of_base.mesh()));
      const Spec whole_view = of_view.with_placements(replicated(of_view.mesh()));
      const at::Tensor whole = at::empty_strided(of_base.shape(), of_base.strides(), base.options());
      copy_into(whole, execute(plan(of_base, whole_base), base));
      copy_into(view_of(op, arguments, whole, number), execute(plan(of_view, whole_view), view));
      copy_into(base, execute(plan(whole_base, of_base), whole));
    };
  }

  const Kernel& kernel_;
  const Resolved& resolved_;
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const size_t first_;
  CacheKey key_;
  c10::SmallVector<Argument, 4> arguments_;
  c10::SmallVector<size_t, 1> with_dims_;  // positions of plain tensors that have dims and are read
  bool writes_plain_ = false;              // as implicit replication allows
  std::shared_ptr<Recipe> recipe_;
  Stack values_;                              // the arguments of a view that is to be made again
  std::vector<std::vector<int64_t>> shapes_;  // of the results, if only what computed them can tell
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

/// Likewise.
at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& indices,
                              int64_t dim) {
  return input.numel() == 0 ? input : input.new_zeros(input.sizes()).scatter_add(dim, indices, grad);
}

/// libtorch adds to zeros in place, which are whole and would have to stay so.
at::Tensor index_select_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes, int64_t dim,
                                 const at::Tensor& index) {
  return grad.new_zeros_symint(sizes).index_add(dim, index, grad);
}

/// Likewise.
at::Tensor gather_backward(const at::Tensor& grad, const at::Tensor& self, int64_t dim,
                           const at::Tensor& index, bool sparse_grad) {
  if (sparse_grad) return at::_gather_sparse_backward(self, dim, index, grad);
  return grad.new_zeros_symint(self.sym_sizes()).scatter_add(dim, index, grad);
}

bool has_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& a) { return a.is_out(); });
}

/// Whether libtorch's composition of other operators serves as it is. Not where there is a rule for the whole
/// (autograd's formula for the whole is then used too), nor with out=, which is written through plain
/// tensors.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !has_out(op) &&
         !rules::find_rule(c10::toString(op.operator_name()), false);
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
      if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key) || decomposes(*op)) continue;
      handles_.push_back(dispatcher.registerImpl(
          name, key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)), std::nullopt,
          nullptr, "tessera"));
    }
    // Operators of other libraries that say nothing of autograd: as libtorch does for the backends it knows.
    all_.fallback(torch::autograd::basicAutogradNotImplementedFallback());
    aten_.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
    aten_.impl("cummaxmin_backward", cummaxmin_backward);
    aten_.impl("index_select_backward", index_select_backward);
    aten_.impl("gather_backward", gather_backward);
  }

  /// Operators that were registered after us may have kernels that would be preferred to our fallback.
  void cover(const std::string& name) {
    const size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    TESSERA_CHECK_VALUE(op, "register_sharding: there is no operator \"", name,
                        "\"; expected a name as in \"aten::sum.dim_IntList\".");
    TESSERA_CHECK_VALUE(!decomposes(*op), "register_sharding: ", name,
                        " is composed of other operators; register rules for those.");
    const std::lock_guard lock(mutex_);
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse3)) return;
    handles_.push_back(c10::Dispatcher::singleton().registerImpl(
        op->operator_name(), c10::DispatchKey::PrivateUse3,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)), std::nullopt, nullptr,
        "tessera"));
  }

 private:
  std::mutex mutex_;
  std::vector<c10::RegistrationHandleRAII> handles_;
  torch::Library all_{torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__};
  torch::Library aten_{torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse3, __FILE__,
                       __LINE__};
};

/// Never undone: tensors in static variables may outlive any order of destruction.
Registration& registration = *new Registration;

}  // namespace

void register_sharding(const std::string& op, rules::Rule rule) {
  registration.cover(op);
  rules::add_rule(op, std::move(rule));
}

std::map<std::string, uint64_t> fallback_counts() {
  const std::lock_guard lock(Kernel::all_mutex());
  std::map<std::string, uint64_t> counts;
  for (const Kernel* kernel : Kernel::all()) {
    if (kernel->fallbacks() > 0) counts[kernel->name()] = kernel->fallbacks();
  }
  return counts;
}

std::map<std::string, uint64_t> layout_copy_counts() {
  const std::lock_guard lock(Kernel::all_mutex());
  std::map<std::string, uint64_t> counts;
  for (const Kernel* kernel : Kernel::all()) {
    if (kernel->copies() > 0) counts[kernel->name()] = kernel->copies();
  }
  return counts;
}

CacheStatistics dispatch_cache_statistics() { return cache().statistics(); }

void set_dispatch_cache_capacity(size_t capacity) {
  cache_capacity = capacity;
  cache().set_capacity(capacity);
}

}  // namespace tessera
