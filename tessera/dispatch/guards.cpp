#include <tessera/dispatch/guards.h>
#include <tessera/error.h>

#include <cstdlib>
#include <string_view>

namespace tessera {

namespace {

using Communication = ThreadScope<std::pair<ImplicitCommunication, bool>, ImplicitCommunicationGuard>;

/// How many guards of communication the thread has. Without any, the environment counts.
thread_local int communication_guards = 0;

ImplicitCommunication mode_of_environment() {
  const char* const given = std::getenv("TESSERA_STRICT");
  const std::string_view text = given ? given : "";
  if (text.empty() || text == "0") return ImplicitCommunication::allowed;
  TESSERA_CHECK_VALUE(
      text == "1" || text == "forbid" || text == "warn", "TESSERA_STRICT is \"", text,
      "\": expected 1 or \"forbid\" to forbid implicit communication, \"warn\" to warn about it, or 0.");
  return text == "warn" ? ImplicitCommunication::warned : ImplicitCommunication::forbidden;
}

}  // namespace

ImplicitCommunication implicit_communication() {
  if (communication_guards > 0) return Communication::current().first;
  static const ImplicitCommunication of_environment = mode_of_environment();
  return of_environment;
}
bool implicit_communication_is_strict() { return Communication::current().second; }
ImplicitCommunicationGuard::ImplicitCommunicationGuard(ImplicitCommunication mode, bool strict)
    : scope_({mode, strict}) {
  ++communication_guards;
}
ImplicitCommunicationGuard::~ImplicitCommunicationGuard() { --communication_guards; }

bool implicit_replication() { return ThreadScope<bool, ImplicitReplicationGuard>::current(); }
ImplicitReplicationGuard::ImplicitReplicationGuard() : scope_(true) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() = default;

bool loss_parallel() { return ThreadScope<bool, LossParallel>::current(); }
LossParallel::LossParallel() : scope_(true) {}
LossParallel::~LossParallel() = default;

}  // namespace tessera
