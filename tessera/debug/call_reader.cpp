#include <tessera/debug/call_reader.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/placement/spec.h>
#include <tessera/placement/text_reader.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

using c10::IValue;
using c10::TypeKind;

/// A value as it is written, before it is known what the operator takes there.
struct Written {
  enum class Kind { tensor, dtype, integer, real, flag, none, text, list } kind;
  size_t begin;
  std::string name = {};  // of the argument, if that is said
  Layout layout = {};     // of a tensor, with the mesh
  std::optional<c10::ScalarType> dtype = {};
  int64_t integer = 0;
  double real = 0;
  std::string text = {};
  std::vector<Written> items = {};
};

struct WrittenCall {
  std::string name;  // "aten::mm"
  std::optional<std::string> overload = {};
  size_t begin = 0;
  std::vector<Written> arguments = {};
  Layout mesh = {};  // empty if the text has none
};

/// Reads the text without knowing any operator.
class CallReader {
 public:
  /// `mesh`: that of the tensors, or null to skip them.
  CallReader(std::string_view text, const Layout* mesh) : reader_(text, "a call"), mesh_(mesh) {}

  WrittenCall read() {
    WrittenCall call;
    call.begin = reader_.position();
    std::string name(name_word().text);
    std::string space = "aten";
    if (reader_.accept(':')) {
      reader_.expect(':');
      space = std::exchange(name, std::string(name_word().text));
    }
    if (const size_t dot = name.find('.'); dot != std::string::npos) {
      call.overload = name.substr(dot + 1);
      name.erase(dot);
      if (*call.overload == "default") call.overload = "";
    }
    call.name = space + "::" + name;
    reader_.list("()", [&] { call.arguments.push_back(argument()); });
    if (reader_.peek() != '\0') {
      reader_.expect("on");
      reader_.mesh(call.mesh);
    }
    reader_.end();
    return call;
  }

  [[noreturn]] void fail(size_t position, const std::string& expected) const {
    reader_.fail(position, expected);
  }

 private:
  TextReader::Word name_word() {
    const auto word = reader_.word();
    if (word.text.empty()) fail(word.begin, "the name of an operator, such as mm or aten::add.Tensor");
    return word;
  }

  Written argument() {
    const auto word = reader_.word();
    if (!word.text.empty() && reader_.accept('=')) {
      Written written = value();
      written.name = word.text;
      return written;
    }
    reader_.seek(word.begin);
    return value();
  }

  Written value(bool in_list = false) {
    Written written{.kind = Written::Kind::list, .begin = reader_.position()};
    if (reader_.peek() == '[') {
      if (in_list) fail(written.begin, "a tensor or a value: no operator takes lists of lists");
      reader_.list("[]", [&] { written.items.push_back(value(/*in_list=*/true)); });
      return written;
    }
    const auto word = reader_.word();
    written.dtype = parse_dtype(word.text);
    if (written.dtype && reader_.peek() == '[') {
      reader_.seek(word.begin);
      read_tensor(written);
    } else if (written.dtype) {
      written.kind = Written::Kind::dtype;
    } else if (word.text == "True" || word.text == "true" || word.text == "False" || word.text == "false") {
      written.kind = Written::Kind::flag;
      written.integer = word.text == "True" || word.text == "true";
    } else if (word.text == "None") {
      written.kind = Written::Kind::none;
    } else if (word.text.size() >= 2 && (word.text.front() == '\'' || word.text.front() == '"') &&
               word.text.back() == word.text.front()) {
      written.kind = Written::Kind::text;
      written.text = word.text.substr(1, word.text.size() - 2);
    } else if (const auto integer = TextReader::as_number<int64_t>(word)) {
      written.kind = Written::Kind::integer;
      written.integer = *integer;
    } else if (const auto real = TextReader::as_number<double>(word)) {
      written.kind = Written::Kind::real;
      written.real = *real;
    } else {
      fail(word.begin,
           "a tensor such as f32[8,4] [S(0)], or a value such as 1, 0.5, True, None, [0, 1], 'mean' or f32");
    }
    return written;
  }

  void read_tensor(Written& written) {
    written.kind = Written::Kind::tensor;
    Layout& layout = written.layout;
    if (mesh_) {
      layout.mesh_shape = mesh_->mesh_shape;
      layout.mesh_dim_names = mesh_->mesh_dim_names;
    }
    reader_.dtype_and_shape(layout);
    const size_t begin = reader_.position();
    layout.placements = reader_.peek() == '[' ? reader_.placements() : Placements(layout.mesh_shape.size());
    if (mesh_ && layout.placements.size() != layout.mesh_shape.size())
      fail(begin, c10::str("one placement for each of the ", layout.mesh_shape.size(), " dims of ",
                           text_parts::mesh_text(layout.mesh_shape, layout.mesh_dim_names), ", not ",
                           layout.placements.size()));
    const auto order = reader_.read_order();
    if (mesh_) reader_.set_order(layout, order);
    reader_.strides(layout);
  }

  TextReader reader_;
  const Layout* const mesh_;
};

at::Tensor tensor_of(const Written& written, const DeviceMesh& mesh) {
  const Layout& layout = written.layout;
  c10::OptionalIntArrayRef strides;
  if (layout.strides) strides = *layout.strides;
  const Spec spec(mesh, layout.placements, *layout.shape, strides, *layout.dtype, layout.order);
  return make_dtensor(new_memory(spec, at::TensorOptions(*layout.dtype).device(at::kMeta)), spec);
}

/// Where a call does not fit an overload, and what it would take there.
struct Misfit {
  size_t position;
  std::string expected;
};

/// Gives the arguments of a call to one overload.
class Binder {
 public:
  Binder(const WrittenCall& call, const c10::FunctionSchema& schema, const DeviceMesh& mesh)
      : call_(call), schema_(schema), mesh_(mesh) {}

  /// The arguments in the order of the schema, or nothing and the misfit.
  std::optional<torch::jit::Stack> bind(Misfit& misfit) const {
    const auto& arguments = schema_.arguments();
    std::vector<const Written*> given(arguments.size(), nullptr);
    size_t next = 0;
    for (const Written& written : call_.arguments) {
      size_t index = next++;
      if (!written.name.empty()) {
        const auto found = std::find_if(arguments.begin(), arguments.end(),
                                        [&](const c10::Argument& a) { return a.name() == written.name; });
        index = static_cast<size_t>(found - arguments.begin());
      }
      const bool takes = index < arguments.size() && !given[index] &&
                         (!written.name.empty() || !arguments[index].kwarg_only());
      if (!takes) return failed(misfit, written.begin, c10::str("an argument of ", schema_));
      given[index] = &written;
    }
    torch::jit::Stack stack;
    for (const size_t i : c10::irange(arguments.size())) {
      const c10::Argument& argument = arguments[i];
      if (!given[i]) {
        if (!argument.default_value())
          return failed(misfit, call_.begin, c10::str("a value for '", argument.name(), "' of ", schema_));
        stack.push_back(*argument.default_value());
        continue;
      }
      auto value = convert(*given[i], argument.type(), argument.real_type(), argument.N());
      if (!value)
        return failed(
            misfit, given[i]->begin,
            c10::str("a ", argument.real_type()->str(), " for '", argument.name(), "' of ", schema_));
      stack.push_back(*std::move(value));
    }
    return stack;
  }

 private:
  using Kind = Written::Kind;

  static std::optional<torch::jit::Stack> failed(Misfit& misfit, size_t position, std::string expected) {
    misfit = {position, std::move(expected)};
    return std::nullopt;
  }

  std::optional<IValue> convert(const Written& written, const c10::TypePtr& type, const c10::TypePtr& real,
                                std::optional<int32_t> repeated) const {
    switch (type->kind()) {
      case TypeKind::OptionalType:
        if (written.kind == Kind::none) return IValue();
        return convert(written, type->expectRef<c10::OptionalType>().getElementType(),
                       real->kind() == TypeKind::OptionalType
                           ? real->expectRef<c10::OptionalType>().getElementType()
                           : real,
                       repeated);
      case TypeKind::TensorType:
        if (written.kind != Kind::tensor) return std::nullopt;
        return IValue(tensor_of(written, mesh_));
      case TypeKind::ListType:
        return list(written, type, repeated);
      case TypeKind::IntType:
        if (written.kind == Kind::dtype && real->kind() == TypeKind::ScalarTypeType)
          return IValue(static_cast<int64_t>(*written.dtype));
        if (written.kind != Kind::integer) return std::nullopt;
        return IValue(written.integer);
      case TypeKind::FloatType:
        if (written.kind != Kind::real && written.kind != Kind::integer) return std::nullopt;
        return IValue(written.kind == Kind::real ? written.real : static_cast<double>(written.integer));
      case TypeKind::NumberType:
        if (written.kind == Kind::flag) return IValue(written.integer != 0);
        if (written.kind == Kind::integer) return IValue(written.integer);
        if (written.kind == Kind::real) return IValue(written.real);
        return std::nullopt;
      case TypeKind::BoolType:
        if (written.kind != Kind::flag) return std::nullopt;
        return IValue(written.integer != 0);
      case TypeKind::StringType:
        if (written.kind != Kind::text) return std::nullopt;
        return IValue(written.text);
      default:
        return std::nullopt;
    }
  }

  std::optional<IValue> list(const Written& written, const c10::TypePtr& type,
                             std::optional<int32_t> repeated) const {
    const c10::TypePtr item = type->expectRef<c10::ListType>().getElementType();
    c10::impl::GenericList result(item);
    if (written.kind != Kind::list) {
      // int[2] is also given as one int.
      const auto value = repeated ? convert(written, item, item, std::nullopt) : std::nullopt;
      if (!value) return std::nullopt;
      for (int32_t i = 0; i < std::max<int32_t>(1, *repeated); ++i) result.push_back(*value);
      return IValue(result);
    }
    for (const Written& each : written.items) {
      auto value = convert(each, item, item, std::nullopt);
      if (!value) return std::nullopt;
      result.push_back(*std::move(value));
    }
    return IValue(result);
  }

  const WrittenCall& call_;
  const c10::FunctionSchema& schema_;
  const DeviceMesh& mesh_;
};

/// The overloads that a name may mean, in order: that without a name first, and those that return new tensors before
/// those that write into given ones.
std::vector<c10::OperatorHandle> overloads_of(const WrittenCall& call) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name != call.name || (call.overload && name.overload_name != *call.overload)) continue;
    if (const auto op = dispatcher.findSchema(name)) found.push_back(*op);
  }
  const auto rank = [](const c10::OperatorHandle& op) {
    return std::pair(op.schema().is_mutable(), op.schema().overload_name());
  };
  std::sort(found.begin(), found.end(),
            [&](const c10::OperatorHandle& a, const c10::OperatorHandle& b) { return rank(a) < rank(b); });
  return found;
}

}  // namespace

Layout mesh_of_call(std::string_view text) {
  CallReader reader(text, nullptr);
  const WrittenCall call = reader.read();
  if (call.mesh.mesh_shape.empty()) reader.fail(text.size(), "a mesh: on mesh(dp=8, tp=8)");
  return call.mesh;
}

ReadCall read_call(std::string_view text, const DeviceMesh& mesh) {
  const Layout layout{.mesh_shape = c10::DimVector(mesh.shape()), .mesh_dim_names = mesh.mesh_dim_names()};
  CallReader reader(text, &layout);
  const WrittenCall call = reader.read();
  if (!call.mesh.mesh_shape.empty() && call.mesh != layout)
    reader.fail(text.rfind("mesh"), c10::str(mesh, ", which is the mesh that is given"));
  const auto overloads = overloads_of(call);
  if (overloads.empty())
    reader.fail(call.begin, c10::str("an operator: there is no ", call.name,
                                     call.overload ? "." + *call.overload : std::string()));
  Misfit furthest{0, ""};
  for (const c10::OperatorHandle& op : overloads) {
    Misfit misfit{0, ""};
    auto stack = Binder(call, op.schema(), mesh).bind(misfit);
    if (stack) return {op, *std::move(stack)};
    if (furthest.expected.empty() || misfit.position > furthest.position) furthest = std::move(misfit);
  }
  reader.fail(furthest.position, furthest.expected);
}

}  // namespace tessera
