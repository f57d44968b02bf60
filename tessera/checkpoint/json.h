#pragma once

#include <tessera/checkpoint/value.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

/// JSON from files that are not trusted, and to files. Parsing and quoting is nlohmann's.
namespace tessera::checkpoint {

/// How deep lists and dicts may lie in each other, read or written.
inline constexpr size_t kMaxDepth = 128;

/// JSON as none, bool, integer, float, text, list and dict, in the order of the text. Throws, naming `what`, if it is
/// not JSON in UTF-8, is nested deeper than `kMaxDepth`, has a key twice in an object, an integer beyond 64 bits with a
/// sign, or more than `max_values` values: one takes up to 80 bytes of memory.
Value parse_json(std::string_view text, const std::string& what, size_t max_values);

/// Appends text as a JSON string. Throws, naming `what`, unless it is UTF-8.
void append_json_text(std::string& out, std::string_view text, std::string_view what);
void append_json_integers(std::string& out, const std::vector<int64_t>& values);

/// What a value was read from, for errors: "PATH, tensor 'weight'".
struct JsonPlace {
  std::string_view path;
  std::string_view kind = {};  // "tensor", "value", ...
  std::string_view name = {};
  friend std::ostream& operator<<(std::ostream& out, const JsonPlace& place);
};

/// The entry of a dict, or nullptr. Throws if it is no dict.
const Value* find_json(const Value& dict, std::string_view key, const JsonPlace& place);
/// The entry of a dict. These throw, naming place and key, if it is not there or of another kind.
const std::string& json_text(const Value& dict, std::string_view key, const JsonPlace& place);
int64_t json_integer(const Value& dict, std::string_view key, const JsonPlace& place);
std::vector<int64_t> json_integers(const Value& dict, std::string_view key, const JsonPlace& place);
const Value::List& json_list(const Value& dict, std::string_view key, const JsonPlace& place);
const Value::Dict& json_dict(const Value& dict, std::string_view key, const JsonPlace& place);

}  // namespace tessera::checkpoint
