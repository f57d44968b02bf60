#pragma once

#include <tessera/kernels/window.h>
#include <tessera/rules/strategy.h>

#include <vector>

/// Convolutions whose spatial dims, those from the third on, are sharded: each rank fetches the halo that its
/// shard of the output needs.
namespace tessera::kernels {

/// What a convolution does along the spatial dims.
struct ConvolutionGeometry {
  bool transposed = false;
  std::vector<Sliding> windows = {};
  std::vector<int64_t> output_padding = {};

  /// Of the output, in spatial dim `i`.
  int64_t size(size_t i, int64_t input) const;
  /// What a range of the output needs of the input.
  Range reach(size_t i, const Range& output) const;
  /// What the operator makes of the input that a halo has, without padding: at least what needs it.
  Range cover(const Halo& halo) const;
};

/// A rank's part of such a convolution.
class ShardedConvolution {
 public:
  ShardedConvolution(ConvolutionGeometry geometry, const Spec& input, const Spec& output);

  /// Without any, no spatial dim is sharded: then it is what the operator computes.
  const Halos& halos() const { return halos_; }
  /// The operators convolution and convolution_backward, on local tensors. Collective, if the halos
  /// communicate.
  rules::Stack forward(const c10::OperatorHandle& op, rules::Stack arguments) const;
  rules::Stack backward(const c10::OperatorHandle& op, rules::Stack arguments) const;

 private:
  void put_padding(const c10::OperatorHandle& op, rules::Stack& arguments) const;
  Halos::Cover cover() const;

  ConvolutionGeometry geometry_;
  Halos halos_;
  std::vector<int64_t> output_shape_;  // of this rank
};

}  // namespace tessera::kernels
