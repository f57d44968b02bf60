#pragma once

#include <tessera/export.h>
#include <tessera/rules/form.h>
#include <tessera/rules/strategy.h>

#include <atomic>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// Sharding rules: how the tensors of an operator may be placed so that each rank can compute its part alone,
/// and how the results are placed then.
///
/// A rule is found by the operator's name ("aten::sum.dim_IntList"). In-place operators have that of the one
/// that returns a new tensor.
namespace tessera::rules {

/// What a rank computes, where that is not the operator with the same arguments: for people, and for a call.
struct LocalStep {
  std::string text;
  std::function<Localize(const OpCall&)> of;
};

struct TESSERA_API Rule {
  Rule() = default;
  /// `reads`: what is looked at beyond what the form looks at.
  Rule(Form form, Names reads);
  /// Tables list forms.
  template <class T>
  requires std::is_constructible_v<Form, T> &&(!std::is_same_v<T, Rule>)Rule(T form)
      : Rule(Form(std::move(form)), Names()) {}  // NOLINT(google-explicit-constructor)
  Rule(std::string text, std::function<std::optional<Strategies>(const OpCall&)> propose, Names reads = {},
       std::string why = {});

  /// One line for people, made from what follows.
  std::string text() const;
  /// What it says of a call; nothing if it does not apply to it. Pure: no ranks are needed.
  std::optional<Strategies> propose(const OpCall& call) const;

  Form form;
  /// The arguments besides tensors that it looks at.
  Names reads = {};
  LocalStep local = {};
  /// The operator works on lists, item by item: the rule is that of one item. Tensors beside the
  /// lists are replicated.
  bool itemwise = false;
  /// Of such a rule: what a rank computes for all items, if not the operator on their local tensors.
  std::function<LocalCall(const OpCall&)> together = {};
  /// Which table it is from: "pointwise", ...; empty if it was registered at run time.
  std::string family = {};
  /// The operator may draw random numbers, and the rule sees to it that these do not depend on the placement,
  /// or proposes something only where none are drawn.
  bool for_random = false;
  /// The operator's kernels read memory with gaps rightly, so that a slice of a replica can be given to them
  /// as a view. Others get a copy: some read an argument as if it were contiguous. `make slices` tries both.
  bool takes_slices = false;
  /// Results are channels last if an input of as many dims is, unless the rule says their strides.
  bool keeps_memory_format = false;
  /// The operator can be tried on tensors of one element, to find out which dtypes it takes: it reads no
  /// sizes or positions from its arguments that it would trust. A random one is tried with a generator that
  /// nobody else draws from, if it takes one.
  bool can_be_tried = false;
  /// Under LossParallel (dispatch/guards.h) the operator's inputs must not be gathered.
  bool for_loss_parallel = false;
  /// The tensors whose values the operator may refuse, as an index out of range. Where ranks hold different
  /// elements of them, they agree by a small reduction whether any of them refuses, unless they communicate
  /// otherwise.
  std::vector<std::string> checks_values_of = {};
  /// The argument by which the operator divides. Of integers it refuses a zero: all ranks look at one that is
  /// the same on all of them; else they agree as above.
  std::string divides_by = {};
  /// Of an operator that cannot be tried: whether it may refuse tensors of these dtypes. Null: it refuses
  /// none.
  bool (*may_refuse_dtypes)(c10::ArrayRef<at::ScalarType>) = nullptr;
};

/// The rule of an operator, or null if it has none; good until the end of the process. `is_pointwise`:
/// libtorch says that each element of the result depends on the corresponding elements of the inputs only.
TESSERA_API const Rule* find_rule(const std::string& op, bool is_pointwise);

/// The rule of all operators that libtorch calls pointwise and that have none of their own is kept under this
/// name.
inline const std::string kAnyPointwise = "pointwise";

/// Adds or replaces the rule of some operators. Users call `tessera::register_sharding` (dispatch/register.h).
TESSERA_API void add_rule(const std::vector<std::string>& ops, Rule rule);

/// A rule that always says these.
TESSERA_API Rule explicit_strategies(std::vector<Strategy> options);

namespace detail {
TESSERA_API extern std::atomic<uint64_t> registry_version;
}
/// Changes whenever a rule is registered.
inline uint64_t registry_version() { return detail::registry_version.load(std::memory_order_relaxed); }

/// All operators with a rule of their own, in order of their names. What a rule proposes for a call can be
/// asked of it without any rank: rule.propose(call).
TESSERA_API std::vector<std::pair<std::string, const Rule*>> all_rules();

}  // namespace tessera::rules
