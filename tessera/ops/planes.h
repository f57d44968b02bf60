#pragma once

#include <tessera/kernels/linear_map.h>
#include <tessera/ops/family.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera::ops {

/// Operators that are a linear map along each dim of a plane, one after the other.
struct Separable {
  int64_t inner;  // how many dims
  /// One tap for each position, of weight 1: dims may be sharded in any dtype; else in floating ones.
  bool copies;
  /// What a call does along each of these dims, whose sizes are `sizes` in the input. Nothing if it is not
  /// sane, which libtorch is to say.
  std::function<std::optional<std::vector<LinearMap>>(const OpCall& call, c10::IntArrayRef sizes)> maps;
  Names reads;
};

/// Their rule: batch and channels may be sharded, and planes too, with halos.
Planes separable(const Separable& op);
/// That of their gradients, from the first tensor. The shape of the input is the argument `input_size`, or
/// that of a tensor `self`.
Planes separable_backward(const Separable& op);

}  // namespace tessera::ops
