#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <utility>

/// What operators on distributed tensors may do of their own accord. Per thread.
namespace tessera {

/// Whether an operator may move data between ranks to bring its arguments into a form it can work with.
enum class ImplicitCommunication { allowed, warned, forbidden };
TESSERA_API ImplicitCommunication implicit_communication();
/// Whether that goes for slices and other changes of placement that move nothing too.
TESSERA_API bool implicit_communication_is_strict();

/// While it lives, operators of this thread do as it says. `forbidden`: such an operator is an error that
/// names it, the argument and the two placements; `warned`: a warning that does. `strict`: so is one that
/// redistributes an argument without moving data.
///
/// Operators that refuse some values, as an index out of range, agree by one small reduction whether any rank
/// refuses those it holds. That is implicit communication too: `warned` warns of it. No placement does without
/// it but replicating what is looked at, and what comes out is the same; so `forbidden` is no error there:
/// the ranks do not agree, and one that refuses its values raises alone.
class TESSERA_API ImplicitCommunicationGuard {
 public:
  explicit ImplicitCommunicationGuard(ImplicitCommunication mode, bool strict = false);
  ~ImplicitCommunicationGuard();
  ImplicitCommunicationGuard(const ImplicitCommunicationGuard&) = delete;
  ImplicitCommunicationGuard& operator=(const ImplicitCommunicationGuard&) = delete;

 private:
  ThreadScope<std::pair<ImplicitCommunication, bool>, ImplicitCommunicationGuard> scope_;  // mode and strict
};

/// Whether a plain tensor among distributed ones is taken to be the same on all ranks, instead of being an
/// error. One that is written gets the full value, so that it stays so.
TESSERA_API bool implicit_replication();

/// While it lives, a plain tensor is taken to be the same on all ranks.
class TESSERA_API ImplicitReplicationGuard {
 public:
  ImplicitReplicationGuard();
  ~ImplicitReplicationGuard();
  ImplicitReplicationGuard(const ImplicitReplicationGuard&) = delete;
  ImplicitReplicationGuard& operator=(const ImplicitReplicationGuard&) = delete;

 private:
  ThreadScope<bool, ImplicitReplicationGuard> scope_;
};

/// Whether losses must not gather what they are of.
TESSERA_API bool loss_parallel();

/// While it lives, softmax, log_softmax, nll_loss and so cross_entropy of this thread, and their gradients,
/// are an error where they would gather a sharded tensor: logits that are sharded along their classes stay so,
/// and only a sum and a maximum per sample are reduced. They never gather such logits anyway; this makes sure
/// that the placements of targets and class weights let them.
class TESSERA_API LossParallel {
 public:
  LossParallel();
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;

 private:
  ThreadScope<bool, LossParallel> scope_;
};

}  // namespace tessera
