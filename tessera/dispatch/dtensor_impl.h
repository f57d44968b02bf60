#pragma once

#include <tessera/dispatch/freed_memory.h>
#include <tessera/dispatch/write_count.h>
#include <tessera/dispatch_keys.h>
#include <tessera/export.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace tessera {

/// What makes an at::Tensor a distributed one: global geometry outside, this rank's local tensor inside.
/// Operators on it reach our kernel by the key kDTensorKey; autograd stands above, as on any backend.
class TESSERA_API DTensorImpl final : public c10::TensorImpl {
 public:
  /// `local` must have the shape that `spec` gives this rank (see check_local).
  ///
  /// **Turns on autograd's view replay for the calling thread, for good**
  /// (c10::AutogradState::set_view_replay_enabled): after a write into a view, autograd calls the view's own
  /// operators again, instead of one as_strided on the global geometry, which no rank's memory has (wrong
  /// gradients, in silence). It goes with every thread that ever has a DTensor, and with the threads of their
  /// backward; plain tensors get the same values either way.
  DTensorImpl(at::Tensor local, Spec spec);

  /// The impl of a distributed tensor, or null if `tensor` is none.
  static DTensorImpl* of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->key_set().has(kDTensorKey) ? static_cast<DTensorImpl*>(impl) : nullptr;
  }

  /// This rank's local tensor. Waits for it if it is still under way. Collective where it has to be made again
  /// first: a view that does not share the memory of its base, after a write into that, and what lies in freed
  /// memory.
  const at::Tensor& local() const {
    if (looks_first_) [[unlikely]]
      receive();
    return local_;
  }
  const Spec& spec() const { return spec_; }

  /// Says that the local tensor is only a stand-in of the right shape until `pending` has come.
  void set_pending(std::shared_ptr<PendingTensor> pending) {
    pending_ = std::move(pending);
    looks_first_ = true;
  }

  /// What a view is of, if writing into its local tensor does not write into its base.
  struct Origin {
    at::Tensor base;  // distributed
    /// Writes the local tensor of the view into that of the base. Collective. Missing, as is `read`, if they
    /// share their memory, but the base itself has an origin.
    std::function<void(const at::Tensor& base, const at::Tensor& view)> write;
    /// Makes the view again, of a base.
    std::function<at::Tensor(const at::Tensor& base)> read;
    mutable uint64_t writes;  // into the base, when the view was made
  };
  const std::shared_ptr<const Origin>& origin() const { return origin_; }
  void set_origin(std::shared_ptr<const Origin> origin) {
    origin_ = std::move(origin);
    looks_first_ = true;
  }
  /// How often operators have written into the tensor, or one that shares its memory. (Autograd's versions do
  /// not say: it counts no writes in inference mode, nor those through `data`.)
  uint64_t writes() const { return writes_.value(); }
  /// How often it became another tensor.
  uint64_t takes() const { return takes_; }
  void share_writes(const DTensorImpl& other) { writes_.share(other.writes_); }
  /// After a write: counts it, and writes it into what this is a view of, and what that is a view of.
  void wrote() const {
    writes_.bump();
    if (origin_) [[unlikely]]
      write_through();
  }

  /// What a layer above keeps with the tensor, or null. Shallow copies share it. While there is one,
  /// operators on the tensor reach kernels at kHooksKey first; that layer has registered them and knows its
  /// type.
  const std::shared_ptr<const void>& attachment() const { return attachment_; }
  void set_attachment(std::shared_ptr<const void> attachment);

  /// What a layer above keeps with the tensor for the kernel at kUnitKey, which knows its type; or null. While there is
  /// one, operators on the tensor reach that kernel first. Shallow copies have none.
  const std::shared_ptr<const void>& unit() const { return unit_; }
  void set_unit(std::shared_ptr<const void> unit);

  /// Becomes what `other` is, but for its version, attachment and unit: the same tensor in another shape.
  void take(const DTensorImpl& other);

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

  void receive() const;
  void write_through() const;

  mutable at::Tensor local_;
  WriteCount writes_;
  uint64_t takes_ = 0;
  /// Whether the local tensor may have to wait, or to be made again: `receive` finds out.
  mutable bool looks_first_ = false;
  mutable std::shared_ptr<PendingTensor> pending_;  // shared by shallow copies
  Spec spec_;
  std::shared_ptr<const Origin> origin_;
  std::shared_ptr<const void> attachment_;
  std::shared_ptr<const void> unit_;
};

/// A distributed tensor of this rank's `local`, or of a copy if that does not lie in memory as `spec` says
/// (see redistribute/memory.h). No other checks, no autograd.
TESSERA_API at::Tensor make_dtensor(at::Tensor local, Spec spec);
/// The same, of a local tensor that is still on its way.
TESSERA_API at::Tensor make_dtensor(std::shared_ptr<PendingTensor> pending, Spec spec,
                                    const at::TensorOptions& options);

}  // namespace tessera
