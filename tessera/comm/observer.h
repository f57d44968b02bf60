#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <cstdint>

namespace tessera::comm {

/// A collective, send or receive that a rank called through collectives.h.
struct Event {
  const char* name;  // "all_reduce", "all_gather", ...
  int64_t bytes;     // what this rank gives or gets, whichever is more
  const Group& group;
};

/// While it lives, it is told of every one that the calling thread calls, before it is carried out. Several
/// are all told.
class TESSERA_API Observer {
 public:
  Observer();
  virtual ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  virtual void called(const Event& event) = 0;

  /// The innermost one of the calling thread, or null.
  static Observer* innermost();
  Observer* outer() const { return outer_; }

 private:
  Observer* outer_;
};

}  // namespace tessera::comm
