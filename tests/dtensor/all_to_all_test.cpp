// Rows that go from rank to rank: values, gradients, uneven and empty splits.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/all_to_all.h>
#include <tessera/dtensor/dtensor.h>

#include <numeric>
#include <random>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using namespace testing;

/// counts[from][to], drawn alike on every rank.
std::vector<std::vector<int64_t>> draw_counts(int64_t ranks, unsigned seed) {
  std::mt19937 draw(seed);
  std::vector<std::vector<int64_t>> counts(ranks, std::vector<int64_t>(ranks));
  for (auto& row : counts) {
    for (int64_t& count : row) count = static_cast<int64_t>(draw() % 4);
  }
  return counts;
}

/// Row `i` that rank `from` sends to rank `to`.
at::Tensor row(int64_t from, int64_t to, int64_t i) {
  return at::tensor({double(from), double(to), double(i)}, at::kDouble);
}

void expect_exchanged(const DeviceMesh& mesh, const MeshDim& dim, unsigned seed) {
  const int64_t ranks = mesh.size(dim), self = mesh.get_local_rank(dim);
  const auto counts = draw_counts(ranks, seed);
  std::vector<int64_t> incoming;
  std::vector<at::Tensor> sent{at::empty({0, 3}, at::kDouble)}, expected = sent;
  for (int64_t r = 0; r < ranks; ++r) {
    incoming.push_back(counts[r][self]);
    for (int64_t i = 0; i < counts[self][r]; ++i) sent.push_back(row(self, r, i).unsqueeze(0));
    for (int64_t i = 0; i < counts[r][self]; ++i) expected.push_back(row(r, self, i).unsqueeze(0));
  }
  EXPECT_EQ(exchange_sizes(counts[self], mesh, dim), incoming);
  const at::Tensor input = at::cat(sent).requires_grad_();
  const at::Tensor output = all_to_all_single(input, incoming, counts[self], mesh, dim);
  EXPECT_TRUE(at::equal(output.detach(), at::cat(expected)));
  // The gradient goes the way back: each row gets what its receiver multiplied it with. So does that of the gradient.
  const at::Tensor loss = (output.pow(2) * double(self + 1)).sum();
  const at::Tensor gradient = torch::autograd::grad({loss}, {input}, {}, true, /*create_graph=*/true)[0];
  const at::Tensor receiver = input.detach().select(1, 1).unsqueeze(1) + 1;
  EXPECT_TRUE(at::allclose(gradient.detach(), 2 * input.detach() * receiver));
  gradient.sum().backward();
  EXPECT_TRUE(at::allclose(input.grad(), (2 * receiver).expand_as(input)));
}

TEST(AllToAllSingle, IsDifferentiableWithUnevenSplits) {
  for (const int64_t ranks : {1, 2, 4}) {
    run(ranks, [&] {
      for (unsigned seed = 0; seed < 6; ++seed)
        expect_exchanged(init_device_mesh(at::kCPU, {ranks}), 0, seed);
    });
  }
}

TEST(AllToAllSingle, IsAlongOneMeshDim) {
  run(4, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "ep"});
    expect_exchanged(mesh, "ep", 1);
    expect_exchanged(mesh, "dp", 2);
    // Without sizes: as many rows to each.
    const at::Tensor output =
        all_to_all_single(at::full({4, 1}, mesh.get_local_rank("ep")), {}, {}, mesh, "ep");
    EXPECT_TRUE(at::equal(output.flatten(), at::tensor({0, 0, 1, 1}, at::kLong)));
  });
}

TEST(AllToAllSingle, RefusesWhatDoesNotFit) {
  run(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = at::ones({3, 2});
    expect_error<c10::ValueError>([&] { all_to_all_single(x, {}, {}, mesh); }, {"3 rows", "2 ranks"});
    expect_error<c10::ValueError>(
        [&] {
          all_to_all_single(x, {1, 1}, {1, 1}, mesh);
        },
        {"[1, 1]", "2 rows", "has 3"});
    expect_error<c10::ValueError>(
        [&] {
          all_to_all_single(x, {1}, {1, 2}, mesh);
        },
        {"1 output_split_sizes for 2 ranks"});
    expect_error<c10::ValueError>([&] { all_to_all_single(x, {1, 1}, {-1, 4}, mesh); }, {"negative"});
    const DTensor distributed = distribute_tensor(x, mesh, {Shard(0)});
    expect_error<c10::ValueError>([&] { all_to_all_single(distributed, {}, {}, mesh); },
                                  {"plain tensor", "local_map"});
  });
}

RANK_BODY(rows_on_processes) {
  launch(1, [] {
    for (unsigned seed = 0; seed < 3; ++seed)
      expect_exchanged(init_device_mesh(at::kCPU, {current_world()->size()}), 0, seed);
  });
}
TEST(AllToAllSingle, OnProcesses) { testing::expect_ok_over_processes("rows_on_processes", 2); }

}  // namespace
}  // namespace tessera
