#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

/// Sharding rules: how the tensors of an operator must be placed so that each rank can compute its part
/// alone, and how the results are placed then. Pure metadata: no ranks, no data.
///
/// A rule speaks of one mesh dim at a time, in letters. Each tensor dim has a letter; dims that must be cut
/// alike have the same one:
///
///   mm       "mk", "kn" -> "mn"     cut m: [S(0), R] -> S(0)     cut n: [R, S(1)] -> S(1)     cut k: [S(1),
///   S(0)] -> P(sum) add      "ab", "b"  -> "ab"     cut a: [S(0), R] -> S(0)     cut b: [S(1), S(0)] -> S(1)
///   sum(1)   "ab"       -> "a"      cut a: S(0) -> S(0)          cut b: S(1) -> P(sum)
///
/// and everything may be replicated. The cheapest is chosen for each mesh dim, given what the tensors are.
namespace tessera::rules {

/// A letter for each dim of a tensor; kFree for one that cannot be cut (of size 1 where others are larger).
using Letters = c10::SmallVector<char, 6>;
inline constexpr char kFree = '\0';

struct Einsum {
  std::vector<Letters> inputs;  // as many as the operator has distributed tensors
  Letters output;
  /// Sums may stay partial in: none of the inputs, all of them at once (add), or any one of them with the
  /// others replicated (multiplication).
  enum class Linear { none, jointly, each } linear = Linear::none;
};

/// What one call of an operator is about.
struct Call {
  std::vector<Spec> tensors;             // the distributed ones, in order
  bool has_plain = false;                // besides them there are plain tensors, of 0 dims
  std::optional<size_t> written;         // the tensor that is written in place: its placements must stay
  c10::ArrayRef<c10::IValue> arguments;  // all of them
  std::vector<int64_t> output_shape;     // found by the rule
  std::vector<int64_t> output_strides;   // likewise; empty: contiguous
};

/// How to carry out a call.
struct Decision {
  std::vector<Placements> inputs;  // of each tensor
  Placements output;
  std::vector<int64_t> output_shape;
  /// Empty: contiguous. They follow from the inputs' global strides alone, never from what one rank holds:
  /// formulas of autograd choose by strides, and all ranks must choose alike.
  std::vector<int64_t> output_strides;
  /// The order of cuts, if one of the tensors has a special one that all keep.
  ShardOrder order;
  /// The position of a list of sizes among the arguments that each rank must replace by its own.
  std::optional<size_t> sizes_argument;
};

/// What an operator does with its tensors, dim by dim.
struct Rule {
  /// The decision for a call, or nothing if the rule does not apply to it.
  std::function<std::optional<Decision>(Call&)> decide;
  /// Whether it looks at arguments that are not tensors. Decisions of others are good for all values of
  /// those.
  bool reads_arguments = false;
};

/// The rule of an operator ("aten::sum.dim_IntList"), or null if it has none. `is_pointwise`: libtorch says
/// that each element of the result depends on the corresponding elements of the inputs only.
TESSERA_API const Rule* find_rule(const std::string& name, bool is_pointwise);

/// The cheapest way for an einsum, mesh dim by mesh dim.
TESSERA_API std::optional<Decision> decide(const Einsum& einsum, const Call& call);

}  // namespace tessera::rules
