#include <tessera/error.h>
#include <tessera/mesh/mesh_state.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <utility>

#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {

DeviceMesh::State::State(std::shared_ptr<MeshRoot> root_, std::vector<Axis> axes_, Names names_,
                         int64_t anchor)
    : root(std::move(root_)),
      axes(std::move(axes_)),
      names(std::move(names_)),
      offset(first_index(axes, anchor)),
      groups(axes.size()) {
  for (const Axis& axis : axes) shape.push_back(axis.size());
  size = mesh_size(shape);
  if (root->index && first_index(axes, *root->index) == offset) {
    coordinate.emplace();
    for (const Axis& axis : axes) coordinate->push_back(axis.coordinate(*root->index));
  }
  hash = c10::get_hash(root->world.get(), static_cast<int>(root->device), shape);
  for (const std::string& name : names) hash = c10::hash_combine(hash, std::hash<std::string>()(name));
  // Eight ranks, spread evenly, distinguish nearly all meshes, and a mesh over very many ranks hashes as
  // fast.
  const Axis all = join(axes);
  for (int64_t i = 0; i < 8; ++i) {
    hash = c10::hash_combine(hash, root->rank(offset + all.offset(i * (size - 1) / 7)));
  }
}

int64_t DeviceMesh::State::member_index(const char* wanted) const {
  TESSERA_CHECK(coordinate, "Rank ", root->world->rank(), " is not in this ", text(), ", so it has no ",
                wanted, " there; ask is_member() first.");
  return *root->index;
}

std::vector<int64_t> DeviceMesh::State::ranks(std::span<const Axis> along, int64_t start) const {
  std::vector<int64_t> result = indices_along(along, start);
  if (!root->ranks.empty()) {
    for (int64_t& index : result) index = root->ranks[index];
  }
  return result;
}

std::optional<size_t> DeviceMesh::State::find(std::string_view name) const {
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) return std::nullopt;
  return found - names.begin();
}

size_t DeviceMesh::State::position(const MeshDim& dim) const {
  if (const auto* name = std::get_if<std::string>(&dim.value())) {
    const auto found = find(*name);
    TESSERA_CHECK_VALUE(found, "There is no dim ", quote(*name), " in ", text(), ".");
    return *found;
  }
  const int64_t ndim = static_cast<int64_t>(axes.size());
  const int64_t given = std::get<int64_t>(dim.value());
  TESSERA_CHECK_INDEX(given >= -ndim && given < ndim, "Mesh dim ", given, " is out of range for ", text(),
                      ": expected ", -ndim, " to ", ndim - 1, ".");
  return given < 0 ? given + ndim : given;
}

Axis DeviceMesh::State::axis(const MeshDim& dim) const {
  const auto* name = std::get_if<std::string>(&dim.value());
  if (!name || find(*name)) return axes[position(dim)];
  std::lock_guard lock(root->mutex);
  const auto found = root->flattened.find(*name);
  const bool known = found != root->flattened.end();
  TESSERA_CHECK_VALUE(known, "There is no dim ", quote(*name), " in ", text(), flattened_text(), ".");
  TESSERA_CHECK_VALUE(covers(axes, found->second), "The flattened dim ", quote(*name),
                      " is made of dims that are not in ", text(), "; look for it in root().");
  return found->second;
}

std::string DeviceMesh::State::flattened_text() const {
  Names known;
  for (const auto& [name, axis] : root->flattened) {
    if (covers(axes, axis)) known.push_back(name);
  }
  return known.empty() ? "" : " nor among its flattened dims: " + quote(known);
}

Group DeviceMesh::State::group(const Axis& axis) const {
  const int64_t index = member_index("group");
  if (axis.group) return axis.group;
  return root->world->group(ranks({&axis, 1}, first_index({&axis, 1}, index)), root->device);
}

Group DeviceMesh::State::group(size_t position) const {
  member_index("group");
  c10d::ProcessGroup* known = groups[position].load(std::memory_order_acquire);
  if (known) return Group::reclaim_copy(known);
  Group made = group(axes[position]);
  if (!axes[position].group) {
    if (!names.empty()) root->world->name_group(made, names[position]);
    // As torch.distributed describes the groups of its meshes. Until then the world and it describe them so.
    const std::string& known_as = made->getGroupDesc();
    if (known_as == "tessera" || known_as == "undefined")
      made->setGroupDesc("mesh_" + (names.empty() ? c10::str("dim_", position) : names[position]));
  }
  groups[position].store(made.get(), std::memory_order_release);
  return made;
}

Group DeviceMesh::State::joint_group(std::span<const Axis> joined) const {
  const Axis axis = join(joined);
  Group made = group(axis);
  if (axis.group || names.empty() || !root->world->name_of(made).empty()) return made;
  std::string name;
  for (const Axis& part : joined) {
    if (part.size() == 1) continue;
    const auto known =
        std::find_if(axes.begin(), axes.end(), [&](const Axis& each) { return each.digits == part.digits; });
    if (known == axes.end()) return made;  // one that was flattened under another name
    name.append(name.empty() ? "" : "_").append(names[known - axes.begin()]);
  }
  if (!name.empty()) root->world->name_group(made, name);
  return made;
}

const Group& DeviceMesh::State::checked(const Axis& axis, const Group& group) const {
  const auto expected = ranks({&axis, 1}, first_index({&axis, 1}, member_index("group")));
  const auto size = static_cast<int64_t>(expected.size());
  TESSERA_CHECK_VALUE(group->getSize() == size && expected[group->getRank()] == root->world->rank(),
                      "The group given for a dim of ", text(), " is not of its ranks ",
                      at::IntArrayRef(expected), ".");
  return group;
}

std::string DeviceMesh::State::name(size_t position) const {
  return names.empty() ? std::to_string(position) : quote(names[position]);
}

std::string DeviceMesh::State::text() const {
  std::ostringstream out;
  for (size_t i = 0; i < axes.size(); ++i) {
    out << (i == 0 ? "mesh(" : ", ");
    if (!names.empty()) out << names[i] << '=';
    out << shape[i];
  }
  out << ')';
  return out.str();
}

std::shared_ptr<MeshRoot> DeviceMesh::State::with_groups(std::shared_ptr<MeshRoot> root,
                                                         const std::vector<Group>& groups) {
  const State mesh(root);
  const int64_t rank = root->world->rank();
  if (!mesh.coordinate) {
    TESSERA_CHECK_VALUE(std::ranges::none_of(groups, [](const Group& group) { return group.defined(); }),
                        "Rank ", rank, " is not among the ranks of ", mesh.text(),
                        ", so it has no groups to give for its dims.");
    return root;
  }
  TESSERA_CHECK_VALUE(groups.size() == mesh.axes.size(), mesh.text(), " has ", mesh.axes.size(),
                      " dims, but ", groups.size(), " groups are given.");
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string dim = mesh.name(i);
    TESSERA_CHECK_VALUE(groups[i].defined(), "The group given for mesh dim ", dim, " is null.");
    const Axis& axis = mesh.axes[i];
    const auto expected = mesh.ranks({&axis, 1}, first_index({&axis, 1}, *root->index));
    const auto actual = root->world->ranks_of(groups[i]);
    TESSERA_CHECK_VALUE(!actual || *actual == expected, "The group given for mesh dim ", dim, " is of ranks ",
                        at::IntArrayRef(*actual), ", but along that dim ", mesh.text(), " has ranks ",
                        at::IntArrayRef(expected), ".");
    TESSERA_CHECK_VALUE(groups[i]->getSize() == mesh.shape[i], "The group given for mesh dim ", dim, " has ",
                        groups[i]->getSize(), " ranks, but ", mesh.text(), " has ", mesh.shape[i],
                        " along that dim.");
    TESSERA_CHECK_VALUE(groups[i]->getRank() == (*mesh.coordinate)[i], "Rank ", rank, " has rank ",
                        groups[i]->getRank(), " in the group given for mesh dim ", dim, ", but coordinate ",
                        (*mesh.coordinate)[i], " along that dim of ", mesh.text(),
                        ": the ranks of a mesh must be in the order of the group's.");
    root->axes[i].group = groups[i];
  }
  return root;
}

}  // namespace tessera
