#include <tessera/mesh/device_mesh.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>
#include <thread>
#include <unordered_set>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using Ints = std::vector<int64_t>;
using Names = DeviceMesh::Names;
using ::testing::HasSubstr;

std::shared_ptr<World> fake_world(int64_t rank, int64_t size) {
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.backend = "fake";
  return std::make_shared<World>(options);
}

template <typename Error = c10::ValueError, typename Fn>
std::string message_of(Fn&& fn) {
  return testing::error_of<Error>(fn);
}

/// The oracle: a plain row-major array of ranks.
struct Array {
  Ints shape;
  Ints ranks;

  static std::vector<Ints> coordinates(const Ints& shape) {
    std::vector<Ints> all{{}};
    for (int64_t size : shape) {
      std::vector<Ints> next;
      for (const Ints& prefix : all) {
        for (int64_t i = 0; i < size; ++i) {
          next.push_back(prefix);
          next.back().push_back(i);
        }
      }
      all = next;
    }
    return all;
  }

  int64_t at(const Ints& coordinate) const {
    const auto all = coordinates(shape);
    return ranks[std::find(all.begin(), all.end(), coordinate) - all.begin()];
  }

  std::optional<Ints> coordinate_of(int64_t rank) const {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) return std::nullopt;
    return coordinates(shape)[found - ranks.begin()];
  }

  /// The array over `dims`, in this order, through the coordinate `fixed`.
  Array along(const Ints& dims, Ints fixed) const {
    Array result;
    for (int64_t dim : dims) result.shape.push_back(shape[dim]);
    for (const Ints& coordinate : coordinates(result.shape)) {
      for (size_t i = 0; i < dims.size(); ++i) fixed[dims[i]] = coordinate[i];
      result.ranks.push_back(at(fixed));
    }
    return result;
  }

  /// The same through `rank`, or through the first rank if it is not there.
  Array along(const Ints& dims, int64_t rank) const {
    return along(dims, coordinate_of(rank).value_or(Ints(shape.size(), 0)));
  }

  Array reshape(Ints to) const { return {std::move(to), ranks}; }
};

void expect_is(const DeviceMesh& mesh, const Array& array, const Names& names) {
  EXPECT_EQ(mesh.shape(), array.shape);
  EXPECT_EQ(mesh.ndim(), static_cast<int64_t>(array.shape.size()));
  EXPECT_EQ(mesh.size(), static_cast<int64_t>(array.ranks.size()));
  EXPECT_EQ(mesh.ranks(), array.ranks);
  EXPECT_EQ(mesh.mesh_dim_names(), names);
  const auto coordinate = array.coordinate_of(mesh.get_rank());
  EXPECT_EQ(mesh.is_member(), coordinate.has_value());
  ASSERT_EQ(mesh.get_coordinate().has_value(), coordinate.has_value());
  if (coordinate) {
    EXPECT_EQ(*mesh.get_coordinate(), *coordinate);
  }
  for (const Ints& c : Array::coordinates(array.shape)) EXPECT_EQ(mesh.rank_at(c), array.at(c));
}

/// Non-empty subsets of 0 .. count - 1 in ascending order.
std::vector<Ints> subsets(int64_t count) {
  std::vector<Ints> result;
  for (int64_t bits = 1; bits < (1 << count); ++bits) {
    result.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      if (bits >> i & 1) result.back().push_back(i);
    }
  }
  return result;
}

Names pick(const Names& names, const Ints& dims) {
  Names result;
  for (int64_t dim : dims) result.push_back(names[dim]);
  return result;
}

std::string joined(const Names& names) {
  std::string result;
  for (const std::string& name : names) result += (result.empty() ? "" : "_") + name;
  return result;
}

struct Case {
  int64_t world_size;
  Array array;
  Names names;

  DeviceMesh mesh(int64_t rank) const {
    return DeviceMesh(at::kCPU, array.shape, array.ranks, names, fake_world(rank, world_size));
  }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "ranks " << at::IntArrayRef(c.array.ranks) << " as " << at::IntArrayRef(c.array.shape)
             << " of a world of " << c.world_size;
}

/// Shapes x {all ranks in order, in order with ranks outside, permuted, permuted with ranks outside}.
std::vector<Case> cases() {
  std::vector<Case> result;
  for (const Ints& shape :
       std::vector<Ints>{{1}, {4}, {2, 3}, {1, 4}, {2, 2, 2}, {3, 1, 2}, {2, 3, 4}, {2, 2, 1, 3}}) {
    const int64_t size = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
    const Names names = pick({"a", "b", "c", "d"}, subsets(shape.size()).back());
    Ints ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    result.push_back({size, {shape, ranks}, names});
    result.push_back({size + 2, {shape, ranks}, names});
    if (size == 1) continue;
    Ints permuted = ranks;
    std::reverse(permuted.begin(), permuted.end());
    std::swap(permuted[0], permuted[size / 2]);
    result.push_back({size, {shape, permuted}, names});
    Ints spread = permuted;
    for (int64_t& rank : spread) rank = 2 * rank + 1;
    result.push_back({2 * size + 1, {shape, spread}, names});
  }
  return result;
}

/// Calls `fn(mesh, rank)` on every rank of the case's world.
template <typename Fn>
void on_all_ranks(const Case& c, Fn&& fn) {
  for (int64_t rank = 0; rank < c.world_size; ++rank) {
    SCOPED_TRACE(::testing::Message() << "rank " << rank);
    fn(c.mesh(rank), rank);
  }
}

class MeshCases : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, MeshCases, ::testing::ValuesIn(cases()));

TEST_P(MeshCases, IsItsArrayOnEveryRank) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    expect_is(mesh, c.array, c.names);
    EXPECT_EQ(mesh.get_rank(), rank);
    EXPECT_EQ(mesh.device_type(), at::kCPU);
    EXPECT_EQ(mesh.root(), mesh);
    EXPECT_EQ(mesh.mesh().sizes(), c.array.shape);
    EXPECT_EQ(mesh.mesh().scalar_type(), at::kLong);
    EXPECT_TRUE(at::equal(mesh.mesh(), at::tensor(c.array.ranks).reshape(c.array.shape)));
    EXPECT_EQ(DeviceMesh(at::kCPU, mesh.mesh(), c.names, mesh.world()), mesh);
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      for (const MeshDim& same : {MeshDim(dim), MeshDim(dim - mesh.ndim()), MeshDim(c.names[dim])}) {
        EXPECT_EQ(mesh.dim_index(same), dim);
        EXPECT_EQ(mesh.size(same), c.array.shape[dim]);
      }
    }
  });
}

TEST_P(MeshCases, RankAtIsTheInverseOfTheCoordinate) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    if (mesh.is_member()) {
      EXPECT_EQ(mesh.rank_at(*mesh.get_coordinate()), rank);
    }
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      if (mesh.is_member()) {
        EXPECT_EQ(mesh.get_local_rank(dim), (*mesh.get_coordinate())[dim]);
        EXPECT_EQ(mesh.get_local_rank(c.names[dim]), (*mesh.get_coordinate())[dim]);
      } else {
        EXPECT_THROW(mesh.get_local_rank(dim), c10::Error);
      }
    }
  });
}

TEST_P(MeshCases, GroupsAreOfTheRanksAlongTheirDims) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    if (!mesh.is_member()) return;
    std::vector<Group> groups;
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      const Ints expected = c.array.along({dim}, rank).ranks;
      EXPECT_EQ(mesh.ranks_along(dim), expected);
      EXPECT_EQ(mesh.ranks_along(c.names[dim]), expected);
      groups.push_back(mesh.get_group(dim));
      EXPECT_EQ(mesh.world()->ranks_of(groups.back()), expected);
      EXPECT_EQ(groups.back()->getSize(), mesh.size(dim));
      EXPECT_EQ(groups.back()->getRank(), mesh.get_local_rank(dim));
      EXPECT_EQ(mesh.get_group(dim), groups.back());
      EXPECT_EQ(mesh.get_group(c.names[dim]), groups.back());
      EXPECT_EQ(mesh[c.names[dim]].get_group(), groups.back());
      EXPECT_EQ(mesh.world()->group(expected, at::kCPU), groups.back());
    }
    EXPECT_EQ(mesh.get_all_groups(), groups);
  });
}

TEST_P(MeshCases, GroupsOfSeveralDimsAreRowMajorInTheOrderGiven) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    if (!mesh.is_member()) return;
    for (Ints dims : subsets(mesh.ndim())) {
      do {
        std::vector<MeshDim> by_position(dims.begin(), dims.end());
        std::vector<MeshDim> by_name;
        for (int64_t dim : dims) by_name.push_back(c.names[dim]);
        const Group group = mesh.get_group(by_position);
        EXPECT_EQ(mesh.world()->ranks_of(group), c.array.along(dims, rank).ranks);
        EXPECT_EQ(mesh.get_group(by_name), group);
      } while (std::next_permutation(dims.begin(), dims.end()));
    }
  });
}

TEST_P(MeshCases, SlicesAreTheSubarraysThroughThisRank) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    for (const Ints& dims : subsets(mesh.ndim())) {
      const Names names = pick(c.names, dims);
      const DeviceMesh slice = mesh[names];
      const Array expected = c.array.along(dims, rank);
      expect_is(slice, expected, names);
      EXPECT_EQ(slice.is_member(), mesh.is_member());
      EXPECT_EQ(slice.root(), mesh);
      for (const Ints& inner : subsets(dims.size())) {
        expect_is(slice[pick(names, inner)], expected.along(inner, rank), pick(names, inner));
      }
    }
  });
}

TEST_P(MeshCases, SubmeshesAreAllSlicesAlongADim) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t) {
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      const auto slices = mesh.submeshes(c.names[dim]);
      size_t i = 0;
      for (const Ints& coordinate : Array::coordinates(c.array.shape)) {
        if (coordinate[dim] != 0) continue;
        ASSERT_LT(i, slices.size());
        expect_is(slices[i], c.array.along({dim}, coordinate), {c.names[dim]});
        if (slices[i].is_member()) {
          EXPECT_EQ(slices[i], mesh[c.names[dim]]);
        }
        EXPECT_EQ(slices[i].root(), mesh);
        ++i;
      }
      EXPECT_EQ(i, slices.size());
      EXPECT_EQ(std::ranges::count_if(slices, &DeviceMesh::is_member), mesh.is_member() ? 1 : 0);
    }
  });
}

TEST_P(MeshCases, FlattenMakesOneDimOfAnyAndTheRootKnowsIt) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    for (const Ints& dims : subsets(mesh.ndim())) {
      const Names names = pick(c.names, dims);
      const std::string name = joined(names);
      const Array expected = c.array.along(dims, rank);
      const DeviceMesh flat = mesh[names].flatten();
      expect_is(flat, expected.reshape({mesh[names].size()}), {name});
      EXPECT_EQ(flat.root(), mesh);
      EXPECT_EQ(mesh[name], flat);
      EXPECT_EQ(mesh[names][name], flat);
      EXPECT_EQ(mesh[names].flatten(name), flat);
      EXPECT_EQ(flat.flatten(), flat);
      EXPECT_EQ(mesh.size(name), flat.size());
      EXPECT_EQ(flat.unflatten(0, mesh[names].shape(), names), mesh[names]);
      if (!mesh.is_member()) continue;
      EXPECT_EQ(mesh.ranks_along(name), expected.ranks);
      EXPECT_EQ(mesh.get_local_rank(name), flat.get_local_rank());
      EXPECT_EQ(mesh.world()->ranks_of(flat.get_group()), expected.ranks);
      EXPECT_EQ(mesh.get_group(name), flat.get_group());
    }
  });
}

TEST_P(MeshCases, ConcatenateJoinsSlicesInAnyOrder) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t rank) {
    for (Ints dims : subsets(mesh.ndim())) {
      do {
        std::vector<DeviceMesh> slices;
        for (int64_t dim : dims) slices.push_back(mesh[c.names[dim]]);
        const DeviceMesh joint = DeviceMesh::concatenate(slices);
        expect_is(joint, c.array.along(dims, rank), pick(c.names, dims));
        EXPECT_EQ(joint.root(), mesh);
        EXPECT_EQ(joint.flatten("flat" + joined(joint.mesh_dim_names())).ranks(), joint.ranks());
        if (std::ranges::is_sorted(dims)) {
          EXPECT_EQ(joint, mesh[pick(c.names, dims)]);
        }
        if (!mesh.is_member()) continue;
        for (int64_t dim : dims) EXPECT_EQ(joint.get_group(c.names[dim]), mesh.get_group(dim));
      } while (std::next_permutation(dims.begin(), dims.end()));
    }
  });
}

TEST_P(MeshCases, EqualMeshesHashEqualAndSlicesOnlyEqualTheirOwn) {
  const Case& c = GetParam();
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t) {
    const DeviceMesh same(at::kCPU, c.array.shape, c.array.ranks, c.names, mesh.world());
    EXPECT_EQ(mesh, same);
    EXPECT_EQ(mesh.hash(), same.hash());
    EXPECT_EQ(std::hash<DeviceMesh>()(mesh), mesh.hash());
    std::vector<DeviceMesh> slices;
    for (const Ints& dims : subsets(mesh.ndim())) {
      slices.push_back(mesh[pick(c.names, dims)]);
      EXPECT_EQ(slices.back(), same[pick(c.names, dims)]);
      EXPECT_EQ(slices.back().hash(), same[pick(c.names, dims)].hash());
    }
    for (size_t i = 0; i < slices.size(); ++i) {
      for (size_t j = 0; j < slices.size(); ++j) EXPECT_EQ(slices[i] == slices[j], i == j);
    }
  });
}

TEST_P(MeshCases, UnflattenIsAReshape) {
  const Case& c = GetParam();
  const auto size = static_cast<int64_t>(c.array.ranks.size());
  on_all_ranks(c, [&](const DeviceMesh& mesh, int64_t) {
    const DeviceMesh flat = mesh.flatten("flat");
    for (int64_t x = 1; x <= size; ++x) {
      for (int64_t y = 1; x * y <= size; ++y) {
        if (size % (x * y) != 0) continue;
        const Ints shape{x, y, size / (x * y)};
        const DeviceMesh cube = flat.unflatten("flat", shape, {"x", "y", "z"});
        expect_is(cube, c.array.reshape(shape), {"x", "y", "z"});
        EXPECT_EQ(cube.root(), mesh);
        expect_is(cube[{"x", "z"}], c.array.reshape(shape).along({0, 2}, mesh.get_rank()), {"x", "z"});
      }
    }
  });
}

TEST(DeviceMesh, UnflattensADimBetweenOthers) {
  for (int64_t rank = 0; rank < 24; ++rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 6, 2}, {"a", "b", "c"}, fake_world(rank, 24));
    Ints ranks(24);
    std::iota(ranks.begin(), ranks.end(), 0);
    const DeviceMesh unflattened = mesh.unflatten("b", {3, 2}, {"x", "y"});
    const Array expected{{2, 3, 2, 2}, ranks};
    expect_is(unflattened, expected, {"a", "x", "y", "c"});
    expect_is(unflattened[{"a", "y"}], expected.along({0, 2}, rank), {"a", "y"});
    expect_is(mesh.unflatten(-1, {2, 1}, {"x", "y"}), {{2, 6, 2, 1}, ranks}, {"a", "b", "x", "y"});
    EXPECT_EQ(mesh.unflatten(1, {6}, {"b"}), mesh);
  }
}

TEST(DeviceMesh, UnflattensDimsThatAreNotNeighboursWhereTheyDivide) {
  for (int64_t rank = 0; rank < 24; ++rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3, 4}, {"a", "b", "c"}, fake_world(rank, 24));
    const DeviceMesh flat = mesh[{"a", "c"}].flatten();
    const Array array{{8}, flat.ranks()};
    for (const Ints& shape : std::vector<Ints>{{2, 4}, {4, 2}, {2, 2, 2}, {1, 8}, {8, 1}}) {
      const Names names = pick({"x", "y", "z"}, subsets(shape.size()).back());
      expect_is(flat.unflatten(0, shape, names), array.reshape(shape), names);
    }
    const DeviceMesh across = mesh[{"b", "c"}].flatten();
    expect_is(across.unflatten(0, {4, 3}, {"x", "y"}), Array{{12}, across.ranks()}.reshape({4, 3}),
              {"x", "y"});
    const DeviceMesh apart = DeviceMesh::concatenate({mesh["c"], mesh["b"]}).flatten("c_b");
    EXPECT_EQ(apart.unflatten(0, {4, 3}, {"c", "b"}), DeviceMesh::concatenate({mesh["c"], mesh["b"]}));
    EXPECT_THAT(
        message_of([&] {
          apart.unflatten(0, {3, 4}, {"x", "y"});
        }),
        HasSubstr("Cannot unflatten dim 'c_b' of mesh(c_b=12) into [3, 4]: it was flattened from dims"));
  }
}

TEST(DeviceMesh, DimsWithoutNamesAreKnownByPosition) {
  for (int64_t rank = 0; rank < 8; ++rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {}, fake_world(rank, 8));
    EXPECT_TRUE(mesh.mesh_dim_names().empty());
    expect_is(mesh.unflatten(0, {2, 1}, {}), {{2, 1, 3}, {0, 1, 2, 3, 4, 5}}, {});
    expect_is(mesh.submeshes(0)[1], {{2}, {1, 4}}, {});
    expect_is(mesh.flatten("all"), {{6}, {0, 1, 2, 3, 4, 5}}, {"all"});
    EXPECT_EQ(mesh["all"], mesh.flatten("all"));
    expect_is(DeviceMesh::concatenate({mesh.submeshes(1)[1], mesh.submeshes(0)[2]}),
              {{3, 2}, {0, 3, 1, 4, 2, 5}}, {});
    expect_is(init_device_mesh(at::kCPU, {6}, {}, mesh.world()).unflatten(0, {3, 2}, {"x", "y"}),
              {{3, 2}, {0, 1, 2, 3, 4, 5}}, {"x", "y"});
  }
}

TEST(DeviceMesh, ConcatenatesSlicesThatThisRankIsNotIn) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"a", "b", "c"}, fake_world(0, 8));
  const DeviceMesh b = mesh.submeshes("b")[3];
  const DeviceMesh c = mesh.submeshes("c")[3];
  EXPECT_EQ(b.ranks(), (Ints{5, 7}));
  EXPECT_EQ(c.ranks(), (Ints{6, 7}));
  const DeviceMesh joint = DeviceMesh::concatenate({c, b});
  expect_is(joint, {{2, 2}, {4, 6, 5, 7}}, {"c", "b"});
  EXPECT_FALSE(joint.is_member());
  EXPECT_EQ(joint["b"].ranks(), (Ints{4, 6}));
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh["b"], c});
              }),
              HasSubstr("Cannot concatenate mesh(b=2) and mesh(c=2): no slice of their root holds both"));
}

TEST(DeviceMesh, AFlattenedDimIsKnownWhereverItsDimsAre) {
  const DeviceMesh world = init_device_mesh(at::kCPU, {16}, {"world"}, fake_world(5, 16));
  const DeviceMesh mesh = world.unflatten(0, {2, 2, 2, 2}, {"pp", "dp", "cp", "tp"});
  const DeviceMesh dp_tp = mesh[{"dp", "tp"}].flatten("dp_tp");
  EXPECT_EQ(dp_tp.ranks(), (Ints{0, 1, 4, 5}));
  EXPECT_EQ(dp_tp.root(), world);
  EXPECT_EQ(world["dp_tp"], dp_tp);
  EXPECT_EQ(mesh["dp_tp"], dp_tp);
  EXPECT_EQ((mesh[{"dp", "cp", "tp"}]["dp_tp"]), dp_tp);
  EXPECT_EQ((mesh[{"pp", "dp_tp"}].ranks()), (Ints{0, 1, 4, 5, 8, 9, 12, 13}));
  const DeviceMesh cp_tp = mesh[{"cp", "tp"}].flatten();
  EXPECT_EQ(DeviceMesh::concatenate({mesh["tp"], mesh["cp"]})["cp_tp"], cp_tp);
  EXPECT_THAT(message_of([&] {
                (mesh[{"dp", "cp"}]["dp_tp"]);
              }),
              HasSubstr("The flattened dim 'dp_tp' is made of dims that are not in mesh(dp=2, cp=2)"));
  EXPECT_THAT(message_of([&] { mesh["dp_cp"]; }),
              HasSubstr("There is no dim 'dp_cp' in mesh(pp=2, dp=2, cp=2, tp=2) nor among its flattened "
                        "dims: 'cp_tp', 'dp_tp'."));
  EXPECT_THAT(message_of([&] { mesh.dim_index("dp_tp"); }), HasSubstr("There is no dim 'dp_tp'"));
  const DeviceMesh other = init_device_mesh(at::kCPU, {16}, {"world"}, world.world());
  EXPECT_THAT(message_of([&] { other["dp_tp"]; }), HasSubstr("There is no dim 'dp_tp' in mesh(world=16)"));
}

TEST(DeviceMesh, FlattenRefusesNamesThatAreTaken) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"}, fake_world(0, 8));
  EXPECT_THAT(
      message_of([&] {
        mesh[{"dp", "cp"}].flatten("tp");
      }),
      HasSubstr("Cannot name the flattened mesh(dp=2, cp=2) 'tp': tp already exists for submesh of the "
                "DeviceMesh mesh(dp=2, cp=2, tp=2)"));
  EXPECT_THAT(message_of([&] { mesh["dp"].flatten("cp"); }), HasSubstr("'cp'"));
  mesh[{"dp", "cp"}].flatten("outer");
  EXPECT_THAT(message_of([&] {
                mesh[{"cp", "tp"}].flatten("outer");
              }),
              HasSubstr("Flatten mesh with mesh_dim_name outer has been created before"));
  EXPECT_EQ(mesh["outer"].ranks(), (Ints{0, 2, 4, 6}));
  EXPECT_EQ(mesh["dp"].flatten("alias").ranks(), mesh["dp"].ranks());
  EXPECT_THAT(message_of([&] { mesh.flatten("not a name"); }), HasSubstr("'not a name' has a space"));
  const DeviceMesh unflattened = mesh.unflatten("dp", {2, 1}, {"x", "y"});
  EXPECT_THAT(message_of([&] {
                unflattened[{"x", "y"}].flatten("y");
              }),
              HasSubstr("already exists for submesh of the DeviceMesh mesh(x=2, y=1)"));
  const DeviceMesh nameless = init_device_mesh(at::kCPU, {2, 2}, {}, mesh.world());
  EXPECT_THAT(message_of([&] { nameless.flatten(); }),
              HasSubstr("The dims of mesh(2, 2) have no names to join"));
}

TEST(DeviceMesh, SlicesByOneNameOrMany) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"}, fake_world(5, 8));
  const std::string tp = "tp";
  EXPECT_EQ(mesh["tp"], mesh[tp]);
  EXPECT_EQ(mesh["tp"], (mesh[{"tp"}]));
  EXPECT_EQ((mesh[{"dp", "tp"}]), (mesh[Names{"dp", "tp"}]));
  EXPECT_EQ((mesh[{"dp", "tp"}].ranks()), (Ints{0, 1, 4, 5}));
  EXPECT_EQ((mesh[{"dp", "cp", "tp"}]), mesh);
  mesh[{"cp", "tp"}].flatten();
  EXPECT_EQ((mesh[{"dp", "cp_tp"}].shape()), (Ints{2, 4}));
  EXPECT_EQ((mesh[{"dp", "cp_tp"}].ranks()), mesh.ranks());
}

TEST(DeviceMesh, SlicesRefuseWrongOrderOverlapAndUnknownNames) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"}, fake_world(5, 8));
  mesh[{"dp", "cp"}].flatten();
  mesh[{"dp", "tp"}].flatten();
  EXPECT_THAT(
      message_of([&] {
        (mesh[{"tp", "dp"}]);
      }),
      AllOf(HasSubstr("Cannot slice mesh(dp=2, cp=2, tp=2) by 'tp', 'dp': the names must be in the order"),
            HasSubstr("DeviceMesh::concatenate")));
  EXPECT_THAT(message_of([&] { (mesh[{"tp", "dp_cp"}]); }), HasSubstr("by 'tp', 'dp_cp': the names must be"));
  EXPECT_THAT(message_of([&] { (mesh[{"dp_tp", "cp"}]); }), HasSubstr("by 'dp_tp', 'cp': the names must be"));
  EXPECT_THAT(message_of([&] { (mesh[{"dp", "dp"}]); }), HasSubstr("'dp' and 'dp' overlap"));
  EXPECT_THAT(message_of([&] { (mesh[{"dp_cp", "cp"}]); }), HasSubstr("'dp_cp' and 'cp' overlap"));
  EXPECT_THAT(message_of([&] { (mesh[{"dp_cp", "dp_tp"}]); }), HasSubstr("'dp_cp' and 'dp_tp' overlap"));
  EXPECT_THAT(message_of([&] { mesh["pp"]; }), HasSubstr("There is no dim 'pp' in mesh(dp=2, cp=2, tp=2)"));
  EXPECT_THAT(message_of([&] { mesh["dp"]["tp"]; }), HasSubstr("There is no dim 'tp' in mesh(dp=2)"));
  EXPECT_THAT(message_of([&] { mesh[Names{}]; }), HasSubstr("needs the name of at least one dim"));
  EXPECT_THAT(message_of([&] { init_device_mesh(at::kCPU, {2}, {}, mesh.world())["dp"]; }),
              HasSubstr("There is no dim 'dp' in mesh(2)"));
}

TEST(DeviceMesh, ConcatenateRefusesStrangersAndOverlap) {
  const auto world = fake_world(0, 16);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"}, world);
  EXPECT_THAT(message_of([] { DeviceMesh::concatenate({}); }), HasSubstr("No meshes"));
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh[{"dp", "cp"}], mesh["cp"]});
              }),
              HasSubstr("Cannot concatenate mesh(dp=2, cp=2) and mesh(cp=2): dim 'cp' of the latter overlaps "
                        "dim 'cp'"));
  const DeviceMesh larger = init_device_mesh(at::kCPU, {2, 8}, {"x", "y"}, world);
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh["dp"], larger["y"]});
              }),
              HasSubstr("Cannot concatenate mesh(dp=2) and mesh(y=8): they are not slices of the same root"));
  const DeviceMesh meta = init_device_mesh(at::kMeta, {2, 2, 2}, {"dp", "cp", "tp"}, world);
  EXPECT_THAT(message_of([&] { DeviceMesh::concatenate({mesh["dp"], meta["cp"]}); }), HasSubstr("same root"));
  const DeviceMesh elsewhere = init_device_mesh(at::kCPU, {2, 2, 2}, {"dp", "cp", "tp"}, fake_world(0, 16));
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh["dp"], elsewhere["cp"]});
              }),
              HasSubstr("same root"));
  const DeviceMesh nameless = init_device_mesh(at::kCPU, {2, 4}, {}, world);
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh["dp"], nameless.submeshes(1)[0]});
              }),
              HasSubstr("only one of them has names"));
  const DeviceMesh twin = init_device_mesh(at::kCPU, {4, 2}, {"x", "dp"}, world);
  EXPECT_THAT(message_of([&] {
                DeviceMesh::concatenate({mesh["dp"], twin["dp"]});
              }),
              HasSubstr("'dp' is repeated"));
  EXPECT_EQ(DeviceMesh::concatenate({twin["x"], mesh["tp"]}).ranks(), mesh.ranks());
}

TEST(DeviceMesh, UnflattenRefusesWhatDoesNotFit) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 6}, {"dp", "tp"}, fake_world(0, 12));
  EXPECT_THAT(
      message_of([&] {
        mesh.unflatten("tp", {2, 2}, {"x", "y"});
      }),
      HasSubstr("Cannot unflatten dim 'tp' of mesh(dp=2, tp=6) into [2, 2]: the product is 4, expected 6"));
  EXPECT_THAT(message_of([&] { mesh.unflatten("pp", {2, 3}, {"x", "y"}); }), HasSubstr("no dim 'pp'"));
  EXPECT_THAT(message_of<c10::IndexError>([&] {
                mesh.unflatten(2, {2, 3}, {"x", "y"});
              }),
              HasSubstr("Mesh dim 2 is out of range for mesh(dp=2, tp=6): expected -2 to 1"));
  EXPECT_THAT(message_of([&] {
                mesh.unflatten(1, {2, 3}, {"x"});
              }),
              HasSubstr("expected 2 names, but got 1: 'x'"));
  EXPECT_THAT(message_of([&] { mesh.unflatten(1, {2, 3}, {}); }), HasSubstr("expected 2 names, but got 0"));
  EXPECT_THAT(message_of([&] { mesh.unflatten(1, {2, 3}, {"x", "dp"}); }), HasSubstr("'dp' is repeated"));
  EXPECT_THAT(message_of([&] { mesh.unflatten(1, {2, 3}, {"x", "a,b"}); }), HasSubstr("'a,b' has a space"));
  EXPECT_THAT(message_of([&] { mesh.unflatten(1, {}, {}); }), HasSubstr("at least one dim"));
  EXPECT_THAT(message_of([&] { mesh.unflatten(1, {-2, -3}, {"x", "y"}); }), HasSubstr("has size -2"));
  const DeviceMesh nameless = init_device_mesh(at::kCPU, {2, 6}, {}, mesh.world());
  EXPECT_THAT(
      message_of([&] {
        nameless.unflatten(1, {2, 3}, {"x", "y"});
      }),
      HasSubstr("Cannot unflatten dim 1 of mesh(2, 6) into dims named 'x', 'y': the other dims have no "
                "names"));
}

TEST(DeviceMesh, RefusesWrongShapesRanksNamesAndDevices) {
  const auto world = fake_world(1, 4);
  const auto make = [&](Ints shape, Ints ranks, Names names = {}) {
    return message_of([&] { DeviceMesh(at::kCPU, shape, ranks, names, world); });
  };
  EXPECT_THAT(make({2, 2}, {0, 1, 2}), HasSubstr("A mesh of shape [2, 2] has 4 ranks, but 3 are given"));
  EXPECT_THAT(make({}, {0}), HasSubstr("at least one dim"));
  EXPECT_THAT(make({2, 0}, {}), HasSubstr("Mesh dim 1 of shape [2, 0] has size 0"));
  EXPECT_THAT(make({-1}, {0}), HasSubstr("Mesh dim 0 of shape [-1] has size -1"));
  EXPECT_THAT(make({2}, {0, 4}), HasSubstr("Rank 4 of the mesh is not in the world, whose ranks are 0 to 3"));
  EXPECT_THAT(make({2}, {-1, 0}), HasSubstr("Rank -1 of the mesh is not in the world"));
  EXPECT_THAT(make({3}, {2, 0, 2}), HasSubstr("Rank 2 is in the mesh more than once"));
  EXPECT_THAT(make({2, 2}, {0, 1, 2, 3}, {"dp"}), HasSubstr("has 2 dims, but 1 names are given: 'dp'"));
  EXPECT_THAT(make({2, 2}, {0, 1, 2, 3}, {"dp", ""}), HasSubstr("The name of mesh dim 1 is empty"));
  EXPECT_THAT(make({2, 2}, {0, 1, 2, 3}, {"dp", "dp"}), HasSubstr("'dp' is repeated"));
  for (const std::string name : {"a b", "a=2", "a,b", "(a)", " ", "a:b", "[a]", "a\n"}) {
    EXPECT_THAT(make({2}, {0, 1}, {name}), HasSubstr("'" + name + "' has a space"));
  }
  for (const std::string name : {"a", "_", "A1", "dp_cp2", "__x", "mesh-0", "1a", "a.b", "\xc3\xa9"}) {
    EXPECT_EQ(DeviceMesh(at::kCPU, {2}, {0, 1}, {name}, world).mesh_dim_names(), Names{name});
  }
  EXPECT_THAT(message_of([&] { init_device_mesh(at::kXLA, {4}, {}, world); }),
              AllOf(HasSubstr("xla"), HasSubstr("SPMD"), HasSubstr("no c10d process groups")));
  EXPECT_EQ(init_device_mesh(at::kMPS, {4}, {}, world).device_type(), at::kMPS);
}

TEST(DeviceMesh, TakesRanksFromIntegerTensorsOnly) {
  const auto world = fake_world(1, 6);
  const at::Tensor ranks = at::arange(6, at::kInt).reshape({2, 3}).t();
  EXPECT_EQ(DeviceMesh(at::kCPU, ranks, {"a", "b"}, world).ranks(), (Ints{0, 3, 1, 4, 2, 5}));
  for (at::ScalarType type : {at::kByte, at::kChar, at::kShort, at::kLong}) {
    EXPECT_EQ(DeviceMesh(at::kCPU, ranks.to(type), {}, world).shape(), (Ints{3, 2}));
  }
  EXPECT_THAT(message_of([&] { DeviceMesh(at::kCPU, ranks.to(at::kFloat), {}, world); }),
              HasSubstr("must be integers, but the tensor's dtype is Float"));
  EXPECT_THAT(message_of([&] { DeviceMesh(at::kCPU, at::ones({1}, at::kBool), {}, world); }),
              HasSubstr("Bool"));
  EXPECT_THAT(message_of([&] { DeviceMesh(at::kCPU, at::Tensor(), {}, world); }), HasSubstr("undefined"));
  EXPECT_THAT(message_of([&] { DeviceMesh(at::kCPU, ranks[0][0], {}, world); }),
              HasSubstr("at least one dim"));
}

TEST(DeviceMesh, MustFitIntoTheWorld) {
  EXPECT_THAT(message_of([] {
                init_device_mesh(at::kCPU, {2, 4}, {}, fake_world(0, 6));
              }),
              HasSubstr("A mesh of shape [2, 4] needs 8 ranks, but the world has only 6"));
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THAT(message_of([&] {
                init_device_mesh(at::kCPU, {huge, huge}, {}, fake_world(0, 6));
              }),
              HasSubstr("but the world has only 6"));
}

TEST(DeviceMesh, OfAFewRanksIsSmallInALargeWorld) {
  const auto world = fake_world(0, INT32_MAX);
  EXPECT_EQ(DeviceMesh(at::kCPU, {2}, {0, INT32_MAX - 1}, {}, world).ranks(), (Ints{0, INT32_MAX - 1}));
  EXPECT_THAT(message_of([&] {
                DeviceMesh(at::kCPU, {3}, {5, 0, 5}, {}, world);
              }),
              HasSubstr("Rank 5 is in the mesh more than once"));
}

TEST(DeviceMesh, UsesTheCurrentWorldUnlessGivenOne) {
  const auto world = fake_world(2, 4);
  const WorldScope scope(world);
  EXPECT_EQ(init_device_mesh(at::kCPU, {4}).world(), world);
  EXPECT_EQ(DeviceMesh(at::kCPU, {2}, {2, 1}).world(), world);
  EXPECT_EQ(*DeviceMesh(at::kCPU, {2}, {2, 1}).get_coordinate(), Ints{0});
  const auto other = fake_world(0, 4);
  EXPECT_EQ(init_device_mesh(at::kCPU, {4}, {}, other).world(), other);
}

TEST(DeviceMesh, RanksOutsideGetClearErrors) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, fake_world(5, 6));
  EXPECT_FALSE(mesh.is_member());
  const auto says = HasSubstr("Rank 5 is not in this mesh(dp=2, tp=2)");
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.get_group("dp"); }), says);
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.get_group({"dp", "tp"}); }), says);
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.get_all_groups(); }), says);
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.get_local_rank("dp"); }), says);
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.ranks_along("dp"); }), says);
  EXPECT_THAT(message_of<c10::Error>([&] { mesh["dp"].get_group(); }),
              HasSubstr("Rank 5 is not in this mesh(dp=2), so it has no group there; ask is_member() first"));
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.flatten().get_group(); }), HasSubstr("mesh(dp_tp=4)"));
  const DeviceMesh inside = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, fake_world(0, 4));
  EXPECT_THAT(message_of<c10::Error>([&] { inside.submeshes("tp")[1].get_group(); }),
              HasSubstr("Rank 0 is not in this mesh(tp=2)"));
}

TEST(DeviceMesh, SaysWhichDimItNeeds) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, fake_world(3, 4));
  EXPECT_THAT(message_of([&] { mesh.get_group(); }), HasSubstr("mesh(dp=2, tp=2) has 2 dims: say which one"));
  EXPECT_THAT(message_of([&] { mesh.get_local_rank(); }),
              HasSubstr("mesh(dp=2, tp=2) has 2 dims: say which one"));
  EXPECT_EQ(mesh["dp"].get_local_rank(), 1);
  EXPECT_THAT(message_of([&] { mesh.get_group("pp"); }), HasSubstr("no dim 'pp' in mesh(dp=2, tp=2)"));
  EXPECT_THAT(message_of<c10::IndexError>([&] { mesh.get_group(-3); }),
              HasSubstr("Mesh dim -3 is out of range for mesh(dp=2, tp=2): expected -2 to 1"));
  EXPECT_THAT(message_of([&] { mesh.get_group(std::vector<MeshDim>{}); }), HasSubstr("No dims"));
  EXPECT_THAT(message_of([&] {
                mesh.get_group({"dp", 0});
              }),
              HasSubstr("There is no group along 'dp' and 0 of mesh(dp=2, tp=2): they overlap."));
  EXPECT_THAT(message_of([&] { mesh.rank_at({1}); }),
              HasSubstr("The coordinate [1] has 1 dims, but mesh(dp=2, tp=2) has 2 dims"));
  EXPECT_THAT(message_of<c10::IndexError>([&] {
                mesh.rank_at({0, 2});
              }),
              HasSubstr("The coordinate [0, 2] is out of range along dim 'tp' of mesh(dp=2, tp=2)"));
  EXPECT_THROW(mesh.rank_at({-1, 0}), c10::IndexError);
}

TEST(DeviceMesh, EqualityLooksAtWorldDeviceShapeNamesAndRanks) {
  const auto world = fake_world(0, 4);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, world);
  const DeviceMesh copy = mesh;
  EXPECT_EQ(mesh, copy);
  EXPECT_EQ(mesh, DeviceMesh(at::kCPU, {2, 2}, {0, 1, 2, 3}, {"dp", "tp"}, world));
  const std::vector<DeviceMesh> others{init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, fake_world(0, 4)),
                                       init_device_mesh(at::kMeta, {2, 2}, {"dp", "tp"}, world),
                                       init_device_mesh(at::kCPU, {1, 4}, {"dp", "tp"}, world),
                                       init_device_mesh(at::kCPU, {2, 2}, {"dp", "cp"}, world),
                                       init_device_mesh(at::kCPU, {2, 2}, {}, world),
                                       DeviceMesh(at::kCPU, {2, 2}, {0, 2, 1, 3}, {"dp", "tp"}, world),
                                       DeviceMesh(at::kCPU, {2, 2}, {3, 2, 1, 0}, {"dp", "tp"}, world)};
  std::unordered_set<DeviceMesh> set{mesh, copy};
  for (const DeviceMesh& other : others) {
    EXPECT_FALSE(mesh == other);
    EXPECT_TRUE(mesh != other);
    set.insert(other);
  }
  EXPECT_EQ(set.size(), 1 + others.size());

  const DeviceMesh permuted(at::kCPU, {2, 2}, {0, 2, 1, 3}, {"tp", "dp"}, world);
  const DeviceMesh transposed = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(permuted, transposed);
  EXPECT_EQ(permuted.hash(), transposed.hash());
}

TEST(DeviceMesh, PrintsItsDims) {
  const auto world = fake_world(0, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"}, world);
  std::ostringstream out;
  out << mesh;
  EXPECT_EQ(out.str(), "mesh(dp=2, tp=4)");
  EXPECT_EQ(mesh["tp"].str(), "mesh(tp=4)");
  EXPECT_EQ(mesh.flatten().str(), "mesh(dp_tp=8)");
  EXPECT_EQ(init_device_mesh(at::kCPU, {2, 1, 4}, {}, world).str(), "mesh(2, 1, 4)");
}

TEST(DeviceMesh, WhatATemporaryReturnsMayBeKept) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"}, fake_world(6, 8));
  const auto shape = mesh["tp"].shape();
  const auto& names = mesh["tp"].mesh_dim_names();
  const auto coordinate = mesh["tp"].get_coordinate();
  const auto& world = mesh["tp"].world();
  EXPECT_EQ(shape, Ints{4});
  EXPECT_EQ(names, Names{"tp"});
  EXPECT_EQ(coordinate, Ints{2});
  EXPECT_EQ(world, mesh.world());
}

TEST(DeviceMesh, DimsMayBeAnyInteger) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4}, {}, fake_world(0, 8));
  EXPECT_EQ(mesh.size(size_t{1}), 4);
  EXPECT_EQ(mesh.size(short{1}), 4);
  EXPECT_EQ(mesh.size(1LL), 4);
  EXPECT_EQ(mesh.size(-2), 2);
}

TEST(DeviceMesh, SpansVeryManyRanks) {
  WorldOptions options;
  options.rank = 54'321;
  options.size = 100'000;
  options.backend = "gloo";
  const auto world = std::make_shared<World>(options);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {10, 100, 100}, {"pp", "dp", "tp"}, world);
  EXPECT_EQ(mesh.size(), 100'000);
  EXPECT_EQ(*mesh.get_coordinate(), (Ints{5, 43, 21}));
  EXPECT_EQ(mesh.rank_at({9, 99, 99}), 99'999);
  EXPECT_EQ(mesh, init_device_mesh(at::kCPU, {10, 100, 100}, {"pp", "dp", "tp"}, world));
  const Ints pp{4321, 14321, 24321, 34321, 44321, 54321, 64321, 74321, 84321, 94321};
  EXPECT_EQ(mesh["pp"].ranks(), pp);
  EXPECT_EQ((mesh[{"pp", "tp"}].flatten().size()), 1000);
  EXPECT_EQ(mesh.submeshes("tp").size(), 1000u);
  EXPECT_EQ(mesh.unflatten("dp", {10, 10}, {"x", "y"}).rank_at({5, 4, 3, 21}), 54'321);

  Ints ranks(100'000);
  std::iota(ranks.rbegin(), ranks.rend(), 0);
  const DeviceMesh reversed(at::kCPU, {1000, 100}, ranks, {"dp", "tp"}, world);
  EXPECT_EQ(*reversed.get_coordinate(), (Ints{456, 78}));
  EXPECT_EQ(reversed.mesh()[456][78].item<int64_t>(), 54'321);

  // This world cannot make any group for want of a store, and was not asked for one.
  EXPECT_THAT(message_of<c10::Error>([&] { mesh.get_group("tp"); }), HasSubstr("store"));
}

TEST(DeviceMesh, SharesGroupsWithAllMeshesOfTheSameRanks) {
  const auto world = fake_world(3, 8);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"}, world);
  const DeviceMesh other = init_device_mesh(at::kCPU, {2, 2, 2}, {"a", "b", "c"}, world);
  EXPECT_EQ(mesh.get_group("tp"), (other[{"b", "c"}].flatten().get_group()));
  EXPECT_EQ(mesh.get_group("tp"), other.get_group({"b", "c"}));
  EXPECT_EQ(mesh.get_group("dp"), other.get_group("a"));
  EXPECT_EQ(mesh.flatten().get_group(), world->group(at::kCPU));
  EXPECT_NE(mesh.get_group("tp"), mesh.get_group("dp"));
}

Group foreign_group(int rank, int size) { return c10::make_intrusive<c10d::ProcessGroup>(rank, size); }

TEST(FromGroup, UsesTheGroupGiven) {
  const auto world = fake_world(5, 8);
  const Group known = world->group({1, 5, 3}, at::kCPU);
  const DeviceMesh mesh = DeviceMesh::from_group(known, at::kCPU, {}, {"dp"}, world);
  expect_is(mesh, {{3}, {1, 5, 3}}, {"dp"});
  EXPECT_EQ(mesh.get_group(), known);
  EXPECT_EQ(DeviceMesh::from_group(known, at::kCPU, {1, 5, 3}, {"dp"}, world), mesh);

  const Group foreign = foreign_group(1, 2);
  const DeviceMesh own = DeviceMesh::from_group(foreign, at::kCPU, {4, 5}, {}, world);
  EXPECT_EQ(own.ranks(), (Ints{4, 5}));
  EXPECT_EQ(own.get_group(), foreign);
  EXPECT_EQ(own.get_group(0), foreign);
  EXPECT_EQ(own.flatten("x").get_group(), foreign);
  EXPECT_EQ(own.submeshes(0)[0].get_group(), foreign);

  const DeviceMesh outside = DeviceMesh::from_group(nullptr, at::kCPU, {1, 2}, {"dp"}, world);
  EXPECT_FALSE(outside.is_member());
  EXPECT_EQ(outside.ranks(), (Ints{1, 2}));
}

TEST(FromGroup, RefusesWhatDoesNotFit) {
  const auto world = fake_world(5, 8);
  const auto make = [&](const Group& group, Ints ranks) {
    return message_of([&] { DeviceMesh::from_group(group, at::kCPU, ranks, {"dp"}, world); });
  };
  EXPECT_THAT(make(world->group({1, 5}, at::kCPU), {5, 1}),
              HasSubstr("The group is of ranks [1, 5], but the ranks given are [5, 1]"));
  EXPECT_THAT(make(foreign_group(0, 2), {}), HasSubstr("does not know its ranks: pass them"));
  EXPECT_THAT(make(nullptr, {}), HasSubstr("Neither a group nor its ranks"));
  EXPECT_THAT(make(nullptr, {5, 6}), HasSubstr("The group given for mesh dim 'dp' is null"));
  EXPECT_THAT(
      make(foreign_group(0, 2), {5, 6, 7}),
      HasSubstr("The group given for mesh dim 'dp' has 2 ranks, but mesh(dp=3) has 3 along that dim"));
  EXPECT_THAT(make(foreign_group(1, 2), {5, 6}),
              HasSubstr("Rank 5 has rank 1 in the group given for mesh dim 'dp', but coordinate 0 along"));
  EXPECT_THAT(make(foreign_group(1, 2), {6, 7}), HasSubstr("Rank 5 is not among the ranks of mesh(dp=2)"));
}

TEST(FromGroups, UsesTheGroupsGivenHoweverItIsSliced) {
  const auto world = fake_world(4, 6);
  const at::Tensor ranks = at::arange(6).reshape({2, 3});
  const Group dp = foreign_group(1, 2);
  const Group tp = foreign_group(1, 3);
  const DeviceMesh mesh = DeviceMesh::from_groups({dp, tp}, at::kCPU, ranks, {"dp", "tp"}, world);
  EXPECT_EQ(mesh, init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"}, world));
  EXPECT_EQ(mesh.get_all_groups(), (std::vector<Group>{dp, tp}));
  EXPECT_EQ(mesh.root().get_group("tp"), tp);
  EXPECT_EQ(mesh["dp"].get_group(), dp);
  EXPECT_EQ(mesh["tp"].flatten("alias").get_group(), tp);
  EXPECT_EQ(mesh["alias"].get_group(), tp);
  EXPECT_EQ(mesh.get_group(std::vector<MeshDim>{"tp"}), tp);
  const DeviceMesh turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
  EXPECT_EQ(turned.get_all_groups(), (std::vector<Group>{tp, dp}));
  EXPECT_EQ(mesh.submeshes("tp")[1].get_group(), tp);
  const DeviceMesh unflattened = mesh.unflatten("dp", {2, 1}, {"x", "y"});
  EXPECT_EQ(unflattened.get_group("x"), dp);
  EXPECT_EQ(unflattened.get_group("tp"), tp);
  EXPECT_EQ(world->ranks_of(unflattened.get_group("y")), Ints{4});
  EXPECT_EQ(world->ranks_of(mesh.flatten().get_group()), (Ints{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(world->ranks_of(mesh.get_group({"tp", "dp"})), (Ints{0, 3, 1, 4, 2, 5}));
}

TEST(FromGroups, RefusesWhatDoesNotFit) {
  const auto world = fake_world(4, 8);
  const at::Tensor ranks = at::arange(6).reshape({2, 3});
  const auto make = [&](const std::vector<Group>& groups) {
    return message_of([&] { DeviceMesh::from_groups(groups, at::kCPU, ranks, {"dp", "tp"}, world); });
  };
  const Group dp = foreign_group(1, 2);
  EXPECT_THAT(make({dp}), HasSubstr("mesh(dp=2, tp=3) has 2 dims, but 1 groups are given"));
  EXPECT_THAT(make({}), HasSubstr("has 2 dims, but 0 groups are given"));
  EXPECT_THAT(make({dp, nullptr}), HasSubstr("The group given for mesh dim 'tp' is null"));
  EXPECT_THAT(make({dp, foreign_group(1, 2)}), HasSubstr("mesh dim 'tp' has 2 ranks"));
  EXPECT_THAT(make({dp, foreign_group(2, 3)}), HasSubstr("mesh dim 'tp', but coordinate 1"));
  EXPECT_THAT(make({dp, world->group({3, 4, 6}, at::kCPU)}),
              HasSubstr("mesh dim 'tp' is of ranks [3, 4, 6], but along that dim mesh(dp=2, tp=3) has ranks "
                        "[3, 4, 5]"));
  const auto outside = fake_world(7, 8);
  EXPECT_FALSE(DeviceMesh::from_groups({}, at::kCPU, ranks, {"dp", "tp"}, outside).is_member());
  EXPECT_THAT(message_of([&] {
                DeviceMesh::from_groups({dp, dp}, at::kCPU, ranks, {}, outside);
              }),
              HasSubstr("Rank 7 is not among the ranks of mesh(2, 3)"));
}

TEST(DeviceMesh, MayBeUsedFromSeveralThreads) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"a", "b", "c"}, fake_world(5, 8));
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  constexpr int kThreads = 4;
  constexpr int kRounds = 100;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        const DeviceMesh flat = mesh[{"a", "c"}].flatten();
        mesh[{"a", "b"}].flatten(c10::str("own", t, "_", i));
        right += mesh["a_c"] == flat && mesh.get_group("a_c") == flat.get_group() &&
                 mesh.get_group("b") == mesh["b"].get_group() && mesh.hash() == mesh.root().hash();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kRounds);
}

TEST(MeshScope, NestsAndIsThreadLocal) {
  const DeviceMesh outer = init_device_mesh(at::kCPU, {4}, {"a"}, fake_world(0, 4));
  const DeviceMesh inner = init_device_mesh(at::kCPU, {2}, {"b"}, fake_world(0, 4));
  EXPECT_FALSE(has_current_mesh());
  EXPECT_THAT(message_of<c10::Error>([] { current_mesh(); }),
              AllOf(HasSubstr("pass a mesh"), HasSubstr("MeshScope")));
  {
    const MeshScope scope(outer);
    EXPECT_EQ(current_mesh(), outer);
    {
      const MeshScope nested(inner);
      EXPECT_EQ(current_mesh(), inner);
    }
    EXPECT_EQ(current_mesh(), outer);
    bool elsewhere = true;
    std::thread([&] { elsewhere = has_current_mesh(); }).join();
    EXPECT_FALSE(elsewhere);
  }
  EXPECT_FALSE(has_current_mesh());
}

}  // namespace
}  // namespace tessera
