#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <c10/core/TensorImpl.h>

namespace tessera::sharded {

/// Everything that makes a sharded tensor.
struct ShardedTensorState {
  ShardedTensorMetadata metadata;
  ShardingSpecPtr spec;
  std::vector<Shard> local_shards;
  MembersPtr members;
  bool init_rrefs = false;
  SharedShards shared = {};  // if init_rrefs
};

/// What makes an at::Tensor a sharded one. Operators on it reach our registry by the dispatch key
/// DeferredInit, which no other code uses and which stands above autograd, autocast and the decomposition of
/// composite operators: so a registered implementation of `linear` sees `linear`, and autograd sees what it
/// does with the local shards.
class TESSERA_API ShardedTensorImpl final : public c10::TensorImpl {
 public:
  static constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

  explicit ShardedTensorImpl(ShardedTensorState state);

  /// The impl of a sharded tensor, or null if `tensor` is none.
  static ShardedTensorImpl* of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->key_set().has(kKey) ? static_cast<ShardedTensorImpl*>(impl) : nullptr;
  }

  /// With the local shards and the metadata requiring gradients as the tensor itself does.
  const ShardedTensorState& state();

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 protected:
  const char* tensorimpl_type_name() const override;

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy(Version&& version_counter, bool allow_tensor_metadata_change) const;

  ShardedTensorState state_;
};

/// No checks but those of the registry of operators.
TESSERA_API ShardedTensor make_sharded_tensor(ShardedTensorState state);

/// The same tiling with other local tensors, in the order of `like.local_shards()`: their dtype, device,
/// pinning and requires_grad are taken from them, or, without any, from `like` and what is given. Collective
/// if `like` has `init_rrefs`, which the result then has too unless `drop_rrefs`.
TESSERA_API ShardedTensor with_local_tensors(const ShardedTensor& like, std::vector<at::Tensor> tensors,
                                             std::optional<TensorProperties> properties = std::nullopt,
                                             bool drop_rrefs = false);

/// The shards of `metadata` that are this rank's, in order. Throws if a placement names no member.
std::vector<ShardMetadata> local_part(const std::vector<ShardMetadata>& shards, const Members& members);

}  // namespace tessera::sharded
