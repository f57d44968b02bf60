// What is known of a sharded tensor without its data, and the specs that make it.

#include <tessera/sharded/metadata.h>
#include <tessera/sharded/spec.h>

#include <sstream>
#include <unordered_set>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::expect_error;

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

TEST(RemoteDevice, ReadsItsForms) {
  const RemoteDevice of_rank("rank:1/cuda:3");
  EXPECT_EQ(of_rank.rank(), 1);
  EXPECT_FALSE(of_rank.worker_name());
  EXPECT_EQ(of_rank.device(), at::Device("cuda:3"));
  const RemoteDevice of_worker("trainer0/cuda:0");
  EXPECT_EQ(of_worker.worker_name(), "trainer0");
  EXPECT_FALSE(of_worker.rank());
  EXPECT_EQ(RemoteDevice("rank:12"), RemoteDevice(12, at::kCPU));
  EXPECT_EQ(RemoteDevice("trainer0"), RemoteDevice("trainer0/cpu"));
  EXPECT_EQ(RemoteDevice("cuda:1"), RemoteDevice(at::Device("cuda:1")));
  EXPECT_EQ(RemoteDevice("cpu").device(), at::kCPU);
  EXPECT_FALSE(RemoteDevice("cpu").rank() || RemoteDevice("cpu").worker_name());
  for (const char* text : {"rank:0/cpu", "rank:7/cuda:1", "ps/cpu", "ps/cuda:0", "cuda:1", "meta"}) {
    EXPECT_EQ(RemoteDevice(text).str(), text);
    EXPECT_EQ(RemoteDevice(printed(RemoteDevice(text))), RemoteDevice(text));
  }
}

TEST(RemoteDevice, RefusesTheRest) {
  for (const char* text : {"", "/cpu", "rank:0/", "rank:0/nothing:1", "rank:/cpu", "rank:-1/cpu",
                           "rank:x/cpu", "rank:1:2/cpu", "trainer:0/cpu", "a/b/cpu",
                           "rank:99999999999999999999/cpu", "two words", "a, b/cpu", "a,b", "line\n/cpu"}) {
    SCOPED_TRACE(text);
    expect_error<c10::ValueError>([&] { RemoteDevice device{std::string(text)}; }, {"Known forms"});
  }
  expect_error<c10::ValueError>([] { RemoteDevice(-1, at::kCPU); }, {"-1"});
}

TEST(ShardedTensorMetadata, OfNegativeSizeHasNoCount) {
  expect_error<c10::ValueError>(
      [] { static_cast<void>(ShardedTensorMetadata::parse("[-5, 3] f32:").numel()); }, {"-5, 3"});
}

TEST(RemoteDevice, IsAValue) {
  std::unordered_set<RemoteDevice> set{"rank:0/cpu", "rank:0", "rank:1", "worker/cpu", "cpu", "cuda:0"};
  EXPECT_EQ(set.size(), 5);
  EXPECT_NE(RemoteDevice("rank:0/cpu"), RemoteDevice("rank:0/cuda:0"));
  EXPECT_EQ(RemoteDevice("rank:2/cpu").with_device(at::Device("cuda:1")), RemoteDevice("rank:2/cuda:1"));
}

TEST(ShardMetadata, IsChecked) {
  expect_error<c10::ValueError>([] { ShardMetadata({0}, {1, 2}); }, {"1 offsets", "2 sizes"});
  expect_error<c10::ValueError>([] { ShardMetadata({-1, 0}, {1, 2}); }, {"-1", "dim 0"});
  expect_error<c10::ValueError>([] { ShardMetadata({0, 0}, {1, -2}); }, {"-2", "dim 1"});
  expect_error<c10::ValueError>([] { ShardMetadata({INT64_MAX}, {1}); }, {"beyond"});
  EXPECT_EQ(ShardMetadata({}, {}).numel(), 1);
  EXPECT_EQ(ShardMetadata({2, 0}, {3, 4}).numel(), 12);
  EXPECT_EQ(ShardMetadata({0, 0, 0}, {INT64_MAX, 2, 0}).numel(), 0);
  expect_error<c10::ValueError>(
      [] {
        static_cast<void>(ShardMetadata({0, 0}, {INT64_MAX, 2}).numel());
      },
      {"9223372036854775807, 2", "64 bits"});
}

const ShardMetadata kShard({0, 4}, {2, 4}, "rank:1/cuda:0");

TEST(ShardMetadata, TextAndBytes) {
  EXPECT_EQ(kShard.str(), "[0, 4]+[2, 4] rank:1/cuda:0");
  for (const ShardMetadata& shard : {kShard, ShardMetadata({0, 4}, {2, 4}), ShardMetadata({}, {}),
                                     ShardMetadata({1}, {0}, "worker/cpu")}) {
    EXPECT_EQ(ShardMetadata::parse(shard.str()), shard);
    EXPECT_EQ(ShardMetadata::from_bytes(shard.to_bytes()), shard);
    EXPECT_EQ(shard.hash(), ShardMetadata::parse(shard.str()).hash());
  }
  EXPECT_NE(kShard, ShardMetadata({0, 4}, {2, 4}));
  EXPECT_NE(kShard.hash(), ShardMetadata({0, 4}, {2, 4}).hash());
  for (const char* text : {"", "[0", "[0]+", "[0] [1]", "[0]+[1] rank:0/cpu more", "[a]+[1]", "[0]+[1, 2]"}) {
    SCOPED_TRACE(text);
    expect_error<c10::ValueError>([&] { ShardMetadata::parse(text); }, {});
  }
}

TEST(TensorProperties, TextAndBytes) {
  TensorProperties properties;
  EXPECT_EQ(properties.str(), "f32");
  properties = {at::kBFloat16, at::kStrided, true, at::MemoryFormat::Preserve, true};
  EXPECT_EQ(properties.str(), "bf16 preserve requires_grad pinned");
  for (const auto layout : {at::kStrided, at::kSparse, at::kSparseCsr}) {
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      properties.layout = layout;
      properties.memory_format = format;
      EXPECT_EQ(TensorProperties::parse(properties.str()), properties);
      EXPECT_EQ(TensorProperties::from_bytes(properties.to_bytes()), properties);
      EXPECT_EQ(properties.hash(), TensorProperties::parse(properties.str()).hash());
    }
  }
  expect_error<c10::ValueError>([] { TensorProperties::parse("f32 shiny"); }, {"shiny"});
  expect_error<c10::ValueError>([] { TensorProperties::parse("float"); }, {"dtype"});
  EXPECT_EQ(TensorProperties::of(at::ones({2}, at::kInt)), (TensorProperties{.dtype = at::kInt}));
  EXPECT_TRUE(TensorProperties::of(at::ones({2}).requires_grad_()).requires_grad);
}

TEST(ShardedTensorMetadata, TextAndBytes) {
  const auto metadata = ChunkShardingSpec(0, {"rank:0/cpu", "rank:1/cpu"}).build_metadata({10, 4}, {});
  EXPECT_EQ(printed(metadata), "[10, 4] f32: [0, 0]+[5, 4] rank:0/cpu, [5, 0]+[5, 4] rank:1/cpu");
  EXPECT_EQ(ShardedTensorMetadata::parse(metadata.str()), metadata);
  EXPECT_EQ(ShardedTensorMetadata::from_bytes(metadata.to_bytes()), metadata);
  EXPECT_EQ(metadata.hash(), ShardedTensorMetadata::parse(metadata.str()).hash());
  EXPECT_EQ(metadata.numel(), 40);
  ShardedTensorMetadata other = metadata;
  other.tensor_properties.requires_grad = true;
  EXPECT_NE(metadata, other);
  EXPECT_NE(metadata.hash(), other.hash());
  EXPECT_EQ(ShardedTensorMetadata::parse("[3] i64:").shards_metadata.size(), 0);
}

// Bytes that are truncated or damaged are an error, never a crash.
TEST(ShardedTensorMetadata, DamagedBytes) {
  const std::string bytes =
      ChunkShardingSpec(0, {"rank:0/cpu", "rank:1/cpu"}).build_metadata({10, 4}, {}).to_bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(ShardedTensorMetadata::from_bytes(std::string_view(bytes).substr(0, size)), c10::Error);
  }
  EXPECT_THROW(ShardedTensorMetadata::from_bytes(bytes + "x"), c10::Error);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const char value : {'\0', '\x7f', '\xff'}) {
      std::string damaged = bytes;
      damaged[i] = value;
      try {
        ShardedTensorMetadata::from_bytes(damaged);
      } catch (const c10::Error&) {
      }
    }
  }
}

std::vector<std::vector<int64_t>> ranges_along(const ShardedTensorMetadata& metadata, int64_t dim) {
  std::vector<std::vector<int64_t>> result;
  for (const ShardMetadata& shard : metadata.shards_metadata)
    result.push_back({shard.shard_offsets[dim], shard.shard_sizes[dim]});
  return result;
}

using Ranges = std::vector<std::vector<int64_t>>;
const std::vector<RemoteDevice> kFour = {"rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"};

TEST(ChunkShardingSpec, CutsAsTorchChunk) {
  const ChunkShardingSpec rows(0, kFour);
  EXPECT_EQ(ranges_along(rows.build_metadata({10, 2}, {}), 0), (Ranges{{0, 3}, {3, 3}, {6, 3}, {9, 1}}));
  EXPECT_EQ(ranges_along(rows.build_metadata({2, 2}, {}), 0), (Ranges{{0, 1}, {1, 1}, {2, 0}, {2, 0}}));
  EXPECT_EQ(ranges_along(rows.build_metadata({0, 2}, {}), 0), (Ranges{{0, 0}, {0, 0}, {0, 0}, {0, 0}}));
  const auto columns = ChunkShardingSpec(-1, kFour).build_metadata({3, 9}, {});
  EXPECT_EQ(ranges_along(columns, 1), (Ranges{{0, 3}, {3, 3}, {6, 3}, {9, 0}}));
  EXPECT_EQ(ranges_along(columns, 0), (Ranges{{0, 3}, {0, 3}, {0, 3}, {0, 3}}));
  for (int64_t size = 0; size < 20; ++size) {
    const auto chunks = at::empty({size}).chunk(4);
    const auto metadata = rows.build_metadata({size}, {});
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(metadata.shards_metadata[i].shard_sizes[0], i < chunks.size() ? chunks[i].size(0) : 0);
      EXPECT_EQ(metadata.shards_metadata[i].placement, kFour[i]);
    }
  }
}

TEST(ChunkShardingSpec, Errors) {
  expect_error<c10::ValueError>([] { ChunkShardingSpec(0, {}); }, {"at least one placement"});
  expect_error<c10::ValueError>([] { ChunkShardingSpec(0, {"rank:x/cpu"}); }, {"rank:x/cpu"});
  expect_error<c10::ValueError>(
      [] {
        ChunkShardingSpec(2, kFour).build_metadata({4, 4}, {});
      },
      {"dim 2", "[4, 4]"});
  expect_error<c10::ValueError>([] { ChunkShardingSpec(-3, kFour).build_metadata({4, 4}, {}); }, {"dim -3"});
  expect_error<c10::ValueError>([] { ChunkShardingSpec(0, kFour).build_metadata({}, {}); }, {"dim 0"});
}

TEST(EnumerableShardingSpec, IsChecked) {
  const EnumerableShardingSpec spec(
      {{{0, 0}, {5, 5}, "rank:0/cpu"}, {{5, 0}, {5, 5}, "rank:1/cpu"}, {{0, 5}, {10, 5}, "rank:2/cpu"}});
  EXPECT_EQ(spec.build_metadata({10, 10}, {}).shards_metadata, spec.shards());
  expect_error<c10::ValueError>([&] { spec.build_metadata({10, 10, 10}, {}); }, {"2 dims", "[10, 10, 10]"});
  expect_error<c10::ValueError>([&] { spec.build_metadata({10, 9}, {}); }, {"beyond", "dim 1", "10"});
  expect_error<c10::ValueError>([&] { spec.build_metadata({11, 10}, {}); }, {"none has element [10, 0]"});
  expect_error<c10::ValueError>([] { EnumerableShardingSpec({}); }, {"at least one"});
  expect_error<c10::ValueError>(
      [] {
        EnumerableShardingSpec({{{0}, {5}}, {{5, 0}, {5, 5}}});
      },
      {"number of dims"});
  expect_error<c10::ValueError>(
      [] {
        EnumerableShardingSpec({{{0, 0}, {5, 5}}, {{4, 4}, {2, 2}}});
      },
      {"overlap", "element [4, 4]"});
}

TEST(ShardingSpec, ComparesAndReadsBack) {
  const ChunkShardingSpec rows(0, kFour), columns(1, kFour);
  const EnumerableShardingSpec named({{{0}, {5}, "rank:0/cpu"}, {{5}, {5}}});
  EXPECT_TRUE(static_cast<const ShardingSpec&>(rows) == *rows.clone());
  EXPECT_FALSE(static_cast<const ShardingSpec&>(rows) == columns);
  EXPECT_FALSE(static_cast<const ShardingSpec&>(rows) == named);
  for (const ShardingSpec* spec : std::initializer_list<const ShardingSpec*>{&rows, &columns, &named}) {
    const auto read = parse_sharding_spec(spec->str());
    ASSERT_TRUE(read);
    EXPECT_TRUE(*read == *spec);
  }
  EXPECT_EQ(rows.str(), "chunk 0: rank:0/cpu, rank:1/cpu, rank:2/cpu, rank:3/cpu");
  EXPECT_EQ(parse_sharding_spec("something else"), nullptr);
  EXPECT_THROW(parse_sharding_spec("chunk x: rank:0/cpu"), c10::Error);
}

TEST(ShardingSpec, IsInferredFromShards) {
  auto infer = [](const ShardingSpec& spec, at::IntArrayRef size) {
    return infer_sharding_spec(spec.build_metadata(size, {}).shards_metadata);
  };
  for (const int64_t dim : {0, 1, 2}) {
    for (const int64_t size : {4, 5, 10, 16, 3}) {
      const ChunkShardingSpec spec(dim, kFour);
      EXPECT_TRUE(*infer(spec, {size, size, size}) == spec) << dim << ' ' << size;
    }
  }
  const ChunkShardingSpec permuted(0, {"rank:2/cpu", "rank:0/cpu", "rank:3/cpu", "rank:1/cpu"});
  EXPECT_TRUE(*infer(permuted, {10}) == permuted);
  auto shards = permuted.build_metadata({10}, {}).shards_metadata;
  std::swap(shards[0], shards[3]);  // in whatever order they are listed
  EXPECT_TRUE(*infer_sharding_spec(shards) == permuted);
  // Sharded along one dim, but not as chunks; a grid; one shard alone.
  for (const std::vector<ShardMetadata>& named :
       {std::vector<ShardMetadata>{{{0}, {1}, "rank:0"}, {{1}, {3}, "rank:1"}},
        std::vector<ShardMetadata>{
            {{0, 0}, {1, 1}, "rank:0"}, {{0, 1}, {1, 1}, "rank:1"}, {{1, 0}, {1, 2}, "rank:0"}},
        std::vector<ShardMetadata>{{{0}, {4}, "rank:0"}}}) {
    EXPECT_TRUE(*infer_sharding_spec(named) == EnumerableShardingSpec(named));
  }
}

// The largest tensors that can be counted are sharded as any; larger ones are errors.
TEST(ShardingSpecs, OfTheLargestSizes) {
  for (const std::vector<int64_t>& size :
       {std::vector<int64_t>{INT64_MAX}, {INT64_MAX / 3, 3}, {1, INT64_MAX}}) {
    for (size_t dim = 0; dim < size.size(); ++dim) {
      const auto metadata = ChunkShardingSpec(static_cast<int64_t>(dim), kFour).build_metadata(size, {});
      int64_t sum = 0;
      for (const ShardMetadata& shard : metadata.shards_metadata) sum += shard.numel();
      EXPECT_EQ(sum, metadata.numel());
      EXPECT_EQ(EnumerableShardingSpec(metadata.shards_metadata).build_metadata(size, {}), metadata);
      EXPECT_TRUE(*infer_sharding_spec(metadata.shards_metadata) ==
                  ChunkShardingSpec(static_cast<int64_t>(dim), kFour));
      auto fewer = metadata.shards_metadata;
      fewer[1].shard_sizes[dim] -= 1;
      if (fewer[1].shard_sizes[dim] < 0) continue;
      EXPECT_THROW(EnumerableShardingSpec(fewer).build_metadata(size, {}), c10::ValueError);
    }
  }
  for (const std::vector<int64_t>& size :
       {std::vector<int64_t>{INT64_MAX, 2}, {2, INT64_MAX}, {1L << 31, 1L << 32}}) {
    for (const int64_t dim : {0, 1})
      expect_error<c10::ValueError>([&] { ChunkShardingSpec(dim, kFour).build_metadata(size, {}); },
                                    {"64 bits"});
    expect_error<c10::ValueError>(
        [&] {
          EnumerableShardingSpec({{{0, 0}, size, "rank:0"}}).build_metadata(size, {});
        },
        {"64 bits"});
  }
  // Shards that hold nothing may have any size otherwise.
  const std::vector<ShardMetadata> empty(4, {{0, 0}, {INT64_MAX / 2, 0}, "rank:0"});
  EXPECT_TRUE(*infer_sharding_spec(empty) == EnumerableShardingSpec(empty));
  EXPECT_NO_THROW(ChunkShardingSpec(1, kFour).build_metadata({INT64_MAX, 0}, {}));
}

TEST(PlacementSpec, OfOneDevice) {
  EXPECT_EQ(DevicePlacementSpec("rank:0/cuda:0"), DevicePlacementSpec(RemoteDevice(0, at::Device("cuda:0"))));
  EXPECT_FALSE(DevicePlacementSpec("rank:0") == DevicePlacementSpec("rank:1"));
}

}  // namespace
}  // namespace tessera::sharded
