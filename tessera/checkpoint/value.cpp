#include <tessera/checkpoint/value.h>
#include <tessera/error.h>

#include <cmath>
#include <iomanip>
#include <limits>
#include <ostream>
#include <sstream>

namespace tessera::checkpoint {

namespace {

constexpr const char* kKinds[] = {"none", "tensor", "bool", "integer", "float",
                                  "text", "bytes",  "list", "dict"};

template <class T>
const T& as(const Value& value, const char* wanted) {
  const T* content = std::get_if<T>(&value.content());
  TESSERA_CHECK(content, "Expected ", wanted, " in the state dict, got ", value.kind(), " ", value, ".");
  return *content;
}

const Value::Entry* find_entry(const Value::Dict& dict, std::string_view key) {
  for (const Value::Entry& entry : dict) {
    if (entry.key == key) return &entry;
  }
  return nullptr;
}

void print_text(std::ostream& out, std::string_view text) {
  out << '\'';
  for (const char letter : text) {
    if (letter == '\'' || letter == '\\') out << '\\';
    out << letter;
  }
  out << '\'';
}

}  // namespace

Value::Value(at::Tensor tensor) : content_(std::move(tensor)) {
  TESSERA_CHECK_VALUE(std::get<at::Tensor>(content_).defined(),
                      "An undefined tensor cannot be in a state dict.");
}
Value::Value(bool value) : content_(value) {}
Value::Value(int value) : content_(static_cast<int64_t>(value)) {}
Value::Value(int64_t value) : content_(value) {}
Value::Value(double value) : content_(value) {}
Value::Value(const char* value) : content_(std::string(value)) {}
Value::Value(std::string value) : content_(std::move(value)) {}
Value::Value(Bytes value) : content_(std::move(value)) {}

Value Value::list() { return list(List()); }

Value Value::list(List items) {
  Value value;
  value.content_ = std::move(items);
  return value;
}

Value Value::dict() {
  Value value;
  value.content_ = Dict();
  return value;
}

const at::Tensor& Value::tensor() const { return as<at::Tensor>(*this, "a tensor"); }
bool Value::boolean() const { return as<bool>(*this, "a bool"); }
int64_t Value::integer() const { return as<int64_t>(*this, "an integer"); }
double Value::number() const {
  if (const int64_t* integer = std::get_if<int64_t>(&content_)) return static_cast<double>(*integer);
  return as<double>(*this, "a float");
}
const std::string& Value::text() const { return as<std::string>(*this, "text"); }
const Bytes& Value::bytes() const { return as<Bytes>(*this, "bytes"); }
const Value::List& Value::items() const { return as<List>(*this, "a list"); }
Value::List& Value::items() { return const_cast<List&>(std::as_const(*this).items()); }
const Value::Dict& Value::entries() const { return as<Dict>(*this, "a dict"); }
Value::Dict& Value::entries() { return const_cast<Dict&>(std::as_const(*this).entries()); }

const Value& Value::at(std::string_view key) const {
  if (const Entry* entry = find_entry(entries(), key)) return entry->value;
  std::ostringstream keys;
  for (const Entry& entry : entries()) keys << (keys.tellp() > 0 ? ", " : "") << entry.key;
  TESSERA_CHECK_INDEX(false, "The state dict has no '", key, "' here. It has: ", keys.str(), ".");
}

Value& Value::at(std::string_view key) { return const_cast<Value&>(std::as_const(*this).at(key)); }

Value& Value::operator[](std::string_view key) {
  if (is_none()) content_ = Dict();
  Dict& dict = entries();
  if (const Entry* entry = find_entry(dict, key)) return const_cast<Value&>(entry->value);
  return dict.emplace_back(Entry{std::string(key), {}}).value;
}

bool Value::contains(std::string_view key) const { return is_dict() && find_entry(entries(), key); }

const Value& Value::at(size_t index) const {
  TESSERA_CHECK_INDEX(index < items().size(), "The list has ", items().size(), " items, so none at index ",
                      index, ".");
  return items()[index];
}

size_t Value::size() const { return is_dict() ? entries().size() : items().size(); }

const char* Value::kind() const { return kKinds[content_.index()]; }

bool Value::operator==(const Value& other) const {
  if (content_.index() != other.content_.index()) return false;
  if (is_tensor()) return tensor().is_same(other.tensor());
  if (const double* value = std::get_if<double>(&content_)) {
    const double theirs = std::get<double>(other.content_);
    return *value == theirs || (std::isnan(*value) && std::isnan(theirs));
  }
  return std::visit(
      [&](const auto& mine) {
        using T = std::decay_t<decltype(mine)>;
        if constexpr (std::is_same_v<T, at::Tensor>) {
          return false;
        } else {
          return mine == std::get<T>(other.content_);
        }
      },
      content_);
}

std::ostream& operator<<(std::ostream& out, const Value& value) {
  struct Print {
    std::ostream& out;
    void operator()(std::monostate) { out << "None"; }
    void operator()(const at::Tensor& tensor) {
      out << "tensor(" << tensor.scalar_type() << " " << tensor.sizes() << ")";
    }
    void operator()(bool value) { out << (value ? "True" : "False"); }
    void operator()(int64_t value) { out << value; }
    void operator()(double value) {
      std::ostringstream text;
      text << std::setprecision(std::numeric_limits<double>::max_digits10) << value;
      out << text.str();
    }
    void operator()(const std::string& text) { print_text(out, text); }
    void operator()(const Bytes& bytes) { out << "bytes(" << bytes.data.size() << ")"; }
    void operator()(const Value::List& items) {
      out << '[';
      for (size_t i = 0; i < items.size(); ++i) out << (i ? ", " : "") << items[i];
      out << ']';
    }
    void operator()(const Value::Dict& entries) {
      out << '{';
      for (size_t i = 0; i < entries.size(); ++i) {
        out << (i ? ", " : "");
        print_text(out, entries[i].key);
        out << ": " << entries[i].value;
      }
      out << '}';
    }
  };
  std::visit(Print{out}, value.content());
  return out;
}

}  // namespace tessera::checkpoint
