#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

struct RunOptions {
  /// The longest that a rank waits for another.
  std::chrono::milliseconds timeout = kDefaultTimeout;

  /// See WorldOptions::backend. Empty: "threads" for ranks that are threads, "gloo" for processes.
  std::string backend = {};

  /// Threads that libtorch uses inside an operator on each rank. 0: the cores divided among the ranks of this
  /// process. (libtorch has one such setting for the process; it is put back at the end.)
  int threads_per_rank = 0;
};

/// Runs `function` on `world_size` ranks, threads of this process, each with its own current world, and
/// returns when all have ended. The caller's grad mode, inference mode and autocast hold in them too (but
/// autocast caches no casts: see docs/threads.md). If a rank throws, all others that wait for it get an error
/// that names it and says why, and the first exception is rethrown here.
TESSERA_API void run(int64_t world_size, const std::function<void()>& function,
                     const RunOptions& options = {});

/// For programs that should work both ways. Started by torchrun, mpirun or srun, this process is one rank of
/// as many as they say: `function` runs on the calling thread, and its peers learn why if it throws. Started
/// by hand, it is `run(world_size, function, options)`.
TESSERA_API void launch(int64_t world_size, const std::function<void()>& function,
                        const RunOptions& options = {});

}  // namespace tessera
