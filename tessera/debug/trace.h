#pragma once

#include <tessera/export.h>

#include <cstddef>
#include <memory>
#include <string>

namespace tessera {

struct TraceOptions {
  /// How many spans a rank keeps at most; the first ones. What is left out is said.
  size_t capacity = 1 << 20;
};

/// While alive, notes what the calling thread, one rank, spends its time with: operators on distributed tensors, what
/// they compute, redistributions, collectives, and waiting for them, in forward and backward.
///
///   Trace trace;
///   train(model);
///   trace.write("trace.json");               // all ranks in one file, for Perfetto or chrome://tracing
///   std::cout << trace.summary();
///
/// Without one, nothing is noted. bench/trace.cpp measures what one costs.
class TESSERA_API Trace {
 public:
  explicit Trace(TraceOptions options = {});
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Notes no more. The time until now is what a summary is of.
  void stop();

  /// Collective: all ranks of the current world must call these, in the same order. They stop the trace.

  /// All ranks' spans as JSON in the format of Chrome's traces. On rank 0; empty on others.
  std::string json();
  /// Rank 0 writes that to a file. If it cannot, all ranks throw.
  void write(const std::string& path);
  /// Where the time of each rank went: computing, communicating, waiting for whom, dispatching operators, and the rest of
  /// the program. The same on all ranks.
  ///
  ///   rank      time   compute  communication  waiting  dispatch   rest
  ///      0   1.20 ms       41%            20%      30%        5%     4%   waiting for 1: 30%
  std::string summary();

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace tessera
