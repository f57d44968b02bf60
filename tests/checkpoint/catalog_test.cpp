#include <tessera/checkpoint/catalog.h>

#include <limits>

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

namespace tessera::checkpoint {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Chunk chunk(std::vector<int64_t> offsets, std::vector<int64_t> sizes, int64_t length) {
  Chunk result;
  result.offsets = std::move(offsets);
  result.sizes = std::move(sizes);
  result.file = "a.safetensors";
  result.length = length;
  return result;
}

std::string error_of(TensorEntry tensor) {
  Catalog catalog;
  catalog.leaves["w"] = Leaf{{"w"}, std::move(tensor)};
  try {
    check(catalog);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Catalog, TakesTilings) {
  EXPECT_EQ(error_of({{4, 4}, at::kFloat, {chunk({0, 0}, {4, 2}, 32), chunk({0, 2}, {4, 2}, 32)}}), "");
  EXPECT_EQ(error_of({{}, at::kDouble, {chunk({}, {}, 8)}}), "");
  EXPECT_EQ(error_of({{0, 4}, at::kDouble, {}}), "");
  EXPECT_EQ(error_of({{0, kMax, kMax}, at::kDouble, {}}), "");
}

TEST(Catalog, RefusesWhatDoesNotFit) {
  using testing::HasSubstr;
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0}, {3}, 12)}}), HasSubstr("holds the element [3]"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0}, {3}, 12), chunk({2}, {1}, 4)}}), HasSubstr("overlap"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0}, {4}, 16), chunk({0}, {4}, 16)}}),
              HasSubstr("more elements"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({1}, {4}, 16)}}), HasSubstr("does not lie in"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({-1}, {4}, 16)}}), HasSubstr("does not lie in"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0}, {kMax}, 16)}}), HasSubstr("does not lie in"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({kMax}, {1}, 16)}}), HasSubstr("does not lie in"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0}, {4}, 15)}}),
              HasSubstr("has 15 bytes, but its elements take 16"));
  EXPECT_THAT(error_of({{4}, at::kFloat, {chunk({0, 0}, {4, 1}, 16)}}), HasSubstr("another number of dims"));
  EXPECT_THAT(error_of({{kMax, kMax}, at::kFloat, {}}), HasSubstr("64 bits"));
  EXPECT_THAT(error_of({{-1}, at::kFloat, {}}), HasSubstr("negative size"));
  Chunk summed = chunk({0}, {20}, 80);
  summed.checksums = Checksums{64, {1}};
  EXPECT_THAT(error_of({{20}, at::kFloat, {summed}}), HasSubstr("has 1 checksums, but 2 blocks"));
  summed.checksums = Checksums{40, {1, 1}};
  EXPECT_THAT(error_of({{20}, at::kFloat, {summed}}), HasSubstr("no multiple of 16"));
  Chunk far = chunk({0}, {4}, 16);
  far.offset = kMax;
  EXPECT_THAT(error_of({{4}, at::kFloat, {far}}), HasSubstr("beyond 64 bits"));
}

TEST(Catalog, KeysArePathsJoinedByDots) {
  EXPECT_EQ(key_of({"model", "layers", int64_t{0}, "weight"}), "model.layers.0.weight");
  EXPECT_EQ(key_of({}), "");
}

}  // namespace
}  // namespace tessera::checkpoint
