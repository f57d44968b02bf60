#pragma once

#include <tessera/kernels/window.h>

#include <functional>
#include <vector>

#include <c10/util/SmallVector.h>

/// Linear maps along dims that are sharded, as interpolation and padding are: each rank fetches the halo that
/// its shard of the result needs.
namespace tessera::kernels {

/// A position of the input that a position of the result is made of.
struct Tap {
  int64_t position;
  double weight = 1;
};
using Taps = c10::SmallVector<Tap, 4>;

/// A linear map along one dim: each position of the result is the sum of its taps. It has one at least.
struct LinearMap {
  int64_t size;  // of the result
  std::function<Taps(int64_t position)> taps;
};

/// A rank's part of linear maps along each of the last dims, one after the other. Input and result are
/// sharded alike; each rank has one range of each of these dims.
class LinearMaps {
 public:
  /// `copies`: one tap of weight 1 for each position, so that it works in any dtype.
  LinearMaps(const Spec& input, const Spec& result, const std::vector<LinearMap>& all, bool copies);
  ~LinearMaps();

  /// Without any, none of the dims is sharded: then there is nothing to do here.
  const Halos& halos() const { return halos_; }
  /// From the local input to the local result. Collective, if the halos communicate.
  at::Tensor forward(const at::Tensor& input) const;
  /// From the local gradient of the result to that of the input. Likewise.
  at::Tensor backward(const at::Tensor& gradient) const;

 private:
  class Local;

  Halos halos_;
  std::vector<Local> maps_;  // none if the rank has nothing to do
  std::vector<int64_t> input_shape_, result_shape_;
  bool copies_;
};

}  // namespace tessera::kernels
