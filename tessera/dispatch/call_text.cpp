#include <tessera/dispatch/call_text.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/strict.h>
#include <tessera/placement/text.h>

#include <array>
#include <charconv>

#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>
#include <c10/util/strides.h>

namespace tessera {

namespace {

using c10::IValue;

std::string compact(c10::IntArrayRef sizes) { return c10::str("[", c10::Join(",", sizes), "]"); }

std::string compact(c10::ArrayRef<Placement> placements) {
  std::string text = "[";
  for (const Placement& placement : placements)
    text.append(text.size() > 1 ? "," : "").append(placement.str());
  return text + "]";
}

std::string text_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  if (const DTensorImpl* impl = DTensorImpl::of(tensor)) return tensor_text(impl->spec());
  return c10::str(to_text(tensor.scalar_type()), compact(tensor.sizes()));
}

std::string text_of(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  std::string result(text.data(), end);
  if (result.find_first_not_of("-0123456789") == std::string::npos) result += ".0";
  return result;
}

std::string text_of(const IValue& value, bool is_dtype) {
  constexpr size_t kShown = 8;
  if (value.isTensor()) return text_of(value.toTensor());
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isInt())
    return is_dtype ? std::string(to_text(static_cast<at::ScalarType>(value.toInt())))
                    : std::to_string(value.toInt());
  if (value.isDouble()) return text_of(value.toDouble());
  if (value.isString()) return c10::str("'", value.toStringRef(), "'");
  if (value.isDevice()) return c10::str("'", value.toDevice(), "'");
  if (!value.isList()) return c10::str("<", value.tagKind(), ">");
  std::string text = "[";
  const auto items = value.toListRef();
  for (const size_t i : c10::irange(std::min(items.size(), kShown)))
    text.append(i == 0 ? "" : ", ").append(text_of(items[i], is_dtype));
  if (items.size() > kShown) text += c10::str(", and ", items.size() - kShown, " more");
  return text + "]";
}

/// The mesh of the first distributed tensor among them, or null.
const DeviceMesh* mesh_of(c10::ArrayRef<IValue> values) {
  for (const IValue& value : values) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      const DTensorImpl* impl = tensor.defined() ? DTensorImpl::of(tensor) : nullptr;
      if (impl) return &impl->spec().mesh();
    } else if (value.isList()) {
      if (const DeviceMesh* mesh = mesh_of(value.toListRef())) return mesh;
    }
  }
  return nullptr;
}

std::string code_of(const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::shard:
      return c10::str("Shard(", placement.dim(), ")");
    case Placement::Kind::strided_shard:
      return c10::str("StridedShard(", placement.dim(), ", ", placement.split(), ")");
    case Placement::Kind::partial:
      return placement.op() == ReduceOp::norm  ? c10::str("NormPartial(", placement.norm(), ")")
             : placement.op() == ReduceOp::sum ? "Partial()"
                                               : c10::str("Partial(ReduceOp::", placement.op(), ")");
    case Placement::Kind::replicate:
      break;
  }
  return "Replicate()";
}

}  // namespace

std::string tensor_text(const Spec& spec) {
  std::string text = c10::str(to_text(spec.dtype()), compact(spec.shape()), " ", compact(spec.placements()));
  if (!spec.order().empty()) {
    text += " order (";
    const auto& names = spec.mesh().mesh_dim_names();
    for (const size_t i : c10::irange(spec.order().size()))
      text += c10::str(i == 0 ? "" : ",", names.empty() ? std::to_string(spec.order()[i])
                                                        : names[static_cast<size_t>(spec.order()[i])]);
    text += ")";
  }
  if (spec.strides() != c10::IntArrayRef(c10::contiguous_strides(spec.shape())))
    text.append(" strides ").append(compact(spec.strides()));
  return text;
}

std::string call_text(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  std::string text = c10::toString(schema.operator_name()) + "(";
  bool by_name = false, is_first = true;
  for (const size_t i : c10::irange(std::min(arguments.size(), schema.arguments().size()))) {
    const c10::Argument& argument = schema.arguments()[i];
    const auto kind = [](const c10::TypePtr& type) {
      const auto* optional = type->castRaw<c10::OptionalType>();
      return (optional ? optional->getElementType() : type)->kind();
    };
    const bool is_dtype = kind(argument.real_type()) == c10::TypeKind::ScalarTypeType;
    const std::string value = text_of(arguments[i], is_dtype);
    if (argument.default_value() && text_of(*argument.default_value(), is_dtype) == value) {
      by_name = true;
      continue;
    }
    text +=
        c10::str(is_first ? "" : ", ", by_name || argument.kwarg_only() ? argument.name() + "=" : "", value);
    is_first = false;
  }
  text += ")";
  if (const DeviceMesh* mesh = mesh_of(arguments)) text += c10::str(" on ", *mesh);
  return text;
}

std::string redistribute_code(const std::string& name, const Placements& placements) {
  if (host_language().redistribute) return host_language().redistribute(name, placements);
  std::string text = name + " = DTensor(" + name + ").redistribute({";
  for (const size_t i : c10::irange(placements.size()))
    text.append(i == 0 ? "" : ", ").append(code_of(placements[i]));
  return text + "});";
}

}  // namespace tessera
