#pragma once

#include <tessera/rules/einsum.h>
#include <tessera/rules/strategy.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

/// The forms of sharding rules. A rule is a value of one of them: the strategies for a call (`propose`) and
/// the line for people (`text`) both follow from that value, so that neither can drift from the other.
/// Arguments are given by name. A set that names an argument which the operator lacks, or which was left out,
/// does not count.
namespace tessera::rules {

struct TESSERA_API Rule;

using Names = std::vector<std::string>;

/// Computed by other operators, on the distributed tensors themselves.
struct Decomposition {
  Names by;  // these operators
  Function compute;
  /// It writes into the arguments itself that the operator writes into.
  bool writes = false;
};

/// A distributed kernel for dims of which an element of the result depends on all elements: where one of these
/// is sharded, the ranks compute together, instead of gathering it. Of operators with one tensor.
struct Collective {
  std::string text;
  /// What a rank computes along these dims; nothing where gathering takes less.
  std::function<Localize(const OpCall& call, const std::vector<int64_t>& dims)> of;
  /// The results are sharded as the input is; else they are replicated.
  bool shards_results = false;
  /// See Strategy.
  bool contiguous = true;
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
  /// Arguments with which the result never falls, of floating numbers: P(max) of one stays P(max), and P(min) P(min),
  /// while the others are replicated. NaN must give NaN.
  Names rises = {};
  /// The same of those with which it never rises: P(max) becomes P(min), and P(min) P(max).
  Names falls = {};
  /// It is the largest, or the smallest, of the arguments with which it rises: these may be partial so at once.
  std::optional<ReduceOp> joins = {};
};

/// Dims as letters. The inputs are the tensor arguments of the operator, in order.
///   "mk,kn->mn"         dims with one letter are sharded alike; what lacks a sharded letter is partial
///   "Bmk,Bkn->Bmn"      a capital stands for any number of dims, broadcast against each other
///   "B..,B.->B.."       `.` is an unsharded dim, and `..` any number of them; after a capital `inner` of them.
///                       Results may end with `..`: what a rank computes has them
///   "B..,..?->B*,B.."   results may end with `*`: the dims that `..` of the first input is, with their sizes
///   "Bk,nk,+n?->Bn"     `+` is added to the rest, broadcast to the first result; `?` may be left out
///   "xy,.->.y,=."       `=` is a result that does not depend on what is sharded: each rank computes it
struct Pattern {
  /// The first that fits the numbers of dims is taken.
  Names letters;
  /// Sets of arguments that may be partial sums, or averages, at once.
  std::vector<Names> linear = {};
  /// If not 0: only so many of the first results are linear in these. The others do not depend on them.
  size_t linear_results = 0;
  /// A product: linear in each input, together with what is added. Not of bool.
  bool product = false;
  /// Integers are left to the replicated fallback.
  bool no_integers = false;
  /// What a result that lacks a sharded letter is. Nothing: that letter is not sharded.
  std::optional<Placement> contracted = Partial();
  /// How many dims `..` after a capital stands for: this many, or as many as the argument lists.
  std::variant<int64_t, std::string> inner = int64_t{0};
  /// Letters, or capitals, of which each rank must hold one contiguous range; see Strategy.
  std::string contiguous = {};
  /// Capitals are broadcast against each other. Else they stand for the same dims in all tensors.
  bool broadcasts = true;
  /// An element of the result is taken from one rank, others have zeros there. So `contracted` of bool is
  /// P(any).
  bool selects = false;
  /// Results of shape [0] where an argument has this value.
  struct EmptyResults {
    std::string argument;
    std::variant<bool, std::string> value;
    std::vector<size_t> results;
  };
  std::vector<EmptyResults> empty_results = {};
  /// Tensors whose values do not matter: they may stay partial sums.
  Names unread = {};
  /// Left to the replicated fallback: calls in which one of these arguments is true, or with empty tensors.
  Names unless = {};
  bool never_empty = false;
  /// The first result lies in memory as the first input does.
  bool keeps_strides = false;
  /// Where an unsharded dim is sharded.
  std::optional<Decomposition> if_sharded = {};
  /// Data are only moved: any partial placement stays.
  bool moves = false;
  /// The result shares the input's memory: its strides are those that libtorch computes.
  bool is_view = false;
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
  std::optional<Collective> collective = {};
};

/// Dims of which an element of the result depends on all elements. All tensors, and all results, have the same
/// other dims, which are sharded alike.
struct UnshardedDims {
  /// Arguments that name them; or dims counted from the end, below zero.
  Names dims = {};
  std::vector<int64_t> last = {};
  /// They are all dims but these.
  bool all_but = false;
  /// The other dims are broadcast against each other.
  bool broadcasts = false;
  size_t results = 1;
  /// Results have the size of the first input in these dims too; else as the local result has them.
  bool same_size = true;
  /// Results lie in memory as the first input does.
  bool keeps_strides = false;
  /// Each rank must have something in the other dims: the operator refuses empty tensors.
  bool never_empty = false;
  /// Not where partial values would change their dtype.
  std::vector<Names> linear = {};
  std::optional<Decomposition> if_sharded = {};
  std::optional<Collective> collective = {};
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

/// Dims of one tensor are moved, dropped or added; arguments name them. The other dims may be sharded, and
/// stay so.
///   transpose: {.swapped = {"dim0", "dim1"}}      diagonal: {.dropped = {"dim1", "dim2"}, .last_added = 1}
struct DimMap {
  Names unsharded = {};      // they stay, with the size they have
  Names dropped = {};        // and unsharded
  Names added = {};          // dims of the result
  int64_t last_dropped = 0;  // so many of the last dims; the named ones are among those before
  int64_t last_added = 0;    // so many new ones, the last of the result
  Names swapped = {};        // two
  std::string order = {};    // a list of the input's dims, in the order of the result
  /// Only those of `dropped` that have size 1, or all that have if the operator lacks that argument.
  bool only_ones = false;
  /// New dims are in front, and dims whose size changes are unsharded.
  bool resizes = false;
  /// An argument that is the result's shape: a rank's is the local shape.
  std::string sizes = {};
  /// If one dim alone is unsharded, it may be sharded too: the local step exchanges what changes its rank.
  bool exchanges = false;
  /// An empty list of unsharded dims stands for all.
  bool empty_is_all = false;
  /// Partial sums and averages may stay so. Else all partial placements may: data are only moved.
  bool linear = false;
  /// The result shares the input's memory: its shape and strides are those that libtorch computes.
  bool is_view = false;
  /// Where an unsharded or dropped dim is sharded.
  std::optional<Decomposition> if_sharded = {};
};

/// The tensor in the shape `size`: dims are split and joined. Shards stay where each rank can keep what it
/// has, strided if they are not of the first dim that is joined.
struct Reshape {};

/// The p-norm over dims, as Reduction has them.
struct Norm {
  std::string order;  // the argument that is p
  /// No root is taken of the sum of the powers.
  bool powers = false;
};

/// How dims of planes are sharded in a call.
struct SpatialSharding {
  Shape sizes;  // of these dims, in the result
  Localize localize;
};

/// Each plane, which is the last dims, by itself. There is one for each of the batch and the channels, which
/// are sharded alike. No rank may be without channels.
struct Planes {
  int64_t inner;  // how many dims a plane has
  size_t results = 1;
  /// The result is the gradient of `self`, or of a tensor of shape `input_size`. Else its planes are as large
  /// as a rank computes them.
  bool gradient = false;
  /// The first tensor may be a partial sum.
  bool linear = false;
  /// Dtypes that are left to the replicated fallback.
  std::vector<at::ScalarType> except = {};
  /// An argument with a row for each plane: [batch, channels, ...], even where `self` has no batch.
  std::string rows = {};
  /// Planes may be sharded too, where it says how: each rank fetches the halo that its shard needs.
  std::function<std::optional<SpatialSharding>(const OpCall&)> spatial = {};
  Names spatial_reads = {};  // the arguments besides tensors that it looks at
};

/// An index into the dim of `self` that `dim` names. The local step sees to indices that point to what other
/// ranks hold.
struct IndexedDim {
  /// What is done with what the index points to: it is the result, or is replaced by `src` or `source`, if
  /// there is one, or these are added to it.
  enum class Access { read, write, add } access;
  /// An index for each element, in a tensor of as many dims (gather, scatter); else for slices, in a vector
  /// (index_select, index_add).
  bool elementwise;
  /// Each element of the result is one that was there, or one that is written: any partial values may stay so.
  bool moves = false;
};

/// As one of several rules, by the value of an argument.
struct Cases {
  struct TESSERA_API Case {
    std::string name;  // of the value, for people
    std::variant<bool, int64_t> value;
    std::shared_ptr<const Rule> rule;
    Case(std::string name, std::variant<bool, int64_t> value, Rule rule);
  };
  std::string argument;
  std::vector<Case> cases;
};

using Form = std::variant<ByFunction, Pointwise, Pattern, Reduction, UnshardedDims, LikeInput, AsItIs,
                          Decomposition, DimMap, Reshape, Norm, Planes, IndexedDim, Cases>;

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
