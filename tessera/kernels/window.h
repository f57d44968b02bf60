#pragma once

#include <tessera/kernels/exchange.h>

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

/// Operators whose result at a position depends on a window of positions of the input: what a rank needs
/// beyond its shard where the dim is sharded, its halo, and how it gets it.
namespace tessera::kernels {

/// Position o of the result looks at the positions o * stride - padding + k * dilation of the input, k in [0,
/// kernel).
struct Sliding {
  int64_t kernel, stride, padding, dilation;

  /// From the first to the last position that is looked at, less one.
  int64_t extent() const { return (kernel - 1) * dilation; }
  /// The size of the result: how many windows end within the input and its padding. `ceil`: or only begin
  /// there, but not in the padding behind.
  int64_t size(int64_t input, bool ceil = false) const;
  /// What a range of the result looks at.
  ///   kernel 3, stride 2, padding 1:  {0, 2} -> {-1, 5}
  Range reach(const Range& of_result) const;
};

/// Of a range of the result's dim, the range of the input's dim that it needs; it may stick out.
using Reach = std::function<Range(const Range&)>;

/// The halo of one dim, along which input and result are sharded alike: each rank has one range of both.
class Halo {
 public:
  Halo(const Spec& input, const Spec& result, int64_t dim, const Reach& reach);

  int64_t dim() const { return dim_; }
  /// This rank's range of the result, and what it needs of the input for that; both empty together.
  const Range& local() const { return local_; }
  const Range& needed() const { return needed_; }
  /// Whether some rank needs what another one has.
  bool communicates() const { return communicates_; }

  /// What this rank needs, from its local input; `fill` where that sticks out of the dim. Collective.
  at::Tensor fetch(const at::Tensor& input, const c10::Scalar& fill) const;
  /// The converse, for gradients: what the ranks have for each element is added on the rank that has it.
  /// Collective.
  at::Tensor give_back(const at::Tensor& needed) const;

 private:
  int64_t dim_;
  Range local_, needed_, own_;  // own: of the input
  bool communicates_ = false;
  std::vector<Exchange> ways_;  // there and back
};

/// The halos of several dims.
class Halos {
 public:
  /// Of those that are sharded of the dims from `first` on. `reach`: of each of these.
  Halos(const Spec& input, const Spec& result, int64_t first, const std::vector<Reach>& reach);

  bool empty() const { return halos_.empty(); }
  bool communicates() const;
  /// Whether this rank has nothing of the result, because its range of one of these dims is empty.
  bool idle() const;
  /// Of a dim that is sharded; else null.
  const Halo* of(int64_t dim) const;

  at::Tensor fetch(at::Tensor input, const c10::Scalar& fill) const;
  /// A tensor of the shape of what `fetch` gives, with no memory of its own: of operators that look at the
  /// shape only.
  at::Tensor shaped(const at::Tensor& input) const;
  at::Tensor give_back(at::Tensor needed) const;

  /// Where an operator makes more of the result than the rank's range: which range, along the dim of a halo.
  using Cover = std::function<Range(const Halo&)>;
  /// The local result, of what was made; and the converse, with zeros around.
  at::Tensor cropped(at::Tensor result, const Cover& cover) const;
  at::Tensor padded(at::Tensor result, const Cover& cover) const;

 private:
  std::vector<Halo> halos_;
};

}  // namespace tessera::kernels
