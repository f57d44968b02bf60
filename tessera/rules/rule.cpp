#include <tessera/error.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace tessera::rules {

namespace {

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

  void set(const std::vector<std::string>& ops, Rule rule) {
    const std::lock_guard lock(mutex_);
    const Rule* kept = kept_.emplace_back(std::make_unique<Rule>(std::move(rule))).get();
    for (const std::string& op : ops) rules_[op] = kept;
    ++detail::registry_version;
  }

  std::vector<std::pair<std::string, const Rule*>> all() {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<std::string, const Rule*>> result(rules_.begin(), rules_.end());
    std::erase_if(result, [](const auto& each) { return each.first == kAnyPointwise; });
    return result;
  }

 private:
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

std::optional<size_t> OpCall::position(std::string_view name) const {
  const auto& all = schema->arguments();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].name() == name) return i;
  }
  return std::nullopt;
}

std::optional<size_t> OpCall::tensor(std::string_view name) const {
  const auto wanted = position(name);
  const auto found = wanted ? std::lower_bound(positions.begin(), positions.end(), *wanted) : positions.end();
  if (found == positions.end() || *found != *wanted) return std::nullopt;
  return found - positions.begin();
}

const std::string& OpCall::name_of(size_t index) const {
  return schema->arguments()[positions[index]].name();
}

bool OpCall::has(std::string_view name) const { return position(name).has_value() && !value(name).isNone(); }

const c10::IValue& OpCall::value(std::string_view name) const {
  const auto found = position(name);
  TESSERA_CHECK(found, schema->name(), ": has no argument '", std::string(name),
                "' that its sharding rule reads.");
  TESSERA_CHECK(!readable || std::find(readable->begin(), readable->end(), name) != readable->end(),
                schema->name(), ": its sharding rule reads '", std::string(name),
                "', but does not name it among the arguments that it reads.");
  return arguments[*found];
}

std::vector<int64_t> OpCall::integers(std::string_view name) const {
  const c10::IValue& given = value(name);
  if (given.isNone()) return {};
  if (given.isInt()) return {given.toInt()};
  return given.toIntVector();
}

const Rule* find_rule(const std::string& op, bool is_pointwise) {
  Registry& registry = Registry::instance();
  if (const Rule* rule = registry.find(op)) return rule;
  if (const auto name = functional_name(op)) {
    if (const Rule* rule = registry.find(*name)) return rule;
  }
  return is_pointwise ? registry.find(kAnyPointwise) : nullptr;
}

void add_rule(const std::vector<std::string>& ops, Rule rule) {
  Registry::instance().set(ops, std::move(rule));
}

Rule explicit_strategies(std::vector<Strategy> options) {
  auto propose = [options = std::move(options)](const OpCall& call) -> std::optional<Strategies> {
    for (const Strategy& option : options) {
      TESSERA_CHECK_VALUE(option.inputs.size() == call.tensors.size(), call.schema->name(),
                          ": a strategy of its sharding rule has ", option.inputs.size(),
                          " inputs, but the call has ", call.tensors.size(), " tensors.");
    }
    return Strategies{options};
  };
  return {"given strategies", propose, {}, "registered by the user"};
}

Rule::Rule(Form given, Names more) : form(std::move(given)), reads(rules::reads(form)) {
  reads.insert(reads.end(), more.begin(), more.end());
}

Rule::Rule(std::string text, std::function<std::optional<Strategies>(const OpCall&)> propose, Names reads,
           std::string why)
    : form(ByFunction{std::move(text), std::move(propose), std::move(why)}), reads(std::move(reads)) {}

std::string Rule::text() const {
  std::string result = itemwise ? "item by item, " : "";
  result += rules::text(form);
  if (!local.text.empty()) result += "; " + local.text;
  return result;
}

std::optional<Strategies> Rule::propose(const OpCall& call) const {
  auto result = rules::propose(form, call);
  if (result && !result->decompose && local.of) result->localize = local.of(call);
  return result;
}

std::atomic<uint64_t> detail::registry_version{1};

std::vector<std::pair<std::string, const Rule*>> all_rules() { return Registry::instance().all(); }

}  // namespace tessera::rules
