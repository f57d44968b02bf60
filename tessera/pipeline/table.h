#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// One thing that a rank of a pipeline does: it computes a stage for a micro-batch, or takes part in a message
/// between two stages that are on different ranks. `stage` is always the one that this rank has.
struct TESSERA_API PipelineAction {
  enum class Kind : uint8_t {
    forward,        // 1F0       stage 1 computes its output for micro-batch 0
    backward,       // 1B0       and the gradients of its inputs and parameters
    send_forward,   // 1SEND_F0  its output goes to stage 2
    recv_forward,   // 1RECV_F0  its input comes from stage 0
    send_backward,  // 1SEND_B0  the gradient of its input goes to stage 0
    recv_backward,  // 1RECV_B0  the gradient of its output comes from stage 2
  };

  Kind kind = Kind::forward;
  int64_t stage = 0;
  int64_t microbatch = 0;

  bool computes() const { return kind == Kind::forward || kind == Kind::backward; }
  bool sends() const { return kind == Kind::send_forward || kind == Kind::send_backward; }
  /// The stage at the other end of a message.
  int64_t other_stage() const;
  /// As PyTorch writes it: "1F0", "1SEND_F0".
  std::string str() const;
  /// What `str` wrote; an error if it did not.
  static PipelineAction parse(std::string_view text);
  bool operator==(const PipelineAction&) const = default;
};

TESSERA_API std::ostream& operator<<(std::ostream& out, const PipelineAction& action);

/// A pipeline's schedule as data: what each rank does, in order. A value that can be printed, changed, and checked
/// without ranks (simulate.h); it runs as it is (schedule.h).
struct TESSERA_API PipelineTable {
  std::string name;
  int64_t microbatches = 0;
  /// The rank of each stage: stages are dealt to the ranks in turn, unless you say otherwise.
  std::vector<int64_t> rank_of_stage;
  /// Without, it computes outputs and losses only.
  bool has_backward = true;
  /// By rank.
  std::vector<std::vector<PipelineAction>> actions;

  int64_t ranks() const { return static_cast<int64_t>(actions.size()); }
  int64_t stages() const { return static_cast<int64_t>(rank_of_stage.size()); }
  /// The stages of a rank, in order.
  std::vector<int64_t> stages_of(int64_t rank) const;

  /// All forwards, then all backwards. Every rank keeps the activations of all micro-batches.
  static PipelineTable gpipe(int64_t stages, int64_t microbatches);
  /// One forward, one backward in turn, as soon as the last stage has begun. Rank r keeps the activations of
  /// min(microbatches, stages - r) micro-batches; takes as long as GPipe.
  static PipelineTable one_f_one_b(int64_t stages, int64_t microbatches);
  /// The same with several stages on each rank, stage s on rank s % ranks, which makes the bubble shorter. Micro-batches
  /// go through in max(1, microbatches / ranks) rounds that differ in size by one at most.
  static PipelineTable interleaved_1f1b(int64_t ranks, int64_t stages_per_rank, int64_t microbatches);

  /// The same forwards in the same order, and nothing else: for evaluation.
  PipelineTable without_backward() const;
  /// The table with the messages that its forwards and backwards need, instead of those that it has: each at the
  /// moment, if all of these take the same time, at which its sender has computed it. Both ends have all messages in the
  /// order of these moments, so that even messages for which both ends wait cannot end in a deadlock.
  PipelineTable with_messages() const;

  /// The actions, one line for each rank.
  std::string str() const;
  bool operator==(const PipelineTable&) const = default;
};

TESSERA_API std::ostream& operator<<(std::ostream& out, const PipelineTable& table);

}  // namespace tessera
