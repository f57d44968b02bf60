#pragma once

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <ATen/core/Tensor.h>

namespace tessera {

/// A mesh dim, by position (negative counts from the end) or by name.
class MeshDim {
 public:
  MeshDim(int64_t position) : value_(position) {}
  MeshDim(int position) : value_(int64_t{position}) {}
  MeshDim(std::string name) : value_(std::move(name)) {}
  MeshDim(const char* name) : value_(std::string(name)) {}
  const std::variant<int64_t, std::string>& value() const { return value_; }

 private:
  std::variant<int64_t, std::string> value_;
};

/// An n-d array of ranks of a world, seen from one of them: the stage on which tensors are distributed.
/// A cheap handle on immutable state. All ranks of the world must make the same meshes.
///
/// Ranks that are not in the mesh may hold it too; they have no coordinate and take part in nothing.
/// Groups are made when first asked for, so a mesh over very many ranks costs nothing until it is used.
class TESSERA_API DeviceMesh {
 public:
  using Names = std::vector<std::string>;

  /// `ranks` in row-major order of `shape`. Without names the dims are known by position only.
  /// Throws, naming the culprit, if the shape does not fit the ranks, a rank is repeated or outside the world,
  /// a name is empty or repeated, or the device has no backend (xla).
  DeviceMesh(at::DeviceType device, at::IntArrayRef shape, std::vector<int64_t> ranks, Names names = {},
             std::shared_ptr<World> world = nullptr);
  /// The same with shape and ranks from an integer tensor.
  DeviceMesh(at::DeviceType device, const at::Tensor& ranks, Names names = {},
             std::shared_ptr<World> world = nullptr);

  /// A 1-d mesh over the ranks of a group, which it uses instead of making its own.
  /// `ranks` may be left out if the world made the group.
  static DeviceMesh from_group(const Group& group, at::DeviceType device, std::vector<int64_t> ranks = {},
                               Names names = {}, std::shared_ptr<World> world = nullptr);
  /// An n-d mesh with one existing group per dim: groups[i] is this rank's group along dim i.
  static DeviceMesh from_groups(const std::vector<Group>& groups, at::DeviceType device,
                                const at::Tensor& ranks, Names names, std::shared_ptr<World> world = nullptr);
  /// Meshes whose dims are the dims of all `meshes` in order; they must be cut from one root and not overlap.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  at::DeviceType device_type() const;
  int64_t ndim() const;
  int64_t size() const;
  int64_t size(const MeshDim& dim) const;
  at::IntArrayRef shape() const;
  /// Empty if the dims have no names.
  const Names& mesh_dim_names() const;
  /// The position of a dim. Unknown names and positions are errors that list the known ones.
  int64_t dim_index(const MeshDim& dim) const;

  /// The ranks, as an int64 tensor of the mesh's shape.
  at::Tensor mesh() const;
  /// The rank at a coordinate.
  int64_t rank_at(at::IntArrayRef coordinate) const;
  /// All ranks in row-major order.
  std::vector<int64_t> ranks() const;

  /// This rank in the world, whether in the mesh or not.
  int64_t get_rank() const;
  bool is_member() const;
  /// This rank's place along each dim, or nothing if it is not in the mesh.
  std::optional<at::IntArrayRef> get_coordinate() const;
  /// This rank's place along `dim`, which may be left out on a 1-d mesh. An error outside the mesh.
  int64_t get_local_rank(std::optional<MeshDim> dim = std::nullopt) const;

  /// The ranks that differ from this one in `dim` only, in order.
  std::vector<int64_t> ranks_along(const MeshDim& dim) const;
  /// The group of those ranks, made at the first call. `dim` may be left out on a 1-d mesh.
  Group get_group(std::optional<MeshDim> dim = std::nullopt) const;
  /// The group of the ranks that differ from this one in `dims` only, row-major in the order given.
  Group get_group(const std::vector<MeshDim>& dims) const;
  std::vector<Group> get_all_groups() const;

  /// The part of the mesh along some named dims that this rank is in.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](const Names& names) const;

  /// All dims as one, named `name` (names joined by "_" by default). The root remembers it: `root["dp_cp"]`.
  DeviceMesh flatten(std::string name = "") const;
  /// One dim as several, row-major.
  DeviceMesh unflatten(const MeshDim& dim, at::IntArrayRef sizes, Names names) const;
  /// The mesh that this one was cut from; itself if from none.
  DeviceMesh root() const;

  const std::shared_ptr<World>& world() const;

  /// Equal: same world, device type, shape, names and ranks.
  friend TESSERA_API bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  size_t hash() const;

  /// "mesh(dp=2, tp=4)", or "mesh(2, 4)" without names.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);
  std::string str() const;

 private:
  struct State;
  explicit DeviceMesh(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

/// A mesh over ranks 0, 1, ... of the current world, row-major. Its size must not exceed the world's.
TESSERA_API DeviceMesh init_device_mesh(at::DeviceType device, at::IntArrayRef shape,
                                        DeviceMesh::Names names = {}, std::shared_ptr<World> world = nullptr);

/// The mesh of the innermost `MeshScope` of the calling thread; an error if there is none.
TESSERA_API DeviceMesh current_mesh();
TESSERA_API bool has_current_mesh();

/// While it lives, `mesh` is what factories and `distribute_tensor` use on this thread when given none.
class TESSERA_API MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;
};

}  // namespace tessera

template <>
struct std::hash<tessera::DeviceMesh> {
  size_t operator()(const tessera::DeviceMesh& mesh) const { return mesh.hash(); }
};
