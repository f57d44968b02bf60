#include <tessera/dispatch/guards.h>

#include <utility>

namespace tessera {

namespace {

thread_local ImplicitCommunication communication = ImplicitCommunication::allowed;
thread_local bool communication_is_strict = false;
thread_local bool replication = false;
thread_local bool parallel_loss = false;

}  // namespace

ImplicitCommunication implicit_communication() { return communication; }
bool implicit_communication_is_strict() { return communication_is_strict; }
ImplicitCommunicationGuard::ImplicitCommunicationGuard(ImplicitCommunication mode, bool strict)
    : previous_(std::exchange(communication, mode)),
      was_strict_(std::exchange(communication_is_strict, strict)) {}
ImplicitCommunicationGuard::~ImplicitCommunicationGuard() {
  communication = previous_;
  communication_is_strict = was_strict_;
}

bool implicit_replication() { return replication; }
ImplicitReplicationGuard::ImplicitReplicationGuard() : previous_(std::exchange(replication, true)) {}
ImplicitReplicationGuard::~ImplicitReplicationGuard() { replication = previous_; }

bool loss_parallel() { return parallel_loss; }

LossParallel::LossParallel() : previous_(std::exchange(parallel_loss, true)) {}
LossParallel::~LossParallel() { parallel_loss = previous_; }

}  // namespace tessera
