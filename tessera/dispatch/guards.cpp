#include <tessera/dispatch/guards.h>

#include <utility>

namespace tessera {

namespace {

thread_local ImplicitCommunication communication = ImplicitCommunication::allowed;
thread_local bool replication = false;
thread_local bool parallel_loss = false;

}  // namespace

ImplicitCommunication implicit_communication() { return communication; }
ImplicitCommunicationGuard::ImplicitCommunicationGuard(ImplicitCommunication mode)
    : previous_(std::exchange(communication, mode)) {}
ImplicitCommunicationGuard::~ImplicitCommunicationGuard() { communication = previous_; }

bool implicit_replication() { return replication; }
ImplicitReplicationGuard::ImplicitReplicationGuard() : previous_(std::exchange(replication, true)) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() { replication = previous_; }

bool loss_parallel() { return parallel_loss; }

LossParallel::LossParallel() : previous_(std::exchange(parallel_loss, true)) {}
LossParallel::~LossParallel() { parallel_loss = previous_; }

}  // namespace tessera
