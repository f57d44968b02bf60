#pragma once

#include <tessera/comm/world.h>
#include <tessera/mesh/device_mesh.h>

#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// A mesh over ranks `first_rank`, `first_rank` + 1, ... of a world of its own that no other rank is in, seen
/// from `rank`.
inline DeviceMesh fake_mesh(at::IntArrayRef shape, DeviceMesh::Names names = {}, int64_t rank = 0,
                            int64_t first_rank = 0) {
  std::vector<int64_t> ranks(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  std::iota(ranks.begin(), ranks.end(), first_rank);
  WorldOptions options;
  options.rank = rank;
  options.size = ranks.back() + 1;
  options.backend = "fake";
  return DeviceMesh(at::kCPU, shape, ranks, std::move(names), std::make_shared<World>(std::move(options)));
}

}  // namespace tessera
