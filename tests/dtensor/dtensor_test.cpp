// Distributed tensors against the same computation on one device: values, gradients, views, writes, errors.

#include <tessera/comm/run.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/random/generator.h>
#include <tessera/redistribute/plan_cache.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

using namespace testing;

class Operators : public ::testing::TestWithParam<std::vector<int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Meshes, Operators,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 2}));

TEST_P(Operators, Add) {
  compare_all([](const Tensors& x) { return at::add(x[0], x[1], 2); }, {numbers({5, 4}), numbers({5, 4}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return x[0] + x[1]; }, {numbers({5, 4}), numbers({4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return x[0] + 1; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Mul) {
  compare_all([](const Tensors& x) { return x[0] * x[1]; }, {numbers({5, 4}), numbers({5, 1}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return x[0] * 3; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Relu) {
  compare_all([](const Tensors& x) { return at::relu(x[0]); }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Mm) {
  compare_all([](const Tensors& x) { return at::mm(x[0], x[1]); }, {numbers({5, 3}), numbers({3, 4}, 1)},
              GetParam());
}
TEST_P(Operators, Addmm) {
  if (GetParam().size() > 1) {  // 64 times as many combinations: only those without partial inputs
    compare_all([](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); },
                {numbers({4}, 2), numbers({5, 3}), numbers({3, 4}, 1)}, GetParam(), false);
  } else {
    compare_all([](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); },
                {numbers({4}, 2), numbers({5, 3}), numbers({3, 4}, 1)}, GetParam());
  }
}
TEST_P(Operators, Transpose) {
  compare_all([](const Tensors& x) { return x[0].t() * 2; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, View) {
  compare_all([](const Tensors& x) { return x[0].view({2, 6, 2}); }, {numbers({12, 2})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].view({16, 6}); }, {numbers({12, 8})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].view({-1}); }, {numbers({4, 6})}, GetParam());
}
TEST_P(Operators, OtherViews) {
  compare_all([](const Tensors& x) { return x[0].transpose(0, -1) * 2; }, {numbers({5, 3, 4})}, GetParam(),
              false);
  compare_all(
      [](const Tensors& x) {
        return x[0].permute({2, 0, 1}) * 2;
      },
      {numbers({5, 3, 4})}, GetParam(), false);
  compare_all([](const Tensors& x) { return x[0].select(0, -2) * 2; }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].select(1, 1) * 2; }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].unsqueeze(-1) * 2; }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].squeeze(0) * 2; }, {numbers({1, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].squeeze(1) * 2; }, {numbers({1, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].slice(0, 1, -1, 2) * 2; }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].slice(1, 0, 100) * 2 + x[0].narrow(0, 2, 1); },
              {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].expand({3, -1, 4}) * 2; }, {numbers({5, 1})}, GetParam());
}
TEST_P(Operators, Sum) {
  compare_all([](const Tensors& x) { return x[0].sum(); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].sum(0); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].sum(-1, true); }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, CloneAndDetach) {
  compare_all([](const Tensors& x) { return x[0].clone() + x[0].detach(); }, {numbers({5, 4})}, GetParam());
}
/// Operators without a rule take the replicated fallback.
TEST_P(Operators, OnReplicas) {
  compare_all([](const Tensors& x) { return at::softmax(x[0], 1); }, {numbers({5, 4})}, GetParam());
  compare_all(
      [](const Tensors& x) {
        return at::cat({x[0], x[1]}, 0).cumsum(0);
      },
      {numbers({5, 4}), numbers({2, 4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return std::get<0>(at::sort(x[0], 0)); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1]); },
              {numbers({5, 4}), numbers({4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return x[0].split(2, 0)[1].mean(0) + x[0].select(1, 0)[0]; },
              {numbers({5, 4})}, GetParam());
  compare_all(
      [](const Tensors& x) {
        const ImplicitReplicationGuard indices_are_the_same_everywhere;
        return x[0].index({at::tensor({0, 2, 2})});
      },
      {numbers({5, 4})}, GetParam(), false);
}
TEST_P(Operators, SmallAndEmptyTensors) {
  compare_all([](const Tensors& x) { return at::relu(x[0]) + x[1]; }, {numbers({1, 4}), numbers({1, 4}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return at::mm(x[0], x[1]); }, {numbers({2, 1}), numbers({1, 2}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return at::relu(x[0]).sum(0); }, {numbers({0, 4})}, GetParam());
}

TEST(DTensorApi, LocalAndBack) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const at::Tensor global = numbers({5, 7});
    for (const Placements& placements : all_placements(2, 2, true)) {
      const DTensor x = distribute_tensor(global, mesh, placements);
      EXPECT_EQ(x.placements(), placements);
      EXPECT_EQ(x.device_mesh(), mesh);
      EXPECT_EQ(x.sizes(), global.sizes());
      EXPECT_EQ(x.to_local().sizes(), x.spec().local_shape());
      EXPECT_TRUE(at::equal(x.full_tensor(), global));
      DTensor::FromLocalOptions options;
      options.run_check = true;
      const DTensor again = DTensor::from_local(x.to_local(), mesh, placements, options);
      EXPECT_EQ(again.spec(), x.spec());
      EXPECT_TRUE(at::equal(again.full_tensor(), global));
      EXPECT_TRUE(again.to_local().is_alias_of(x.to_local()));
      for (const Placements& others : all_placements(2, 2, true)) {
        EXPECT_TRUE(at::equal(x.redistribute(others).full_tensor(), global))
            << placements << " -> " << others;
      }
    }
  });
}

/// A tensor that differs on the ranks: the first one's counts, or each one's own.
TEST(DTensorApi, DistributeFromARank) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    const at::Tensor mine = numbers({5, 7}, get_rank());
    EXPECT_TRUE(
        at::equal(distribute_tensor(mine, mesh, {Shard(0), Shard(1)}).full_tensor(), numbers({5, 7}, 0)));
    EXPECT_TRUE(at::equal(distribute_tensor(mine, mesh, {Shard(0), Replicate()}, 3).full_tensor(),
                          numbers({5, 7}, 3)));
    EXPECT_TRUE(
        at::equal(distribute_tensor(mine, mesh, {Replicate(), Replicate()}, std::nullopt).to_local(), mine));
    EXPECT_TRUE(distribute_tensor(mine.clone().requires_grad_(), mesh, {Shard(0), Shard(1)}).requires_grad());
  });
}

TEST(DTensorApi, Factories) {
  run(3, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {3});
    for (const Placement& placement :
         {Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::max), Partial(ReduceOp::product)}) {
      EXPECT_TRUE(at::equal(zeros({4, 5}, mesh, {placement}).full_tensor(), at::zeros({4, 5})));
      EXPECT_TRUE(
          at::equal(ones({4, 5}, mesh, {placement}, at::kLong).full_tensor(), at::ones({4, 5}, at::kLong)));
      EXPECT_TRUE(at::equal(full({4, 5}, 7, mesh, {placement}).full_tensor(), at::full({4, 5}, 7.0f)));
      const DTensor some =
          empty({4, 5}, mesh, {placement}, at::TensorOptions().dtype(at::kHalf).requires_grad(true));
      EXPECT_EQ(some.to_local().sizes(), some.spec().local_shape());
      EXPECT_EQ(some.scalar_type(), at::kHalf);
      EXPECT_TRUE(some.requires_grad());
    }
  });
}

TEST(DTensorApi, GradientsThroughLocalTensors) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const Placement& placement : {Replicate(), Shard(0), Partial()}) {
      at::Tensor local = numbers({2, 3}, get_rank()).requires_grad_();
      const DTensor x = DTensor::from_local(local, mesh, {placement});
      const DTensor y(x * 3);
      y.redistribute({Shard(1)}).to_local().sum().backward();
      // Each element of the whole adds 3 to the sum of all local sums; of a partial tensor, each rank's part
      // does.
      EXPECT_TRUE(at::equal(local.grad(), at::full({2, 3}, 3.0f))) << placement;
    }
    at::Tensor global = numbers({4, 3}).requires_grad_();
    const DTensor x = distribute_tensor(global, mesh, {Shard(0)});
    (x * x).sum().backward();
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(0)});
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), global.detach() * 2));
  });
}

TEST(DTensorApi, TheReadmeExample) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const at::Tensor w = distribute_tensor(numbers({6, 8}), mesh, {Replicate(), Shard(1)}).requires_grad_();
    const at::Tensor x = distribute_tensor(numbers({4, 6}, 1), mesh, {Shard(0), Replicate()});
    const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
    const at::Tensor y = at::relu(at::mm(x, w));
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(0), Shard(1)}));
    y.sum().backward();
    EXPECT_EQ(DTensor(w.grad()).placements(), (Placements{Partial(), Shard(1)}));
    std::ostringstream out;
    out << DTensor(w.grad());
    EXPECT_THAT(out.str(), HasSubstr("DTensor [P(sum), S(1)] on mesh(dp=2, tp=2): f32[6, 8]"));
  });
}

// Also by a rank alone, and as the at::Tensor that it is.
TEST(DTensorApi, GradientsOfLocalTensorsKeepTheShardOrder) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    const at::Tensor weights = numbers({8, 3}, 3);
    for (const std::vector<int64_t>& order : {std::vector<int64_t>{0, 1}, {1, 0}}) {
      const Placements rows{Shard(0), Shard(0)};
      const DTensor x(distribute_tensor(numbers({8, 3}), mesh, rows)
                          .redistribute(rows, {.order = order})
                          .detach()
                          .requires_grad_());
      const at::Tensor w =
          distribute_tensor(weights, mesh, rows).redistribute(rows, {.order = order}).to_local();
      for (const OptionalPlacements& given : {OptionalPlacements(), OptionalPlacements(rows)}) {
        x.mutable_grad().reset();
        (x.to_local(given) * w).sum().backward();
        expect_close(DTensor(x.grad()).full_tensor(), weights, "gradient");
      }
    }
  });
}

TEST(DTensorApi, PrintsWhatTheRankHolds) {
  run(2, [] {
    auto printed = [](const at::Tensor& tensor) {
      std::ostringstream out;
      out << tensor;
      return out.str();
    };
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor global = numbers({4, 6});
    const at::Tensor columns = distribute_tensor(global, mesh, {Shard(1)});
    const at::Tensor sum = columns.sum(), view = columns.view({3, 8});
    if (get_rank() == 1) {
      EXPECT_THAT(printed(columns), HasSubstr("DTensor [S(1)] on mesh(2): f32[4, 6], rank 1 holds:"));
      EXPECT_THAT(printed(columns), HasSubstr(printed(DTensor(columns).to_local())));
      EXPECT_THAT(printed(sum), HasSubstr("P(sum)"));
      EXPECT_THAT(printed(columns.to(at::kDouble)), HasSubstr("rank 1 holds"));
      EXPECT_THAT(printed(view), HasSubstr("f32[3, 8]"));
    }
    columns.add_(1);
    if (get_rank() == 0) EXPECT_THAT(printed(view), HasSubstr("written since"));
    EXPECT_TRUE(at::equal(DTensor(view + 0).full_tensor(), (global + 1).view({3, 8})));
    EXPECT_THAT(printed(view), ::testing::Not(HasSubstr("written since")));
    // Others print as ever.
    EXPECT_EQ(printed(at::ones({2})), " 1\n 1\n[ CPUFloatType{2} ]");
    EXPECT_EQ(printed(at::Tensor()), "[ Tensor (undefined) ]");
  });
}

TEST(DTensorAutograd, TwiceAndAgainAndHooks) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor start = numbers({4, 3});
    at::Tensor plain = start.clone().requires_grad_();
    at::Tensor x = distribute_tensor(start, mesh, {Shard(0)}).requires_grad_();
    int calls = 0;
    x.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      EXPECT_TRUE(DTensor::is_dtensor(gradient));
      return gradient * 2;
    });
    plain.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    auto cube = [](const at::Tensor& t) { return (t * t * t).sum(); };
    cube(plain).backward();
    cube(plain).backward();
    const at::Tensor loss = cube(x);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), plain.grad()));
  });
}

TEST(DTensorInPlace, WritesStayInTheirPlacement) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    for (const Placements& placements : all_placements(2, 2, true)) {
      at::Tensor plain = numbers({5, 4});
      at::Tensor x = distribute_tensor(plain, mesh, placements);
      const at::Tensor y = distribute_tensor(numbers({5, 4}, 2), mesh, {Replicate(), Shard(0)});
      const at::Tensor local = DTensor(x).to_local();
      x.add_(y).mul_(2).relu_().cumsum_(0).clamp_(0, 50);
      plain.add_(numbers({5, 4}, 2)).mul_(2).relu_().cumsum_(0).clamp_(0, 50);
      EXPECT_EQ(DTensor(x).placements(), placements);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
      EXPECT_TRUE(DTensor(x).to_local().is_alias_of(local));
      x.copy_(y);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({5, 4}, 2))) << placements;
      x.zero_();
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), at::zeros({5, 4}))) << placements;
      x.fill_(3);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), at::full({5, 4}, 3.0f))) << placements;
    }
  });
}

TEST(DTensorViews, ShareMemoryOrWriteThrough) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    at::Tensor plain = numbers({4, 6});
    at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    x.t().mul_(2);
    x.view({2, 2, 6}).add_(1);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain * 2 + 1));
    x.select(1, 2).zero_();  // columns are whole on every rank
    x.slice(1, 4).add_(5);
    plain = plain * 2 + 1;
    plain.select(1, 2).zero_();
    plain.slice(1, 4).add_(5);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain));
    x.select(0, 3).add_(1);  // on one rank only: written through
    plain.select(0, 3).add_(1);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain));

    at::Tensor leaf = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)}).requires_grad_();
    at::Tensor reference = numbers({4, 6}).requires_grad_();
    auto through_view = [](const at::Tensor& t) {
      at::Tensor y = t * 2;
      y.t().mul_(3);
      return (y * y).sum();
    };
    through_view(leaf).backward();
    through_view(reference).backward();
    EXPECT_TRUE(at::equal(DTensor(leaf.grad()).full_tensor(), reference.grad()));
  });
}

TEST(DTensorModes, InferenceNoGradAndAutocastFreeCode) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)}).requires_grad_();
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(at::equal(DTensor(x * 2).full_tensor(), numbers({4, 6}) * 2));
      expect_close(DTensor(at::softmax(x, 0)).full_tensor(), at::softmax(numbers({4, 6}), 0), "softmax");
      expect_close(DTensor(at::max_pool1d(x, 2)).full_tensor(), at::max_pool1d(numbers({4, 6}), 2), "pool");
    }
    const at::NoGradGuard no_grad;
    EXPECT_FALSE((x * 2).requires_grad());
    x.detach().add_(1);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({4, 6}) + 1));
  });
}

TEST(DTensorValues, ItemAndEqualAreGlobal) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const at::Tensor p = distribute_tensor(numbers({4, 6}), mesh, {Partial()});
    EXPECT_EQ(p.sum().item<float>(), numbers({4, 6}).sum().item<float>());
    EXPECT_EQ(p.max().item<float>(), 5);
    EXPECT_TRUE(at::equal(x, p));
    EXPECT_FALSE(at::equal(x, p + 1));
  });
}

/// All layouts of a matrix on a mesh of `mesh_ndim` dims, with strided shards and two kinds of partial values.
std::vector<Placements> all_layouts(int64_t mesh_ndim) {
  std::vector<Placements> lists{{}};
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& choice :
           {Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::max), StridedShard(0, 2)}) {
        // Sums of maxima are not maxima of sums: a tensor cannot be both.
        const ReduceOp other = choice.is_partial(ReduceOp::sum) ? ReduceOp::max : ReduceOp::sum;
        if (choice.is_partial() &&
            std::any_of(list.begin(), list.end(), [&](const Placement& p) { return p.is_partial(other); }))
          continue;
        longer.push_back(list);
        longer.back().push_back(choice);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

/// Forward and backward between all layouts: redistributing changes nothing but the placement.
TEST(DTensorApi, GradientsThroughRedistribute) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{1}, {2}, {3}, {4}, {2, 2}, {2, 3}, {2, 2, 2}}) {
    const auto layouts = all_layouts(static_cast<int64_t>(shape.size()));
    std::vector<size_t> pairs(layouts.size() * layouts.size());
    std::iota(pairs.begin(), pairs.end(), 0);
    if (shape.size() == 3 || shape == std::vector<int64_t>{2, 3}) {  // a sample
      std::shuffle(pairs.begin(), pairs.end(), std::mt19937(0));
      pairs.resize(pairs.size() / (shape.size() == 3 ? 397 : 7) + 1);
    }
    run(c10::multiply_integers(shape), [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), shape);
      for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 6}, {5, 7}, {1, 3}, {0, 2}}) {
        const at::Tensor weights = numbers(sizes, 4);
        const DTensor replicated =
            distribute_tensor(weights, mesh, Placements(mesh.ndim(), Replicate()), std::nullopt);
        for (const size_t pair : pairs) {
          const Placements &from = layouts[pair / layouts.size()], &to = layouts[pair % layouts.size()];
          const DTensor x = distribute_tensor(numbers(sizes).requires_grad_(), mesh, from, std::nullopt);
          DTensor::RedistributeOptions options;
          options.async_op = pair % 2 == 0;
          const DTensor y = x.redistribute(to, options);
          ASSERT_EQ(y.placements(), to);
          ASSERT_TRUE(at::equal(y.full_tensor(), numbers(sizes))) << from << " -> " << to << " on " << mesh;
          (y * replicated).sum().backward();
          const DTensor gradient(x.grad());
          ASSERT_TRUE(at::equal(gradient.full_tensor(), weights)) << from << " -> " << to << " on " << mesh;
          ASSERT_TRUE(from == to || !gradient.spec().has_partial()) << from << " -> " << to << " on " << mesh;
        }
      }
    });
  }
}

TEST(DTensorApi, RedistributeSearchesOnceForItsPlan) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const DTensor x = distribute_tensor(numbers({4, 6}).requires_grad_(), mesh, {Shard(0)});
    DTensor::RedistributeOptions half;
    half.forward_dtype = at::kHalf;
    auto step = [&] {
      x.redistribute({Shard(1)}).sum().backward();
      x.redistribute({Replicate()}, half);
      x.full_tensor();
    };
    step();
    const CacheStatistics before = plan_cache_statistics();
    step();
    const CacheStatistics after = plan_cache_statistics();
    EXPECT_EQ(after.misses, before.misses);
    EXPECT_EQ(after.size, before.size);
    EXPECT_GE(after.hits, before.hits + 3);
  });
}

TEST(DTensorApi, RedistributeInAnotherDtype) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const DTensor x = distribute_tensor(numbers({4, 6}).requires_grad_(), mesh, {Shard(0)});
    DTensor::RedistributeOptions options;
    options.forward_dtype = at::kBFloat16;
    options.backward_dtype = at::kHalf;
    const DTensor y = x.redistribute({Replicate()}, options);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(y.full_tensor().to(at::kFloat), numbers({4, 6})));
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), at::ones({4, 6})));
  });
}

TEST(DTensorApi, FlattenAndBack) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const DTensor x = distribute_tensor(numbers({5, 7}).requires_grad_(), mesh, {Shard(0), Shard(1)});
    const auto [local, context] = x.flatten();
    EXPECT_EQ(context.str(), "[S(0), S(1)] on mesh(dp=2, tp=2): f32[5, 7] requires_grad");
    EXPECT_EQ(DTensor::Context::parse(context.str(), mesh), context);
    const DTensor again = DTensor::unflatten(local, context);
    EXPECT_EQ(again.flatten().second, context);
    EXPECT_TRUE(at::equal(again.full_tensor(), numbers({5, 7})));
    expect_error<c10::ValueError>(
        [&, &kept = context] {
          DTensor::unflatten(at::ones({1, 1}), kept);
        },
        {"unflatten", "[1, 1]"});

    const DTensor gradient = distribute_tensor(numbers({5, 7}), mesh, {Partial(), Replicate()});
    EXPECT_EQ(x.coerce_gradient(gradient).placements(), x.placements());
    EXPECT_TRUE(at::equal(x.coerce_gradient(gradient).full_tensor(), numbers({5, 7})));
    check_no_partial({x, local}, "saving");
    expect_error<c10::ValueError>(
        [&] {
          check_no_partial({x, gradient}, "saving");
        },
        {"saving", "tensor 1", "P(sum)"});
  });
}

TEST(DTensorAutograd, DoubleBackward) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    auto second = [](const at::Tensor& y, const at::Tensor& x) {
      const at::Tensor gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({(gradient * gradient).sum()}, {x})[0];
    };
    auto function = [](const at::Tensor& x) { return at::relu(x * x * x + at::mm(x, x.t()).sum()); };
    const at::Tensor plain = numbers({4, 3}).requires_grad_();
    for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Partial()}) {
      const DTensor x = distribute_tensor(numbers({4, 3}).requires_grad_(), mesh, {placement}, std::nullopt);
      expect_close(DTensor(second(function(x), x)).full_tensor(), second(function(plain), plain),
                   placement.str());
      // Autograd makes zeros of its own here.
      auto pooled = [](const at::Tensor& t) { return at::avg_pool1d((t * t).unsqueeze(0), 2); };
      expect_close(DTensor(second(pooled(x), x)).full_tensor(), second(pooled(plain), plain),
                   placement.str());
    }
    const DTensor x = distribute_tensor(numbers({4, 3}).requires_grad_(), mesh, {Shard(0)}, std::nullopt);
    DTensor::FromLocalOptions options;
    options.shape = std::vector<int64_t>{4, 3};
    const at::Tensor y = DTensor::from_local(DTensor(x * x * x).redistribute({Shard(1)}).to_local(), mesh,
                                             {Shard(1)}, options);
    expect_close(DTensor(second(y, x)).full_tensor(), second(plain * plain * plain, plain),
                 "through the API");
  });
}

TEST(DTensorAutograd, SetDataAndDetachInPlace) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    at::Tensor x = distribute_tensor(numbers({4, 3}), mesh, {Shard(0)}).requires_grad_();
    x.set_data(distribute_tensor(numbers({4, 3}, 1), mesh, {Shard(1)}));
    EXPECT_EQ(DTensor(x).placements(), Placements{Shard(1)});
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({4, 3}, 1)));
    EXPECT_TRUE(x.requires_grad());
    EXPECT_THAT(error_of([&] { x.set_data(at::ones({4, 3})); }), HasSubstr("set_data"));
    at::Tensor y = x * 2;
    y.detach_();
    EXPECT_FALSE(y.requires_grad());
    EXPECT_TRUE(at::equal(DTensor(y).full_tensor(), numbers({4, 3}, 1) * 2));
    // What backward needs is saved: changing it in place is noticed.
    at::Tensor z = x * 3;
    const at::Tensor product = z * z;
    z.add_(1);
    EXPECT_THAT(error_of([&] { product.sum().backward(); }), HasSubstr("modified by an inplace operation"));
  });
}

/// Bytes of memory that the process has now.
int64_t resident_bytes() {
  std::ifstream status("/proc/self/statm");
  int64_t total = 0, resident = 0;
  status >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

/// Ten thousand mixed steps with numbers that change: neither the cache nor the specs nor the process grow.
TEST(DTensorCache, DoesNotGrow) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    at::Tensor w = distribute_tensor(numbers({4, 4}), mesh, {Shard(1)}).requires_grad_();
    const at::Tensor x = distribute_tensor(numbers({4, 4}, 1), mesh, {Shard(0)});
    auto step = [&](int i) {
      (at::relu(at::mm(x, w) * (i * 0.001) + i)).sum().backward();
      const at::NoGradGuard no_grad;
      w.add_(w.grad(), -1e-9 * i);
      w.mutable_grad().reset();
      at::clamp(w, -static_cast<double>(i), i).softmax(1);
    };
    for (int i = 0; i < 100; ++i) step(i);
    const CacheStatistics before = dispatch_cache_statistics();
    const size_t specs = Spec::interned_count();
    const int64_t memory = resident_bytes();
    for (int i = 0; i < 10000; ++i) step(i);
    EXPECT_LT(resident_bytes(), memory + (16 << 20));  // what a kilobyte a step would exceed
    const CacheStatistics after = dispatch_cache_statistics();
    EXPECT_EQ(after.size, before.size);
    EXPECT_EQ(after.misses, before.misses);
    EXPECT_GT(after.hits, before.hits + 100000);
    EXPECT_LE(Spec::interned_count(), specs + 16);  // the other rank may be in the midst of a step
  });
}

TEST(DTensorCache, IsBounded) {
  run(1, [] {
    set_dispatch_cache_capacity(50);
    const DeviceMesh mesh = init_device_mesh(test_device(), {1});
    for (int64_t size = 1; size < 300; ++size) {
      const at::Tensor x = zeros({size}, mesh, {Shard(0)});
      EXPECT_EQ((x + x).numel(), size);
      EXPECT_EQ((x + x).numel(), size);
    }
    EXPECT_EQ(dispatch_cache_statistics().size, 50u);
    EXPECT_GE(dispatch_cache_statistics().hits, 299u);
    set_dispatch_cache_capacity(4096);
  });
}

at::Tensor plus_one(const at::Tensor& tensor) { return tensor + 1; }

/// An operator that another library registers after us.
TEST(DTensorOperators, OfOtherLibraries) {
  // Never undone, as that of the library.
  static auto& definition =
      *new torch::Library(torch::Library::FRAGMENT, "tessera_test", std::nullopt, __FILE__, __LINE__);
  definition.def("plus_one(Tensor x) -> Tensor");
  static auto& implementation =
      *new torch::Library(torch::Library::IMPL, "tessera_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  implementation.impl("plus_one", plus_one);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera_test::plus_one", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const DTensor x = distribute_tensor(numbers({4, 3}), mesh, {Shard(0)});
    EXPECT_TRUE(at::equal(DTensor(op.call(x)).full_tensor(), numbers({4, 3}) + 1));
  });
}

TEST(DTensorModes, Autocast) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const at::Tensor w = distribute_tensor(numbers({6, 4}, 1), mesh, {Replicate()});
    at::autocast::set_autocast_enabled(test_device(), true);
    at::autocast::set_autocast_dtype(test_device(), at::kBFloat16);
    const at::Tensor y = at::mm(x, w);
    at::autocast::set_autocast_enabled(test_device(), false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(DTensor(y).placements(), Placements{Shard(0)});
    expect_close(DTensor(y).full_tensor().to(at::kFloat), at::mm(numbers({4, 6}), numbers({6, 4}, 1)),
                 "autocast");
  });
}

/// Its cache of casts is one for the process: it is off where ranks are threads, and refused where casts
/// wait.
TEST(DTensorModes, AutocastOfPartialLeaves) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Replicate()});
    const at::Tensor w = DTensor::from_local(numbers({6, 4}, get_rank()), mesh, {Partial()}).detach();
    w.requires_grad_();
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    at::autocast::set_autocast_enabled(test_device(), true);
    at::autocast::set_autocast_dtype(test_device(), at::kBFloat16);
    const at::Tensor y = at::mm(x, w);
    expect_close(DTensor(y).full_tensor().to(at::kFloat),
                 at::mm(numbers({4, 6}), numbers({6, 4}, 0) + numbers({6, 4}, 1)).to(at::kFloat), "autocast");
    at::autocast::set_autocast_cache_enabled(true);
    EXPECT_THAT(error_of([&] { at::mm(x, w); }), HasSubstr("on ranks that are threads"));
    at::autocast::set_autocast_enabled(test_device(), false);
  });
}

/// Shapes and placements without data, to be filled later.
TEST(DTensorModes, MetaDevice) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const at::TensorOptions meta = at::TensorOptions().device(at::kMeta);
    const DTensor w = empty({6, 4}, mesh, {Shard(1)}, meta);
    const DTensor x = empty({4, 6}, mesh, {Shard(0)}, meta);
    EXPECT_TRUE(w.is_meta());
    const DTensor y(at::softmax(at::mm(x, w), 1));
    EXPECT_TRUE(y.is_meta());
    EXPECT_EQ(y.sizes(), at::IntArrayRef({4, 4}));
    const DTensor real(at::empty_like(w, at::kCPU));
    EXPECT_EQ(real.placements(), w.placements());
    EXPECT_EQ(real.to_local().device(), at::kCPU);
  });
}

RANK_BODY(on_processes) {
  launch(1, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    auto loss = [](const at::Tensor& x, const at::Tensor& w) {
      return at::softmax(at::relu(at::mm(x, w)), 1).pow(2).sum();
    };
    at::Tensor w = numbers({6, 4}).requires_grad_();
    loss(numbers({5, 6}, 1), w).backward();
    for (const Placement& of_w : {Replicate(), Shard(0), Shard(1), Partial()}) {
      for (const Placement& of_x : {Replicate(), Shard(0), Shard(1), Partial()}) {
        const at::Tensor dw = distribute_tensor(numbers({6, 4}), mesh, {of_w}).requires_grad_();
        const at::Tensor dx = distribute_tensor(numbers({5, 6}, 1), mesh, {of_x});
        loss(dx, dw).backward();
        expect_close(DTensor(dw.grad()).full_tensor(), w.grad(), of_w.str() + of_x.str());
      }
    }
  });
}

TEST(DTensorProcesses, Sample) { testing::expect_ok_over_processes("on_processes", 2); }

TEST(DTensorInPlace, OutVariants) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Partial()}) {
      const at::Tensor x = distribute_tensor(numbers({5, 4}), mesh, {Shard(0)});
      at::Tensor out = zeros({5, 4}, mesh, {placement});
      at::add_out(out, x, x);
      EXPECT_TRUE(at::equal(DTensor(out).full_tensor(), numbers({5, 4}) * 2)) << placement;
      at::cumsum_out(out, x, 0);
      EXPECT_TRUE(at::equal(DTensor(out).full_tensor(), numbers({5, 4}).cumsum(0))) << placement;
      EXPECT_EQ(DTensor(out).placements(), Placements{placement});
    }
  });
}

TEST(DTensorInPlace, BecomesAnother) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    at::Tensor x = distribute_tensor(numbers({4, 3}), mesh, {Shard(0)});
    at::Tensor y = distribute_tensor(numbers({2, 6}, 1), mesh, {Shard(1)});
    x.set_(x);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({4, 3})));
    x.set_(y);
    y.add_(1);
    EXPECT_EQ(DTensor(x).placements(), Placements{Shard(1)});
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({2, 6}, 1) + 1));
    expect_error<c10::Error>(
        [&] {
          x.set_(at::ones({2, 6}));
        },
        {"'source' is a plain tensor of shape [2, 6]"});
    expect_error<c10::Error>([&] { x.set_(y.to(at::kLong)); }, {"Long", "Float"});
  });
}

TEST(DTensorInPlace, CannotBeReallocated) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const Placement& placement : {Replicate(), Shard(1)}) {
      at::Tensor x = distribute_tensor(numbers({1, 4}), mesh, {placement});
      expect_error<c10::Error>([&] { x.resize_({2, 2}); }, {"cannot be changed in place"});
      at::Tensor out = zeros({2, 2}, mesh, {placement});
      EXPECT_THAT(error_of([&] { at::cumsum_out(out, x, 0); }), HasSubstr("shape"));
      x.resize_({1, 4});
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({1, 4})));
    }
  });
}

TEST(DTensorErrors, AreForPeople) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0), Replicate()});
    expect_error<c10::ValueError>(
        [&] {
          x + at::ones({4, 6}, test_device());
        },
        {"aten::add", "'other'", "[4, 6]", "distribute_tensor", "ImplicitReplicationGuard"});
    {
      const ImplicitReplicationGuard guard;
      EXPECT_TRUE(at::equal(DTensor(x + at::ones({4, 6}, test_device())).full_tensor(), numbers({4, 6}) + 1));
    }
    const DeviceMesh flat = init_device_mesh(test_device(), {4});
    expect_error<c10::ValueError>(
        [&] {
          x + distribute_tensor(numbers({4, 6}), flat, {Shard(0)});
        },
        {"aten::add", "'other'", "mesh(4)", "mesh(dp=2, tp=2)"});
    expect_error<c10::ValueError>(
        [&] {
          distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
        },
        {"1 placements", "mesh(dp=2, tp=2)"});
    expect_error<c10::IndexError>(
        [&] {
          distribute_tensor(numbers({4, 6}), mesh, {Shard(2), Replicate()});
        },
        {"S(2)"});
    expect_error<c10::ValueError>([&] { DTensor(at::ones({2})); }, {"not distributed", "from_local"});
    expect_error<c10::ValueError>(
        [&] {
          distribute_tensor(x, mesh, {Shard(0), Shard(0)});
        },
        {"redistribute"});
    EXPECT_THAT(error_of([&] { x.storage(); }), HasSubstr("to_local()"));
    EXPECT_THAT(error_of([&] { x.data_ptr(); }), HasSubstr("to_local()"));
    DTensor::FromLocalOptions check;
    check.run_check = true;
    const at::Tensor wrong = at::ones({get_rank() == 3 ? 5 : 4, 6});
    expect_error<c10::ValueError>(
        [&] {
          DTensor::from_local(wrong, mesh, {Shard(0), Replicate()}, check);
        },
        {"[1, 1]", "[5, 6]"});
    const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden);
    expect_error<c10::Error>([&] { at::softmax(x, 0); },
                             {"aten::_softmax", "aten::sub.Tensor", "[P(max), R]", "redistribute()"});
    expect_error<c10::Error>([&] { at::nonzero(x); },
                             {"aten::nonzero", "'self'", "[S(0), R]", "redistribute()"});
    at::relu(x);
  });
}

/// In its words, on every rank, also where a rule computes something else or a rank holds nothing.
TEST(DTensorErrors, AsOnOneDevice) {
  using Call = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Call> calls{
      [](const at::Tensor& x) { return at::softmax(x.to(at::kLong), 0, std::nullopt); },
      [](const at::Tensor& x) { return at::argmax(x > 0, 0); },
      [](const at::Tensor& x) { return std::get<0>(at::topk(x, 7, 0)); },
      [](const at::Tensor& x) { return at::logcumsumexp(x.to(at::kLong), 0); },
      [](const at::Tensor& x) { return at::bitwise_and(x, x); },
      [](const at::Tensor& x) {
        return at::avg_pool2d((x > 0).view({1, 5, 1, 4}), {1, 2});
      },
  };
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    for (size_t i = 0; i < calls.size(); ++i) {
      const std::string expected = error_of([&] { calls[i](numbers({5, 4})); });
      ASSERT_NE(expected, "");
      for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Partial()}) {
        const at::Tensor x = distribute_tensor(numbers({5, 4}), mesh, {placement});
        EXPECT_EQ(error_of([&] { calls[i](x); }), expected) << i << ' ' << placement;
      }
    }
  });
}

/// What only reads plain tensors may be asked to take them for replicas; so may what writes into them.
TEST(DTensorInPlace, IntoPlainTensors) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Partial()}) {
      const at::Tensor x = distribute_tensor(numbers({4, 3}), mesh, {placement}, std::nullopt);
      at::Tensor plain = at::zeros({4, 3}, test_device()), rows = at::zeros({6, 3}, test_device());
      expect_error<c10::ValueError>([&] { plain.copy_(x); },
                                    {"aten::copy_", "'self'", "[4, 3]", "full_tensor()", "Replication"});
      const ImplicitReplicationGuard guard;
      EXPECT_TRUE(plain.copy_(x).is_same(plain));
      rows.index_add_(0, at::tensor({5, 0, 0, 3}).to(test_device()), x);
      EXPECT_TRUE(at::equal(plain, numbers({4, 3}))) << placement;
      EXPECT_TRUE(at::equal(rows, at::zeros({6, 3}).index_add_(0, at::tensor({5, 0, 0, 3}), plain.cpu())))
          << placement;
    }
  });
}

TEST(DTensorOnMeta, EachRankAllocatesItsShardLater) {
  const at::Tensor expected = [] {
    at::Tensor drawn;
    run(1, [&] {
      random::manual_seed(3);
      drawn = randn({5, 4}, init_device_mesh(test_device(), {1}), {Replicate()}).full_tensor();
    });
    return drawn;
  }();
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    const at::TensorOptions meta = at::TensorOptions().device(at::kMeta);
    for (const DTensor& x : {distribute_tensor(at::empty({5, 4}, meta).requires_grad_(), mesh, {Shard(0)}),
                             distribute_tensor(at::empty({5, 4}, meta), mesh, {Shard(0)}, std::nullopt),
                             empty({5, 4}, mesh, {Shard(0)}, meta), zeros({5, 4}, mesh, {Shard(0)}, meta),
                             randn({5, 4}, mesh, {Shard(0)}, meta)}) {
      EXPECT_TRUE(x.is_meta() && x.to_local().is_meta());
      EXPECT_EQ(x.sizes(), at::IntArrayRef({5, 4}));
      EXPECT_TRUE((x.mm(x.t()) * 2).is_meta());
      random::manual_seed(3);
      x.detach().normal_();  // draws nothing
      const DTensor real(at::empty_like(x.detach(), at::TensorOptions().device(at::kCPU)));
      EXPECT_EQ(real.placements(), x.placements());
      EXPECT_EQ(real.to_local().sizes(), x.to_local().sizes());
      real.normal_();
      EXPECT_TRUE(at::equal(real.full_tensor(), expected));
    }
    const auto device = mesh.get_rank() == 0 ? at::kCPU : at::kMeta;
    expect_error<std::exception>([&] { distribute_tensor(at::empty({4}, device), mesh, {Shard(0)}); },
                                 {"on meta"});
  });
}

TEST(DTensorErrors, RanksOutsideTheMesh) {
  run(3, [] {
    const DeviceMesh mesh(test_device(), {2}, {0, 2});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    EXPECT_EQ(x.sizes(), at::IntArrayRef({4, 6}));
    if (get_rank() != 1) {
      EXPECT_TRUE(at::equal(DTensor(at::relu(x)).full_tensor(), at::relu(numbers({4, 6}))));
    } else {
      EXPECT_EQ(x.to_local().numel(), 0);
      expect_error<c10::Error>([&] { at::relu(x); }, {"aten::relu", "rank 1 is not in"});
    }
  });
}

}  // namespace
}  // namespace tessera
