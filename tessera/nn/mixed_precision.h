#pragma once

#include <optional>

#include <c10/core/ScalarType.h>

namespace tessera {

/// The dtypes that a unit of fully_shard computes and communicates in; those of its parameters, where not said.
/// Parameters that are not of floating point are left alone.
struct MixedPrecisionPolicy {
  /// Of gathered parameters, and so of what is gathered.
  std::optional<c10::ScalarType> param_dtype = {};
  /// Gradients are reduced in it; by default in that in which they were computed.
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Floating point results of the unit's module are cast to it. (In C++: if it is called by `tessera::call`.)
  std::optional<c10::ScalarType> output_dtype = {};
  /// Whether floating point inputs are cast to param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace tessera
