#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/utf8.h>
#include <tessera/error.h>

#include <unordered_set>

namespace tessera::checkpoint::pickle {

namespace {

constexpr int kMaxDepth = 100;
// What a value costs of the budget, besides its text. An opcode, of one byte at least, makes at most one.
constexpr size_t kValueCost = 16;

/// Turns nodes into values.
class ValueMaker {
 public:
  explicit ValueMaker(const Pickle& pickle)
      : pickle_(pickle), budget_((size_t{1} << 20) + 64 * pickle.size()) {}

  Value make(const Node& node, int depth) {
    if (depth > kMaxDepth) {
      pickle_.fail(node, c10::str("values are nested more than ", kMaxDepth, " deep, or contain themselves"));
    }
    spend(node, kValueCost);
    switch (node.kind) {
      case Kind::None:
        return Value();
      case Kind::Bool:
        return Value(std::get<bool>(node.content));
      case Kind::Integer:
        return Value(std::get<int64_t>(node.content));
      case Kind::Float:
        return Value(std::get<double>(node.content));
      case Kind::Text:
        return Value(copy(node));
      case Kind::Bytes:
        return Value(Bytes{copy(node)});
      case Kind::List:
      case Kind::Tuple:
        return make_list(node, depth);
      case Kind::Dict:
        return make_dict(std::get<Children>(node.content), 0, depth);
      case Kind::Object:
        return make_object(node, depth);
      case Kind::LargeInteger:
        pickle_.fail(node, "an integer does not fit 64 bits");
      case Kind::Name:
      case Kind::Persistent:
        pickle_.fail(node, c10::str("the value is ", kind_text(node.kind), pickle_.name(node), "; only ",
                                    value_dialect().only, " are read"));
    }
    return Value();
  }

 private:
  void spend(const Node& node, size_t amount) {
    if (amount > budget_) {
      pickle_.fail(node, "parts are shared so often that the value is many times larger than its pickle");
    }
    budget_ -= amount;
  }

  std::string copy(const Node& node) {
    const auto text = std::get<std::string_view>(node.content);
    spend(node, text.size());
    return std::string(text);
  }

  Value make_list(const Node& node, int depth) {
    Value::List list;
    for (const Node* item : std::get<Children>(node.content)) list.push_back(make(*item, depth + 1));
    return Value::list(std::move(list));
  }

  Value make_dict(const Children& children, size_t begin, int depth) {
    Value dict = Value::dict();
    std::unordered_set<std::string> keys;
    for (size_t i = begin; i + 1 < children.size(); i += 2) {
      const Node& node = *children[i];
      spend(node, kValueCost);
      std::string key;
      if (node.kind == Kind::Integer) {
        key = std::to_string(std::get<int64_t>(node.content));
      } else {
        pickle_.text(node, "the key of a dict");
        key = copy(node);
      }
      if (!keys.insert(key).second) pickle_.fail(node, c10::str("a dict has the key '", key, "' twice"));
      dict.entries().push_back({std::move(key), make(*children[i + 1], depth + 1)});
    }
    return dict;
  }

  Value make_object(const Node& node, int depth) {
    const auto& children = std::get<Children>(node.content);
    const std::string_view name = pickle_.name(node);
    const auto& arguments = pickle_.tuple(*children[kObjectArguments], "the arguments");
    const bool plain = children[kObjectState] == nullptr && children.size() == kObjectEntries;
    if (name == "collections.OrderedDict" && arguments.empty()) {
      return make_dict(children, kObjectEntries, depth);
    }
    if (plain && name == "torch.Size" && arguments.size() == 1) {
      pickle_.items(*arguments[0], "the argument of torch.Size");
      return make_list(*arguments[0], depth);
    }
    if (plain && name == "_codecs.encode" && arguments.size() == 2 &&
        pickle_.text(*arguments[1], "an encoding") == "latin1") {
      return Value(Bytes{latin1(*arguments[0])});
    }
    if (plain && (name == "__builtin__.bytes" || name == "builtins.bytes") && arguments.empty()) {
      return Value(Bytes{});
    }
    pickle_.fail(node, c10::str("an object of ", name, " is made in an unknown way"));
  }

  std::string latin1(const Node& node) {
    std::string_view text = pickle_.text(node, "the text of bytes");
    spend(node, text.size());
    std::string bytes;
    uint32_t code = 0;
    while (!text.empty()) {
      text.remove_prefix(utf8_character(text, code));
      if (code > 0xFF) pickle_.fail(node, "the text of bytes has characters that are no bytes");
      bytes += static_cast<char>(code);
    }
    return bytes;
  }

  const Pickle& pickle_;
  size_t budget_;
};

}  // namespace

const Dialect& value_dialect() {
  static const Dialect dialect{
      {"_codecs.encode", "__builtin__.bytes", "builtins.bytes", "collections.OrderedDict", "torch.Size"},
      "None, bool, int, float, str, bytes, list, tuple and dict"};
  return dialect;
}

Value to_value(const Pickle& pickle) { return ValueMaker(pickle).make(pickle.root(), 0); }

}  // namespace tessera::checkpoint::pickle
