#pragma once

#include <tessera/mesh/axis.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

/// What all slices of a mesh share, and the checks of names and sizes that a mesh is made of.
namespace tessera {

/// The mesh that others are sliced from.
struct MeshRoot {
  std::shared_ptr<World> world;
  at::DeviceType device;
  DeviceMesh::Names names;
  std::vector<Axis> axes;
  std::vector<int64_t> ranks;    // by flat index; empty if each rank is at its own index
  std::optional<int64_t> index;  // of this rank

  std::mutex mutex;
  std::map<std::string, Axis> flattened;

  int64_t rank(int64_t index) const { return ranks.empty() ? index : ranks[index]; }

  bool same_ranks(const MeshRoot& other) const {
    return this == &other || (join(axes).size() == join(other.axes).size() && ranks == other.ranks);
  }
};

/// `ranks` in row-major order of `shape`, or nothing for 0, 1, ... Without a world it is the current one.
std::shared_ptr<MeshRoot> make_mesh_root(at::DeviceType device, at::IntArrayRef shape,
                                         std::optional<std::vector<int64_t>> ranks, DeviceMesh::Names names,
                                         std::shared_ptr<World> world);

/// Throws if a name is empty or repeated, or could not be read in the text of a spec.
void check_mesh_dim_names(const DeviceMesh::Names& names);
/// Throws unless there are sizes, all positive.
void check_mesh_sizes(at::IntArrayRef sizes);
/// The product of sizes, or the largest int64 if it is larger.
int64_t mesh_size(at::IntArrayRef sizes);

/// For messages: 'dp', or 'dp', 'tp', or the index of a dim.
std::string quote(const std::string& name);
std::string quote(const DeviceMesh::Names& names);
std::string quote(const MeshDim& dim);

}  // namespace tessera
