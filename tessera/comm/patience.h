#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// How long who waits for another rank looks again, and gives way to others, before it sleeps.
namespace tessera::comm {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// How often it looks again. `crowded`: more ranks than cores, so that looking would keep the awaited rank from running.
///
/// A pause takes some 10 to 40 ns, so 200 are a few microseconds: more than a small collective of ranks that run takes
/// (about 0.5 us), less than it costs to put a thread to sleep and wake it. If ranks outnumber cores, the awaited rank
/// most likely does not run, and only a yield lets it.
inline int spins(bool crowded) { return crowded ? 20 : 200; }

/// Then it yields for so long: longer than ranks usually drift apart within an operator. A rank that is still awaited then
/// computes or loads, and sleeping leaves it the core.
inline constexpr std::chrono::microseconds kYielding{100};

}  // namespace tessera::comm
