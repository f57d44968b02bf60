#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/placement.h>

#include <cstdint>
#include <string_view>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

namespace tessera {

/// What a collective costs among the ranks along a mesh dim: `latency` seconds to start, and `per_byte`
/// seconds for each byte that the busiest rank receives.
struct LinkCost {
  double latency = 0;
  double per_byte = 0;

  bool operator==(const LinkCost&) const = default;

  /// The default for a backend: "threads", "shm", "gloo", "nccl" or "fake"; for any other that of gloo.
  static TESSERA_API LinkCost of_backend(std::string_view name);
};

/// One link per mesh dim, or none for the default of the backend that carries the mesh's tensors.
///   CostModel{}                                  the default
///   CostModel{{{1e-4, 1e-9}, {2e-5, 1e-11}}}     dim 0 between machines, dim 1 within one
struct CostModel {
  c10::SmallVector<LinkCost, 4> links = {};

  /// The links, one for each dim of `mesh`. Throws if there are some, but not as many as the mesh has dims,
  /// or if one is negative or not finite.
  TESSERA_API c10::SmallVector<LinkCost, 4> of(const DeviceMesh& mesh) const;
};

/// One collective over several mesh dims at once goes at the pace of the slowest of them.
TESSERA_API LinkCost joint(c10::ArrayRef<LinkCost> links, c10::IntArrayRef mesh_dims);

/// What it costs to bring a tensor from one placement to another on one mesh dim of `ranks` ranks, by the one
/// step that the planner would take: seconds. `bytes`: of the tensor with this mesh dim unsharded. Local steps
/// cost a hundredth of sending what they touch, so that among strategies that do not communicate the one wins
/// that leaves tensors alone. Shard -> Partial moves nothing now, but counts as the reduction it leaves to do.
///   P(sum) -> R: latency + 2 (n-1)/n bytes        S(0) -> R: latency + (n-1)/n bytes        R -> S(0): local
TESSERA_API double transition_cost(const Placement& from, const Placement& to, int64_t ranks, double bytes,
                                   const LinkCost& link);

/// What a collective costs among `ranks` ranks, by its name and its bytes as observers hear them (comm/observer.h): seconds.
///   all_reduce: latency + 2 (n-1)/n bytes        all_gather, reduce_scatter: latency + (n-1)/n bytes
TESSERA_API double collective_cost(std::string_view name, int64_t bytes, int64_t ranks, const LinkCost& link);

}  // namespace tessera
