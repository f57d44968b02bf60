#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>

#include <c10/core/AutogradState.h>

namespace tessera {

namespace {

/// Autograd comes with the backend's key; autocast is chosen by the device and has to be named.
c10::DispatchKeySet keys_of(const at::Tensor& local) {
  return c10::DispatchKeySet(kDTensorKey) |
         c10::getAutocastRelatedKeySetFromBackend(local.key_set().highestBackendKey());
}

/// Gives memory that views may share new values. Where elements share it, as in what was expanded, they do so
/// in both.
void refresh(const at::Tensor& local, const at::Tensor& values) {
  if (local.is_non_overlapping_and_dense() || local.strides() != values.strides()) {
    local.copy_(values);
    return;
  }
  at::Tensor to = local, from = values;
  for (int64_t dim = 0; dim < local.dim(); ++dim) {
    if (local.stride(dim) != 0 || local.size(dim) == 0) continue;
    to = to.narrow(dim, 0, 1);
    from = from.narrow(dim, 0, 1);
  }
  to.copy_(from);
}

}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, Spec spec)
    : TensorImpl(keys_of(local), local.dtype(), local.device()),
      local_(std::move(local)),
      spec_(std::move(spec)) {
  looks_first_ = is_freeable(local_);
  set_storage_access_should_throw();
  set_sizes_and_strides(spec_.shape(), spec_.strides());
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

void DTensorImpl::receive() const {
  if (pending_) {
    local_ = pending_->wait();
    pending_.reset();
    looks_first_ = origin_ || is_freeable(local_);
  }
  if (is_freed(local_)) restore_memory(local_);
  if (!origin_) return;
  const auto* base = static_cast<const DTensorImpl*>(origin_->base.unsafeGetTensorImpl());
  base->local();  // which may be a view of that kind itself
  if (!origin_->read || base->writes() == origin_->writes) return;
  refresh(local_, of(origin_->read(origin_->base))->local_);
  origin_->writes = base->writes();
  writes_.bump();
}

const char* DTensorImpl::tensorimpl_type_name() const {
  return "a DTensor, whose data lies on many ranks: call to_local() for this rank's part, or full_tensor() "
         "for all";
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copy(Version&& version_counter,
                                                      bool allow_tensor_metadata_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, spec_);
  impl->pending_ = pending_;
  copy_tensor_metadata(this, impl.get(), std::forward<Version>(version_counter),
                       allow_tensor_metadata_change);
  impl->origin_ = origin_;
  impl->looks_first_ = looks_first_;
  impl->attachment_ = attachment_;
  impl->set_unit(nullptr);  // whose key was copied
  impl->share_writes(*this);
  return impl;
}

void DTensorImpl::set_attachment(std::shared_ptr<const void> attachment) {
  attachment_ = std::move(attachment);
  key_set_ = attachment_ ? key_set_.add(kHooksKey) : key_set_.remove(kHooksKey);
}

void DTensorImpl::set_unit(std::shared_ptr<const void> unit) {
  unit_ = std::move(unit);
  key_set_ = unit_ ? key_set_.add(kUnitKey) : key_set_.remove(kUnitKey);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  return copy(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  return copy(std::move(version_counter), allow_tensor_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  const auto* other = dynamic_cast<const DTensorImpl*>(impl.get());
  TESSERA_CHECK(other, "The data of a DTensor can only be set to that of another DTensor.");
  take(*other);
}

void DTensorImpl::take(const DTensorImpl& other) {
  copy_tensor_metadata(&other, this, version_counter(), allow_tensor_metadata_change());
  local_ = other.local_;
  pending_ = other.pending_;
  spec_ = other.spec_;
  origin_ = other.origin_;
  looks_first_ = other.looks_first_;
  share_writes(other);
  ++takes_;
  set_attachment(attachment_);
  set_unit(unit_);
}

void DTensorImpl::write_through() const {
  const DTensorImpl* view = this;
  for (auto origin = origin_; origin; origin = view->origin_) {
    const auto* base = static_cast<const DTensorImpl*>(origin->base.unsafeGetTensorImpl());
    if (origin->write) {
      origin->write(base->local_, view->local_);
      base->writes_.bump();
    }
    origin->writes = base->writes();
    view = base;
  }
}

at::Tensor make_dtensor(at::Tensor local, Spec spec) {
  local = laid_out(local, spec);
  return at::detail::make_tensor<DTensorImpl>(std::move(local), std::move(spec));
}

at::Tensor make_dtensor(std::shared_ptr<PendingTensor> pending, Spec spec, const at::TensorOptions& options) {
  at::Tensor result = at::detail::make_tensor<DTensorImpl>(at::empty({0}, options), std::move(spec));
  DTensorImpl::of(result)->set_pending(std::move(pending));
  return result;
}

}  // namespace tessera
