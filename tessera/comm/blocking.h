#pragma once

#include <tessera/export.h>

#include <string>

namespace tessera {

/// What a host language must do around a wait: Python's bindings release the GIL, which other ranks need.
/// `enter` is called before, and what it returned is handed to `leave` after, on the same thread.
struct BlockingHooks {
  void* (*enter)() = nullptr;
  void (*leave)(void* state) = nullptr;
  /// Called, between the two, on a rank that is a thread and whose wait lasts: why it can have no end, as
  /// other ranks of the process are kept from coming, or "".
  std::string (*why_endless)() = nullptr;
};

/// Set once, before ranks wait for one another.
TESSERA_API void set_blocking_hooks(BlockingHooks hooks);

/// Around every wait for other ranks, and around the making of groups.
class TESSERA_API Blocking {
 public:
  Blocking();
  ~Blocking();
  Blocking(const Blocking&) = delete;
  Blocking& operator=(const Blocking&) = delete;

 private:
  void* state_;
};

/// See BlockingHooks::why_endless.
std::string why_endless();

}  // namespace tessera
