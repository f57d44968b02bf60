#pragma once

#include <tessera/export.h>
#include <tessera/rules/strategy.h>

#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

/// Letters: each tensor dim has one, and dims that must be sharded alike have the same.
///
///   mm       "mk,kn->mn"   shard m: [S(0), R] -> S(0)   n: [R, S(1)] -> S(1)   k: [S(1), S(0)] -> P(sum)
///   add      "ab,b->ab"    shard a: [S(0), R] -> S(0)   b: [S(1), S(0)] -> S(1)
///   sum(1)   "ab->a"       shard a: S(0) -> S(0)        b: S(1) -> P(sum)
namespace tessera::rules {

/// kUnsharded for a dim that cannot be sharded: an element of the result depends on all of it, or it has size 1
/// where others are larger.
using Letters = c10::SmallVector<char, 6>;
inline constexpr char kUnsharded = '.';

/// letters("mk") == {'m', 'k'}
TESSERA_API Letters letters(std::string_view text);
/// identity(3) == letters("abc")
TESSERA_API Letters identity(size_t ndim);

struct Einsum {
  std::vector<Letters> inputs;
  std::vector<Letters> outputs;
  /// What an output that lacks a letter is if that letter is sharded. Nothing: it cannot be.
  std::optional<Placement> contracted = Partial();
  /// Sets of inputs that may be partial sums, or averages, at once, with the others replicated; the outputs
  /// are then too. add: {{0, 1}}; mul: {{0}, {1}}.
  std::vector<std::vector<size_t>> linear = {};
  /// Inputs that are added to the rest: if a letter they lack is contracted, they are partial.
  std::vector<size_t> added = {};
  /// Reductions that may be left to be done on the results, if all inputs are partial so.
  std::vector<ReduceOp> kept = {};
  /// The same of all reductions: data are only moved.
  bool keeps_all = false;
  /// See Strategy.
  bool contiguous = false;
};

/// "mk,kn->mn"
TESSERA_API Einsum einsum(std::string_view text);

/// What torch.einsum's equation says of operands with so many dims; dims of "..." get letters of their own.
/// Nothing if a dim occurs twice in one operand, or the equation does not fit.
///   "...k,nk" of 3 and 2 dims -> "abk,nk->abn"
TESSERA_API std::optional<Einsum> from_equation(std::string_view equation, c10::IntArrayRef ndims);

/// The size of each letter of some tensors; nothing if two differ in it.
TESSERA_API std::optional<std::map<char, int64_t>> letter_sizes(const std::vector<Letters>& tensors,
                                                                const std::vector<c10::IntArrayRef>& shapes);

/// The strategies of an einsum, those first that keep the outputs sharded. Letters of outputs that no input has
/// are not sharded.
TESSERA_API std::vector<Strategy> strategies_of(const Einsum& einsum);

}  // namespace tessera::rules
