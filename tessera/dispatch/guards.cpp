#include <tessera/dispatch/guards.h>

namespace tessera {

namespace {

using Communication = ThreadScope<std::pair<ImplicitCommunication, bool>, ImplicitCommunicationGuard>;

}  // namespace

ImplicitCommunication implicit_communication() { return Communication::current().first; }
bool implicit_communication_is_strict() { return Communication::current().second; }
ImplicitCommunicationGuard::ImplicitCommunicationGuard(ImplicitCommunication mode, bool strict)
    : scope_({mode, strict}) {}
ImplicitCommunicationGuard::~ImplicitCommunicationGuard() = default;

bool implicit_replication() { return ThreadScope<bool, ImplicitReplicationGuard>::current(); }
ImplicitReplicationGuard::ImplicitReplicationGuard() : scope_(true) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() = default;

bool loss_parallel() { return ThreadScope<bool, LossParallel>::current(); }
LossParallel::LossParallel() : scope_(true) {}
LossParallel::~LossParallel() = default;

}  // namespace tessera
