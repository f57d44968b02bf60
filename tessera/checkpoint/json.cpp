#include <tessera/checkpoint/json.h>
#include <tessera/error.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <ostream>

#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

namespace {

/// Builds a Value from the events of nlohmann's parser. Throws what is wrong without saying where.
class ValueBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  ValueBuilder(const std::string& what, size_t max_values) : what_(what), left_(max_values) {}

  bool null() override { return add(Value()); }
  bool boolean(bool value) override { return add(Value(value)); }
  bool number_integer(number_integer_t value) override { return add(Value(int64_t{value})); }
  bool number_unsigned(number_unsigned_t value) override {
    TESSERA_CHECK(value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), what_,
                  " has the integer ", value, ", which does not fit 64 bits with a sign.");
    return add(Value(static_cast<int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    // The parser makes floats of integers that are too large.
    TESSERA_CHECK(text.find_first_of(".eE") != std::string::npos, what_,
                  " has an integer that does not fit 64 bits.");
    return add(Value(value));
  }
  bool string(string_t& value) override { return add(Value(std::move(value))); }
  bool binary(binary_t&) override { return false; }
  bool key(string_t& value) override {
    key_ = std::move(value);
    return true;
  }
  bool start_object(std::size_t) override { return open(Value::dict()); }
  bool start_array(std::size_t) override { return open(Value::list()); }
  bool end_object() override {
    check_keys(open_.back()->entries());
    open_.pop_back();
    return true;
  }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    TESSERA_CHECK(false, what_, " is not valid JSON at byte ", position, ": ", error.what());
  }

  Value take() { return std::move(root_); }

 private:
  Value& place(Value value) {
    TESSERA_CHECK(left_-- > 0, what_, " has too many JSON values to be real.");
    if (open_.empty()) return root_ = std::move(value);
    Value& parent = *open_.back();
    if (parent.is_list()) return parent.items().emplace_back(std::move(value));
    return parent.entries().emplace_back(Value::Entry{std::move(key_), std::move(value)}).value;
  }
  bool add(Value value) {
    place(std::move(value));
    return true;
  }
  bool open(Value value) {
    TESSERA_CHECK(open_.size() < kMaxDepth, what_, " is nested deeper than ", kMaxDepth, " levels.");
    // An open value stays where it is: only the innermost one grows.
    open_.push_back(&place(std::move(value)));
    return true;
  }
  void check_keys(const Value::Dict& entries) const {
    std::vector<std::string_view> keys;
    keys.reserve(entries.size());
    for (const Value::Entry& entry : entries) keys.emplace_back(entry.key);
    std::ranges::sort(keys);
    const auto twice = std::ranges::adjacent_find(keys);
    TESSERA_CHECK(twice == keys.end(), what_, " has the key '", *twice, "' twice in one object.");
  }

  const std::string& what_;
  size_t left_;
  Value root_;
  std::vector<Value*> open_;
  std::string key_;
};

const Value& json_entry(const Value& dict, std::string_view key, const JsonPlace& place) {
  const Value* value = find_json(dict, key, place);
  TESSERA_CHECK(value, place, " has no '", key, "'.");
  return *value;
}

template <class T>
const T& json_as(const Value& dict, std::string_view key, const JsonPlace& place, const char* wanted) {
  const Value& value = json_entry(dict, key, place);
  const T* content = std::get_if<T>(&value.content());
  TESSERA_CHECK(content, place, ": '", key, "' must be ", wanted, ", but it is ", value.kind(), ".");
  return *content;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const JsonPlace& place) {
  out << place.path;
  if (!place.kind.empty()) out << ", " << place.kind << " '" << place.name << "'";
  return out;
}

Value parse_json(std::string_view text, const std::string& what, size_t max_values) {
  // nlohmann's parser takes a NUL for the end of the text.
  TESSERA_CHECK(text.find('\0') == std::string_view::npos, what, " is not valid JSON: it has a NUL byte.");
  ValueBuilder builder(what, max_values);
  const bool good = nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  TESSERA_CHECK(good, what, " is not valid JSON.");
  return builder.take();
}

void append_json_text(std::string& out, std::string_view text, std::string_view what) {
  try {
    out += nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    TESSERA_CHECK_VALUE(false, what, " is not UTF-8, so it cannot be saved as text: '",
                        nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                        "'. Store it as Bytes, or rename it if it is a key.");
  }
}

void append_json_integers(std::string& out, const std::vector<int64_t>& values) {
  out += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    char digits[24];
    out.append(digits, std::to_chars(std::begin(digits), std::end(digits), values[i]).ptr);
  }
  out += ']';
}

const Value* find_json(const Value& dict, std::string_view key, const JsonPlace& place) {
  const auto* entries = std::get_if<Value::Dict>(&dict.content());
  TESSERA_CHECK(entries, place, " must be an object with '", key, "', but it is ", dict.kind(), ".");
  const auto found = std::ranges::find(*entries, key, &Value::Entry::key);
  return found == entries->end() ? nullptr : &found->value;
}

const std::string& json_text(const Value& dict, std::string_view key, const JsonPlace& place) {
  return json_as<std::string>(dict, key, place, "text");
}

int64_t json_integer(const Value& dict, std::string_view key, const JsonPlace& place) {
  return json_as<int64_t>(dict, key, place, "an integer");
}

std::vector<int64_t> json_integers(const Value& dict, std::string_view key, const JsonPlace& place) {
  const Value::List& items = json_list(dict, key, place);
  std::vector<int64_t> result;
  result.reserve(items.size());
  for (const Value& item : items) {
    const auto* integer = std::get_if<int64_t>(&item.content());
    TESSERA_CHECK(integer, place, ": '", key, "' must be a list of integers, but it has ", item.kind(), ".");
    result.push_back(*integer);
  }
  return result;
}

const Value::List& json_list(const Value& dict, std::string_view key, const JsonPlace& place) {
  return json_as<Value::List>(dict, key, place, "a list");
}

const Value::Dict& json_dict(const Value& dict, std::string_view key, const JsonPlace& place) {
  return json_as<Value::Dict>(dict, key, place, "an object");
}

}  // namespace tessera::checkpoint
