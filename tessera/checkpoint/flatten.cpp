#include <tessera/checkpoint/flatten.h>
#include <tessera/error.h>

namespace tessera::checkpoint {

namespace {

bool has_leaves_of_its_own(const Value& value) {
  if (value.is_tensor() || value.is_dict()) return true;
  if (!value.is_list()) return false;
  for (const Value& item : value.items()) {
    if (has_leaves_of_its_own(item)) return true;
  }
  return false;
}

void add_leaves(Value& value, Path& path, std::map<std::string, StateLeaf>& leaves) {
  if (value.is_dict() && value.size() > 0) {
    for (Value::Entry& entry : value.entries()) {
      path.emplace_back(entry.key);
      add_leaves(entry.value, path, leaves);
      path.pop_back();
    }
  } else if (value.is_list() && has_leaves_of_its_own(value)) {
    for (size_t i = 0; i < value.size(); ++i) {
      path.emplace_back(static_cast<int64_t>(i));
      add_leaves(value.items()[i], path, leaves);
      path.pop_back();
    }
  } else {
    const std::string key = key_of(path);
    TESSERA_CHECK_VALUE(leaves.emplace(key, StateLeaf{path, &value}).second,
                        "Two entries of the state dict have the key '", key,
                        "', as the keys on the way to an entry are joined by dots. Rename one of them.");
  }
}

}  // namespace

std::map<std::string, StateLeaf> flatten(Value& state) {
  TESSERA_CHECK_VALUE(state.is_dict(), "A state dict must be a dict, got ", state.kind(), ".");
  std::map<std::string, StateLeaf> leaves;
  Path path;
  if (state.size() > 0) add_leaves(state, path, leaves);
  return leaves;
}

void insert(Value& state, const Path& path, Value value) {
  Value* at = &state;
  for (const PathStep& step : path) {
    if (const auto* key = std::get_if<std::string>(&step)) {
      TESSERA_CHECK(at->is_none() || at->is_dict(), "The checkpoint has both '", key_of(path), "' and a ",
                    at->kind(), " on the way to it.");
      at = &(*at)[*key];
    } else {
      const int64_t index = std::get<int64_t>(step);
      if (at->is_none()) *at = Value::list();
      TESSERA_CHECK(at->is_list() && index >= 0 && index <= static_cast<int64_t>(at->size()),
                    "The checkpoint has '", key_of(path),
                    "', but no list with items before it on the way to it.");
      if (index == static_cast<int64_t>(at->size())) at->items().emplace_back();
      at = &at->items()[index];
    }
  }
  *at = std::move(value);
}

}  // namespace tessera::checkpoint
