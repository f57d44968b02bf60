#pragma once

#include <tessera/rules/einsum.h>
#include <tessera/rules/rule.h>

#include <string>
#include <vector>

/// What the families of rules share. Each is a table in a file of its own; rule.cpp puts them together.
namespace tessera::rules {

/// Operators of one rule; without a namespace: of "aten".
struct Entry {
  std::vector<std::string> ops;
  Rule rule;
};
using Table = std::vector<Entry>;

Table pointwise_rules();
Table matmul_rules();
Table reduce_rules();
Table view_rules();
Table factory_rules();
Table normalize_rules();
Table embedding_rules();
Table loss_rules();
Table join_rules();
Table index_rules();
Table select_rules();
Table scan_rules();
Table sort_rules();
Table convolution_rules();
Table spatial_rules();
Table pooling_rules();
Table interpolate_rules();
Table attention_rules();
Table linalg_rules();
Table random_rules();
Table list_rules();

/// The same rules, of operators that can all be tried.
Table tried(Table table);

/// Dtypes of the tensors of a call, in order.
using Dtypes = c10::ArrayRef<at::ScalarType>;

/// What operators may refuse.
bool not_floating(Dtypes dtypes);      // the first
bool different_floats(Dtypes dtypes);  // beside integers
bool not_one_float(Dtypes dtypes);     // either

/// Norms over all dims or some; `order`: the name of the argument that is p.
Rule norm_rule(const std::string& order);

/// The rule of operators that libtorch calls pointwise.
Rule any_pointwise();

using Shape = std::vector<int64_t>;

/// A dim counted from the start.
int64_t wrapped(int64_t dim, int64_t ndim);
/// The same of several; none: all.
Shape wrapped(Shape dims, int64_t ndim);
bool contains(const Shape& dims, int64_t dim);

/// Strides without gaps, with the dims in the same order in memory.
Shape dense_strides(const Spec& spec);

/// The strides of a new tensor like the first, as the call's memory_format, if any, says.
Shape new_strides(const Call& call);

/// Whether one of the dims is cut.
bool is_cut(const Spec& spec, const Shape& dims);
/// How many of the dims' elements this rank holds, over how many there are.
double local_share(const Spec& spec, const Shape& dims);

/// The letters of `shape` when it meets `target` from the right, as in broadcasting.
Letters broadcast(c10::IntArrayRef shape, c10::IntArrayRef target, const Letters& letters);

/// Sets of arguments, by position, that may be partial sums at once: add {{0, 1}}, mul {{0}, {1}}.
using Linear = std::vector<std::vector<size_t>>;

/// Each element of the results depends on the corresponding elements of the inputs only.
std::optional<Proposal> pointwise(const Call& call, const Linear& linear = {},
                                  std::vector<ReduceOp> kept = {});

/// Whether parts of a sum may be converted, each by itself, to the dtype that the call asks for, if it does.
bool converts_parts(const Call& call);

/// The sets of tensors that such sets of arguments are, as far as all of them are there.
std::vector<std::vector<size_t>> linear_tensors(const Call& call, const Linear& linear);

/// Whether an item of a list of indices, as in x[i, :, j], is one.
bool is_index(const c10::IValue& item);

/// What the operator itself gives.
Stack call_operator(const c10::OperatorHandle& op, Stack arguments);

/// The operator's composite kernel, on the distributed tensors themselves.
Function composite();
/// The rule of operators that are computed so. `text`: by which operators.
Rule composed(std::string text);

/// A local result for each position, from the global sizes of an output.
std::function<Local(const Chosen&)> with_local_sizes(size_t position);

/// Of indices into a dim of which this rank holds a range: where they point to in it, `other` for those that
/// point elsewhere, and which these are. Throws if one is outside of the dim, an IndexError if
/// `is_index_error`, as libtorch does for some operators and not for others. `wraps`: negative ones count
/// from the end.
struct Masked {
  at::Tensor indices, elsewhere;
  Masked(const at::Tensor& global, int64_t offset, int64_t held, int64_t size, int64_t other,
         bool wraps = false, bool is_index_error = true);
};

/// A new tensor placed like the first, but for what is partial: its value is whole on every rank. What the
/// first holds does not matter.
Proposal like_first(const Call& call);

/// One tensor whose data are moved as letters say: "ab" -> "ba".
Proposal moved(Letters input, Letters output, Result result);

/// All tensors are cut alike along all dims but `dims`, which must be whole; so are the results, which are as
/// `results` say.
Proposal whole_dims(const Call& call, const Shape& dims, std::vector<Result> results);

}  // namespace tessera::rules
