#include <tessera/thread_scope.h>

#include <memory>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Depth = ThreadScope<int, struct DepthTag>;

TEST(ThreadScope, InnermostCounts) {
  EXPECT_EQ(Depth::current(), 0);
  {
    const Depth outer(1);
    EXPECT_EQ(Depth::current(), 1);
    EXPECT_EQ(outer.outer(), 0);
    {
      const Depth inner(2);
      EXPECT_EQ(Depth::current(), 2);
      EXPECT_EQ(inner.outer(), 1);
    }
    EXPECT_EQ(Depth::current(), 1);
  }
  EXPECT_EQ(Depth::current(), 0);
}

TEST(ThreadScope, ThreadsAndTagsAreSeparate) {
  const Depth here(1);
  EXPECT_EQ((ThreadScope<int, struct OtherTag>::current()), 0);
  std::thread([] {
    EXPECT_EQ(Depth::current(), 0);
    const Depth there(7);
    EXPECT_EQ(Depth::current(), 7);
  }).join();
  EXPECT_EQ(Depth::current(), 1);
}

TEST(ThreadScope, EndsWithAnException) {
  EXPECT_THROW(
      {
        const Depth scope(3);
        throw std::runtime_error("");
      },
      std::runtime_error);
  EXPECT_EQ(Depth::current(), 0);
}

TEST(ThreadScope, OwnsItsValue) {
  const auto value = std::make_shared<int>(5);
  {
    const ThreadScope<std::shared_ptr<int>, struct SharedTag> scope(value);
    EXPECT_EQ(value.use_count(), 2);
  }
  EXPECT_EQ(value.use_count(), 1);
}

}  // namespace
}  // namespace tessera
