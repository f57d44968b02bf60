#pragma once

#include <tessera/placement/placement.h>

#include <algorithm>
#include <vector>

/// The placements that the redistribution tests go through.
namespace tessera::testing {

/// All lists of `mesh_ndim` of `choices` whose partial ops agree.
inline std::vector<Placements> all_placements(size_t mesh_ndim, const Placements& choices) {
  std::vector<Placements> lists{{}};
  for (size_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& choice : choices) {
        const bool agrees = std::none_of(list.begin(), list.end(), [&](const Placement& other) {
          return other.is_partial() && choice.is_partial() && other != choice;
        });
        if (!agrees) continue;
        longer.push_back(list);
        longer.back().push_back(choice);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

/// {R, S(0), S(1), P(sum), P(max), SS(0, 2)} to the power of the mesh dims.
inline std::vector<Placements> all_placements(size_t mesh_ndim) {
  return all_placements(
      mesh_ndim, {Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::max), StridedShard(0, 2)});
}

}  // namespace tessera::testing
