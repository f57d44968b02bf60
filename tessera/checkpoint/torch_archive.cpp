#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/checkpoint/zip_archive.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

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
  const Children& object = pickle.object(root, "what was saved");
  const bool typed = pickle.name(root) == kRebuildTyped;
  if (!typed && pickle.name(root) != kRebuildUntyped) pickle.fail(root, "what was saved is no tensor");
  const Children& arguments = pickle.tuple(*object[kObjectArguments], "the description of the tensor");
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
  const Children& storage = pickle.tuple(*std::get<Children>(reference.content)[0], "the tensor's storage");
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

void check_byte_order(const ArchiveReader& archive) {
  const ArchiveReader::Entry* entry = archive.find("byteorder");
  if (entry == nullptr) return;  // before torch 2.1
  const std::string order = archive.content(*entry, 16);
  archive.check(order == "little", "has the byte order '", order, "'; only 'little' is read");
}

constexpr int64_t kTensorPickleLimit = 1 << 20;

ByteRange find_payload(const ArchiveReader& archive, c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes) {
  check_byte_order(archive);
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
  return find_payload({archive, what}, dtype, sizes);
}

Value read_torch_value(std::string_view archive, const std::string& what) {
  const ArchiveReader reader(archive, what);
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
