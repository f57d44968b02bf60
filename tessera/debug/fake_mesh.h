#pragma once

#include <tessera/comm/world.h>
#include <tessera/error.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/text.h>

#include <memory>
#include <numeric>
#include <vector>

namespace tessera {

/// While alive, the calling thread is one rank of a mesh whose other ranks do not exist: what it communicates goes
/// nowhere. For what only looks at specs and shapes.
class FakeRank {
 public:
  /// `dry_run`: see WorldOptions.
  explicit FakeRank(const Layout& mesh, int64_t rank = 0, bool dry_run = false)
      : world_(make_world(mesh, rank, dry_run)),
        scope_(world_),
        mesh_(at::kCPU, mesh.mesh_shape, all_ranks(world_->size()), mesh.mesh_dim_names, world_) {}

  const DeviceMesh& mesh() const { return mesh_; }

 private:
  static std::shared_ptr<World> make_world(const Layout& mesh, int64_t rank, bool dry_run) {
    constexpr int64_t kMost = 1 << 20;
    WorldOptions options;
    options.rank = rank;
    options.dry_run = dry_run;
    for (const int64_t size : mesh.mesh_shape) {
      TESSERA_CHECK_VALUE(size <= kMost / options.size, "a mesh of shape ", c10::IntArrayRef(mesh.mesh_shape),
                          " has more than ", kMost, " ranks, which is more than are looked at.");
      options.size *= size;
    }
    options.backend = "fake";
    return std::make_shared<World>(std::move(options));
  }
  static std::vector<int64_t> all_ranks(int64_t size) {
    std::vector<int64_t> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  const std::shared_ptr<World> world_;
  const WorldScope scope_;
  const DeviceMesh mesh_;
};

}  // namespace tessera
