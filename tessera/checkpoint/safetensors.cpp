#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/error.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace tessera::checkpoint {

namespace {

constexpr const char* kMetadataKey = "__metadata__";
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 64;
constexpr size_t kMaxHeaderValues = size_t{1} << 23;

struct TypeName {
  const char* name;
  c10::ScalarType dtype;
};
constexpr TypeName kTypeNames[] = {
    {"BOOL", c10::ScalarType::Bool},
    {"U8", c10::ScalarType::Byte},
    {"I8", c10::ScalarType::Char},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz},
    {"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz},
    {"F8_E8M0", c10::ScalarType::Float8_e8m0fnu},
    {"I16", c10::ScalarType::Short},
    {"U16", c10::ScalarType::UInt16},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"I32", c10::ScalarType::Int},
    {"U32", c10::ScalarType::UInt32},
    {"F32", c10::ScalarType::Float},
    {"I64", c10::ScalarType::Long},
    {"U64", c10::ScalarType::UInt64},
    {"F64", c10::ScalarType::Double},
    {"C64", c10::ScalarType::ComplexFloat},
};

const char* find_type_name(c10::ScalarType dtype) {
  const auto* found = std::ranges::find(kTypeNames, dtype, &TypeName::dtype);
  return found == std::end(kTypeNames) ? nullptr : found->name;
}

/// Sets dtype and shape. F4 is two to a byte in the format, and two to an element of torch's dtype.
void set_type(SafetensorsEntry& entry, std::string_view name, const JsonPlace& place) {
  if (name == "F4") {
    TESSERA_CHECK(!entry.shape.empty() && entry.shape.back() % 2 == 0, place,
                  ": the last dim of F4 must be even, but the shape is [", c10::Join(", ", entry.shape),
                  "].");
    entry.shape.back() /= 2;
    entry.dtype = c10::ScalarType::Float4_e2m1fn_x2;
    return;
  }
  const auto* found =
      std::ranges::find_if(kTypeNames, [&](const TypeName& type) { return type.name == name; });
  TESSERA_CHECK(found != std::end(kTypeNames), place, ": the dtype '", name, "' is none that torch has.");
  entry.dtype = found->dtype;
}

SafetensorsEntry parse_entry(const Value::Entry& item, int64_t data_begin, const std::string& path) {
  const JsonPlace place{path, "tensor", item.key};
  SafetensorsEntry entry;
  entry.name = item.key;
  entry.shape = json_integers(item.value, "shape", place);
  set_type(entry, json_text(item.value, "dtype", place), place);
  const std::string what = c10::str(path, ", tensor '", entry.name, "'");
  entry.length = byte_count(entry.shape, entry.dtype, what);
  const std::vector<int64_t> range = json_integers(item.value, "data_offsets", place);
  TESSERA_CHECK(range.size() == 2 && range[0] >= 0 && range[0] <= range[1], what,
                ": 'data_offsets' must be where it begins and ends, but it is [", c10::Join(", ", range),
                "].");
  TESSERA_CHECK(range[1] - range[0] == entry.length, what, " has ", range[1] - range[0],
                " bytes, but its shape [", c10::Join(", ", entry.shape), "] and dtype take ", entry.length,
                ".");
  TESSERA_CHECK(!__builtin_add_overflow(range[0], data_begin, &entry.offset), what,
                " begins beyond 64 bits.");
  return entry;
}

}  // namespace

std::string safetensors_dtype(c10::ScalarType dtype) {
  const char* name = find_type_name(dtype);
  TESSERA_CHECK_VALUE(name, "Safetensors files cannot hold tensors of dtype ",
                      c10::getDtypeNames(dtype).first, ". Convert the tensor, or save in Tessera's format.");
  return name;
}

StoredType safetensors_stored_type(c10::ScalarType dtype, c10::ArrayRef<int64_t> shape) {
  StoredType stored{dtype, shape.vec()};
  if (find_type_name(dtype)) return stored;
  if (c10::isComplexType(dtype)) {
    stored.dtype = c10::toRealValueType(dtype);
    stored.shape.push_back(2);
    return stored;
  }
  switch (c10::elementSize(dtype)) {
    case 1:
      stored.dtype = c10::ScalarType::Byte;
      break;
    case 2:
      stored.dtype = c10::ScalarType::UInt16;
      break;
    case 4:
      stored.dtype = c10::ScalarType::Int;
      break;
    default:
      TESSERA_CHECK(false, "Tensors of dtype ", c10::getDtypeNames(dtype).first, " cannot be saved.");
  }
  return stored;
}

SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_size,
                                           const std::string& path) {
  const std::string what = c10::str("The header of ", path);
  TESSERA_CHECK(header.starts_with('{'), what, " does not begin with '{': it is no safetensors file.");
  const Value json = parse_json(header, what, kMaxHeaderValues);
  SafetensorsHeader result;
  result.data_begin = kLengthBytes + static_cast<int64_t>(header.size());
  for (const Value::Entry& item : json.entries()) {
    if (item.key != kMetadataKey) {
      result.tensors.push_back(parse_entry(item, result.data_begin, path));
      continue;
    }
    TESSERA_CHECK(item.value.is_dict(), what, ": '", kMetadataKey, "' must be an object, but it is ",
                  item.value.kind(), ".");
    for (const Value::Entry& entry : item.value.entries()) {
      const auto* text = std::get_if<std::string>(&entry.value.content());
      TESSERA_CHECK(text, what, ": the metadata '", entry.key, "' must be text, but it is ",
                    entry.value.kind(), ".");
      result.metadata.emplace(entry.key, *text);
    }
  }
  std::ranges::sort(result.tensors, {}, [](const SafetensorsEntry& entry) {
    return std::tuple(entry.offset, entry.length, std::string_view(entry.name));
  });
  int64_t end = result.data_begin;
  for (const SafetensorsEntry& entry : result.tensors) {
    TESSERA_CHECK(entry.offset == end, path, ", tensor '", entry.name, "' begins at byte ", entry.offset,
                  ", but the tensor before it ends at ", end, ": tensors must follow each other without ",
                  entry.offset < end ? "overlap." : "gap.");
    TESSERA_CHECK(entry.length <= file_size - end, path, ", tensor '", entry.name, "' ends at byte ",
                  static_cast<uint64_t>(end) + static_cast<uint64_t>(entry.length), ", but the file has ",
                  file_size, " bytes. It was cut short.");
    end += entry.length;
  }
  TESSERA_CHECK(end == file_size, path, " has ", file_size, " bytes, but its tensors end at ", end, ".");
  return result;
}

SafetensorsHeader read_safetensors_header(const File& file) {
  const int64_t size = file.size();
  TESSERA_CHECK(size > kLengthBytes, file.path(), " has ", size, " bytes: it is no safetensors file.");
  unsigned char bytes[kLengthBytes];
  file.read(0, bytes, sizeof bytes);
  uint64_t length = 0;
  for (int i = kLengthBytes; i-- > 0;) length = length << 8 | bytes[i];
  TESSERA_CHECK(length <= static_cast<uint64_t>(kMaxSafetensorsHeader), file.path(),
                " says that its header has ", length, " bytes, more than the ", kMaxSafetensorsHeader,
                " that are allowed: it is no safetensors file.");
  TESSERA_CHECK(length <= static_cast<uint64_t>(size - kLengthBytes), file.path(), " has ", size,
                " bytes, but says that its header alone has ", length, ". It was cut short.");
  std::string header(length, '\0');
  file.read(kLengthBytes, header.data(), header.size());
  return parse_safetensors_header(header, size, file.path());
}

std::string make_safetensors_header(std::vector<SafetensorsEntry>& tensors,
                                    const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    const char* separator = "";
    for (const auto& [key, value] : metadata) {
      json += std::exchange(separator, ",");
      append_json_text(json, key, "The name of metadata");
      json += ':';
      append_json_text(json, value, "The metadata");
    }
    json += '}';
  }
  std::set<std::string_view> names;
  int64_t end = 0;
  for (SafetensorsEntry& entry : tensors) {
    TESSERA_CHECK_VALUE(entry.name != kMetadataKey, "A tensor in a safetensors file cannot have the name '",
                        kMetadataKey, "'.");
    TESSERA_CHECK_VALUE(names.insert(entry.name).second, "A safetensors file cannot have two tensors '",
                        entry.name, "'.");
    const std::string what = c10::str("Tensor '", entry.name, "'");
    entry.offset = end;
    entry.length = byte_count(entry.shape, entry.dtype, what);
    TESSERA_CHECK(!__builtin_add_overflow(end, entry.length, &end), what, " ends beyond 64 bits.");
    if (json.size() > 1) json += ',';
    append_json_text(json, entry.name, "The name of a tensor");
    json += c10::str(":{\"dtype\":\"", safetensors_dtype(entry.dtype), "\",\"shape\":");
    append_json_integers(json, entry.shape);
    json += ",\"data_offsets\":";
    append_json_integers(json, {entry.offset, end});
    json += '}';
  }
  json += '}';
  json.resize((json.size() + kLengthBytes + kAlignment - 1) / kAlignment * kAlignment - kLengthBytes, ' ');
  TESSERA_CHECK_VALUE(json.size() <= static_cast<size_t>(kMaxSafetensorsHeader), "The header of ",
                      tensors.size(), " tensors has ", json.size(), " bytes, more than the ",
                      kMaxSafetensorsHeader, " that safetensors allows. Use more files.");
  std::string bytes;
  for (size_t i = 0; i < kLengthBytes; ++i) bytes += static_cast<char>(json.size() >> (8 * i) & 0xff);
  const auto begin = kLengthBytes + static_cast<int64_t>(json.size());
  TESSERA_CHECK(!__builtin_add_overflow(end, begin, &end), "The tensors of a file end beyond 64 bits.");
  for (SafetensorsEntry& entry : tensors) entry.offset += begin;
  return bytes + json;
}

}  // namespace tessera::checkpoint
