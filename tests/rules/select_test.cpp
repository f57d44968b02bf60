// Results as large as the data say, picking along dims, and running sums.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/cache.h>

#include <limits>

#include "tests/rules/families.h"

namespace tessera {
namespace {

using namespace testing;
using at::indexing::Slice;

class SelectingFamilies : public Families {};

INSTANTIATE_TEST_SUITE_P(Meshes, SelectingFamilies,
                         ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor as_float(const at::Tensor& x) { return x.to(at::kFloat); }

/// Sizes that are split evenly, unevenly and into nothing; the last has dims behind the first that are long
/// enough to be sharded as they are.
const std::vector<std::vector<int64_t>> kShapes{{8, 3}, {5, 3}, {2, 3}, {3, 130}};

TEST_P(SelectingFamilies, Masks) {
  for (const auto& shape : kShapes) {
    const at::Tensor x = numbers(shape), mask = numbers(shape, 1) > 0, some = numbers({shape[0]}, 2) > 0;
    const at::Tensor often = numbers({x.numel()}, 5);
    check([](const Tensors& t) { return at::masked_select(t[0], t[1]); }, {x, mask});
    check([](const Tensors& t) { return t[0].index({t[1]}); }, {x, mask});
    check([](const Tensors& t) { return t[0].index({t[1]}); }, {x, some});
    check([](const Tensors& t) { return at::masked_select(t[0], t[1]); }, {x, mask.select(0, 0)}, false);
    check([](const Tensors& t) { return t[0].index({Slice(), t[1]}); }, {x, mask.select(0, 1)}, false);
    check([](const Tensors& t) { return t[0].index({t[1], 0}); }, {x, some}, false);
    check([](const Tensors& t) { return as_float(at::nonzero(t[0])); }, {x - 1});
    check([](const Tensors& t) { return at::masked_scatter(t[0], t[1], t[2]); }, {x, mask, often}, false);
    check([](const Tensors& t) { return at::masked_scatter(t[0], t[1], t[2]); }, {x, mask, often.view(shape)},
          false);
    check([](const Tensors& t) { return at::masked_scatter(t[0], t[1], t[2]); },
          {x, mask.select(0, 0), numbers({2 * x.numel()}, 5)}, false);
    const at::Tensor values = numbers({mask.sum().item<int64_t>()}, 3);
    std::vector<int64_t> of_rows = shape;
    of_rows[0] = some.sum().item<int64_t>();
    const at::Tensor rows = numbers(of_rows, 3);
    for (const bool adds : {false, true}) {
      check([adds](const Tensors& t) { return t[0].index_put({t[1]}, t[2], adds); }, {x, mask, values},
            false);
      check([adds](const Tensors& t) { return t[0].index_put({t[1]}, t[2], adds); }, {x, some, rows}, false);
      check([adds](const Tensors& t) { return t[0].index_put({t[1]}, t[2], adds); },
            {x, some, numbers({1}, 3)}, false);
      check([adds](const Tensors& t) { return t[0].index_put({t[1]}, at::full({}, 7.0), adds); }, {x, mask});
    }
    check(
        [](const Tensors& t) {
          at::Tensor written = t[0].clone();
          written.index_put_({t[1]}, at::full({}, 7.0));
          written.index_put_({t[2]}, written.index({t[2]}) * 2);
          return written;
        },
        {x, mask, some}, false);
  }
  // Split in the middle, and twice.
  const at::Tensor deep = numbers({2, 3, 150}), marks = numbers({2, 3, 150}, 1) > 0;
  check([](const Tensors& t) { return at::masked_select(t[0], t[1]); }, {deep, marks});
  check([](const Tensors& t) { return as_float(at::nonzero(t[0])); }, {deep});
  // Nothing, and everything.
  for (const bool all : {false, true}) {
    const at::Tensor mask = at::full({5, 3}, all);
    check([](const Tensors& t) { return at::masked_select(t[0], t[1]); }, {numbers({5, 3}), mask});
    check([](const Tensors& t) { return as_float(at::nonzero(t[0])); }, {mask}, false);
  }
}

/// The size of the result changes while nothing else does.
TEST(Selecting, SizesChangeFromCallToCall) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor plain = at::arange(1000).to(at::kFloat);
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)}, std::nullopt);
    for (const int64_t limit : {0, 1, 3, 4, 500, 501, 502, 999, 1000, 250}) {
      const DTensor selected(at::masked_select(x, x < limit));
      EXPECT_EQ(selected.placements(), Placements{Shard(0)});
      expect_close(selected.full_tensor(), plain.narrow(0, 0, limit), c10::str("the first ", limit));
    }
  });
}

/// What is selected does not travel but for what makes the shards even.
TEST(Selecting, MovesLittle) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor plain = at::arange(4000 * 8).to(at::kFloat).view({4000, 8});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)}, std::nullopt);
    const at::Tensor even = x.remainder(2) == 0;
    CommDebugMode counts;
    const DTensor selected(x.index({even}));
    EXPECT_EQ(selected.placements(), Placements{Shard(0)});
    EXPECT_EQ(selected.size(0), 16000);
    EXPECT_EQ(counts.get_total_counts(), 2);
    EXPECT_EQ(counts.get_comm_counts().at("all_reduce").bytes, 4 * 8);  // how many each rank has
    EXPECT_FALSE(fallback_counts().contains("aten::index.Tensor"));
    EXPECT_FALSE(fallback_counts().contains("aten::masked_select"));
    EXPECT_FALSE(fallback_counts().contains("aten::nonzero"));
  });
}

/// Mesh dims may shard a dim in any order; so they do the result.
TEST(Selecting, InAnyShardOrder) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const at::Tensor plain = numbers({9, 3});
    const DTensor usual(distribute_tensor(plain, mesh, {Shard(0), Shard(0)}, std::nullopt));
    const DTensor x(usual.redistribute({Shard(0), Shard(0)}, {.order = {1, 0}}));
    EXPECT_FALSE(x.spec().order().empty());
    const at::Tensor mask = x > 0, written = x.clone();
    expect_close(DTensor(x.index({mask})).full_tensor(), plain.index({plain > 0}), "x[mask]");
    expect_close(DTensor(at::nonzero(mask)).full_tensor(), at::nonzero(plain > 0), "nonzero");
    written.index_put_({mask}, x.index({mask}) * 2);
    expect_close(DTensor(written).full_tensor(), at::where(plain > 0, plain * 2, plain), "x[mask] = y");
    expect_close(DTensor(at::cumsum(x, 0)).full_tensor(), at::cumsum(plain, 0), "cumsum");
    expect_close(DTensor(at::argmax(x, 0)).full_tensor(), at::argmax(plain, 0), "argmax");
  });
}

/// Nor do gradients.
TEST(Selecting, GradientsStaySharded) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x =
        distribute_tensor(numbers({4000, 8}), mesh, {Shard(0)}, std::nullopt).requires_grad_();
    const at::Tensor positions = distribute_tensor(at::arange(10), mesh, {Replicate()}, std::nullopt);
    const at::Tensor mask = x.detach() > 0;
    for (const auto& select : {Function([&](const Tensors& t) { return t[0].index({mask}); }),
                               Function([&](const Tensors& t) { return at::masked_select(t[0], mask); }),
                               Function([&](const Tensors& t) { return t[0].index({positions}); })}) {
      x.mutable_grad() = at::Tensor();
      CommDebugMode counts;
      select({x}).sum().backward();
      EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(0)});
      for (const auto& [name, count] : counts.get_comm_counts()) EXPECT_LT(count.bytes, 4000 * 8) << name;
    }
  });
}

TEST(Selecting, WrongSizesAreErrorsOnEveryRank) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)}, std::nullopt);
    const at::Tensor mask = distribute_tensor(at::ones({8, 3}, at::kBool), mesh, {Shard(0)}, std::nullopt);
    const at::Tensor few = distribute_tensor(numbers({5}), mesh, {Shard(0)}, std::nullopt);
    EXPECT_THROW(x.index_put({mask}, few), c10::Error);
    EXPECT_THROW(at::masked_scatter(x, mask, few), c10::Error);
    EXPECT_THROW(x.index({mask.slice(1, 0, 2)}), c10::Error);
  });
}

at::Tensor flat(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& results) {
  return at::cat({as_float(std::get<0>(results)).flatten(), as_float(std::get<1>(results)).flatten(),
                  as_float(std::get<2>(results)).flatten()});
}

TEST_P(SelectingFamilies, Uniques) {
  for (const auto& shape : kShapes) {
    const at::Tensor x = at::remainder(numbers(shape), 3);
    for (const bool asked : {false, true}) {
      check([=](const Tensors& t) { return flat(at::_unique2(t[0].detach(), true, asked, asked)); }, {x},
            false);
      check([=](const Tensors& t) { return flat(at::unique_consecutive(t[0].detach(), asked, asked)); }, {x},
            false);
    }
    check([](const Tensors& t) { return as_float(std::get<1>(at::_unique(t[0].detach(), true, true))); }, {x},
          false);
    for (const int64_t dim : {0, 1}) {
      check([=](const Tensors& t) { return as_float(std::get<0>(at::unique_dim(t[0].detach(), dim))); }, {x},
            false);
      check([=](const Tensors& t) { return flat(at::unique_dim(t[0].detach(), dim, true, true, true)); }, {x},
            false);
      check([=](const Tensors& t) { return flat(at::unique_consecutive(t[0].detach(), true, true, dim)); },
            {x}, false);
    }
  }
  EXPECT_FALSE(fallback_counts().contains("aten::_unique2"));
}

TEST_P(SelectingFamilies, Extremes) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{8, 3}, {5, 11}, {2, 3}}) {
    // Some are equal.
    const at::Tensor x = at::remainder(numbers(shape), 5);
    // Which one of equal ones is taken is libtorch's own.
    const at::Tensor different = numbers(shape) + at::arange(x.numel()).view(shape) * 0.125;
    at::Tensor broken = x.clone();
    broken.select(0, 1).select(0, 2) = kNan;
    for (const int64_t dim : {0, 1}) {
      for (const bool keep : {false, true}) {
        check([=](const Tensors& t) { return std::get<0>(at::max(t[0], dim, keep)); }, {x});
        check([=](const Tensors& t) { return as_float(std::get<1>(at::max(t[0], dim, keep))); }, {x});
        check([=](const Tensors& t) { return as_float(std::get<1>(at::min(t[0], dim, keep))); }, {broken});
        check([=](const Tensors& t) { return as_float(at::argmax(t[0], dim, keep)); }, {broken}, false);
        check([=](const Tensors& t) { return as_float(at::argmin(t[0], dim, keep)); }, {x});
        check([=](const Tensors& t) { return as_float(at::argmax(t[0], std::nullopt, keep)); }, {x});
      }
      check([=](const Tensors& t) { return std::get<0>(at::topk(t[0], 2, dim)); }, {different});
      check([=](const Tensors& t) { return std::get<0>(at::topk(t[0], 1, dim, false)); }, {different});
    }
    check([](const Tensors& t) { return as_float(at::argmin(t[0])); }, {broken}, false);
  }
}

/// As of the logits of a vocabulary that is sharded.
TEST(Picking, OnlyCandidatesAreGathered) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor plain = at::remainder(at::arange(2 * 4000) * 7919, 8009).to(at::kFloat).view({2, 4000});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(1)}, std::nullopt);
    CommDebugMode counts;
    const auto [values, positions] = at::topk(x, 5, 1);
    EXPECT_EQ(counts.get_comm_counts().at("all_gather").bytes, 2 * 5 * 4 * (4 + 8));
    expect_close(DTensor(positions).full_tensor(), std::get<1>(at::topk(plain, 5, 1)), "topk");
    CommDebugMode more;
    const at::Tensor best = at::argmax(x, -1);
    EXPECT_EQ(more.get_comm_counts().at("all_gather").bytes, 2 * 4 * (4 + 8));
    expect_close(DTensor(best).full_tensor(), at::argmax(plain, -1), "argmax");
  });
}

TEST(Picking, Medians) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte, at::kShort}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
      for (const int64_t size : {70001, 70002, 70003}) {
        at::Tensor plain = at::remainder(at::arange(size) * 7919, 10007);
        if (dtype != at::kByte) plain = plain - 6000;
        if (at::isFloatingType(dtype)) plain = plain.to(at::kDouble) * 0.37;
        if (dtype == at::kLong) plain = plain * (int64_t{1} << 49);
        plain = plain.to(dtype);
        auto expect_same = [&](const at::Tensor& global, const Placement& first, const Placement& second) {
          const at::Tensor x = distribute_tensor(global, mesh, {first, second}, std::nullopt);
          EXPECT_TRUE(at::allclose(DTensor(x.median()).full_tensor(), global.median(), 0, 0, true))
              << size << dtype;
          EXPECT_TRUE(at::allclose(DTensor(x.nanmedian()).full_tensor(), global.nanmedian(), 0, 0, true));
        };
        expect_same(plain, Shard(0), Shard(0));
        expect_same(plain, Replicate(), Shard(0));
        if (!at::isFloatingType(dtype)) continue;
        at::Tensor broken = plain.clone();
        broken.slice(0, 17, 30000, 5) = kNan;
        expect_same(broken, Shard(0), Shard(0));
        expect_same(at::full({size}, kNan, dtype), Shard(0), Replicate());
      }
      EXPECT_FALSE(fallback_counts().contains("aten::median"));
    });
  }
}

TEST_P(SelectingFamilies, RunningSums) {
  for (const int64_t dim : {0, 1}) {
    matrices([dim](const Tensors& x) { return at::cumsum(x[0], dim); });
    matrices([dim](const Tensors& x) { return at::cumprod(x[0], dim); });
    matrices([dim](const Tensors& x) { return at::logcumsumexp(x[0], dim); });
    for (const int64_t size : {5, 8, 2}) {
      at::Tensor x = at::remainder(numbers({size, 3}), 4);
      check([=](const Tensors& t) { return std::get<0>(at::cummax(t[0], dim)); }, {x});
      check([=](const Tensors& t) { return as_float(std::get<1>(at::cummax(t[0], dim))); }, {x});
      check([=](const Tensors& t) { return as_float(std::get<1>(at::cummin(t[0], dim))); }, {x});
      x.select(0, 1).select(0, 1) = kNan;
      check([=](const Tensors& t) { return as_float(std::get<1>(at::cummax(t[0], dim))); }, {x}, false);
      check([=](const Tensors& t) { return as_float(at::cumsum(t[0], dim)); }, {x.nan_to_num().to(at::kInt)},
            false);
    }
  }
}

}  // namespace
}  // namespace tessera
