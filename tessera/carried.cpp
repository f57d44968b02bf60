#include <tessera/carried.h>

#include <string_view>
#include <vector>

namespace tessera::detail {

namespace {

constexpr std::string_view kName = "TESSERA_SCOPES";
constexpr c10::DebugInfoKind kKind(&kName);

std::vector<std::unique_ptr<c10::DebugInfoGuard>>& carried_guards() {
  thread_local std::vector<std::unique_ptr<c10::DebugInfoGuard>> guards;
  return guards;
}

}  // namespace

CarriedBase* innermost_carried() { return static_cast<CarriedBase*>(c10::ThreadLocalDebugInfo::get(kKind)); }

void push_carried(std::shared_ptr<CarriedBase> value) {
  carried_guards().push_back(std::make_unique<c10::DebugInfoGuard>(kKind, std::move(value)));
}

void pop_carried() { carried_guards().pop_back(); }

}  // namespace tessera::detail
