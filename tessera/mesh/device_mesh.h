#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

namespace tessera {

/// A mesh dim, by position (negative counts from the end) or by name.
class MeshDim {
 public:
  MeshDim(std::integral auto position) : value_(static_cast<int64_t>(position)) {}
  MeshDim(std::string name) : value_(std::move(name)) {}
  MeshDim(const char* name) : value_(std::string(name)) {}
  const std::variant<int64_t, std::string>& value() const { return value_; }

 private:
  std::variant<int64_t, std::string> value_;
};

/// An n-d array of ranks of a world, seen from one of them: the stage on which tensors are distributed.
/// A cheap handle on immutable state. All ranks of the world must make the same meshes.
///
/// Ranks outside the mesh may have the object too; they have no coordinate and take part in nothing.
/// Groups are made at first use, so a mesh over very many ranks costs nothing until it is used.
/// Safe to use from several threads.
///
/// What returns a reference on a mesh returns a value on a temporary one, so `mesh["tp"].shape()` may be
/// kept.
class TESSERA_API DeviceMesh {
 public:
  using Names = std::vector<std::string>;

  /// `ranks` in row-major order of `shape`. Without names the dims are known by position only.
  ///   DeviceMesh(at::kCPU, {2, 2}, {0, 1, 2, 3}, {"dp", "tp"})  ->  mesh(dp=2, tp=2)
  /// Throws, naming the culprit, if the shape does not fit the ranks, a rank is repeated or outside the
  /// world, a name is repeated or has spaces or one of =,:()[], or the device has no groups (xla).
  DeviceMesh(at::DeviceType device, at::IntArrayRef shape, std::vector<int64_t> ranks, Names names = {},
             std::shared_ptr<World> world = nullptr);
  /// The same with shape and ranks from an integer tensor.
  DeviceMesh(at::DeviceType device, const at::Tensor& ranks, Names names = {},
             std::shared_ptr<World> world = nullptr);

  /// A 1-d mesh over the ranks of a group, which it uses instead of making its own.
  /// `ranks` may be left out if the world made the group. Ranks that are not in the group pass a null one.
  static DeviceMesh from_group(const Group& group, at::DeviceType device, std::vector<int64_t> ranks = {},
                               Names names = {}, std::shared_ptr<World> world = nullptr);
  /// An n-d mesh with one existing group per dim: groups[i] is this rank's group along dim i, its ranks in
  /// the mesh's order. Ranks that are not in the mesh pass none.
  static DeviceMesh from_groups(const std::vector<Group>& groups, at::DeviceType device,
                                const at::Tensor& ranks, Names names, std::shared_ptr<World> world = nullptr);
  /// The mesh whose dims are the dims of all `meshes` in order; they must be slices of one root and
  /// not overlap.
  ///   concatenate({mesh["tp"], mesh["dp"]})  ->  mesh(tp=4, dp=2), the transpose of mesh(dp=2, tp=4)
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  at::DeviceType device_type() const;
  int64_t ndim() const;
  int64_t size() const;
  int64_t size(const MeshDim& dim) const;
  at::IntArrayRef shape() const&;
  std::vector<int64_t> shape() const&&;
  /// Empty if the dims have no names.
  const Names& mesh_dim_names() const&;
  Names mesh_dim_names() const&&;
  /// The position of a dim. Unknown names and positions are errors that list the known ones.
  ///
  /// Everything else that takes a dim also knows those that `flatten` made of dims of this mesh.
  int64_t dim_index(const MeshDim& dim) const;

  /// The ranks, as an int64 tensor of the mesh's shape.
  at::Tensor mesh() const;
  /// The rank at a coordinate, which has one index per dim.
  int64_t rank_at(at::IntArrayRef coordinate) const;
  /// All ranks in row-major order.
  std::vector<int64_t> ranks() const;

  /// This rank in the world, whether in the mesh or not.
  int64_t get_rank() const;
  bool is_member() const;
  /// This rank's index along each dim, or nothing if it is not in the mesh.
  std::optional<at::IntArrayRef> get_coordinate() const&;
  std::optional<std::vector<int64_t>> get_coordinate() const&&;
  /// This rank's index along `dim`, which may be left out on a 1-d mesh. An error outside the mesh.
  int64_t get_local_rank(std::optional<MeshDim> dim = std::nullopt) const;

  /// The coordinates of all ranks, row-major: coordinates()[i] is that of ranks()[i].
  std::vector<c10::DimVector> coordinates() const;
  /// The coordinates of the ranks that differ from this one in `dims` only, row-major in the order given:
  /// that of rank i of get_group(dims) is at i. An error outside the mesh.
  ///   on rank 5 of mesh(2, 4):  coordinates_along({1})  ->  (1, 0), (1, 1), (1, 2), (1, 3)
  std::vector<c10::DimVector> coordinates_along(at::IntArrayRef dims) const;

  /// The ranks that differ from this one in `dim` only, in order. An error outside the mesh.
  std::vector<int64_t> ranks_along(const MeshDim& dim) const;
  /// The group of those ranks, made at the first call unless given. `dim` may be left out on a 1-d mesh.
  Group get_group(std::optional<MeshDim> dim = std::nullopt) const;
  /// The group of the ranks that differ from this one in `dims` only, row-major in the order given.
  Group get_group(const std::vector<MeshDim>& dims) const;
  /// The group of all ranks of the mesh, row-major. An error outside the mesh.
  Group get_joint_group() const;
  /// The same; null outside the mesh.
  Group joint_group_or_null() const;
  /// One group per dim.
  std::vector<Group> get_all_groups() const;

  /// The submesh along some named dims that this rank is in; on a rank outside the mesh the first such
  /// submesh, of which it is no member. On rank 5 of mesh(dp=2, tp=4):
  ///   mesh["tp"]  ->  mesh(tp=4) of ranks 4, 5, 6, 7      mesh["dp"]  ->  mesh(dp=2) of ranks 1, 5
  /// Several names must be in the mesh's own order (see `concatenate` for others) and not overlap.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](const Names& names) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;
  /// All submeshes along one of the mesh's dims, in row-major order of the other dims. This rank is a member
  /// of at most one of them.
  ///   mesh(dp=2, tp=3).submeshes("dp")  ->  mesh(dp=2) of ranks 0, 3; of 1, 4; of 2, 5
  std::vector<DeviceMesh> submeshes(const MeshDim& dim) const;

  /// All dims as one, named `name` (names joined by "_" by default). The root and all its slices that
  /// have these dims know it by this name, which must be new unless for the same dims:
  ///   root[{"dp", "cp"}].flatten();  root["dp_cp"]  ->  mesh(dp_cp=4)
  /// A 1-d mesh flattened into its own name is itself. It uses `group`, unless null, instead of one that the world makes.
  DeviceMesh flatten(std::string name = "", const Group& group = {}) const;
  /// What `flatten` made of dims of this mesh, by name.
  std::map<std::string, DeviceMesh> flattened() const;
  /// One dim as several, row-major.
  ///   mesh(world=8).unflatten(0, {2, 4}, {"dp", "tp"})  ->  mesh(dp=2, tp=4)
  /// `groups`: for each of these dims this rank's group, or null for one that the world makes; or none.
  DeviceMesh unflatten(const MeshDim& dim, at::IntArrayRef sizes, Names names,
                       const std::vector<Group>& groups = {}) const;
  /// The mesh that this one is a slice of; itself if it is no slice.
  DeviceMesh root() const;

  const std::shared_ptr<World>& world() const&;
  std::shared_ptr<World> world() const&&;

  /// Equal: same world (the object), device type, shape, names and ranks.
  friend TESSERA_API bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  size_t hash() const;

  /// "mesh(dp=2, tp=4)", or "mesh(2, 4)" without names.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);
  std::string str() const;

 private:
  friend TESSERA_API DeviceMesh init_device_mesh(at::DeviceType device, at::IntArrayRef shape, Names names,
                                                 std::shared_ptr<World> world);
  struct State;
  explicit DeviceMesh(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

/// A mesh over ranks 0, 1, ... of the world (the current one by default), row-major. Its size must not exceed
/// the world's; ranks beyond it are outside the mesh. Collective in worlds of up to 1024 ranks, which must all ask for
/// the same. (Constructors of DeviceMesh are not: ranks that make different meshes notice it when they use them.)
TESSERA_API DeviceMesh init_device_mesh(at::DeviceType device, at::IntArrayRef shape,
                                        DeviceMesh::Names names = {}, std::shared_ptr<World> world = nullptr);

/// The mesh of the innermost `MeshScope` of the calling thread; an error if there is none.
TESSERA_API DeviceMesh current_mesh();
TESSERA_API bool has_current_mesh();

/// While alive, makes `mesh` the current mesh of the calling thread, which Python's `distribute_tensor` and
/// factories use when they are given none.
class TESSERA_API MeshScope {
 public:
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;

 private:
  ThreadScope<std::optional<DeviceMesh>, MeshScope> scope_;
};

}  // namespace tessera

template <>
struct std::hash<tessera::DeviceMesh> {
  size_t operator()(const tessera::DeviceMesh& mesh) const { return mesh.hash(); }
};
