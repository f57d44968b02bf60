#include <tessera/dispatch/register_kernels.h>
#include <tessera/error.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <set>

/// At load: the rules of all operators, then a kernel for each operator of libtorch. Both happen here, as one
/// step, because which operators get a kernel depends on which have a rule.
namespace tessera::ops {

namespace {

bool differ(Dtypes dtypes) {
  return std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) { return each != dtypes[0]; });
}

// Dtypes that the operators of a family may refuse.
bool no_products(Dtypes dtypes) { return dtypes[0] == at::kBool || differ(dtypes); }
bool no_grouped_product(Dtypes dtypes) {
  return (dtypes[0] != at::kFloat && dtypes[0] != at::kBFloat16 && dtypes[0] != at::kHalf) ||
         dtypes[1] != dtypes[0];
}
bool no_convolution(Dtypes dtypes) { return not_floating(dtypes) || differ(dtypes); }
bool no_image(Dtypes dtypes) { return dtypes[0] != at::kByte && not_one_float(dtypes); }
/// Small floats may have parameters of float32, or sums.
bool no_float_beside(Dtypes dtypes) {
  const bool takes_float = at::isReducedFloatingType(dtypes[0]);
  return not_floating(dtypes) || std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) {
           return each != dtypes[0] && !(takes_float && each == at::kFloat);
         });
}
bool not_of_lapack(Dtypes dtypes) {
  const at::ScalarType dtype = at::toRealValueType(dtypes[0]);
  return (dtype != at::kFloat && dtype != at::kDouble) || different_floats(dtypes);
}

/// A table of rules, and what holds of all operators in it.
struct Family {
  const char* name;
  Table (*rules)();
  /// Kernels go through TensorIterator or BLAS, which take any strides.
  bool takes_slices = false;
  bool keeps_memory_format = false;
  /// See Rule.
  bool (*may_refuse_dtypes)(Dtypes) = nullptr;
  Names checks_values_of = {};
};

const Family kFamilies[] = {
    {.name = "pointwise", .rules = pointwise_rules, .takes_slices = true},
    {.name = "matmul", .rules = matmul_rules, .takes_slices = true, .may_refuse_dtypes = no_products},
    {.name = "grouped", .rules = grouped_rules, .may_refuse_dtypes = no_grouped_product},
    {.name = "reduce", .rules = reduce_rules},
    {.name = "normalize", .rules = normalize_rules, .may_refuse_dtypes = no_float_beside},
    {.name = "loss", .rules = loss_rules, .may_refuse_dtypes = not_one_float},
    {.name = "embedding", .rules = embedding_rules},
    {.name = "attention", .rules = attention_rules, .may_refuse_dtypes = no_float_beside},
    {.name = "convolution",
     .rules = convolution_rules,
     .keeps_memory_format = true,
     .may_refuse_dtypes = no_convolution},
    {.name = "pooling",
     .rules = pooling_rules,
     .keeps_memory_format = true,
     .may_refuse_dtypes = not_one_float},
    {.name = "interpolate",
     .rules = interpolate_rules,
     .keeps_memory_format = true,
     .may_refuse_dtypes = no_image},
    {.name = "spatial",
     .rules = spatial_rules,
     .keeps_memory_format = true,
     .may_refuse_dtypes = not_one_float},
    {.name = "view", .rules = view_rules},
    {.name = "join", .rules = join_rules, .keeps_memory_format = true},
    {.name = "index", .rules = index_rules, .checks_values_of = {"index", "indices"}},
    {.name = "select", .rules = select_rules},
    {.name = "sort", .rules = sort_rules},
    {.name = "scan", .rules = scan_rules},
    {.name = "factory", .rules = factory_rules},
    {.name = "list", .rules = list_rules},
    {.name = "linalg", .rules = linalg_rules, .may_refuse_dtypes = not_of_lapack},
    {.name = "random", .rules = random_rules},
};

void add_rules() {
  std::set<std::string> known;
  for (const Family& family : kFamilies) {
    for (Entry& entry : family.rules()) {
      Rule& rule = entry.rule;
      rule.family = family.name;
      rule.takes_slices |= family.takes_slices;
      rule.keeps_memory_format |= family.keeps_memory_format;
      if (!rule.may_refuse_dtypes) rule.may_refuse_dtypes = family.may_refuse_dtypes;
      if (rule.checks_values_of.empty()) rule.checks_values_of = family.checks_values_of;
      for (std::string& op : entry.ops) {
        if (op.find("::") == std::string::npos) op = "aten::" + op;
        TESSERA_CHECK(known.insert(op).second, op, " has two sharding rules.");
      }
      rules::add_rule(entry.ops, std::move(rule));
    }
  }
  rules::add_rule({rules::kAnyPointwise}, any_pointwise());
}

[[maybe_unused]] const bool loaded = [] {
  add_rules();
  register_kernels();
  return true;
}();

}  // namespace

}  // namespace tessera::ops
