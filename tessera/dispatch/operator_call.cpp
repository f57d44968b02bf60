#include <tessera/comm/collectives.h>
#include <tessera/comm/log.h>
#include <tessera/comm/within.h>
#include <tessera/comm/world.h>
#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/call_text.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/in_place.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/dispatch/op_plan_cache.h>
#include <tessera/dispatch/operator_call.h>
#include <tessera/dispatch/outside_of_mesh.h>
#include <tessera/dispatch/refusal.h>
#include <tessera/dispatch/strict_state.h>
#include <tessera/dispatch/views.h>
#include <tessera/error.h>
#include <tessera/random/generator.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/plan.h>
#include <tessera/rules/rule.h>
#include <tessera/span.h>
#include <tessera/thread_scope.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/any.h>
#include <ATen/ops/eq.h>
#include <c10/util/irange.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

namespace {

using c10::IValue;

/// The name of the operator on whose behalf others are called, which users know; null if there is none.
using OuterOperator = ThreadScope<const std::string*, struct OuterOperatorTag>;

/// Keys of autocast with which an operator was called that writes, for the one that returns new tensors in
/// its place.
using WriterCasts = ThreadScope<c10::DispatchKeySet, struct WriterCastsTag>;

/// One call of one operator on distributed tensors.
class OperatorCall {
 public:
  OperatorCall(const OperatorInfo& info, Stack& stack)
      : info_(info), resolved_(info.resolved()), stack_(stack), arguments_(info, resolved_, stack) {}

  void run() {
    const Span span(observer_, SpanKind::op, info_.name.c_str());
    const at::AutoDispatchBelowADInplaceOrView below;
    casts_ = (c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_) |
             WriterCasts::current();
    if (info_.reallocates && run_reallocation(info_, arguments_)) [[unlikely]]
      return;
    const bool by_functional = (info_.has_out || info_.reshapes_in_place) && info_.functional();
    if (info_.is_composite && !by_functional) [[unlikely]]
      return info_.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack_);
    // The arguments are cast already. What is computed of them here must not be cast again.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (by_functional) [[unlikely]] {
      if (run_in_place_of_writer()) return;
      arguments_.collect();
      return run_collected();
    }
    if (info_.is_as_strided) [[unlikely]]
      offset_from_self(info_, arguments_);
    if (info_.is_cast) [[unlikely]]
      check_not_in_cast_cache();
    arguments_.collect();
    run_collected();
  }

 private:
  auto& distributed() { return arguments_.distributed(); }
  const auto& distributed() const { return arguments_.distributed(); }
  const DeviceMesh& mesh() const { return distributed()[0].spec().mesh(); }

  /// After the pass over the arguments.
  void run_collected() {
    const comm::Within within(OuterOperator::current() ? OuterOperator::current() : &info_.name);
    if (!find_plan()) [[unlikely]]
      return run_outside_of_mesh(info_, resolved_, arguments_);
    if (observer_) [[unlikely]]
      show_plan();
    const rules::ChosenStrategy& strategy = plan_->strategy;
    if (plan_->is_special) [[unlikely]] {
      const bool by_functional = arguments_.writes() && !strategy.local.writes;
      if (strategy.decompose || (strategy.has_local && by_functional)) {
        arguments_.restore();
        const OuterOperator outer(OuterOperator::current() ? OuterOperator::current() : &info_.name);
        if (!by_functional) return replace(strategy.decompose);
        run_in_place_of_writer();  // out= operators have no such strategy
        return;
      }
      if (strategy.local.communicates && Strict::current())
        report(c10::str("has to move data between ranks", described_shardings()),
               "No redistribute() stands for it: replicate what it has to see all of, or allow it here with "
               "ImplicitCommunication::allowed.");
    }
    if (!plan_->by_rule) info_.fallbacks.fetch_add(1, std::memory_order_relaxed);
    for (const size_t i : c10::irange(distributed().size())) redistribute(distributed()[i], plan_->routes[i]);
    if (!plan_->by_rule && !info_.has_views) [[unlikely]]
      forget_unused_strides();
    // Views that do not share the memory of their base are made again after writes.
    if (info_.has_views && !(plan_->by_rule && !strategy.local.detached && !distributed()[0].moved))
        [[unlikely]]
      view_arguments_ = arguments_.values();
    if (info_.has_views && !plan_->by_rule) [[unlikely]]
      plan_->offsets =
          view_offsets(info_.op, arguments_.values(), distributed()[0].position, distributed()[0].spec());
    if (plan_->looks_at_divisor) [[unlikely]]
      check_divisor();
    Stack given;
    if (plan_->asks_dtypes) [[unlikely]]
      given = arguments_.with_tensors();
    for (const auto& [position, value] : strategy.local.arguments) arguments_[position] = value;
    arguments_.substitute_locals();
    if (info_.is_random && !plan_->by_rule && info_.generator) [[unlikely]]
      seed(arguments_[*info_.generator]);
    const auto compute = [&] {
      const Span span(observer_, SpanKind::compute, info_.name.c_str());
      if (plan_->asks_dtypes) [[unlikely]] {
        check_dtypes_as_first_rank(info_.op, given, strategy.inputs);
        plan_->asks_dtypes = false;
      }
      strategy.local.compute ? replace(strategy.local.compute) : call_operator();
    };
    if (plan_->refuses_together && agrees_on_refusal()) [[unlikely]] {
      compute_or_refuse_together(info_.name, mesh(), compute);
    } else {
      compute();
    }
    if (strategy.local.sized) [[unlikely]]
      take_shapes();
    for (const size_t i : c10::irange(distributed().size())) {
      if (distributed()[i].written) write_back(distributed()[i], plan_->routes[i]);
    }
    wrap();
  }

  void log_plan(const Stack& all) const {
    if (!plan_->by_rule)
      TESSERA_LOG(info, "dispatch", call_text(info_.schema, all), " takes the replicated fallback");
    if (!logs(LogLevel::debug, "dispatch")) [[likely]]
      return;
    std::string text = c10::str("planned ", call_text(info_.schema, all));
    for (const InputRoute& route : plan_->routes) {
      if (!route.plan.steps.empty()) text.append("\n").append(route.plan.str());
    }
    write_log("dispatch", text);
  }

  void show_plan() const {
    const Stack all = arguments_.with_tensors();
    const rules::OpCall call = arguments_.call(all);
    const PlannedCall planned{info_, resolved_, call, *plan_};
    const Span span(observer_, SpanKind::planned, info_.name.c_str(), &planned);
  }

  /// False if this rank is not in the mesh: there is no plan there.
  bool find_plan() {
    OpPlanCache& plans = op_plan_cache();
    const auto* known = plans.find(arguments_.key());
    if (!known) [[unlikely]] {
      if (!distributed().empty() && !mesh().is_member()) return false;
      if (arguments_.unify_meshes()) known = plans.find(arguments_.key());
    }
    if (known) [[likely]] {
      plan_ = *known;
      return true;
    }
    const Stack all = arguments_.with_tensors();
    plan_ = SharedOpPlan(make_op_plan(info_, resolved_, arguments_.call(all), arguments_.writes_plain()));
    log_plan(all);
    if (!plan_->in_doubt) plans.insert(arguments_.key(), plan_);
    return true;
  }

  /// Autocast casts float32 leaves with its cache locked, which is one for the process: to wait for other
  /// ranks there, threads of the same process, would be to wait for ever. `run` therefore turns the cache
  /// off; this is for those who turned it on.
  void check_not_in_cast_cache() const {
    const at::Tensor& tensor = arguments_[0].toTensor();
    const auto* impl = DTensorImpl::of(tensor);
    if (!at::autocast::is_autocast_cache_enabled() || !impl || !impl->spec().has_partial() ||
        tensor.scalar_type() != at::kFloat || !tensor.requires_grad() || !tensor.is_leaf() ||
        !c10::impl::tls_is_dispatch_key_excluded(
            at::autocast::get_autocast_dispatch_key_from_device_type(tensor.device().type())) ||
        !has_current_world() || !current_world()->is_threads())
      return;
    TESSERA_CHECK(
        false, info_.name, ": autocast cannot cast the parameter ", impl->spec(),
        " of partial values into its cache on ranks that are threads: it is one for the process, and is "
        "locked while their sum is formed. Leave out cache_enabled=True, or redistribute the parameter "
        "to Shard or Replicate.");
  }

  // --- inputs

  void redistribute(DistributedArgument& argument, const InputRoute& route) {
    if (route.plan.steps.empty()) return;
    if (Strict::State* strict = Strict::current()) [[unlikely]] {
      if (strict->concerns(route.plan)) report(argument, route.plan);
    }
    if (loss_parallel() && resolved_.rule && resolved_.rule->for_loss_parallel)
      check_not_gathered(argument, route);
    argument.local = route.slice ? sliced(argument.local, route) : execute(route.plan, argument.local);
    argument.moved = true;
    if (argument.written && argument.local.is_alias_of(argument.impl().local()))
      argument.local = argument.local.clone();
  }

  /// Some kernels ask for the stride of a dim of size 1, which says nothing of the memory: of what is
  /// contiguous, it is that of new memory.
  void forget_unused_strides() {
    for (DistributedArgument& argument : distributed()) {
      const at::Tensor& local = argument.local;
      if (argument.written || !local.is_contiguous()) continue;
      const c10::DimVector strides = c10::contiguous_strides(local.sizes());
      if (local.strides() != c10::IntArrayRef(strides))
        argument.local = local.as_strided(local.sizes(), strides);
    }
  }

  void check_not_gathered(const DistributedArgument& argument, const InputRoute& route) const {
    const auto& steps = route.plan.steps;
    const bool gathers = std::any_of(steps.begin(), steps.end(), [](const Step& step) {
      return step.kind == StepKind::all_gather || step.kind == StepKind::all_to_all;
    });
    TESSERA_CHECK(
        !gathers, info_.name, ": argument '", info_.argument_name(argument.position),
        "' would be gathered, from ", route.plan.from, " to ",
        c10::ArrayRef<Placement>(route.plan.to.placements()),
        ", which LossParallel forbids. Shard the targets as the samples of the logits, and weights as "
        "their classes.");
  }

  static at::Tensor sliced(const at::Tensor& local, const InputRoute& route) {
    int64_t offset = local.storage_offset();
    for (const size_t dim : c10::irange(route.slice->size()))
      offset += (*route.slice)[dim] * local.strides()[dim];
    return local.as_strided(route.plan.to.local_shape(), local.strides(), offset);
  }

  /// Throws if integers are divided by zero. The divisor is the same on all ranks, before it is redistributed
  /// or after.
  void check_divisor() const {
    const std::string& name = resolved_.rule->divides_by;
    const auto is_fraction = [](const IValue& value) {
      if (value.isScalar()) return !value.toScalar().isIntegral(/*includeBool=*/true);
      return value.isTensor() && value.toTensor().defined() &&
             !at::isIntegralType(value.toTensor().scalar_type(), /*includeBool=*/true);
    };
    if (is_fraction(arguments_[0]) || is_fraction(arguments_[1])) return;
    const auto position = static_cast<size_t>(*info_.schema.argumentIndexWithName(name));
    IValue divisor = arguments_[position];
    for (const DistributedArgument& argument : distributed()) {
      if (argument.position == position)
        divisor = argument.spec().is_replicated() ? argument.impl().local() : argument.local;
    }
    const bool has_zero =
        divisor.isTensor() ? at::eq(divisor.toTensor(), 0).any().item<bool>() : divisor.toScalar().equal(0);
    TESSERA_CHECK(!has_zero, info_.name, ": ZeroDivisionError: '", name,
                  "' has a zero, by which integers cannot be divided.");
  }

  /// Ranks that are forbidden to communicate each refuse what they see by themselves.
  bool agrees_on_refusal() const {
    const Strict::State* strict = Strict::current();
    if (!strict || !strict->concerns(mesh(), all_mesh_dims(), sizeof(int64_t))) return true;
    if (implicit_communication() == ImplicitCommunication::forbidden) return false;
    report(c10::str("ranks have to agree whether one of them refuses the values it holds",
                    described_shardings()),
           "No redistribute() stands for it, but Replicate() of what is looked at does without.",
           sizeof(int64_t));
    return true;
  }

  c10::SmallVector<int64_t, 4> all_mesh_dims() const {
    c10::SmallVector<int64_t, 4> dims(mesh().ndim());
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
  }

  std::string described_shardings() const {
    std::string text;
    for (const DistributedArgument& argument : distributed()) {
      if (argument.spec().is_sharded())
        text += c10::str(text.empty() ? ", as argument '" : ", and '", info_.argument_name(argument.position),
                         "' is ", argument.spec());
    }
    return text;
  }

  /// An argument is about to be redistributed so.
  void report(const DistributedArgument& argument, const Plan& plan) const {
    const std::string& name = info_.argument_name(argument.position);
    std::string steps = plan.str();
    steps.erase(0, steps.find('\n') + 1);
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    report(c10::str("argument '", name, "' has to be redistributed from ", plan.from, " to ",
                    c10::ArrayRef<Placement>(plan.to.placements())),
           c10::str("It takes\n", steps, "\n",
                    in_backward
                        ? "This is the gradient of an operator: place the tensors of forward so that it "
                          "fits, or redistribute() there, whose gradient is redistributed back. By itself:"
                        : "Say so with redistribute() before the call, or choose placements that need none:",
                    "\n  ", redistribute_code(name, plan.to.placements())),
           plan.bytes());
  }

  /// The operator is about to communicate, which Strict looks at. The first line names what it is; `remedy`
  /// follows the call.
  void report(const std::string& problem, const std::string& remedy, int64_t bytes = 0) const {
    Strict::State& strict = *Strict::current();
    const std::string name =
        c10::str(OuterOperator::current() ? *OuterOperator::current() + ", by " : "", info_.name);
    ImplicitMove move{.call = call_text(info_.schema, arguments_.with_tensors()),
                      .what = problem,
                      .location = host_language().location ? host_language().location() : "",
                      .calls = 1,
                      .bytes = bytes};
    const std::string what = c10::str(name, ": ", problem, ".\n  ", move.call, "\n", remedy);
    const ImplicitCommunication level = implicit_communication();
    TESSERA_CHECK(level != ImplicitCommunication::forbidden, what);
    if (strict.count(std::move(move)) && level == ImplicitCommunication::warned) TORCH_WARN(what);
  }

  // --- the operator

  /// On local tensors. As on one device, autocast casts what the kernel calls, if it knows these operators
  /// and not this one.
  void call_operator() {
    const c10::DispatchKeySet casts = casts_ - info_.autocast;
    if (casts.empty()) [[likely]]
      return info_.op.callBoxed(stack_);
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    const c10::impl::ForceDispatchKeyGuard as_called(keys.included_, keys.excluded_ - casts);
    info_.op.callBoxed(stack_);
  }

  bool run_in_place_of_writer() {
    const WriterCasts casts(casts_);
    return run_functional(info_, arguments_);
  }

  /// Puts what the function makes of the arguments in their place.
  void replace(const rules::Function& function) {
    const WriterCasts none({});
    Stack arguments = arguments_.take();
    for (IValue& result : function(info_.op, std::move(arguments))) stack_.push_back(std::move(result));
  }

  /// The shapes behind the results.
  void take_shapes() {
    const size_t count = info_.schema.returns().size();
    for (const size_t i : c10::irange(count))
      shapes_.push_back(stack_[stack_.size() - count + i].toIntVector());
    stack_.erase(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
  }

  /// In the replicated fallback all ranks draw the same random values: from a generator that depends on the
  /// call alone.
  void seed(IValue& generator) const {
    std::optional<at::Generator> given;
    if (generator.isGenerator()) given = generator.toGenerator();
    generator = random::make_generator(random::next_draw(mesh(), given), distributed()[0].tensor.device());
  }

  /// From libtorch's own generator, as the operator takes no other.
  bool draws_unseeded() const { return info_.is_random && !plan_->by_rule && !info_.generator; }

  /// Random values that each rank drew by itself: those of the first rank count.
  void same_on_all_ranks(const at::Tensor& replica) const {
    if (mesh().size() == 1) return;
    comm::broadcast(replica, 0, mesh().get_joint_group()).wait();
  }

  void write_back(DistributedArgument& argument, const InputRoute& route) {
    const Spec& spec = argument.spec();
    const c10::IntArrayRef shape = route.back ? route.back->from.local_shape() : spec.local_shape();
    TESSERA_CHECK(argument.local.sizes() == shape, info_.name, ": would change the shape of '",
                  info_.argument_name(argument.position), "' from ", shape, " to ", argument.local.sizes(),
                  ", which a distributed tensor cannot do in place.");
    if (draws_unseeded()) same_on_all_ranks(argument.local);
    if (route.back) argument.impl().local().copy_(execute(*route.back, argument.local));
    argument.impl().wrote();
  }

  // --- results

  void wrap() {
    const size_t count = info_.schema.returns().size();
    const size_t first = stack_.size() - count;
    for (const size_t i : c10::irange(count)) {
      IValue& value = stack_[first + i];
      const int64_t returned = info_.returned_argument[i];
      if (returned >= 0 && !value.isTensorList()) {
        const auto found =
            std::lower_bound(distributed().begin(), distributed().end(), returned,
                             [](const DistributedArgument& a, int64_t p) { return a.position < p; });
        // One that is plain is returned as it is.
        if (found != distributed().end() && found->position == returned) value = found->tensor;
      } else if (value.isTensor()) {
        value = wrapped(std::move(value).toTensor(), i);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = wrapped(std::move(tensor), i);
        value = std::move(tensors);
      }
    }
  }

  /// `result`: which of the schema's results it is, or is in.
  at::Tensor wrapped(at::Tensor local, size_t result) {
    const size_t index = next_output_++;
    if (!local.defined()) return local;
    TESSERA_CHECK(local.layout() == at::kStrided, info_.name, ": its result has the layout ", local.layout(),
                  ", which a distributed tensor of Tessera cannot have. Call it on what full_tensor() or "
                  "to_local() gives.");
    if (local.is_conj() || local.is_neg()) [[unlikely]]
      local = local.resolve_conj().resolve_neg();
    if (draws_unseeded()) [[unlikely]]
      same_on_all_ranks(local);
    const Spec& spec = output_spec(local, index);
    if (!lies_exactly_as(local, spec)) [[unlikely]] {
      if (!lies_as(local, spec)) info_.layout_copies.fetch_add(1, std::memory_order_relaxed);
      local = laid_out(local, spec);
    }
    if (!info_.is_view[result]) return at::detail::make_tensor<DTensorImpl>(std::move(local), spec);
    const DistributedArgument& base = distributed()[0];
    // A view of a tensor that is not one of inference mode is none either.
    std::optional<c10::InferenceMode> normal;
    if (c10::InferenceMode::is_enabled() && !base.tensor.is_inference()) [[unlikely]]
      normal.emplace(false);
    at::Tensor view = at::detail::make_tensor<DTensorImpl>(std::move(local), spec);
    view.unsafeGetTensorImpl()->set_storage_offset(base.tensor.storage_offset() + plan_->offsets.at(index));
    set_origin(view, index, base, *plan_, info_.op, view_arguments_);
    return view;
  }

  const Spec& output_spec(const at::Tensor& local, size_t index) {
    auto& known = plan_->outputs;
    if (index < known.size() && known[index] && known[index].dtype() == local.scalar_type() &&
        known[index].local_shape() == local.sizes() &&
        (shapes_.empty() || known[index].shape() == c10::IntArrayRef(shapes_[index])) &&
        (plan_->by_rule || known[index].strides() == local.strides())) {
      return known[index];
    }
    if (index >= known.size()) known.resize(index + 1);
    return known[index] = make_output_spec(local, index);
  }

  Spec make_output_spec(const at::Tensor& local, size_t index) const {
    if (!plan_->by_rule) {
      // Strides of replicas may be those of one rank only where nothing was ever chosen by them.
      return Spec(mesh(), replicated(mesh()), local.sizes(), local.strides(), local.scalar_type());
    }
    const auto& outputs = plan_->strategy.outputs;
    TESSERA_CHECK(index < outputs.size() || outputs.size() == 1, info_.name, ": its sharding rule describes ",
                  outputs.size(), " results, but there is one of index ", index, ".");
    const rules::ChosenStrategy::Output& output = outputs[outputs.size() == 1 ? 0 : index];
    std::vector<int64_t> shape = shapes_.empty() ? output.result.shape : shapes_[index];
    shape.resize(local.dim(), rules::kLocal);
    for (const size_t dim : c10::irange(shape.size())) {
      if (shape[dim] == rules::kLocal) shape[dim] = local.size(static_cast<int64_t>(dim));
    }
    c10::OptionalIntArrayRef strides;
    if (!output.result.strides.empty()) strides = output.result.strides;
    Spec spec(output.mesh, output.placements, shape, strides, local.scalar_type(), output.order);
    TESSERA_CHECK(spec.local_shape() == local.sizes(), info_.name, ": its sharding rule is wrong: rank ",
                  mesh().get_rank(), " got ", local.sizes(), " where the rule says ", spec,
                  ". This is a fault of Tessera; please report it.");
    return spec;
  }

  const OperatorInfo& info_;
  const ResolvedRule& resolved_;
  Stack& stack_;
  Arguments arguments_;
  SpanObserver* const observer_ = SpanObserver::innermost();
  SharedOpPlan plan_;
  c10::DispatchKeySet casts_;                 // the keys of autocast with which it was called
  Stack view_arguments_;                      // with which a view is to be made again
  std::vector<std::vector<int64_t>> shapes_;  // of the results, if only what computed them knows them
  size_t next_output_ = 0;
};

}  // namespace

void dispatch_operator(const OperatorInfo& info, Stack& stack) { OperatorCall(info, stack).run(); }

}  // namespace tessera
