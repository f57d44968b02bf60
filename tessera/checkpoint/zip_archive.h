#pragma once

#include <tessera/error.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

/// Zip archives as torch.save writes them: stored, not compressed, entries in one folder, with zip64 fields.
namespace tessera::checkpoint {

/// The content of entries begins at a multiple of this.
inline constexpr int64_t kEntryAlignment = 64;

/// The checksum that zip archives have; `before` is the checksum of what comes before the bytes.
uint32_t zip_crc32(const void* data, size_t size, uint32_t before = 0);

/// Reads an archive. Nothing in it is trusted: what does not fit its length is an error that begins with `what`.
class ArchiveReader {
 public:
  using Read = std::function<void(int64_t offset, void* data, size_t size)>;

  /// Reads the first and the last bytes and the directory, which lists the entries.
  ArchiveReader(Read read, int64_t length, std::string what);
  /// Of an archive in memory, which must outlive this.
  ArchiveReader(std::string_view archive, std::string what);

  const std::string& what() const { return what_; }

  struct Entry {
    int64_t header = 0;
    int64_t size = 0;
    uint32_t crc32 = 0;
    std::string name;
  };
  /// By its name without the folder's. `need` throws if there is none.
  const Entry* find(std::string_view name) const;
  const Entry& need(std::string_view name) const;

  /// Where the content of an entry begins.
  int64_t begin(const Entry& entry) const;
  /// The content, whose checksum is compared if there is one. Throws if it has more than `limit` bytes.
  std::string content(const Entry& entry, int64_t limit) const;

  template <typename... Args>
  void check(bool condition, const Args&... text) const {
    TESSERA_CHECK(condition, what_, " ", text..., ".");
  }

 private:
  std::string read_range(int64_t at, int64_t size) const;
  std::string bytes(int64_t at, int64_t size) const;
  void read_directory();
  void read_entry(std::string_view& rest, std::string& prefix);

  Read read_;
  int64_t length_;
  std::string what_;
  std::string head_, tail_;
  int64_t directory_ = 0;                           // where it begins
  std::unordered_map<std::string, Entry> entries_;  // by their names without the folder's
};

/// Writes an archive byte by byte as torch.save does.
class ArchiveWriter {
 public:
  void entry(std::string_view name, std::string_view content);

  /// The header of an entry of `size` bytes, whose content the caller writes elsewhere; then `skip` and `end`.
  void begin(std::string_view name, int64_t size);
  void skip(int64_t size) { skipped_ += size; }
  void end(uint32_t crc32);

  /// After the last entry.
  void directory();

  /// What was written since the last time.
  std::string take();

 private:
  struct Record {
    std::string name;
    int64_t header = 0;
    int64_t size = 0;
    uint32_t crc32 = 0;
  };

  int64_t position() const { return skipped_ + static_cast<int64_t>(out_.size()); }
  template <typename T, typename From>
  void number(From value);
  void zeros(size_t count) { out_.append(count, '\0'); }
  void flags();
  void central(const Record& record);
  static bool is_large(const Record& record);
  static std::string zip64(const Record& record, bool local);

  std::string out_;
  int64_t skipped_ = 0;  // bytes before `out_`
  std::vector<Record> records_;
};

}  // namespace tessera::checkpoint
