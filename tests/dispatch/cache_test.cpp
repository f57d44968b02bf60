#include <tessera/dispatch/cache.h>

#include <string>

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Cache = LeastRecentlyUsed<std::string>;

std::string found(Cache& cache, const CacheKey& key) {
  const std::string* value = cache.find(key);
  return value ? *value : "nothing";
}

TEST(LeastRecentlyUsed, FindsWhatWasInserted) {
  Cache cache(4);
  EXPECT_EQ(found(cache, {1, 2}), "nothing");
  EXPECT_EQ(cache.insert({1, 2}, "a"), "a");
  cache.insert({1, 2, 3}, "longer");
  cache.insert({}, "empty");
  EXPECT_EQ(found(cache, {1, 2}), "a");
  EXPECT_EQ(found(cache, {1, 2, 3}), "longer");
  EXPECT_EQ(found(cache, {}), "empty");
  EXPECT_EQ(found(cache, {2, 1}), "nothing");
}

TEST(LeastRecentlyUsed, ForgetsWhatWasNotUsedForLongest) {
  Cache cache(3);
  for (const uint64_t key : {1, 2, 3}) cache.insert({key}, std::to_string(key));
  EXPECT_EQ(found(cache, {1}), "1");  // 2 is the oldest now
  cache.insert({4}, "4");
  EXPECT_EQ(found(cache, {2}), "nothing");
  EXPECT_EQ(found(cache, {1}), "1");
  EXPECT_EQ(found(cache, {3}), "3");
  EXPECT_EQ(found(cache, {4}), "4");
  cache.insert({5}, "5");  // found last above: 4, 3, and before them 1
  EXPECT_EQ(found(cache, {1}), "nothing");
}

TEST(LeastRecentlyUsed, NeverGrowsBeyondItsCapacity) {
  Cache cache(8);
  for (uint64_t key = 0; key < 1000; ++key) {
    cache.insert({key, key * key}, "value");
    EXPECT_LE(cache.statistics().size, 8u);
  }
  cache.set_capacity(2);
  cache.insert({1000}, "value");
  EXPECT_EQ(cache.statistics().size, 2u);
  EXPECT_EQ(found(cache, {1000}), "value");
}

TEST(LeastRecentlyUsed, ACapacityOfNothingKeepsTheLatest) {
  Cache cache(4);
  cache.set_capacity(0);
  cache.insert({1}, "a");
  EXPECT_EQ(found(cache, {1}), "a");
  cache.insert({2}, "b");
  EXPECT_EQ(found(cache, {1}), "nothing");
  EXPECT_EQ(found(cache, {2}), "b");
}

TEST(LeastRecentlyUsed, CountsHitsAndMisses) {
  Cache cache(4);
  cache.insert({1}, "a");
  cache.find({1});
  cache.find({1});
  cache.find({2});
  cache.clear();
  cache.find({1});
  const CacheStatistics statistics = cache.statistics();
  EXPECT_EQ(statistics.hits, 2u);
  EXPECT_EQ(statistics.misses, 2u);
  EXPECT_EQ(statistics.size, 0u);
  cache.insert({1}, "again");
  EXPECT_EQ(found(cache, {1}), "again");
}

}  // namespace
}  // namespace tessera
