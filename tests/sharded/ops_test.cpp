// Operators on sharded tensors: the built-in ones, those that users register, and what happens without any.

#include <tessera/comm/collectives.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/shard_tensor.h>

#include <atomic>
#include <cmath>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/sharded/specs.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::chunks;
using testing::error_of;
using testing::expect_error;
using testing::global_tensor;
using testing::on_ranks;

// --- built in

TEST(ShardedOps, EqualAndAllclose) {
  on_ranks(4, [](int64_t rank) {
    const auto spec = chunks(0, {0, 1, 2, 3});
    const at::Tensor a = ones(spec, {10, 4}), b = ones(spec, {10, 4});
    EXPECT_TRUE(at::equal(a, b));
    EXPECT_TRUE(at::allclose(a, b));
    // One rank's difference is everybody's answer.
    if (rank == 2) ShardedTensor(b).local_tensor().add_(1e-7);
    EXPECT_FALSE(at::equal(a, b));
    EXPECT_TRUE(at::allclose(a, b));
    if (rank == 2) ShardedTensor(b).local_tensor().add_(1);
    EXPECT_FALSE(at::allclose(a, b));
    EXPECT_TRUE(at::allclose(a, b, 0, 2));
    for (const at::Tensor& other : std::vector<at::Tensor>{
             ones(chunks(1, {0, 1, 2, 3}), {10, 4}), ones(chunks(0, {3, 2, 1, 0}), {10, 4}),
             ones(spec, {10, 4}, {.dtype = at::kDouble}), ones(spec, {12, 4}),
             ones(spec, {10, 4}, {.requires_grad = true})}) {
      EXPECT_FALSE(at::equal(a, other));
      EXPECT_FALSE(at::allclose(a, other));
    }
    // The same shards in another order are the same tensor.
    std::vector<ShardMetadata> shards = ShardedTensor(a).metadata().shards_metadata;
    std::mt19937 random(3);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor values = global_tensor({10, 4});
      std::shuffle(shards.begin(), shards.end(), random);
      const at::Tensor shuffled = shard_tensor(values, EnumerableShardingSpec(shards));
      const at::Tensor ordered = shard_tensor(values, spec);
      EXPECT_TRUE(at::equal(ordered, shuffled) && at::equal(shuffled, ordered));
      EXPECT_TRUE(at::allclose(ordered, shuffled));
      const at::Tensor sum = ordered + shuffled;
      EXPECT_TRUE(at::equal(sum, shard_tensor(values * 2, spec)));
      const at::Tensor copied = at::zeros_like(ordered).copy_(shuffled);
      EXPECT_TRUE(at::equal(copied, ordered));
    }
    expect_error<c10::Error>([&] { at::equal(a, at::ones({10, 4})); }, {"equal", "plain"});
    expect_error<c10::Error>([&] { at::allclose(at::ones({10, 4}), a); }, {"allclose", "plain"});
    const Group other = current_world()->group({3, 2, 1, 0}, at::kCPU);
    const at::Tensor elsewhere = ones(spec, {10, 4}, {.process_group = other});
    expect_error<c10::Error>([&] { at::equal(a, elsewhere); }, {"different groups"});
  });
}

TEST(ShardedOps, CopiesAreCopies) {
  on_ranks(2, [](int64_t rank) {
    const ShardedTensor tensor = rand(chunks(0, {0, 1, 1}), {6, 2}, {.requires_grad = true});
    const at::Tensor plain = tensor;
    const ShardedTensor cloned = plain.clone();
    EXPECT_TRUE(cloned.requires_grad() && !cloned.local_shards()[0].tensor.is_leaf());
    EXPECT_TRUE(at::equal(plain, cloned));
    EXPECT_FALSE(cloned.local_shards()[0].tensor.is_alias_of(tensor.local_shards()[0].tensor));
    EXPECT_EQ(cloned.local_shards().size(), rank + 1);
    cloned.local_shards()[0].tensor.sum().backward();
    EXPECT_TRUE(tensor.local_shards()[0].tensor.grad().defined());

    const ShardedTensor detached = plain.detach();
    EXPECT_FALSE(detached.requires_grad() || detached.local_shards()[0].tensor.requires_grad());
    EXPECT_FALSE(detached.metadata().tensor_properties.requires_grad);
    EXPECT_TRUE(detached.local_shards()[0].tensor.is_alias_of(tensor.local_shards()[0].tensor));

    const ShardedTensor deep = deepcopy(tensor);
    EXPECT_TRUE(deep.requires_grad() && deep.local_shards()[0].tensor.is_leaf());
    EXPECT_FALSE(deep.local_shards()[0].tensor.is_alias_of(tensor.local_shards()[0].tensor));
    EXPECT_TRUE(at::equal(deep, plain));

    const ShardedTensor target = zeros(chunks(0, {0, 1, 1}), {6, 2});
    at::Tensor(target).copy_(plain.detach());
    EXPECT_TRUE(at::equal(target, plain.detach()));
    const at::Tensor otherwise = zeros(chunks(1, {0, 1}), {6, 2});
    expect_error<c10::Error>([&] { at::Tensor(target).copy_(otherwise); },
                             {"sharded differently", "reshard"});
    expect_error<c10::Error>([&] { at::Tensor(target).copy_(at::ones({6, 2})); }, {"plain"});
    expect_error<c10::Error>([&] { plain.clone(at::MemoryFormat::ChannelsLast); }, {"memory format"});
    EXPECT_TRUE(plain.contiguous().is_same(plain));
    EXPECT_FALSE(ShardedTensor(plain.data()).requires_grad());
  });
}

TEST(ShardedOps, CastsAsAnyTensor) {
  on_ranks(2, [](int64_t) {
    const at::Tensor tensor = rand(chunks(1, {1, 0}), {4, 6});
    auto is_double = [](const at::Tensor& cast) {
      return ShardedTensor(cast).local_tensor().scalar_type() == at::kDouble &&
             cast.scalar_type() == at::kDouble;
    };
    EXPECT_TRUE(is_double(tensor.to(at::kDouble)));
    EXPECT_TRUE(is_double(tensor.to(at::TensorOptions(at::kDouble))));
    EXPECT_TRUE(is_double(tensor.to(at::kCPU, at::kDouble)));
    EXPECT_TRUE(is_double(tensor.to(at::ones({1}, at::kDouble))));
    EXPECT_TRUE(is_double(tensor.type_as(at::ones({1}, at::kDouble))));
    EXPECT_TRUE(is_double(tensor.type_as(ones(chunks(0, {0, 1}), {2}, {.dtype = at::kDouble}))));
    EXPECT_TRUE(tensor.type_as(tensor).is_same(tensor));
    EXPECT_TRUE(tensor.to(at::kFloat).is_same(tensor));
    EXPECT_TRUE(tensor.cpu().is_same(tensor));
    EXPECT_FALSE(tensor.is_pinned());
    EXPECT_TRUE(tensor.to(at::kMeta).is_meta());
    EXPECT_FALSE(tensor.is_meta());
  });
}

TEST(ShardedOps, NewOnesLikeAnother) {
  on_ranks(2, [](int64_t) {
    const at::Tensor tensor = rand(chunks(0, {1, 0, 1}), {7, 3}, {.dtype = at::kDouble});
    auto all = [](const at::Tensor& like, double value) {
      bool same = true;
      for (const LocalShard& shard : ShardedTensor(like).local_shards())
        same &= (shard.tensor == value).all().item<bool>();
      return same;
    };
    for (const at::Tensor& like : {at::zeros_like(tensor), at::ones_like(tensor), at::full_like(tensor, 3),
                                   at::rand_like(tensor), at::randn_like(tensor), at::empty_like(tensor)}) {
      EXPECT_EQ(ShardedTensor(like).metadata(), ShardedTensor(tensor).metadata());
      EXPECT_TRUE(ShardedTensor(like).sharding_spec() == ShardedTensor(tensor).sharding_spec());
    }
    EXPECT_TRUE(all(at::zeros_like(tensor), 0) && all(at::ones_like(tensor), 1) &&
                all(at::full_like(tensor, 3), 3));
    EXPECT_EQ(at::zeros_like(tensor, at::kInt).scalar_type(), at::kInt);
    expect_error<c10::Error>([&] { at::zeros_like(tensor, at::TensorOptions(at::kMeta)); },
                             {"zeros_like", "meta"});
  });
}

TEST(ShardedOps, Initialisers) {
  on_ranks(2, [](int64_t) {
    const ShardedTensor tensor = empty(chunks(0, {0, 1}), {100, 50}, {.requires_grad = true});
    auto extremes = [&] {
      const at::Tensor local = tensor.local_tensor().detach();
      return std::pair(local.min().item<double>(), local.max().item<double>());
    };
    EXPECT_TRUE(init::uniform_(tensor, 2, 3).is_same(tensor));
    EXPECT_GE(extremes().first, 2);
    EXPECT_LE(extremes().second, 3);
    init::normal_(tensor, 10, 0.1);
    EXPECT_NEAR(tensor.local_tensor().mean().item<double>(), 10, 0.1);
    init::constant_(tensor, 4);
    EXPECT_EQ(extremes(), std::pair(4.0, 4.0));
    // The fan is that of the whole tensor, not of the shard.
    for (const auto mode : {init::FanMode::fan_in, init::FanMode::fan_out}) {
      init::kaiming_uniform_(tensor, std::sqrt(5), mode);
      const double bound = 1 / std::sqrt(mode == init::FanMode::fan_in ? 50 : 100);
      EXPECT_LE(extremes().second, bound);
      EXPECT_GE(extremes().second, 0.95 * bound);
      EXPECT_LE(extremes().first, -0.95 * bound);
    }
    EXPECT_TRUE(tensor.requires_grad() && tensor.local_tensor().is_leaf());
    const at::NoGradGuard no_grad;
    const at::Tensor plain = tensor;
    plain.uniform_(-2, -1);  // as torch::nn::init does
    EXPECT_LE(extremes().second, -1);
    plain.zero_();
    EXPECT_EQ(extremes(), std::pair(0.0, 0.0));
    expect_error<c10::ValueError>([&] { init::kaiming_uniform_(empty(chunks(0, {0, 1}), {4})); }, {"2 dims"});
  });
}

// --- without an implementation

TEST(ShardedOps, UnknownOnesSaySo) {
  on_ranks(2, [](int64_t) {
    const at::Tensor tensor = ones(chunks(0, {0, 1}), {4, 4});
    expect_error<c10::Error>(
        [&] {
          at::mm(tensor, at::ones({4, 4}));
        },
        {"aten::mm", "'self'", "custom_sharded_op(\"aten::mm\"", "gather()", "local_shards()"});
    expect_error<c10::Error>([&] { at::mm(at::ones({4, 4}), tensor); }, {"aten::mm", "'mat2'"});
    expect_error<c10::Error>([&] { at::cat({at::ones({4, 4}), tensor}); }, {"aten::cat", "'tensors'"});
    expect_error<c10::Error>(
        [&] {
          at::conv1d(at::ones({1, 4, 4}), tensor.to(at::kFloat));
        },
        {"aten::conv1d"});
    expect_error<c10::Error>([&] { tensor.cumsum_(0); }, {"aten::cumsum_"});
    expect_error<c10::Error>([&] { tensor.sum().item(); }, {"aten::sum"});
    expect_error<c10::Error>([&] { tensor.index({at::ones({1}, at::kLong)}); }, {"aten::index.Tensor"});
    // Among distributed tensors too.
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor distributed = distribute_tensor(at::ones({4, 4}), mesh, {Replicate()});
    expect_error<c10::Error>([&] { at::mm(distributed, tensor); }, {"aten::mm", "'mat2'"});
    EXPECT_FALSE(DTensor::is_dtensor(tensor));
    EXPECT_FALSE(ShardedTensor::is_sharded_tensor(distributed));
    EXPECT_THROW(DTensor{tensor}, c10::Error);
  });
}

// --- element by element

/// As on one device, also on ranks that hold several shards, or none, and with gradients.
TEST(ShardedOps, PointwiseOnesComputeOnLocalShards) {
  on_ranks(4, [](int64_t) {
    const at::Tensor a = global_tensor({7, 5}) / 10 + 1, b = (global_tensor({7, 5}) - 7) / 3;
    for (const ShardingSpecPtr& spec :
         {chunks(0, {0, 1, 2, 3}).clone(), chunks(1, {0, 2, 0}).clone(), testing::irregular_spec().clone()}) {
      auto same = [&](const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& function) {
        at::Tensor x = a.clone().requires_grad_(), y = b.clone();
        const ShardedTensor p = shard_tensor(x, *spec), q = shard_tensor(y, *spec);
        const at::Tensor expected = function(x, y);
        const ShardedTensor actual = function(p, q);
        EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
        EXPECT_EQ(actual.requires_grad(), expected.requires_grad());
        auto close = [](const ShardedTensor& sharded, const at::Tensor& all) {
          for (const LocalShard& shard : sharded.local_shards()) {
            const at::Tensor mine =
                testing::part(all, shard.metadata.shard_offsets, shard.metadata.shard_sizes);
            EXPECT_TRUE(at::allclose(shard.tensor.detach(), mine)) << shard.metadata;
          }
        };
        close(actual, expected);
        close(q, y);
        if (!expected.requires_grad()) return;
        (expected * b).sum().backward();
        actual.backward(at::Tensor(shard_tensor(b, *spec)));
        close(p.grad(), x.grad());
      };
      same([](auto& x, auto& y) { return x * y + 2; });
      same([](auto& x, auto& y) { return at::addcdiv(x, y, x, 0.5).abs().sqrt(); });
      same([](auto& x, auto& y) { return at::where(y > 0, x, y); });
      same([](auto& x, auto&) { return x * at::full({}, 3.f) / at::full({1}, 7.f); });
      same([](auto& x, auto& y) { return x.detach() > y; });
      same([](auto& x, auto& y) { return y.add_(x.detach(), 3).clamp_(-1, 2); });
      same([](auto& x, at::Tensor y) { return at::maximum_out(y, x.detach(), y); });
      same([](auto& x, at::Tensor y) { return at::max_out(y, x.detach(), y); });
      const at::Tensor x = shard_tensor(a, *spec);
      EXPECT_TRUE(x.add_(1).is_same(x));
      expect_error<c10::Error>([&] { x + a; }, {"aten::add.Tensor", "'other'", "[7, 5]", "shard_tensor"});
      expect_error<c10::Error>([&] { a + x; }, {"aten::add.Tensor", "'self'"});
      expect_error<c10::Error>([&] { x + ones(chunks(0, {3}), {7, 5}); }, {"sharded differently", "reshard"});
      expect_error<c10::Error>([&] { at::bernoulli(x); }, {"aten::bernoulli"});
    }
  });
}

TEST(ShardedOps, Reductions) {
  on_ranks(4, [](int64_t) {
    const double inf = std::numeric_limits<double>::infinity();
    for (const ShardingSpecPtr& spec :
         {chunks(0, {0, 1, 2, 3}).clone(), chunks(1, {0, 2, 0}).clone(), testing::irregular_spec().clone()}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
        const at::Tensor global = ((global_tensor({7, 5}) - 9) / 4).to(dtype);
        const at::Tensor tensor = shard_tensor(global, *spec);
        for (const double p : {2.0, 1.0, 3.0, 0.0, -1.0, inf, -inf}) {
          const at::Tensor norm = tensor.norm(p), expected = global.norm(p);
          EXPECT_EQ(norm.scalar_type(), expected.scalar_type());
          EXPECT_TRUE(at::equal(at::linalg_vector_norm(tensor, p), norm));
          EXPECT_TRUE(at::allclose(norm, expected, 1e-2)) << p << norm << expected;
        }
        if (dtype == at::kComplexFloat) continue;
        EXPECT_TRUE(at::equal(tensor.max(), global.max()) && at::equal(tensor.min(), global.min()));
        const at::Tensor broken = global.clone();
        broken[6][4] = std::numeric_limits<double>::quiet_NaN();
        EXPECT_TRUE(shard_tensor(broken, *spec).max().isnan().item<bool>());
        EXPECT_TRUE(shard_tensor(broken, *spec).norm().isnan().item<bool>());
      }
      EXPECT_EQ(at::max(shard_tensor(global_tensor({7, 5}).to(at::kLong) - 50, *spec)).item<int64_t>(), -16);
    }
    EXPECT_EQ(zeros(chunks(0, {0, 1, 2, 3}), {0, 3}).norm().item<double>(), 0);
    EXPECT_THROW(zeros(chunks(0, {0, 1, 2, 3}), {0, 3}).max(), c10::Error);
  });
}

// --- registered by users

/// x W^T + b with W sharded by its rows: each rank computes its columns of the result, for the
/// inputs of all ranks, and they are exchanged. This is the example of docs/sharded.md.
at::Tensor sharded_linear(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias) {
  const ShardedTensor table(weight);
  const Members& members = table.process_group();
  std::vector<at::Tensor> inputs(members.size());
  for (at::Tensor& each : inputs) each = at::empty_like(input);
  comm::all_gather(inputs, input, members.group()).wait();
  std::vector<at::Tensor> mine, theirs;
  for (const at::Tensor& each : inputs) mine.push_back(at::linear(each, table.local_tensor()).contiguous());
  for (const ShardMetadata& shard : table.metadata().shards_metadata)
    theirs.push_back(at::empty({input.size(0), shard.shard_sizes[0]}));
  comm::all_to_all(theirs, mine, members.group()).wait();
  at::Tensor result = at::cat(theirs, 1);
  return bias ? result + *bias : result;
}

TEST(CustomOps, AShardedLinear) {
  custom_sharded_op("aten::linear", sharded_linear);
  on_ranks(4, [](int64_t rank) {
    const at::NoGradGuard no_grad;
    const at::Tensor weight = global_tensor({10, 3}) / 10, bias = global_tensor({10});
    const at::Tensor input = global_tensor({5, 3}) + rank;
    const at::Tensor sharded = shard_tensor(weight, chunks(0, {0, 1, 2, 3}));
    EXPECT_TRUE(at::allclose(at::linear(input, sharded, bias), at::linear(input, weight, bias)));
    EXPECT_TRUE(at::allclose(at::linear(input, sharded), at::linear(input, weight)));
  });
}

TEST(CustomOps, ComputeOnLocalShardsWithGradients) {
  custom_sharded_op("aten::gelu", on_local_shards);
  custom_sharded_op("aten::mul.Tensor", on_local_shards);
  on_ranks(2, [](int64_t) {
    const ShardedTensor tensor = rand(chunks(0, {0, 1, 0}), {5, 3}, {.requires_grad = true});
    const ShardedTensor result = at::gelu(tensor);
    EXPECT_TRUE(result.sharding_spec() == tensor.sharding_spec());
    for (size_t i = 0; i < tensor.local_shards().size(); ++i) {
      const at::Tensor& local = tensor.local_shards()[i].tensor;
      EXPECT_TRUE(at::equal(result.local_shards()[i].tensor, at::gelu(local)));
      result.local_shards()[i].tensor.sum().backward();
      EXPECT_TRUE(local.grad().defined());
    }
    const ShardedTensor product = at::mul(tensor, tensor);
    EXPECT_TRUE(at::equal(product.local_shards()[0].tensor, tensor.local_shards()[0].tensor.square()));
    const at::Tensor otherwise = rand(chunks(1, {0, 1}), {5, 3});
    expect_error<c10::Error>([&] { at::mul(tensor, otherwise); }, {"sharded differently"});
  });
}

class MySpec final : public ShardingSpec {
 public:
  ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                       const TensorProperties& properties) const override {
    return chunks(0, {1, 0}).build_metadata(size, properties);
  }
  std::string str() const override { return "mine"; }
  ShardingSpecPtr clone() const override { return std::make_shared<MySpec>(); }
};

TEST(CustomOps, OfASpecsClassAreForItsTensors) {
  std::atomic<int> calls = 0;
  custom_sharding_spec_op<MySpec>("aten::trace", [&](const at::Tensor& self) {
    ++calls;
    return self;
  });
  // Before what is built in, after what is registered for all.
  custom_sharding_spec_op<MySpec>("aten::detach", [](const at::Tensor& self) { return self; });
  on_ranks(2, [](int64_t) {
    const at::Tensor mine = zeros(MySpec(), {4}), other = zeros(chunks(0, {0, 1}), {4});
    EXPECT_TRUE(at::trace(mine).is_same(mine));
    expect_error<c10::Error>([&] { at::trace(other); }, {"aten::trace"});
    EXPECT_TRUE(mine.detach().is_same(mine));
    EXPECT_FALSE(other.detach().is_same(other));
  });
  EXPECT_EQ(calls, 2);
  custom_sharded_op("aten::trace", [](const at::Tensor& self) { return at::zeros_like(self); });
  on_ranks(2, [&](int64_t) {
    const at::Tensor mine = zeros(MySpec(), {4});
    EXPECT_FALSE(at::trace(mine).is_same(mine));
  });
  EXPECT_EQ(calls, 2);
}

TEST(CustomOps, AreChecked) {
  expect_error<c10::ValueError>([] { custom_sharded_op("aten::linaer", sharded_linear); }, {"aten::linaer"});
  expect_error<c10::ValueError>([] { custom_sharded_op("aten::add", sharded_linear); }, {"aten::add.Tensor"});
  expect_error<c10::ValueError>([] { custom_sharded_op("aten::relu", sharded_linear); },
                                {"signature", "aten::relu"});
  expect_error<c10::ValueError>(
      [] { custom_sharded_op("aten::relu", [](const at::Tensor&) { return int64_t{1}; }); }, {"signature"});
  const auto known = sharded_ops();
  for (const char* name :
       {"aten::equal", "aten::embedding", "aten::embedding_bag.padding_idx", "aten::clone"})
    EXPECT_TRUE(std::find(known.begin(), known.end(), name) != known.end()) << name;
}

}  // namespace
}  // namespace tessera::sharded
