// Products of one matrix for each group, as layers of experts have them.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/cache.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/rules/families.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace testing;

class Grouped : public Families {};
INSTANTIATE_TEST_SUITE_P(Meshes, Grouped,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

at::Tensor ends(std::vector<int> values) { return at::tensor(values, at::kInt); }

TEST_P(Grouped, RowsOfGroups) {
  for (const auto& offs : {ends({3, 3, 9, 13}), ends({0, 0, 13, 13}), ends({1, 2, 3, 13})}) {
    check([](const Tensors& x) { return at::_grouped_mm(x[0], x[1], x[2]); },
          {numbers({13, 8}), numbers({4, 8, 16}, 1), offs});
  }
}
TEST_P(Grouped, SummandsOfGroups) {
  check([](const Tensors& x) { return at::_grouped_mm(x[0].t(), x[1], x[2]); },
        {numbers({13, 8}), numbers({13, 16}, 1), ends({3, 3, 9, 13})});
}
TEST_P(Grouped, ColumnsOfGroups) {
  check([](const Tensors& x) { return at::_grouped_mm(x[0], x[1].t(), x[2]); },
        {numbers({3, 8, 4}), numbers({12, 4}, 1), ends({4, 6, 12})});
}
TEST_P(Grouped, GroupsOfOneSize) {
  check([](const Tensors& x) { return at::_grouped_mm(x[0], x[1]); },
        {numbers({3, 5, 8}), numbers({3, 8, 4}, 1)});
}

/// Experts on Shard(0): a rank computes with its own experts, and its gradients are those of its own experts.
TEST(GroupedMM, KeepsExpertsWhereTheyAre) {
  const auto before = fallback_counts();
  run(4, [] {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const DTensor x = distribute_tensor(numbers({12, 8}), mesh, {Replicate()}, std::nullopt);
    DTensor w = distribute_tensor(numbers({8, 8, 4}, 1), mesh, {Shard(0)}, std::nullopt);
    const DTensor offs =
        distribute_tensor(ends({1, 1, 4, 6, 7, 10, 11, 12}), mesh, {Replicate()}, std::nullopt);
    w.requires_grad_();
    const CommDebugMode counts;
    const at::Tensor y = at::_grouped_mm(x, w, offs);
    EXPECT_EQ(DTensor(y).placements(), Placements{Partial()});
    y.backward(distribute_tensor(numbers({12, 4}, 2), mesh, {Replicate()}, std::nullopt));
    EXPECT_EQ(DTensor(w.grad()).placements(), Placements{Shard(0)});
    EXPECT_EQ(counts.get_total_counts(), 0) << counts;
  });
  EXPECT_EQ(fallback_counts(), before);
}

TEST(GroupedMM, EveryRankRefusesWhatOneDeviceRefuses) {
  run(4, [] {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto put = [&](const at::Tensor& t, const Placement& p) {
      return distribute_tensor(t, mesh, {p}, std::nullopt);
    };
    const at::Tensor x = numbers({3, 8}).to(at::kDouble), w = numbers({2, 8, 4}).to(at::kDouble);
    EXPECT_ANY_THROW(at::_grouped_mm(put(x, Shard(0)), put(w, Replicate()), put(ends({1, 3}), Replicate())));
  });
}

}  // namespace
}  // namespace tessera
