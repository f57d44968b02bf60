#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/utf8.h>
#include <tessera/error.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::checkpoint::pickle {

const char* kind_text(Kind kind) {
  switch (kind) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return "a bool";
    case Kind::Integer:
      return "an integer";
    case Kind::LargeInteger:
      return "an integer beyond 64 bits";
    case Kind::Float:
      return "a float";
    case Kind::Text:
      return "a str";
    case Kind::Bytes:
      return "bytes";
    case Kind::List:
      return "a list";
    case Kind::Tuple:
      return "a tuple";
    case Kind::Dict:
      return "a dict";
    case Kind::Name:
      return "the name ";
    case Kind::Object:
      return "an object of ";
    case Kind::Persistent:
      return "a persistent id";
  }
  return "";
}

namespace {

/// What people call an object that a pickle makes by calling `name`.
std::string type_made_by(std::string_view module, std::string_view name) {
  if (module.starts_with("numpy.") && name == "_reconstruct") return "numpy.ndarray";
  if (module.starts_with("numpy.") && name == "scalar") return "numpy.number";
  if (module == "torch._utils" && name.starts_with("_rebuild_")) {
    return "torch.Tensor in a place where no tensor is read (a tuple, another object)";
  }
  if (module == "builtins" || module == "__builtin__") return std::string(name);
  return c10::str(module, ".", name);
}

}  // namespace

/// Runs the opcodes of a pickle on a stack of nodes.
class Parser {
 public:
  Parser(Pickle& pickle, std::string_view bytes, const Dialect& dialect)
      : pickle_(pickle), bytes_(bytes), dialect_(dialect) {}

  void run() {
    check(!bytes_.empty(), "is empty");
    check(take<uint8_t>() == 0x80, "does not begin as a pickle of protocol 2 or later does");
    const int protocol = take<uint8_t>();
    check(protocol >= 2 && protocol <= 5, "is a pickle of protocol ", protocol, "; 2 to 5 are read");
    while (step()) {
    }
    check(position_ == bytes_.size(), "goes on after the pickle's end");
    check(stack_.size() == 1 && marks_.empty(), "leaves ", stack_.size(),
          " values at its end instead of one");
    pickle_.root_ = stack_.front();
  }

 private:
  template <typename... Args>
  void check(bool condition, const Args&... text) const {
    TESSERA_CHECK(condition, pickle_.what_, " ", text..., " (byte ", opcode_, " of the pickle).");
  }

  /// A type of Python that is none of ours: no damage.
  [[noreturn]] void refuse_type(const std::string& type) const {
    TESSERA_CHECK_AS(c10::TypeError, false, pickle_.what_, " holds a Python object of type ", type, "; only ",
                     dialect_.only, " are read (byte ", opcode_, " of the pickle).");
  }

  std::string_view take_bytes(uint64_t size) {
    check(size <= bytes_.size() - position_, "ends in the middle of a value");
    const std::string_view taken = bytes_.substr(position_, size);
    position_ += size;
    return taken;
  }

  template <typename T>
  T take() {
    static_assert(std::endian::native == std::endian::little);
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string_view take_line() {
    const size_t end = bytes_.find('\n', position_);
    check(end != std::string_view::npos, "ends in the middle of a name");
    const std::string_view line = take_bytes(end - position_);
    ++position_;
    return line;
  }

  template <typename Content>
  Node* push(Kind kind, Content content) {
    pickle_.nodes_.push_back({kind, static_cast<int64_t>(opcode_), std::move(content)});
    Node* node = &pickle_.nodes_.back();
    stack_.push_back(node);
    return node;
  }

  Node* pop() {
    check(stack_.size() > floor(), "takes a value that is not there");
    Node* node = stack_.back();
    stack_.pop_back();
    return node;
  }

  Node* top() const {
    check(stack_.size() > floor(), "takes a value that is not there");
    return stack_.back();
  }

  /// What lies below the last mark belongs to whoever takes the mark.
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  std::vector<const Node*> pop_to_mark() {
    check(!marks_.empty(), "takes a mark that is not there");
    const auto begin = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
    std::vector<const Node*> nodes(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return nodes;
  }

  void push_text(uint64_t size) {
    const std::string_view text = take_bytes(size);
    check(is_utf8(text), "holds text that is not valid UTF-8");
    push(Kind::Text, text);
  }

  void push_long(uint64_t size) {
    const std::string_view bytes = take_bytes(size);
    if (size > 8) {
      push(Kind::LargeInteger, bytes);
      return;
    }
    int64_t value = size > 0 && (bytes.back() & 0x80) ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push(Kind::Integer, value);
  }

  void push_float() {
    const auto bits = take<uint64_t>();
    push(Kind::Float, std::bit_cast<double>(__builtin_bswap64(bits)));
  }

  void push_name(std::string_view module, std::string_view name) {
    for (const std::string_view known : dialect_.names) {
      if (known.size() == module.size() + name.size() + 1 && known.starts_with(module) &&
          known[module.size()] == '.' && known.ends_with(name)) {
        push(Kind::Name, known);
        return;
      }
    }
    check(is_utf8(module) && is_utf8(name), "holds a name that is not valid UTF-8");
    refuse_type(type_made_by(module, name));
  }

  void push_stack_name() {
    const Node* name = pop();
    const Node* module = pop();
    push_name(pickle_.text(*module, "the module of a name"), pickle_.text(*name, "a name"));
  }

  void push_object() {
    const Node* arguments = pop();
    const Node* callee = pop();
    check(callee->kind == Kind::Name, "calls ", kind_text(callee->kind));
    check(arguments->kind == Kind::Tuple, "calls ", pickle_.name(*callee), " with ",
          kind_text(arguments->kind), " instead of a tuple");
    push(Kind::Object, std::vector<const Node*>{callee, arguments, nullptr});
  }

  void build() {
    const Node* state = pop();
    Node* object = top();
    check(object->kind == Kind::Object, "gives state to ", kind_text(object->kind));
    const Node*& slot = children(object)[kObjectState];
    check(slot == nullptr, "gives state to an object twice");
    slot = state;
  }

  static std::vector<const Node*>& children(Node* node) {
    return std::get<std::vector<const Node*>>(node->content);
  }

  void append(const std::vector<const Node*>& items) {
    Node* list = top();
    check(list->kind == Kind::List, "appends to ", kind_text(list->kind));
    children(list).insert(children(list).end(), items.begin(), items.end());
  }

  void set_items(const std::vector<const Node*>& items) {
    Node* dict = top();
    check(dict->kind == Kind::Dict || dict->kind == Kind::Object, "sets items of ", kind_text(dict->kind));
    check(items.size() % 2 == 0, "sets a key without a value");
    children(dict).insert(children(dict).end(), items.begin(), items.end());
  }

  void push_tuple(size_t size) {
    std::vector<const Node*> items(size);
    for (size_t i = size; i > 0; --i) items[i - 1] = pop();
    push(Kind::Tuple, std::move(items));
  }

  void put_memo(uint64_t index) {
    // Writers number from 0, and each number took them bytes: no pickle makes this large.
    check(index < bytes_.size(), "remembers a value under the number ", index, ", which it cannot need");
    if (index >= memo_.size()) memo_.resize(index + 1);
    memo_[index] = top();
  }

  void get_memo(uint64_t index) {
    check(index < memo_.size() && memo_[index] != nullptr, "recalls the value ", index,
          ", which it did not remember");
    stack_.push_back(memo_[index]);
  }

  /// False at the end of the pickle.
  bool step() {
    opcode_ = position_;
    const auto opcode = take<uint8_t>();
    switch (opcode) {
      case '.':  // STOP
        return false;
      case 0x95: {  // FRAME
        const auto size = take<uint64_t>();
        check(size <= bytes_.size() - position_, "ends in the middle of a frame");
        return true;
      }
      case '(':  // MARK
        marks_.push_back(stack_.size());
        return true;
      case '0':  // POP
        pop();
        return true;
      case '1':  // POP_MARK
        pop_to_mark();
        return true;
      case '2':  // DUP
        stack_.push_back(top());
        return true;

      case 'N':  // NONE
        push(Kind::None, std::monostate());
        return true;
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
        push(Kind::Bool, opcode == 0x88);
        return true;
      case 'K':  // BININT1
        push(Kind::Integer, int64_t{take<uint8_t>()});
        return true;
      case 'M':  // BININT2
        push(Kind::Integer, int64_t{take<uint16_t>()});
        return true;
      case 'J':  // BININT
        push(Kind::Integer, int64_t{take<int32_t>()});
        return true;
      case 0x8a:  // LONG1
        push_long(take<uint8_t>());
        return true;
      case 0x8b:  // LONG4
        push_long(take<uint32_t>());
        return true;
      case 'G':  // BINFLOAT
        push_float();
        return true;
      case 0x8c:  // SHORT_BINUNICODE
        push_text(take<uint8_t>());
        return true;
      case 'X':  // BINUNICODE
        push_text(take<uint32_t>());
        return true;
      case 0x8d:  // BINUNICODE8
        push_text(take<uint64_t>());
        return true;
      case 'C':  // SHORT_BINBYTES
        push(Kind::Bytes, take_bytes(take<uint8_t>()));
        return true;
      case 'B':  // BINBYTES
        push(Kind::Bytes, take_bytes(take<uint32_t>()));
        return true;
      case 0x8e:  // BINBYTES8
        push(Kind::Bytes, take_bytes(take<uint64_t>()));
        return true;

      case ')':  // EMPTY_TUPLE
        push_tuple(0);
        return true;
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        push_tuple(opcode - 0x84);
        return true;
      case 't': {  // TUPLE
        auto items = pop_to_mark();
        push(Kind::Tuple, std::move(items));
        return true;
      }
      case ']':  // EMPTY_LIST
        push(Kind::List, std::vector<const Node*>());
        return true;
      case 'a':  // APPEND
        append({pop()});
        return true;
      case 'e':  // APPENDS
        append(pop_to_mark());
        return true;
      case '}':  // EMPTY_DICT
        push(Kind::Dict, std::vector<const Node*>());
        return true;
      case 's': {  // SETITEM
        const Node* value = pop();
        const Node* key = pop();
        set_items({key, value});
        return true;
      }
      case 'u':  // SETITEMS
        set_items(pop_to_mark());
        return true;

      case 'c': {  // GLOBAL
        const std::string_view module = take_line();
        push_name(module, take_line());
        return true;
      }
      case 0x93:  // STACK_GLOBAL
        push_stack_name();
        return true;
      case 'R':   // REDUCE
      case 0x81:  // NEWOBJ
        push_object();
        return true;
      case 'b':  // BUILD
        build();
        return true;
      case 'Q': {  // BINPERSID
        const Node* id = pop();
        push(Kind::Persistent, std::vector<const Node*>{id});
        return true;
      }

      case 0x94:  // MEMOIZE
        memo_.push_back(top());
        return true;
      case 'q':  // BINPUT
        put_memo(take<uint8_t>());
        return true;
      case 'r':  // LONG_BINPUT
        put_memo(take<uint32_t>());
        return true;
      case 'h':  // BINGET
        get_memo(take<uint8_t>());
        return true;
      case 'j':  // LONG_BINGET
        get_memo(take<uint32_t>());
        return true;

      case 0x8f:  // EMPTY_SET
      case 0x91:  // FROZENSET
        refuse_type("set");
      default:
        check(false, "has the opcode ", static_cast<int>(opcode), ", which is not read");
        return true;
    }
  }

  Pickle& pickle_;
  std::string_view bytes_;
  const Dialect& dialect_;
  size_t position_ = 0;
  size_t opcode_ = 0;  // position of the current one
  std::vector<Node*> stack_;
  std::vector<size_t> marks_;
  std::vector<Node*> memo_;
};

Pickle::Pickle(std::string_view bytes, const Dialect& dialect, std::string what)
    : what_(std::move(what)), size_(bytes.size()) {
  Parser(*this, bytes, dialect).run();
}

void Pickle::fail(const Node& node, const std::string& text) const {
  TESSERA_CHECK(false, what_, ": ", text, " (byte ", node.position, " of the pickle).");
}

namespace {

std::string role_is(const Pickle& pickle, const Node& node, std::string_view role, const char* expected) {
  return c10::str(role, " is ", kind_text(node.kind), pickle.name(node), ", but must be ", expected);
}

template <typename T>
const T& content_of(const Pickle& pickle, const Node& node, std::initializer_list<Kind> kinds,
                    std::string_view role, const char* expected) {
  if (std::find(kinds.begin(), kinds.end(), node.kind) == kinds.end()) {
    pickle.fail(node, role_is(pickle, node, role, expected));
  }
  return std::get<T>(node.content);
}

}  // namespace

bool Pickle::boolean(const Node& node, std::string_view role) const {
  return content_of<bool>(*this, node, {Kind::Bool}, role, "a bool");
}
int64_t Pickle::integer(const Node& node, std::string_view role) const {
  return content_of<int64_t>(*this, node, {Kind::Integer}, role, "an integer of at most 64 bits");
}
std::string_view Pickle::text(const Node& node, std::string_view role) const {
  return content_of<std::string_view>(*this, node, {Kind::Text}, role, "a str");
}
const Children& Pickle::items(const Node& node, std::string_view role) const {
  return content_of<Children>(*this, node, {Kind::List, Kind::Tuple}, role, "a list or a tuple");
}
const Children& Pickle::tuple(const Node& node, std::string_view role) const {
  return content_of<Children>(*this, node, {Kind::Tuple}, role, "a tuple");
}
const Children& Pickle::dict(const Node& node, std::string_view role) const {
  return content_of<Children>(*this, node, {Kind::Dict}, role, "a dict");
}
const Children& Pickle::object(const Node& node, std::string_view role) const {
  return content_of<Children>(*this, node, {Kind::Object}, role, "an object");
}

std::string_view Pickle::name(const Node& node) const {
  if (node.kind == Kind::Name) return std::get<std::string_view>(node.content);
  if (node.kind == Kind::Object) return name(*std::get<Children>(node.content)[kObjectName]);
  return "";
}

}  // namespace tessera::checkpoint::pickle
