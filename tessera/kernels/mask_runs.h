#pragma once

#include <tessera/comm/world.h>
#include <tessera/placement/spec.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// The positions of a sharded tensor at which a mask is set, counted row by row over the global tensor. Ranks
/// exchange how many there are in each run of positions that one of them has.
class MaskRuns {
 public:
  /// Collective. `marks`: the local mask, set where it is not zero. Each rank has one contiguous range of each
  /// dim. `order`: in which the mesh dims shard what the positions are collected into.
  MaskRuns(const at::Tensor& marks, const Spec& spec, const ShardOrder& order);

  /// How many are set, on all ranks.
  int64_t count() const { return count_; }
  /// Of each position that is set on this rank, in order: its index among all that are set.
  at::Tensor indices() const;

  /// One row for each position that is set on this rank becomes row `indices()` of a tensor of `size` rows,
  /// which all mesh dims shard that shard the mask. Returns this rank's rows of it, zeros behind the last
  /// position that is set. Collective.
  at::Tensor collect(const at::Tensor& values, int64_t size) const;
  /// The converse: from this rank's rows of `size` to one for each of its positions. Collective.
  at::Tensor spread(const at::Tensor& rows, int64_t size) const;

 private:
  /// Runs of indices: from each start on, so many.
  struct Runs {
    at::Tensor starts, counts;

    Runs within(const Range& range) const;
    int64_t total() const;
    /// One after the other.
    ///   {5, 20}, {2, 3}  ->  5, 6, 20, 21, 22
    at::Tensor indices() const;
  };
  /// What a rank has of `starts_` or `counts_`.
  at::Tensor part(const at::Tensor& table, c10::IntArrayRef coordinate) const;
  Runs runs(c10::IntArrayRef coordinate) const;

  /// Between the positions of each rank and the rows of each.
  struct Routes {
    std::vector<int64_t> to;       // how many positions here are rows there
    std::vector<at::Tensor> from;  // which rows here are positions there
    std::vector<size_t> order;     // of the ranks, by the rows they have
    int64_t local = 0;             // rows here
    Group group;
  };
  Routes routes(int64_t size) const;

  Spec spec_;
  ShardOrder order_;
  c10::Device device_;
  std::vector<int64_t> mesh_dims_;  // that shard the tensor
  int64_t last_ = 0;                // the last sharded dim: a run is a range of it, and all behind it
  std::vector<int64_t> offsets_;    // where the shards of that dim begin
  at::Tensor starts_, counts_;      // of the runs, by the dims before it and the shard
  int64_t count_ = 0;
};

}  // namespace tessera::kernels
