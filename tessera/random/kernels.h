#pragma once

#include <tessera/export.h>

#include <cstdint>

/// The loops that make random numbers, in one form for each instruction set. All forms give the same bits:
/// every element is computed by the same additions and multiplications, in the same order, wherever it lies,
/// and no function of a mathematical library is called.
///
/// Nothing but this header is included by what is compiled for one instruction set, lest an inline function
/// of a header come from there.
namespace tessera::random {

/// One call of a random function. Every value of it is a function of the draw and of the element's index.
struct Draw {
  uint64_t key = 0;
  uint64_t call = 0;
};

/// What can be made directly of the bits of a counter. Numbers are float or double, bits 32 or 64.
enum class Kind : uint8_t {
  bits,
  uniform,      // a + b * u, at most c; u in [0, 1) with 24 or 53 bits
  normal,       // a + b * z
  exponential,  // a * e, never 0
  log_normal,   // exp(a + b * z)
  cauchy,       // a + b * t
  geometric,    // the least integer that is not below a * e
};
inline constexpr int kKinds = 7;

struct Parameters {
  double a = 0, b = 1, c = 1;
};

/// Elements are made in groups: of 64 if they have 32 bits, of 32 if they have 64. Counters are blocks: group
/// g is made of blocks 16 g to 16 g + 15, and element 16 w + j of it of word w (or words 2 w and 2 w + 1) of
/// block 16 g + j. So a group is made without shuffling its elements.
inline constexpr int64_t kBlocksInGroup = 16;
inline constexpr int64_t group_size(bool wide) { return wide ? 32 : 64; }

struct FillKernel {
  /// Groups first, first + 1, ..., first + count - 1, one after the other.
  void (*groups)(const Draw& draw, const Parameters& parameters, uint64_t first, int64_t count, void* out);
  /// Elements by their indices; `count` is a multiple of kBlocksInGroup. Four times the work for each.
  void (*elements)(const Draw& draw, const Parameters& parameters, const uint64_t* indices, int64_t count,
                   void* out);
};

/// By kind, and whether they are wide: float and 32 bits, or double and 64.
struct Kernels {
  FillKernel of[kKinds][2];
};

TESSERA_API const Kernels& baseline_kernels();
#ifdef __x86_64__
TESSERA_API const Kernels& avx2_kernels();
TESSERA_API const Kernels& avx512_kernels();
#endif

/// The fastest ones that this machine can run.
TESSERA_API const Kernels& kernels();

}  // namespace tessera::random
