#include <tessera/dispatch/write_count.h>

#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(WriteCount, CountsFromWhenItIsFirstAsked) {
  WriteCount count;
  count.bump();  // nobody compares with it yet
  EXPECT_EQ(count.value(), 0u);
  count.bump();
  count.bump();
  EXPECT_EQ(count.value(), 2u);
}

TEST(WriteCount, IsOneForAllThatShareIt) {
  WriteCount base, view, view_of_view;
  base.value();
  base.bump();
  view.share(base);
  EXPECT_EQ(view.value(), 1u);
  view_of_view.share(view);
  view_of_view.bump();
  EXPECT_EQ(base.value(), 2u);
  EXPECT_EQ(view.value(), 2u);
}

TEST(WriteCount, SharingGivesUpTheCountBefore) {
  WriteCount a, b, c;
  b.share(a);
  a.value();
  a.bump();
  b.share(c);
  a.bump();
  EXPECT_EQ(a.value(), 2u);
  EXPECT_EQ(b.value(), 0u);
  b.share(b);
  c.bump();
  EXPECT_EQ(b.value(), 1u);
}

TEST(WriteCount, OutlivesTheOneThatItIsSharedWith) {
  WriteCount view;
  {
    auto base = std::make_unique<WriteCount>();
    view.share(*base);
    base->bump();
  }
  view.bump();
  EXPECT_EQ(view.value(), 2u);
}

TEST(WriteCount, MayBeAskedAndSharedByManyThreads) {
  for (int round = 0; round < 100; ++round) {
    WriteCount base;
    std::vector<WriteCount> views(4);
    std::vector<std::thread> threads;
    for (WriteCount& view : views) {
      threads.emplace_back([&] {
        view.share(base);  // the first of them makes the count
        view.bump();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(base.value(), 4u);
    for (const WriteCount& view : views) EXPECT_EQ(view.value(), 4u);
  }
}

}  // namespace
}  // namespace tessera
