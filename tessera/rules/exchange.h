#pragma once

#include <tessera/placement/spec.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::rules {

/// Elements of a dim and where they come from: to + k * to_step is from + k * from_step, for k in [0, count).
/// to_step is positive.
///   x[2:9:3]  {0, 1, 2, 3, 3}        flip of 5  {0, 1, 4, -1, 5}
struct Stretch {
  int64_t to, to_step;
  int64_t from, from_step;
  int64_t count;
};

/// Copies along `dim`, which both tensors have cut by the same mesh dims: all elements that stretches tell
/// of, from what the ranks hold of `source` to what they hold of `target`. The tensors may differ in the size
/// of that dim only. Collective; moves only what changes its rank.
void exchange(const at::Tensor& target, const Spec& target_spec, const at::Tensor& source,
              const Spec& source_spec, int64_t dim, const std::vector<Stretch>& stretches);

/// Which mesh dims cut a tensor dim.
std::vector<int64_t> mesh_dims_of(const Spec& spec, int64_t dim);

}  // namespace tessera::rules
