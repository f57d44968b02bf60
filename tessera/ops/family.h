#pragma once

#include <tessera/kernels/call.h>
#include <tessera/rules/einsum.h>
#include <tessera/rules/rule.h>
#include <tessera/rules/shape.h>

#include <string>
#include <vector>

/// What the families of operators share. Each is a table in a file of its own; load.cpp puts them together.
namespace tessera::ops {

using namespace rules;    // NOLINT: the language in which all of these are written
using namespace kernels;  // NOLINT

/// Operators of one rule; without a namespace: of "aten".
struct Entry {
  std::vector<std::string> ops;
  Rule rule;
};
using Table = std::vector<Entry>;

Table pointwise_rules();
Table matmul_rules();
Table grouped_rules();
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
/// The same rule, of an operator whose inputs LossParallel keeps from being gathered.
Rule for_loss_parallel(Rule rule);

/// Dtypes of the tensors of a call, in order.
using Dtypes = c10::ArrayRef<at::ScalarType>;

/// What operators may refuse.
bool not_floating(Dtypes dtypes);      // the first
bool different_floats(Dtypes dtypes);  // beside integers
bool not_one_float(Dtypes dtypes);     // either

/// The rule of operators that libtorch calls pointwise.
Rule any_pointwise();

/// The name of the operator's first argument, of operators that call it differently.
const std::string& first_argument(const OpCall& call);

/// Whether an item of a list of indices, as in x[i, :, j], is one.
bool is_index(const c10::IValue& item);

/// The operator's composite kernel, on the distributed tensors themselves.
Function composite();
/// The rule of operators that are computed so, by these operators.
Rule composed(Names by);

/// One tensor whose data are moved as letters say: "ab" -> "ba".
Strategies moved(Letters input, Letters output, Result result);

/// All tensors are sharded alike along all dims but `dims`; so are the results, which are as `results` say.
Strategies unsharded_dims(const OpCall& call, const Shape& dims, std::vector<Result> results);

}  // namespace tessera::ops
