#pragma once

#include <tessera/export.h>
#include <tessera/placement/reduce_op.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <type_traits>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

namespace tessera {

/// How a tensor is distributed over the ranks along one mesh dim. A small value: copy it, compare it, hash
/// it.
class TESSERA_API Placement {
 public:
  enum class Kind : uint8_t { replicate, shard, strided_shard, partial };

  /// Replicate.
  constexpr Placement() = default;

  constexpr Kind kind() const { return kind_; }
  constexpr bool is_replicate() const { return kind_ == Kind::replicate; }
  /// Shard, not StridedShard.
  constexpr bool is_shard() const { return kind_ == Kind::shard; }
  constexpr bool is_shard(int64_t dim) const { return is_shard() && dim_ == dim; }
  constexpr bool is_strided_shard() const { return kind_ == Kind::strided_shard; }
  /// Shard or StridedShard.
  constexpr bool is_shard_like() const { return is_shard() || is_strided_shard(); }
  constexpr bool is_shard_like(int64_t dim) const { return is_shard_like() && dim_ == dim; }
  constexpr bool is_partial() const { return kind_ == Kind::partial; }
  constexpr bool is_partial(ReduceOp op) const { return is_partial() && op_ == op; }

  /// The tensor dim that is sharded. Throws unless is_shard_like().
  int64_t dim() const {
    if (!is_shard_like()) [[unlikely]]
      lacks("tensor dim");
    return dim_;
  }
  /// Into how many chunks the dim counts as split already; 1 for Shard. Throws unless is_shard_like().
  int64_t split() const {
    if (!is_shard_like()) [[unlikely]]
      lacks("split");
    return is_shard() ? 1 : detail_;
  }
  /// Throws unless is_partial().
  ReduceOp op() const {
    if (!is_partial()) [[unlikely]]
      lacks("reduce op");
    return op_;
  }
  /// The p of a p-norm. Throws unless is_partial(ReduceOp::norm).
  double norm() const {
    if (!is_partial(ReduceOp::norm)) [[unlikely]]
      lacks("norm");
    return std::bit_cast<double>(detail_);
  }

  constexpr bool operator==(const Placement&) const = default;
  size_t hash() const;

  /// "R", "S(0)", "SS(0, 2)", "P(sum)", "P(norm 2)"
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Placement& placement);

 private:
  friend TESSERA_API Placement Shard(int64_t dim);
  friend TESSERA_API Placement StridedShard(int64_t dim, int64_t split);
  friend TESSERA_API Placement Partial(ReduceOp op);
  friend TESSERA_API Placement NormPartial(double p);

  constexpr Placement(Kind kind, int32_t dim, ReduceOp op, int64_t detail)
      : kind_(kind), op_(op), dim_(dim), detail_(detail) {}

  [[noreturn]] void lacks(const char* what) const;

  Kind kind_ = Kind::replicate;
  ReduceOp op_ = ReduceOp::sum;
  int32_t dim_ = 0;
  int64_t detail_ = 0;  // the split of a strided shard, or the bits of a norm's p
};

static_assert(sizeof(Placement) == 16 && std::is_trivially_copyable_v<Placement>);

/// Every rank has the full tensor.
inline Placement Replicate() { return {}; }

/// Tensor dim `dim` is split into chunks, one for each rank in order, as by torch.chunk. A negative dim
/// counts from the end and is resolved by `normalize`.
TESSERA_API Placement Shard(int64_t dim);

/// Tensor dim `dim` is split into `split` chunks, and each of these into one for each rank; a rank has its
/// chunk of every one. Describes a dim that mesh dims shard from right to left.
///   [StridedShard(0, 2), Shard(0)] on mesh(2, 2): rows 0 1 | 4 5 | 2 3 | 6 7 of 8
TESSERA_API Placement StridedShard(int64_t dim, int64_t split);

/// Every rank has a partial value of the tensor's full shape; reduced over the ranks they give the true one.
/// Use NormPartial for ReduceOp::norm.
TESSERA_API Placement Partial(ReduceOp op = ReduceOp::sum);

/// Every rank has the p-norm of its elements; `p` finite and not 0. (The 0-norm is Partial(sum), that of
/// infinity Partial(max), that of minus infinity Partial(min).)
TESSERA_API Placement NormPartial(double p);

/// One placement for each mesh dim.
using Placements = c10::SmallVector<Placement, 4>;

/// The placements of a tensor with `ndim` dims in the one form in which equal ones compare equal: dims
/// counted from the start, StridedShard(d, 1) as Shard(d).
///   normalize({Shard(-1), Replicate()}, 2) == {Shard(1), Replicate()}
/// Throws if a tensor dim is out of range, naming the mesh dim and the placement.
TESSERA_API Placements normalize(c10::ArrayRef<Placement> placements, int64_t ndim);

/// Throws if the placements have reductions that do not commute, so that their order would matter: all
/// partial ones must have the same op, or be sum and avg.
TESSERA_API void check_partials_agree(c10::ArrayRef<Placement> placements);

}  // namespace tessera

template <>
struct std::hash<tessera::Placement> {
  size_t operator()(const tessera::Placement& placement) const { return placement.hash(); }
};
