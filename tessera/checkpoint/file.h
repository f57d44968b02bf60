#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Files and directories as a checkpoint needs them: every failure is an error that names the file, what was
/// tried and what the system said; short reads and writes are continued; nothing follows a name out of its
/// directory. No tensors here.
namespace tessera::checkpoint {

/// An open file. Moves, closes when it goes.
class File {
 public:
  /// For reading. Throws if it is no regular file.
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
  std::string path_;
  int descriptor_ = -1;
};

/// The content of a small file. Throws if it is larger than `limit`.
std::string read_file(const std::string& path, int64_t limit);

bool exists(const std::string& path);
bool is_directory(const std::string& path);
/// The names in a directory, sorted, without "." and "..".
std::vector<std::string> list_directory(const std::string& path);
/// Throws if it exists.
void make_directory(const std::string& path);
/// Returns when the names in it are on the disk.
void sync_directory(const std::string& path);
/// With all that is in it; follows no links. Nothing if it does not exist.
void remove_all(const std::string& path);
/// The directory that a path's last component lies in: "a/b/" -> "a", "b" -> ".".
std::string parent_of(const std::string& path);

/// `name` below `directory`, where `name` comes from a file that is not trusted: throws, naming `source`, unless
/// it is a relative path without "..", empty components and NUL.
std::string path_in(const std::string& directory, const std::string& name, const std::string& source);

/// Makes `path` what `fresh` is, in one step: whoever looks sees the old directory or the new one, whole. Both
/// must have the same parent. What was at `path` is at `fresh` afterwards, if there was anything. Both names are on
/// the disk when it returns.
void publish(const std::string& fresh, const std::string& path);

/// While alive, no other process or thread that takes a lock of the same path gets one; ends with the process.
class DirectoryLock {
 public:
  /// Nothing if somebody has it. The lock's file lies beside `path`, and goes with the lock.
  static std::optional<DirectoryLock> try_take(const std::string& path);
  DirectoryLock(DirectoryLock&& other) noexcept;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept;
  ~DirectoryLock();

 private:
  DirectoryLock(std::string file, int descriptor);
  std::string file_;
  int descriptor_ = -1;
};

/// For tests: called before each system call that creates, writes, syncs, renames or removes, with its name and
/// the path; it may throw or end the process. For all threads; empty: none.
void set_file_fault(std::function<void(std::string_view call, const std::string& path)> fault);

/// The CRC32C (Castagnoli) of bytes; `before` is the checksum of what comes before them.
uint32_t crc32c(const void* data, size_t size, uint32_t before = 0);
/// The CRC32 that zip archives have.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace tessera::checkpoint
