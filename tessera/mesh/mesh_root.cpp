#include <tessera/error.h>
#include <tessera/mesh/mesh_root.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <string_view>
#include <utility>

#include <c10/util/safe_numerics.h>

namespace tessera {

std::string quote(const std::string& name) { return c10::str("'", name, "'"); }

std::string quote(const DeviceMesh::Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + quote(name);
  return text;
}

std::string quote(const MeshDim& dim) {
  const auto* name = std::get_if<std::string>(&dim.value());
  return name ? quote(*name) : std::to_string(std::get<int64_t>(dim.value()));
}

void check_mesh_dim_names(const DeviceMesh::Names& names) {
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

void check_mesh_sizes(at::IntArrayRef sizes) {
  TESSERA_CHECK_VALUE(!sizes.empty(), "A mesh needs at least one dim.");
  for (size_t i = 0; i < sizes.size(); ++i) {
    TESSERA_CHECK_VALUE(sizes[i] > 0, "Mesh dim ", i, " of shape ", sizes, " has size ", sizes[i],
                        ": expected at least 1.");
  }
}

int64_t mesh_size(at::IntArrayRef sizes) {
  uint64_t result = 0;
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  if (c10::safe_multiplies_u64(sizes, &result) || result > static_cast<uint64_t>(largest)) return largest;
  return static_cast<int64_t>(result);
}

std::shared_ptr<MeshRoot> make_mesh_root(at::DeviceType device, at::IntArrayRef shape,
                                         std::optional<std::vector<int64_t>> ranks, DeviceMesh::Names names,
                                         std::shared_ptr<World> world) {
  TESSERA_CHECK_VALUE(
      device != at::kXLA,
      "A mesh of xla devices is not supported: XLA partitions programs by itself (SPMD) and has "
      "no c10d process groups for the dims of a mesh.");
  check_mesh_sizes(shape);
  TESSERA_CHECK_VALUE(names.empty() || names.size() == shape.size(), "A mesh of shape ", shape, " has ",
                      shape.size(), " dims, but ", names.size(), " names are given: ", quote(names), ".");
  check_mesh_dim_names(names);

  auto root = std::make_shared<MeshRoot>();
  root->world = world ? std::move(world) : current_world();
  root->device = device;
  root->names = std::move(names);
  const int64_t world_size = root->world->size();
  const int64_t rank = root->world->rank();
  const int64_t size = mesh_size(shape);

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

}  // namespace tessera
