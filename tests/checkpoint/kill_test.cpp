// A save that is killed at any call that changes the disk leaves the old checkpoint or the new one, whole, and the next
// save leaves nothing else.

#include <tessera/checkpoint/file.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <random>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/checkpoint/directory.h"
#include "tests/checkpoint/small_state.h"
#include "tests/support/ranks.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::spawn_ranks;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

SaveOptions options_of(Format format) {
  SaveOptions options;
  options.format = format;
  return options;
}

int64_t number_from(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? std::atoll(text) : -1;
}

// --- One process -----------------------------------------------------------------------------------------

/// How a child that overwrites a checkpoint ended.
enum class Ended { Well, Killed, Badly };

/// Saves in a child that is killed before its call number `call`. If not `exchange`, the file system cannot exchange
/// two names.
Ended save_in_child(const StateDict& state, const std::string& path, const SaveOptions& options, int call,
                    bool exchange) {
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    set_file_fault([&](std::string_view name, const std::string&) {
      if (count++ == call) ::kill(::getpid(), SIGKILL);
      if (!exchange && name == "exchange") throw SystemFailure{EINVAL};
    });
    try {
      save(state, path, options);
    } catch (const std::exception& error) {
      std::cerr << error.what() << "\n";
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status)) return WEXITSTATUS(status) == 0 ? Ended::Well : Ended::Badly;
  return WTERMSIG(status) == SIGKILL ? Ended::Killed : Ended::Badly;
}

TEST(Kill, OneProcessAtEveryCall) {
  int rounds = 0;
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    for (const bool exchange : {true, false}) {
      for (const bool has_old : {true, false}) {
        for (int call = 0;; ++call, ++rounds) {
          SCOPED_TRACE(c10::str(name_of_format(format), ", exchange ", exchange, ", over an old one ",
                                has_old, ", killed before call ", call));
          const TemporaryDirectory directory;
          const std::string path = directory / "x";
          if (has_old) save(small_state(1, format), path, options_of(format));
          const Ended ended = save_in_child(small_state(2, format), path, options_of(format), call, exchange);
          ASSERT_NE(ended, Ended::Badly);
          if (has_old || ended == Ended::Well || exists(path)) {
            EXPECT_THAT(load_number(path, format), AnyOf(1, 2));
            if (!has_old || ended == Ended::Well) EXPECT_EQ(load_number(path, format), 2);
          }
          if (ended == Ended::Well) {
            EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
            EXPECT_GT(call, 8);
            break;
          }
          save(small_state(3, format), path, options_of(format));
          EXPECT_EQ(load_number(path, format), 3);
          EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
        }
      }
    }
  }
  std::cout << rounds << " saves were killed\n";
}

/// What a save of another step of the same run left is removed too, and no older checkpoint is half removed.
TEST(Kill, OneOfASeriesAtEveryCall) {
  for (int call = 0;; ++call) {
    SCOPED_TRACE(call);
    const TemporaryDirectory directory;
    for (const int64_t step : {1, 2}) save(small_state(step), directory / c10::str("step-", step));
    SaveOptions options;
    options.keep_last = 2;
    const Ended ended = save_in_child(small_state(3), directory / "step-3", options, call, true);
    ASSERT_NE(ended, Ended::Badly);
    for (const std::string& name : names_in(directory.path())) {
      if (name.front() != '.') EXPECT_EQ(load_number(directory / name), name.back() - '0');
    }
    EXPECT_THAT(load_number(latest(directory.path())), AnyOf(2, 3));
    if (ended == Ended::Well) {
      EXPECT_THAT(names_in(directory.path()), ElementsAre("step-2", "step-3"));
      break;
    }
    save(small_state(4), directory / "step-4", options);
    for (const std::string& name : names_in(directory.path())) {
      // An empty lock of a step that is never saved again is all that may stay.
      EXPECT_THAT(name, AnyOf("step-2", "step-3", "step-4", ".step-3.lock", ".step-1.lock"));
    }
  }
}

// --- Ranks that are processes ----------------------------------------------------------------------------

constexpr auto kTimeout = std::chrono::seconds(20);

RANK_BODY(save_and_be_killed) {
  const std::string path = std::getenv("TESSERA_TEST_PATH");
  const auto format = static_cast<Format>(number_from("TESSERA_TEST_FORMAT"));
  const int64_t rank = number_from("TESSERA_TEST_RANK"), call = number_from("TESSERA_TEST_CALL");
  RunOptions options;
  options.timeout = kTimeout;
  std::string error;
  int64_t count = 0;
  launch(
      1,
      [&] {
        const StateDict state = small_state(2, format);
        const bool is_victim = get_rank() == rank;
        set_file_fault([&](std::string_view, const std::string&) {
          if (count++ == call && is_victim) ::kill(::getpid(), SIGKILL);
        });
        const auto begin = std::chrono::steady_clock::now();
        try {
          save(state, path, options_of(format));
        } catch (const c10::Error& failed) {
          error = failed.what_without_backtrace();
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout + std::chrono::seconds(10));
        set_file_fault({});
      },
      options);
  std::cout << "calls: " << count << "\n";
  if (!error.empty()) std::cout << "error: " << error << "\n";
}

std::vector<support::ProcessResult> save_on_two(const std::string& path, Format format, int64_t rank,
                                                int64_t call) {
  support::SpawnOptions options;
  options.environment = {{"TESSERA_TEST_PATH", path},
                         {"TESSERA_TEST_FORMAT", std::to_string(static_cast<int>(format))},
                         {"TESSERA_TEST_RANK", std::to_string(rank)},
                         {"TESSERA_TEST_CALL", std::to_string(call)}};
  return spawn_ranks("save_and_be_killed", 2, options);
}

int64_t calls_of(const support::ProcessResult& result) {
  const size_t at = result.output.find("calls: ");
  EXPECT_NE(at, std::string::npos) << result.output;
  return at == std::string::npos ? 0 : std::atoll(result.output.c_str() + at + 7);
}

/// All ranks and calls with TESSERA_CHECKPOINT_FAULTS=all; else some, others each day.
TEST(Kill, OneOfTwoRanksAtEveryCall) {
  const char* wanted = std::getenv("TESSERA_CHECKPOINT_FAULTS");
  const bool all = wanted && std::string_view(wanted) == "all";
  std::mt19937 random(
      static_cast<unsigned>(std::chrono::system_clock::now().time_since_epoch() / std::chrono::hours(24)));
  struct Round {
    Format format;
    int64_t rank;
    int64_t call;
  };
  std::vector<Round> rounds;
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    if (!all && format != Format::Tessera) continue;
    const TemporaryDirectory directory;
    save(small_state(1, format), directory / "x", options_of(format));
    const auto results = save_on_two(directory / "x", format, -1, -1);
    testing::expect_ok(results);
    EXPECT_EQ(load_number(directory / "x", format), 2);
    EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
    for (const int64_t rank : {0, 1}) {
      EXPECT_GE(calls_of(results[rank]), 2);
      for (int64_t call = 0; call < calls_of(results[rank]); ++call) rounds.push_back({format, rank, call});
    }
  }
  const size_t possible = rounds.size();
  if (!all) {
    std::shuffle(rounds.begin(), rounds.end(), random);
    rounds.resize(std::min<size_t>(rounds.size(), 8));
  }
  for (const auto& [format, rank, call] : rounds) {
    SCOPED_TRACE(c10::str(name_of_format(format), ", rank ", rank, " killed before call ", call));
    const TemporaryDirectory directory;
    const std::string path = directory / "x";
    save(small_state(1, format), path, options_of(format));
    const auto results = save_on_two(path, format, rank, call);
    EXPECT_EQ(results[rank].signal, SIGKILL) << results[rank].output;
    const auto& survivor = results[1 - rank];
    EXPECT_TRUE(survivor.ok()) << "ended with code " << survivor.exit_code << ", signal " << survivor.signal
                               << ": " << survivor.output;
    EXPECT_THAT(survivor.output, HasSubstr("error: Saving to " + path + " failed"));
    EXPECT_THAT(survivor.output, HasSubstr(c10::str("rank ", rank, " (process ")));
    EXPECT_THAT(survivor.output, HasSubstr(") was killed by signal 9"));
    EXPECT_THAT(load_number(path, format), AnyOf(1, 2));
    // Rank 0 cleans up if it can.
    if (rank == 1) EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
    save(small_state(3, format), path, options_of(format));
    EXPECT_EQ(load_number(path, format), 3);
    EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
  }
  std::cout << rounds.size() << " of " << possible << " rounds of two processes\n";
}

}  // namespace
}  // namespace tessera::checkpoint
