#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/native.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>

#include <c10/util/irange.h>
#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

namespace {

constexpr std::string_view kIndexBegin = "{\"format\":\"tessera-checkpoint\",\"version\":";
constexpr int64_t kIndexVersion = 1;
// The text ends with these two and the checksum between, of all that comes before.
constexpr std::string_view kBeforeChecksum = "\n\"crc32c\":\"";
constexpr std::string_view kAfterChecksum = "\"}\n";
constexpr size_t kChecksumDigits = 8;
constexpr size_t kMaxIndexValues = size_t{1} << 27;
// A value of the index lies in the object of values, in the object that is the index.
constexpr size_t kValueDepth = 2;

constexpr const char* kBytesKey = "$bytes";
constexpr const char* kFloatKey = "$float";
constexpr const char* kDictKey = "$dict";

void append_hex(std::string& out, uint32_t value, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += "0123456789abcdef"[value >> shift & 15];
}

std::optional<uint32_t> parse_hex(std::string_view digits) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

const std::unordered_map<std::string_view, c10::ScalarType>& dtypes_by_name() {
  static const auto names = [] {
    std::unordered_map<std::string_view, c10::ScalarType> result;
    for (const auto i : c10::irange(static_cast<int>(c10::ScalarType::Undefined))) {
      const auto dtype = static_cast<c10::ScalarType>(i);
      result.emplace(c10::getDtypeNames(dtype).first, dtype);
    }
    return result;
  }();
  return names;
}

/// The path of most keys: their parts between dots.
Path split_key(std::string_view key) {
  Path path;
  while (true) {
    const size_t dot = key.find('.');
    path.emplace_back(std::string(key.substr(0, dot)));
    if (dot == std::string_view::npos) return path;
    key.remove_prefix(dot + 1);
  }
}

/// Checks that paths, which are sorted and equal up to `depth`, lead to the leaves of one nested dict or list:
/// none goes on where another ends, and the indices of a list are 0, 1, 2, ...
void check_paths_below(std::span<const Path* const> paths, size_t depth, const std::string& what) {
  if (paths.size() == 1 && paths[0]->size() == depth) return;
  TESSERA_CHECK(paths[0]->size() > depth, what, " has several entries at or below '", key_of(*paths[0]),
                "'.");
  TESSERA_CHECK(depth < kMaxDepth, what, " has entries nested deeper than ", kMaxDepth, " levels.");
  TESSERA_CHECK((*paths.front())[depth].index() == (*paths.back())[depth].index(), what, " has both '",
                key_of(*paths.front()), "' and '", key_of(*paths.back()),
                "', which are entries of a dict and of a list in the same place.");
  int64_t count = 0;
  for (size_t begin = 0; begin < paths.size(); ++count) {
    const PathStep& step = (*paths[begin])[depth];
    size_t end = begin + 1;
    while (end < paths.size() && (*paths[end])[depth] == step) ++end;
    const auto* index = std::get_if<int64_t>(&step);
    TESSERA_CHECK(!index || *index == count, what, " has '", key_of(*paths[begin]),
                  "', the item of a list that has none before it at index ", count, ".");
    check_paths_below(paths.subspan(begin, end - begin), depth + 1, what);
    begin = end;
  }
}

void check_paths(const Catalog& catalog, const std::string& what) {
  std::vector<const Path*> paths;
  paths.reserve(catalog.leaves.size());
  for (const auto& [key, leaf] : catalog.leaves) paths.push_back(&leaf.path);
  std::ranges::sort(paths, [](const Path* a, const Path* b) { return *a < *b; });
  if (!paths.empty()) check_paths_below(paths, 0, what);
}

void append_value(std::string& out, const Value& value, size_t depth);

struct AppendValue {
  std::string& out;
  size_t depth;

  void operator()(std::monostate) const { out += "null"; }
  void operator()(const at::Tensor&) const {
    TESSERA_CHECK(false, "A value of a checkpoint's index cannot have tensors in it.");
  }
  void operator()(bool value) const { out += value ? "true" : "false"; }
  void operator()(int64_t value) const { out += std::to_string(value); }
  void operator()(double value) const {
    if (std::isfinite(value)) {
      out += nlohmann::json(value).dump();
    } else {
      out += c10::str("{\"", kFloatKey, "\":\"",
                      std::isnan(value) ? "nan"
                      : value > 0       ? "inf"
                                        : "-inf",
                      "\"}");
    }
  }
  void operator()(const std::string& text) const { append_json_text(out, text, "A text of the state dict"); }
  void operator()(const Bytes& bytes) const {
    out += c10::str("{\"", kBytesKey, "\":\"");
    for (const char byte : bytes.data) append_hex(out, static_cast<unsigned char>(byte), 2);
    out += "\"}";
  }
  void operator()(const Value::List& items) const {
    out += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += ',';
      append_value(out, items[i], depth + 1);
    }
    out += ']';
  }
  void operator()(const Value::Dict& entries) const {
    const bool wrapped = entries.size() == 1 && entries[0].key.starts_with('$');
    if (wrapped) out += c10::str("{\"", kDictKey, "\":");
    out += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out += ',';
      append_json_text(out, entries[i].key, "A key of the state dict");
      out += ':';
      append_value(out, entries[i].value, depth + (wrapped ? 2 : 1));
    }
    out += wrapped ? "}}" : "}";
  }
};

void append_value(std::string& out, const Value& value, size_t depth) {
  // Two more for what a value itself may take.
  TESSERA_CHECK_VALUE(depth + 2 <= kMaxDepth, "A value of the state dict is nested deeper than the ",
                      kMaxDepth, " levels that a checkpoint can hold.");
  std::visit(AppendValue{out, depth}, value.content());
}

Value decode_bytes(const std::string& digits, const std::string& what) {
  TESSERA_CHECK(digits.size() % 2 == 0, what, " has bytes with an odd number of hexadecimal digits.");
  Bytes bytes;
  bytes.data.reserve(digits.size() / 2);
  for (size_t i = 0; i < digits.size(); i += 2) {
    const auto byte = parse_hex(std::string_view(digits).substr(i, 2));
    TESSERA_CHECK(byte, what, " has bytes that are not in hexadecimal digits.");
    bytes.data += static_cast<char>(*byte);
  }
  return bytes;
}

/// Makes of what was parsed what it stands for.
void decode_value(Value& value, const std::string& what) {
  if (value.is_list()) {
    for (Value& item : value.items()) decode_value(item, what);
  }
  if (!value.is_dict()) return;
  Value::Dict& entries = value.entries();
  if (entries.size() != 1 || !entries[0].key.starts_with('$')) {
    for (Value::Entry& entry : entries) decode_value(entry.value, what);
    return;
  }
  const std::string& key = entries[0].key;
  Value content = std::move(entries[0].value);
  if (key == kDictKey) {
    TESSERA_CHECK(content.is_dict(), what, ": '", kDictKey, "' must be an object.");
    for (Value::Entry& entry : content.entries()) decode_value(entry.value, what);
  } else if (key == kBytesKey) {
    content = decode_bytes(content.text(), what);
  } else if (key == kFloatKey) {
    const std::string& text = content.text();
    TESSERA_CHECK(text == "nan" || text == "inf" || text == "-inf", what, " has the float '", text,
                  "'; expected nan, inf or -inf.");
    const double infinity = std::numeric_limits<double>::infinity();
    content = text == "nan" ? std::numeric_limits<double>::quiet_NaN() : text == "inf" ? infinity : -infinity;
  } else {
    TESSERA_CHECK(false, what, " has a value of the unknown kind '", key, "'.");
  }
  value = std::move(content);
}

void append_chunk(std::string& out, const Chunk& chunk, const std::string& key) {
  TESSERA_CHECK_VALUE(chunk.container == Container::Raw, "Tensor '", key,
                      "' has a chunk in an archive, which Tessera's format does not know.");
  path_in(".", chunk.file, c10::str("Tensor '", key, "'"));
  out += "{\"offsets\":";
  append_json_integers(out, chunk.offsets);
  out += ",\"sizes\":";
  append_json_integers(out, chunk.sizes);
  out += ",\"file\":";
  append_json_text(out, chunk.file, "The name of a file");
  out += c10::str(",\"offset\":", chunk.offset, ",\"length\":", chunk.length);
  if (chunk.checksums) {
    out += c10::str(",\"block\":", chunk.checksums->block, ",\"crc32c\":\"");
    for (const uint32_t crc : chunk.checksums->crc32c) append_hex(out, crc, kChecksumDigits);
    out += '"';
  }
  out += '}';
}

void append_tensor(std::string& out, const TensorEntry& tensor, const std::string& key) {
  out += c10::str("{\"dtype\":\"", c10::getDtypeNames(tensor.dtype).first, "\",\"shape\":");
  append_json_integers(out, tensor.shape);
  out += ",\"chunks\":[";
  for (size_t i = 0; i < tensor.chunks.size(); ++i) {
    if (i > 0) out += ',';
    append_chunk(out, tensor.chunks[i], key);
  }
  out += "]}";
}

void append_path(std::string& out, const Path& path) {
  out += '[';
  for (size_t i = 0; i < path.size(); ++i) {
    if (i > 0) out += ',';
    if (const auto* name = std::get_if<std::string>(&path[i])) {
      append_json_text(out, *name, "A key of the state dict");
    } else {
      out += std::to_string(std::get<int64_t>(path[i]));
    }
  }
  out += ']';
}

/// Appends a member of the index: an object of those leaves for which `append` appends something.
template <class Append>
void append_section(std::string& out, const char* name, const Catalog& catalog, const Append& append) {
  out += c10::str(",\n\"", name, "\":{");
  const char* separator = "\n";
  for (const auto& [key, leaf] : catalog.leaves) {
    const size_t before = out.size();
    out += separator;
    append_json_text(out, key, "A key of the state dict");
    out += ':';
    const size_t begin = out.size();
    append(leaf, key);
    if (out.size() == begin) {
      out.resize(before);
    } else {
      separator = ",\n";
    }
  }
  out += '}';
}

Checksums parse_checksums(const Value& json, const JsonPlace& place) {
  Checksums checksums;
  checksums.block = json_integer(json, "block", place);
  const std::string& digits = json_text(json, "crc32c", place);
  TESSERA_CHECK(digits.size() % kChecksumDigits == 0, place, ": 'crc32c' must have ", kChecksumDigits,
                " hexadecimal digits for each block.");
  checksums.crc32c.reserve(digits.size() / kChecksumDigits);
  for (size_t i = 0; i < digits.size(); i += kChecksumDigits) {
    const auto crc = parse_hex(std::string_view(digits).substr(i, kChecksumDigits));
    TESSERA_CHECK(crc, place, ": 'crc32c' must have hexadecimal digits.");
    checksums.crc32c.push_back(*crc);
  }
  return checksums;
}

Chunk parse_chunk(const Value& json, const JsonPlace& place) {
  Chunk chunk;
  chunk.offsets = json_integers(json, "offsets", place);
  chunk.sizes = json_integers(json, "sizes", place);
  chunk.file = json_text(json, "file", place);
  path_in(".", chunk.file, std::string(place.path));
  chunk.offset = json_integer(json, "offset", place);
  chunk.length = json_integer(json, "length", place);
  if (find_json(json, "crc32c", place) || find_json(json, "block", place)) {
    chunk.checksums = parse_checksums(json, place);
  }
  return chunk;
}

TensorEntry parse_tensor(const Value& json, const JsonPlace& place) {
  TensorEntry tensor;
  const std::string& dtype = json_text(json, "dtype", place);
  const auto found = dtypes_by_name().find(dtype);
  TESSERA_CHECK(found != dtypes_by_name().end(), place, ": the dtype '", dtype,
                "' is none that this version of torch has.");
  tensor.dtype = found->second;
  tensor.shape = json_integers(json, "shape", place);
  const Value::List& chunks = json_list(json, "chunks", place);
  tensor.chunks.reserve(chunks.size());
  for (const Value& chunk : chunks) tensor.chunks.push_back(parse_chunk(chunk, place));
  return tensor;
}

Path parse_path(const Value::Entry& entry, const std::string& path) {
  const auto* steps = std::get_if<Value::List>(&entry.value.content());
  TESSERA_CHECK(steps, path, ", path of '", entry.key, "' must be a list.");
  Path result;
  for (const Value& step : *steps) {
    if (const auto* name = std::get_if<std::string>(&step.content())) {
      result.emplace_back(*name);
    } else {
      const auto* index = std::get_if<int64_t>(&step.content());
      TESSERA_CHECK(index, path, ", path of '", entry.key, "' must have text and integers, but it has ",
                    step.kind(), ".");
      result.emplace_back(*index);
    }
  }
  return result;
}

/// Throws unless the text begins as an index of this version and ends with its own checksum.
void check_seal(std::string_view text, const std::string& path) {
  TESSERA_CHECK(text.starts_with(kIndexBegin), path,
                " does not begin as the index of a checkpoint does. It is none, or it is damaged.");
  int64_t version = 0;
  const std::string_view rest = text.substr(kIndexBegin.size());
  const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), version);
  TESSERA_CHECK(parsed.ec == std::errc() && version >= 1, path, " does not say its version. It is damaged.");
  TESSERA_CHECK(version == kIndexVersion, path, " has version ", version,
                " of the format; this Tessera reads ", kIndexVersion, ". Use a newer one.");
  const size_t tail = kBeforeChecksum.size() + kChecksumDigits + kAfterChecksum.size();
  TESSERA_CHECK(rest.size() > tail && text.ends_with(kAfterChecksum) &&
                    text.substr(text.size() - tail).starts_with(kBeforeChecksum),
                path, " does not end with its checksum. It was cut short, or is damaged.");
  const std::string_view body = text.substr(0, text.size() - tail);
  std::string checksum;
  append_hex(checksum, crc32c(body.data(), body.size()), kChecksumDigits);
  TESSERA_CHECK(text.substr(body.size() + kBeforeChecksum.size(), kChecksumDigits) == checksum, path,
                " is damaged: its checksum does not fit its text. Restore it from a copy.");
}

}  // namespace

std::string seal_index(std::string text) {
  const uint32_t checksum = crc32c(text.data(), text.size());
  text += kBeforeChecksum;
  append_hex(text, checksum, kChecksumDigits);
  text += kAfterChecksum;
  return text;
}

std::string write_index(const Catalog& catalog) {
  check(catalog);
  check_paths(catalog, "The state dict");
  std::string out(kIndexBegin);
  out += std::to_string(kIndexVersion);
  append_section(out, "tensors", catalog, [&](const Leaf& leaf, const std::string& key) {
    if (const TensorEntry* tensor = leaf.tensor()) append_tensor(out, *tensor, key);
  });
  append_section(out, "values", catalog, [&](const Leaf& leaf, const std::string&) {
    if (const Value* value = leaf.value()) append_value(out, *value, kValueDepth);
  });
  append_section(out, "paths", catalog, [&](const Leaf& leaf, const std::string& key) {
    if (leaf.path != split_key(key)) append_path(out, leaf.path);
  });
  out += ',';
  return seal_index(std::move(out));
}

Catalog parse_index(std::string_view text, const std::string& path) {
  check_seal(text, path);
  Value json = parse_json(text, path, kMaxIndexValues);
  const JsonPlace place{path};
  Catalog catalog;
  catalog.format = Format::Tessera;
  const auto add = [&](const std::string& key, auto content) {
    const bool added = catalog.leaves.try_emplace(key, Leaf{split_key(key), std::move(content)}).second;
    TESSERA_CHECK(added, path, " has both a tensor and a value '", key, "'.");
  };
  for (const Value::Entry& entry : json_dict(json, "tensors", place)) {
    add(entry.key, parse_tensor(entry.value, {path, "tensor", entry.key}));
  }
  for (const Value::Entry& entry : json_dict(json, "values", place)) {
    Value value = entry.value;
    decode_value(value, c10::str(path, ", value '", entry.key, "'"));
    add(entry.key, std::move(value));
  }
  for (const Value::Entry& entry : json_dict(json, "paths", place)) {
    const auto leaf = catalog.leaves.find(entry.key);
    TESSERA_CHECK(leaf != catalog.leaves.end(), path, " has a path of '", entry.key,
                  "', but neither a tensor nor a value of that name.");
    leaf->second.path = parse_path(entry, path);
  }
  check_paths(catalog, path);
  check(catalog, path);
  return catalog;
}

std::string value_to_json(const Value& value) {
  std::string out;
  append_value(out, value, kValueDepth);
  return out;
}

Value value_from_json(std::string_view text, const std::string& what) {
  Value value = parse_json(text, what, kMaxIndexValues);
  decode_value(value, what);
  return value;
}

}  // namespace tessera::checkpoint
