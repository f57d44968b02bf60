#include <tessera/lru_cache.h>

#include <string>

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(LruCache, EvictsWhatWasNotUsedForLongest) {
  LruCache<int, std::string> cache(2);
  cache.insert(1, "one");
  cache.insert(2, "two");
  ASSERT_NE(cache.find(1), nullptr);
  cache.insert(3, "three");
  EXPECT_EQ(cache.find(2), nullptr);
  EXPECT_EQ(*cache.find(1), "one");
  EXPECT_EQ(*cache.find(3), "three");
}

TEST(LruCache, CountsHitsMissesAndEntries) {
  LruCache<int, int> cache(4);
  EXPECT_EQ(cache.find(1), nullptr);
  cache.insert(1, 10);
  cache.find(1);
  cache.find(1);
  const CacheStatistics known = cache.statistics();
  EXPECT_EQ(known.hits, 2u);
  EXPECT_EQ(known.misses, 1u);
  EXPECT_EQ(known.size, 1u);
  cache.clear();
  EXPECT_EQ(cache.statistics().size, 0u);
  EXPECT_EQ(cache.find(1), nullptr);
}

TEST(LruCache, CapacityCanShrink) {
  LruCache<int, int> cache(8);
  for (int i = 0; i < 8; ++i) cache.insert(i, i);
  cache.set_capacity(0);  // counts as 1
  cache.insert(8, 8);
  EXPECT_EQ(cache.statistics().size, 1u);
  EXPECT_NE(cache.find(8), nullptr);
}

}  // namespace
}  // namespace tessera
