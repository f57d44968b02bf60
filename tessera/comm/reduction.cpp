#include <tessera/comm/reduction.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

namespace tessera::comm {

using c10d::ReduceOp;

namespace {

template <class T>
constexpr bool is_complex = std::is_same_v<T, c10::complex<float>> || std::is_same_v<T, c10::complex<double>>;

/// What a dtype is accumulated in.
template <class T>
struct Wide {
  using type = T;
};
template <>
struct Wide<c10::Half> {
  using type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using type = float;
};

/// What sums of integers are exact in, of as many of them as there may be ranks.
__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;
template <class T>
using Exact = std::conditional_t<sizeof(T) < sizeof(int64_t),
                                 std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                 std::conditional_t<std::is_signed_v<T>, Int128, Uint128>>;

template <class T>
T wrapping_add(T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class T>
T wrapping_multiply(T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a && b;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <class T>
bool is_nan(T x) {
  return x != x;
}

/// The sources are combined a block at a time: small enough to stay in the first cache until every target
/// has its copy.
constexpr int64_t kBlock = 1024;

/// Values of T, combined as W.
template <class T, class W, class Combine, class Finish>
void run(std::byte* const* sources, int64_t source_count, std::byte* const* targets, int64_t target_count,
         int64_t first, int64_t elements, Combine combine, Finish finish) {
  W block[kBlock];
  for (int64_t start = first; start < first + elements; start += kBlock) {
    const int64_t count = std::min(kBlock, first + elements - start);
    const T* a = reinterpret_cast<const T*>(sources[0]) + start;
    if (source_count == 1) {
      for (int64_t i = 0; i < count; ++i) block[i] = static_cast<W>(a[i]);
    } else {
      const T* b = reinterpret_cast<const T*>(sources[1]) + start;
      for (int64_t i = 0; i < count; ++i) block[i] = combine(static_cast<W>(a[i]), static_cast<W>(b[i]));
    }
    for (int64_t s = 2; s < source_count; ++s) {
      const T* b = reinterpret_cast<const T*>(sources[s]) + start;
      for (int64_t i = 0; i < count; ++i) block[i] = combine(block[i], static_cast<W>(b[i]));
    }
    T* head = reinterpret_cast<T*>(targets[0]) + start;
    for (int64_t i = 0; i < count; ++i) head[i] = static_cast<T>(finish(block[i]));
    for (int64_t t = 1; t < target_count; ++t) {
      std::memcpy(reinterpret_cast<T*>(targets[t]) + start, head, static_cast<size_t>(count) * sizeof(T));
    }
  }
}

template <class T>
void reduce_as(ReduceOp::RedOpType op, double factor, std::byte* const* sources, int64_t source_count,
               std::byte* const* targets, int64_t target_count, int64_t first, int64_t elements) {
  using W = typename Wide<T>::type;
  auto with = [&](auto combine, auto finish) {
    run<T, W>(sources, source_count, targets, target_count, first, elements, combine, finish);
  };
  auto same = [](W x) { return x; };
  auto add = [](W a, W b) { return wrapping_add<W>(a, b); };
  switch (op) {
    case ReduceOp::SUM:
      return with(add, same);
    case ReduceOp::PRODUCT:
      return with([](W a, W b) { return wrapping_multiply<W>(a, b); }, same);
    case ReduceOp::AVG:
      if constexpr (std::is_same_v<T, bool>) {
        return with(add, same);
      } else if constexpr (std::is_integral_v<T>) {
        using E = Exact<T>;
        const auto count = static_cast<E>(source_count);
        return run<T, E>(
            sources, source_count, targets, target_count, first, elements, [](E a, E b) { return a + b; },
            [count](E x) { return x / count; });
      } else {
        const W count = static_cast<W>(source_count);
        return with(add, [count](W x) { return x / count; });
      }
    case ReduceOp::PREMUL_SUM:
      if constexpr (std::is_integral_v<T>) {
        break;
      } else {
        const W f = static_cast<W>(factor);
        // The factor distributes over the sum, so it is applied once, to the result.
        return with(add, [f](W x) { return x * f; });
      }
    case ReduceOp::MIN:
      if constexpr (is_complex<T>) {
        break;
      } else {
        return with([](W a, W b) { return (is_nan(a) || a < b) ? a : b; }, same);
      }
    case ReduceOp::MAX:
      if constexpr (is_complex<T>) {
        break;
      } else {
        return with([](W a, W b) { return (is_nan(a) || a > b) ? a : b; }, same);
      }
    case ReduceOp::BAND:
      if constexpr (!std::is_integral_v<T>) {
        break;
      } else {
        return with([](W a, W b) { return static_cast<W>(a & b); }, same);
      }
    case ReduceOp::BOR:
      if constexpr (!std::is_integral_v<T>) {
        break;
      } else {
        return with([](W a, W b) { return static_cast<W>(a | b); }, same);
      }
    case ReduceOp::BXOR:
      if constexpr (!std::is_integral_v<T>) {
        break;
      } else {
        return with([](W a, W b) { return static_cast<W>(a ^ b); }, same);
      }
    case ReduceOp::UNUSED:
      break;
  }
}

/// Calls f with a value of the C++ type of `dtype`; false if it is not one that is reduced.
template <class F>
bool visit(c10::ScalarType dtype, F&& f) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return f(bool{}), true;
    case c10::ScalarType::Byte:
      return f(uint8_t{}), true;
    case c10::ScalarType::Char:
      return f(int8_t{}), true;
    case c10::ScalarType::Short:
      return f(int16_t{}), true;
    case c10::ScalarType::Int:
      return f(int32_t{}), true;
    case c10::ScalarType::Long:
      return f(int64_t{}), true;
    case c10::ScalarType::UInt16:
      return f(uint16_t{}), true;
    case c10::ScalarType::UInt32:
      return f(uint32_t{}), true;
    case c10::ScalarType::UInt64:
      return f(uint64_t{}), true;
    case c10::ScalarType::Half:
      return f(c10::Half{}), true;
    case c10::ScalarType::BFloat16:
      return f(c10::BFloat16{}), true;
    case c10::ScalarType::Float:
      return f(float{}), true;
    case c10::ScalarType::Double:
      return f(double{}), true;
    case c10::ScalarType::ComplexFloat:
      return f(c10::complex<float>{}), true;
    case c10::ScalarType::ComplexDouble:
      return f(c10::complex<double>{}), true;
    default:
      return false;
  }
}

}  // namespace

bool transport_reduces(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return op == ReduceOp::SUM || op == ReduceOp::PRODUCT || op == ReduceOp::MIN || op == ReduceOp::MAX;
    default:
      return false;
  }
}

bool can_reduce(c10::ScalarType dtype, ReduceOp::RedOpType op) {
  bool complex = false, integral = false;
  const bool known = visit(dtype, [&](auto sample) {
    complex = is_complex<decltype(sample)>;
    integral = std::is_integral_v<decltype(sample)>;
  });
  if (!known) return false;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::AVG:
    case ReduceOp::PRODUCT:
      return true;
    case ReduceOp::PREMUL_SUM:
      return !integral;
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      return !complex;
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      return integral;
    case ReduceOp::UNUSED:
      return false;
  }
  return false;
}

void reduce_values(c10::ScalarType dtype, ReduceOp::RedOpType op, double factor, std::byte* const* sources,
                   int64_t source_count, std::byte* const* targets, int64_t target_count, int64_t first,
                   int64_t elements) {
  visit(dtype, [&](auto sample) {
    reduce_as<decltype(sample)>(op, factor, sources, source_count, targets, target_count, first, elements);
  });
}

void copy_bytes(std::byte* target, const std::byte* source, size_t bytes, bool streaming) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  if (streaming && bytes >= kLine) {
    const size_t head = -reinterpret_cast<uintptr_t>(target) % sizeof(__m128i);
    std::memcpy(target, source, head);
    const size_t lines = (bytes - head) / kLine;
    for (size_t i = 0; i < lines; ++i) {
      const auto* from = reinterpret_cast<const __m128i*>(source + head + i * kLine);
      auto* to = reinterpret_cast<__m128i*>(target + head + i * kLine);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    const size_t done = head + lines * kLine;
    std::memcpy(target + done, source + done, bytes - done);
    _mm_sfence();  // before anyone is notified that it is there
    return;
  }
#else
  (void)streaming;
#endif
  std::memcpy(target, source, bytes);
}

}  // namespace tessera::comm
