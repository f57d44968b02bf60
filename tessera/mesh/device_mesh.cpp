#include <tessera/comm/agreement.h>
#include <tessera/error.h>
#include <tessera/mesh/axis.h>
#include <tessera/mesh/device_mesh.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <ostream>
#include <span>
#include <sstream>

#include <ATen/ops/empty.h>
#include <c10/util/hash.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using Names = DeviceMesh::Names;
using CurrentMesh = ThreadScope<std::optional<DeviceMesh>, MeshScope>;

/// The mesh that others are sliced from.
struct Root {
  std::shared_ptr<World> world;
  at::DeviceType device;
  Names names;
  std::vector<Axis> axes;
  std::vector<int64_t> ranks;    // by flat index; empty if each rank is at its own index
  std::optional<int64_t> index;  // of this rank

  std::mutex mutex;
  std::map<std::string, Axis> flattened;

  int64_t rank(int64_t index) const { return ranks.empty() ? index : ranks[index]; }

  bool same_ranks(const Root& other) const {
    return this == &other || (join(axes).size() == join(other.axes).size() && ranks == other.ranks);
  }
};

std::string quote(const std::string& name) { return c10::str("'", name, "'"); }

std::string quote(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + quote(name);
  return text;
}

std::string quote(const MeshDim& dim) {
  const auto* name = std::get_if<std::string>(&dim.value());
  return name ? quote(*name) : std::to_string(std::get<int64_t>(dim.value()));
}

void check_names(const Names& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    TESSERA_CHECK_VALUE(!name.empty(), "The name of mesh dim ", i, " is empty.");
    // So that the text of a spec can be read again.
    const bool readable = std::ranges::none_of(name, [](unsigned char c) {
      return std::isspace(c) || std::iscntrl(c) ||
             std::string_view("=,:()[]").find(c) != std::string_view::npos;
    });
    TESSERA_CHECK_VALUE(readable, "The mesh dim name ", quote(name),
                        " has a space, a control character or one of =,:()[], which a name must not have.");
    TESSERA_CHECK_VALUE(std::find(names.begin(), names.begin() + i, name) == names.begin() + i,
                        "The mesh dim name ", quote(name), " is repeated.");
  }
}

void check_sizes(at::IntArrayRef sizes) {
  TESSERA_CHECK_VALUE(!sizes.empty(), "A mesh needs at least one dim.");
  for (size_t i = 0; i < sizes.size(); ++i) {
    TESSERA_CHECK_VALUE(sizes[i] > 0, "Mesh dim ", i, " of shape ", sizes, " has size ", sizes[i],
                        ": expected at least 1.");
  }
}

/// The product, or the largest int64 if it is larger.
int64_t product(at::IntArrayRef sizes) {
  uint64_t result = 0;
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  if (c10::safe_multiplies_u64(sizes, &result) || result > static_cast<uint64_t>(largest)) return largest;
  return static_cast<int64_t>(result);
}

/// In a larger world, init_device_mesh makes no group to compare meshes by.
constexpr int64_t kComparedRanks = 1024;

std::shared_ptr<World> or_current(std::shared_ptr<World> world) { return world ? world : current_world(); }

/// `ranks` in row-major order of `shape`, or nothing for 0, 1, ...
std::shared_ptr<Root> make_root(at::DeviceType device, at::IntArrayRef shape,
                                std::optional<std::vector<int64_t>> ranks, Names names,
                                std::shared_ptr<World> world) {
  TESSERA_CHECK_VALUE(
      device != at::kXLA,
      "A mesh of xla devices is not supported: XLA partitions programs by itself (SPMD) and has "
      "no c10d process groups for the dims of a mesh.");
  check_sizes(shape);
  TESSERA_CHECK_VALUE(names.empty() || names.size() == shape.size(), "A mesh of shape ", shape, " has ",
                      shape.size(), " dims, but ", names.size(), " names are given: ", quote(names), ".");
  check_names(names);

  auto root = std::make_shared<Root>();
  root->world = or_current(std::move(world));
  root->device = device;
  root->names = std::move(names);
  const int64_t world_size = root->world->size();
  const int64_t rank = root->world->rank();
  const int64_t size = product(shape);

  if (ranks) {
    TESSERA_CHECK_VALUE(size == static_cast<int64_t>(ranks->size()), "A mesh of shape ", shape, " has ", size,
                        " ranks, but ", ranks->size(), " are given.");
    bool in_order = true;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t r = (*ranks)[i];
      TESSERA_CHECK_VALUE(r >= 0 && r < world_size, "Rank ", r,
                          " of the mesh is not in the world, whose ranks are 0 to ", world_size - 1, ".");
      in_order = in_order && r == i;
      if (r == rank) root->index = i;
    }
    // Not by a table of the world's ranks, which may be very many.
    std::vector<int64_t> sorted = *ranks;
    std::ranges::sort(sorted);
    const auto twice = std::ranges::adjacent_find(sorted);
    TESSERA_CHECK_VALUE(twice == sorted.end(), "Rank ", *twice, " is in the mesh more than once.");
    if (!in_order) root->ranks = *std::move(ranks);
  } else {
    TESSERA_CHECK_VALUE(size <= world_size, "A mesh of shape ", shape, " needs ", size,
                        " ranks, but the world has only ", world_size, ".");
    if (rank < size) root->index = rank;
  }

  root->axes.resize(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    root->axes[i].append({shape[i], stride});
    stride *= shape[i];
  }
  return root;
}

std::vector<int64_t> values(const at::Tensor& ranks) {
  TESSERA_CHECK_VALUE(ranks.defined(), "The ranks of a mesh are an undefined tensor.");
  TESSERA_CHECK_VALUE(at::isIntegralType(ranks.scalar_type(), /*includeBool=*/false),
                      "The ranks of a mesh must be integers, but the tensor's dtype is ", ranks.scalar_type(),
                      ".");
  const at::Tensor plain = ranks.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = plain.const_data_ptr<int64_t>();
  return {data, data + plain.numel()};
}

/// The shape of a tensor that `values` accepts.
at::IntArrayRef shape_of(const at::Tensor& ranks) {
  return ranks.defined() ? ranks.sizes() : at::IntArrayRef();
}

/// All coordinates that differ from `start` in `dims` only, row-major in the order of `dims`.
std::vector<c10::DimVector> coordinates_from(c10::DimVector start, at::IntArrayRef shape,
                                             at::IntArrayRef dims) {
  std::vector<c10::DimVector> result{std::move(start)};
  for (const int64_t dim : dims) {
    std::vector<c10::DimVector> next;
    next.reserve(result.size() * shape[dim]);
    for (c10::DimVector& coordinate : result) {
      for (coordinate[dim] = 0; coordinate[dim] < shape[dim]; ++coordinate[dim]) next.push_back(coordinate);
    }
    result = std::move(next);
  }
  return result;
}

}  // namespace

struct DeviceMesh::State {
  std::shared_ptr<Root> root;
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
  State(std::shared_ptr<Root> root_, std::vector<Axis> axes_, Names names_, int64_t anchor)
      : root(std::move(root_)),
        axes(std::move(axes_)),
        names(std::move(names_)),
        offset(first_index(axes, anchor)),
        groups(axes.size()) {
    for (const Axis& axis : axes) shape.push_back(axis.size());
    size = product(shape);
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

  explicit State(std::shared_ptr<Root> root_)
      : State(root_, root_->axes, root_->names, root_->index.value_or(0)) {}

  /// A flat index in this mesh: that of this rank if there, else the first.
  int64_t anchor() const { return coordinate ? *root->index : offset; }

  /// This rank's flat index.
  int64_t member_index(const char* wanted) const {
    TESSERA_CHECK(coordinate, "Rank ", root->world->rank(), " is not in this ", text(), ", so it has no ",
                  wanted, " there; ask is_member() first.");
    return *root->index;
  }

  std::vector<int64_t> ranks(std::span<const Axis> along, int64_t start) const {
    std::vector<int64_t> result = indices_along(along, start);
    if (!root->ranks.empty()) {
      for (int64_t& index : result) index = root->ranks[index];
    }
    return result;
  }

  std::optional<size_t> find(std::string_view name) const {
    const auto found = std::ranges::find(names, name);
    if (found == names.end()) return std::nullopt;
    return found - names.begin();
  }

  size_t position(const MeshDim& dim) const {
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

  /// The axis of a dim of this mesh, or of one that was flattened from dims of this mesh.
  Axis axis(const MeshDim& dim) const {
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

  /// For the end of a message: what `axis` knows beside the mesh's own dims. To be called under the lock.
  std::string flattened_text() const {
    Names known;
    for (const auto& [name, axis] : root->flattened) {
      if (covers(axes, axis)) known.push_back(name);
    }
    return known.empty() ? "" : " nor among its flattened dims: " + quote(known);
  }

  Group group(const Axis& axis) const {
    const int64_t index = member_index("group");
    if (axis.group) return axis.group;
    return root->world->group(ranks({&axis, 1}, first_index({&axis, 1}, index)), root->device);
  }

  Group group(size_t position) const {
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

  /// `group`, which is to be that of `axis`.
  const Group& checked(const Axis& axis, const Group& group) const {
    const auto expected = ranks({&axis, 1}, first_index({&axis, 1}, member_index("group")));
    const auto size = static_cast<int64_t>(expected.size());
    TESSERA_CHECK_VALUE(group->getSize() == size && expected[group->getRank()] == root->world->rank(),
                        "The group given for a dim of ", text(), " is not of its ranks ",
                        at::IntArrayRef(expected), ".");
    return group;
  }

  std::string name(size_t position) const {
    return names.empty() ? std::to_string(position) : quote(names[position]);
  }

  std::string text() const {
    std::ostringstream out;
    for (size_t i = 0; i < axes.size(); ++i) {
      out << (i == 0 ? "mesh(" : ", ");
      if (!names.empty()) out << names[i] << '=';
      out << shape[i];
    }
    out << ')';
    return out.str();
  }

  /// The root that `from_group` and `from_groups` make: this rank's groups as given, null outside the mesh.
  static std::shared_ptr<Root> with_groups(std::shared_ptr<Root> root, const std::vector<Group>& groups) {
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
      TESSERA_CHECK_VALUE(!actual || *actual == expected, "The group given for mesh dim ", dim,
                          " is of ranks ", at::IntArrayRef(*actual), ", but along that dim ", mesh.text(),
                          " has ranks ", at::IntArrayRef(expected), ".");
      TESSERA_CHECK_VALUE(groups[i]->getSize() == mesh.shape[i], "The group given for mesh dim ", dim,
                          " has ", groups[i]->getSize(), " ranks, but ", mesh.text(), " has ", mesh.shape[i],
                          " along that dim.");
      TESSERA_CHECK_VALUE(groups[i]->getRank() == (*mesh.coordinate)[i], "Rank ", rank, " has rank ",
                          groups[i]->getRank(), " in the group given for mesh dim ", dim, ", but coordinate ",
                          (*mesh.coordinate)[i], " along that dim of ", mesh.text(),
                          ": the ranks of a mesh must be in the order of the group's.");
      root->axes[i].group = groups[i];
    }
    return root;
  }
};

DeviceMesh::DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}

DeviceMesh::DeviceMesh(at::DeviceType device, at::IntArrayRef shape, std::vector<int64_t> ranks, Names names,
                       std::shared_ptr<World> world)
    : state_(std::make_shared<State>(
          make_root(device, shape, std::move(ranks), std::move(names), std::move(world)))) {}

DeviceMesh::DeviceMesh(at::DeviceType device, const at::Tensor& ranks, Names names,
                       std::shared_ptr<World> world)
    : DeviceMesh(device, shape_of(ranks), values(ranks), std::move(names), std::move(world)) {}

DeviceMesh DeviceMesh::from_group(const Group& group, at::DeviceType device, std::vector<int64_t> ranks,
                                  Names names, std::shared_ptr<World> world) {
  world = or_current(std::move(world));
  const auto known = group ? world->ranks_of(group) : std::nullopt;
  if (ranks.empty()) {
    TESSERA_CHECK_VALUE(group, "Neither a group nor its ranks are given.");
    TESSERA_CHECK_VALUE(known,
                        "This world did not make the group and does not know its ranks: pass them too.");
    ranks = *known;
  }
  TESSERA_CHECK_VALUE(!known || *known == ranks, "The group is of ranks ", at::IntArrayRef(*known),
                      ", but the ranks given are ", at::IntArrayRef(ranks), ".");
  const auto size = static_cast<int64_t>(ranks.size());
  auto root = make_root(device, size, std::move(ranks), std::move(names), std::move(world));
  return DeviceMesh(std::make_shared<State>(State::with_groups(std::move(root), {group})));
}

DeviceMesh DeviceMesh::from_groups(const std::vector<Group>& groups, at::DeviceType device,
                                   const at::Tensor& ranks, Names names, std::shared_ptr<World> world) {
  auto root = make_root(device, shape_of(ranks), values(ranks), std::move(names), std::move(world));
  return DeviceMesh(std::make_shared<State>(State::with_groups(std::move(root), groups)));
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  TESSERA_CHECK_VALUE(!meshes.empty(), "No meshes to concatenate.");
  const State& head = *meshes[0].state_;
  std::vector<Axis> axes;
  Names names;
  for (const DeviceMesh& mesh : meshes) {
    const State& state = *mesh.state_;
    TESSERA_CHECK_VALUE(head.root->world == state.root->world && head.root->device == state.root->device &&
                            head.root->same_ranks(*state.root),
                        "Cannot concatenate ", head.text(), " and ", state.text(),
                        ": they are not slices of the same root.");
    TESSERA_CHECK_VALUE(head.names.empty() == state.names.empty(), "Cannot concatenate ", head.text(),
                        " and ", state.text(), ": only one of them has names.");
    for (const Axis& axis : state.axes) {
      for (const DeviceMesh& earlier : meshes) {
        if (&earlier == &mesh) break;
        for (size_t i = 0; i < earlier.state_->axes.size(); ++i) {
          TESSERA_CHECK_VALUE(!overlap(earlier.state_->axes[i], axis), "Cannot concatenate ",
                              earlier.state_->text(), " and ", state.text(), ": dim ",
                              state.name(&axis - state.axes.data()), " of the latter overlaps dim ",
                              earlier.state_->name(i), ".");
        }
      }
    }
    axes.insert(axes.end(), state.axes.begin(), state.axes.end());
    names.insert(names.end(), state.names.begin(), state.names.end());
  }
  check_names(names);
  for (const DeviceMesh& mesh : meshes) {
    TESSERA_CHECK_VALUE(first_index(axes, mesh.state_->anchor()) == first_index(axes, head.anchor()),
                        "Cannot concatenate ", head.text(), " and ", mesh.state_->text(),
                        ": no slice of their root holds both.");
  }
  return DeviceMesh(std::make_shared<State>(head.root, std::move(axes), std::move(names), head.anchor()));
}

at::DeviceType DeviceMesh::device_type() const { return state_->root->device; }
int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(state_->axes.size()); }
int64_t DeviceMesh::size() const { return state_->size; }
int64_t DeviceMesh::size(const MeshDim& dim) const { return state_->axis(dim).size(); }
at::IntArrayRef DeviceMesh::shape() const& { return state_->shape; }
std::vector<int64_t> DeviceMesh::shape() const&& { return state_->shape; }
const DeviceMesh::Names& DeviceMesh::mesh_dim_names() const& { return state_->names; }
DeviceMesh::Names DeviceMesh::mesh_dim_names() const&& { return state_->names; }
int64_t DeviceMesh::dim_index(const MeshDim& dim) const {
  return static_cast<int64_t>(state_->position(dim));
}

at::Tensor DeviceMesh::mesh() const {
  at::Tensor result = at::empty(state_->shape, at::TensorOptions(at::kLong).device(at::kCPU));
  std::ranges::copy(ranks(), result.mutable_data_ptr<int64_t>());
  return result;
}

int64_t DeviceMesh::rank_at(at::IntArrayRef coordinate) const {
  TESSERA_CHECK_VALUE(coordinate.size() == state_->axes.size(), "The coordinate ", coordinate, " has ",
                      coordinate.size(), " dims, but ", state_->text(), " has ", state_->axes.size(),
                      " dims.");
  int64_t index = state_->offset;
  for (size_t i = 0; i < coordinate.size(); ++i) {
    TESSERA_CHECK_INDEX(coordinate[i] >= 0 && coordinate[i] < state_->shape[i], "The coordinate ", coordinate,
                        " is out of range along dim ", state_->name(i), " of ", state_->text(), ".");
    index += state_->axes[i].offset(coordinate[i]);
  }
  return state_->root->rank(index);
}

std::vector<int64_t> DeviceMesh::ranks() const { return state_->ranks(state_->axes, state_->offset); }

int64_t DeviceMesh::get_rank() const { return state_->root->world->rank(); }
bool DeviceMesh::is_member() const { return state_->coordinate.has_value(); }

std::optional<at::IntArrayRef> DeviceMesh::get_coordinate() const& {
  if (!state_->coordinate) return std::nullopt;
  return *state_->coordinate;
}
std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const&& { return state_->coordinate; }

int64_t DeviceMesh::get_local_rank(std::optional<MeshDim> dim) const {
  TESSERA_CHECK_VALUE(dim || ndim() == 1, state_->text(), " has ", ndim(),
                      " dims: say which one get_local_rank is about.");
  const Axis axis = state_->axis(dim.value_or(0));
  return axis.coordinate(state_->member_index("local rank"));
}

std::vector<c10::DimVector> DeviceMesh::coordinates() const {
  c10::DimVector dims(ndim());
  std::iota(dims.begin(), dims.end(), 0);
  return coordinates_from(c10::DimVector(ndim(), 0), state_->shape, dims);
}

std::vector<c10::DimVector> DeviceMesh::coordinates_along(at::IntArrayRef dims) const {
  state_->member_index("neighbours");
  c10::DimVector positions;
  for (const int64_t dim : dims) positions.push_back(dim_index(dim));
  return coordinates_from(c10::DimVector(*state_->coordinate), state_->shape, positions);
}

std::vector<int64_t> DeviceMesh::ranks_along(const MeshDim& dim) const {
  const Axis axis = state_->axis(dim);
  return state_->ranks({&axis, 1}, first_index({&axis, 1}, state_->member_index("neighbours")));
}

Group DeviceMesh::get_group(std::optional<MeshDim> dim) const {
  TESSERA_CHECK_VALUE(dim || ndim() == 1, state_->text(), " has ", ndim(),
                      " dims: say which one get_group is about, or call get_all_groups.");
  if (!dim) return state_->group(size_t{0});
  const auto* name = std::get_if<std::string>(&dim->value());
  if (name && !state_->find(*name)) return state_->group(state_->axis(*dim));
  return state_->group(state_->position(*dim));
}

Group DeviceMesh::get_group(const std::vector<MeshDim>& dims) const {
  TESSERA_CHECK_VALUE(!dims.empty(), "No dims of ", state_->text(), " are given to get_group.");
  if (dims.size() == 1) return get_group(std::optional(dims[0]));
  std::vector<Axis> axes;
  for (const MeshDim& dim : dims) {
    Axis axis = state_->axis(dim);
    for (size_t i = 0; i < axes.size(); ++i) {
      TESSERA_CHECK_VALUE(!overlap(axes[i], axis), "There is no group along ", quote(dims[i]), " and ",
                          quote(dim), " of ", state_->text(), ": they overlap.");
    }
    axes.push_back(std::move(axis));
  }
  return state_->group(join(axes));
}

Group DeviceMesh::get_joint_group() const {
  return ndim() == 1 ? state_->group(size_t{0}) : state_->group(join(state_->axes));
}

std::vector<Group> DeviceMesh::get_all_groups() const {
  std::vector<Group> groups;
  for (size_t i = 0; i < state_->axes.size(); ++i) groups.push_back(state_->group(i));
  return groups;
}

DeviceMesh DeviceMesh::operator[](std::string_view name) const { return (*this)[Names{std::string(name)}]; }

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> names) const {
  return (*this)[Names(names.begin(), names.end())];
}

DeviceMesh DeviceMesh::operator[](const Names& names) const {
  if (!names.empty() && names == state_->names) return *this;
  TESSERA_CHECK_VALUE(!names.empty(), "A slice of ", state_->text(), " needs the name of at least one dim.");
  std::vector<Axis> axes;
  for (const std::string& name : names) {
    Axis axis = state_->axis(name);
    for (size_t i = 0; i < axes.size(); ++i) {
      TESSERA_CHECK_VALUE(names[i] != name && !overlap(axes[i], axis), "Cannot slice ", state_->text(),
                          " by ", quote(names), ": ", quote(names[i]), " and ", quote(name), " overlap.");
    }
    axes.push_back(std::move(axis));
  }

  bool ascending = true;
  if (std::ranges::all_of(names, [&](const std::string& name) { return state_->find(name).has_value(); })) {
    ascending =
        std::ranges::is_sorted(names, {}, [&](const std::string& name) { return state_->find(name); });
  } else {
    ascending = std::ranges::is_sorted(join(axes).digits, std::greater{}, &Digit::stride);
  }
  TESSERA_CHECK_VALUE(ascending, "Cannot slice ", state_->text(), " by ", quote(names),
                      ": the names must be in the order of the mesh's dims; for another order use "
                      "DeviceMesh::concatenate on one slice per name.");
  return DeviceMesh(std::make_shared<State>(state_->root, std::move(axes), names, state_->anchor()));
}

std::vector<DeviceMesh> DeviceMesh::submeshes(const MeshDim& dim) const {
  const size_t position = state_->position(dim);
  const std::vector<Axis> along{state_->axes[position]};
  std::vector<Axis> others = state_->axes;
  others.erase(others.begin() + position);
  const Names names = state_->names.empty() ? Names{} : Names{state_->names[position]};
  std::vector<DeviceMesh> result;
  for (int64_t start : indices_along(others, state_->offset)) {
    result.push_back(DeviceMesh(std::make_shared<State>(state_->root, along, names, start)));
  }
  return result;
}

DeviceMesh DeviceMesh::flatten(std::string name, const Group& group) const {
  const Names& own = state_->names;
  if (name.empty()) {
    TESSERA_CHECK_VALUE(!own.empty(), "The dims of ", state_->text(),
                        " have no names to join: give flatten a name for the result.");
    for (const std::string& part : own) name += (name.empty() ? "" : "_") + part;
  }
  check_names({name});
  if (own == Names{name} && !group) return *this;

  Root& root = *state_->root;
  TESSERA_CHECK_VALUE(std::ranges::find(root.names, name) == root.names.end() && !state_->find(name),
                      "Cannot name the flattened ", state_->text(), " ", quote(name), ": ", name,
                      " already exists for submesh of the DeviceMesh ",
                      state_->find(name) ? state_->text() : State(state_->root).text(),
                      "; choose another name.");
  Axis axis = join(state_->axes);
  {
    std::lock_guard lock(root.mutex);
    const auto [known, added] = root.flattened.try_emplace(name, axis);
    TESSERA_CHECK_VALUE(known->second.digits == axis.digits, "Cannot name the flattened ", state_->text(),
                        " ", quote(name), ". Flatten mesh with mesh_dim_name ", name,
                        " has been created before, of other dims; choose another name.");
    if (group) known->second.group = state_->checked(axis, group);
    axis = known->second;
  }
  return DeviceMesh(std::make_shared<State>(state_->root, std::vector<Axis>{std::move(axis)},
                                            Names{std::move(name)}, state_->anchor()));
}

std::map<std::string, DeviceMesh> DeviceMesh::flattened() const {
  std::map<std::string, DeviceMesh> result;
  std::lock_guard lock(state_->root->mutex);
  for (const auto& [name, axis] : state_->root->flattened) {
    if (!covers(state_->axes, axis)) continue;
    result.emplace(name, DeviceMesh(std::make_shared<State>(state_->root, std::vector<Axis>{axis},
                                                            Names{name}, state_->anchor())));
  }
  return result;
}

DeviceMesh DeviceMesh::unflatten(const MeshDim& dim, at::IntArrayRef sizes, Names names,
                                 const std::vector<Group>& groups) const {
  const size_t position = state_->position(dim);
  const std::string what = c10::str("Cannot unflatten dim ", state_->name(position), " of ", state_->text());
  check_sizes(sizes);
  TESSERA_CHECK_VALUE(product(sizes) == state_->shape[position], what, " into ", sizes, ": the product is ",
                      product(sizes), ", expected ", state_->shape[position], ".");
  TESSERA_CHECK_VALUE(names.size() == sizes.size() || (names.empty() && state_->names.empty()), what,
                      " into ", sizes, ": expected ", sizes.size(), " names, but got ", names.size(), ": ",
                      quote(names), ".");
  TESSERA_CHECK_VALUE(!state_->names.empty() || names.empty() || ndim() == 1, what, " into dims named ",
                      quote(names), ": the other dims have no names.");
  TESSERA_CHECK_VALUE(groups.empty() || groups.size() == sizes.size(), what, " into ", sizes, ": expected ",
                      sizes.size(), " groups or none, but got ", groups.size(), ".");
  auto parts = split(state_->axes[position], sizes);
  TESSERA_CHECK_VALUE(
      parts, what, " into ", sizes,
      ": it was flattened from dims that do not lie next to each other in the root, and these "
      "sizes do not follow their boundaries.");
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i]) (*parts)[i].group = state_->checked((*parts)[i], groups[i]);
  }

  std::vector<Axis> axes = state_->axes;
  axes.erase(axes.begin() + position);
  axes.insert(axes.begin() + position, parts->begin(), parts->end());
  Names all = state_->names;
  if (!all.empty()) all.erase(all.begin() + position);
  all.insert(all.begin() + (all.empty() ? 0 : position), names.begin(), names.end());
  check_names(all);
  return DeviceMesh(std::make_shared<State>(state_->root, std::move(axes), std::move(all), state_->anchor()));
}

DeviceMesh DeviceMesh::root() const { return DeviceMesh(std::make_shared<State>(state_->root)); }

const std::shared_ptr<World>& DeviceMesh::world() const& { return state_->root->world; }
std::shared_ptr<World> DeviceMesh::world() const&& { return state_->root->world; }

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  const DeviceMesh::State& x = *a.state_;
  const DeviceMesh::State& y = *b.state_;
  if (&x == &y) return true;
  if (x.hash != y.hash || x.root->world != y.root->world || x.root->device != y.root->device ||
      x.shape != y.shape || x.names != y.names) {
    return false;
  }
  if (x.root == y.root || (x.root->ranks.empty() && y.root->ranks.empty())) {
    return x.offset == y.offset && std::ranges::equal(x.axes, y.axes, {}, &Axis::digits, &Axis::digits);
  }
  return a.ranks() == b.ranks();
}

size_t DeviceMesh::hash() const { return state_->hash; }

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) { return out << mesh.str(); }
std::string DeviceMesh::str() const { return state_->text(); }

DeviceMesh init_device_mesh(at::DeviceType device, at::IntArrayRef shape, DeviceMesh::Names names,
                            std::shared_ptr<World> world) {
  world = or_current(std::move(world));
  // Ranks compare by tensors on the CPU where these can be carried, unless a group of all of them costs too much.
  const auto by = world->backend(at::kCPU) == "nccl" ? device : at::kCPU;
  const bool compares = world->size() > 1 && world->size() <= kComparedRanks && world->backend(by) != "fake";
  std::shared_ptr<Root> root;
  comm::agree("init_device_mesh", compares ? world->group(by) : Group(), [&] {
    root = make_root(device, shape, std::nullopt, names, world);
    return c10::str(c10::DeviceTypeName(device, /*lower_case=*/true), ", ", shape,
                    names.empty() ? "" : ", " + quote(names));
  });
  return DeviceMesh(std::make_shared<DeviceMesh::State>(std::move(root)));
}

DeviceMesh current_mesh() {
  TESSERA_CHECK(has_current_mesh(),
                "No mesh is given and this thread has no current one: pass a mesh, or keep a "
                "tessera::MeshScope scope(mesh) alive around the call.");
  return *CurrentMesh::current();
}

bool has_current_mesh() { return CurrentMesh::current().has_value(); }

MeshScope::MeshScope(DeviceMesh mesh) : scope_(std::move(mesh)) {}
MeshScope::~MeshScope() = default;

}  // namespace tessera
