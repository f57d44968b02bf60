#include <tessera/dispatch/freed_memory.h>
#include <tessera/error.h>

#include <utility>

namespace tessera {

namespace {
using Owner = std::weak_ptr<MemoryOwner>;
constexpr const char* kError =
    "The memory of this tensor, a gathered parameter of a fully sharded unit, was freed after the unit's "
    "forward. "
    "Copy what you need after it, or leave reshard_after_forward off.";
}  // namespace

MemoryOwner::~MemoryOwner() = default;

void detail::delete_owner(void* owner) { delete static_cast<Owner*>(owner); }
void detail::delete_memory(void* memory) { delete static_cast<at::DataPtr*>(memory); }

void make_freeable(c10::StorageImpl& storage) { set_memory(storage, storage.set_data_ptr(at::DataPtr())); }

void free_memory(c10::StorageImpl& storage, std::weak_ptr<MemoryOwner> owner) {
  auto context = std::make_unique<Owner>(std::move(owner));
  storage.set_data_ptr_noswap(
      at::DataPtr(nullptr, context.release(), &detail::delete_owner, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(kError);
}

void set_memory(c10::StorageImpl& storage, at::DataPtr memory) {
  storage.clear_data_ptr_access_error_msg_();
  auto kept = std::make_unique<at::DataPtr>(std::move(memory));
  void* const data = kept->get();
  const at::Device device = kept->device();
  storage.set_data_ptr_noswap(at::DataPtr(data, kept.release(), &detail::delete_memory, device));
}

void restore_memory(const at::Tensor& tensor) {
  const c10::Storage storage = tensor.storage();
  const auto owner =
      static_cast<Owner*>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context())
          ->lock();
  TESSERA_CHECK(owner,
                "A parameter of a fully sharded unit was changed after a forward whose backward needs it. "
                "Call backward before "
                "optimizer.step() or any other write.");
  owner->restore();
}

}  // namespace tessera
