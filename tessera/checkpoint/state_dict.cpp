#include <tessera/checkpoint/state_dict.h>
#include <tessera/error.h>

namespace tessera::checkpoint {

StateDict::StateDict() : values_(Value::dict()) {}

StateDict::StateDict(Value values) : values_(std::move(values)) {
  TESSERA_CHECK_VALUE(values_.is_dict(), "A state dict must be a dict, got ", values_.kind(), ".");
}

void StateDict::before_save(std::function<void(Value&)> function) {
  before_save_.push_back(std::move(function));
}

void StateDict::on_load(std::function<void(const Value&)> function) {
  on_load_.push_back(std::move(function));
}

void StateDict::before_load(std::function<void(Value&, const std::vector<std::string>&)> function) {
  before_load_.push_back(std::move(function));
}

Value StateDictHooks::before_save(const StateDict& state) {
  Value values = state.values_;
  for (const auto& function : state.before_save_) function(values);
  return values;
}

void StateDictHooks::before_load(StateDict& state, const Catalog& catalog) {
  std::vector<std::string> keys;
  for (const auto& [key, leaf] : catalog.leaves) keys.push_back(key);
  for (const auto& function : state.before_load_) function(state.values_, keys);
}

void StateDictHooks::on_load(StateDict& state) {
  for (const auto& function : state.on_load_) function(state.values_);
}

}  // namespace tessera::checkpoint
