#pragma once

#include <tessera/export.h>
#include <tessera/sharded/metadata.h>
#include <tessera/sharded/ranks.h>
#include <tessera/sharded/remote.h>
#include <tessera/sharded/shard.h>
#include <tessera/sharded/spec.h>

#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {
namespace sharded {

/// A tensor split into boxes that lie on many ranks: any tiling, any number of boxes on a rank, also none. It
/// is an at::Tensor with the size, dtype and device of the global tensor, so it can be a parameter of a
/// module; operators on it are those of a registry (registry.h), to which you can add yours. Any at::Tensor
/// that is sharded can be seen as one:
///
///   auto weight = sharded::rand(ChunkShardingSpec(0, {"rank:0/cpu", "rank:1/cpu"}), {10, 4});
///   at::Tensor tensor = weight;
///   ShardedTensor(tensor).local_shards()     // throws if it were not sharded
///
/// Its local shards are ordinary tensors, and share `requires_grad` and the gradient with it:
/// `grad().local_tensor()` is `local_tensor().grad()`. So libtorch's optimisers, `zero_grad` and
/// `clip_grad_norm_` work on it.
class TESSERA_API ShardedTensor : public at::Tensor {
 public:
  ShardedTensor() = default;
  /// Throws if `tensor` is defined and not sharded.
  ShardedTensor(at::Tensor tensor);

  static bool is_sharded_tensor(const at::Tensor& tensor);

  /// All shards, of all ranks.
  const ShardedTensorMetadata& metadata() const;
  const ShardingSpec& sharding_spec() const;
  const ShardingSpecPtr& sharding_spec_ptr() const;
  /// What this rank holds; may be none. They are the tensor's own: writes into them write into it.
  const std::vector<LocalShard>& local_shards() const;
  /// The tensor of the only shard of this rank. Throws if it has none or several.
  const at::Tensor& local_tensor() const;
  /// The tensors of the local shards; on a rank that has none, one empty tensor instead. A loss made of
  /// these can be differentiated on every rank, as it must be where backward is collective (`reshard`).
  std::vector<at::Tensor> local_tensors() const;
  /// The ranks that share it.
  const Members& process_group() const;
  const MembersPtr& process_group_ptr() const;

  /// What the other ranks hold, if the tensor was made with `init_rrefs`, else an error.
  const RemoteShards& remote_shards() const;
  bool init_rrefs() const;

  bool is_pinned() const;
  /// A copy whose local shards are in pinned memory; itself if they are already.
  ShardedTensor pin_memory() const;

  /// Of the sharded tensor and of its local shards.
  const ShardedTensor& requires_grad_(bool requires_grad = true) const;
  /// The gradients of the local shards as a sharded tensor. Undefined if none of them has one; if only some
  /// have, the others' become zeros. Not collective.
  ShardedTensor grad() const;

  struct GatherOptions {
    /// Where the global tensor is to be written, on the destination only. By default it is allocated there.
    at::Tensor out = {};
    /// What the values are sent as. By default the tensor's own dtype.
    std::optional<at::ScalarType> dtype = {};
    /// `out` must have the tensor's own dtype.
    bool enforce_dtype = false;
  };
  /// The global tensor, on the `dst`-th rank of the group; undefined on the others. Collective.
  at::Tensor gather(int64_t dst, const GatherOptions& options) const;
  at::Tensor gather(int64_t dst = 0) const;

  /// The same tensor sharded by another spec, of any kind. Collective: one all-to-all, in which each element
  /// that changes its rank is sent once; memory is needed for the result and what is under way.
  /// Differentiable. Itself if the spec is the same.
  ShardedTensor reshard(const ShardingSpec& spec) const;
  /// The same, but this tensor itself is sharded so from now on, as PyTorch's reshard does. Its local tensors
  /// are new ones. A leaf stays a leaf, with its gradient: autograd does not see the change. Any other tensor
  /// has the history that `reshard` would give it. Collective.
  const ShardedTensor& reshard_(const ShardingSpec& spec) const;
  /// Makes a tensor of the same size, dtype and device the one of the `index`-th local shard. Throws if other
  /// ranks can read the shards (`init_rrefs`).
  void set_local_tensor(int64_t index, at::Tensor tensor) const;

  struct ToOptions {
    std::optional<at::Device> device = {};
    std::optional<at::ScalarType> dtype = {};
    bool non_blocking = false;
    bool copy = false;
    at::MemoryFormat memory_format = at::MemoryFormat::Preserve;
    /// Of the new tensor, where another device needs another backend. By default this one's ranks.
    std::optional<Ranks> process_group = {};
  };
  /// The same tensor on a device of each rank, or in another dtype; itself if it is so already.
  ShardedTensor to(const ToOptions& options) const;
  ShardedTensor to(at::ScalarType dtype) const;
  ShardedTensor to(at::Device device) const;
  ShardedTensor to(at::Device device, at::ScalarType dtype) const;
  ShardedTensor to(const at::Tensor& other) const;
  ShardedTensor cpu(at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                    const std::optional<Ranks>& process_group = std::nullopt) const;
  /// On the current CUDA device of each rank.
  ShardedTensor cuda(std::optional<at::Device> device = std::nullopt, bool non_blocking = false,
                     at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                     const std::optional<Ranks>& process_group = std::nullopt) const;

  /// The local shards, the metadata and the spec, as bytes; and back, on the ranks of the innermost
  /// LoadWithProcessGroup (state.h), else on all. Throws if the rank or the world size has changed.
  std::string to_bytes() const;
  static ShardedTensor from_bytes(std::string_view bytes);

  /// Compares identities, not values.
  size_t hash() const;
  /// "ShardedTensor [10, 4] f32: [0, 0]+[5, 4] rank:0/cpu, [5, 0]+[5, 4] rank:1/cpu"
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor);
};

}  // namespace sharded

using sharded::ShardedTensor;

}  // namespace tessera

template <>
struct std::hash<tessera::ShardedTensor> {
  size_t operator()(const tessera::ShardedTensor& tensor) const { return tensor.hash(); }
};
template <>
struct std::equal_to<tessera::ShardedTensor> {
  bool operator()(const tessera::ShardedTensor& a, const tessera::ShardedTensor& b) const {
    return a.is_same(b);
  }
};
