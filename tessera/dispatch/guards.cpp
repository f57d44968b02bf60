#include <tessera/carried.h>
#include <tessera/dispatch/guards.h>
#include <tessera/error.h>

#include <cstdlib>
#include <string_view>

namespace tessera {

namespace {

using Communication = ThreadScope<std::pair<ImplicitCommunication, bool>, ImplicitCommunicationGuard>;

using CarriedCommunication = Carried<std::pair<ImplicitCommunication, bool>, ImplicitCommunicationGuard>;
using CarriedReplication = Carried<bool, ImplicitReplicationGuard>;
using CarriedLossParallel = Carried<bool, LossParallel>;

/// How many guards of communication the thread has. Without any, those of the thread that called backward count, or
/// the environment.
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
  if (const auto* carried = CarriedCommunication::find()) return carried->first;
  static const ImplicitCommunication of_environment = mode_of_environment();
  return of_environment;
}
bool implicit_communication_is_strict() {
  if (communication_guards > 0) return Communication::current().second;
  return CarriedCommunication::find_or({}).second;
}
ImplicitCommunicationGuard::ImplicitCommunicationGuard(ImplicitCommunication mode, bool strict)
    : scope_({mode, strict}) {
  ++communication_guards;
  CarriedCommunication::push({mode, strict});
}
ImplicitCommunicationGuard::~ImplicitCommunicationGuard() {
  CarriedCommunication::pop();
  --communication_guards;
}

bool implicit_replication() {
  return ThreadScope<bool, ImplicitReplicationGuard>::current() || CarriedReplication::find_or(false);
}
ImplicitReplicationGuard::ImplicitReplicationGuard() : scope_(true) { CarriedReplication::push(true); }
ImplicitReplicationGuard::~ImplicitReplicationGuard() { CarriedReplication::pop(); }

bool loss_parallel() {
  return ThreadScope<bool, LossParallel>::current() || CarriedLossParallel::find_or(false);
}
LossParallel::LossParallel() : scope_(true) { CarriedLossParallel::push(true); }
LossParallel::~LossParallel() { CarriedLossParallel::pop(); }

}  // namespace tessera
