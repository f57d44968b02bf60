#include <tessera/checkpoint/zip_archive.h>

#include <algorithm>
#include <cstring>
#include <isa-l/crc.h>
#include <limits>
#include <utility>

#include <c10/util/StringUtil.h>

namespace tessera::checkpoint {

namespace {

// Signatures and sizes of their records, without names and extra fields.
constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kDescriptorSignature = 0x08074b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocator64Signature = 0x07064b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr int64_t kLocalSize = 30;
constexpr int64_t kCentralSize = 46;
constexpr int64_t kEnd64Size = 56;
constexpr int64_t kLocator64Size = 20;
constexpr int64_t kEndSize = 22;
constexpr int64_t kArchiveWindow = 4096;  // what is read at each end at once
constexpr int64_t kDirectoryLimit = 1 << 20;
constexpr uint32_t kFull = std::numeric_limits<uint32_t>::max();  // "the zip64 field says it"

template <typename T>
T zip_number(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::string_view zip64_field(std::string_view extra) {
  while (extra.size() >= 4) {
    const size_t size = std::min<size_t>(zip_number<uint16_t>(extra, 2), extra.size() - 4);
    if (zip_number<uint16_t>(extra, 0) == 1) return extra.substr(4, size);
    extra.remove_prefix(4 + size);
  }
  return "";
}

}  // namespace

uint32_t zip_crc32(const void* data, size_t size, uint32_t before) {
  return crc32_gzip_refl(before, static_cast<const unsigned char*>(data), size);
}

ArchiveReader::ArchiveReader(Read read, int64_t length, std::string what)
    : read_(std::move(read)), length_(length), what_(std::move(what)) {
  check(length >= kEndSize, "is too short for an archive of torch.save");
  // Nearly always all that is read: the pickle at the begin, the directory at the end.
  head_ = read_range(0, std::min(length, kArchiveWindow));
  tail_ = read_range(length - std::min(length, kArchiveWindow), std::min(length, kArchiveWindow));
  read_directory();
}

ArchiveReader::ArchiveReader(std::string_view archive, std::string what)
    : ArchiveReader([archive](int64_t offset, void* data,
                              size_t size) { std::memcpy(data, archive.data() + offset, size); },
                    static_cast<int64_t>(archive.size()), std::move(what)) {}

const ArchiveReader::Entry* ArchiveReader::find(std::string_view name) const {
  const auto found = entries_.find(std::string(name));
  return found == entries_.end() ? nullptr : &found->second;
}

const ArchiveReader::Entry& ArchiveReader::need(std::string_view name) const {
  const Entry* entry = find(name);
  check(entry != nullptr, "has no entry '", name, "'");
  return *entry;
}

int64_t ArchiveReader::begin(const Entry& entry) const {
  const std::string header = bytes(entry.header, kLocalSize);
  check(zip_number<uint32_t>(header, 0) == kLocalSignature,
        "has no header where the directory says that of '", entry.name, "' is");
  const int64_t name_size = zip_number<uint16_t>(header, 26);
  const int64_t begin = entry.header + kLocalSize + name_size + zip_number<uint16_t>(header, 28);
  check(begin <= directory_ && entry.size <= directory_ - begin, "has an entry '", entry.name,
        "' that does not end before the directory");
  check(bytes(entry.header + kLocalSize, name_size) == entry.name, "has the header of another entry where '",
        entry.name, "' should be");
  return begin;
}

std::string ArchiveReader::content(const Entry& entry, int64_t limit) const {
  check(entry.size <= limit, "has an entry '", entry.name, "' of ", entry.size, " bytes; at most ", limit,
        " are read");
  std::string content = bytes(begin(entry), entry.size);
  check(entry.crc32 == 0 || entry.crc32 == zip_crc32(content.data(), content.size()), "has an entry '",
        entry.name, "' whose checksum is wrong: the file is damaged");
  return content;
}

std::string ArchiveReader::read_range(int64_t at, int64_t size) const {
  std::string result(static_cast<size_t>(size), '\0');
  read_(at, result.data(), result.size());
  return result;
}

std::string ArchiveReader::bytes(int64_t at, int64_t size) const {
  check(at >= 0 && size >= 0 && at <= length_ && size <= length_ - at,
        "is damaged: something lies beyond its end");
  const auto head_size = static_cast<int64_t>(head_.size());
  const int64_t tail_begin = length_ - static_cast<int64_t>(tail_.size());
  if (at + size <= head_size) return head_.substr(static_cast<size_t>(at), static_cast<size_t>(size));
  if (at >= tail_begin) return tail_.substr(static_cast<size_t>(at - tail_begin), static_cast<size_t>(size));
  return read_range(at, size);
}

void ArchiveReader::read_directory() {
  const int64_t end_at = length_ - kEndSize;
  const std::string end = bytes(end_at, kEndSize);
  check(zip_number<uint32_t>(end, 0) == kEndSignature, "is no archive of torch.save, or it is cut off");
  uint64_t count = zip_number<uint16_t>(end, 10);
  uint64_t size = zip_number<uint32_t>(end, 12);
  uint64_t begin = zip_number<uint32_t>(end, 16);
  int64_t directory_end = end_at;
  if (count == 0xFFFF || size == kFull || begin == kFull) {
    const std::string locator = bytes(end_at - kLocator64Size, kLocator64Size);
    check(zip_number<uint32_t>(locator, 0) == kLocator64Signature, "has no zip64 directory, which it needs");
    const auto end64_at = zip_number<uint64_t>(locator, 8);
    check(end64_at <= static_cast<uint64_t>(length_), "is damaged: its zip64 directory lies beyond its end");
    const std::string end64 = bytes(static_cast<int64_t>(end64_at), kEnd64Size);
    check(zip_number<uint32_t>(end64, 0) == kEnd64Signature, "has no zip64 directory, which it needs");
    count = zip_number<uint64_t>(end64, 32);
    size = zip_number<uint64_t>(end64, 40);
    begin = zip_number<uint64_t>(end64, 48);
    directory_end = static_cast<int64_t>(end64_at);
  }
  check(size <= static_cast<uint64_t>(directory_end) && begin <= static_cast<uint64_t>(directory_end) - size,
        "is damaged: its directory lies beyond its end");
  check(size <= kDirectoryLimit, "has a directory of ", size, " bytes; at most ", kDirectoryLimit,
        " are read");
  directory_ = static_cast<int64_t>(begin);
  const std::string directory = bytes(directory_, static_cast<int64_t>(size));
  std::string_view rest = directory;
  std::string prefix;
  for (uint64_t i = 0; i < count; ++i) read_entry(rest, prefix);
}

void ArchiveReader::read_entry(std::string_view& rest, std::string& prefix) {
  check(rest.size() >= kCentralSize && zip_number<uint32_t>(rest, 0) == kCentralSignature,
        "is damaged: its directory is too short");
  const std::string_view record = rest;
  const size_t name_size = zip_number<uint16_t>(record, 28);
  const size_t extra_size = zip_number<uint16_t>(record, 30);
  const size_t record_size = kCentralSize + name_size + extra_size + zip_number<uint16_t>(record, 32);
  check(record_size <= rest.size(), "is damaged: its directory is too short");
  rest.remove_prefix(record_size);

  Entry entry;
  entry.name = record.substr(kCentralSize, name_size);
  entry.crc32 = zip_number<uint32_t>(record, 16);
  check((zip_number<uint16_t>(record, 8) & 1) == 0 && zip_number<uint16_t>(record, 10) == 0, "has an entry '",
        entry.name, "' that is compressed or encrypted, which torch.save does not do");
  uint64_t stored = zip_number<uint32_t>(record, 20);
  uint64_t size = zip_number<uint32_t>(record, 24);
  uint64_t header = zip_number<uint32_t>(record, 42);
  std::string_view zip64 = zip64_field(record.substr(kCentralSize + name_size, extra_size));
  for (uint64_t* number : {&size, &stored, &header}) {
    if (*number != kFull) continue;
    check(zip64.size() >= 8, "is damaged: '", entry.name, "' has no zip64 field");
    *number = zip_number<uint64_t>(zip64, 0);
    zip64.remove_prefix(8);
  }
  check(stored == size, "has an entry '", entry.name, "' of two sizes");
  const auto limit = static_cast<uint64_t>(directory_);
  check(size <= limit && header <= limit, "is damaged: '", entry.name, "' lies beyond its end");
  entry.size = static_cast<int64_t>(size);
  entry.header = static_cast<int64_t>(header);

  // The first entry's directory is the archive's name.
  if (prefix.empty()) {
    const size_t slash = entry.name.find('/');
    check(slash != std::string::npos, "is a zip archive, but not one of torch.save");
    prefix = entry.name.substr(0, slash + 1);
  }
  check(entry.name.starts_with(prefix), "has an entry '", entry.name, "' outside of '", prefix, "'");
  std::string key = entry.name.substr(prefix.size());
  const auto [at, fresh] = entries_.emplace(std::move(key), std::move(entry));
  check(fresh, "has two entries '", at->second.name, "'");
}

bool ArchiveWriter::is_large(const Record& record) { return record.size >= kFull || record.header >= kFull; }

template <typename T, typename From>
void ArchiveWriter::number(From value) {
  const auto raw = static_cast<T>(value);
  out_.append(reinterpret_cast<const char*>(&raw), sizeof(T));
}

void ArchiveWriter::flags() {
  number<uint16_t>(0x0808);  // checksum and sizes follow the content, names are UTF-8
  number<uint16_t>(0);       // stored
}

/// The field that says what 32 bits cannot. In a local header, the stored size is 0, as the flags say.
std::string ArchiveWriter::zip64(const Record& record, bool local) {
  if (!is_large(record)) return "";
  std::vector<int64_t> numbers;
  if (record.size >= kFull) numbers = {record.size, local ? 0 : record.size};
  if (record.header >= kFull) numbers.push_back(record.header);
  const uint16_t head[] = {1, static_cast<uint16_t>(8 * numbers.size())};
  std::string field(reinterpret_cast<const char*>(head), sizeof(head));
  return field.append(reinterpret_cast<const char*>(numbers.data()), 8 * numbers.size());
}

void ArchiveWriter::entry(std::string_view name, std::string_view content) {
  begin(name, static_cast<int64_t>(content.size()));
  out_ += content;
  end(zip_crc32(content.data(), content.size()));
}

void ArchiveWriter::begin(std::string_view name, int64_t size) {
  Record record{c10::str("archive/", name), position(), size, 0};
  const std::string large = zip64(record, /*local=*/true);
  const auto start = static_cast<int64_t>(record.header + kLocalSize + record.name.size() + large.size() + 4);
  const int64_t padding = (kEntryAlignment - start % kEntryAlignment) % kEntryAlignment;
  number<uint32_t>(kLocalSignature);
  number<uint16_t>(0);
  flags();
  zeros(16);  // no time; checksum and sizes follow the content
  number<uint16_t>(record.name.size());
  number<uint16_t>(large.size() + 4 + padding);
  out_ += record.name + large + "FB";
  number<uint16_t>(padding);
  out_.append(static_cast<size_t>(padding), 'Z');
  records_.push_back(std::move(record));
}

void ArchiveWriter::end(uint32_t crc32) {
  Record& record = records_.back();
  record.crc32 = crc32;
  number<uint32_t>(kDescriptorSignature);
  number<uint32_t>(crc32);
  for (int i = 0; i < 2; ++i) {
    if (is_large(record)) {
      number<uint64_t>(record.size);
    } else {
      number<uint32_t>(record.size);
    }
  }
}

void ArchiveWriter::directory() {
  const int64_t begin = position();
  for (const Record& record : records_) central(record);
  const int64_t end = position();
  number<uint32_t>(kEnd64Signature);
  number<uint64_t>(kEnd64Size - 12);
  number<uint32_t>(0x002d031e);  // made by a version 3.0 on Unix, needs 4.5
  zeros(8);
  number<uint64_t>(records_.size());
  number<uint64_t>(records_.size());
  number<uint64_t>(end - begin);
  number<uint64_t>(begin);
  number<uint32_t>(kLocator64Signature);
  number<uint32_t>(0);
  number<uint64_t>(end);
  number<uint32_t>(1);
  number<uint32_t>(kEndSignature);
  number<uint32_t>(0);
  number<uint16_t>(records_.size());
  number<uint16_t>(records_.size());
  number<uint32_t>(end - begin);
  number<uint32_t>(std::min<int64_t>(begin, kFull));
  number<uint16_t>(0);
}

void ArchiveWriter::central(const Record& record) {
  const std::string large = zip64(record, /*local=*/false);
  number<uint32_t>(kCentralSignature);
  zeros(4);
  flags();
  zeros(4);
  number<uint32_t>(record.crc32);
  number<uint32_t>(std::min<int64_t>(record.size, kFull));
  number<uint32_t>(std::min<int64_t>(record.size, kFull));
  number<uint16_t>(record.name.size());
  number<uint16_t>(large.size());
  zeros(10);
  number<uint32_t>(std::min<int64_t>(record.header, kFull));
  out_ += record.name + large;
}

std::string ArchiveWriter::take() {
  skipped_ = position();
  return std::exchange(out_, {});
}

}  // namespace tessera::checkpoint
