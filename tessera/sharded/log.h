#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::sharded {

/// One call of the ShardedTensor API on one rank.
struct LogEvent {
  const char* call;    // "ShardedTensor::gather"
  int64_t rank;        // global; -1 if there is no world
  std::string detail;  // what it was called on
};

/// Called at each API call, on the calling thread. None (the default): nothing is logged, and nothing is
/// spent on it.
TESSERA_API void set_log_handler(std::function<void(const LogEvent&)> handler);

/// Reports a call. `detail` is only called if there is a handler.
TESSERA_API void log_call(const char* call, const std::function<std::string()>& detail);

}  // namespace tessera::sharded
