// Joining, moving and indexing.

#include <tessera/comm/run.h>

#include "tests/rules/families.h"

namespace tessera {
namespace {

using namespace testing;

class IndexingFamilies : public Families {};

INSTANTIATE_TEST_SUITE_P(Meshes, IndexingFamilies,
                         ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

TEST_P(IndexingFamilies, Joining) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3}), b = numbers({size, 3}, 1), c = numbers({3, 3}, 2);
    for (const int64_t dim : {0, 1}) {
      check([dim](const Tensors& x) { return at::cat({x[0], x[1]}, dim); }, {a, b});
      check([dim](const Tensors& x) { return at::stack({x[0], x[1]}, dim); }, {a, b});
      check([dim](const Tensors& x) { return at::flip(x[0], {dim}); }, {a});
      check([dim](const Tensors& x) { return at::roll(x[0], {2}, {dim}); }, {a});
      check([dim](const Tensors& x) { return at::roll(x[0], {-1}, {dim}); }, {a});
    }
    check([](const Tensors& x) { return at::cat({x[0], x[1], x[0]}, 0); }, {a, c});
    check([](const Tensors& x) { return at::flip(x[0], {0, 1}); }, {a});
    check([](const Tensors& x) { return at::roll(x[0], {1, 1}, {0, 1}) + at::roll(x[0], 4); }, {a});
    check([](const Tensors& x) { return at::rot90(x[0]); }, {a});
    check([](const Tensors& x) { return x[0].repeat({2, 1, 2}); }, {a});
    check([](const Tensors& x) { return at::tile(x[0], {2}); }, {a});
    check([](const Tensors& x) { return at::constant_pad_nd(x[0], {0, 0, 1, 2}, 7); }, {a});
    check([](const Tensors& x) { return at::constant_pad_nd(x[0], {1, -1, -1, 2}); }, {a});
    check([](const Tensors& x) { return at::constant_pad_nd(x[0], {1, 2}); }, {a});
    for (const int64_t diagonal : {-1, 0, 1})
      check([=](const Tensors& x) { return at::tril(x[0], diagonal) + 2 * at::triu(x[0], diagonal); }, {a});
    check([](const Tensors& x) { return at::slice_scatter(x[0], x[1], 0, 1, 2); }, {a, numbers({1, 3}, 4)});
    check([](const Tensors& x) { return at::select_scatter(x[0], x[1], 0, 1); }, {a, numbers({3}, 4)});
  }
}
TEST(Indexing, NegativeIndicesAreRefusedAsOnOneDevice) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)});
    const at::Tensor last = distribute_tensor(at::full({1}, -1), mesh, {Replicate()});
    const at::Tensor where = distribute_tensor(at::full({1, 3}, -1), mesh, {Replicate()});
    EXPECT_THROW(at::index_select(x, 0, last), c10::Error);
    EXPECT_THROW(at::gather(x, 0, where), c10::Error);
    EXPECT_THROW(at::scatter(x, 0, where, 1.0), c10::Error);
    EXPECT_THROW(at::index_fill(x, 0, last, 1.0), c10::Error);
    EXPECT_THROW(at::embedding(x, last), c10::Error);
    expect_close(DTensor(x.index({last})).full_tensor(), numbers({8, 3}).slice(0, 7), "x[-1]");
  });
}
TEST(Joining, PadsWithAnyNumber) {
  const int64_t large = (int64_t{1} << 53) + 1;
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(at::arange(6), mesh, {Shard(0)});
    expect_close(DTensor(at::constant_pad_nd(x, {1, 2}, large)).full_tensor(),
                 at::constant_pad_nd(at::arange(6), {1, 2}, large), "pad");
  });
}
TEST_P(IndexingFamilies, Sorting) {
  for (const int64_t dim : {0, 1}) {
    matrices([dim](const Tensors& x) { return std::get<0>(at::sort(x[0], dim)); });
    matrices([dim](const Tensors& x) { return std::get<0>(at::topk(x[0], 2, dim)); });
    matrices([dim](const Tensors& x) { return at::argsort(x[0], dim).to(at::kFloat); });
  }
  check([](const Tensors& x) { return at::glu(x[0], 0) + at::glu(x[0].t(), 1).t(); }, {numbers({6, 3})});
  check([](const Tensors& x) { return at::bucketize(x[0], x[1]).to(at::kFloat); },
        {numbers({5, 3}), at::arange(-4, 4).to(at::kFloat)}, false);
}
TEST_P(IndexingFamilies, Selecting) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3});
    const at::Tensor rows = at::remainder(at::arange(6) * 3, size), columns = at::remainder(at::arange(6), 3);
    check([](const Tensors& x) { return at::index_select(x[0], 0, x[1]); }, {a, rows}, false);
    check([](const Tensors& x) { return at::index_select(x[0], 1, x[1]); }, {a, columns}, false);
    check([](const Tensors& x) { return x[0].index({x[1]}); }, {a, rows.view({2, 3})}, false);
    check([](const Tensors& x) { return x[0].index({x[1] - x[0].size(0)}); }, {a, rows}, false);
    check([](const Tensors& x) { return x[0].index({at::indexing::Slice(), x[1]}); }, {a, columns}, false);
    check([](const Tensors& x) { return x[0].index({x[1], x[2]}); }, {a, rows, columns}, false);
    check(
        [](const Tensors& x) {
          return x[0].index({x[1], at::indexing::Slice(), x[2]});
        },
        {numbers({size, 2, 3}), rows, columns}, false);
    check([](const Tensors& x) { return x[0].index({x[0] > 0}); }, {a});
    check([](const Tensors& x) { return at::masked_select(x[0], x[0] > 0); }, {a});
    check([](const Tensors& x) { return at::take(x[0], x[1]); }, {a, columns}, false);
    const at::Tensor where = at::remainder(at::arange(size * 3) * 5, size).view({size, 3});
    check([](const Tensors& x) { return at::gather(x[0], 0, x[1]); }, {a, where}, false);
    check([](const Tensors& x) { return at::gather(x[0], 0, x[1]); },
          {a, where.slice(0, 0, 2).slice(1, 0, 2).contiguous()}, false);
    check([](const Tensors& x) { return at::gather(x[0], 1, x[1]); }, {a, at::remainder(where, 3)}, false);
  }
}
TEST_P(IndexingFamilies, Scattering) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3}), s = numbers({size, 3}, 3);
    // Each place once, so that the order does not matter.
    const at::Tensor where =
        at::remainder(at::arange(size) + 1, size).unsqueeze(1).expand({size, 3}).contiguous();
    const at::Tensor rows = at::remainder(at::arange(2) + 1, size),
                     often = at::remainder(at::arange(6), size);
    for (const int64_t dim : {0, 1}) {
      const at::Tensor index = dim ? at::remainder(at::arange(3), 3).expand({size, 3}).contiguous() : where;
      check([=](const Tensors& x) { return at::scatter(x[0], dim, x[1], x[2]); }, {a, index, s}, false);
      check([=](const Tensors& x) { return at::scatter(x[0], dim, x[1], 7); }, {a, index}, false);
      check([=](const Tensors& x) { return at::scatter_add(x[0], dim, x[1], x[2]); },
            {a, dim ? at::zeros({size, 3}, at::kLong) : at::remainder(index, 2), s}, false);
    }
    check([](const Tensors& x) { return at::scatter_add(x[0], 0, x[1], x[2].detach()); },
          {a, where.slice(0, 0, 2).slice(1, 0, 2).contiguous(), s}, false);
    check([](const Tensors& x) { return at::index_add(x[0], 0, x[1], x[2], 2); },
          {a, often, numbers({6, 3}, 4)}, false);
    check([](const Tensors& x) { return at::index_copy(x[0], 0, x[1], x[2]); }, {a, rows, numbers({2, 3}, 4)},
          false);
    check([](const Tensors& x) { return at::index_fill(x[0], 0, x[1], 9); }, {a, rows}, false);
    for (const bool adds : {false, true}) {
      check([=](const Tensors& x) { return at::index_put(x[0], {x[1]}, x[2], adds); },
            {a, adds ? often : rows, numbers({adds ? 6 : 2, 3}, 4)}, false);
      check([=](const Tensors& x) { return at::index_put(x[0], {x[1]}, x[2], adds); },
            {a, adds ? often : rows, numbers({3}, 4)}, false);
      check(
          [=](const Tensors& x) {
            return at::index_put(x[0], {std::nullopt, x[1]}, x[2], adds);
          },
          {a, at::arange(2), numbers({size, 2}, 4)}, false);
      check(
          [=](const Tensors& x) {
            return at::index_put(x[0], {x[1], x[2]}, x[3], adds);
          },
          {a, rows, at::arange(2), numbers({2}, 4)}, false);
    }
    check(
        [](const Tensors& x) {
          at::Tensor y = x[0] * 2;
          y.index_put_({x[0] > 0}, at::scalar_tensor(3));
          return y;
        },
        {a});
    check(
        [](const Tensors& x) {
          at::Tensor y = x[0] * 2;
          y.scatter_(1, x[1], 7);
          y.index_put_({x[2]}, x[0].select(0, 0), true);
          return y;
        },
        {a, at::zeros({size, 3}, at::kLong), often}, false);
  }
}

TEST_P(IndexingFamilies, Positions) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3}), mask = numbers({size, 3}, 2) > 0;
    const at::Tensor positions = at::tensor({2, 0, 5, 3, -1, 2}, at::kLong),
                     once = at::tensor({2, 0, 5, 3}, at::kLong);
    check([](const Tensors& x) { return at::take(x[0], x[1]); }, {a, positions}, false);
    check([](const Tensors& x) { return at::take(x[0], x[1]); }, {a, positions.view({2, 3})}, false);
    check([](const Tensors& x) { return at::put(x[0], x[1], x[2], true); }, {a, positions, numbers({6}, 1)},
          false);
    check([](const Tensors& x) { return (x[0] * 2).put_(x[1], x[2]); }, {a, once, numbers({4}, 1)}, false);
    check([](const Tensors& x) { return at::masked_scatter(x[0], x[1], x[2]); },
          {a, mask, numbers({size * 3}, 4)}, false);
    check([](const Tensors& x) { return at::scatter_reduce(x[0], 0, x[1], x[0], "amax"); },
          {a * 100 + at::arange(size * 3).view({size, 3}), at::zeros({size, 3}, at::kLong)}, false);
    check([](const Tensors& x) { return at::isin(x[0], x[1]).to(at::kFloat); }, {a, numbers({4}, 2)}, false);
    check([](const Tensors& x) { return at::searchsorted(x[0], x[1]).to(at::kFloat); },
          {std::get<0>(at::sort(a, 1)), numbers({size, 2}, 4)}, false);
    check([](const Tensors& x) { return at::searchsorted(x[0], x[1]).to(at::kFloat); },
          {at::arange(4).to(at::kFloat), a}, false);
    check([](const Tensors& x) { return at::bucketize(x[0], x[1]).to(at::kFloat); },
          {a, at::arange(4).to(at::kFloat)}, false);
    check([](const Tensors& x) { return at::histc(x[0].detach(), 4, -3, 4); }, {a}, false);
    check([](const Tensors& x) { return at::histc(x[0].detach(), 4); }, {a}, false);
    check([](const Tensors& x) { return at::bincount(x[0]).to(at::kFloat); },
          {at::remainder(a, 7).select(1, 0).to(at::kLong)}, false);
    check([](const Tensors& x) { return at::bincount(x[0], x[1].detach(), 9); },
          {at::remainder(a, 7).select(1, 0).to(at::kLong), a.select(1, 1).contiguous()}, false);
  }
}

TEST(IndexingCommunication, NoneWhereNoneIsNeeded) {
  const Placement sum = Partial(), rows = Shard(0), same = Replicate();
  const at::Tensor a = numbers({5, 4}), index = at::remainder(at::arange(6), 5);
  expect_no_communication([](const Tensors& x) { return at::cat({x[0], x[0]}, 1); }, {a}, {rows}, rows, true);
  expect_no_communication(
      [](const Tensors& x) {
        return at::stack({x[0], x[0]}, 0);
      },
      {a}, {rows}, Shard(1), true);
  expect_no_communication(
      [](const Tensors& x) {
        return at::stack({x[0], x[0]}, 0);
      },
      {a}, {NormPartial(2)}, NormPartial(2));
  expect_no_communication([](const Tensors& x) { return at::tril(x[0]); }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return std::get<0>(at::sort(x[0], 1)); }, {a}, {rows}, rows,
                          true);
  expect_no_communication([](const Tensors& x) { return at::index_select(x[0], 0, x[1]); }, {a, index},
                          {rows, same}, sum);
  expect_no_communication([](const Tensors& x) { return at::index_select(x[0], 0, x[1]); }, {a, index},
                          {same, rows}, rows);
  expect_no_communication([](const Tensors& x) { return x[0].index({x[1]}); }, {a, index}, {rows, same}, sum);
  expect_no_communication([](const Tensors& x) { return at::index_add(x[0], 0, x[1], x[2]); },
                          {a, index, numbers({6, 4})}, {rows, same, same}, rows);
  expect_no_communication([](const Tensors& x) { return at::index_put(x[0], {x[1]}, x[2], true); },
                          {a, index, numbers({6, 4})}, {same, rows, rows}, sum);
  expect_no_communication([](const Tensors& x) { return at::scatter(x[0], 0, x[1], 7); },
                          {a, at::zeros({5, 4}, at::kLong)}, {rows, same}, rows);
  for (const Placement& sharded : {rows, Shard(1)})
    expect_no_communication([](const Tensors& x) { return at::take(x[0], x[1]); }, {a, index},
                            {sharded, same}, sum);
  expect_no_communication([](const Tensors& x) { return at::histc(x[0], 4, -3, 4); }, {a}, {rows}, sum);
  expect_no_communication([](const Tensors& x) { return at::searchsorted(x[0], x[1]); },
                          {at::arange(4).to(at::kFloat), a}, {same, rows}, rows);
}

}  // namespace
}  // namespace tessera
