#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string_view>

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

namespace tessera {

/// How the values that ranks hold of a partial tensor combine into its true value.
///   norm  (sum over ranks of |v|^p)^(1/p); the p belongs to the placement
enum class ReduceOp : uint8_t { sum, avg, product, min, max, any, all, norm };

inline constexpr ReduceOp kReduceOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min,
                                          ReduceOp::max, ReduceOp::any, ReduceOp::all,     ReduceOp::norm};

/// "sum", "avg", ...
TESSERA_API std::string_view name(ReduceOp op);
/// The op of that name, or nothing.
TESSERA_API std::optional<ReduceOp> reduce_op(std::string_view name);

/// Whether a*x + b*y on every rank gives a*X + b*Y: only then may linear ops run on partial values.
/// True of sum and avg.
TESSERA_API bool is_linear(ReduceOp op);

/// Whether ranks that all hold v hold a partial v: reducing equal values gives that value.
/// True of avg, min, max, any and all.
TESSERA_API bool is_idempotent(ReduceOp op);

/// What a rank that contributes nothing holds: reducing it with v gives v.
///   neutral(min, kFloat) == inf      neutral(min, kInt) == 2147483647      neutral(all, kBool) == true
/// Nothing for avg, where every rank has a say. Throws for min and max of a dtype that has no order
/// (complex).
TESSERA_API std::optional<c10::Scalar> neutral(ReduceOp op, c10::ScalarType dtype);

TESSERA_API std::ostream& operator<<(std::ostream& out, ReduceOp op);

}  // namespace tessera
