#include <tessera/comm/run.h>
#include <tessera/mesh/device_mesh.h>

#include <atomic>
#include <functional>
#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

/// Runs `fn` on `world_size` ranks and checks that all of them came to its end.
void on_ranks(int64_t world_size, const std::function<void()>& fn) {
  std::atomic<int64_t> done = 0;
  run(world_size, [&] {
    fn();
    ++done;
  });
  EXPECT_EQ(done, world_size);
}

int64_t contribution(int64_t rank) { return (rank + 1) * (rank + 1); }

int64_t contribution(const std::vector<int64_t>& ranks) {
  return std::accumulate(ranks.begin(), ranks.end(), int64_t{0},
                         [](int64_t sum, int64_t rank) { return sum + contribution(rank); });
}

/// What an all-reduce over `group` makes of each rank's contribution.
int64_t all_reduced(const Group& group) {
  std::vector<at::Tensor> tensors{at::full({3}, contribution(get_rank()), at::kLong)};
  group->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].min().item<int64_t>(), tensors[0].max().item<int64_t>());
  return tensors[0][0].item<int64_t>();
}

struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t outside;
};

class MeshOnRanks : public ::testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, MeshOnRanks,
                         ::testing::Values(Shape{2, 2, 0}, Shape{2, 3, 0}, Shape{2, 2, 1}, Shape{2, 3, 2},
                                           Shape{1, 2, 1}));

TEST_P(MeshOnRanks, AllReduceOverADimSumsAlongIt) {
  const auto [rows, columns, outside] = GetParam();
  on_ranks(rows * columns + outside, [rows = rows, columns = columns] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {rows, columns}, {"dp", "tp"});
    EXPECT_EQ(mesh.is_member(), get_rank() < rows * columns);
    if (!mesh.is_member()) return;
    const int64_t row = get_rank() / columns;
    const int64_t column = get_rank() % columns;
    int64_t along_dp = 0;
    int64_t along_tp = 0;
    for (int64_t i = 0; i < rows; ++i) along_dp += contribution(i * columns + column);
    for (int64_t i = 0; i < columns; ++i) along_tp += contribution(row * columns + i);
    EXPECT_EQ(all_reduced(mesh.get_group("dp")), along_dp);
    EXPECT_EQ(all_reduced(mesh.get_group("tp")), along_tp);
    EXPECT_EQ(all_reduced(mesh["dp"].get_group()), along_dp);
    EXPECT_EQ(all_reduced(mesh["tp"].get_group()), along_tp);
  });
}

TEST_P(MeshOnRanks, AllReduceOverFlattenedAndSeveralDimsSumsOverAll) {
  const auto [rows, columns, outside] = GetParam();
  on_ranks(rows * columns + outside, [rows = rows, columns = columns] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {rows, columns}, {"dp", "tp"});
    const DeviceMesh flat = mesh.flatten();
    const DeviceMesh turned = DeviceMesh::concatenate({mesh["tp"], mesh["dp"]});
    if (!mesh.is_member()) return;
    const int64_t all = contribution(mesh.ranks());
    EXPECT_EQ(all_reduced(flat.get_group()), all);
    EXPECT_EQ(all_reduced(mesh.get_group("dp_tp")), all);
    EXPECT_EQ(all_reduced(mesh.get_group({"tp", "dp"})), all);
    EXPECT_EQ(all_reduced(turned.flatten("turned").get_group()), all);
  });
}

TEST(MeshRanks, FlattenedDimsThatAreNotNeighbours) {
  on_ranks(8, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"a", "b", "c"});
    const DeviceMesh flat = mesh[{"a", "c"}].flatten();
    const int64_t b = get_rank() / 2 % 2 * 2;
    EXPECT_EQ(all_reduced(flat.get_group()), contribution({b, b + 1, b + 4, b + 5}));
  });
}

TEST(MeshRanks, PermutedRanksKeepTheirOrderInTheGroup) {
  on_ranks(4, [] {
    const DeviceMesh mesh(at::kCPU, {3}, {3, 0, 2}, {"dp"});
    if (!mesh.is_member()) return;
    std::vector<at::Tensor> mine{at::full({1}, get_rank(), at::kLong)};
    std::vector<std::vector<at::Tensor>> all(1);
    for (int64_t i = 0; i < mesh.size(); ++i) all[0].push_back(at::full({1}, -1, at::kLong));
    mesh.get_group()->allgather(all, mine)->wait();
    for (int64_t i = 0; i < mesh.size(); ++i) {
      EXPECT_EQ(all[0][i].item<int64_t>(), mesh.rank_at({i}));
    }
  });
}

TEST(MeshRanks, FromGroupUsesTheGroupGiven) {
  on_ranks(4, [] {
    const auto world = current_world();
    const std::vector<int64_t> ranks{1, 3};
    const bool member = get_rank() % 2 == 1;
    const Group group = member ? world->group(ranks, at::kCPU) : Group();
    const DeviceMesh mesh = DeviceMesh::from_group(group, at::kCPU, ranks, {"dp"});
    EXPECT_EQ(mesh.is_member(), member);
    EXPECT_EQ(mesh.ranks(), ranks);
    if (!member) return;
    EXPECT_EQ(DeviceMesh::from_group(group, at::kCPU, {}, {"dp"}), mesh);
    EXPECT_EQ(mesh.get_group(), group);
    EXPECT_EQ(all_reduced(mesh.get_group()), contribution(ranks));
  });
}

TEST(MeshRanks, FromGroupsUsesTheGroupsGiven) {
  on_ranks(6, [] {
    const auto world = current_world();
    const int64_t rank = get_rank();
    const std::vector<int64_t> column{rank % 3, rank % 3 + 3};
    const std::vector<int64_t> row{rank / 3 * 3, rank / 3 * 3 + 1, rank / 3 * 3 + 2};
    const Group dp = world->group(column, at::kCPU);
    const Group tp = world->group(row, at::kCPU);
    const DeviceMesh mesh =
        DeviceMesh::from_groups({dp, tp}, at::kCPU, at::arange(6).reshape({2, 3}), {"dp", "tp"});
    EXPECT_EQ(mesh.get_all_groups(), (std::vector<Group>{dp, tp}));
    EXPECT_EQ(all_reduced(mesh.get_group("dp")), contribution(column));
    EXPECT_EQ(all_reduced(mesh["tp"].get_group()), contribution(row));
    EXPECT_EQ(all_reduced(mesh.flatten().get_group()), contribution(mesh.ranks()));
  });
}

TEST(MeshRanks, MeshesOfDifferentRanksDiffer) {
  std::vector<std::optional<DeviceMesh>> meshes(2);
  on_ranks(2, [&] { meshes[get_rank()] = init_device_mesh(at::kCPU, {2}, {"dp"}); });
  EXPECT_FALSE(*meshes[0] == *meshes[1]);
  EXPECT_EQ(*meshes[0]->get_coordinate(), std::vector<int64_t>{0});
  EXPECT_EQ(*meshes[1]->get_coordinate(), std::vector<int64_t>{1});
}

TEST_P(MeshOnRanks, CoordinatesAreThoseOfGroups) {
  const auto [rows, columns, outside] = GetParam();
  on_ranks(rows * columns + outside, [rows = rows, columns = columns] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {rows, columns});
    const auto all = mesh.coordinates();
    ASSERT_EQ(static_cast<int64_t>(all.size()), mesh.size());
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(mesh.rank_at(all[i]), mesh.ranks()[i]);
    if (!mesh.is_member()) {
      EXPECT_THROW(mesh.coordinates_along({0}), c10::Error);
      EXPECT_THROW(mesh.get_joint_group(), c10::Error);
      return;
    }
    for (const std::vector<int64_t>& dims :
         {std::vector<int64_t>{0}, std::vector<int64_t>{1}, std::vector<int64_t>{0, 1},
          std::vector<int64_t>{1, 0}, std::vector<int64_t>{}}) {
      std::vector<int64_t> ranks;
      for (const auto& coordinate : mesh.coordinates_along(dims)) ranks.push_back(mesh.rank_at(coordinate));
      if (dims.empty()) {
        EXPECT_EQ(ranks, std::vector<int64_t>{get_rank()});
        continue;
      }
      const Group group = mesh.get_group({dims.begin(), dims.end()});
      EXPECT_EQ(mesh.world()->ranks_of(group), ranks);
    }
    EXPECT_EQ(mesh.coordinates_along({-1}), mesh.coordinates_along({1}));
    EXPECT_THROW(mesh.coordinates_along({2}), c10::Error);
    EXPECT_EQ(mesh.world()->ranks_of(mesh.get_joint_group()), mesh.ranks());
    EXPECT_EQ(all_reduced(mesh.get_joint_group()), contribution(mesh.ranks()));
  });
}

}  // namespace
}  // namespace tessera
