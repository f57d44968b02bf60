#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <cstdint>

namespace tessera::comm {

/// A collective, send or receive that a rank called through collectives.h.
struct Event {
  const char* name;  // "all_reduce", "all_gather", ...
  int64_t bytes;     // what this rank gives or gets, whichever is more
  const Group& group;
  bool is_agreement;  // called inside of a WhileAgreeing
};

/// While alive, what the calling thread calls only compares what ranks found, such as whether one of them refuses its
/// values: none of the user's data moves.
class TESSERA_API WhileAgreeing {
 public:
  WhileAgreeing();
  ~WhileAgreeing();
  WhileAgreeing(const WhileAgreeing&) = delete;
  WhileAgreeing& operator=(const WhileAgreeing&) = delete;

  static bool is_alive();

 private:
  ThreadScope<bool, WhileAgreeing> scope_;
};

/// While alive, what the calling thread allocates is for messages, or for what they bring and is freed soon. For who counts
/// memory.
class TESSERA_API MemoryInFlight {
 public:
  MemoryInFlight();
  ~MemoryInFlight();
  MemoryInFlight(const MemoryInFlight&) = delete;
  MemoryInFlight& operator=(const MemoryInFlight&) = delete;

  static bool is_alive();

 private:
  ThreadScope<bool, MemoryInFlight> scope_;
};

/// While alive, is notified of every event of the calling thread, before the call is carried out. If several
/// are alive, all of them are, the innermost first.
class TESSERA_API Observer {
 public:
  Observer();
  virtual ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  virtual void called(const Event& event) = 0;

  /// The innermost one of the calling thread, or null.
  static Observer* innermost();
  Observer* outer() const { return scope_.outer(); }

 private:
  ThreadScope<Observer*, Observer> scope_;
};

}  // namespace tessera::comm
