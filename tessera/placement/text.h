#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/layout.h>
#include <tessera/placement/placement.h>
#include <tessera/placement/spec.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

/// Placements and specs as text, and back: what is printed reads back as the same value.
///
///   [S(0), R, P(sum)] on mesh(dp=2, tp=4, x=2): f32[4096, 4096]
///   [S(0), S(0)] order (tp, dp) on mesh(dp=2, tp=4): bf16[64, 32] strides [1, 64]
///   [SS(0, 2), S(0)] on mesh(2, 4)
///
/// Order and strides are left out where they are the default; without names, mesh dims are named by position.
/// Space may stand between any two words or signs. Text that cannot be read is an error that shows it, marks
/// the position and says what was expected there.

namespace tessera {

/// What the text of a spec says, without a mesh of ranks behind it.
struct Layout {
  Placements placements = {};
  ShardOrder order = {};
  c10::DimVector mesh_shape = {};
  std::vector<std::string> mesh_dim_names = {};
  /// Shape and dtype are both there or both not; strides only with them.
  std::optional<c10::ScalarType> dtype = {};
  std::optional<c10::DimVector> shape = {};
  std::optional<c10::DimVector> strides = {};

  bool operator==(const Layout&) const = default;
};

TESSERA_API Layout layout_of(const Spec& spec);

TESSERA_API std::string to_text(c10::ArrayRef<Placement> placements);
TESSERA_API std::string to_text(const Layout& layout);

/// "f32", "bf16", "i64", "b8", ... as PyTorch abbreviates; its full name for a dtype without abbreviation.
TESSERA_API std::string_view to_text(c10::ScalarType dtype);
/// Nothing if no dtype has that text.
TESSERA_API std::optional<c10::ScalarType> parse_dtype(std::string_view text);

TESSERA_API Placement parse_placement(std::string_view text);
TESSERA_API Placements parse_placements(std::string_view text);
TESSERA_API Layout parse_layout(std::string_view text);
/// The mesh in the text must have the shape and the names of `mesh`.
TESSERA_API Spec parse_spec(std::string_view text, const DeviceMesh& mesh);

}  // namespace tessera
