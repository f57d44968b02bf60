// Who writes and reads what, without files and ranks: against counting every element.

#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/runs.h>
#include <tessera/checkpoint/save_plan.h>

#include <algorithm>
#include <numeric>
#include <random>

#include <c10/util/Exception.h>
#include <c10/util/irange.h>
#include <gmock/gmock.h>

namespace tessera::checkpoint {
namespace {

using ::testing::HasSubstr;

/// What planning a save of these throws.
std::string error_of(const std::vector<Description>& ranks) {
  try {
    plan_save(ranks);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// The flat positions in a tensor of that shape of the elements of a box, in row-major order of the box.
std::vector<int64_t> elements_of(const ChunkBox& box, const std::vector<int64_t>& shape) {
  std::vector<int64_t> result{0};
  for (const auto dim : c10::irange(shape.size())) {
    std::vector<int64_t> next;
    for (const int64_t outer : result) {
      for (const int64_t i : c10::irange(box.sizes[dim]))
        next.push_back(outer * shape[dim] + box.offsets[dim] + i);
    }
    result = std::move(next);
  }
  return result;
}

ChunkBox random_box(const std::vector<int64_t>& shape, std::mt19937& random) {
  ChunkBox box;
  for (const int64_t size : shape) {
    const int64_t extent = std::uniform_int_distribution<int64_t>(1, size)(random);
    box.sizes.push_back(extent);
    box.offsets.push_back(std::uniform_int_distribution<int64_t>(0, size - extent)(random));
  }
  return box;
}

std::vector<int64_t> random_shape(std::mt19937& random, int64_t largest) {
  std::vector<int64_t> shape(random() % 4);
  for (int64_t& size : shape) size = std::uniform_int_distribution<int64_t>(1, largest)(random);
  return shape;
}

/// Splits a shape at random into boxes that tile it.
void add_tiles(ChunkBox box, int depth, std::mt19937& random, std::vector<ChunkBox>& tiles) {
  std::vector<size_t> dims;
  for (const auto dim : c10::irange(box.sizes.size())) {
    if (box.sizes[dim] > 1) dims.push_back(dim);
  }
  if (depth == 0 || dims.empty()) {
    tiles.push_back(box);
    return;
  }
  const size_t dim = dims[random() % dims.size()];
  const int64_t at = std::uniform_int_distribution<int64_t>(1, box.sizes[dim] - 1)(random);
  ChunkBox second = box;
  second.offsets[dim] += at;
  second.sizes[dim] -= at;
  box.sizes[dim] = at;
  add_tiles(box, depth - 1, random, tiles);
  add_tiles(second, depth - 1, random, tiles);
}

std::vector<ChunkBox> random_tiles(const std::vector<int64_t>& shape, std::mt19937& random) {
  std::vector<ChunkBox> tiles;
  add_tiles({std::vector<int64_t>(shape.size(), 0), shape}, static_cast<int>(random() % 4), random, tiles);
  return tiles;
}

TEST(Runs, AreTheSharedElementsInOrder) {
  std::mt19937 random(1);
  int tried = 0;
  for (int i = 0; i < 3000; ++i) {
    const auto shape = random_shape(random, 5);
    const ChunkBox a = random_box(shape, random), b = random_box(shape, random);
    const auto in_a = elements_of(a, shape), in_b = elements_of(b, shape);
    std::vector<std::pair<int64_t, int64_t>> expected;
    for (const auto k : c10::irange(in_a.size())) {
      const auto found = std::find(in_b.begin(), in_b.end(), in_a[k]);
      if (found != in_b.end()) expected.emplace_back(k, found - in_b.begin());
    }
    if (expected.empty()) continue;
    ++tried;
    const Runs runs(a.offsets, a.sizes, b.offsets, b.sizes);
    ASSERT_EQ(runs.count() * runs.length(), static_cast<int64_t>(expected.size()));
    const auto total = static_cast<int64_t>(in_a.size());
    const int64_t begin = std::uniform_int_distribution<int64_t>(0, total)(random);
    const int64_t end = std::uniform_int_distribution<int64_t>(begin, total)(random);
    std::vector<std::pair<int64_t, int64_t>> found;
    runs.for_each_in(begin, end, [&](const Runs::Run& run) {
      ASSERT_GT(run.length, 0);
      for (const int64_t k : c10::irange(run.length)) found.emplace_back(run.in_a + k, run.in_b + k);
    });
    std::erase_if(expected, [&](const auto& pair) { return pair.first < begin || pair.first >= end; });
    ASSERT_EQ(found, expected);
  }
  EXPECT_GT(tried, 1000);
}

TEST(SavePlan, WritesEachElementOnceOfWhatTheRankHas) {
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const size_t world = 1 + random() % 5;
    std::vector<Description> ranks(world);
    std::map<std::string, std::vector<int64_t>> shapes;
    for (int t = 0; t < 4; ++t) {
      const std::string key = "w" + std::to_string(t);
      const auto shape = shapes[key] = random_shape(random, 600);
      const auto tiles = random_tiles(shape, random);
      for (const ChunkBox& tile : tiles) {
        // Each tile is on some ranks.
        const size_t first = random() % world;
        for (const auto rank : c10::irange(world)) {
          if (rank == first || random() % 2) ranks[rank][key].boxes.push_back(tile);
        }
      }
      for (Description& rank : ranks) {
        if (!rank.count(key) && random() % 2) continue;  // not all ranks need to have it
        rank[key].path = {key};
        rank[key].is_tensor = true;
        rank[key].shape = shape;
      }
    }
    for (Description& rank : ranks) {
      ASSERT_EQ(description_from_bytes(to_bytes(rank)), rank);
    }
    const SavePlan plan = plan_save(ranks);
    std::map<std::string, std::map<int64_t, int>> count;
    for (const auto rank : c10::irange(world)) {
      for (const Write& write : plan.writes[rank]) {
        const auto& source = ranks[rank].at(write.key).boxes.at(write.source);
        for (const auto dim : c10::irange(source.sizes.size())) {
          ASSERT_GE(write.box.offsets[dim], source.offsets[dim]);
          ASSERT_LE(write.box.offsets[dim] + write.box.sizes[dim], source.offsets[dim] + source.sizes[dim]);
        }
      }
    }
    for (const auto& [key, shape] : shapes) {
      Catalog catalog;
      TensorEntry tensor{shape, at::kFloat, {}};
      for (const auto& writes : plan.writes) {
        for (const Write& write : writes) {
          if (write.key != key) continue;
          Chunk chunk;
          chunk.offsets = write.box.offsets;
          chunk.sizes = write.box.sizes;
          chunk.length = byte_count(write.box.sizes, at::kFloat, key);
          tensor.chunks.push_back(chunk);
        }
      }
      catalog.leaves[key] = Leaf{{key}, tensor};
      ASSERT_NO_THROW(check(catalog));
    }
  }
}

TEST(SavePlan, SpreadsReplicas) {
  for (const size_t world : {2, 3, 8}) {
    std::vector<Description> ranks(world);
    int64_t total = 0;
    for (const auto& [key, rows] : std::map<std::string, int64_t>{{"a", 40'000}, {"b", 1'000}, {"c", 7}}) {
      for (Description& rank : ranks)
        rank[key] = {{key}, true, {rows, 1024}, at::kFloat, {{{0, 0}, {rows, 1024}}}, ""};
      total += rows * 4096;
    }
    const SavePlan plan = plan_save(ranks);
    for (const auto& writes : plan.writes) {
      int64_t bytes = 0;
      for (const Write& write : writes) bytes += byte_count(write.box.sizes, at::kFloat, "");
      EXPECT_LE(bytes, total / static_cast<int64_t>(world) * 13 / 10) << world;
    }
  }
}

TEST(SavePlan, RefusesRanksThatDiffer) {
  const LeafDescription tensor{{"w"}, true, {4}, at::kFloat, {{{0}, {4}}}, ""};
  LeafDescription other = tensor;
  other.shape = {5};
  other.boxes = {{{0}, {5}}};
  EXPECT_THAT(error_of({{{"w", tensor}}, {{"w", other}}}),
              HasSubstr("'w' is a tensor Float [4] on rank 0, but a tensor Float [5] on rank 1"));
  const LeafDescription one{{"s"}, false, {}, at::kFloat, {}, "1"},
      two{{"s"}, false, {}, at::kFloat, {}, "2"};
  EXPECT_THAT(error_of({{{"s", one}}, {{"s", two}}}), HasSubstr("'s' is 1 on rank 0, but 2 on rank 1"));
  LeafDescription half = tensor;
  half.boxes = {{{0}, {2}}};
  EXPECT_THAT(error_of({{{"w", half}}}), HasSubstr("holds the element [2]"));
  EXPECT_THAT(error_of({{{"w", half}}, {{"w", tensor}}}), HasSubstr("more elements"));
}

TEST(LoadPlan, ReadsEachNeededBlockOnce) {
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const size_t world = 1 + random() % 5;
    const std::vector<int64_t> shape = random_shape(random, 40);
    TensorEntry tensor{shape, at::kFloat, {}};
    for (const ChunkBox& tile : random_tiles(shape, random)) {
      Chunk chunk;
      chunk.offsets = tile.offsets;
      chunk.sizes = tile.sizes;
      chunk.length = byte_count(tile.sizes, at::kFloat, "");
      chunk.file = "f";
      chunk.checksums = Checksums{64, std::vector<uint32_t>((chunk.length + 63) / 64)};
      tensor.chunks.push_back(chunk);
    }
    Catalog catalog;
    catalog.leaves["w"] = Leaf{{"w"}, tensor};
    ASSERT_EQ(catalog_from_bytes(to_bytes(catalog)).leaves.at("w").content, catalog.leaves.at("w").content);

    std::vector<Description> ranks(world);
    for (Description& rank : ranks) {
      if (random() % 4 == 0) continue;
      rank["w"] = {{"w"}, true, shape, at::kFloat, {random_box(shape, random)}, ""};
      if (random() % 2) rank["w"].boxes.push_back(random_box(shape, random));
    }
    // chunk, block -> ranks
    std::map<std::pair<size_t, int64_t>, std::vector<int64_t>> expected;
    for (const auto rank : c10::irange(world)) {
      if (!ranks[rank].count("w")) continue;
      for (const ChunkBox& box : ranks[rank]["w"].boxes) {
        const auto wanted = elements_of(box, shape);
        for (const auto c : c10::irange(tensor.chunks.size())) {
          const auto held = elements_of({tensor.chunks[c].offsets, tensor.chunks[c].sizes}, shape);
          for (const auto k : c10::irange(held.size())) {
            if (!std::binary_search(wanted.begin(), wanted.end(), held[k])) continue;
            auto& list = expected[{c, static_cast<int64_t>(k) * 4 / 64}];
            if (list.empty() || list.back() != static_cast<int64_t>(rank))
              list.push_back(static_cast<int64_t>(rank));
          }
        }
      }
    }
    const LoadPlan plan = plan_load(catalog, ranks);
    std::map<std::pair<size_t, int64_t>, std::vector<int64_t>> found;
    std::vector<int64_t> bytes(world, 0);
    for (const Read& read : plan.reads) {
      ASSERT_EQ(read.begin % 64, 0);
      ASSERT_TRUE(read.end % 64 == 0 || read.end == tensor.chunks[read.chunk].length);
      ASSERT_TRUE(std::count(read.needed_by.begin(), read.needed_by.end(), read.reader));
      bytes[read.reader] += read.bytes();
      for (int64_t block = read.begin / 64; block * 64 < read.end; ++block)
        ASSERT_TRUE(found.emplace(std::pair(read.chunk, block), read.needed_by).second) << "read twice";
    }
    ASSERT_EQ(found, expected);
    ASSERT_EQ(plan.bytes_read, bytes);
  }
}

TEST(SavePlan, RefusesWhatCannotBeCounted) {
  const std::vector<int64_t> shape{int64_t{1} << 62};
  const LeafDescription leaf{{"w"}, true, shape, at::kByte, {{{0}, shape}}, ""};
  Description description{{"w", leaf}};
  EXPECT_EQ(plan_save({description, description}).writes.size(), 2u);
  description["v"] = leaf;
  description["v"].path = {"v"};
  description["u"] = leaf;
  description["u"].path = {"u"};
  EXPECT_THROW(plan_save({description, description}), c10::ValueError);
}

TEST(Messages, NameWhatThereIs) {
  const Description description{{"w", {{"w"}, true, {2}, at::kByte, {{{0}, {2}}}, ""}}};
  const std::string good = to_bytes(description);
  for (size_t i = 0; i < good.size(); ++i) EXPECT_ANY_THROW(description_from_bytes(good.substr(0, i))) << i;
  EXPECT_ANY_THROW(description_from_bytes(good + "x"));
  Description wrong = description;
  wrong["w"].dtype = static_cast<c10::ScalarType>(100);
  EXPECT_ANY_THROW(description_from_bytes(to_bytes(wrong)));
  Catalog catalog;
  catalog.format = static_cast<Format>(7);
  EXPECT_ANY_THROW(catalog_from_bytes(to_bytes(catalog)));
}

TEST(LoadPlan, DealsOutWhatAllNeed) {
  TensorEntry tensor{{64 << 20}, at::kByte, {}};
  Chunk chunk;
  chunk.offsets = {0};
  chunk.sizes = tensor.shape;
  chunk.length = 64 << 20;
  tensor.chunks = {chunk};
  Catalog catalog;
  catalog.leaves["w"] = Leaf{{"w"}, tensor};
  const Description all{{"w", {{"w"}, true, tensor.shape, at::kByte, {{{0}, tensor.shape}}, ""}}};
  const LoadPlan plan = plan_load(catalog, {all, all, all, all});
  for (const int64_t bytes : plan.bytes_read) EXPECT_EQ(bytes, 16 << 20);
}

TEST(ChecksumBlock, IsNeitherSmallNorLarge) {
  EXPECT_EQ(checksum_block(1), 64 << 10);
  EXPECT_EQ(checksum_block(64 << 20), 256 << 10);
  EXPECT_EQ(checksum_block(int64_t{1} << 40), 1 << 20);
}

}  // namespace
}  // namespace tessera::checkpoint
