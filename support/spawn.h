#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

/// For tests and benchmarks: real processes on this machine, started as torchrun would start them.
namespace tessera::support {

struct ProcessResult {
  int exit_code = -1;  // -1 if it was killed
  int signal = 0;      // by this signal, if any
  std::string output;  // stdout and stderr together
  bool ok() const { return exit_code == 0; }
};

struct SpawnOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // then all are killed
  std::vector<std::pair<std::string, std::string>> environment;
  /// Put before each command, given the rank: {"ip", "netns", "exec", ...}.
  std::function<std::vector<std::string>(int64_t rank)> prefix;
  std::string master_address = "127.0.0.1";
  /// Called once all have been started, with their process ids.
  std::function<void(const std::vector<pid_t>&)> after_start;
};

/// Runs `command` as `count` ranks, which find one another through a store kept by this process, and returns
/// when all have ended.
std::vector<ProcessResult> spawn(int64_t count, const std::vector<std::string>& command,
                                 const SpawnOptions& options = {});

/// The path of the running program, to spawn it again.
std::string this_program();

}  // namespace tessera::support
