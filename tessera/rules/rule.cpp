#include <tessera/error.h>
#include <tessera/rules/family.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace tessera::rules {

namespace {

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool differ(Dtypes dtypes) {
  return std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) { return each != dtypes[0]; });
}

// Dtypes that the operators of a family may refuse.
bool no_products(Dtypes dtypes) { return dtypes[0] == at::kBool || differ(dtypes); }
bool no_convolution(Dtypes dtypes) { return not_floating(dtypes) || differ(dtypes); }
bool no_image(Dtypes dtypes) { return dtypes[0] != at::kByte && not_one_float(dtypes); }
/// Small floats may have parameters of floats.
bool no_norm(Dtypes dtypes) {
  const bool takes_float = at::isReducedFloatingType(dtypes[0]);
  return not_floating(dtypes) || std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) {
           return each != dtypes[0] && !(takes_float && each == at::kFloat);
         });
}
bool not_of_lapack(Dtypes dtypes) {
  const at::ScalarType dtype = at::toRealValueType(dtypes[0]);
  return (dtype != at::kFloat && dtype != at::kDouble) || different_floats(dtypes);
}

/// Rules by name. One that was replaced stays in memory, as calls under way may still use it.
class Registry {
 public:
  static Registry& instance() {
    static auto& registry = *new Registry;
    return registry;
  }

  const Rule* find(const std::string& op) {
    const std::lock_guard lock(mutex_);
    const auto found = rules_.find(op);
    return found == rules_.end() ? nullptr : found->second;
  }

  void set(const std::string& op, Rule rule) {
    const std::lock_guard lock(mutex_);
    rules_[op] = keep(std::move(rule));
    ++detail::registry_version;
  }

  std::vector<std::pair<std::string, const Rule*>> all() {
    const std::lock_guard lock(mutex_);
    return {rules_.begin(), rules_.end()};
  }

 private:
  Registry() {
    struct Family {
      const char* name;
      Table (*rules)();
      bool (*may_refuse_dtypes)(Dtypes) = nullptr;
    };
    const Family families[] = {{"pointwise", pointwise_rules},
                               {"matmul", matmul_rules, no_products},
                               {"reduce", reduce_rules},
                               {"normalize", normalize_rules, no_norm},
                               {"loss", loss_rules, not_one_float},
                               {"embedding", embedding_rules},
                               {"attention", attention_rules, not_one_float},
                               {"convolution", convolution_rules, no_convolution},
                               {"pooling", pooling_rules, not_one_float},
                               {"interpolate", interpolate_rules, no_image},
                               {"spatial", spatial_rules, not_one_float},
                               {"view", view_rules},
                               {"join", join_rules},
                               {"index", index_rules},
                               {"select", select_rules},
                               {"sort", sort_rules},
                               {"scan", scan_rules},
                               {"factory", factory_rules},
                               {"list", list_rules},
                               {"linalg", linalg_rules, not_of_lapack},
                               {"random", random_rules}};
    for (const auto& [family, table, may_refuse_dtypes] : families) {
      for (Entry& entry : table()) {
        entry.rule.family = family;
        if (!entry.rule.may_refuse_dtypes) entry.rule.may_refuse_dtypes = may_refuse_dtypes;
        if (entry.rule.family == "index") entry.rule.checks_values_of = {"index", "indices"};
        // Their kernels go through TensorIterator or BLAS, which take any strides.
        entry.rule.takes_slices = is_one_of(entry.rule.family, {"pointwise", "matmul"});
        entry.rule.keeps_memory_format |=
            is_one_of(entry.rule.family, {"convolution", "pooling", "interpolate", "spatial", "join"});
        const Rule* rule = keep(std::move(entry.rule));
        for (const std::string& op : entry.ops) {
          const std::string name = op.find("::") == std::string::npos ? "aten::" + op : op;
          TESSERA_CHECK(rules_.emplace(name, rule).second, name, " has two sharding rules.");
        }
      }
    }
  }

  const Rule* keep(Rule rule) { return kept_.emplace_back(std::make_unique<Rule>(std::move(rule))).get(); }

  std::mutex mutex_;
  std::map<std::string, const Rule*> rules_;
  std::vector<std::unique_ptr<Rule>> kept_;
};

/// "aten::add_.Tensor" -> "aten::add.Tensor"; nothing if it is not the name of an in-place operator.
std::optional<std::string> functional_name(const std::string& op) {
  const size_t dot = op.find('.');
  const std::string name = op.substr(0, dot);
  if (!name.ends_with('_') || name.ends_with("__")) return std::nullopt;
  return name.substr(0, name.size() - 1) + (dot == std::string::npos ? "" : op.substr(dot));
}

}  // namespace

std::optional<size_t> Call::position(std::string_view name) const {
  const auto& all = schema->arguments();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].name() == name) return i;
  }
  return std::nullopt;
}

std::optional<size_t> Call::tensor(std::string_view name) const {
  const auto wanted = position(name);
  const auto found = wanted ? std::lower_bound(positions.begin(), positions.end(), *wanted) : positions.end();
  if (found == positions.end() || *found != *wanted) return std::nullopt;
  return found - positions.begin();
}

bool Call::has(std::string_view name) const { return position(name).has_value() && !value(name).isNone(); }

const c10::IValue& Call::value(std::string_view name) const {
  const auto found = position(name);
  TESSERA_CHECK(found, schema->name(), ": has no argument '", std::string(name),
                "' that its sharding rule reads.");
  TESSERA_CHECK(!readable || std::find(readable->begin(), readable->end(), name) != readable->end(),
                schema->name(), ": its sharding rule reads '", std::string(name),
                "', but does not name it among the arguments that it reads.");
  return arguments[*found];
}

std::vector<int64_t> Call::integers(std::string_view name) const {
  const c10::IValue& given = value(name);
  if (given.isNone()) return {};
  if (given.isInt()) return {given.toInt()};
  return given.toIntVector();
}

const Rule* find_rule(const std::string& op, bool is_pointwise) {
  static const Rule pointwise = any_pointwise();
  Registry& registry = Registry::instance();
  if (const Rule* rule = registry.find(op)) return rule;
  if (const auto name = functional_name(op)) {
    if (const Rule* rule = registry.find(*name)) return rule;
  }
  return is_pointwise ? &pointwise : nullptr;
}

void add_rule(const std::string& op, Rule rule) { Registry::instance().set(op, std::move(rule)); }

Rule explicit_rows(std::vector<Row> rows) {
  return {"given rows", [rows = std::move(rows)](const Call& call) -> std::optional<Proposal> {
            for (const Row& row : rows) {
              TESSERA_CHECK_VALUE(row.inputs.size() == call.tensors.size(), call.schema->name(),
                                  ": a row of its "
                                  "sharding rule has ",
                                  row.inputs.size(), " inputs, but the call has ", call.tensors.size(),
                                  " tensors.");
            }
            return Proposal{rows};
          }};
}

std::atomic<uint64_t> detail::registry_version{1};

std::vector<std::pair<std::string, const Rule*>> all_rules() { return Registry::instance().all(); }

}  // namespace tessera::rules
