#pragma once

#include <tessera/checkpoint/catalog.h>

#include <string>
#include <string_view>

/// Tessera's own format: docs/checkpoint.md.
namespace tessera::checkpoint {

inline constexpr const char* kIndexFile = "index.json";

/// How large index.json may be: that of a million chunks has 0.2 GB.
inline constexpr int64_t kMaxIndexBytes = int64_t{1} << 32;

/// The text of index.json. Throws if it could not be read back: keys and text that are not UTF-8, values nested too
/// deeply, chunks in archives, paths that make no state dict.
std::string write_index(const Catalog& catalog);
/// Back again, checked. `path` is for errors. A byte that is not as it was written is an error, since the text has a
/// checksum of itself.
Catalog parse_index(std::string_view text, const std::string& path);

/// `text` with the checksum with which it is the text of an index: what `write_index` ends with. It must end before
/// the brace that closes the object.
std::string seal_index(std::string text);

/// A value without tensors as JSON text, and back. What JSON cannot say is an object with one key that begins with
/// "$": {"$bytes": "00ff"} in hexadecimal digits, {"$float": "nan"}, "inf" or "-inf", and {"$dict": {...}} for a dict
/// whose only key begins with "$". Integers have 64 bits; a number with a point or an exponent is a float.
std::string value_to_json(const Value& value);
Value value_from_json(std::string_view text, const std::string& what);

}  // namespace tessera::checkpoint
