#pragma once

#include <tessera/mesh/axis.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/mesh_root.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A mesh: some axes of a root. Meshes are handles to it, and it never changes, but for the groups that it finds.
struct DeviceMesh::State {
  std::shared_ptr<MeshRoot> root;
  std::vector<Axis> axes;
  Names names;
  std::vector<int64_t> shape;
  int64_t size;
  int64_t offset;  // the flat index of the first rank
  std::optional<std::vector<int64_t>> coordinate;
  size_t hash;
  // Each dim's once it was asked for, kept alive by the axis or the world.
  mutable std::vector<std::atomic<c10d::ProcessGroup*>> groups;

  /// The mesh along `axes` that holds the flat index `anchor`.
  State(std::shared_ptr<MeshRoot> root_, std::vector<Axis> axes_, Names names_, int64_t anchor);
  explicit State(std::shared_ptr<MeshRoot> root_)
      : State(root_, root_->axes, root_->names, root_->index.value_or(0)) {}

  /// A flat index in this mesh: that of this rank if there, else the first.
  int64_t anchor() const { return coordinate ? *root->index : offset; }
  /// This rank's flat index. Outside the mesh an error, which says what was `wanted` of it.
  int64_t member_index(const char* wanted) const;
  /// The ranks along some axes, from the flat index `start` on.
  std::vector<int64_t> ranks(std::span<const Axis> along, int64_t start) const;

  /// Which dim has this name, if any.
  std::optional<size_t> find(std::string_view name) const;
  size_t position(const MeshDim& dim) const;
  /// The axis of a dim of this mesh, or of one that was flattened from dims of this mesh.
  Axis axis(const MeshDim& dim) const;

  /// This rank's group along an axis, or along a dim of this mesh.
  Group group(const Axis& axis) const;
  Group group(size_t position) const;
  /// That along several axes, with their names.
  Group joint_group(std::span<const Axis> joined) const;
  /// `group`, if it is one of the ranks along `axis`; else an error.
  const Group& checked(const Axis& axis, const Group& group) const;

  /// For messages: of a dim, and of the mesh.
  std::string name(size_t position) const;
  std::string text() const;

  /// The root that `from_group` and `from_groups` make: this rank's groups as given, null outside the mesh.
  static std::shared_ptr<MeshRoot> with_groups(std::shared_ptr<MeshRoot> root,
                                               const std::vector<Group>& groups);

 private:
  /// For the end of a message: what `axis` knows beside the mesh's own dims. To be called under the lock.
  std::string flattened_text() const;
};

}  // namespace tessera
