#pragma once

#include <tessera/comm/threads/roster.h>
#include <tessera/comm/threads/wait.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace tessera::threads {

/// A process-wide state that ranks that are threads use together, each between its own enter and leave. It
/// begins when the first of them enters, and ends, for all at the same time, when the last has left: who
/// leaves waits for that, so that after leaving all is as if there had been no other rank.
class SharedScope {
 public:
  SharedScope(int64_t size, bool crowded, Roster& roster)
      : roster_(roster), room_(crowded), is_inside_(size) {}

  /// Called on a rank that is not inside. `begin` is called if it is the first.
  void enter(int64_t rank, c10::function_ref<void()> begin);

  /// `end` is called if it is the last. Otherwise waits until it has been called, but not if `is_failing`:
  /// others may wait for the error that this rank is about to report.
  void leave(int64_t rank, const std::string& what, std::chrono::milliseconds timeout, bool is_failing,
             c10::function_ref<void()> end);

  void abort(const std::string& reason);

 private:
  std::vector<int64_t> inside() const;

  Roster& roster_;
  WaitingRoom room_;
  mutable std::mutex mutex_;
  std::vector<bool> is_inside_;
  bool is_ending_ = false;  // in `end`, which may need other locks and is called without this one
  uint64_t ends_ = 0;
  std::string reason_;  // why it was aborted, if it was
};

}  // namespace tessera::threads
