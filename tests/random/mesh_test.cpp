// Random numbers on ranks: whatever the mesh and the placement, bitwise those of one rank, without
// communication.

#include <tessera/comm/run.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/random/random.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::all_placements;
using testing::expect_error;
using testing::same_bits;
using testing::test_device;

constexpr uint64_t kSeed = 17;

/// A tensor of these sizes, placed so, of small numbers between 0 and 1.
struct Given {
  std::vector<int64_t> shape;
  DeviceMesh mesh;
  Placements placements;

  at::Tensor tensor(at::ScalarType dtype = at::kFloat) const {
    const at::Tensor global = ((testing::numbers(shape) + 6) / 12).to(dtype);
    return distribute_tensor(global, mesh, placements, std::nullopt);
  }
  at::Tensor empty(at::ScalarType dtype = at::kFloat) const {
    return tessera::empty(shape, mesh, placements, dtype);
  }
};
using RandomFunction = std::function<at::Tensor(const Given&)>;

/// All that draw in a way that the placement could be seen in.
const std::vector<std::pair<std::string, RandomFunction>>& functions() {
  static const auto& all = *new std::vector<std::pair<std::string, RandomFunction>>{
      {"rand", [](const Given& g) { return rand(g.shape, g.mesh, g.placements); }},
      {"randn", [](const Given& g) { return randn(g.shape, g.mesh, g.placements, at::kDouble); }},
      {"randn half", [](const Given& g) { return randn(g.shape, g.mesh, g.placements, at::kHalf); }},
      {"randn bfloat16", [](const Given& g) { return randn(g.shape, g.mesh, g.placements, at::kBFloat16); }},
      {"randn complex",
       [](const Given& g) { return randn(g.shape, g.mesh, g.placements, at::kComplexFloat); }},
      {"randint", [](const Given& g) { return randint(-3, 1000, g.shape, g.mesh, g.placements); }},
      {"uniform_", [](const Given& g) { return g.empty().uniform_(-1, 2); }},
      {"normal_", [](const Given& g) { return g.empty().normal_(1, 2); }},
      {"normal_ of a transposed one", [](const Given& g) { return g.tensor().t().normal_(); }},
      {"log_normal_", [](const Given& g) { return g.empty().log_normal_(); }},
      {"exponential_", [](const Given& g) { return g.empty(at::kDouble).exponential_(2); }},
      {"cauchy_", [](const Given& g) { return g.empty().cauchy_(); }},
      {"geometric_", [](const Given& g) { return g.empty(at::kInt).geometric_(0.3); }},
      {"bernoulli_", [](const Given& g) { return g.empty().bernoulli_(0.3); }},
      {"bernoulli_ of probabilities", [](const Given& g) { return g.empty().bernoulli_(g.tensor()); }},
      {"bernoulli", [](const Given& g) { return at::bernoulli(g.tensor()); }},
      {"bernoulli.p", [](const Given& g) { return at::bernoulli(g.tensor(), 0.4); }},
      {"random_", [](const Given& g) { return g.empty(at::kLong).random_(); }},
      {"random_ to", [](const Given& g) { return g.empty(at::kShort).random_(100); }},
      {"random_ from to", [](const Given& g) { return g.empty().random_(-5, 5); }},
      {"rand_like", [](const Given& g) { return at::rand_like(g.tensor()); }},
      {"randn_like", [](const Given& g) { return at::randn_like(g.tensor(), at::kDouble); }},
      {"randint_like", [](const Given& g) { return at::randint_like(g.tensor(), 50); }},
      {"randint_like low", [](const Given& g) { return at::randint_like(g.tensor(), 5, 50, at::kLong); }},
      {"randint_like of a tensor",
       [](const Given& g) { return at::randint_like(g.tensor(), at::scalar_tensor(50, at::kLong)); }},
      {"normal of tensors", [](const Given& g) { return at::normal(g.tensor(), g.tensor() + 1); }},
      {"normal of means", [](const Given& g) { return at::normal(g.tensor(), 2); }},
      {"normal of deviations", [](const Given& g) { return at::normal(2, g.tensor().select(0, 0)); }},
      {"multinomial", [](const Given& g) { return at::multinomial(g.tensor(), 2); }},
      {"multinomial with replacement", [](const Given& g) { return at::multinomial(g.tensor(), 7, true); }},
      {"native_dropout",
       [](const Given& g) { return std::get<0>(at::native_dropout(g.tensor(), 0.4, true)); }},
      {"its mask", [](const Given& g) { return std::get<1>(at::native_dropout(g.tensor(), 0.4, true)); }},
      {"dropout", [](const Given& g) { return at::dropout(g.tensor(), 0.4, true); }},
      {"dropout_",
       [](const Given& g) { return at::dropout_(*std::make_unique<at::Tensor>(g.tensor()), 0.4, true); }},
      {"feature_dropout",
       [](const Given& g) {
         return at::feature_dropout(g.tensor().unsqueeze(-1).expand({-1, -1, 2}), 0.4, true);
       }},
      {"alpha_dropout", [](const Given& g) { return at::alpha_dropout(g.tensor(), 0.4, true); }},
      {"feature_alpha_dropout",
       [](const Given& g) {
         return at::feature_alpha_dropout(g.tensor().unsqueeze(-1).expand({-1, -1, 2}), 0.4, true);
       }},
      {"rrelu", [](const Given& g) { return at::rrelu(g.tensor() - 0.5, 0.1, 0.3, true); }},
      {"poisson", [](const Given& g) { return at::poisson(g.tensor() * 9); }},
      {"binomial", [](const Given& g) { return at::binomial(at::full_like(g.tensor(), 9), g.tensor()); }},
      {"_standard_gamma", [](const Given& g) { return at::_standard_gamma(g.tensor() + 1); }},
      {"randperm",
       [](const Given& g) {
         Placements placements = g.placements;
         for (Placement& each : placements) {
           if (each.is_shard_like()) each = Shard(0);
         }
         return randperm(g.shape[0] * g.shape[1], g.mesh, placements);
       }},
      {"rand.out",
       [](const Given& g) {
         at::Tensor out = g.empty();
         return at::rand_out(out, g.shape);
       }},
      {"randn.out",
       [](const Given& g) {
         at::Tensor out = g.empty();
         return at::randn_out(out, g.shape);
       }},
      {"bernoulli.out",
       [](const Given& g) {
         at::Tensor out = g.empty();
         return at::bernoulli_out(out, g.tensor(), std::optional<at::Generator>());
       }},
      // One after the other, so that each is another call.
      {"the second of two",
       [](const Given& g) { return (at::rand_like(g.tensor()), at::rand_like(g.tensor())); }},
  };
  return all;
}

/// On one rank, by shape and function.
std::map<std::string, at::Tensor> on_one_rank(const std::vector<int64_t>& shape) {
  std::map<std::string, at::Tensor> result;
  run(1, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {1});
    for (const auto& [name, function] : functions()) {
      random::manual_seed(kSeed, mesh);
      result[name] = DTensor(function({shape, mesh, {Replicate()}})).full_tensor();
    }
  });
  return result;
}

class Everywhere : public ::testing::TestWithParam<std::vector<int64_t>> {};

INSTANTIATE_TEST_SUITE_P(Meshes, Everywhere,
                         ::testing::ValuesIn(std::vector<std::vector<int64_t>>{
                             {1},    {2},    {3},    {4},    {5},    {6},    {7},    {8},    {1, 1}, {1, 2},
                             {1, 3}, {1, 4}, {1, 5}, {1, 6}, {1, 7}, {1, 8}, {2, 1}, {2, 2}, {2, 3}, {2, 4},
                             {3, 1}, {3, 2}, {4, 1}, {4, 2}, {5, 1}, {6, 1}, {7, 1}, {8, 1}}));

TEST_P(Everywhere, TheSameNumbers) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{8, 24}, std::vector<int64_t>{5, 3}}) {
    const auto expected = on_one_rank(shape);
    run(c10::multiply_integers(GetParam()), [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), GetParam());
      for (const Placements& placements : all_placements(mesh.ndim(), 2, true)) {
        const Given given{shape, mesh, placements};
        for (const auto& [name, function] : functions()) {
          random::manual_seed(kSeed, mesh);
          const DTensor actual(function(given));
          const at::Tensor& global = expected.at(name);
          // Without communication where each rank can look at its part alone.
          const bool is_same =
              actual.spec().has_partial()
                  ? same_bits(actual.full_tensor(), global)
                  : same_bits(actual.to_local(),
                              distribute_tensor(global, mesh, actual.placements(), std::nullopt).to_local());
          EXPECT_TRUE(is_same) << name << " " << at::IntArrayRef(shape) << " " << placements << " -> "
                               << actual.placements();
        }
      }
    });
  }
}

/// Shards in another order, and strided ones.
TEST(Random, OtherLayouts) {
  const std::vector<int64_t> shape{19, 6};
  random::manual_seed(kSeed);
  const at::Tensor global = random::randn(shape);
  run(8, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2, 2});
    for (const Placements& placements :
         {Placements{StridedShard(0, 2), Shard(0), Replicate()}, Placements{Shard(0), Shard(0), Shard(0)},
          Placements{StridedShard(0, 4), Shard(1), Shard(0)}}) {
      random::manual_seed(kSeed, mesh);
      const DTensor x = randn(shape, mesh, placements);
      EXPECT_TRUE(same_bits(x.full_tensor(), global)) << placements;
    }
    random::manual_seed(kSeed, mesh);
    DTensor::RedistributeOptions reversed;
    reversed.order = {2, 1, 0};
    DTensor x = zeros(shape, mesh, {Replicate(), Replicate(), Replicate()})
                    .redistribute({Shard(0), Shard(0), Shard(0)}, reversed);
    x.normal_();
    EXPECT_TRUE(same_bits(x.full_tensor(), global));
  });
}

/// Those of one process, without ranks.
TEST(Random, ThoseOfPlainFunctions) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    const Placements placements{Shard(1), Shard(0)};
    auto expect = [&](const std::function<at::Tensor()>& distributed,
                      const std::function<at::Tensor()>& plain) {
      random::manual_seed(3);
      const at::Tensor actual = DTensor(distributed()).full_tensor();
      random::manual_seed(3);
      EXPECT_TRUE(same_bits(actual, plain()));
    };
    const at::Tensor p = (testing::numbers({7, 5}) + 6) / 12, x = testing::numbers({7, 5});
    const at::Tensor dp = distribute_tensor(p, mesh, placements), dx = distribute_tensor(x, mesh, placements);
    expect([&] { return rand({7, 5}, mesh, placements); }, [] { return random::rand({7, 5}); });
    expect([&] { return randn({7, 5}, mesh, placements); }, [] { return random::randn({7, 5}); });
    expect(
        [&] {
          return randint(2, 9, {7, 5}, mesh, placements);
        },
        [] {
          return random::randint(2, 9, {7, 5});
        });
    expect(
        [&] {
          return randperm(70000, mesh, {Shard(0), Shard(0)});
        },
        [] { return random::randperm(70000); });
    expect([&] { return at::bernoulli(dp); }, [&] { return random::bernoulli(p); });
    expect([&] { return at::multinomial(dp, 3); }, [&] { return random::multinomial(p, 3); });
    expect([&] { return at::dropout(dx, 0.3, true); }, [&] { return random::dropout(x, 0.3); });
    expect([&] { return dx.clone().exponential_(3); },
           [&] {
             return random::exponential_(at::empty({7, 5}), 3);
           });
  });
}

TEST(Random, NothingIsCommunicated) {
  auto check = [](const testing::Function& function, const Placement& placement, const Placement& result) {
    testing::expect_no_communication(function, {testing::numbers({8, 6}) * 0.05 + 0.5}, {placement}, result);
  };
  for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Partial()}) {
    const Placement global = placement.is_partial() ? Replicate() : placement;
    check([](const testing::Tensors& x) { return at::Tensor(x[0]).uniform_(); }, placement, placement);
    check([](const testing::Tensors& x) { return at::Tensor(x[0]).random_(3, 5); }, placement, placement);
    check([](const testing::Tensors& x) { return at::randn_like(x[0]); }, placement, global);
    check([](const testing::Tensors& x) { return at::dropout(x[0], 0.5, true); }, placement, placement);
    if (placement.is_partial()) continue;
    check([](const testing::Tensors& x) { return at::bernoulli(x[0]); }, placement, placement);
    check([](const testing::Tensors& x) { return at::normal(x[0], x[0]); }, placement, placement);
    check([](const testing::Tensors& x) { return at::feature_dropout(x[0], 0.5, true); }, placement,
          placement);
    check([](const testing::Tensors& x) { return at::alpha_dropout(x[0], 0.5, true); }, placement, placement);
    check([](const testing::Tensors& x) { return at::rrelu(x[0] - 0.5, 0.1, 0.3, true); }, placement,
          placement);
  }
  check([](const testing::Tensors& x) { return at::multinomial(x[0], 2); }, Shard(0), Shard(0));
  // None takes the replicated fallback.
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const auto before = fallback_counts();
    rand({4}, mesh, {Shard(0)}).normal_().bernoulli_(0.5).cauchy_().log_normal_().geometric_(0.5);
    EXPECT_EQ(fallback_counts(), before);
  });
}

/// The mask of the forward pass is that of the backward pass, and the same however the input is placed.
TEST(Random, GradientsOfDropout) {
  random::manual_seed(kSeed);
  const at::Tensor values = testing::numbers({6, 5});
  at::Tensor expected;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1}, {3}, {2, 2}}) {
    std::mutex mutex;
    run(c10::multiply_integers(shape), [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), shape);
      for (const Placements& placements : all_placements(mesh.ndim(), 2, true)) {
        for (const bool feature : {false, true}) {
          random::manual_seed(kSeed, mesh);
          const at::Tensor x = distribute_tensor(values, mesh, placements).requires_grad_();
          const at::Tensor y = feature ? at::feature_dropout(x, 0.5, true) : at::dropout(x, 0.5, true);
          (y * 3).sum().backward();
          const at::Tensor factors = DTensor(x.grad()).full_tensor().cpu() / 3;
          EXPECT_TRUE(at::equal(DTensor(y.detach()).full_tensor(), values * factors)) << placements;
          if (feature) continue;
          const std::lock_guard lock(mutex);
          if (!expected.defined()) expected = factors;
          EXPECT_TRUE(at::equal(factors, expected)) << placements;
        }
      }
    });
  }
}

TEST(Random, AttentionWithDropout) {
  at::Tensor expected;
  for (const int64_t ranks : {1, 4}) {
    std::mutex mutex;
    run(ranks, [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), {ranks});
      for (const Placement& placement : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
        random::manual_seed(kSeed, mesh);
        const at::Tensor q =
            distribute_tensor(testing::numbers({2, 4, 5, 8}) * 0.1, mesh, {placement}).requires_grad_();
        const at::Tensor y = at::scaled_dot_product_attention(q, q, q, {}, 0.5);
        y.sum().backward();
        const at::Tensor both =
            at::stack({DTensor(y.detach()).full_tensor(), DTensor(q.grad()).full_tensor()});
        const std::lock_guard lock(mutex);
        if (!expected.defined()) expected = both;
        testing::expect_close(both, expected, placement.str());
      }
    });
  }
}

/// What is computed again in the backward pass draws the same numbers again.
TEST(Random, Replay) {
  run(3, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {3});
    random::manual_seed(1);
    const at::Tensor x = distribute_tensor(testing::numbers({6, 4}), mesh, {Shard(0)});
    const random::Snapshot before = random::get_state();
    const at::Tensor first = at::dropout(x, 0.5, true);
    const at::Tensor second = at::dropout(x, 0.5, true);
    EXPECT_FALSE(at::equal(first, second));
    const random::Snapshot after = random::get_state();
    {
      const random::ReplayScope again(before);
      EXPECT_TRUE(at::equal(at::dropout(x, 0.5, true), first));
    }
    EXPECT_EQ(random::get_state(), after);
    random::set_state(random::Snapshot::parse(before.str()));
    EXPECT_TRUE(at::equal(at::dropout(x, 0.5, true), first));
  });
}

/// Ranks that do not all do the same need generators of their own.
TEST(Random, SomeRanksHaveTheirOwn) {
  run(4, [] {
    const DeviceMesh root = init_device_mesh(test_device(), {2, 2}, {"stage", "tp"});
    const DeviceMesh mine = root["tp"];
    random::manual_seed(1, root);
    const int64_t stage = root.get_local_rank("stage");
    random::manual_seed(100 + static_cast<uint64_t>(stage), mine);
    for (int64_t i = 0; i <= stage; ++i) rand({3}, mine, {Shard(0)});
    EXPECT_EQ(random::default_generator(mine).state(),
              (random::State{100 + static_cast<uint64_t>(stage), 0, 1 + static_cast<uint64_t>(stage)}));
    EXPECT_EQ(random::default_generator(root).state(), (random::State{1, 0, 0})) << "of all ranks";
    EXPECT_EQ(random::default_generator(root["stage"]).state().seed, 1u) << "no stage has all of its ranks";
    random::check_agreement(root);
    random::check_agreement(mine);
    const random::Snapshot snapshot = random::get_state();
    EXPECT_EQ(random::Snapshot::parse(snapshot.str()), snapshot);
    rand({3}, mine, {Shard(0)});
    random::set_state(snapshot);
    EXPECT_EQ(random::get_state(), snapshot);
    // All start again.
    random::manual_seed(2);
    EXPECT_EQ(random::default_generator(mine).state(), (random::State{2, 0, 0}));
  });
  // A rank outside the mesh is not concerned.
  run(3, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    random::manual_seed(1);
    random::manual_seed(5, mesh);
    EXPECT_EQ(random::default_generator(mesh).state().seed, mesh.is_member() ? 5u : 1u);
    const DTensor x = randn({4}, mesh, {Shard(0)});
    if (mesh.is_member()) {
      random::GeneratorScope of_one(random::Generator(5));
      EXPECT_TRUE(same_bits(x.full_tensor(), random::randn({4})));
    }
  });
}

TEST(Random, NumbersOfEachRank) {
  std::mutex mutex;
  std::vector<at::Tensor> first(4), of_torch(4);
  for (int round = 0; round < 2; ++round) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), {4});
      random::manual_seed(8);
      const at::Tensor mine = random::randn({100}, {}, random::rank_generator());
      const at::Tensor plain = at::randn({100}, random::torch_generator());
      EXPECT_FALSE(at::equal(random::randn({100}, {}, random::rank_generator()), mine));
      random::check_agreement(mesh);  // others were not disturbed
      const std::lock_guard lock(mutex);
      for (const at::Tensor& other : round == 0 ? first : std::vector<at::Tensor>{})
        EXPECT_TRUE(!other.defined() || !at::equal(other, mine));
      if (round == 1) {
        EXPECT_TRUE(same_bits(mine, first[get_rank()]));
        EXPECT_TRUE(same_bits(plain, of_torch[get_rank()]));
      }
      first[get_rank()] = mine;
      of_torch[get_rank()] = plain;
    });
  }
}

TEST(Random, DifferentSeedsAreFound) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    random::manual_seed(get_rank() == 2 ? 6 : 5);
    expect_error<c10::Error>([&] { random::check_agreement(mesh); },
                             {"rank 0 is at seed 5 stream 0 call 0", "rank 2 at seed 6"});
    random::manual_seed(5);
    random::check_agreement(mesh);
    if (get_rank() == 3) random::randn({2});
    random::set_checks_agreement(true);
    expect_error<c10::Error>(
        [&] {
          rand({4}, mesh, {Replicate(), Shard(0)});
        },
        {"rank 3 at seed 5 stream 0 call 1", "rank_generator"});
    random::manual_seed(5);
    rand({4}, mesh, {Replicate(), Shard(0)}).normal_();
    // Before others go on with theirs.
    random::check_agreement(mesh);
    random::set_checks_agreement(false);
  });
}

/// Given by the user: in the same state on all ranks.
TEST(Random, GeneratorsOfLibtorch) {
  at::Tensor expected;
  std::mutex mutex;
  for (const int64_t ranks : {1, 3}) {
    run(ranks, [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), {ranks});
      const auto state = random::get_state();
      for (const Placement& placement : {Replicate(), Shard(0), Partial()}) {
        const at::Generator given = at::make_generator<at::CPUGeneratorImpl>(3);
        at::Tensor x = empty({5}, mesh, {placement});
        x.normal_(0, 1, given);
        x = at::cat({x, at::rand_like(x, given), at::poisson(at::full_like(x, 5), given)});
        const at::Tensor global = DTensor(x).full_tensor();
        const std::lock_guard lock(mutex);
        if (!expected.defined()) expected = global;
        EXPECT_TRUE(same_bits(global, expected)) << placement;
      }
      EXPECT_EQ(random::get_state(), state) << "ours is not disturbed";
    });
  }
}

TEST(Random, PartialIsWhatWasDrawnForTheGlobalTensor) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
      at::Tensor x = zeros({5}, mesh, {Partial(op)});
      random::manual_seed(1);
      x.uniform_();
      random::manual_seed(1);
      EXPECT_TRUE(same_bits(DTensor(x).full_tensor(), random::rand({5})));
      EXPECT_EQ(DTensor(x).placements(), Placements{Partial(op)});
    }
  });
}

TEST(Random, ErrorsAreForPeople) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    at::Tensor x = empty({4}, mesh, {Shard(0)}), global = empty({4}, mesh, {Shard(0)}, at::kInt);
    expect_error<c10::Error>([&] { x.uniform_(2, 1); }, {"uniform", "ascending"});
    expect_error<c10::NotImplementedError>([&] { global.normal_(); }, {"normal", "Int"});
    expect_error<c10::Error>([&] { at::dropout(x, 2, true); }, {"dropout", "from 0 to 1"});
    expect_error<c10::Error>([&] { randperm(-1, mesh, {Replicate()}); }, {"randperm"});
  });
}

/// As processes: the same numbers as those of threads.
RANK_BODY(random_on_processes) {
  launch(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    random::manual_seed(kSeed, mesh);
    const DTensor x = randn({5, 3}, mesh, {Shard(0)});
    const at::Tensor y = at::dropout(x, 0.5, true);
    random::check_agreement(mesh);
    const at::Tensor all = at::stack({x.full_tensor(), DTensor(y).full_tensor()});
    random::manual_seed(kSeed);
    const at::Tensor plain = random::randn({5, 3});
    EXPECT_TRUE(same_bits(all, at::stack({plain, random::dropout(plain, 0.5)})));
  });
}
TEST(Random, OnProcesses) { testing::expect_ok(testing::spawn_ranks("random_on_processes", 2)); }

}  // namespace
}  // namespace tessera
