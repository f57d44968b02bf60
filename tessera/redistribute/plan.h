#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/cost.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/SmallVector.h>

/// How a tensor gets from one layout to another: a pure function of two specs. It communicates nothing, so it
/// can be called on any rank, in the mesh or not, and gives all of them the same answer.

namespace tessera {

enum class StepKind : uint8_t {
  all_gather,      ///< S -> R, of mesh dims that are the innermost in the shard order of a tensor dim
  all_reduce,      ///< P -> R
  reduce_scatter,  ///< P -> S, innermost in the shard order of the tensor dim
  all_to_all,      ///< S -> S', another shard order, ...: every rank receives exactly what it needs and lacks
  slice,           ///< no communication: R -> S, every rank keeps some of its elements
  to_partial,      ///< no communication: R -> P, and S -> P with the neutral element around the shard
  rescale,         ///< no communication: P(sum) <-> P(avg)
};

/// "all_gather", ...
TESSERA_API std::string_view name(StepKind kind);

struct Step {
  StepKind kind;
  /// Whose ranks take part, as one group that counts them row-major in this order. For local steps: whose
  /// placements change.
  c10::SmallVector<int64_t, 4> mesh_dims;
  /// The tensor dims that are sharded differently after the step, in ascending order.
  c10::SmallVector<int64_t, 4> tensor_dims;
  /// The reduction of what is reduced or becomes partial: avg if all mesh dims average, sum if only some do.
  std::optional<ReduceOp> op;
  /// The spec of the tensor after the step.
  Spec after;
  /// What the busiest rank receives. An all_reduce of n ranks counts 2 (n-1)/n times the local tensor and a
  /// reduce_scatter n-1 times what each gets, as in a ring. In an all_to_all among more than 64 ranks the
  /// busiest one is sought at the corners of the mesh only.
  int64_t bytes = 0;
  /// By the cost model.
  double seconds = 0;

  bool communicates() const { return kind < StepKind::slice; }
};

/// Steps that take a tensor from one layout to the other.
struct TESSERA_API Plan {
  Spec from;
  Spec to;
  std::vector<Step> steps;

  /// Received by the busiest rank over all steps, if it is the same in all of them: an upper bound.
  int64_t bytes() const;
  double seconds() const;
  bool communicates() const;

  ///   [S(0), P(sum)] -> [R, S(1)]   f32[4096, 4096] on mesh(dp=2, tp=4)
  ///     1. reduce_scatter  tp  dim 1  24.0 MiB/rank    2.5 ms
  ///     2. all_gather      dp  dim 0   8.0 MiB/rank  848.9 us
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Plan& plan);
};

/// The cheapest steps known from one layout to the other, under `costs`. Both specs must have the same mesh,
/// global shape and dtype; strides do not matter. Without steps if nothing has to be done.
///
///   - S -> S' is one all_to_all, P -> S one reduce_scatter, R -> S a slice; nothing goes through Replicate
///     unless that is the target.
///   - Mesh dims that change in the same way share one collective over their joint group.
///   - Where several mesh dims shard one tensor dim, only the innermost can be gathered alone, and a new one
///     becomes the innermost. Anything else (another order, strided shards, outer shards) is one all_to_all.
///   - Mesh dims of size 1 cost nothing.
///
/// Found by a best-first search over layouts; the time does not depend on the number of ranks.
TESSERA_API Plan plan(const Spec& from, const Spec& to, const CostModel& costs = {});

/// "512 B", "24.0 MiB".
TESSERA_API std::string bytes_text(int64_t bytes);

}  // namespace tessera
