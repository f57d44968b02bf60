#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <isa-l/crc.h>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace tessera::checkpoint {

namespace {

struct TorchDtype {
  c10::ScalarType dtype;
  std::string_view name;     // as pickles say it
  std::string_view storage;  // the storage's class; empty if tensors of it have an untyped one
};

constexpr auto kTorchDtypes = [] {
  using enum c10::ScalarType;
  return std::to_array<TorchDtype>({
      {Double, "torch.float64", "torch.DoubleStorage"},
      {Float, "torch.float32", "torch.FloatStorage"},
      {Half, "torch.float16", "torch.HalfStorage"},
      {BFloat16, "torch.bfloat16", "torch.BFloat16Storage"},
      {Long, "torch.int64", "torch.LongStorage"},
      {Int, "torch.int32", "torch.IntStorage"},
      {Short, "torch.int16", "torch.ShortStorage"},
      {Char, "torch.int8", "torch.CharStorage"},
      {Byte, "torch.uint8", "torch.ByteStorage"},
      {Bool, "torch.bool", "torch.BoolStorage"},
      {ComplexDouble, "torch.complex128", "torch.ComplexDoubleStorage"},
      {ComplexFloat, "torch.complex64", "torch.ComplexFloatStorage"},
      {ComplexHalf, "torch.complex32", ""},
      {UInt16, "torch.uint16", ""},
      {UInt32, "torch.uint32", ""},
      {UInt64, "torch.uint64", ""},
      {Float8_e5m2, "torch.float8_e5m2", ""},
      {Float8_e4m3fn, "torch.float8_e4m3fn", ""},
      {Float8_e5m2fnuz, "torch.float8_e5m2fnuz", ""},
      {Float8_e4m3fnuz, "torch.float8_e4m3fnuz", ""},
      {Float8_e8m0fnu, "torch.float8_e8m0fnu", ""},
      {Float4_e2m1fn_x2, "torch.float4_e2m1fn_x2", ""},
  });
}();
constexpr std::string_view kTorchPrefix = "torch.";
constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";
constexpr std::string_view kRebuildTyped = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kRebuildUntyped = "torch._utils._rebuild_tensor_v3";

const TorchDtype& torch_dtype(c10::ScalarType dtype) {
  for (const TorchDtype& known : kTorchDtypes) {
    if (known.dtype == dtype) return known;
  }
  TESSERA_CHECK(false, "Tensors of dtype ", c10::toString(dtype),
                " cannot be read from or written to checkpoints of torch.");
}

// Zip archives: signatures and sizes of their records, without names and extra fields.
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
constexpr uint32_t kFull = std::numeric_limits<uint32_t>::max();  // "the zip64 field says it"
constexpr int64_t kEntryAlignment = 64;                           // of the content of entries

template <typename T>
T zip_number(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

/// Reads an archive of torch.save.
class ArchiveReader {
 public:
  using Read = std::function<void(int64_t offset, void* data, size_t size)>;

  ArchiveReader(Read read, int64_t length, std::string what)
      : read_(std::move(read)), length_(length), what_(std::move(what)) {
    check(length >= kEndSize, "is too short for an archive of torch.save");
    // Nearly always all that is read: the pickle at the begin, the directory at the end.
    head_ = read_range(0, std::min(length, kWindow));
    tail_ = read_range(length - std::min(length, kWindow), std::min(length, kWindow));
    read_directory();
  }

  const std::string& what() const { return what_; }

  struct Entry {
    int64_t header = 0;
    int64_t size = 0;
    uint32_t crc32 = 0;
    std::string name;
  };

  const Entry* find(std::string_view name) const {
    const auto found = entries_.find(std::string(name));
    return found == entries_.end() ? nullptr : &found->second;
  }

  const Entry& need(std::string_view name) const {
    const Entry* entry = find(name);
    check(entry != nullptr, "has no entry '", name, "'");
    return *entry;
  }

  /// Where the content of an entry begins.
  int64_t begin(const Entry& entry) const {
    const std::string header = bytes(entry.header, kLocalSize);
    check(zip_number<uint32_t>(header, 0) == kLocalSignature,
          "has no header where the directory says that of '", entry.name, "' is");
    const int64_t name_size = zip_number<uint16_t>(header, 26);
    const int64_t begin = entry.header + kLocalSize + name_size + zip_number<uint16_t>(header, 28);
    check(begin <= directory_ && entry.size <= directory_ - begin, "has an entry '", entry.name,
          "' that does not end before the directory");
    check(bytes(entry.header + kLocalSize, name_size) == entry.name,
          "has the header of another entry where '", entry.name, "' should be");
    return begin;
  }

  std::string content(const Entry& entry, int64_t limit) const {
    check(entry.size <= limit, "has an entry '", entry.name, "' of ", entry.size, " bytes; at most ", limit,
          " are read");
    std::string content = bytes(begin(entry), entry.size);
    check(entry.crc32 == 0 || entry.crc32 == zip_crc32(content.data(), content.size()), "has an entry '",
          entry.name, "' whose checksum is wrong: the file is damaged");
    return content;
  }

  void check_byte_order() const {
    const Entry* entry = find("byteorder");
    if (entry == nullptr) return;  // before torch 2.1
    const std::string order = content(*entry, 16);
    check(order == "little", "has the byte order '", order, "'; only 'little' is read");
  }

  template <typename... Args>
  void check(bool condition, const Args&... text) const {
    TESSERA_CHECK(condition, what_, " ", text..., ".");
  }

 private:
  static constexpr int64_t kWindow = 4096;
  static constexpr int64_t kDirectoryLimit = 1 << 20;

  std::string read_range(int64_t at, int64_t size) const {
    std::string result(static_cast<size_t>(size), '\0');
    read_(at, result.data(), result.size());
    return result;
  }

  std::string bytes(int64_t at, int64_t size) const {
    check(at >= 0 && size >= 0 && at <= length_ && size <= length_ - at,
          "is damaged: something lies beyond its end");
    const auto head_size = static_cast<int64_t>(head_.size());
    const int64_t tail_begin = length_ - static_cast<int64_t>(tail_.size());
    if (at + size <= head_size) return head_.substr(static_cast<size_t>(at), static_cast<size_t>(size));
    if (at >= tail_begin)
      return tail_.substr(static_cast<size_t>(at - tail_begin), static_cast<size_t>(size));
    return read_range(at, size);
  }

  void read_directory() {
    const int64_t end_at = length_ - kEndSize;
    const std::string end = bytes(end_at, kEndSize);
    check(zip_number<uint32_t>(end, 0) == kEndSignature, "is no archive of torch.save, or it is cut off");
    uint64_t count = zip_number<uint16_t>(end, 10);
    uint64_t size = zip_number<uint32_t>(end, 12);
    uint64_t begin = zip_number<uint32_t>(end, 16);
    int64_t directory_end = end_at;
    if (count == 0xFFFF || size == kFull || begin == kFull) {
      const std::string locator = bytes(end_at - kLocator64Size, kLocator64Size);
      check(zip_number<uint32_t>(locator, 0) == kLocator64Signature,
            "has no zip64 directory, which it needs");
      const auto end64_at = zip_number<uint64_t>(locator, 8);
      check(end64_at <= static_cast<uint64_t>(length_),
            "is damaged: its zip64 directory lies beyond its end");
      const std::string end64 = bytes(static_cast<int64_t>(end64_at), kEnd64Size);
      check(zip_number<uint32_t>(end64, 0) == kEnd64Signature, "has no zip64 directory, which it needs");
      count = zip_number<uint64_t>(end64, 32);
      size = zip_number<uint64_t>(end64, 40);
      begin = zip_number<uint64_t>(end64, 48);
      directory_end = static_cast<int64_t>(end64_at);
    }
    check(
        size <= static_cast<uint64_t>(directory_end) && begin <= static_cast<uint64_t>(directory_end) - size,
        "is damaged: its directory lies beyond its end");
    check(size <= kDirectoryLimit, "has a directory of ", size, " bytes; at most ", kDirectoryLimit,
          " are read");
    directory_ = static_cast<int64_t>(begin);
    const std::string directory = bytes(directory_, static_cast<int64_t>(size));
    std::string_view rest = directory;
    std::string prefix;
    for (uint64_t i = 0; i < count; ++i) read_entry(rest, prefix);
  }

  void read_entry(std::string_view& rest, std::string& prefix) {
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
    check((zip_number<uint16_t>(record, 8) & 1) == 0 && zip_number<uint16_t>(record, 10) == 0,
          "has an entry '", entry.name, "' that is compressed or encrypted, which torch.save does not do");
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

  static std::string_view zip64_field(std::string_view extra) {
    while (extra.size() >= 4) {
      const size_t size = std::min<size_t>(zip_number<uint16_t>(extra, 2), extra.size() - 4);
      if (zip_number<uint16_t>(extra, 0) == 1) return extra.substr(4, size);
      extra.remove_prefix(4 + size);
    }
    return "";
  }

  Read read_;
  int64_t length_;
  std::string what_;
  std::string head_, tail_;
  int64_t directory_ = 0;                           // where it begins
  std::unordered_map<std::string, Entry> entries_;  // by their names without the archive's
};

const pickle::Dialect& tensor_dialect() {
  static const pickle::Dialect dialect = [] {
    pickle::Dialect result{{kRebuildTyped, kRebuildUntyped, kUntypedStorage, "collections.OrderedDict"},
                           "plain tensors"};
    for (const TorchDtype& known : kTorchDtypes) {
      result.names.push_back(known.name);
      if (!known.storage.empty()) result.names.push_back(known.storage);
    }
    return result;
  }();
  return dialect;
}

using PickleNodes = std::vector<const pickle::Node*>;

std::vector<int64_t> pickled_integers(const pickle::Pickle& pickle, const pickle::Node& node,
                                      const char* role) {
  std::vector<int64_t> result;
  for (const pickle::Node* item : pickle.tuple(node, role)) result.push_back(pickle.integer(*item, role));
  return result;
}

/// What torch.save says of a tensor.
struct SavedTensor {
  std::string storage;  // its key
  int64_t storage_bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t offset = 0;  // in elements
  std::vector<int64_t> sizes, strides;
};

/// torch._utils._rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks[, metadata]); v3 has a
/// dtype before the metadata.
SavedTensor parse_saved_tensor(const pickle::Pickle& pickle) {
  using namespace pickle;
  const Node& root = pickle.root();
  const PickleNodes& object = pickle.object(root, "what was saved");
  const bool typed = pickle.name(root) == kRebuildTyped;
  if (!typed && pickle.name(root) != kRebuildUntyped) pickle.fail(root, "what was saved is no tensor");
  const PickleNodes& arguments = pickle.tuple(*object[kObjectArguments], "the description of the tensor");
  const size_t least = typed ? 6 : 7;
  if (arguments.size() < least || arguments.size() > least + 1 || object[kObjectState] != nullptr) {
    pickle.fail(root, "the tensor is described in an unknown way");
  }
  if (arguments.size() > least && !pickle.dict(*arguments[least], "the tensor's metadata").empty()) {
    pickle.fail(
        root, "the tensor is lazily conjugated or negated; save tensor.resolve_conj().resolve_neg() instead");
  }

  SavedTensor tensor;
  const Node& reference = *arguments[0];
  if (reference.kind != Kind::Persistent) pickle.fail(reference, "the tensor has no storage");
  const PickleNodes& storage =
      pickle.tuple(*std::get<PickleNodes>(reference.content)[0], "the tensor's storage");
  if (storage.size() != 5 || pickle.text(*storage[0], "the storage's kind") != "storage") {
    pickle.fail(reference, "the storage is described in an unknown way");
  }
  tensor.storage = pickle.text(*storage[2], "the storage's key");
  const std::string_view name = pickle.name(typed ? *storage[1] : *arguments[6]);
  const auto known = std::find_if(kTorchDtypes.begin(), kTorchDtypes.end(), [&](const auto& entry) {
    return !name.empty() && name == (typed ? entry.storage : entry.name);
  });
  if (known == kTorchDtypes.end() || (!typed && pickle.name(*storage[1]) != kUntypedStorage)) {
    pickle.fail(reference, "the tensor is of an unknown dtype");
  }
  tensor.dtype = known->dtype;
  const int64_t unit = typed ? static_cast<int64_t>(c10::elementSize(tensor.dtype)) : 1;
  const int64_t count = pickle.integer(*storage[4], "the storage's size");
  if (count < 0 || __builtin_mul_overflow(count, unit, &tensor.storage_bytes)) {
    pickle.fail(reference, c10::str("the storage has ", count, " elements"));
  }
  tensor.offset = pickle.integer(*arguments[1], "the tensor's offset");
  tensor.sizes = pickled_integers(pickle, *arguments[2], "the tensor's shape");
  tensor.strides = pickled_integers(pickle, *arguments[3], "the tensor's strides");
  return tensor;
}

/// Whether the elements lie without gaps, with the dims from the outermost to the innermost in this order.
bool is_dense_in(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides,
                 const std::vector<size_t>& order) {
  int64_t expected = 1;
  for (size_t i = order.size(); i > 0; --i) {
    const size_t dim = order[i - 1];
    if (sizes[dim] != 1 && strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

std::vector<size_t> dims_in_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

bool is_row_major(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides) {
  return is_dense_in(sizes, strides, dims_in_order(sizes.size()));
}

bool is_dense(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> strides) {
  std::vector<size_t> order = dims_in_order(sizes.size());
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return is_dense_in(sizes, strides, order);
}

constexpr int64_t kTensorPickleLimit = 1 << 20;

ByteRange find_payload(const ArchiveReader& archive, c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes) {
  archive.check_byte_order();
  const std::string bytes = archive.content(archive.need("data.pkl"), kTensorPickleLimit);
  const SavedTensor tensor = parse_saved_tensor({bytes, tensor_dialect(), archive.what()});
  archive.check(tensor.dtype == dtype, "holds a tensor of dtype ", torch_dtype_name(tensor.dtype),
                ", but should hold one of ", torch_dtype_name(dtype));
  archive.check(sizes.equals(tensor.sizes), "holds a tensor of shape [", c10::Join(", ", tensor.sizes),
                "], but should hold one of [", c10::Join(", ", sizes), "]");

  const int64_t length = byte_count(sizes, dtype, archive.what());
  const ArchiveReader::Entry& entry = archive.need("data/" + tensor.storage);
  archive.check(entry.size == tensor.storage_bytes, "has ", entry.size, " bytes in '", entry.name,
                "', but its ", "pickle says ", tensor.storage_bytes);
  const int64_t begin = archive.begin(entry);
  if (length == 0) return {begin, 0, std::nullopt};
  archive.check(tensor.strides.size() == sizes.size() && is_dense(sizes, tensor.strides),
                "holds a tensor with gaps or repeated elements: its strides are [",
                c10::Join(", ", tensor.strides), "]; save tensor.contiguous() instead");
  int64_t skipped = 0;
  archive.check(
      tensor.offset >= 0 &&
          !__builtin_mul_overflow(tensor.offset, static_cast<int64_t>(c10::elementSize(dtype)), &skipped) &&
          skipped <= entry.size && length <= entry.size - skipped,
      "holds a tensor that begins at element ", tensor.offset, " of its storage, and ends beyond it");
  ByteRange range{begin + skipped, length, std::nullopt};
  // Without checksums, torch writes 0.
  if (length == entry.size && entry.crc32 != 0) range.crc32 = entry.crc32;
  if (!is_row_major(sizes, tensor.strides)) range.strides = tensor.strides;
  return range;
}

/// Reads from memory.
ArchiveReader::Read reader_of(std::string_view archive) {
  return [archive](int64_t offset, void* data, size_t size) {
    std::memcpy(data, archive.data() + offset, size);
  };
}

/// Writes an archive byte by byte as torch.save does (but for the id that it makes of all contents).
class ArchiveWriter {
 public:
  void entry(std::string_view name, std::string_view content) {
    begin(name, static_cast<int64_t>(content.size()));
    out_ += content;
    end(zip_crc32(content.data(), content.size()));
  }

  /// The header of an entry of `size` bytes, whose content the caller writes elsewhere; then `end`.
  void begin(std::string_view name, int64_t size) {
    Record record{c10::str("archive/", name), position(), size, 0};
    const std::string large = zip64(record, /*local=*/true);
    const auto start =
        static_cast<int64_t>(record.header + kLocalSize + record.name.size() + large.size() + 4);
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

  void skip(int64_t size) { skipped_ += size; }

  void end(uint32_t crc32) {
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

  void directory() {
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

  /// What was written since the last time.
  std::string take() {
    skipped_ = position();
    return std::exchange(out_, {});
  }

 private:
  struct Record {
    std::string name;
    int64_t header = 0;
    int64_t size = 0;
    uint32_t crc32 = 0;
  };

  int64_t position() const { return skipped_ + static_cast<int64_t>(out_.size()); }
  static bool is_large(const Record& record) { return record.size >= kFull || record.header >= kFull; }

  template <typename T, typename From>
  void number(From value) {
    const auto raw = static_cast<T>(value);
    out_.append(reinterpret_cast<const char*>(&raw), sizeof(T));
  }
  void zeros(size_t count) { out_.append(count, '\0'); }
  void flags() {
    number<uint16_t>(0x0808);  // checksum and sizes follow the content, names are UTF-8
    number<uint16_t>(0);       // stored
  }

  /// The field that says what 32 bits cannot. In a local header, the stored size is 0, as the flags say.
  static std::string zip64(const Record& record, bool local) {
    if (!is_large(record)) return "";
    std::vector<int64_t> numbers;
    if (record.size >= kFull) numbers = {record.size, local ? 0 : record.size};
    if (record.header >= kFull) numbers.push_back(record.header);
    const uint16_t head[] = {1, static_cast<uint16_t>(8 * numbers.size())};
    std::string field(reinterpret_cast<const char*>(head), sizeof(head));
    return field.append(reinterpret_cast<const char*>(numbers.data()), 8 * numbers.size());
  }

  void central(const Record& record) {
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

  std::string out_;
  int64_t skipped_ = 0;  // bytes before `out_`
  std::vector<Record> records_;
};

void write_archive_begin(ArchiveWriter& archive, std::string_view data) {
  archive.entry("data.pkl", data);
  archive.entry(".format_version", "1");
  archive.entry(".storage_alignment", std::to_string(kEntryAlignment));
  archive.entry("byteorder", "little");
}

/// `crc32` is that of the content, of which torch's own id is a hash too.
void write_archive_end(ArchiveWriter& archive, uint32_t crc32) {
  archive.entry("version", "3\n");
  const std::string digits = std::to_string(crc32);
  archive.entry(".data/serialization_id", std::string(40 - digits.size(), '0') + digits);
  archive.directory();
}

std::string pickle_tensor(const TorchDtype& dtype, c10::ArrayRef<int64_t> sizes, int64_t length) {
  pickle::Writer writer;
  const bool typed = !dtype.storage.empty();
  writer.name("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  writer.mark();
  writer.mark();
  writer.text("storage");
  if (typed) {
    writer.name("torch", dtype.storage.substr(kTorchPrefix.size()));
  } else {
    writer.name("torch.storage", "UntypedStorage");
  }
  writer.text("0");
  writer.text("cpu");
  writer.integer(typed ? length / static_cast<int64_t>(c10::elementSize(dtype.dtype)) : length);
  writer.tuple();
  writer.remember();
  writer.persistent();
  writer.integer(0);
  writer.integers(sizes);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim > 1; --dim) {
    strides[dim - 2] = strides[dim - 1] * std::max<int64_t>(sizes[dim - 1], 1);
  }
  writer.integers(strides);
  writer.boolean(false);
  writer.name("collections", "OrderedDict");
  writer.empty_tuple();
  writer.call();
  writer.remember();
  if (!typed) writer.name("torch", dtype.name.substr(kTorchPrefix.size()));
  writer.tuple();
  writer.remember();
  writer.call();
  writer.remember();
  return std::move(writer).finish();
}

}  // namespace

ByteRange find_torch_payload(const File& file, int64_t offset, int64_t length, c10::ScalarType dtype,
                             c10::ArrayRef<int64_t> sizes, const std::string& what) {
  const std::string place = c10::str(what, " at byte ", offset, " of ", file.path());
  const int64_t file_size = file.size();
  TESSERA_CHECK(offset >= 0 && length >= 0 && offset <= file_size && length <= file_size - offset, place,
                " should have ", length, " bytes, but the file ends at ", file_size, ": it is cut off.");
  const ArchiveReader archive(
      [&](int64_t at, void* data, size_t size) { file.read(offset + at, data, size); }, length, place);
  ByteRange range = find_payload(archive, dtype, sizes);
  range.offset += offset;
  return range;
}

ByteRange find_torch_payload(std::string_view archive, c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes,
                             const std::string& what) {
  return find_payload({reader_of(archive), static_cast<int64_t>(archive.size()), what}, dtype, sizes);
}

Value read_torch_value(std::string_view archive, const std::string& what) {
  const ArchiveReader reader(reader_of(archive), static_cast<int64_t>(archive.size()), what);
  const std::string bytes = reader.content(reader.need("data.pkl"), std::numeric_limits<int64_t>::max());
  return pickle::to_value({bytes, pickle::value_dialect(), what});
}

TorchArchive make_torch_archive(c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes, int64_t length,
                                uint32_t crc32) {
  const TorchDtype& known = torch_dtype(dtype);
  TESSERA_CHECK(length == byte_count(sizes, dtype, "A tensor"), "A tensor of dtype ", torch_dtype_name(dtype),
                " and shape [", c10::Join(", ", sizes), "] does not have ", length, " bytes.");
  ArchiveWriter writer;
  write_archive_begin(writer, pickle_tensor(known, sizes, length));
  writer.begin("data/0", length);
  TorchArchive archive;
  archive.before = writer.take();
  writer.skip(length);
  writer.end(crc32);
  write_archive_end(writer, crc32);
  archive.after = writer.take();
  return archive;
}

std::string make_torch_archive(const Value& value) {
  pickle::Writer pickle;
  pickle.value(value);
  const std::string data = std::move(pickle).finish();
  ArchiveWriter writer;
  write_archive_begin(writer, data);
  write_archive_end(writer, zip_crc32(data.data(), data.size()));
  return writer.take();
}

uint32_t zip_crc32(const void* data, size_t size, uint32_t before) {
  return crc32_gzip_refl(before, static_cast<const unsigned char*>(data), size);
}

std::string_view torch_dtype_name(c10::ScalarType dtype) { return torch_dtype(dtype).name; }

std::optional<c10::ScalarType> torch_dtype_named(std::string_view name) {
  for (const TorchDtype& known : kTorchDtypes) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

const std::vector<std::string_view>& torch_dtype_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> result;
    for (const TorchDtype& known : kTorchDtypes) result.push_back(known.name);
    return result;
  }();
  return names;
}

}  // namespace tessera::checkpoint
