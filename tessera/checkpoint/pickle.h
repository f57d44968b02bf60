#pragma once

#include <tessera/checkpoint/value.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

/// Python's pickles, read without Python: what a pickle says is kept as inert nodes, nothing is called. And a
/// writer of what torch's own readers accept.
namespace tessera::checkpoint::pickle {

enum class Kind : uint8_t {
  None,
  Bool,
  Integer,
  LargeInteger,  // one that does not fit 64 bits; `text` is its little-endian bytes
  Float,
  Text,
  Bytes,
  List,
  Tuple,
  Dict,        // children: key, value, key, value, ...
  Name,        // of a class or a function; `text` is "module.name"
  Object,      // what calling a class or a function would give; children as said by Object's positions below
  Persistent,  // an object that is stored outside the pickle; its one child says which
};

/// For errors: "a list". Of a Name or an Object, what comes before its name: "the name ".
const char* kind_text(Kind kind);

/// Positions of an Object's children; keys and values that were set follow.
inline constexpr size_t kObjectName = 0;
inline constexpr size_t kObjectArguments = 1;  // a Tuple
inline constexpr size_t kObjectState = 2;      // nullptr if it was given none
inline constexpr size_t kObjectEntries = 3;

struct Node;
using Children = std::vector<const Node*>;

/// Nodes may be children of several others, and of themselves: whoever walks them must bound its way.
struct Node {
  Kind kind = Kind::None;
  int64_t position = 0;  // of the opcode that made it, in the pickle
  std::variant<std::monostate, bool, int64_t, double, std::string_view, Children> content;
};

/// What a pickle may hold besides plain values.
struct Dialect {
  std::vector<std::string_view> names;  // "module.name", of static storage
  std::string_view only;                // the same for people: "only ... are read"
};

/// A pickle of protocol 2 to 5. Text is valid UTF-8. Takes memory in proportion to the bytes, which must outlive
/// it.
class Pickle {
 public:
  /// Throws, naming `what` and the position, if the bytes are no such pickle, or mention another name than the
  /// dialect's.
  Pickle(std::string_view bytes, const Dialect& dialect, std::string what);

  const Node& root() const { return *root_; }
  size_t size() const { return size_; }
  const std::string& what() const { return what_; }

  /// The content of a node. Throws, saying what `role` is and should be, if it is of another kind.
  bool boolean(const Node& node, std::string_view role) const;
  int64_t integer(const Node& node, std::string_view role) const;
  std::string_view text(const Node& node, std::string_view role) const;
  /// Of a list or a tuple.
  const Children& items(const Node& node, std::string_view role) const;
  const Children& tuple(const Node& node, std::string_view role) const;
  const Children& dict(const Node& node, std::string_view role) const;
  /// The children of an object.
  const Children& object(const Node& node, std::string_view role) const;
  /// The name of a name or of an object's class; empty for others.
  std::string_view name(const Node& node) const;

  [[noreturn]] void fail(const Node& node, const std::string& text) const;

 private:
  friend class Parser;
  std::string what_;
  size_t size_ = 0;
  std::deque<Node> nodes_;
  const Node* root_ = nullptr;
};

/// The names that `to_value` understands, besides plain values.
const Dialect& value_dialect();

/// The root as a value: lists and tuples become lists; the integer keys of dicts become text, as torch's DCP does
/// with those of a state dict; attributes of an OrderedDict are left out. Throws if values are nested too deeply or
/// contain themselves, or repeat shared parts until they are many times larger than the pickle.
Value to_value(const Pickle& pickle);

/// Writes protocol 2. Equal texts and names are written once. Calls follow the order of the opcodes: children
/// first, then what holds them.
class Writer {
 public:
  Writer();

  void none();
  void boolean(bool value);
  void integer(int64_t value);
  void real(double value);
  void text(std::string_view value);
  void bytes(std::string_view value);
  /// Without tensors; throws if there are any.
  void value(const Value& value);
  void integers(c10::ArrayRef<int64_t> values);  // as a tuple

  void name(std::string_view module, std::string_view name);
  void empty_list() { put(']'); }
  void empty_dict() { put('}'); }
  void empty_tuple() { put(')'); }
  void mark() { put('('); }
  void tuple() { put('t'); }      // of what follows the mark
  void append() { put('e'); }     // what follows the mark to the list before it
  void set_items() { put('u'); }  // pairs that follow the mark, in the dict before it
  void call() { put('R'); }       // the name below the tuple of arguments
  void make() { put('\x81'); }    // an object of the class below the tuple of arguments
  void build() { put('b'); }      // gives the object below its state
  void persistent() { put('Q'); }
  /// Remembers what was written last, and repeats it.
  uint32_t remember();
  void recall(uint32_t memo);

  /// The whole pickle.
  std::string finish() &&;

 private:
  void put(char opcode) { out_ += opcode; }
  template <typename T>
  void put_raw(T value);
  bool repeat(const std::string& key);

  std::string out_;
  uint32_t memo_ = 0;
  std::unordered_map<std::string, uint32_t> written_;
};

}  // namespace tessera::checkpoint::pickle
