#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

/// Bytes that are no text.
struct Bytes {
  std::string data;
  bool operator==(const Bytes&) const = default;
};

/// One entry of a state dict: a tensor (plain, DTensor or ShardedTensor), nothing, a bool, an integer, a float,
/// text, bytes, or a list or dict of such.
///
///   Value state = Value::dict();
///   state["model"]["weight"] = weight;
///   state["betas"] = Value::list({0.9, 0.999});
///   state.at("model").at("weight").tensor()
///
/// A dict keeps the order in which its keys were added. Asking for another kind than it is, a key or an index
/// that is not there, is an error that says what there is.
class TESSERA_API Value {
 public:
  struct Entry;
  using List = std::vector<Value>;
  using Dict = std::vector<Entry>;

  Value() = default;
  Value(at::Tensor tensor);
  Value(bool value);
  Value(int value);
  Value(int64_t value);
  Value(double value);
  Value(const char* value);
  Value(std::string value);
  Value(Bytes value);
  static Value list();
  static Value list(List items);
  static Value dict();

  bool is_none() const { return std::holds_alternative<std::monostate>(content_); }
  bool is_tensor() const { return std::holds_alternative<at::Tensor>(content_); }
  bool is_list() const { return std::holds_alternative<List>(content_); }
  bool is_dict() const { return std::holds_alternative<Dict>(content_); }

  const at::Tensor& tensor() const;
  bool boolean() const;
  int64_t integer() const;
  /// A float, or an integer as one.
  double number() const;
  const std::string& text() const;
  const Bytes& bytes() const;
  const List& items() const;
  List& items();
  const Dict& entries() const;
  Dict& entries();

  /// The entry of a dict; `operator[]` adds it if it is not there, and makes a dict of what is nothing.
  const Value& at(std::string_view key) const;
  Value& at(std::string_view key);
  Value& operator[](std::string_view key);
  bool contains(std::string_view key) const;
  /// The item of a list.
  const Value& at(size_t index) const;
  /// How many items or entries.
  size_t size() const;

  /// "none", "tensor", "bool", "integer", "float", "text", "bytes", "list", "dict".
  const char* kind() const;
  /// Of equal kind and content; tensors are compared by identity.
  bool operator==(const Value& other) const;
  /// As Python would write it; tensors by dtype and shape.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Value& value);

  using Content =
      std::variant<std::monostate, at::Tensor, bool, int64_t, double, std::string, Bytes, List, Dict>;
  const Content& content() const { return content_; }

 private:
  Content content_;
};

struct Value::Entry {
  std::string key;
  Value value;
  bool operator==(const Entry&) const = default;
};

}  // namespace tessera::checkpoint
