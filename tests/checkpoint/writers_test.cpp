// Several that save into one path, or load from it, at once.

#include <tessera/checkpoint/file.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "tests/checkpoint/directory.h"
#include "tests/checkpoint/small_state.h"
#include "tests/support/ranks.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::spawn_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Saves again and again, until it did `times`: how often somebody else was at it. Other errors are failures.
int save_often(const std::string& path, int64_t number, Format format, int times) {
  int saved = 0, refused = 0;
  while (saved < times) {
    try {
      SaveOptions options;
      options.format = format;
      save(small_state(number, format), path, options);
      ++saved;
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  HasSubstr("Another save into " + path + " is under way. Wait for it"));
      ++refused;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return refused;
}

class WritersOf : public ::testing::TestWithParam<Format> {};

INSTANTIATE_TEST_SUITE_P(Formats, WritersOf,
                         ::testing::Values(Format::Tessera, Format::DCP, Format::HuggingFace),
                         [](const auto& info) { return name_of_format(info.param); });

TEST_P(WritersOf, ThreadsWhileOthersLoad) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x";
  SaveOptions options;
  options.format = GetParam();
  save(small_state(1, GetParam()), path, options);
  std::atomic<int> writing{2}, refused{0}, loaded{0};
  std::vector<std::thread> threads;
  for (const int64_t number : {1, 2}) {
    threads.emplace_back([&, number] {
      refused += save_often(path, number, GetParam(), 40);
      --writing;
    });
  }
  // Ranks that load together, and one that loads alone. Never a mixture: `load_number` would fail.
  threads.emplace_back([&] {
    while (writing > 0) {
      load_number(path, GetParam());
      ++loaded;
    }
  });
  EXPECT_NO_THROW(run(2, [&] {
    for (int i = 0; i < 40; ++i) {
      load_number(path, GetParam());
      ++loaded;
    }
  }));
  for (std::thread& thread : threads) thread.join();
  std::cout << "80 saved, " << refused << " refused, " << loaded << " loaded\n";
  EXPECT_GT(loaded, 0);
  EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
}

RANK_BODY(save_often) {
  const std::string path = std::getenv("TESSERA_TEST_PATH");
  // Each is a program of its own, of one rank.
  save_often(path, std::atoll(std::getenv("RANK")) + 1, Format::Tessera, 40);
}

TEST(Writers, Processes) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x";
  save(small_state(1), path);
  std::atomic<bool> ended{false};
  std::atomic<int> loaded{0};
  std::thread reader([&] {
    while (!ended) {
      load_number(path);
      ++loaded;
    }
  });
  support::SpawnOptions options;
  options.environment = {{"TESSERA_TEST_PATH", path}};
  const auto results = spawn_ranks("save_often", 2, options);
  ended = true;
  reader.join();
  testing::expect_ok(results);
  EXPECT_GT(loaded, 0);
  EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
}

/// What a process left over from a save that was given up writes does not get into the next one.
TEST(Writers, EachSaveHasADirectoryOfItsOwn) {
  const TemporaryDirectory directory;
  std::vector<std::string> made;
  set_file_fault([&](std::string_view call, const std::string& path) {
    if (call == "mkdir") made.push_back(path);
  });
  save(small_state(1), directory / "x");
  save(small_state(2), directory / "x");
  ASSERT_EQ(made.size(), 2u);
  EXPECT_NE(made[0], made[1]);
}

}  // namespace
}  // namespace tessera::checkpoint
