// Overlaps and gaps of boxes, against trying all pairs and all elements; and that very many are no trouble.

#include <tessera/sharded/boxes.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "tests/sharded/specs.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::expect_error;
using Pair = std::pair<size_t, size_t>;
using Shards = std::vector<ShardMetadata>;

Shards random_boxes(std::mt19937& random, size_t count, int64_t dims, int64_t extent, int64_t longest) {
  auto number = [&](int64_t limit) { return static_cast<int64_t>(random() % (limit + 1)); };
  Shards result;
  for (size_t i = 0; i < count; ++i) {
    std::vector<int64_t> offsets, sizes;
    for (int64_t dim = 0; dim < dims; ++dim) {
      offsets.push_back(number(extent));
      sizes.push_back(random() % 5 == 0 ? extent : number(longest));
    }
    result.emplace_back(offsets, sizes);
  }
  return result;
}

// Each overlapping pair exactly once.
TEST(Boxes, OverlapsAreThoseOfAllPairs) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int64_t dims = round % 5, extent = 1 + round % 13;
    const Shards a = random_boxes(random, random() % 60, dims, extent, extent / 2);
    const Shards b = random_boxes(random, random() % 60, dims, extent, extent / 3);
    const std::vector<Box> boxes_a = boxes_of(a), boxes_b = boxes_of(b);
    std::multiset<Pair> expected, actual;
    for (size_t i = 0; i < a.size(); ++i) {
      for (size_t j = 0; j < b.size(); ++j) {
        if (intersect(boxes_a[i], boxes_b[j])) expected.emplace(i, j);
      }
    }
    for_each_overlap(boxes_a, boxes_b, [&](size_t i, size_t j) {
      actual.emplace(i, j);
      return false;
    });
    ASSERT_EQ(actual, expected) << "round " << round;
  }
}

TEST(Boxes, SearchStopsWhenTold) {
  const Shards same(100, ShardMetadata({0, 0}, {2, 2}));
  int calls = 0;
  for_each_overlap(boxes_of(same), boxes_of(same), [&](size_t, size_t) { return ++calls == 3; });
  EXPECT_EQ(calls, 3);
}

/// All of a tensor, split at random.
Shards random_tiling(std::mt19937& random, const std::vector<int64_t>& size, size_t count) {
  return testing::random_spec(random, size, count, 4).shards();
}

TEST(Validate, AcceptsTilingsAndFindsWhatIsWrong) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int64_t> size(1 + round % 4, 8);
    Shards tiles = random_tiling(random, size, 2 + random() % 6);
    ASSERT_NO_THROW(validate_non_overlapping_shards_metadata(tiles));
    ASSERT_NO_THROW(check_tensor(tiles, size));

    // One tile less: its first element is among those that are missing, and one that is missing is named.
    Shards fewer = tiles;
    const ShardMetadata gone = fewer.back();
    fewer.pop_back();
    const auto gap = find_gap(boxes_of(fewer), size);
    ASSERT_TRUE(gap);
    EXPECT_EQ(*gap, gone.shard_offsets);
    expect_error<c10::ValueError>([&] { check_tensor(fewer, size); }, {"none has element"});

    // One tile a little larger: overlaps, or reaches beyond the tensor.
    Shards larger = tiles;
    ShardMetadata& tile = larger[random() % larger.size()];
    const size_t dim = random() % size.size();
    ++tile.shard_sizes[dim];
    if (tile.shard_offsets[dim] + tile.shard_sizes[dim] > size[dim]) {
      expect_error<c10::ValueError>([&] { check_tensor(larger, size); }, {"beyond"});
    } else {
      expect_error<c10::ValueError>([&] { validate_non_overlapping_shards_metadata(larger); }, {"overlap"});
    }
  }
}

TEST(Validate, ShardsThatHoldNothingOverlapNone) {
  const Shards shards{{{0, 0}, {4, 4}}, {{2, 2}, {0, 4}}, {{2, 2}, {0, 4}}, {{9, 9}, {0, 0}}};
  EXPECT_NO_THROW(validate_non_overlapping_shards_metadata(shards));
  EXPECT_NO_THROW(check_tensor(shards, {4, 4}));
  EXPECT_NO_THROW(check_tensor({{{0}, {0}}}, {0}));
  EXPECT_NO_THROW(check_tensor({{{}, {}}}, {}));
}

TEST(Validate, Errors) {
  expect_error<c10::ValueError>(
      [] {
        validate_non_overlapping_shards_metadata({{{0}, {2}}, {{0}, {2}}});
      },
      {"Shards 0", "and 1", "element [0]"});
  expect_error<c10::ValueError>(
      [] {
        validate_non_overlapping_shards_metadata({{{0, 0}, {2, 2}}, {{2, 0}, {2, 2}}, {{1, 1}, {2, 2}}});
      },
      {"overlap"});
  expect_error<c10::ValueError>([] { check_tensor({}, {2}); }, {"no shards"});
  expect_error<c10::ValueError>([] { check_tensor({{{0}, {2}}, {{1}, {2}}}, {3}); }, {"overlap"});
  expect_error<c10::ValueError>([] { check_tensor({{{}, {}}, {{}, {}}}, {}); }, {"overlap"});
}

// What would take hours if all pairs were tried. In each the boxes do not overlap, so no luck helps to end
// early.
class Many : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Many,
                         ::testing::Values("line", "grid2", "grid3", "grid4", "slabs", "beams", "tiling"),
                         [](const auto& info) { return std::string(info.param); });

constexpr int64_t kMany = 100'000;

Shards grid(int64_t dims, int64_t side) {
  Shards result;
  std::vector<int64_t> at(dims, 0);
  for (int64_t dim = 0; dim >= 0;) {
    result.emplace_back(at, std::vector<int64_t>(dims, 1));
    for (dim = dims - 1; dim >= 0 && ++at[dim] == side; --dim) at[dim] = 0;
  }
  return result;
}

Shards many(const std::string& shape) {
  if (shape == "line") return grid(1, kMany);
  if (shape == "grid2") return grid(2, 316);
  if (shape == "grid3") return grid(3, 46);
  if (shape == "grid4") return grid(4, 18);
  Shards result;
  if (shape == "slabs") {  // long and thin, in two directions, side by side
    for (int64_t i = 0; i < kMany / 2; ++i) {
      result.push_back({{i, 0}, {1, kMany}});
      result.push_back({{kMany, i}, {kMany, 1}});
    }
  } else if (shape == "beams") {  // in three directions, woven: each passes near all of the others
    const auto side = static_cast<int64_t>(std::sqrt(kMany / 3));
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t j = 0; j < side; ++j) {
        result.push_back({{0, 2 * i, 2 * j}, {2 * side, 1, 1}});
        result.push_back({{2 * i, 0, 2 * j + 1}, {1, 2 * side, 1}});
        result.push_back({{2 * i + 1, 2 * j + 1, 0}, {1, 1, 2 * side}});
      }
    }
  } else {
    std::mt19937 random(3);
    result = random_tiling(random, {1 << 12, 1 << 12, 1 << 12}, kMany);
  }
  return result;
}

TEST_P(Many, AreCheckedAtOnce) {
  Shards shards = many(GetParam());
  std::mt19937 random(4);
  std::shuffle(shards.begin(), shards.end(), random);
  validate_non_overlapping_shards_metadata(shards);
  // And one more, which overlaps one of them, is found.
  ShardMetadata more = shards[shards.size() / 2];
  for (int64_t& size : more.shard_sizes) size = 1;
  shards.push_back(more);
  expect_error<c10::ValueError>([&] { validate_non_overlapping_shards_metadata(shards); },
                                {c10::str("and ", shards.size() - 1)});
}

TEST(ManyShards, CoverageIsCheckedToo) {
  Shards shards = grid(3, 46);
  EXPECT_NO_THROW(check_tensor(shards, {46, 46, 46}));
  const std::vector<int64_t> gone = shards[12345].shard_offsets;
  shards.erase(shards.begin() + 12345);
  expect_error<c10::ValueError>(
      [&] {
        check_tensor(shards, {46, 46, 46});
      },
      {c10::str("none has element ", c10::IntArrayRef(gone))});
}

}  // namespace
}  // namespace tessera::sharded
