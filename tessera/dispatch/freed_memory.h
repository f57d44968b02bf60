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

/// Gives the memory of a storage back. Until `set_memory`, DTensors whose local tensor is in it ask the owner to
/// restore it first; whoever else reads it gets an error.
TESSERA_API void free_memory(c10::StorageImpl& storage, std::weak_ptr<MemoryOwner> owner);

/// Gives the storage memory again.
TESSERA_API void set_memory(c10::StorageImpl& storage, at::DataPtr memory);

namespace detail {
TESSERA_API void delete_owner(void* owner);
}

inline bool is_freed(const c10::StorageImpl* storage) {
  if (!storage) return false;
  auto* unchecked = const_cast<c10::StorageImpl*>(storage);  // data_ptr() throws where there is none
  const at::DataPtr& memory = unchecked->_mutable_data_ptr_no_checks();
  return !memory.get() && memory.get_deleter() == &detail::delete_owner;
}
inline bool is_freed(const at::Tensor& tensor) {
  return is_freed(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

/// Lets the owner restore the memory of `tensor`, which is freed.
TESSERA_API void restore_memory(const at::Tensor& tensor);

}  // namespace tessera
