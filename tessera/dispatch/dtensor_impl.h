#pragma once

#include <tessera/dispatch/write_count.h>
#include <tessera/export.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace tessera {

/// What is done around the operators that use a tensor as their weight; see tessera/nn/hooks.h.
struct WeightHooks;
/// Tensors with such hooks have this key, which is above autograd, autocast and the composition of operators.
/// libtorch itself uses just two there for nothing: this one, and DeferredInit, which sharded tensors have.
inline constexpr c10::DispatchKey kHooksKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// What makes an at::Tensor a distributed one: global geometry outside, this rank's local tensor inside.
/// Operators on it reach our kernel by the dispatch key PrivateUse3; autograd stands above, as on any
/// backend.
class TESSERA_API DTensorImpl final : public c10::TensorImpl {
 public:
  /// `local` must have the shape that `spec` gives this rank (see check_local).
  DTensorImpl(at::Tensor local, Spec spec);

  /// The impl of a distributed tensor, or null if `tensor` is none.
  static DTensorImpl* of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->key_set().has(c10::DispatchKey::PrivateUse3) ? static_cast<DTensorImpl*>(impl) : nullptr;
  }

  /// What this rank holds. Waits for it if it is still under way. Of a view that does not share the memory of
  /// its base, after a write into that: made again first, which is collective.
  const at::Tensor& local() const {
    if (pending_ || origin_) [[unlikely]]
      receive();
    return local_;
  }
  const Spec& spec() const { return spec_; }

  /// Says that the local tensor is only a stand-in of the right shape until `pending` has come.
  void set_pending(std::shared_ptr<PendingTensor> pending) { pending_ = std::move(pending); }

  /// What a view is of, if writing into its local tensor does not write into its base.
  struct Origin {
    at::Tensor base;  // distributed
    /// Writes what this rank holds of the view into what it holds of the base. Collective. Missing, as is
    /// `read`, if they share their memory, but the base itself has an origin.
    std::function<void(const at::Tensor& base, const at::Tensor& view)> write;
    /// Makes the view again, of a base.
    std::function<at::Tensor(const at::Tensor& base)> read;
    mutable uint64_t writes;  // into the base, when the view was made
  };
  const std::shared_ptr<const Origin>& origin() const { return origin_; }
  void set_origin(std::shared_ptr<const Origin> origin) { origin_ = std::move(origin); }
  /// How often operators have written into the tensor, or one that shares its memory. (Autograd's versions do
  /// not tell: it counts no writes in inference mode, nor those through `data`.)
  uint64_t writes() const { return writes_.value(); }
  void share_writes(const DTensorImpl& other) { writes_.share(other.writes_); }
  /// After a write: counts it, and writes it into what this is a view of, and what that is a view of.
  void wrote() const {
    writes_.bump();
    if (origin_) [[unlikely]]
      write_through();
  }

  const std::shared_ptr<const WeightHooks>& hooks() const { return hooks_; }
  void set_hooks(std::shared_ptr<const WeightHooks> hooks);

  /// Becomes what `other` is, but for its version and hooks: the same tensor in another shape.
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
  mutable std::shared_ptr<PendingTensor> pending_;  // shared by shallow copies
  Spec spec_;
  std::shared_ptr<const Origin> origin_;
  std::shared_ptr<const WeightHooks> hooks_;
};

/// A distributed tensor of this rank's `local`, or of a copy if that does not lie in memory as `spec` says
/// (see redistribute/memory.h). No other checks, no autograd.
TESSERA_API at::Tensor make_dtensor(at::Tensor local, Spec spec);
/// The same, of a local tensor that is still on its way.
TESSERA_API at::Tensor make_dtensor(std::shared_ptr<PendingTensor> pending, Spec spec,
                                    const at::TensorOptions& options);

}  // namespace tessera
