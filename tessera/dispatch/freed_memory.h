#pragma once

#include <tessera/export.h>

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

/// Memory that is given back for a while, and comes back, with the same values, when a DTensor needs it. Tensors
/// keep their storage meanwhile, and autograd knows nothing of it: versions do not change.
namespace tessera {

/// Who can bring freed memory back.
class TESSERA_API MemoryOwner {
 public:
  virtual ~MemoryOwner();
  /// Allocates the storage's memory again and fills it. Collective.
  virtual void restore() = 0;
};

/// Says that the memory of a storage may be freed, before any DTensor is made of it: only these look whether it is.
TESSERA_API void make_freeable(c10::StorageImpl& storage);

/// Gives the memory of a storage back, which is freeable. Until `set_memory`, DTensors whose local tensor is in
/// it ask the owner to restore it first; whoever else reads it gets an error.
TESSERA_API void free_memory(c10::StorageImpl& storage, std::weak_ptr<MemoryOwner> owner);

/// Gives the storage memory again.
TESSERA_API void set_memory(c10::StorageImpl& storage, at::DataPtr memory);

namespace detail {
/// Deleters, by which freed memory, and memory that may be freed, is known.
TESSERA_API void delete_owner(void* owner);
TESSERA_API void delete_memory(void* memory);

/// Null if the tensor has no storage.
inline at::DeleterFnPtr deleter_of(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  // data_ptr() throws where there is none.
  return storage ? storage->_mutable_data_ptr_no_checks().get_deleter() : nullptr;
}
}  // namespace detail

inline bool is_freed(const at::Tensor& tensor) { return detail::deleter_of(tensor) == &detail::delete_owner; }
/// Whether the tensor is freed, or may be.
inline bool is_freeable(const at::Tensor& tensor) {
  const at::DeleterFnPtr deleter = detail::deleter_of(tensor);
  return deleter == &detail::delete_memory || deleter == &detail::delete_owner;
}

/// Lets the owner restore the memory of `tensor`, which is freed.
TESSERA_API void restore_memory(const at::Tensor& tensor);

}  // namespace tessera
