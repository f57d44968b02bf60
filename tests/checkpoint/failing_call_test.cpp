// Calls of the system that fail while a checkpoint is saved: every rank hears which rank failed and why, the old
// checkpoint stays, nothing is left behind, and the program goes on.

#include <tessera/checkpoint/file.h>
#include <tessera/comm/collectives.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/checkpoint/directory.h"
#include "tests/checkpoint/small_state.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kOnlyCleaningUp = "The checkpoint is saved, but";

/// Lets calls of `rank` fail from its call number `first` on, `count` of them. It is for the process: one at a time.
class FailingCalls {
 public:
  FailingCalls(int64_t rank, int64_t first, int64_t count, int code) {
    set_file_fault([this, rank, first, count, code](std::string_view, const std::string&) {
      if (get_rank() != rank) return;
      const int64_t call = seen_++;
      if (call < first || call - first >= count) return;
      has_failed_ = true;
      throw SystemFailure{code};
    });
  }
  ~FailingCalls() { set_file_fault({}); }
  bool has_failed() const { return has_failed_; }

 private:
  std::atomic<int64_t> seen_{0};
  std::atomic<bool> has_failed_{false};
};

void meet() { comm::barrier(current_world()->group()).wait(); }

TEST(FailingCall, EveryOneOnEveryRank) {
  int rounds = 0, only_cleaning = 0;
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    SaveOptions options;
    options.format = format;
    for (const int64_t ranks : {2, 3}) {
      for (int64_t victim = 0; victim < ranks; ++victim) {
        for (const int64_t failing : {int64_t{1}, int64_t{1000}}) {  // one call, or all from there on
          const int code = failing == 1 ? EIO : ENOSPC;
          run(ranks, [&] {
            for (int64_t call = 0;; ++call) {
              SCOPED_TRACE(c10::str(name_of_format(format), ", ", ranks, " ranks, call ", call, " of rank ",
                                    victim, " fails, and ", failing - 1, " more"));
              static std::optional<TemporaryDirectory> directory;
              static std::optional<FailingCalls> calls;
              if (get_rank() == 0) directory.emplace();
              meet();
              const std::string path = *directory / "x";
              save(small_state(1, format), path, options);
              if (get_rank() == 0) calls.emplace(victim, call, failing, code);
              meet();
              std::string error;
              try {
                save(small_state(2, format), path, options);
              } catch (const c10::Error& failed) {
                error = failed.what_without_backtrace();
              }
              meet();
              const bool has_failed = calls->has_failed();
              meet();
              if (get_rank() == 0) calls.reset();
              meet();
              EXPECT_EQ(!error.empty(), has_failed) << error;
              if (has_failed) {
                EXPECT_THAT(error, AllOf(HasSubstr(c10::str("failed on rank ", victim, ": ")),
                                         HasSubstr(std::strerror(code)), HasSubstr("Could not")));
                const bool only_cleaning_up = error.find(kOnlyCleaningUp) != std::string::npos;
                EXPECT_EQ(load_number(path, format), only_cleaning_up ? 2 : 1);
                if (get_rank() == 0) {
                  ++rounds;
                  only_cleaning += only_cleaning_up;
                  if (failing == 1) EXPECT_THAT(names_in(directory->path()), ElementsAre("x"));
                }
              }
              meet();
              save(small_state(3, format), path, options);
              EXPECT_EQ(load_number(path, format), 3);
              if (get_rank() == 0) EXPECT_THAT(names_in(directory->path()), ElementsAre("x"));
              meet();
              if (get_rank() == 0) directory.reset();
              if (!has_failed) {
                EXPECT_GE(call, 2);
                break;
              }
            }
          });
        }
      }
    }
  }
  std::cout << rounds << " failing calls, of which " << only_cleaning << " only kept the old one\n";
}

TEST(FailingCall, InTheBackground) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x";
  run(2, [&] {
    save(small_state(1), path);
    static std::optional<FailingCalls> calls;
    if (get_rank() == 0) calls.emplace(1, 2, 1, ENOSPC);
    meet();
    PendingSave pending = async_save(small_state(2), path);
    EXPECT_THAT(error_of([&] { pending.wait(); }),
                AllOf(HasSubstr("failed on rank 1"), HasSubstr(std::strerror(ENOSPC))));
    meet();
    if (get_rank() == 0) calls.reset();
    meet();
    EXPECT_EQ(load_number(path), 1);
    PendingSave next = async_save(small_state(3), path);
    next.wait();
    EXPECT_EQ(load_number(path), 3);
  });
  EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
}

StateDict big_state() {
  StateDict state;
  state["w"] = at::ones({1 << 20});
  return state;
}

/// A file system of 1 MiB, if one may be mounted.
struct SmallFileSystem {
  explicit SmallFileSystem(std::string path) : path(std::move(path)) {
    is_mounted = ::mount("tmpfs", this->path.c_str(), "tmpfs", 0, "size=1m") == 0;
  }
  ~SmallFileSystem() {
    if (is_mounted) ::umount2(path.c_str(), MNT_DETACH);
  }
  const std::string path;
  bool is_mounted = false;
};

TEST(FullDisk, KeepsTheOldOne) {
  const TemporaryDirectory directory;
  const SmallFileSystem disk(directory.path());
  if (!disk.is_mounted)
    GTEST_SKIP() << "a small file system cannot be mounted here: " << std::strerror(errno);
  const std::string path = directory / "x";
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    SaveOptions options;
    options.format = format;
    run(2, [&] {
      save(small_state(1, format), path, options);
      EXPECT_THAT(error_of([&] { save(big_state(), path, options); }),
                  AllOf(HasSubstr("Saving to " + path + " failed on rank "), HasSubstr("Free space there")));
      EXPECT_EQ(load_number(path, format), 1);
      meet();
      if (get_rank() == 0) EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
      meet();
      save(small_state(2, format), path, options);
      EXPECT_EQ(load_number(path, format), 2);
    });
  }
}

/// The same where nothing can be mounted: files may not grow beyond a limit.
TEST(FullDisk, OrALimitOfTheSizeOfFiles) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x";
  save(small_state(1), path);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100 << 10, 100 << 10};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::string error;
    try {
      save(big_state(), path);
    } catch (const c10::Error& failed) {
      error = failed.what_without_backtrace();
    }
    const bool is_named = error.find(std::strerror(EFBIG)) != std::string::npos &&
                          error.find(".safetensors") != std::string::npos;
    ::_exit(is_named ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(load_number(path), 1);
  EXPECT_THAT(names_in(directory.path()), ElementsAre("x"));
}

/// Ranks that do not come for the same.
TEST(Disagreement, IsAnErrorOnEveryRank) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x";
  run(3, [&] {
    const bool is_last = get_rank() == 2;
    const StateDict state = small_state(1);
    const auto expect = [&](const std::function<void()>& call, const std::string& text) {
      EXPECT_THAT(error_of(call), HasSubstr(text));
    };
    expect([&] { save(state, is_last ? path + "y" : path); },
           c10::str("same path, but it is ", path, " on rank 0 and ", path, "y on rank 2"));
    expect([&] { save(state, is_last ? "" : path); }, "same path");
    SaveOptions options;
    options.format = is_last ? Format::DCP : Format::Tessera;
    expect([&] { save(state, path, options); }, "same format, but it is tessera on rank 0 and dcp on rank 2");
    options.format = Format::Tessera;
    options.keep_last = is_last ? 1 : 0;
    expect([&] { save(state, path, options); }, "same keep_last, but it is 0 on rank 0 and 1 on rank 2");
    options.keep_last = -1;
    expect([&] { save(state, path, options); }, "must not be negative");
    save(state, path);
    StateDict other = small_state(2);
    LoadOptions load_options;
    load_options.strict = !is_last;
    expect([&] { load(other, path, load_options); }, "same strict, but it is true on rank 0");
    expect([&] { is_last ? void(load(other, path)) : save(state, path); },
           "Rank 0 came to save a checkpoint, but rank 2 to load a checkpoint");
    // One rank cannot save what it has, while others wait to reduce.
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {3});
    StateDict partial;
    partial["p"] = DTensor::from_local(at::ones({2}), mesh, {Partial()});
    if (is_last) partial["a"] = at::eye(3).to_sparse();
    expect([&] { save(partial, path); }, "failed on rank 2: 'a' is a tensor of layout");
    EXPECT_EQ(load_number(path), 1);
  });
}

/// A checkpoint that somebody has put other files beside is not removed with them.
TEST(Replace, DoesNotRemoveWhatIsNotItsOwn) {
  const TemporaryDirectory directory;
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    SaveOptions options;
    options.format = format;
    const std::string path = directory / name_of_format(format);
    save(small_state(1, format), path, options);
    write_text(path + "/config.json", "{}");
    EXPECT_THAT(error_of([&] { save(small_state(2, format), path, options); }),
                HasSubstr("also holds config.json, which would be lost"));
    EXPECT_EQ(load_number(path, format), 1);
    remove_all(path + "/config.json");
    save(small_state(2, format), path, options);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
