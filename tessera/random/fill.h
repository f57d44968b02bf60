#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>
#include <tessera/random/kernels.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

/// Tensors of random values, of which every rank can make its local elements alone.
namespace tessera::random {

/// Which elements of a tensor are meant: of each dim, some pieces. Elements are counted in row-major order,
/// whatever the strides.
struct TESSERA_API Region {
  c10::DimVector shape;  // of the global tensor
  std::vector<Pieces> pieces;

  Region() = default;
  /// All of it.
  static Region all(c10::IntArrayRef shape);
  /// The local elements of this rank. (Of a partial tensor: all of it.)
  explicit Region(const Spec& spec);

  int64_t numel() const;
  /// With a last dim of this size, which is not sharded.
  Region with_dim(int64_t size) const;
  /// Runs of consecutive elements, in order: fn(index of the first, how many).
  void for_each_run(const std::function<void(uint64_t first, int64_t count)>& fn) const;
};

/// A distribution of random values. Invalid parameters are errors that name the function.
class TESSERA_API Distribution {
 public:
  /// In [from, to); `from` itself if they are equal.
  static Distribution uniform(double from = 0, double to = 1);
  static Distribution normal(double mean = 0, double std = 1);
  static Distribution log_normal(double mean = 1, double std = 2);
  static Distribution exponential(double lambd = 1);
  static Distribution cauchy(double median = 0, double sigma = 1);
  /// How many trials it takes until the first success.
  static Distribution geometric(double p);
  /// 1 with probability p, else 0.
  static Distribution bernoulli(double p = 0.5);
  /// Integers in [from, to); without `to` up to the largest of the dtype.
  static Distribution integers(int64_t from, std::optional<int64_t> to);
  /// Integers from 0 to the largest that the dtype has, or, of floating dtypes, up to which all integers are
  /// exact.
  static Distribution integers();

  /// "uniform"
  const char* name() const { return name_; }
  /// Whether it is defined for complex dtypes.
  bool has_complex() const { return kind_ == Kind::uniform || kind_ == Kind::normal; }
  /// The distribution of the real and of the imaginary part of a complex value; the two are independent.
  Distribution of_parts() const;

 private:
  friend class Filling;
  enum class Of : uint8_t { numbers, truth, integers };

  const char* name_ = "";
  Of of_ = Of::numbers;
  Kind kind_ = Kind::bits;
  double a_ = 0, b_ = 1;
  bool has_from_ = false;
  int64_t from_ = 0;
  std::optional<int64_t> to_;
};

/// Fills `local`, the local tensor of `region`. Takes time proportional to its size. Throws if its dtype
/// cannot represent such values.
TESSERA_API void fill(const at::Tensor& local, const Region& region, const Distribution& distribution,
                      const Draw& draw);

/// A new tensor, filled so.
TESSERA_API at::Tensor filled(const Region& region, const at::TensorOptions& options,
                              const Distribution& distribution, const Draw& draw);

}  // namespace tessera::random
