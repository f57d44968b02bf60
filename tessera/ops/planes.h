#pragma once

#include <tessera/ops/family.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/SmallVector.h>

/// Operators that treat each plane by itself. Planes are the last dims, which are the spatial ones; there is
/// one for each of the batch and the channels.
namespace tessera::ops {

/// Batch and channels may be cut, the last `inner` dims not. `linear`: the first tensor may be a partial sum.
Rule planes(int64_t inner, size_t results, bool backward, bool linear = false);

/// A place of the input that a place of the result is made of.
struct Tap {
  int64_t place;
  double weight = 1;
};
using Taps = c10::SmallVector<Tap, 4>;

/// A linear map along one dim: each place of the result is the sum of its taps. It has one at least.
struct LinearMap {
  int64_t size;  // of the result
  std::function<Taps(int64_t place)> taps;
};

/// Operators that are a linear map along each of the last dims, one after the other.
struct Separable {
  std::string text;  // of the rule
  int64_t inner;     // how many dims
  bool copies;       // one tap for each place, of weight 1: for any dtype; else for floating ones
  /// What a call does along each of these dims, whose sizes are `sizes` in the input. Nothing if it is not
  /// sane, which libtorch is to say.
  std::function<std::optional<std::vector<LinearMap>>(const OpCall& call, c10::IntArrayRef sizes)> maps;
  std::vector<std::string> reads;
};

/// Their rule: batch and channels may be cut, and the last dims too, with halos.
Rule separable(const Separable& op);
/// That of their gradients, from the first tensor. They tell the shape of the input as `input_size`, or by a
/// tensor `self`.
Rule separable_backward(const Separable& op);

}  // namespace tessera::ops
