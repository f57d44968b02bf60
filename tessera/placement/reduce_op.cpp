#include <tessera/error.h>
#include <tessera/placement/reduce_op.h>

#include <iterator>
#include <limits>
#include <ostream>
#include <type_traits>

namespace tessera {

namespace {

using c10::Scalar;
using c10::ScalarType;
using Neutral = std::optional<Scalar> (*)(ScalarType);

std::optional<Scalar> none(ScalarType) { return std::nullopt; }

template <auto value>
std::optional<Scalar> always(ScalarType) {
  return value;
}

template <typename T>
Scalar extreme(bool highest) {
  using limits = std::numeric_limits<T>;
  T value = highest ? limits::max() : limits::lowest();
  if constexpr (limits::has_infinity) {
    value = highest ? limits::infinity() : static_cast<T>(-static_cast<double>(limits::infinity()));
  }
  if constexpr (std::is_integral_v<T>) {
    return value;
  } else {
    return static_cast<double>(value);
  }
}

template <bool highest>
std::optional<Scalar> limit(ScalarType dtype) {
  switch (dtype) {
#define TESSERA_CASE(type, scalar_type) \
  case ScalarType::scalar_type:         \
    return extreme<type>(highest);
    AT_FORALL_SCALAR_TYPES(TESSERA_CASE)
    AT_FORALL_FLOAT8_TYPES(TESSERA_CASE)
    TESSERA_CASE(bool, Bool)
    TESSERA_CASE(c10::Half, Half)
    TESSERA_CASE(c10::BFloat16, BFloat16)
    TESSERA_CASE(uint16_t, UInt16)
    TESSERA_CASE(uint32_t, UInt32)
    TESSERA_CASE(uint64_t, UInt64)
#undef TESSERA_CASE
    default:
      TESSERA_CHECK(false, "values of dtype ", dtype, " have no order, so there is no ",
                    highest ? "minimum" : "maximum", " of them to reduce to");
  }
}

struct Properties {
  ReduceOp op;
  bool linear;
  bool idempotent;
  std::string_view name;
  Neutral neutral;
};

// clang-format off
constexpr Properties kTable[] = {
    // op               linear  idempotent  name       neutral
    {ReduceOp::sum,     true,   false,      "sum",     always<0>},
    {ReduceOp::avg,     true,   true,       "avg",     none},
    {ReduceOp::product, false,  false,      "product", always<1>},
    {ReduceOp::min,     false,  true,       "min",     limit<true>},
    {ReduceOp::max,     false,  true,       "max",     limit<false>},
    {ReduceOp::any,     false,  true,       "any",     always<false>},
    {ReduceOp::all,     false,  true,       "all",     always<true>},
    {ReduceOp::norm,    false,  false,      "norm",    always<0>},
};
// clang-format on
static_assert(std::size(kTable) == std::size(kReduceOps));

const Properties& properties(ReduceOp op) { return kTable[static_cast<size_t>(op)]; }

}  // namespace

std::string_view name(ReduceOp op) { return properties(op).name; }

std::optional<ReduceOp> reduce_op(std::string_view name) {
  for (const Properties& row : kTable) {
    if (row.name == name) return row.op;
  }
  return std::nullopt;
}

bool is_linear(ReduceOp op) { return properties(op).linear; }

bool is_idempotent(ReduceOp op) { return properties(op).idempotent; }

std::optional<Scalar> neutral(ReduceOp op, ScalarType dtype) { return properties(op).neutral(dtype); }

std::ostream& operator<<(std::ostream& out, ReduceOp op) { return out << name(op); }

}  // namespace tessera
