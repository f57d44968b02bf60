#include <tessera/dispatch_keys.h>
#include <tessera/random/plain_draws.h>

#include <algorithm>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::random {

namespace {

/// The operators that take a generator, and the position of that argument.
const std::unordered_map<c10::OperatorName, size_t>& operators_with_generator() {
  static const auto& known = *[] {
    auto* result = new std::unordered_map<c10::OperatorName, size_t>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema()) continue;
      if (const auto position = op->schema().argumentIndexWithName("generator"))
        result->emplace(name, static_cast<size_t>(*position));
    }
    return result;
  }();
  return known;
}

bool is_distributed(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().key_set().has(kDTensorKey);
}

}  // namespace

PlainDrawsWatch::PlainDrawsWatch()
    : scope_(this),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&PlainDrawsWatch::look_at)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}

PlainDrawsWatch::~PlainDrawsWatch() { at::removeCallback(handle_); }

std::unique_ptr<at::ObserverContext> PlainDrawsWatch::look_at(const at::RecordFunction& call) {
  PlainDrawsWatch* const innermost = ThreadScope<PlainDrawsWatch*, PlainDrawsWatch>::current();
  const auto name = call.operator_name();
  if (!innermost || !name) return nullptr;
  const auto& known = operators_with_generator();
  const auto found = known.find(*name);
  if (found == known.end()) return nullptr;
  const auto inputs = call.inputs();
  if (found->second >= inputs.size() || !inputs[found->second].isNone() ||
      std::any_of(inputs.begin(), inputs.end(), is_distributed))
    return nullptr;
  for (PlainDrawsWatch* watch = innermost; watch; watch = watch->scope_.outer()) {
    if (watch->seen_.empty()) watch->seen_ = c10::toString(*name);
  }
  return nullptr;
}

}  // namespace tessera::random
