// Files, publishing and locks, on a real file system, with real processes.

#include <tessera/checkpoint/file.h>

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/directory.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string text_of(const std::string& path) { return read_file(path, 1000); }

TEST(Crc32c, IsCastagnoli) {
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c("", 0), 0u);
  EXPECT_EQ(crc32c("56789", 5, crc32c("1234", 4)), 0xe3069283u);
  const std::string zeros(32, '\0');
  EXPECT_EQ(crc32c(zeros.data(), zeros.size()), 0x8a9136aau);  // RFC 3720, B.4
}

TEST(Crc32c, CountsBeyondAnInt) {
  // Zeros that take no memory.
  const size_t size = (size_t{1} << 31) + 5;
  void* zeros = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(zeros, MAP_FAILED);
  EXPECT_EQ(crc32c(zeros, size), crc32c(zeros, size - 1000, crc32c(zeros, 1000)));
  ::munmap(zeros, size);
}

TEST(File, WritesAndReadsBack) {
  const TemporaryDirectory directory;
  File file = File::create(directory / "a");
  file.write(5, "world", 5);
  file.write(0, "hello", 5);
  file.sync();
  char bytes[5];
  file.read(3, bytes, 5);
  EXPECT_EQ(std::string_view(bytes, 5), "lowor");
  EXPECT_EQ(file.size(), 10);
  EXPECT_EQ(file.path(), directory / "a");
  file.close();
  EXPECT_EQ(text_of(directory / "a"), "helloworld");
}

TEST(File, MovesAndClosesOnce) {
  const TemporaryDirectory directory;
  write_text(directory / "a", "a");
  write_text(directory / "b", "b");
  File first = File::open(directory / "a");
  File second = std::move(first);
  second = File::open(directory / "b");
  char byte = 0;
  second.read(0, &byte, 1);
  EXPECT_EQ(byte, 'b');
}

TEST(File, SaysWhatIsWrong) {
  const TemporaryDirectory directory;
  write_text(directory / "a", "abc");
  EXPECT_THAT(error_of([&] { File::open(directory / "none"); }),
              AllOf(HasSubstr("Could not open"), HasSubstr("none"), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { File::create(directory / "a"); }), HasSubstr("File exists"));
  EXPECT_THAT(error_of([&] { File::open(directory.path()); }), HasSubstr("it is a directory"));
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of([&] { File::open(directory / "pipe"); }), HasSubstr("no regular file"));
  const File file = File::open(directory / "a");
  char bytes[10];
  EXPECT_THAT(error_of([&] { file.read(1, bytes, 3); }), AllOf(HasSubstr("3 bytes"), HasSubstr("cut short")));
  EXPECT_THAT(error_of([&] { file.read(-1, bytes, 1); }), HasSubstr("negative"));
  EXPECT_THAT(error_of([&] { file.read(INT64_MAX, bytes, 1); }), HasSubstr("Could not read"));
  EXPECT_THAT(error_of([&] { read_file(directory / "a", 2); }), HasSubstr("more than the 2"));
  EXPECT_THAT(error_of([&] { list_directory(directory / "none"); }), HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { make_directory(directory / "a"); }), HasSubstr("File exists"));
  EXPECT_THAT(error_of([&] { make_directory(directory / std::string(300, 'x')); }),
              HasSubstr("shorter path"));
}

TEST(File, OffersAWayOut) {
  const TemporaryDirectory directory;
  File file = File::create(directory / "a");
  const auto failing = [&](int code) {
    set_file_fault([code](std::string_view, const std::string&) { throw SystemFailure{code}; });
    const std::string error = error_of([&] { file.write(0, "a", 1); });
    set_file_fault({});
    return error;
  };
  EXPECT_THAT(failing(ENOSPC), AllOf(HasSubstr("No space left"), HasSubstr("Free space")));
  EXPECT_THAT(failing(EDQUOT), HasSubstr("Free space"));
  EXPECT_THAT(failing(EACCES), HasSubstr("permissions"));
  EXPECT_THAT(failing(EROFS), HasSubstr("mounted read-only"));
  EXPECT_THAT(failing(EMFILE), HasSubstr("ulimit -n"));
  EXPECT_THAT(failing(EIO), HasSubstr("Input/output error"));
}

TEST(File, IsFollowedBeyondFourGiB) {
  const TemporaryDirectory directory;
  File file = File::create(directory / "sparse");
  const int64_t far = (int64_t{1} << 32) + 12345;
  file.write(far, "end", 3);
  char bytes[3];
  file.read(far, bytes, 3);
  EXPECT_EQ(std::string_view(bytes, 3), "end");
  EXPECT_EQ(file.size(), far + 3);
}

TEST(Directory, IsListedAndRemoved) {
  const TemporaryDirectory directory;
  const std::string root = directory / "root";
  make_directory(root);
  make_directory(root + "/b");
  write_text(root + "/a", "");
  write_text(root + "/b/c", "");
  write_text(directory / "kept", "");
  ASSERT_EQ(::symlink(directory.path().c_str(), (root + "/link").c_str()), 0);
  EXPECT_THAT(list_directory(root), ElementsAre("a", "b", "link"));
  EXPECT_TRUE(is_directory(root));
  EXPECT_TRUE(is_directory(root + "/link"));
  EXPECT_FALSE(is_directory(root + "/a"));
  EXPECT_FALSE(is_directory(root + "/none"));
  sync_directory(root);
  remove_all(root);
  EXPECT_FALSE(exists(root));
  EXPECT_THAT(list_directory(directory.path()), ElementsAre("kept"));
  remove_all(root);
  remove_all(directory / "kept");
  EXPECT_THAT(list_directory(directory.path()), IsEmpty());
}

TEST(Directory, LinksAreRemovedAndNotFollowed) {
  const TemporaryDirectory directory;
  make_directory(directory / "real");
  write_text(directory / "real/a", "");
  ASSERT_EQ(::symlink("real", (directory / "link").c_str()), 0);
  ASSERT_EQ(::symlink("nothing", (directory / "dangling").c_str()), 0);
  EXPECT_TRUE(exists(directory / "dangling"));
  remove_all(directory / "link");
  remove_all(directory / "dangling");
  EXPECT_THAT(list_directory(directory.path()), ElementsAre("real"));
  EXPECT_THAT(list_directory(directory / "real"), ElementsAre("a"));
}

TEST(Path, HasAParent) {
  EXPECT_EQ(parent_of("a/b"), "a");
  EXPECT_EQ(parent_of("a/b/"), "a");
  EXPECT_EQ(parent_of("a//b//"), "a");
  EXPECT_EQ(parent_of("b"), ".");
  EXPECT_EQ(parent_of("/b"), "/");
  EXPECT_EQ(parent_of("/"), "/");
  EXPECT_EQ(parent_of("/a/b/c"), "/a/b");
}

TEST(Path, FromAFileStaysInItsDirectory) {
  EXPECT_EQ(path_in("d", "a", "index"), "d/a");
  EXPECT_EQ(path_in("d", "a/..b", "index"), "d/a/..b");
  for (const std::string& name :
       {std::string(""), std::string("/a"), std::string("../a"), std::string("a/../b"), std::string(".."),
        std::string("."), std::string("a//b"), std::string("a/"), std::string("a/./b"),
        std::string("a\0b", 3)}) {
    EXPECT_THAT(error_of([&] { path_in("d", name, "the index"); }), HasSubstr("the index names the file"))
        << name;
  }
}

class Publish : public ::testing::Test {
 protected:
  void SetUp() override {
    make_directory(fresh);
    write_text(fresh + "/content", "new");
  }
  void make_old() {
    make_directory(path);
    write_text(path + "/content", "old");
  }
  /// As on a file system that cannot exchange names, and perhaps knows no flags of renameat2 at all.
  void publish_without_exchange(bool no_flags) {
    bool first = true;
    set_file_fault([&](std::string_view call, const std::string&) {
      if (call == "exchange") throw SystemFailure{EINVAL};
      if (no_flags && call == "rename" && std::exchange(first, false)) throw SystemFailure{EINVAL};
    });
    publish(fresh, path);
    set_file_fault({});
  }

  TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  const std::string fresh = directory / ".checkpoint.tmp";
};

TEST_F(Publish, WhereNothingIs) {
  publish(fresh, path);
  EXPECT_EQ(text_of(path + "/content"), "new");
  EXPECT_THAT(list_directory(directory.path()), ElementsAre("checkpoint"));
}

TEST_F(Publish, WhereSomethingIs) {
  make_old();
  publish(fresh + "/", path + "//");
  EXPECT_EQ(text_of(path + "/content"), "new");
  EXPECT_EQ(text_of(fresh + "/content"), "old");
}

TEST_F(Publish, InStepsWhereNamesCannotBeExchanged) {
  for (const bool no_flags : {false, true}) {
    for (const std::string& name : list_directory(directory.path())) remove_all(directory / name);
    SetUp();
    publish_without_exchange(no_flags);
    EXPECT_EQ(text_of(path + "/content"), "new");
    make_directory(fresh);
    write_text(fresh + "/content", "newer");
    publish_without_exchange(no_flags);
    EXPECT_EQ(text_of(path + "/content"), "newer");
    EXPECT_EQ(text_of(fresh + "/content"), "new");
    EXPECT_EQ(list_directory(directory.path()).size(), 2u);
  }
}

TEST_F(Publish, ReadersFindTheOldOneWhenAProcessEndsAtAnyCall) {
  for (const bool exchange : {true, false}) {
    for (int end = 0;; ++end) {
      SCOPED_TRACE(c10::str("exchange ", exchange, ", ended before call ", end));
      for (const std::string& name : list_directory(directory.path())) remove_all(directory / name);
      SetUp();
      make_old();
      const pid_t child = ::fork();
      if (child == 0) {
        set_file_fault([&, count = std::make_shared<int>(0)](std::string_view call, const std::string&) {
          if ((*count)++ == end) ::kill(::getpid(), SIGKILL);
          if (!exchange && call == "exchange") throw SystemFailure{EINVAL};
        });
        publish(fresh, path);
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      const std::string text = text_of(resolve_checkpoint(path) + "/content");
      EXPECT_THAT(text, ::testing::AnyOf("old", "new"));
      if (WIFEXITED(status)) {
        EXPECT_EQ(text, "new");
        EXPECT_GE(end, exchange ? 3 : 8);
        break;
      }
      // The next one publishes as if nothing had been.
      if (!exists(fresh)) make_directory(fresh);
      remove_all(fresh + "/content");
      write_text(fresh + "/content", "newer");
      publish(fresh, path);
      EXPECT_EQ(text_of(resolve_checkpoint(path) + "/content"), "newer");
      EXPECT_FALSE(exists(directory / ".checkpoint.previous"));
    }
  }
}

TEST_F(Publish, KeepsTheOldOneWhenAStepFails) {
  for (int failing = 0; failing < 12; ++failing) {
    SCOPED_TRACE(failing);
    for (const std::string& name : list_directory(directory.path())) remove_all(directory / name);
    SetUp();
    make_old();
    int count = 0;
    set_file_fault([&](std::string_view call, const std::string&) {
      if (count++ == failing) throw SystemFailure{EIO};
      if (call == "exchange") throw SystemFailure{ENOSYS};
    });
    bool failed = false;
    try {
      publish(fresh, path);
    } catch (const c10::Error&) {
      failed = true;
    }
    set_file_fault({});
    EXPECT_TRUE(exists(path));
    EXPECT_THAT(text_of(path + "/content"), ::testing::AnyOf("old", "new"));
    if (!failed) {
      EXPECT_EQ(text_of(path + "/content"), "new");
      EXPECT_EQ(text_of(fresh + "/content"), "old");
    }
  }
}

TEST_F(Publish, LeavesADirectoryOfAnotherNameAlone) {
  make_old();
  make_directory(path + ".previous");
  publish(fresh, path);
  EXPECT_TRUE(exists(path + ".previous"));
  remove_all(path);
  EXPECT_EQ(resolve_checkpoint(path), path);
}

TEST_F(Publish, RefusesWhatCannotBeRenamed) {
  EXPECT_THAT(error_of([&] { publish(fresh, directory / "other/checkpoint"); }), HasSubstr("same directory"));
  EXPECT_THAT(error_of([&] { publish(fresh, directory / "."); }), HasSubstr("name of a directory"));
  EXPECT_THAT(error_of([&] { publish(directory / "none", path); }), HasSubstr("No such file"));
}

TEST(DirectoryLock, IsOneAtATime) {
  const TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  auto lock = DirectoryLock::try_take(path);
  ASSERT_TRUE(lock);
  EXPECT_THAT(list_directory(directory.path()), ElementsAre(".checkpoint.lock"));
  EXPECT_FALSE(DirectoryLock::try_take(path));
  EXPECT_FALSE(DirectoryLock::try_take(path + "/"));
  EXPECT_TRUE(DirectoryLock::try_take(directory / "other"));
  DirectoryLock moved = std::move(*lock);
  lock.reset();
  EXPECT_FALSE(DirectoryLock::try_take(path));
  { const DirectoryLock last = std::move(moved); }
  EXPECT_THAT(list_directory(directory.path()), IsEmpty());
  EXPECT_TRUE(DirectoryLock::try_take(path));
  EXPECT_THAT(error_of([&] { DirectoryLock::try_take(directory / "none/checkpoint"); }),
              HasSubstr("No such file"));
  EXPECT_THAT(error_of([&] { DirectoryLock::try_take(directory / ".."); }), HasSubstr("name of a directory"));
}

TEST(DirectoryLock, IsHeldByOneOfManyThreads) {
  const TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  std::atomic<int> holders{0};
  std::atomic<int> taken{0};
  std::atomic<bool> overlap{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 2000; ++turn) {
        const auto lock = DirectoryLock::try_take(path);
        if (!lock) continue;
        if (holders++ != 0) overlap = true;
        ++taken;
        --holders;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(overlap);
  EXPECT_GT(taken, 0);
}

TEST(DirectoryLock, IsHeldByOneOfManyProcesses) {
  const TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  // The holder makes a file that must not be there yet.
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int taken = 0; taken < 200;) {
        const auto lock = DirectoryLock::try_take(path);
        if (!lock) continue;
        const int mark = ::open((directory / "mark").c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (mark < 0) ::_exit(1);
        ::close(mark);
        ::unlink((directory / "mark").c_str());
        ++taken;
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(DirectoryLock, EndsWithAKilledProcess) {
  const TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = DirectoryLock::try_take(path);
    if (::write(ready[1], lock ? "y" : "n", 1) != 1) ::_exit(1);
    while (true) ::pause();
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  EXPECT_FALSE(DirectoryLock::try_take(path));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(exists(directory / ".checkpoint.lock"));
  EXPECT_TRUE(DirectoryLock::try_take(path));
  EXPECT_FALSE(exists(directory / ".checkpoint.lock"));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(FileFault, SeesEachCallThatChangesSomething) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  set_file_fault([&](std::string_view call, const std::string& path) {
    calls.push_back(c10::str(call, " ", path.substr(directory.path().size())));
  });
  make_directory(directory / "d");
  File file = File::create(directory / "d/a");
  file.write(0, "x", 1);
  file.sync();
  file.close();
  sync_directory(directory / "d");
  publish(directory / "d", directory / "e");
  remove_all(directory / "e");
  EXPECT_THAT(calls, ElementsAre("mkdir /d", "create /d/a", "write /d/a", "fsync /d/a", "fsync /d",
                                 "rename /e", "fsync ", "unlink /e/a", "rmdir /e"));
}

TEST(FileFault, ThrowsThrough) {
  const TemporaryDirectory directory;
  File file = File::create(directory / "a");
  set_file_fault([](std::string_view, const std::string&) { throw std::runtime_error("stop"); });
  EXPECT_THROW(file.write(0, "x", 1), std::runtime_error);
  set_file_fault({});
  EXPECT_EQ(file.size(), 0);
}

}  // namespace
}  // namespace tessera::checkpoint
