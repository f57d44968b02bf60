#include <tessera/comm/agreement.h>
#include <tessera/error.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/mesh_state.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using Names = DeviceMesh::Names;
using CurrentMesh = ThreadScope<std::optional<DeviceMesh>, MeshScope>;

/// In a larger world, init_device_mesh makes no group to compare meshes by.
constexpr int64_t kComparedRanks = 1024;

std::shared_ptr<World> or_current(std::shared_ptr<World> world) { return world ? world : current_world(); }

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

DeviceMesh::DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}

DeviceMesh::DeviceMesh(at::DeviceType device, at::IntArrayRef shape, std::vector<int64_t> ranks, Names names,
                       std::shared_ptr<World> world)
    : state_(std::make_shared<State>(
          make_mesh_root(device, shape, std::move(ranks), std::move(names), std::move(world)))) {}

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
  auto root = make_mesh_root(device, size, std::move(ranks), std::move(names), std::move(world));
  return DeviceMesh(std::make_shared<State>(State::with_groups(std::move(root), {group})));
}

DeviceMesh DeviceMesh::from_groups(const std::vector<Group>& groups, at::DeviceType device,
                                   const at::Tensor& ranks, Names names, std::shared_ptr<World> world) {
  auto root = make_mesh_root(device, shape_of(ranks), values(ranks), std::move(names), std::move(world));
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
  check_mesh_dim_names(names);
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
  return state_->joint_group(axes);
}

Group DeviceMesh::get_joint_group() const {
  return ndim() == 1 ? state_->group(size_t{0}) : state_->joint_group(state_->axes);
}

Group DeviceMesh::joint_group_or_null() const { return is_member() ? get_joint_group() : Group(); }

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
  TESSERA_CHECK_VALUE(
      ascending, "Cannot slice ", state_->text(), " by ", quote(names),
      ": the names must be in the order of the mesh's dims. Mesh dim indices should be in "
      "ascending order; for another order use DeviceMesh::concatenate on one slice per name.");
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
  check_mesh_dim_names({name});
  if (own == Names{name} && !group) return *this;

  MeshRoot& root = *state_->root;
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
  check_mesh_sizes(sizes);
  TESSERA_CHECK_VALUE(mesh_size(sizes) == state_->shape[position], what, " into ", sizes, ": the product is ",
                      mesh_size(sizes), ", expected ", state_->shape[position], ".");
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
  check_mesh_dim_names(all);
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
  std::shared_ptr<MeshRoot> root;
  comm::agree("init_device_mesh", compares ? world->group(by) : Group(), [&] {
    root = make_mesh_root(device, shape, std::nullopt, names, world);
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
