#include <tessera/dispatch/register_kernels.h>
#include <tessera/error.h>
#include <tessera/ops/family.h>

#include <set>

/// At load: the rules of all operators, then a kernel for each operator of libtorch. Both happen here, as one
/// step, because which operators get a kernel depends on which have a rule.
namespace tessera::ops {

namespace {

/// A table of rules, and what holds of all operators in it.
struct Family {
  const char* name;
  Table (*rules)();
  /// Kernels go through TensorIterator or BLAS, which take any strides.
  bool takes_slices = false;
  bool keeps_memory_format = false;
};

const Family kFamilies[] = {
    {.name = "pointwise", .rules = pointwise_rules, .takes_slices = true},
    {.name = "matmul", .rules = matmul_rules, .takes_slices = true},
    {.name = "reduce", .rules = reduce_rules},
    {.name = "normalize", .rules = normalize_rules},
    {.name = "loss", .rules = loss_rules},
    {.name = "embedding", .rules = embedding_rules},
    {.name = "attention", .rules = attention_rules},
    {.name = "convolution", .rules = convolution_rules, .keeps_memory_format = true},
    {.name = "pooling", .rules = pooling_rules, .keeps_memory_format = true},
    {.name = "interpolate", .rules = interpolate_rules, .keeps_memory_format = true},
    {.name = "spatial", .rules = spatial_rules, .keeps_memory_format = true},
    {.name = "view", .rules = view_rules},
    {.name = "join", .rules = join_rules, .keeps_memory_format = true},
    {.name = "index", .rules = index_rules},
    {.name = "select", .rules = select_rules},
    {.name = "sort", .rules = sort_rules},
    {.name = "scan", .rules = scan_rules},
    {.name = "factory", .rules = factory_rules},
    {.name = "list", .rules = list_rules},
    {.name = "linalg", .rules = linalg_rules},
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
