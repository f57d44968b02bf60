#pragma once

#include <tessera/rules/einsum.h>
#include <tessera/rules/strategy.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

/// The forms of sharding rules. A rule is a value of one of them: the strategies for a call (`propose`) and
/// the line for people (`text`) both follow from that value, so that neither can drift from the other.
/// Arguments are given by name. A set that names an argument which the operator lacks, or which was left out,
/// does not count.
namespace tessera::rules {

using Names = std::vector<std::string>;

/// Computed by other operators, on the distributed tensors themselves.
struct Decomposition {
  Names by;  // these operators
  Function compute;
  /// It writes into the arguments itself that the operator writes into.
  bool writes = false;
};

/// Each element of the results depends on the corresponding elements of the inputs only, which are broadcast.
struct Pointwise {
  /// Sets of arguments that may be partial sums, or averages, at once; the results are then too.
  ///   add: {{"self", "other"}}      mul: {{"self"}, {"other"}}
  std::vector<Names> linear = {};
  /// Reductions that may be left to be done on the results, if all inputs are partial so.
  std::vector<ReduceOp> keeps = {};
  /// It is linear in integers too. Sums of these wrap around, so that only those count that stay of their
  /// dtype.
  bool integers = false;
  /// It is linear only among tensors of one dtype.
  bool same_dtype = false;
};

/// Dims as letters. The inputs are the tensor arguments of the operator, in order.
///   "mk,kn->mn"         dims with one letter are sharded alike; what lacks a letter that is sharded is partial
///   "Bmk,Bkn->Bmn"      a capital stands for any number of dims, broadcast against each other
///   "B..,B.->B.."       `.` is an unsharded dim, and `..` any number of them. Results may end with `..`: what
///                       a rank computes has them
///   "Bk,nk,+n?->Bn"     `+` is added to the rest, broadcast to the first result; `?` may be left out
struct Pattern {
  /// The first that fits the numbers of dims is taken.
  Names letters;
  /// Sets of arguments that may be partial sums, or averages, at once.
  std::vector<Names> linear = {};
  /// A product: linear in each input, together with what is added. Not of bool.
  bool product = false;
  /// Integers are left to the replicated fallback.
  bool no_integers = false;
  /// What a result that lacks a sharded letter is. Nothing: that letter is not sharded.
  std::optional<Placement> contracted = Partial();
  /// How many dims `..` of the first input stands for: this many, or as many as the argument lists.
  std::variant<int64_t, std::string> inner = int64_t{0};
  /// See Strategy.
  bool contiguous = false;
};

/// Some dims are reduced: those that `dim` names, all if it is left out. `keepdim` leaves them with size 1.
struct Reduction {
  /// What each result is where a reduced dim is sharded. Without it, reduced dims are unsharded, and there
  /// are `results` results.
  Placements partial = {};
  size_t results = 1;
  /// Partial sums and averages may stay so, unless their dtype changes.
  bool linear = false;
  /// Reductions that may be left to be done on the results.
  std::vector<ReduceOp> keeps = {};
  /// An empty list of dims stands for all. Else it is left to the replicated fallback.
  bool empty_is_all = false;
  /// Dtypes that are left to the replicated fallback.
  std::vector<at::ScalarType> except = {};
  /// What a rank has that holds nothing of what is reduced, by result: the operator itself would refuse to
  /// reduce nothing. Infinite: the largest or smallest value of the dtype.
  std::vector<double> neutral = {};
  /// A rank's result counts by its share of what is reduced, as a mean's does.
  bool by_share = false;
  /// Where a reduced dim is sharded.
  std::optional<Decomposition> if_sharded = {};
};

/// Dims that an element of the result depends on as a whole. All tensors, and all results, have the same
/// other dims, which are sharded alike.
struct UnshardedDims {
  /// Arguments that name them; or dims counted from the end, below zero.
  Names dims = {};
  std::vector<int64_t> last = {};
  size_t results = 1;
  /// Results have the size of the first input in these dims too; else as the local result has them.
  bool same_size = true;
  /// Each rank must have something in the other dims: the operator refuses empty tensors.
  bool never_empty = false;
  std::vector<Names> linear = {};
  std::optional<Decomposition> if_sharded = {};
};

/// A new tensor, placed like the first: its data do not matter.
struct LikeInput {
  /// Partial stays partial: there is no value yet. Else it becomes Replicate.
  bool keeps_partial = false;
  /// The argument `size`, where there is one, is not looked at, may say another shape, of which the result is
  /// replicated, or must say the shape of the input.
  enum class Size { ignored, any, same } size = Size::ignored;
};

/// Every placement stays as it is: the result has the input's data.
struct AsItIs {
  /// The result shares the input's memory, and so has its strides.
  bool is_view = false;
};

/// A function, where data cannot say it; `why` says so.
struct ByFunction {
  std::string text;
  std::function<std::optional<Strategies>(const OpCall&)> propose;
  std::string why = {};
};

using Form =
    std::variant<ByFunction, Pointwise, Pattern, Reduction, UnshardedDims, LikeInput, AsItIs, Decomposition>;

/// The tensors that sets of arguments are, as indices into the call's, as far as all of a set are there. None
/// is of bool, which has no sums.
TESSERA_API std::vector<std::vector<size_t>> linear_tensors(const OpCall& call,
                                                            const std::vector<Names>& linear);

/// Whether partial sums may be converted, each by itself, to the dtype that the call asks for, if it does.
TESSERA_API bool converts_partial_values(const OpCall& call);

/// The dims that a call reduces, as Reduction says, and what is left.
struct TESSERA_API ReducedDims {
  std::vector<int64_t> dims;  // ascending
  bool keep = false;
  std::vector<int64_t> shape;  // of the result
  Letters letters;             // likewise

  /// Nothing for a list of dims that is given and empty, unless that stands for all.
  static std::optional<ReducedDims> of(const OpCall& call, bool empty_is_all);
  /// Whether there is nothing to reduce.
  bool empty(const Spec& spec) const;
  /// How many elements are reduced to one.
  int64_t count(const Spec& spec) const;
};

/// Ranks that hold nothing of what is reduced have these values. `real`: of the real dtype of complex ones.
TESSERA_API Localize neutral_if_empty(std::vector<int64_t> dims, std::vector<double> values,
                                      bool real = false);

/// One line for people.
TESSERA_API std::string text(const Form& form);

/// What a form says of a call; nothing if it does not apply to it.
TESSERA_API std::optional<Strategies> propose(const Form& form, const OpCall& call);

/// The arguments besides tensors that a form looks at.
TESSERA_API Names reads(const Form& form);

}  // namespace tessera::rules
