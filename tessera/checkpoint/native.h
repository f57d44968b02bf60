#pragma once

#include <tessera/checkpoint/catalog.h>

#include <string>
#include <string_view>

/// Tessera's own format: docs/checkpoint.md.
namespace tessera::checkpoint {

inline constexpr const char* kIndexFile = "index.json";

/// The text of index.json.
std::string write_index(const Catalog& catalog);
/// Back again, checked. `path` is for errors.
Catalog parse_index(std::string_view text, const std::string& path);

/// A value without tensors as JSON text, and back: what JSON cannot say (bytes, nan, infinities, large integers)
/// is an object with one key that begins with "$".
std::string value_to_json(const Value& value);
Value value_from_json(std::string_view text, const std::string& what);

}  // namespace tessera::checkpoint
