#pragma once

#include <tessera/comm/world.h>
#include <tessera/placement/spec.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// The places of a tensor that are marked, counted row by row as if it were whole, while each rank holds a
/// part of it: ranks tell each other how many there are in each run of places that one of them holds.
class MaskRuns {
 public:
  /// Collective. `marks`: what this rank holds; places that are not zero are marked. Each rank holds one
  /// range of each dim. `order`: in which the mesh dims cut what the marked places are collected into.
  MaskRuns(const at::Tensor& marks, const Spec& spec, const ShardOrder& order);

  /// How many there are in all.
  int64_t count() const { return count_; }
  /// Of each place that this rank has marked, in order: which one it is of all.
  at::Tensor numbers() const;

  /// Something for each marked place of this rank, as rows, goes to where row `numbers()` of a tensor
  /// with `size` rows lies, which are cut by all mesh dims that cut the marks. Returns what this rank holds
  /// of these rows, zeros from the last marked place on. Collective.
  at::Tensor collect(const at::Tensor& values, int64_t size) const;
  /// The converse: from what this rank holds of `size` rows to something for each of its places. Collective.
  at::Tensor spread(const at::Tensor& rows, int64_t size) const;

 private:
  /// Runs of numbers: from each start on, so many.
  struct Runs {
    at::Tensor starts, counts;

    Runs within(const Range& range) const;
    int64_t total() const;
    /// One after the other.
    ///   {5, 20}, {2, 3}  ->  5, 6, 20, 21, 22
    at::Tensor numbers() const;
  };
  /// What a rank has of such a table.
  at::Tensor part(const at::Tensor& table, c10::IntArrayRef coordinate) const;
  Runs runs(c10::IntArrayRef coordinate) const;

  /// Between the places of each rank and the rows of each.
  struct Ways {
    std::vector<int64_t> to;       // how many places here are rows there
    std::vector<at::Tensor> from;  // which rows here are places there
    std::vector<size_t> order;     // of the ranks, by the rows they hold
    int64_t held = 0;              // rows here
    Group group;
  };
  Ways ways(int64_t size) const;

  Spec spec_;
  ShardOrder order_;
  c10::Device device_;
  std::vector<int64_t> mesh_dims_;  // that cut the tensor
  int64_t last_ = 0;                // the last dim that is cut: a run is a range of it, and all behind it
  std::vector<int64_t> offsets_;    // where the parts of that dim begin
  at::Tensor starts_, counts_;      // of the runs, by the dims before it and the part
  int64_t count_ = 0;
};

}  // namespace tessera::kernels
