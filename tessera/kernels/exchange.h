#pragma once

#include <tessera/placement/spec.h>
#include <tessera/rules/strategy.h>

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Elements of a dim and where they come from: to + k * to_step is from + k * from_step, for k in [0, count).
/// to_step is positive.
///   x[2:9:3]  {0, 1, 2, 3, 3}        flip of 5  {0, 1, 4, -1, 5}
struct StridedSegment {
  int64_t to, to_step;
  int64_t from, from_step;
  int64_t count;
};

/// Which ranges of one dim the rank at a coordinate of the mesh has, or needs. Ranks may have the same elements,
/// and ranges may reach beyond the dim: nothing comes from there.
using Holding = std::function<Pieces(c10::IntArrayRef coordinate)>;
Holding holding(const Spec& spec, int64_t dim);

/// Moves elements of one dim between the ranks along some mesh dims: planned once, run often. Sends only what
/// changes its rank. Without mesh dims each rank has what it needs.
class Exchange {
 public:
  Exchange(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims, int64_t dim, const Holding& source,
           const Holding& target, const std::vector<StridedSegment>& segments);
  ~Exchange();
  Exchange(Exchange&&) noexcept;

  enum Mode { kCopy, kAdd };
  /// Collective. Elements that nothing comes to are left alone; `kAdd`: what comes is added, from all ranks
  /// that have it. The tensors may differ in the size of the dim only.
  void operator()(const at::Tensor& target, const at::Tensor& source, Mode mode = kCopy) const;

 private:
  struct Route;
  static Route route(const Pieces& source, const Pieces& target, const std::vector<StridedSegment>& segments);

  DeviceMesh mesh_;
  std::vector<int64_t> mesh_dims_;
  int64_t dim_;
  std::vector<Route> out_, in_;  // to and from each rank, also this one
};

/// Copies the elements that `segments` name along `dim`, which the same mesh dims shard in both tensors, from
/// the ranks' shards of `source` to their shards of `target`. The tensors may differ in the size of that dim
/// only. Collective; sends only what changes its rank.
void exchange(const at::Tensor& target, const Spec& target_spec, const at::Tensor& source,
              const Spec& source_spec, int64_t dim, const std::vector<StridedSegment>& segments);

/// Where `dim` is sharded, the first result is what exchange() makes of the first argument, with `fill` where
/// nothing comes to; elsewhere it is what the operator computes.
rules::Localize exchanged(int64_t dim, std::vector<StridedSegment> segments,
                          std::optional<at::Scalar> fill = {});

/// The ranks of the joint group of some mesh dims that shard a tensor.
class ShardGroup {
 public:
  /// In the order of where their shards of `dim` begin; those with empty shards come last.
  ShardGroup(const Spec& spec, const std::vector<int64_t>& mesh_dims, int64_t dim);

  /// The size of each one's shard of the dim, in that order; and which of them this rank is.
  const std::vector<int64_t>& shard_sizes() const { return shard_sizes_; }
  size_t self() const { return self_; }

  /// The size along `dim` of what each of them has. Collective.
  std::vector<int64_t> sizes(const at::Tensor& own, int64_t dim) const;
  /// What each of them has, one after the other along `dim`; `sizes`: of each there. Collective.
  at::Tensor join(const at::Tensor& own, int64_t dim, const std::vector<int64_t>& sizes) const;
  /// The sum of the sizes of those before this one.
  int64_t before(const std::vector<int64_t>& sizes) const;

 private:
  Group group_;
  std::vector<size_t> ranks_;  // in the group
  std::vector<int64_t> shard_sizes_;
  size_t self_ = 0;
};

/// What each rank of a group has, of one shape on all of them, one after the other along a new first dim. Collective.
at::Tensor gathered(const at::Tensor& own, const Group& group);

/// The joint group of some mesh dims.
Group group_of(const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims);

/// Which mesh dims shard a tensor dim; and which any.
std::vector<int64_t> mesh_dims_of(const Spec& spec, int64_t dim);
std::vector<int64_t> mesh_dims_of(const Spec& spec);

}  // namespace tessera::kernels
