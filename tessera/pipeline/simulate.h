#pragma once

#include <tessera/export.h>
#include <tessera/pipeline/table.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// Throws, with the rank, the action and what is wrong, unless the table can run:
///   - every forward, every backward and every message that they need is there once, on the rank of its stage
///   - each has what it needs before it: its input, its activations, its gradient
///   - between any two ranks, messages are received in the order in which they are sent
///   - there is no deadlock, even if both ends of each message wait for the other one
TESSERA_API void check(const PipelineTable& table);

/// How long a stage takes for a micro-batch. Messages take no time.
struct PipelineTimes {
  int64_t forward = 1;
  int64_t backward = 1;
};

/// What happens if the table runs.
struct TESSERA_API PipelineSimulation {
  PipelineTimes times;
  /// When each action begins, by rank, as in the table. A message begins where the rank comes to it.
  std::vector<std::vector<int64_t>> starts;
  /// When the last rank is done.
  int64_t time = 0;
  /// How long each rank computes.
  std::vector<int64_t> busy;
  /// How many (stage, micro-batch) each rank keeps the activations of, at most: from forward to backward. Zero without
  /// backward.
  std::vector<int64_t> peak_live;

  /// The share of the time in which ranks wait, over all ranks.
  double bubble() const;
};

/// Checks the table first.
TESSERA_API PipelineSimulation simulate(const PipelineTable& table, PipelineTimes times = {});

/// What each rank computes when. Cells are "F0", or "2F0" where ranks have several stages; "=" goes on with what is before it.
///
///   1F1B on 2 ranks, 3 micro-batches: time 8, bubble 25 %, activations of at most 2 1
///   time    0  1  2  3  4  5  6  7
///   rank 0  F0 F1 .  B0 F2 B1 .  B2
///   rank 1  .  F0 B0 F1 B1 F2 B2 .
TESSERA_API std::string grid(const PipelineTable& table, PipelineTimes times = {});

/// When each action would begin if all took that long and messages none; throws if the table waits for itself. The
/// messages of the table are not looked at.
TESSERA_API std::vector<std::vector<int64_t>> start_times(const PipelineTable& table,
                                                          PipelineTimes times = {});

}  // namespace tessera
