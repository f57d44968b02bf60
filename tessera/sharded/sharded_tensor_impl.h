#pragma once

#include <tessera/dispatch_keys.h>
#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <c10/core/TensorImpl.h>

namespace tessera::sharded {

/// Everything that makes a sharded tensor.
struct ShardedTensorState {
  ShardedTensorMetadata metadata;
  ShardingSpecPtr spec;
  std::vector<LocalShard> local_shards;
  MembersPtr members;
  bool init_rrefs = false;
  SharedShards shared = {};  // if init_rrefs
  /// Stands for the local shards on a rank that has none: an empty tensor with their history and their
  /// requires_grad, so that this rank takes part in backward, and has a gradient when the others have one.
  at::Tensor anchor = {};

  /// The tensors of the local shards, or the anchor.
  std::vector<at::Tensor> local_tensors() const;
};

/// A tensor of that size but for its first dim, which has size 0.
at::Tensor empty_part(c10::IntArrayRef size, at::ScalarType dtype, at::Device device);

/// What makes an at::Tensor a sharded one. Operators on it reach our registry by the dispatch key
/// kShardedTensorKey, above autograd: so a registered implementation of `linear` sees `linear`, and autograd
/// sees what it does with the local shards.
///
/// `requires_grad` and `grad` of the sharded tensor and of its local tensors always agree, though each has
/// its own: reading either through the sharded tensor first synchronizes the two. What changed since they
/// last agreed wins.
class TESSERA_API ShardedTensorImpl final : public c10::TensorImpl {
 public:
  explicit ShardedTensorImpl(ShardedTensorState state);

  /// The impl of a sharded tensor, or null if `tensor` is none.
  static ShardedTensorImpl* of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->key_set().has(kShardedTensorKey) ? static_cast<ShardedTensorImpl*>(impl) : nullptr;
  }

  /// After the sharded tensor and its local tensors have been synchronized.
  const ShardedTensorState& state();

  /// Another tiling or other local tensors of a tensor of this size, dtype and device. The gradient is forgotten.
  void become(ShardedTensorState state);

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;
  void release_resources() override;

 protected:
  const char* tensorimpl_type_name() const override;

 private:
  struct Meta;

  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy(Version&& version_counter, bool allow_tensor_metadata_change) const;

  Meta& meta();
  void agree();
  void agree_on_requires_grad();
  /// Puts what was written into the gradient of the sharded tensor into those of the local tensors.
  void take_written_grad();
  void agree_on_grad();
  /// From now on does the former before autograd adds to the gradient of a local tensor.
  void watch();

  ShardedTensorState state_;
  at::Tensor agreed_grad_;  // that of the sharded tensor when all last agreed
  bool watches_ = false;
};

/// No checks but those of the registry of operators.
TESSERA_API ShardedTensor make_sharded_tensor(ShardedTensorState state);

/// The same tiling with other local tensors, in the order of `like.local_tensors()`: their dtype, device,
/// pinning and requires_grad are taken from them, unless given. Collective if `like` has `init_rrefs`, which
/// the result then has too unless `drop_rrefs`.
TESSERA_API ShardedTensor with_local_tensors(const ShardedTensor& like, std::vector<at::Tensor> tensors,
                                             std::optional<TensorProperties> properties = std::nullopt,
                                             bool drop_rrefs = false);

/// Whether the shards are the same; they may be listed in another order.
bool is_same_tiling(const std::vector<ShardMetadata>& a, const std::vector<ShardMetadata>& b);

/// The local tensors of `tensor` in the order of a tiling, which must be its own: else throws, naming `what`.
std::vector<at::Tensor> local_tensors_as(const std::vector<ShardMetadata>& tiling, const at::Tensor& tensor,
                                         const std::string& what);

/// The shards of `metadata` that are this rank's, in order. Throws if a placement names no member.
std::vector<ShardMetadata> local_part(const std::vector<ShardMetadata>& shards, const Members& members);

}  // namespace tessera::sharded
