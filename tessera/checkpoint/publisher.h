#pragma once

#include <tessera/checkpoint/file.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// What one rank does of a save: it holds the lock, makes the directory that all write into, publishes it, and puts away
/// what it replaces.
class Publisher {
 public:
  explicit Publisher(std::string path) : path_(std::move(path)) {}
  /// What was not published goes.
  ~Publisher();
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  /// Throws if another save into the path is under way, or what is there is no checkpoint. Removes what saves that were
  /// killed left, of the path and of others of its series.
  void begin();

  /// The directory to write into; empty before `begin`.
  const std::string& fresh() const { return fresh_; }

  /// What is in `fresh` must be on the disk.
  void publish_now();

  /// Puts what was there before, and checkpoints of the series that are older than the `keep_last` newest (0: none), out
  /// of sight, so that nobody finds them half removed. Returns their files.
  std::vector<std::string> retire(int64_t keep_last);

  /// Removes what is left of them, and ends the lock.
  void clean_up();

 private:
  struct Retired {
    std::string path;
    std::optional<DirectoryLock> lock;
  };
  const std::string path_;
  std::string fresh_;
  std::optional<DirectoryLock> lock_;
  std::vector<Retired> retired_;
};

}  // namespace tessera::checkpoint
