#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Files and directories as a checkpoint needs them: every failure is an error that names the file, what was
/// tried, what the system said and, where there is one, the way out; short reads and writes are continued. Names
/// that come from files are made paths by `path_in` alone. No tensors here.
namespace tessera::checkpoint {

/// An open file. Moves, closes when it goes.
class File {
 public:
  /// For reading. Throws if it is no regular file or a link to one (as in the cache of huggingface_hub).
  static File open(const std::string& path);
  /// New, for writing (and reading); an error if it exists.
  static File create(const std::string& path);
  /// One that exists, for writing into it.
  static File modify(const std::string& path);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  int64_t size() const;
  /// Throws if the file ends before.
  void read(int64_t offset, void* data, size_t size) const;
  void write(int64_t offset, const void* data, size_t size);
  /// Returns when what was written is on the disk.
  void sync();
  /// Closes it now, with an error where the destructor would be silent.
  void close();

 private:
  File(std::string path, int descriptor);
  /// So many bytes before `end` were written: they go to the disk while more is written, not only when `sync` waits for it.
  void begin_to_store(int64_t end, int64_t count);

  std::string path_;
  int descriptor_ = -1;
  int64_t written_ = 0;  // that the disk was not asked to store
};

/// The content of a small file. Throws if it is larger than `limit`.
std::string read_file(const std::string& path, int64_t limit);

/// Whether there is something with this name, be it a link to nothing.
bool exists(const std::string& path);
/// Whether it is a directory, or a link to one.
bool is_directory(const std::string& path);
/// The names in a directory, sorted, without "." and "..".
std::vector<std::string> list_directory(const std::string& path);
/// Throws if it exists.
void make_directory(const std::string& path);
/// With all directories on the way to it that do not exist; the new names are on the disk when it returns.
void make_directories(const std::string& path);
/// Returns when the names in it are on the disk.
void sync_directory(const std::string& path);
/// With all that is in it; follows no links. Nothing if it does not exist.
void remove_all(const std::string& path);
/// The directory that a path's last component lies in: "a/b/" -> "a", "b" -> ".".
std::string parent_of(const std::string& path);

/// A hidden name beside a path: "a/b" -> "a/.b<suffix>". Throws if the path does not end with a name.
std::string beside(const std::string& path, std::string_view suffix);

/// `name` below `directory`, where `name` comes from a file that is not trusted: throws, naming `source`, unless
/// it is a relative path without NUL and components that are empty, "." or "..".
std::string path_in(const std::string& directory, const std::string& name, const std::string& source);

/// Makes `path` what `fresh` is, in one step: whoever looks sees the old directory or the new one, whole. Both
/// must have the same parent. What was at `path` is at `fresh` afterwards, if there was anything. Both names are on
/// the disk when it returns; what is in `fresh` must be before. After an error `path` is what it was, unless all that
/// failed was to move what was there before out of the way.
///
/// A file system that cannot exchange two names takes two steps, between which the old directory is at
/// `.<name>.previous` and nothing at `path`: readers use `resolve_checkpoint`. The caller holds the DirectoryLock
/// of `path`.
void publish(const std::string& fresh, const std::string& path);

/// Where a reader finds what was last published at `path`: `path`, or, if nothing is there since a process ended
/// between two steps of `publish`, what was there before.
std::string resolve_checkpoint(const std::string& path);

/// What is at a path: another value if it has since been replaced, by `publish` too. It is held open, so that the system
/// gives nothing else the same number.
class Identity {
 public:
  /// Of `path`, or a link to it. Throws if nothing is there.
  static Identity of(const std::string& path);
  Identity(Identity&& other) noexcept;
  Identity& operator=(Identity&& other) noexcept;
  ~Identity();
  bool operator==(const Identity& other) const { return numbers_ == other.numbers_; }

 private:
  Identity(std::array<int64_t, 4> numbers, int descriptor);
  std::array<int64_t, 4> numbers_{};  // device, inode, time of the last change
  int descriptor_ = -1;
};

/// While alive, no other process or thread that takes a lock of the same path gets one; ends with the process,
/// however that ends.
class DirectoryLock {
 public:
  /// Nothing if somebody has it. The lock's file, `.<name>.lock`, lies beside `path`, and goes with the lock.
  static std::optional<DirectoryLock> try_take(const std::string& path);
  DirectoryLock(DirectoryLock&& other) noexcept;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept;
  ~DirectoryLock();

 private:
  DirectoryLock(std::string file, int descriptor);
  std::string file_;
  int descriptor_ = -1;
};

/// A fault throws it to let the system call fail with that errno: `throw SystemFailure{ENOSPC}`.
struct SystemFailure {
  int code = 0;
};

/// For tests: called before each system call that creates, writes, syncs, renames or removes, with its name
/// ("create", "write", "fsync", "rename", "exchange", "unlink", "rmdir", "mkdir") and the path ("rename" and
/// "exchange": the new one); it may throw or end the process. For all threads; empty: none.
void set_file_fault(std::function<void(std::string_view call, const std::string& path)> fault);

/// For tests: how many bytes this process has read from files.
int64_t bytes_read();

/// The CRC32C (Castagnoli) of bytes; `before` is the checksum of what comes before them.
uint32_t crc32c(const void* data, size_t size, uint32_t before = 0);

}  // namespace tessera::checkpoint
