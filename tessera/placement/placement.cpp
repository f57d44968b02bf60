#include <tessera/error.h>
#include <tessera/placement/placement.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <ostream>

#include <c10/util/hash.h>

namespace tessera {

namespace {

int32_t checked_dim(int64_t dim) {
  using limits = std::numeric_limits<int32_t>;
  TESSERA_CHECK_INDEX(dim >= limits::min() && dim <= limits::max(), "no tensor has a dim ", dim);
  return static_cast<int32_t>(dim);
}

// The shortest text that reads back as the same number.
std::string shortest(double value) {
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.begin(), buffer.end(), value);
  return {buffer.begin(), result.ptr};
}

}  // namespace

Placement Shard(int64_t dim) { return {Placement::Kind::shard, checked_dim(dim), {}, 0}; }

Placement StridedShard(int64_t dim, int64_t split) {
  TESSERA_CHECK_VALUE(split >= 1, "StridedShard(", dim, ", ", split, "): the split must be at least 1");
  return {Placement::Kind::strided_shard, checked_dim(dim), {}, split};
}

Placement Partial(ReduceOp op) {
  TESSERA_CHECK_VALUE(op != ReduceOp::norm, "Partial(norm) does not say which norm: use NormPartial(p)");
  return {Placement::Kind::partial, 0, op, 0};
}

Placement NormPartial(double p) {
  TESSERA_CHECK_VALUE(
      std::isfinite(p) && p != 0, "NormPartial(", p, "): p must be finite and not 0. ",
      "The 0-norm is Partial(sum), the norms of inf and -inf are Partial(max) and Partial(min)");
  return {Placement::Kind::partial, 0, ReduceOp::norm, std::bit_cast<int64_t>(p)};
}

size_t Placement::hash() const {
  const size_t small = static_cast<size_t>(kind_) | static_cast<size_t>(op_) << 8 |
                       static_cast<size_t>(static_cast<uint32_t>(dim_)) << 32;
  return c10::hash_combine(small, static_cast<size_t>(detail_));
}

std::string Placement::str() const {
  switch (kind_) {
    case Kind::replicate:
      return "R";
    case Kind::shard:
      return c10::str("S(", dim_, ")");
    case Kind::strided_shard:
      return c10::str("SS(", dim_, ", ", detail_, ")");
    case Kind::partial:
      return is_partial(ReduceOp::norm) ? c10::str("P(norm ", shortest(norm()), ")")
                                        : c10::str("P(", op_, ")");
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.str(); }

void Placement::lacks(const char* what) const {
  throw c10::ValueError(c10::str(str(), " has no ", what), /*backtrace=*/nullptr);
}

Placements normalize(c10::ArrayRef<Placement> placements, int64_t ndim) {
  Placements out(placements.begin(), placements.end());
  for (size_t i = 0; i < out.size(); ++i) {
    Placement& placement = out[i];
    if (!placement.is_shard_like()) continue;
    int64_t dim = placement.dim();
    TESSERA_CHECK_INDEX(dim >= -ndim && dim < ndim, "placement ", placement, " of mesh dim ", i, " in ",
                        placements, " shards a dim that a tensor with ", ndim, ndim == 1 ? " dim" : " dims",
                        " does not have",
                        ndim == 0 ? ": a tensor with no dims can only be replicated or partial"
                                  : c10::str(": expected ", -ndim, " to ", ndim - 1));
    if (dim < 0) dim += ndim;
    placement = placement.split() == 1 ? Shard(dim) : StridedShard(dim, placement.split());
  }
  return out;
}

void check_partials_agree(c10::ArrayRef<Placement> placements) {
  const auto commute = [](const Placement& a, const Placement& b) {
    return a == b || (is_linear(a.op()) && is_linear(b.op()));
  };
  const Placement* first = nullptr;
  for (const Placement& placement : placements) {
    if (!placement.is_partial()) continue;
    if (first == nullptr) first = &placement;
    TESSERA_CHECK_VALUE(commute(*first, placement), "Mixed Partial reduce types: the placements ", placements,
                        " mix ", *first, " and ", placement,
                        ", whose result would depend on which is reduced first: use one reduce op, "
                        "or only sum and avg");
  }
}

}  // namespace tessera
