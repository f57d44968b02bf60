#include <tessera/error.h>
#include <tessera/random/fill.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/irange.h>

namespace tessera::random {

const Kernels& kernels() {
#ifdef __x86_64__
  static const Kernels& best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                                       __builtin_cpu_supports("avx512vl") &&
                                       __builtin_cpu_supports("avx512bw")
                                   ? avx512_kernels()
                               : __builtin_cpu_supports("avx2") ? avx2_kernels()
                                                                : baseline_kernels();
  return best;
#else
  return baseline_kernels();
#endif
}

namespace {

/// Runs shorter than this are made element by element: a group costs about as much as so many of these.
constexpr int64_t kShortRun = 32;
/// Elements between two conversions: what the first-level cache has room for.
constexpr int64_t kChunk = 2048;
/// Fewer elements than this are not worth another thread.
constexpr int64_t kGrain = 1 << 15;

/// Makes the numbers of a region, one after the other, and has each `finish`ed where it goes to.
template <class Source, class Target, class Finish>
class Writer {
 public:
  Writer(const FillKernel& kernel, const Parameters& parameters, const Draw& draw, Target* out,
         const Finish& finish)
      : kernel_(kernel), parameters_(parameters), draw_(draw), out_(out), finish_(finish) {}

  void write(const Region& region) {
    region.for_each_run([&](uint64_t first, int64_t count) {
      if (count < kShortRun) return add_short(first, count);
      flush();
      write_run(first, count, out_);
      out_ += count;
    });
    flush();
  }

 private:
  static constexpr int64_t kGroup = group_size(sizeof(Source) == 8);
  static constexpr bool kDirect = std::is_same_v<Finish, std::nullptr_t>;

  void add_short(uint64_t first, int64_t count) {
    for (const int64_t i : c10::irange(count)) {
      indices_[waiting_++] = first + static_cast<uint64_t>(i);
      if (waiting_ == kWaiting) flush();
    }
  }

  void flush() {
    if (waiting_ == 0) return;
    const int64_t rounded = (waiting_ + kBlocksInGroup - 1) / kBlocksInGroup * kBlocksInGroup;
    std::fill(indices_ + waiting_, indices_ + rounded, 0);
    Source values[kWaiting];
    kernel_.elements(draw_, parameters_, indices_, rounded, values);
    put(values, waiting_, out_);
    out_ += waiting_;
    waiting_ = 0;
  }

  void write_run(uint64_t first, int64_t count, Target* out) const {
    const auto begun = static_cast<int64_t>(first % kGroup);
    uint64_t group = first / kGroup;
    if (begun > 0) {
      const int64_t here = std::min(kGroup - begun, count);
      write_part(group++, begun, here, out);
      out += here;
      count -= here;
    }
    const int64_t groups = count / kGroup;
    at::parallel_for(0, groups, kGrain / kGroup, [&](int64_t begin, int64_t end) {
      write_groups(group + static_cast<uint64_t>(begin), end - begin, out + begin * kGroup);
    });
    const int64_t rest = count - groups * kGroup;
    if (rest > 0) write_part(group + static_cast<uint64_t>(groups), 0, rest, out + groups * kGroup);
  }

  void write_part(uint64_t group, int64_t offset, int64_t count, Target* out) const {
    Source values[kGroup];
    kernel_.groups(draw_, parameters_, group, 1, values);
    put(values + offset, count, out);
  }

  void write_groups(uint64_t first, int64_t count, Target* out) const {
    if constexpr (kDirect) {
      kernel_.groups(draw_, parameters_, first, count, out);
    } else {
      constexpr int64_t kGroups = kChunk / kGroup;
      Source values[kChunk];
      for (int64_t done = 0; done < count; done += kGroups) {
        const int64_t now = std::min(kGroups, count - done);
        kernel_.groups(draw_, parameters_, first + static_cast<uint64_t>(done), now, values);
        put(values, now * kGroup, out + done * kGroup);
      }
    }
  }

  void put(const Source* values, int64_t count, Target* out) const {
    if constexpr (kDirect) {
      std::memcpy(out, values, count * sizeof(Source));
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = finish_(values[i]);
    }
  }

  const FillKernel& kernel_;
  const Parameters parameters_;
  const Draw draw_;
  Target* out_;
  const Finish& finish_;
  static constexpr int64_t kWaiting = 256;
  uint64_t indices_[kWaiting];
  int64_t waiting_ = 0;
};

/// The largest number of a floating type that is below x.
template <class T>
double below(double x) {
  using Bits =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  constexpr Bits kSign = Bits{1} << (sizeof(T) * 8 - 1);
  auto candidate = static_cast<T>(x);
  while (static_cast<double>(candidate) >= x) {
    const auto bits = std::bit_cast<Bits>(candidate);
    const bool is_zero = static_cast<Bits>(bits & ~kSign) == 0;
    candidate = std::bit_cast<T>(static_cast<Bits>(is_zero ? kSign | 1 : bits & kSign ? bits + 1 : bits - 1));
  }
  return static_cast<double>(candidate);
}

/// log(1 - p) for p in (0, 1), without the functions of a mathematical library, which differ.
double log_of_rest(double p) {
  double sum = 0;
  if (p < 1e-2) {  // -(p + p^2 / 2 + p^3 / 3 + ...)
    for (int k = 8; k >= 1; --k) sum = p * (1.0 / k + sum);
    return -sum;
  }
  // 1 - p = 2^e (1 + s) / (1 - s), and log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...)
  int exponent = 0;
  const double m = std::frexp(1 - p, &exponent);
  const double s = (m - 1) / (m + 1);
  for (int k = 17; k >= 0; --k) sum = sum * s * s + 1.0 / (2 * k + 1);
  return exponent * 0.69314718055994530942 + 2 * s * sum;
}

}  // namespace

Region Region::all(c10::IntArrayRef shape) {
  Region result;
  result.shape = shape;
  for (const int64_t size : shape) result.pieces.push_back(unsharded(size));
  return result;
}

Region::Region(const Spec& spec) : shape(spec.shape()), pieces(spec.local_pieces()) {}

int64_t Region::numel() const {
  int64_t count = 1;
  for (const Pieces& each : pieces) count *= length(each);
  return count;
}

Region Region::with_dim(int64_t size) const {
  Region result = *this;
  result.shape.push_back(size);
  result.pieces.push_back(unsharded(size));
  return result;
}

void Region::for_each_run(const std::function<void(uint64_t, int64_t)>& fn) const {
  if (numel() == 0) return;
  // The innermost dims that are not sharded make one with the one before them, `last`.
  auto last = static_cast<int64_t>(shape.size()) - 1;
  uint64_t inner = 1;
  for (; last > 0 && pieces[last].size() == 1 && pieces[last][0].size == shape[last]; --last)
    inner *= static_cast<uint64_t>(shape[last]);
  if (last < 0) return fn(0, 1);

  struct Position {
    size_t piece = 0;
    int64_t within = 0;
  };
  c10::SmallVector<Position, 6> positions(last);
  c10::SmallVector<uint64_t, 6> strides(last);
  for (int64_t dim = last - 1; dim >= 0; --dim)
    strides[dim] = (dim == last - 1 ? inner : strides[dim + 1]) * static_cast<uint64_t>(shape[dim + 1]);
  while (true) {
    uint64_t first = 0;
    for (const int64_t dim : c10::irange(last))
      first += strides[dim] *
               static_cast<uint64_t>(pieces[dim][positions[dim].piece].offset + positions[dim].within);
    for (const Range& range : pieces[last])
      fn(first + inner * static_cast<uint64_t>(range.offset), range.size * static_cast<int64_t>(inner));
    int64_t dim = last - 1;
    for (; dim >= 0; --dim) {
      Position& position = positions[dim];
      if (++position.within < pieces[dim][position.piece].size) break;
      position.within = 0;
      if (++position.piece < pieces[dim].size()) break;
      position.piece = 0;
    }
    if (dim < 0) return;
  }
}

Distribution Distribution::uniform(double from, double to) {
  TESSERA_CHECK(from <= to && std::isfinite(to - from),
                "uniform: expected two numbers in ascending order that are not too far apart, got ", from,
                " and ", to, ".");
  Distribution result;
  result.name_ = "uniform";
  result.kind_ = Kind::uniform;
  result.a_ = from;
  result.b_ = to;
  return result;
}

Distribution Distribution::normal(double mean, double std) {
  TESSERA_CHECK(std >= 0, "normal: the standard deviation must not be negative, got ", std, ".");
  Distribution result;
  result.name_ = "normal";
  result.kind_ = Kind::normal;
  result.a_ = mean;
  result.b_ = std;
  return result;
}

Distribution Distribution::log_normal(double mean, double std) {
  TESSERA_CHECK(std > 0, "log_normal: the standard deviation must be positive, got ", std, ".");
  Distribution result = normal(mean, std);
  result.name_ = "log_normal";
  result.kind_ = Kind::log_normal;
  return result;
}

Distribution Distribution::exponential(double lambd) {
  TESSERA_CHECK(lambd > 0, "exponential: lambda must be positive, got ", lambd, ".");
  Distribution result;
  result.name_ = "exponential";
  result.kind_ = Kind::exponential;
  result.a_ = 1 / lambd;
  return result;
}

Distribution Distribution::cauchy(double median, double sigma) {
  TESSERA_CHECK(sigma > 0, "cauchy: sigma must be positive, got ", sigma, ".");
  Distribution result;
  result.name_ = "cauchy";
  result.kind_ = Kind::cauchy;
  result.a_ = median;
  result.b_ = sigma;
  return result;
}

Distribution Distribution::geometric(double p) {
  TESSERA_CHECK(p > 0 && p < 1, "geometric: p must be between 0 and 1, got ", p, ".");
  Distribution result;
  result.name_ = "geometric";
  result.kind_ = Kind::geometric;
  result.a_ = -1 / log_of_rest(p);
  return result;
}

Distribution Distribution::bernoulli(double p) {
  TESSERA_CHECK(p >= 0 && p <= 1, "bernoulli: p must be from 0 to 1, got ", p, ".");
  Distribution result;
  result.name_ = "bernoulli";
  result.of_ = Of::truth;
  result.a_ = p;
  return result;
}

Distribution Distribution::integers(int64_t from, std::optional<int64_t> to) {
  TESSERA_CHECK(!to || from < *to, "random: expected integers from one up to a larger one, got ", from,
                " and ", to.value_or(0), ".");
  Distribution result = integers();
  result.name_ = "randint";
  result.has_from_ = true;
  result.from_ = from;
  result.to_ = to;
  return result;
}

Distribution Distribution::integers() {
  Distribution result;
  result.name_ = "random";
  result.of_ = Of::integers;
  return result;
}

Distribution Distribution::of_parts() const {
  Distribution result = *this;
  // Half of the variance is that of the real part.
  if (kind_ == Kind::normal) result.b_ *= 0.70710678118654752440;
  return result;
}

namespace {

/// With the kind of error that libtorch has for it.
[[noreturn]] void refuse_dtype(const Distribution& distribution, at::ScalarType dtype) {
  const std::string message = c10::str(distribution.name(), ": not for tensors of ", dtype, ".");
  const std::string_view name = distribution.name();
  TESSERA_CHECK(name != "exponential" && name != "cauchy" && name != "randint", message);
  throw c10::NotImplementedError(message, /*backtrace=*/nullptr);
}

}  // namespace

/// One call of `fill`.
class Filling {
 public:
  Filling(const at::Tensor& out, const Region& region, const Distribution& distribution, const Draw& draw)
      : out_(out), region_(region), wanted_(distribution), draw_(draw) {}

  void run() {
    switch (out_.scalar_type()) {
      case at::kFloat:
        return write<float>();
      case at::kDouble:
        return write<double>();
      case at::kHalf:
        return write<c10::Half>();
      case at::kBFloat16:
        return write<c10::BFloat16>();
      case at::kByte:
        return write<uint8_t>();
      case at::kChar:
        return write<int8_t>();
      case at::kShort:
        return write<int16_t>();
      case at::kInt:
        return write<int32_t>();
      case at::kLong:
        return write<int64_t>();
      case at::kUInt16:
        return write<uint16_t>();
      case at::kUInt32:
        return write<uint32_t>();
      case at::kUInt64:
        return write<uint64_t>();
      case at::kBool:
        return write<bool>();
      default:
        refuse();
    }
  }

 private:
  [[noreturn]] void refuse() const { refuse_dtype(wanted_, out_.scalar_type()); }

  template <class T>
  void write() {
    switch (wanted_.of_) {
      case Distribution::Of::truth:
        return write_truth<T>();
      case Distribution::Of::integers:
        return write_integers<T>();
      case Distribution::Of::numbers:
        return write_numbers<T>();
    }
  }

  template <class T>
  void write_numbers() {
    if constexpr (std::is_same_v<T, bool>) {
      refuse();
    } else if constexpr (std::is_integral_v<T>) {
      if (wanted_.kind_ != Kind::geometric) refuse();
      produce<double, T>(wanted_.kind_, parameters<T>(), [](double value) {
        return value < static_cast<double>(std::numeric_limits<T>::max()) ? static_cast<T>(value)
                                                                          : std::numeric_limits<T>::max();
      });
    } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      produce<T, T>(wanted_.kind_, parameters<T>(), nullptr);
    } else {
      produce<float, T>(wanted_.kind_, parameters<T>(), [](float value) { return static_cast<T>(value); });
    }
  }

  template <class T>
  Parameters parameters() const {
    if (wanted_.kind_ != Kind::uniform) return {wanted_.a_, wanted_.b_, 0};
    const double from = wanted_.a_, to = wanted_.b_;
    if constexpr (std::is_integral_v<T>) {
      return {};
    } else {
      const auto limit = static_cast<double>(std::numeric_limits<T>::max());
      TESSERA_CHECK(from >= -limit && to <= limit && to - from <= limit, "uniform: ", from, " to ", to,
                    " is more than tensors of ", out_.scalar_type(), " can represent.");
      return {from, to - from, from < to ? std::max(from, below<T>(to)) : from};
    }
  }

  template <class T>
  void write_truth() {
    // Whole numbers from 0 to 2^32 - 1, of which p * 2^32 count as true.
    const auto count = static_cast<uint64_t>(wanted_.a_ * 0x1p32);
    if (count == 0) {
      std::fill_n(static_cast<T*>(out_.mutable_data_ptr()), out_.numel(), T(0));
      return;
    }
    const auto largest = static_cast<uint32_t>(count - 1);
    produce<uint32_t, T>(Kind::bits, {},
                         [largest](uint32_t bits) { return static_cast<T>(bits <= largest); });
  }

  template <class T>
  void write_integers() {
    const auto [from, range] = bounds<T>();
    // The high half of the product of a random number and the range; a range of 0 stands for 2^64.
    produce<uint64_t, T>(Kind::bits, {}, [from = from, range = range](uint64_t bits) {
      const uint64_t step =
          range == 0 ? bits : static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * range) >> 64);
      const uint64_t value = static_cast<uint64_t>(from) + step;
      if constexpr (std::is_unsigned_v<T>) return static_cast<T>(value);
      return static_cast<T>(static_cast<int64_t>(value));
    });
  }

  template <class T>
  std::pair<int64_t, uint64_t> bounds() const {
    constexpr bool kFloating = !std::is_integral_v<T>;
    // The numbers that the dtype holds, and holds exactly.
    int64_t least, most;
    if constexpr (kFloating) {
      most = int64_t{1} << std::numeric_limits<T>::digits;
      least = -most;
    } else {
      least = static_cast<int64_t>(std::numeric_limits<T>::lowest());
      most = static_cast<int64_t>(
          std::min<uint64_t>(std::numeric_limits<T>::max(), std::numeric_limits<int64_t>::max()));
    }
    if (!wanted_.has_from_) return {0, static_cast<uint64_t>(most) + 1};
    const int64_t from = wanted_.from_;
    const int64_t last = wanted_.to_ ? *wanted_.to_ - 1 : most;
    const bool fits =
        kFloating ? fits_in_floating<T>(from) && fits_in_floating<T>(last) : from >= least && last <= most;
    TESSERA_CHECK(fits && from <= last, "random: integers from ", from, " to ", last,
                  " are not all numbers of ", out_.scalar_type(), ".");
    return {from, static_cast<uint64_t>(last) - static_cast<uint64_t>(from) + 1};
  }

  /// libtorch takes such limits even where not all numbers between are exact.
  template <class T>
  static bool fits_in_floating(int64_t value) {
    if constexpr (std::is_integral_v<T>) {
      return true;
    } else {
      return std::abs(static_cast<double>(value)) <= static_cast<double>(std::numeric_limits<T>::max());
    }
  }

  template <class Source, class T, class Finish>
  void produce(Kind kind, const Parameters& parameters, const Finish& finish) {
    const FillKernel& kernel = kernels().of[static_cast<int>(kind)][sizeof(Source) == 8];
    Writer<Source, T, Finish>(kernel, parameters, draw_, static_cast<T*>(out_.mutable_data_ptr()), finish)
        .write(region_);
  }

  const at::Tensor& out_;
  const Region& region_;
  const Distribution wanted_;
  const Draw draw_;
};

void fill(const at::Tensor& local, const Region& region, const Distribution& distribution, const Draw& draw) {
  TESSERA_CHECK(local.numel() == region.numel(), "fill: a tensor of ", local.numel(),
                " elements for a region of ", region.numel(), ".");
  if (local.is_meta()) return;
  if (c10::isComplexType(local.scalar_type())) {
    if (!distribution.has_complex()) refuse_dtype(distribution, local.scalar_type());
    return fill(at::view_as_real(local), region.with_dim(2), distribution.of_parts(), draw);
  }
  if (local.device().is_cpu() && local.is_contiguous() && !local.is_neg() && !local.is_conj()) {
    Filling(local, region, distribution, draw).run();
    if (!local.is_inference()) local.unsafeGetTensorImpl()->bump_version();
    return;
  }
  const at::Tensor made =
      at::empty(local.sizes(), local.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
  Filling(made, region, distribution, draw).run();
  local.copy_(made);
}

at::Tensor filled(const Region& region, const at::TensorOptions& options, const Distribution& distribution,
                  const Draw& draw) {
  c10::DimVector shape;
  for (const Pieces& pieces : region.pieces) shape.push_back(length(pieces));
  at::Tensor result = at::empty(shape, options);
  fill(result, region, distribution, draw);
  return result;
}

}  // namespace tessera::random
