// Sharded tensors on ranks that are threads: how they are made, checked, gathered, resharded and moved.

#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/random/generator.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor.h>

#include <mutex>
#include <random>
#include <sstream>
#include <unordered_set>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/sharded/specs.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::chunks;
using testing::error_of;
using testing::expect_close;
using testing::expect_error;
using testing::expect_parts;
using testing::global_tensor;
using testing::grid_spec;
using testing::irregular_spec;
using testing::on_ranks;
using testing::part;
using testing::random_spec;

// --- made from specs

TEST(ShardedTensorInit, EachRankHoldsItsShards) {
  on_ranks(4, [](int64_t rank) {
    const ShardedTensor tensor = zeros(chunks(0, {0, 1, 2, 3}), {10, 6}, {.dtype = at::kDouble});
    ASSERT_EQ(tensor.local_shards().size(), 1);
    EXPECT_EQ(tensor.local_tensor().sizes(), at::IntArrayRef({rank < 3 ? 3 : 1, 6}));
    EXPECT_EQ(tensor.local_tensor().scalar_type(), at::kDouble);
    EXPECT_EQ(tensor.local_shards()[0].metadata.shard_offsets, (std::vector<int64_t>{3 * rank, 0}));
    EXPECT_EQ(tensor.metadata().shards_metadata.size(), 4);
    // It is a tensor as a whole.
    const at::Tensor global = tensor;
    EXPECT_EQ(global.sizes(), at::IntArrayRef({10, 6}));
    EXPECT_EQ(global.dim(), 2);
    EXPECT_EQ(global.size(0), 10);
    EXPECT_EQ(global.numel(), 60);
    EXPECT_EQ(global.scalar_type(), at::kDouble);
    EXPECT_EQ(global.device(), at::kCPU);
    EXPECT_EQ(global.layout(), at::kStrided);
    EXPECT_TRUE(global.is_contiguous() && global.is_floating_point() && !global.requires_grad());
    EXPECT_TRUE(ShardedTensor::is_sharded_tensor(global));
    EXPECT_TRUE(ShardedTensor(global).is_same(tensor));
    EXPECT_TRUE(tensor.sharding_spec() == chunks(0, {0, 1, 2, 3}));
    EXPECT_FALSE(ShardedTensor::is_sharded_tensor(at::ones({2})));
    EXPECT_THROW(ShardedTensor(at::ones({2})), c10::Error);
    expect_error<c10::Error>([&] { global.const_data_ptr(); }, {"ShardedTensor"});
  });
}

TEST(ShardedTensorInit, FewerRowsThanRanks) {
  on_ranks(4, [](int64_t rank) {
    const ShardedTensor tensor = ones(chunks(0, {0, 1, 2, 3}), {2, 5});
    EXPECT_EQ(tensor.local_tensor().numel(), rank < 2 ? 5 : 0);
    EXPECT_EQ(tensor.gather(3).defined(), rank == 3);
    const ShardedTensor resharded = tensor.reshard(chunks(1, {0, 1, 2, 3}));
    EXPECT_EQ(resharded.local_tensor().sizes(), at::IntArrayRef({2, rank < 2 ? 2 : rank == 2 ? 1 : 0}));
  });
}

TEST(ShardedTensorInit, PartOfTheWorld) {
  on_ranks(4, [](int64_t rank) {
    // The first rank has no shards; the third has two, and placements are in no order.
    const auto spec = chunks(-1, {3, 2, 1, 2});
    const ShardedTensor tensor = full(spec, {3, 8}, 7);
    EXPECT_EQ(tensor.local_shards().size(), rank == 0 ? 0 : rank == 2 ? 2 : 1);
    expect_error<c10::Error>(
        [&] {
          if (rank % 2 == 0)
            tensor.local_tensor();
          else
            TORCH_CHECK(false, "not one");
        },
        {"not one"});
    const at::Tensor gathered = tensor.gather(0);
    if (rank == 0) EXPECT_TRUE(at::equal(gathered, at::full({3, 8}, 7, at::kFloat)));
    EXPECT_EQ(tensor.device(), at::kCPU);
  });
}

TEST(ShardedTensorInit, SubGroups) {
  on_ranks(4, [](int64_t rank) {
    const auto spec = chunks(0, {1, 3});
    if (rank % 2 == 1) {  // by a group of theirs
      const Group group = current_world()->group({3, 1}, at::kCPU);
      const ShardedTensor tensor = ones(spec, {5, 2}, {.process_group = group});
      EXPECT_EQ(tensor.process_group().ranks(), (std::vector<int64_t>{3, 1}));
      const at::Tensor gathered = tensor.gather(0);  // the first of the group
      EXPECT_EQ(gathered.defined(), rank == 3);
    }
    // By their numbers, on all ranks.
    const ShardedTensor tensor = ones(spec, {5, 2}, {.process_group = {1, 3}});
    EXPECT_EQ(tensor.local_shards().size(), rank % 2);
    if (rank % 2 == 0) {
      expect_error<c10::Error>([&] { tensor.gather(); }, {"not among the ranks [1, 3]"});
      expect_error<c10::Error>([&] { tensor.reshard(chunks(1, {1, 3})); }, {"not among"});
    } else {
      const ShardedTensor resharded = tensor.reshard(chunks(1, {1, 3}));
      EXPECT_EQ(resharded.local_tensor().sizes(), at::IntArrayRef({5, 1}));
    }
    expect_error<c10::ValueError>(
        [&] {
          ones(chunks(0, {0, 1}), {5, 2}, {.process_group = {1, 3}});
        },
        {"rank 0", "[1, 3]"});
  });
}

TEST(ShardedTensorInit, Factories) {
  on_ranks(2, [](int64_t) {
    const auto spec = chunks(0, {0, 1});
    auto all = [](const ShardedTensor& tensor, double value) {
      return (tensor.local_tensor() == value).all().item<bool>();
    };
    EXPECT_TRUE(all(zeros(spec, {4, 2}), 0));
    EXPECT_TRUE(all(ones(spec, {4, 2}), 1));
    EXPECT_TRUE(all(full(spec, {4, 2}, 2.5), 2.5));
    EXPECT_EQ(empty(spec, {4, 2}, {.dtype = at::kInt}).local_tensor().scalar_type(), at::kInt);
    const at::Tensor uniform = rand(spec, {1000, 2}).local_tensor();
    EXPECT_TRUE((uniform >= 0).all().item<bool>() && (uniform < 1).all().item<bool>());
    EXPECT_NEAR(uniform.mean().item<double>(), 0.5, 0.1);
    const at::Tensor normal = randn(spec, {1000, 2}).local_tensor();
    EXPECT_NEAR(normal.mean().item<double>(), 0, 0.2);
    EXPECT_NEAR(normal.std().item<double>(), 1, 0.2);
    const ShardedTensor leaf = rand(spec, {4, 2}, {.requires_grad = true});
    EXPECT_TRUE(leaf.requires_grad() && leaf.local_tensor().requires_grad() && leaf.local_tensor().is_leaf());
    EXPECT_TRUE(leaf.metadata().tensor_properties.requires_grad);
    EXPECT_FALSE(leaf.is_pinned());
    expect_error<c10::ValueError>([&] { empty(spec, {4, 2}, {.layout = at::kSparse}); }, {"strided"});
    expect_error<c10::ValueError>(
        [&] {
          empty(spec, {4, 2}, {.memory_format = at::MemoryFormat::ChannelsLast});
        },
        {"contiguous"});
    expect_error<c10::ValueError>([&] { empty(spec, {-4, 2}); }, {"-4"});
    expect_error<c10::ValueError>([&] { empty(chunks(0, {0, 7}), {4, 2}); }, {"rank 7"});
    expect_error<c10::ValueError>([&] { empty(ChunkShardingSpec(0, {"cpu"}), {4, 2}); }, {"whose"});
    expect_error<c10::Error>([&] { empty(ChunkShardingSpec(0, {"worker/cpu"}), {4, 2}); }, {"worker", "RPC"});
  });
}

// The same seed gives the same tensor, however it is sharded.
TEST(ShardedTensorInit, RandomNumbersDoNotDependOnTheSpec) {
  std::mt19937 random(8);
  const std::vector<ShardingSpecPtr> specs{chunks(0, {0, 1, 2, 3}).clone(), chunks(1, {3, 1}).clone(),
                                           random_spec(random, {7, 5}, 9, 4).clone()};
  on_ranks(4, [&](int64_t rank) {
    std::vector<at::Tensor> first;
    for (const ShardingSpecPtr& spec : specs) {
      tessera::random::manual_seed(5);
      const ShardedTensor uniform = rand(*spec, {7, 5}), normal = randn(*spec, {7, 5});
      std::vector<at::Tensor> drawn{
          uniform.gather(0), normal.gather(0), ShardedTensor(at::rand_like(normal)).gather(0),
          init::uniform_(uniform, -1, 1).gather(0), init::normal_(normal).gather(0)};
      if (rank != 0) continue;
      for (size_t i = 0; i + 1 < drawn.size(); ++i) EXPECT_FALSE(at::equal(drawn[i], drawn[i + 1]));
      if (first.empty()) first = drawn;
      for (size_t i = 0; i < drawn.size(); ++i)
        EXPECT_TRUE(at::equal(drawn[i], first[i])) << i << ' ' << *spec;
    }
  });
}

TEST(ShardedTensorInit, IsPrintedAndHashed) {
  on_ranks(2, [](int64_t) {
    const ShardedTensor tensor = zeros(chunks(0, {0, 1}), {4, 2});
    std::ostringstream out;
    out << tensor;
    EXPECT_EQ(out.str(), "ShardedTensor [4, 2] f32: [0, 0]+[2, 2] rank:0/cpu, [2, 0]+[2, 2] rank:1/cpu");
    std::unordered_set<ShardedTensor> set{tensor, ShardedTensor(at::Tensor(tensor)),
                                          zeros(chunks(0, {0, 1}), {4, 2})};
    EXPECT_EQ(set.size(), 2);
  });
}

TEST(ShardedTensorInit, RequiresGradIsOneTruth) {
  on_ranks(2, [](int64_t) {
    const ShardedTensor tensor = zeros(chunks(0, {0, 1}), {4, 2});
    tensor.requires_grad_();
    EXPECT_TRUE(tensor.requires_grad() && tensor.local_tensor().requires_grad());
    EXPECT_TRUE(tensor.metadata().tensor_properties.requires_grad);
    const at::Tensor plain = tensor;
    plain.set_requires_grad(false);  // as a module does, that knows nothing of shards
    EXPECT_FALSE(tensor.local_tensor().requires_grad());
    EXPECT_FALSE(tensor.metadata().tensor_properties.requires_grad);
    plain.set_requires_grad(true);
    (tensor.local_tensor() * 3).sum().backward();
    ASSERT_TRUE(tensor.grad().defined());
    EXPECT_TRUE(at::equal(tensor.grad().local_tensor(), at::full({2, 2}, 3.f)));
  });
}

// --- made from local shards

TEST(ShardedTensorFromLocalShards, FindsTheGlobalShape) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor global = global_tensor({10, 6});
    // A grid, two shards a rank, on one rank none.
    std::vector<LocalShard> shards;
    if (rank == 0) {
      shards.push_back(LocalShard::from_tensor_and_offsets(part(global, {0, 0}, {5, 2}), {0, 0}, 0));
      shards.push_back(LocalShard::from_tensor_and_offsets(part(global, {5, 0}, {5, 6}), {5, 0}, 0));
    } else if (rank == 2) {
      shards.push_back(LocalShard::from_tensor_and_offsets(part(global, {0, 2}, {5, 3}), {0, 2}, 2));
    } else if (rank == 3) {
      shards.push_back(LocalShard::from_tensor_and_offsets(part(global, {0, 5}, {5, 1}), {0, 5}, 3));
    }
    const ShardedTensor tensor = init_from_local_shards(shards, {10, 6});
    EXPECT_EQ(tensor.metadata().shards_metadata.size(), 4);
    EXPECT_EQ(tensor.local_shards().size(), shards.size());
    if (!shards.empty()) EXPECT_TRUE(tensor.local_shards()[0].tensor.is_same(shards[0].tensor));
    const at::Tensor gathered = tensor.gather(1);
    if (rank == 1) EXPECT_TRUE(at::equal(gathered, global));
  });
}

TEST(ShardedTensorFromLocalShards, KnowsChunks) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor global = global_tensor({10, 6});
    const int64_t place = (rank + 1) % 4, size = place < 3 ? 3 : 1;  // permuted
    const ShardedTensor tensor = init_from_local_shards(
        {LocalShard::from_tensor_and_offsets(part(global, {3 * place, 0}, {size, 6}), {3 * place, 0}, rank)},
        {10, 6});
    EXPECT_TRUE(tensor.sharding_spec() == chunks(0, {3, 0, 1, 2})) << tensor.sharding_spec();
  });
}

TEST(ShardedTensorFromLocalShards, FindsUnknownSizes) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor local = at::full({rank + 1, 3}, rank, at::kFloat);
    const ShardedTensor tensor = init_from_local_shards(
        {LocalShard::from_tensor_and_offsets(local, {0, 0}, rank)}, {kUnknownSize, kUnknownSize});
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({10, 3}));
    EXPECT_EQ(tensor.local_shards()[0].metadata.shard_offsets[0], rank * (rank + 1) / 2);
    const at::Tensor gathered = tensor.gather(0);
    if (rank == 0)
      EXPECT_TRUE(at::equal(gathered.select(1, 0), at::tensor({0, 1, 1, 2, 2, 2, 3, 3, 3, 3}, at::kFloat)));
    expect_error<c10::ValueError>(
        [&] {
          std::vector<LocalShard> shards;
          if (rank > 0) shards.push_back(LocalShard::from_tensor_and_offsets(local, {0, 0}, rank));
          init_from_local_shards(shards, {kUnknownSize, 3});
        },
        {"one shard"});
  });
}

/// What one rank gives that does not fit, and what all ranks must then say.
struct Wrong {
  const char* name;
  std::function<std::vector<LocalShard>(int64_t rank)> shards;
  std::vector<std::string_view> says;
  std::vector<int64_t> size = {8, 4};
};

LocalShard rows(int64_t rank, at::Tensor tensor, std::vector<int64_t> offsets) {
  return LocalShard::from_tensor_and_offsets(std::move(tensor), std::move(offsets), rank);
}

/// Four ranks with two rows each, of which one rank's are replaced.
std::function<std::vector<LocalShard>(int64_t)> with(int64_t culprit,
                                                     std::function<std::vector<LocalShard>()> its) {
  return [=](int64_t rank) {
    return rank == culprit ? its() : std::vector<LocalShard>{rows(rank, at::ones({2, 4}), {2 * rank, 0})};
  };
}

TEST(ShardedTensorFromLocalShards, ErrorsAreThoseOfEveryRank) {
  const std::vector<Wrong> cases = {
      {"overlap",
       with(1,
            [] {
              return std::vector{rows(1, at::ones({2, 4}), {1, 0})};
            }),
       {"overlap"}},
      {"gap", with(1, [] { return std::vector<LocalShard>{}; }), {"none has element [2, 0]"}},
      {"beyond",
       with(3,
            [] {
              return std::vector{rows(3, at::ones({3, 4}), {6, 0})};
            }),
       {"beyond"}},
      {"dtype",
       with(2,
            [] {
              return std::vector{rows(2, at::ones({2, 4}, at::kDouble), {4, 0})};
            }),
       {"dtype", "Float on rank 0", "Double on rank 2"}},
      {"local dtype",
       with(2,
            [] {
              return std::vector{rows(2, at::ones({1, 4}, at::kDouble), {4, 0}),
                                 rows(2, at::ones({1, 4}), {5, 0})};
            }),
       {"on rank 2", "differ in dtype"}},
      {"requires_grad",
       with(3,
            [] {
              return std::vector{rows(3, at::ones({2, 4}).requires_grad_(), {6, 0})};
            }),
       {"requires_grad", "rank 0", "rank 3"}},
      {"local requires_grad",
       with(0,
            [] {
              return std::vector{rows(0, at::ones({1, 4}).requires_grad_(), {0, 0}),
                                 rows(0, at::ones({1, 4}), {1, 0})};
            }),
       {"on rank 0", "requires_grad"}},
      {"not contiguous",
       with(1,
            [] {
              return std::vector{rows(1, at::ones({4, 2}).t(), {2, 0})};
            }),
       {"on rank 1", "not contiguous"}},
      {"wrong rank",
       with(1,
            [] {
              return std::vector{rows(2, at::ones({2, 4}), {2, 0})};
            }),
       {"on rank 1", "placed on rank 2"}},
      {"no such rank",
       with(1,
            [] {
              return std::vector{rows(5, at::ones({2, 4}), {2, 0})};
            }),
       {"on rank 1", "rank 5"}},
      {"sparse",
       with(1,
            [] {
              std::vector<LocalShard> shards(1);
              shards[0].tensor = at::ones({2, 4}).to_sparse();
              shards[0].metadata = {{2, 0}, {2, 4}, "rank:1/cpu"};
              return shards;
            }),
       {"on rank 1", "strided"}},
      {"wrong size",
       with(2,
            [] {
              std::vector<LocalShard> shards{rows(2, at::ones({2, 4}), {4, 0})};
              shards[0].metadata.shard_sizes = {2, 3};
              return shards;
            }),
       {"on rank 2", "has size [2, 4]"}},
      {"wrong device",
       with(2,
            [] {
              std::vector<LocalShard> shards{rows(2, at::ones({2, 4}), {4, 0})};
              shards[0].metadata.placement = "rank:2/cuda:0";
              return shards;
            }),
       {"on rank 2", "lies on cpu"}},
      {"no placement",
       with(2,
            [] {
              std::vector<LocalShard> shards{rows(2, at::ones({2, 4}), {4, 0})};
              shards[0].metadata.placement = std::nullopt;
              return shards;
            }),
       {"on rank 2", "needs a placement"}},
      {"no tensor", with(2, [] { return std::vector<LocalShard>(1); }), {"on rank 2", "no tensor"}},
      {"dims", with(2, [] { return std::vector{rows(2, at::ones({8}), {0})}; }), {"number of dims"}},
      {"nothing", [](int64_t) { return std::vector<LocalShard>{}; }, {"no rank"}},
  };
  on_ranks(4, [&](int64_t rank) {
    for (const Wrong& wrong : cases) {
      SCOPED_TRACE(wrong.name);
      const std::string message =
          error_of<c10::ValueError>([&] { init_from_local_shards(wrong.shards(rank), wrong.size); });
      for (const std::string_view part : wrong.says)
        EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
    }
    expect_error<c10::ValueError>(
        [&] {
          init_from_local_shards({rows(rank, at::ones({2, 4}), {2 * rank, 0})}, {rank == 1 ? 9 : 8, 4});
        },
        {"global_size", "[8, 4] on rank 0", "[9, 4] on rank 1"});
  });
}

TEST(ShardedTensorFromLocalShards, ShardsAreChecked) {
  expect_error<c10::ValueError>(
      [] {
        LocalShard(at::ones({2, 4}), ShardMetadata({0, 0}, {2, 3}));
      },
      {"[2, 4]"});
  expect_error<c10::ValueError>([] { LocalShard(at::ones({2}), ShardMetadata({0}, {2}, "rank:0/cuda:0")); },
                                {"cpu"});
  expect_error<c10::ValueError>(
      [] {
        LocalShard::from_tensor_and_offsets(at::ones({2}), {0, 0}, 0);
      },
      {"offsets"});
  EXPECT_EQ(LocalShard::from_tensor_and_offsets(at::ones({2}), {4}, 3).metadata,
            ShardMetadata({4}, {2}, "rank:3/cpu"));
}

TEST(ShardedTensorFromLocalTensor, TakesTheOnlyShard) {
  on_ranks(4, [](int64_t rank) {
    const auto spec = chunks(1, {3, 2, 1, 0});
    const at::Tensor local = at::full({2, 2}, rank, at::kFloat);
    const ShardedTensor tensor = init_from_local_tensor(local, spec, {2, 8});
    EXPECT_TRUE(tensor.local_tensor().is_same(local));
    EXPECT_TRUE(tensor.sharding_spec() == spec);
    const at::Tensor gathered = tensor.gather(0);
    if (rank == 0) EXPECT_TRUE(at::equal(gathered[0], at::tensor({3, 3, 2, 2, 1, 1, 0, 0}, at::kFloat)));
    expect_error<c10::ValueError>(
        [&] {
          init_from_local_tensor(at::ones({3, 2}), spec, {2, 8});
        },
        {"[3, 2]"});
    expect_error<c10::ValueError>(
        [&] {
          init_from_local_tensor(at::ones({2, 2}).t(), spec, {2, 8});
        },
        {});  // a square one, transposed
    expect_error<c10::ValueError>(
        [&] {
          init_from_local_tensor(local, chunks(1, {rank, rank}), {2, 4});
        },
        {"more than one"});
  });
}

TEST(ShardedTensorFromMetadata, IsChecked) {
  on_ranks(2, [](int64_t rank) {
    const auto spec = chunks(0, {0, 1});
    const ShardedTensorMetadata metadata = spec.build_metadata({4, 2}, {});
    auto shards = [&](at::Tensor tensor) {
      std::vector<LocalShard> result(1);
      result[0].tensor = std::move(tensor);
      result[0].metadata = metadata.shards_metadata[rank];
      return result;
    };
    auto make = init_from_local_shards_and_global_metadata;
    const ShardedTensor tensor = make(shards(at::ones({2, 2})), metadata, {}, nullptr);
    EXPECT_TRUE(tensor.sharding_spec() == spec);
    auto fails = [&](std::vector<LocalShard> given, const ShardedTensorMetadata& said,
                     std::string_view part) {
      EXPECT_NE(error_of([&] { make(given, said, {}, nullptr); }).find(part), std::string::npos) << part;
    };
    fails({}, metadata, "has 0 local shards, but the metadata says 1");
    fails(shards(at::ones({2, 3})), metadata, "size");
    fails(shards(at::ones({2, 2}, at::kInt)), metadata, "dtype");
    fails(shards(at::ones({2, 2}).requires_grad_()), metadata, "requires_grad");
    fails(shards(at::ones({2, 2}).t()), metadata, "");
    fails(shards(at::ones({2, 4}).slice(1, 0, 4, 2)), metadata, "contiguous");
    auto wrong = metadata;
    wrong.shards_metadata.clear();
    fails({}, wrong, "no shards");
    wrong = metadata;
    wrong.tensor_properties.layout = at::kSparse;
    fails(shards(at::ones({2, 2})), wrong, "strided");
    wrong = metadata;
    wrong.size = {5, 2};
    fails(shards(at::ones({2, 2})), wrong, "none has");
    wrong = metadata;
    wrong.tensor_properties.pin_memory = true;
    fails(shards(at::ones({2, 2})), wrong, "pin_memory");
    auto elsewhere = shards(at::ones({2, 2}));
    elsewhere[0].metadata.shard_offsets = {1, 0};
    fails(elsewhere, metadata, "is not in the metadata");
  });
}

/// Local shards are in the order of the metadata, in whichever they were given.
TEST(ShardedTensorFromMetadata, ShardsComeInAnyOrder) {
  on_ranks(2, [](int64_t rank) {
    const at::Tensor global = global_tensor({4, 2});
    ShardedTensorMetadata metadata = chunks(0, {0, 1, 1, 0}).build_metadata({4, 2}, {});
    metadata.tensor_properties.dtype = global.scalar_type();
    std::vector<LocalShard> shards;
    for (const ShardMetadata& each : metadata.shards_metadata) {
      if (each.placement->rank() == rank)
        shards.insert(shards.begin(), {part(global, each.shard_offsets, each.shard_sizes), each});
    }
    const ShardedTensor tensor = init_from_local_shards_and_global_metadata(shards, metadata);
    expect_parts(tensor, global);
    for (int64_t dst = 0; dst < 2; ++dst) {
      const at::Tensor gathered = tensor.gather(dst);
      if (rank == dst) EXPECT_TRUE(at::equal(gathered, global)) << gathered;
    }
    shards[0] = shards[1];
    expect_error<c10::ValueError>([&] { init_from_local_shards_and_global_metadata(shards, metadata); },
                                  {"shard 1", "was given already"});

    // Shards that hold nothing are alike.
    metadata = chunks(0, {0, 1, 1, 1}).build_metadata({2, 2}, {});
    shards.clear();
    for (const ShardMetadata& each : metadata.shards_metadata) {
      if (each.placement->rank() == rank) shards.emplace_back(at::ones(each.shard_sizes), each);
    }
    EXPECT_EQ(init_from_local_shards_and_global_metadata(shards, metadata).local_shards().size(),
              shards.size());
  });
}

// --- gather

TEST(ShardedTensorGather, AnyTilingToAnyRank) {
  std::mt19937 random(5);
  std::vector<std::shared_ptr<const ShardingSpec>> specs;
  for (const int64_t dim : {0, 1, -1}) specs.push_back(chunks(dim, {0, 1, 2, 3}).clone());
  specs.push_back(chunks(0, {2, 0, 3, 1}).clone());
  specs.push_back(chunks(1, {1, 1, 3, 0, 3}).clone());
  specs.push_back(grid_spec({7, 5}, 4).clone());
  specs.push_back(irregular_spec().clone());
  for (int i = 0; i < 5; ++i) specs.push_back(random_spec(random, {7, 5}, 9, 4).clone());
  on_ranks(4, [&](int64_t rank) {
    const at::Tensor global = global_tensor({7, 5});
    for (const auto& spec : specs) {
      const ShardedTensor tensor = spec->shard(global, 2);
      for (int64_t dst = 0; dst < 4; ++dst) {
        const at::Tensor gathered = tensor.gather(dst);
        ASSERT_EQ(gathered.defined(), rank == dst);
        if (rank == dst) ASSERT_TRUE(at::equal(gathered, global)) << *spec;
      }
    }
  });
}

TEST(ShardedTensorGather, IntoAGivenTensor) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor global = global_tensor({10, 3});
    const ShardedTensor tensor = chunks(0, {0, 1, 2, 3}).shard(global);
    at::Tensor out = rank == 1 ? at::zeros({3, 10}).t() : at::Tensor();  // need not be contiguous
    const at::Tensor gathered = tensor.gather(1, {.out = out});
    if (rank == 1) {
      EXPECT_TRUE(gathered.is_same(out));
      EXPECT_TRUE(at::equal(out, global));
    }
    // In another dtype, and into one.
    const at::Tensor half = tensor.gather(0, {.dtype = at::kHalf});
    if (rank == 0) EXPECT_EQ(half.scalar_type(), at::kHalf);
    out = rank == 0 ? at::zeros({10, 3}, at::kDouble) : at::Tensor();
    tensor.gather(0, {.out = out});
    if (rank == 0) EXPECT_TRUE(at::equal(out, global.to(at::kDouble)));
    if (rank == 0) {
      expect_error<c10::ValueError>(
          [&] {
            tensor.gather(0, {.out = at::zeros({3, 10})});
          },
          {"[3, 10]", "[10, 3]"});
      expect_error<c10::ValueError>([&] { tensor.gather(0, {.out = out, .enforce_dtype = true}); },
                                    {"Double", "Float"});
    } else {
      expect_error<c10::ValueError>([&] { tensor.gather(0, {.out = at::zeros({10, 3})}); }, {"alone"});
    }
    expect_error<c10::IndexError>([&] { tensor.gather(4); }, {"no rank 4"});
  });
}

// --- reshard

TEST(ShardedTensorReshard, AllPairsOfDims) {
  on_ranks(4, [](int64_t rank) {
    for (const std::vector<int64_t>& size :
         {std::vector<int64_t>{8, 12, 4}, {7, 5, 9}, {2, 3, 17}, {1, 4, 0}}) {
      const at::Tensor global = global_tensor(size);
      for (int64_t from = 0; from < 3; ++from) {
        for (int64_t to = 0; to < 3; ++to) {
          for (const auto& order : {std::vector<int64_t>{0, 1, 2, 3}, {3, 1, 0, 2}, {2, 1}}) {
            const ShardedTensor tensor = chunks(from, {0, 1, 2, 3}).shard(global);
            const auto spec = chunks(to, order);
            const ShardedTensor resharded = tensor.reshard(spec);
            ASSERT_TRUE(resharded.sharding_spec() == spec);
            ASSERT_EQ(resharded.metadata(), spec.build_metadata(size, {}));
            expect_parts(resharded, global);
            ASSERT_EQ(tensor.local_shards().size(), 1);  // untouched
            const at::Tensor gathered = resharded.gather(3);
            if (rank == 3) ASSERT_TRUE(at::equal(gathered, global));
          }
        }
      }
    }
  });
}

TEST(ShardedTensorReshard, AnyTilingToAnyTiling) {
  std::mt19937 random(6);
  std::vector<EnumerableShardingSpec> specs;
  for (int i = 0; i < 12; ++i) specs.push_back(random_spec(random, {6, 7, 4}, 1 + i * 3, 4));
  on_ranks(4, [&](int64_t) {
    const at::Tensor global = global_tensor({6, 7, 4});
    ShardedTensor tensor = chunks(1, {3, 2, 1, 0}).shard(global, 1);
    for (const auto& spec : specs) {
      tensor = tensor.reshard(spec);
      ASSERT_EQ(tensor.metadata().shards_metadata, spec.shards());
      expect_parts(tensor, global);
    }
    const ShardedTensor back = tensor.reshard(chunks(1, {3, 2, 1, 0}));
    expect_parts(back, global);
    EXPECT_TRUE(back.reshard(chunks(1, {3, 2, 1, 0})).is_same(back));
  });
}

/// Rows become columns: of its 8 x 2 new elements a rank has 2 x 2, and gets the others, each once.
TEST(ShardedTensorReshard, MovesEachElementOnceInOneExchange) {
  on_ranks(4, [](int64_t) {
    const ShardedTensor rows = chunks(0, {0, 1, 2, 3}).shard(global_tensor({8, 8}).to(at::kFloat));
    CommDebugMode counts;
    rows.reshard(chunks(1, {0, 1, 2, 3}));
    EXPECT_EQ(counts.get_total_counts(), 1);
    EXPECT_EQ(counts.calls("all_to_all"), 1);
    EXPECT_EQ(counts.total_bytes(), 12 * 4);
    counts.reset();
    rows.reshard(chunks(0, {0, 1, 2, 3}));  // as it is
    EXPECT_EQ(counts.get_total_counts(), 0);
  });
}

TEST(ShardedTensorReshard, AllDtypes) {
  on_ranks(2, [](int64_t) {
    for (const auto dtype :
         {at::kBool, at::kChar, at::kHalf, at::kBFloat16, at::kLong, at::kDouble, at::kComplexFloat}) {
      const at::Tensor global = at::remainder(at::arange(20), 2).view({4, 5}).to(dtype);
      const ShardedTensor resharded = chunks(0, {0, 1}).shard(global).reshard(chunks(1, {1, 0}));
      const LocalShard& shard = resharded.local_shards()[0];
      EXPECT_TRUE(
          at::equal(shard.tensor, part(global, shard.metadata.shard_offsets, shard.metadata.shard_sizes)))
          << dtype;
    }
  });
}

// The gradient of each element comes back to where the element was.
TEST(ShardedTensorReshard, IsDifferentiable) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({6, 5}).requires_grad_();
    const at::Tensor weights = global_tensor({6, 5}) + 1;
    const ShardedTensor tensor = chunks(0, {0, 1, 2}).shard(global);  // the last rank has none
    const ShardedTensor resharded = tensor.reshard(chunks(1, {3, 2, 1, 0}));
    EXPECT_TRUE(resharded.requires_grad());
    at::Tensor loss = at::zeros({});
    for (const LocalShard& shard : resharded.local_shards())
      loss = loss +
             (shard.tensor * part(weights, shard.metadata.shard_offsets, shard.metadata.shard_sizes)).sum();
    loss.backward();
    for (const LocalShard& shard : tensor.local_shards())
      EXPECT_TRUE(at::equal(shard.tensor.grad(),
                            part(weights, shard.metadata.shard_offsets, shard.metadata.shard_sizes)));
  });
}

// Ranks that hold nothing, before or after, have an empty tensor to call backward on.
TEST(ShardedTensorReshard, IsDifferentiableWhereARankHoldsNothing) {
  const at::Tensor weights = global_tensor({6, 5}) + 1;
  auto loss_of = [&](const ShardedTensor& tensor) {
    at::Tensor loss = at::zeros({});
    const auto locals = tensor.local_tensors();
    if (tensor.local_shards().empty()) {
      EXPECT_EQ(locals.size(), 1);
      EXPECT_EQ(locals[0].numel(), 0);
      return loss + locals[0].pow(3).sum();
    }
    for (size_t i = 0; i < locals.size(); ++i) {
      const ShardMetadata& shard = tensor.local_shards()[i].metadata;
      loss = loss + (locals[i].pow(3) * part(weights, shard.shard_offsets, shard.shard_sizes)).sum();
    }
    return loss;
  };
  const std::vector<std::vector<int64_t>> holders{{0, 1, 2, 3}, {0, 1}, {3}, {2, 2, 1}};
  for (const auto& before : holders) {
    for (const auto& after : holders) {
      on_ranks(4, [&](int64_t) {
        const at::Tensor global = (global_tensor({6, 5}) / 10).requires_grad_();
        (global.pow(3) * weights).sum().backward();
        const ShardedTensor tensor = chunks(0, before).shard(global);
        const ShardedTensor resharded = tensor.reshard(chunks(1, after));
        EXPECT_TRUE(resharded.requires_grad() && !resharded.is_leaf());
        loss_of(resharded).backward({}, /*retain_graph=*/true);
        EXPECT_TRUE(tensor.grad().defined());
        for (const LocalShard& shard : tensor.local_shards())
          expect_close(shard.tensor.grad(),
                       part(global.grad(), shard.metadata.shard_offsets, shard.metadata.shard_sizes),
                       "shards");
        // Or from the whole, with its gradient.
        tensor.mutable_grad().reset();
        const ShardedTensor gradient = chunks(1, after).shard(3 * global.detach().square() * weights);
        at::Tensor(resharded).backward(gradient);
        for (const LocalShard& shard : tensor.local_shards())
          expect_close(shard.tensor.grad(),
                       part(global.grad(), shard.metadata.shard_offsets, shard.metadata.shard_sizes),
                       "whole");
        EXPECT_THROW(at::Tensor(resharded).backward(at::ones({6, 5})), c10::Error);
      });
    }
  }
  // Gradients of gradients.
  on_ranks(4, [&](int64_t) {
    const at::Tensor global = (global_tensor({6, 5}) / 10).requires_grad_();
    const ShardedTensor tensor = chunks(0, {0, 1, 2}).shard(global);
    const auto first = torch::autograd::grad({loss_of(tensor.reshard(chunks(1, {3, 1})))},
                                             tensor.local_tensors(), {}, std::nullopt, /*create_graph=*/true);
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& each : first) sum = sum + each.sum();
    sum.backward();
    for (const LocalShard& shard : tensor.local_shards())
      expect_close(
          shard.tensor.grad(),
          part(6 * global.detach() * weights, shard.metadata.shard_offsets, shard.metadata.shard_sizes),
          "second");
  });
}

TEST(ShardedTensorReshard, ChangesATensorItself) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({7, 5});
    // A leaf stays one, with its gradient.
    const ShardedTensor leaf = shard_tensor(global.clone().requires_grad_(), chunks(0, {0, 1, 2, 3}));
    for (const at::Tensor& local : leaf.local_tensors()) (local * 3).sum().backward();
    const at::Tensor handle = leaf;
    EXPECT_TRUE(leaf.reshard_(irregular_spec()).is_same(handle));
    expect_parts(leaf, global);
    EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad() && leaf.sharding_spec() == irregular_spec());
    expect_parts(leaf.grad(), at::full({7, 5}, 3.f));
    for (const at::Tensor& local : leaf.local_tensors()) {
      EXPECT_TRUE(local.is_leaf() && local.requires_grad());
      (local * 2).sum().backward();
    }
    expect_parts(leaf.grad(), at::full({7, 5}, 5.f));
    // Any other tensor keeps its history.
    const ShardedTensor source = shard_tensor(global.clone().requires_grad_(), chunks(0, {0, 1, 2, 3}));
    const ShardedTensor doubled(source * 2);
    doubled.reshard_(chunks(1, {1, 2}));
    expect_parts(doubled, global * 2);
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& local : doubled.local_tensors()) loss = loss + local.sum();
    loss.backward();
    expect_parts(source.grad(), at::full({7, 5}, 2.f));
    EXPECT_TRUE(doubled.reshard_(chunks(1, {1, 2})).is_same(doubled));
  });
}

TEST(ShardedTensorReshard, LocalTensorsCanBeReplaced) {
  on_ranks(2, [](int64_t rank) {
    const ShardedTensor tensor = ones(chunks(0, {0, 1}), {4, 2}, {.requires_grad = true});
    const at::Tensor other = at::full({2, 2}, 7.f).requires_grad_();
    tensor.set_local_tensor(0, other);
    EXPECT_TRUE(tensor.local_tensor().is_same(other) && tensor.requires_grad());
    (other * 3).sum().backward();
    EXPECT_TRUE(at::equal(tensor.grad().local_tensor(), at::full({2, 2}, 3.f)));
    const at::Tensor gathered = tensor.gather(0);
    if (rank == 0) EXPECT_TRUE(at::equal(gathered, at::full({4, 2}, 7.f)));
    expect_error<c10::IndexError>([&] { tensor.set_local_tensor(1, other); }, {"1 shards", "index 1"});
    expect_error<c10::ValueError>([&] { tensor.set_local_tensor(0, at::ones({2, 2}, at::kInt)); }, {"Int"});
    expect_error<c10::ValueError>([&] { tensor.set_local_tensor(0, at::ones({2, 3})); }, {"[2, 3]"});
    const ShardedTensor shared = ones(chunks(0, {0, 1}), {4, 2}, {.init_rrefs = true});
    expect_error<c10::Error>([&] { shared.set_local_tensor(0, other.detach()); }, {"init_rrefs"});
  });
}

TEST(ShardedTensorReshard, Errors) {
  on_ranks(2, [](int64_t) {
    const ShardedTensor tensor = zeros(chunks(0, {0, 1}), {4, 4});
    expect_error<c10::ValueError>([&] { tensor.reshard(chunks(2, {0, 1})); }, {"dim 2"});
    expect_error<c10::ValueError>([&] { tensor.reshard(chunks(1, {0, 2})); }, {"rank 2"});
    expect_error<c10::ValueError>(
        [&] {
          tensor.reshard(EnumerableShardingSpec({{{0, 0}, {4, 3}, "rank:0/cpu"}}));
        },
        {"none has element [0, 3]"});
  });
}

/// Split in two at an index of the user's choice.
class SplitAt final : public ShardingSpec {
 public:
  explicit SplitAt(int64_t place) : place_(place) {}
  ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                       const TensorProperties& properties) const override {
    std::vector<int64_t> first = size.vec(), second = size.vec(), offsets(size.size(), 0), after = offsets;
    first[0] = after[0] = place_;
    second[0] -= place_;
    return {{{offsets, first, "rank:0/cpu"}, {after, second, "rank:1/cpu"}}, size.vec(), properties};
  }
  std::string str() const override { return c10::str("split at ", place_); }
  ShardingSpecPtr clone() const override { return std::make_shared<SplitAt>(*this); }

 private:
  int64_t place_;
};

TEST(ShardingSpecs, OfUsersWorkEverywhere) {
  on_ranks(2, [](int64_t rank) {
    const at::Tensor global = global_tensor({5, 3});
    const ShardedTensor tensor = shard_tensor(global, SplitAt(4));
    EXPECT_EQ(tensor.local_tensor().size(0), rank == 0 ? 4 : 1);
    EXPECT_TRUE(tensor.sharding_spec() == SplitAt(4));
    EXPECT_EQ(tensor.reshard(SplitAt(1)).local_tensor().size(0), rank == 0 ? 1 : 4);
    EXPECT_EQ(ones(SplitAt(2), {5, 3}).local_tensor().size(0), rank == 0 ? 2 : 3);
    // It is not trusted: what it says is checked.
    EXPECT_THROW(shard_tensor(global, SplitAt(6)), c10::Error);
  });
}

// Ranks outside of the group may make the tensor too, and hold nothing of it.
TEST(ShardTensor, OfPartOfTheWorld) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor global = global_tensor({6, 2}).requires_grad_();
    for (const ShardedTensor& tensor :
         {shard_tensor(global, chunks(0, {3, 1}), 1, {1, 3}), chunks(0, {3, 1}).shard(global, 1, {1, 3})}) {
      EXPECT_EQ(tensor.local_shards().size(), rank % 2);
      EXPECT_EQ(tensor.metadata().shards_metadata.size(), 2);
      EXPECT_TRUE(tensor.requires_grad());
      expect_parts(tensor, global);
      if (rank % 2 == 0) expect_error<c10::Error>([&] { tensor.gather(); }, {"not among the ranks [1, 3]"});
    }
    expect_error<c10::ValueError>([&] { shard_tensor(global, chunks(0, {0, 1}), 0, {1, 3}); }, {"rank 0"});
    expect_error<c10::ValueError>(
        [&] {
          shard_tensor(rank == 2 ? global.detach() : global, chunks(0, {0, 1}));
        },
        {"rank 2", "requires_grad"});
  });
}

TEST(ShardTensor, EveryRankGetsItsPartOfTheSource) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor mine = at::full({10, 4}, rank, at::kFloat).requires_grad_();
    for (int64_t source = 0; source < 4; ++source) {
      const ShardedTensor tensor = shard_tensor(mine, chunks(0, {3, 2, 1, 0}), source);
      EXPECT_TRUE((tensor.local_tensor() == source).all().item<bool>());
      EXPECT_TRUE(tensor.local_tensor().requires_grad() && tensor.local_tensor().is_leaf());
    }
    expect_error<c10::ValueError>(
        [&] {
          shard_tensor(mine.detach().t(), chunks(0, {0, 1, 2, 3}));
        },
        {"contiguous"});
    expect_error<c10::ValueError>(
        [&] {
          shard_tensor(mine, chunks(0, {0, 1, 2, 3}), rank == 3 ? 1 : 0);
        },
        {"src_rank 0", "rank 3", "src_rank 1"});
    expect_error<c10::ValueError>(
        [&] {
          shard_tensor(mine, chunks(rank == 2 ? 1 : 0, {0, 1, 2, 3}));
        },
        {"chunk 0", "rank 2", "chunk 1"});
    expect_error<c10::IndexError>([&] { shard_tensor(mine, chunks(0, {0, 1, 2, 3}), 4); }, {"no rank 4"});
  });
}

// --- moved

TEST(ShardedTensorMoves, ToDtypesAndDevices) {
  on_ranks(2, [](int64_t) {
    const at::Tensor global = global_tensor({4, 3});
    const ShardedTensor tensor = chunks(0, {0, 1}).shard(global);
    EXPECT_TRUE(tensor.to(at::kFloat).is_same(tensor));
    EXPECT_TRUE(tensor.to(at::Device(at::kCPU)).is_same(tensor));
    EXPECT_TRUE(tensor.cpu().is_same(tensor));
    EXPECT_TRUE(tensor.to(at::ones({1})).is_same(tensor));
    const ShardedTensor doubled = tensor.to(at::kDouble);
    EXPECT_EQ(doubled.scalar_type(), at::kDouble);
    EXPECT_EQ(doubled.metadata().tensor_properties.dtype, at::kDouble);
    EXPECT_TRUE(at::equal(doubled.local_tensor(), tensor.local_tensor().to(at::kDouble)));
    EXPECT_TRUE(doubled.sharding_spec() == tensor.sharding_spec());
    const ShardedTensor copy = tensor.to({.copy = true});
    EXPECT_FALSE(copy.is_same(tensor) || copy.local_tensor().is_alias_of(tensor.local_tensor()));
    const ShardedTensor meta = tensor.to(at::Device(at::kMeta));
    EXPECT_TRUE(meta.device().is_meta() && meta.local_tensor().is_meta());
    EXPECT_EQ(meta.metadata().shards_metadata[1].placement, RemoteDevice("rank:1/meta"));
    EXPECT_EQ(meta.sharding_spec().str(), "chunk 0: rank:0/meta, rank:1/meta");
    EXPECT_EQ(tensor.to(at::kMeta, at::kHalf).scalar_type(), at::kHalf);
    const Group other = current_world()->group({1, 0}, at::kCPU);
    EXPECT_EQ(tensor.to({.process_group = other}).process_group().ranks(), (std::vector<int64_t>{1, 0}));
    expect_error<c10::Error>([&] { tensor.cpu(at::MemoryFormat::ChannelsLast); }, {"memory format"});
    expect_error<c10::Error>([&] { tensor.to({.memory_format = at::MemoryFormat::ChannelsLast}); },
                             {"memory format"});
    if (!at::hasCUDA()) {
      expect_error<c10::Error>([&] { tensor.cuda(); }, {"cuda"});
      expect_error<c10::Error>([&] { tensor.pin_memory(); }, {});
    }
  });
}

TEST(ShardedTensorMoves, WorksInInferenceMode) {
  on_ranks(2, [](int64_t) {
    const c10::InferenceMode inference;
    const at::Tensor global = global_tensor({4, 3});
    const ShardedTensor tensor = chunks(0, {0, 1}).shard(global);
    expect_parts(tensor.reshard(chunks(1, {1, 0})), global);
    expect_parts(ShardedTensor(at::Tensor(tensor).clone()), global);
    EXPECT_TRUE(at::equal(tensor, tensor.to({.copy = true})));
    EXPECT_TRUE(at::equal(at::embedding(tensor, at::arange(4)), global));
  });
}

// --- what other ranks hold

TEST(RemoteShards, AreReachedBetweenThreads) {
  on_ranks(4, [](int64_t rank) {
    const ShardedTensor tensor = ones(chunks(0, {0, 1, 1, 3}), {8, 2}, {.init_rrefs = true});
    EXPECT_TRUE(tensor.init_rrefs());
    const auto& remote = tensor.remote_shards();
    EXPECT_FALSE(remote.contains(rank));
    EXPECT_FALSE(remote.contains(2));  // holds nothing
    for (const auto& [owner, shards] : remote) {
      EXPECT_EQ(shards.size(), owner == 1 ? 2 : 1);
      for (const auto& shard : shards) {
        EXPECT_EQ(shard.owner(), owner);
        const LocalShard here = shard.to_here();
        EXPECT_EQ(here.metadata, shard.metadata());
        EXPECT_TRUE(at::equal(here.tensor, at::ones({2, 2})));
      }
    }
    const ShardedTensor without = ones(chunks(0, {0, 1}), {8, 2});
    expect_error<c10::Error>([&] { without.remote_shards(); }, {"init_rrefs"});
    comm::barrier(current_world()->group()).wait();  // all have read
  });
}

// --- the log

TEST(Log, HasOneLinePerCall) {
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_handler([&](const LogEvent& event) {
    const std::lock_guard lock(mutex);
    if (event.rank == 0) lines.push_back(event.call);
    EXPECT_FALSE(event.detail.empty());
  });
  on_ranks(2, [](int64_t) { zeros(chunks(0, {0, 1}), {4, 2}).reshard(chunks(1, {0, 1})).gather(); });
  set_log_handler(nullptr);
  on_ranks(2, [](int64_t) { zeros(chunks(0, {0, 1}), {4, 2}); });
  EXPECT_EQ(lines,
            (std::vector<std::string>{"sharded::zeros", "ShardedTensor::reshard", "ShardedTensor::gather"}));
}

}  // namespace
}  // namespace tessera::sharded
