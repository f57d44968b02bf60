#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/placement/text_reader.h>

#include <sstream>

#include <c10/util/strides.h>

namespace tessera {

namespace {

using c10::ScalarType;

struct DtypeName {
  ScalarType dtype;
  std::string_view name;
};

constexpr DtypeName kDtypeNames[] = {
    {ScalarType::Float, "f32"},
    {ScalarType::BFloat16, "bf16"},
    {ScalarType::Half, "f16"},
    {ScalarType::Double, "f64"},
    {ScalarType::Long, "i64"},
    {ScalarType::Int, "i32"},
    {ScalarType::Short, "i16"},
    {ScalarType::Char, "i8"},
    {ScalarType::Byte, "u8"},
    {ScalarType::UInt16, "u16"},
    {ScalarType::UInt32, "u32"},
    {ScalarType::UInt64, "u64"},
    {ScalarType::Bool, "b8"},
    {ScalarType::ComplexHalf, "c32"},
    {ScalarType::ComplexFloat, "c64"},
    {ScalarType::ComplexDouble, "c128"},
    {ScalarType::Float8_e5m2, "f8e5m2"},
    {ScalarType::Float8_e4m3fn, "f8e4m3fn"},
    {ScalarType::Float8_e5m2fnuz, "f8e5m2fnuz"},
    {ScalarType::Float8_e4m3fnuz, "f8e4m3fnuz"},
    {ScalarType::Float8_e8m0fnu, "f8e8m0fnu"},
    {ScalarType::Float4_e2m1fn_x2, "f4e2m1fnx2"},
    {ScalarType::Bits1x8, "b1x8"},
    {ScalarType::Bits2x4, "b2x4"},
    {ScalarType::Bits4x2, "b4x2"},
    {ScalarType::Bits8, "b8x1"},
    {ScalarType::Bits16, "b16x1"},
};

}  // namespace

Layout layout_of(const Spec& spec) {
  Layout layout{.placements = spec.placements(),
                .order = spec.order(),
                .mesh_shape = c10::DimVector(spec.mesh().shape()),
                .mesh_dim_names = spec.mesh().mesh_dim_names(),
                .dtype = spec.dtype(),
                .shape = c10::DimVector(spec.shape()),
                .strides = std::nullopt};
  if (spec.strides() != c10::contiguous_strides(spec.shape()))
    layout.strides = c10::DimVector(spec.strides());
  return layout;
}

std::string to_text(c10::ArrayRef<Placement> placements) { return c10::str(placements); }

std::string to_text(const Layout& layout) {
  std::ostringstream out;
  out << layout.placements;
  if (!layout.order.empty()) {
    out << " order ";
    text_parts::print_list(out, layout.order, "()", [&](size_t i) {
      if (layout.mesh_dim_names.empty()) {
        out << layout.order[i];
      } else {
        out << layout.mesh_dim_names[layout.order[i]];
      }
    });
  }
  out << " on " << text_parts::mesh_text(layout.mesh_shape, layout.mesh_dim_names);
  if (layout.dtype && layout.shape) out << ": " << to_text(*layout.dtype) << *layout.shape;
  if (layout.strides) out << " strides " << *layout.strides;
  return out.str();
}

std::string_view to_text(ScalarType dtype) {
  for (const DtypeName& row : kDtypeNames) {
    if (row.dtype == dtype) return row.name;
  }
  return c10::toString(dtype);
}

std::optional<ScalarType> parse_dtype(std::string_view text) {
  for (int i = 0; i < static_cast<int>(ScalarType::Undefined); ++i) {
    if (to_text(static_cast<ScalarType>(i)) == text) return static_cast<ScalarType>(i);
  }
  return std::nullopt;
}

Placement parse_placement(std::string_view text) {
  TextReader parser(text, "a placement");
  const Placement placement = parser.placement();
  parser.end();
  return placement;
}

Placements parse_placements(std::string_view text) {
  TextReader parser(text, "placements");
  Placements placements = parser.placements();
  parser.end();
  return placements;
}

Layout parse_layout(std::string_view text) {
  TextReader parser(text, "a layout");
  Layout layout = parser.layout(/*with_shape=*/false);
  parser.end();
  return layout;
}

Spec parse_spec(std::string_view text, const DeviceMesh& mesh) {
  TextReader parser(text, "a spec");
  const Layout layout = parser.layout(/*with_shape=*/true);
  parser.end();
  TESSERA_CHECK_VALUE(layout.mesh_shape == mesh.shape() && layout.mesh_dim_names == mesh.mesh_dim_names(),
                      "the spec \"", text, "\" is for ",
                      text_parts::mesh_text(layout.mesh_shape, layout.mesh_dim_names),
                      ", but the mesh given is ", mesh);
  c10::OptionalIntArrayRef strides;
  if (layout.strides) strides = *layout.strides;
  return Spec(mesh, layout.placements, *layout.shape, strides, *layout.dtype, layout.order);
}

}  // namespace tessera
