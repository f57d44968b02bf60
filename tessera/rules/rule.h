#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

/// Sharding rules: how the tensors of an operator may be placed so that each rank can compute its part alone,
/// and how the results are placed then. Rules speak of one mesh dim at a time; that everything may be
/// replicated goes without saying.
///
/// A rule is found by the operator's name ("aten::sum.dim_IntList"). In-place operators have that of the one
/// that returns a new tensor.
namespace tessera::rules {

using Stack = torch::jit::Stack;

/// What one call of an operator is about: pure metadata.
struct TESSERA_API Call {
  const c10::FunctionSchema* schema = nullptr;
  /// The distributed tensors, in order, those in lists too. Plain tensors with dims are replicated ones;
  /// plain tensors without dims are numbers and not among these.
  std::vector<Spec> tensors = {};
  std::vector<uint32_t> positions = {};       // of each, among the arguments; ascending
  std::vector<bool> written = {};             // which are written in place
  c10::ArrayRef<c10::IValue> arguments = {};  // all; tensors among them may be missing
  /// The names of the arguments that may be asked for; null: all.
  const std::vector<std::string>* readable = nullptr;

  /// The position of an argument, or nothing if the operator has none of that name.
  std::optional<size_t> position(std::string_view name) const;
  /// The tensor given for an argument: its number in `tensors`. Nothing if it was left out, or is a number.
  std::optional<size_t> tensor(std::string_view name) const;

  /// Whether the operator has that argument and it was not left out.
  bool has(std::string_view name) const;
  /// Values of arguments that are not tensors. Throws unless the rule says that it reads them: those it reads
  /// are part of what recipes are kept by.
  const c10::IValue& value(std::string_view name) const;
  int64_t integer(std::string_view name) const { return value(name).toInt(); }
  bool flag(std::string_view name) const { return value(name).toBool(); }
  /// Left out: none.
  std::vector<int64_t> integers(std::string_view name) const;
};

/// One valid way on one mesh dim.
struct Row {
  Placements inputs;   // of each of the call's tensors
  Placements outputs;  // of each result; one alone is meant for all
  /// If not 0: all cuts of the dims concerned together must make a number of parts that divides this.
  int64_t divisor = 0;
  /// Each rank must hold one range of what is cut: no strided shards.
  bool ranges = false;
  /// Partial() stands for any partial placement, the same for all that are.
  bool any_partial = false;
  /// If not -1: on this mesh dim alone.
  int64_t mesh_dim = -1;
  bool operator==(const Row&) const = default;
};

/// What a rule can say of a result. Sizes of dims that are never cut may be kLocal: as what a rank computes
/// has it. Without strides: contiguous. They follow from the inputs' global strides alone, never from what
/// one rank holds: formulas of autograd choose by strides, and all ranks must choose alike.
inline constexpr int64_t kLocal = -1;
struct Result {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides = {};
};

/// What was chosen.
struct Chosen {
  std::vector<Spec> inputs;
  std::vector<Spec> outputs;  // undefined where the shape was not known; dtype: of the first input
  ShardOrder order = {};      // of the cuts of all
};

/// From all arguments of an operator to all its results.
using Function = std::function<Stack(const c10::OperatorHandle& op, Stack arguments)>;

/// How a rank computes its part.
struct Local {
  /// Arguments, by position, that it replaces by its own values.
  std::vector<std::pair<size_t, c10::IValue>> arguments = {};
  /// Instead of the operator itself, on local tensors. May communicate, and must say so then.
  Function compute = {};
  bool communicates = false;
  /// Only it can tell how large the results are, though they are cut: it gives the whole shape of each behind
  /// all of them.
  bool sized = false;
  /// What it computes instead writes into the arguments itself that the operator writes into.
  bool writes = false;
  /// Results of a view operator do not share the memory of its input.
  bool detached = false;
  /// Of these: writes what a rank holds of the view into what it holds of the input. Called by all ranks.
  /// Without it all is gathered for that.
  std::function<void(const at::Tensor& base, const at::Tensor& view)> write_back = {};
};

/// What a rule says of a call.
struct Proposal {
  std::vector<Row> rows;
  /// Without any, what rows say of cuts must tell the shapes: a cut dim is as large as that of the input cut
  /// in the same row, others are as what a rank computes has them.
  std::vector<Result> results = {};
  /// How a rank computes its part, if not by the operator with the same arguments. Called once for a recipe.
  std::function<Local(const Chosen&)> localize = {};
  /// Instead of all that: computed by other operators on the distributed tensors themselves.
  Function decompose = {};
  /// These write into the arguments themselves that the operator writes into.
  bool writes = false;
};

struct Rule {
  /// One line for people: "mk,kn->mn".
  std::string text;
  /// What it proposes for a call; nothing if it does not apply to it.
  std::function<std::optional<Proposal>(const Call&)> propose;
  /// The arguments besides tensors that it looks at.
  std::vector<std::string> reads = {};
  /// The operator works on lists, item by item: the rule is for what each item is about. Tensors beside the
  /// lists are whole.
  bool itemwise = false;
  /// Of such a rule: how a rank computes all items, if not by the operator on what it holds of them.
  std::function<Local(const Call&)> together = {};
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
  /// The tensors whose values the operator may refuse, as an index out of range. Where ranks hold different
  /// elements of them, they agree by a small reduction whether any of them refuses, unless they communicate
  /// otherwise.
  std::vector<std::string> checks_values_of = {};
  /// Of an operator that cannot be tried: whether it may refuse tensors of these dtypes. Null: it refuses
  /// none.
  bool (*may_refuse_dtypes)(c10::ArrayRef<at::ScalarType>) = nullptr;
};

/// The rule of an operator, or null if it has none; good until the end of the process. `is_pointwise`:
/// libtorch says that each element of the result depends on the corresponding elements of the inputs only.
TESSERA_API const Rule* find_rule(const std::string& op, bool is_pointwise);

/// Adds or replaces the rule of an operator. Users call `tessera::register_sharding` (dispatch/register.h).
TESSERA_API void add_rule(const std::string& op, Rule rule);

/// A rule that always proposes these rows.
TESSERA_API Rule explicit_rows(std::vector<Row> rows);

namespace detail {
TESSERA_API extern std::atomic<uint64_t> registry_version;
}
/// Changes whenever a rule is registered.
inline uint64_t registry_version() { return detail::registry_version.load(std::memory_order_relaxed); }

/// All operators with a rule of their own, in order of their names. What a rule proposes for a call can be
/// asked of it without any rank: rule.propose(call).
TESSERA_API std::vector<std::pair<std::string, const Rule*>> all_rules();

}  // namespace tessera::rules
