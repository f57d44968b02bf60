#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/operator_info.h>

#include <algorithm>
#include <map>

#include <c10/util/irange.h>

namespace tessera {

namespace {

/// All that there are. Hold the mutex.
std::vector<const OperatorInfo*>& all() {
  static auto& infos = *new std::vector<const OperatorInfo*>;
  return infos;
}
std::mutex& all_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

/// Null if the argument cannot be a list.
const c10::ListType* list_type(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType)
    return list_type(*type.expectRef<c10::OptionalType>().getElementType());
  return type.kind() == c10::TypeKind::ListType ? &type.expectRef<c10::ListType>() : nullptr;
}

std::map<std::string, uint64_t> counts_of(std::atomic<uint64_t> OperatorInfo::*count) {
  const std::lock_guard lock(all_mutex());
  std::map<std::string, uint64_t> counts;
  for (const OperatorInfo* info : all()) {
    if (info->*count > 0) counts[info->name] += info->*count;
  }
  return counts;
}

}  // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& handle)
    : op(handle),
      schema(op.schema()),
      name(c10::toString(op.operator_name())),
      is_random(op.hasTag(at::Tag::nondeterministic_seeded)),
      is_pointwise(op.hasTag(at::Tag::pointwise)),
      is_composite(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                   !rules::find_rule(name, false)),
      reshapes_in_place(op.hasTag(at::Tag::inplace_view) && name != "aten::detach_"),
      reallocates(name.starts_with("aten::resize") || name.starts_with("aten::set_")),
      is_as_strided(name == "aten::as_strided"),
      is_cast(name == "aten::_to_copy") {
  for (const c10::DispatchKey key : c10::autocast_dispatch_keyset) {
    if (op.hasKernelForDispatchKey(key)) autocast = autocast.add(key);
  }
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == "generator") generator = written.size();
    written.push_back(is_written(argument));
    const c10::ListType* list = list_type(*argument.type());
    is_list.push_back(list);
    has_holes.push_back(list && list->getElementType()->kind() == c10::TypeKind::OptionalType);
    has_out |= argument.is_out();
  }
  for (const c10::Argument& result : schema.returns()) {
    int64_t position = -1;
    for (const size_t i : c10::irange(schema.arguments().size())) {
      const auto* given = schema.arguments()[i].alias_info();
      if (is_written(result) && given && *given == *result.alias_info()) position = static_cast<int64_t>(i);
    }
    returned_argument.push_back(position);
    is_view.push_back(result.alias_info() && !is_written(result));
    has_views |= is_view.back();
  }
  const std::lock_guard lock(all_mutex());
  all().push_back(this);
}

const rules::Rule* OperatorInfo::find_rule() const {
  const rules::Rule* rule = rules::find_rule(name, is_pointwise);
  // Not all in-place operators have the overload name and the tags of the operator that returns a new tensor.
  const c10::OperatorHandle* returning = rule || has_out ? nullptr : functional();
  return returning ? rules::find_rule(c10::toString(returning->operator_name()),
                                      returning->hasTag(at::Tag::pointwise))
                   : rule;
}

const ResolvedRule& OperatorInfo::resolve() const {
  const uint64_t version = rules::registry_version();
  const rules::Rule* rule = find_rule();
  const std::lock_guard lock(mutex_);
  auto result = std::make_unique<ResolvedRule>();
  result->version = version;
  result->rule = rule;
  if (is_random && result->rule && !result->rule->for_random) result->rule = nullptr;
  for (const c10::Argument& argument : schema.arguments()) {
    result->reads.push_back(result->rule && std::find(result->rule->reads.begin(), result->rule->reads.end(),
                                                      argument.name()) != result->rule->reads.end());
  }
  resolved_.store(result.get(), std::memory_order_release);
  return *kept_.emplace_back(std::move(result));  // the one before may still be in use
}

const c10::OperatorHandle* OperatorInfo::functional() const {
  const std::lock_guard lock(mutex_);
  if (!searched_functional_) functional_ = find_functional();
  searched_functional_ = true;
  return functional_ ? &*functional_ : nullptr;
}

std::optional<c10::OperatorHandle> OperatorInfo::find_functional() const {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto fits = [&](const c10::OperatorHandle& op) {
    const auto& others = op.schema().arguments();
    size_t next = 0;
    for (const c10::Argument& argument : schema.arguments()) {
      if (argument.is_out()) continue;
      if (next == others.size() || others[next].name() != argument.name() || is_written(others[next]) ||
          *others[next].type() != *argument.type())
        return false;
      ++next;
    }
    return next == others.size() && op.schema().returns().size() == schema.returns().size();
  };
  std::string base = schema.name();
  if (!has_out) {
    if (!base.ends_with('_')) return std::nullopt;
    base.pop_back();
  }
  for (const c10::OperatorName& other : dispatcher.getAllOpNames()) {
    if (other.name != base) continue;
    const auto op = dispatcher.findSchema(other);
    if (op && fits(*op)) return op;
  }
  return std::nullopt;
}

std::map<std::string, uint64_t> fallback_counts() { return counts_of(&OperatorInfo::fallbacks); }
std::map<std::string, uint64_t> layout_copy_counts() { return counts_of(&OperatorInfo::layout_copies); }

}  // namespace tessera
