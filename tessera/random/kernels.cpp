// Compiled once for each instruction set, with TESSERA_KERNELS naming the function that gives the table. No
// multiplication may be fused with an addition here (-ffp-contract=off).

#include <tessera/random/kernels.h>

namespace tessera::random {

namespace {

#define TESSERA_INLINE inline __attribute__((always_inline))

template <class To, class From>
TESSERA_INLINE To bits_of(From value) {
  return __builtin_bit_cast(To, value);
}

template <class T>
struct Constants;
template <>
struct Constants<float> {
  using Bits = int32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kRootHalf = 0x3f3504f3;  // sqrt(1/2)
  static constexpr Bits kBias = 127;
  static constexpr float kRounding = 12582912;                 // 1.5 * 2^23
  static constexpr float kLog2High = 0.693359375f;             // few bits, so that products are exact
  static constexpr float kLog2Low = -2.12194440054690583e-4f;  // what is missing to log(2)
  static constexpr float kSmallest = -103, kLargest = 89;      // beyond, exp is 0 or infinite
  static constexpr int kLogTerms = 5, kExpTerms = 7, kSinTerms = 4, kCosTerms = 5;
};
template <>
struct Constants<double> {
  using Bits = int64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kRootHalf = 0x3fe6a09e667f3bcd;
  static constexpr Bits kBias = 1023;
  static constexpr double kRounding = 6755399441055744;  // 1.5 * 2^52
  static constexpr double kLog2High = 0.693145751953125;
  static constexpr double kLog2Low = 1.42860682030941723212e-6;
  static constexpr double kSmallest = -746, kLargest = 710;
  static constexpr int kLogTerms = 11, kExpTerms = 13, kSinTerms = 8, kCosTerms = 9;
};

template <class T>
TESSERA_INLINE T select(bool condition, T yes, T no) {
  return condition ? yes : no;
}

/// The nearest whole number, for numbers of up to 2^22 (float) or 2^51 (double).
template <class T>
TESSERA_INLINE T nearest(T x) {
  return (x + Constants<T>::kRounding) - Constants<T>::kRounding;
}

/// Natural logarithm of a positive number that is not tiny (denormal), with m = (1 + s) / (1 - s):
/// log(2^e m) = e log 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...), for m from sqrt(1/2) to sqrt(2).
template <class T>
TESSERA_INLINE T log_of(T x) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  const Bits bits = bits_of<Bits>(x);
  const Bits exponent = (bits - C::kRootHalf) >> C::kMantissa;
  const T m = bits_of<T>(bits - (exponent << C::kMantissa));
  // Whole numbers this small become floating ones by their bits, too: AVX2 cannot convert 64-bit integers.
  const T e = bits_of<T>(bits_of<Bits>(C::kRounding) + exponent) - C::kRounding;
  const T s = (m - 1) / (m + 1);
  const T s2 = s * s;
  T sum = 0;
#pragma GCC unroll 16
  for (int k = C::kLogTerms; k >= 1; --k) sum = (sum + T(1) / T(2 * k + 1)) * s2;
  return e * C::kLog2High + (e * C::kLog2Low + (2 * s + 2 * s * sum));
}

/// e^x, with x = n log 2 + r: 2^n (1 + r + r^2 / 2! + ...).
template <class T>
TESSERA_INLINE T exp_of(T x) {
  using C = Constants<T>;
  using Bits = typename C::Bits;
  x = select(x < C::kSmallest, C::kSmallest, select(x > C::kLargest, C::kLargest, x));
  const T n = nearest(x * T(1.4426950408889634074));
  const T r = (x - n * C::kLog2High) - n * C::kLog2Low;
  T sum = 1;
#pragma GCC unroll 16
  for (int k = C::kExpTerms; k >= 1; --k) sum = 1 + sum * r * (T(1) / T(k));
  // In two steps, as 2^n alone may be too small or too large for a number.
  const Bits whole = bits_of<Bits>(n + C::kRounding) - bits_of<Bits>(C::kRounding);
  const Bits half = whole >> 1;
  return sum * bits_of<T>((half + C::kBias) << C::kMantissa) *
         bits_of<T>((whole - half + C::kBias) << C::kMantissa);
}

/// Cosine and sine of an angle that is `quarter` right angles and x more, |x| <= pi / 4.
template <class T>
TESSERA_INLINE void turn(uint32_t quarter, T x, T& cosine, T& sine) {
  using C = Constants<T>;
  const T x2 = x * x;
  T s = 1, c = 1;
#pragma GCC unroll 16
  for (int k = C::kSinTerms; k >= 1; --k) s = 1 - s * x2 * (T(1) / T(2 * k * (2 * k + 1)));
#pragma GCC unroll 16
  for (int k = C::kCosTerms; k >= 1; --k) c = 1 - c * x2 * (T(1) / T((2 * k - 1) * 2 * k));
  s *= x;
  const bool odd = quarter & 1;
  const T a = select(odd, s, c), b = select(odd, c, s);
  cosine = select(((quarter + 1) & 2) != 0, -a, a);
  sine = select((quarter & 2) != 0, -b, b);
}

/// The bits for one number: a word, or two.
struct Narrow {
  uint32_t word;
};
struct Wide {
  uint32_t high, low;
};

/// In [0, 1), in steps of 2^-24 or 2^-53.
TESSERA_INLINE float unit(Narrow bits) {
  return static_cast<float>(static_cast<int32_t>(bits.word >> 8)) * 0x1p-24f;
}
TESSERA_INLINE double unit(Wide bits) {
  return (static_cast<double>(static_cast<int32_t>(bits.high >> 5)) * 0x1p26 +
          static_cast<double>(static_cast<int32_t>(bits.low >> 6))) *
         0x1p-53;
}

/// In (0, 1], and the finer the smaller, so that the tails of what is made of it are long.
TESSERA_INLINE float fine_unit(Narrow bits) {
  return static_cast<float>(static_cast<int32_t>(bits.word >> 1)) * 0x1p-31f + 0x1p-32f;
}
TESSERA_INLINE double fine_unit(Wide bits) {
  return static_cast<double>(static_cast<int32_t>(bits.high >> 1)) * 0x1p-31 +
         (static_cast<double>(static_cast<int32_t>(bits.low >> 1)) * 0x1p-62 + 0x1p-63);
}

/// In (-1, 1), without the two highest bits; never 0.
TESSERA_INLINE float signed_unit(Narrow bits) {
  return static_cast<float>(static_cast<int32_t>(bits.word << 2 | 2)) * 0x1p-31f;
}
TESSERA_INLINE double signed_unit(Wide bits) {
  return static_cast<double>(static_cast<int32_t>(bits.high << 2 | 2)) * 0x1p-31 +
         static_cast<double>(static_cast<int32_t>(bits.low >> 1)) * 0x1p-61;
}
TESSERA_INLINE uint32_t quarter(Narrow bits) { return bits.word >> 30; }
TESSERA_INLINE uint32_t quarter(Wide bits) { return bits.high >> 30; }

constexpr double kQuarterPi = 0.78539816339744830962;

template <class T>
TESSERA_INLINE T square_root(T x) {
  if constexpr (sizeof(T) == 4) return __builtin_sqrtf(x);
  return __builtin_sqrt(x);
}

/// Two independent normal numbers (Box and Muller).
template <class T, class Bits>
TESSERA_INLINE void normal_pair(Bits first, Bits second, T& a, T& b) {
  const T radius = square_root(T(-2) * log_of<T>(fine_unit(first)));
  T cosine, sine;
  turn<T>(quarter(second), signed_unit(second) * T(kQuarterPi), cosine, sine);
  a = radius * cosine;
  b = radius * sine;
}

template <class T, class Bits>
TESSERA_INLINE T exponential(Bits bits) {
  constexpr T kBelowOne = sizeof(T) == 4 ? T(1 - 0x1p-24) : T(1 - 0x1p-53);
  const T u = fine_unit(bits);
  return -log_of<T>(select(u > kBelowOne, kBelowOne, u));
}

/// What is made of the bits for two elements.
template <Kind kind, class T>
struct Maker;

template <>
struct Maker<Kind::bits, float> {
  using Result = uint32_t;
  explicit Maker(const Parameters&) {}
  TESSERA_INLINE void operator()(Narrow first, Narrow second, uint32_t& a, uint32_t& b) const {
    a = first.word;
    b = second.word;
  }
};
template <>
struct Maker<Kind::bits, double> {
  using Result = uint64_t;
  explicit Maker(const Parameters&) {}
  TESSERA_INLINE void operator()(Wide first, Wide second, uint64_t& a, uint64_t& b) const {
    a = uint64_t{first.high} << 32 | first.low;
    b = uint64_t{second.high} << 32 | second.low;
  }
};

template <class T>
struct Maker<Kind::uniform, T> {
  using Result = T;
  explicit Maker(const Parameters& p)
      : from(static_cast<T>(p.a)), range(static_cast<T>(p.b)), most(static_cast<T>(p.c)) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    a = unit(first) * range + from;
    b = unit(second) * range + from;
    a = select(a > most, most, a);
    b = select(b > most, most, b);
  }
  T from, range, most;
};

template <class T>
struct Maker<Kind::normal, T> {
  using Result = T;
  explicit Maker(const Parameters& p) : mean(static_cast<T>(p.a)), deviation(static_cast<T>(p.b)) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    normal_pair<T>(first, second, a, b);
    a = a * deviation + mean;
    b = b * deviation + mean;
  }
  T mean, deviation;
};

template <class T>
struct Maker<Kind::log_normal, T> {
  using Result = T;
  explicit Maker(const Parameters& p) : normal(p) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    normal(first, second, a, b);
    a = exp_of<T>(a);
    b = exp_of<T>(b);
  }
  Maker<Kind::normal, T> normal;
};

template <class T>
struct Maker<Kind::exponential, T> {
  using Result = T;
  explicit Maker(const Parameters& p) : scale(static_cast<T>(p.a)) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    a = exponential<T>(first) * scale;
    b = exponential<T>(second) * scale;
  }
  T scale;
};

template <class T>
struct Maker<Kind::geometric, T> {
  using Result = T;
  explicit Maker(const Parameters& p) : scale(static_cast<T>(p.a)) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    a = up(exponential<T>(first) * scale);
    b = up(exponential<T>(second) * scale);
  }
  static TESSERA_INLINE T up(T x) {
    constexpr T kAllWhole = sizeof(T) == 4 ? T(0x1p22) : T(0x1p51);
    const T near = nearest(x);
    const T least = select(near < x, near + 1, near);
    return select(x < kAllWhole, select(least < 1, T(1), least), x);
  }
  T scale;
};

template <class T>
struct Maker<Kind::cauchy, T> {
  using Result = T;
  explicit Maker(const Parameters& p) : median(static_cast<T>(p.a)), width(static_cast<T>(p.b)) {}
  template <class Bits>
  TESSERA_INLINE void operator()(Bits first, Bits second, T& a, T& b) const {
    a = tangent(first) * width + median;
    b = tangent(second) * width + median;
  }
  template <class Bits>
  static TESSERA_INLINE T tangent(Bits bits) {
    T cosine, sine;
    turn<T>(quarter(bits), signed_unit(bits) * T(kQuarterPi), cosine, sine);
    return sine / cosine;
  }
  T median, width;
};

TESSERA_INLINE void block_words(uint64_t block, uint64_t call, uint64_t key, uint32_t (&words)[4]) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(call), c3 = static_cast<uint32_t>(call >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

template <Kind kind, class T>
void groups(const Draw& draw, const Parameters& parameters, uint64_t first, int64_t count, void* out) {
  const Maker<kind, T> make(parameters);
  using Result = typename Maker<kind, T>::Result;
  auto* __restrict to = static_cast<Result*>(out);
  const uint64_t key = draw.key, call = draw.call;
  for (int64_t g = 0; g < count; ++g) {
    const uint64_t base = (first + static_cast<uint64_t>(g)) * kBlocksInGroup;
    const uint32_t high = static_cast<uint32_t>(base >> 32), low = static_cast<uint32_t>(base);
    for (uint32_t j = 0; j < kBlocksInGroup; ++j) {
      uint32_t w[4];
      block_words(uint64_t{high} << 32 | (low + j), call, key, w);
      if constexpr (sizeof(T) == 4) {
        make(Narrow{w[0]}, Narrow{w[1]}, to[j], to[16 + j]);
        make(Narrow{w[2]}, Narrow{w[3]}, to[32 + j], to[48 + j]);
      } else {
        make(Wide{w[0], w[1]}, Wide{w[2], w[3]}, to[j], to[16 + j]);
      }
    }
    to += group_size(sizeof(T) == 8);
  }
}

template <Kind kind, class T>
void elements(const Draw& draw, const Parameters& parameters, const uint64_t* indices, int64_t count,
              void* out) {
  const Maker<kind, T> make(parameters);
  using Result = typename Maker<kind, T>::Result;
  auto* __restrict to = static_cast<Result*>(out);
  const uint64_t key = draw.key, call = draw.call;
  constexpr uint64_t size = group_size(sizeof(T) == 8);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t index = indices[i];
    uint32_t w[4];
    block_words(index / size * kBlocksInGroup + index % kBlocksInGroup, call, key, w);
    const uint32_t place = static_cast<uint32_t>(index % size) / kBlocksInGroup;
    Result a, b;
    if constexpr (sizeof(T) == 4) {
      const bool later = place >= 2;
      make(Narrow{select(later, w[2], w[0])}, Narrow{select(later, w[3], w[1])}, a, b);
    } else {
      make(Wide{w[0], w[1]}, Wide{w[2], w[3]}, a, b);
    }
    to[i] = select((place & 1) != 0, b, a);
  }
}

template <Kind kind>
constexpr void add(Kernels& table) {
  table.of[static_cast<int>(kind)][0] = {groups<kind, float>, elements<kind, float>};
  table.of[static_cast<int>(kind)][1] = {groups<kind, double>, elements<kind, double>};
}

constexpr Kernels make_table() {
  Kernels table{};
  add<Kind::bits>(table);
  add<Kind::uniform>(table);
  add<Kind::normal>(table);
  add<Kind::exponential>(table);
  add<Kind::log_normal>(table);
  add<Kind::cauchy>(table);
  add<Kind::geometric>(table);
  return table;
}

constexpr Kernels kTable = make_table();

}  // namespace

const Kernels& TESSERA_KERNELS() { return kTable; }

}  // namespace tessera::random
