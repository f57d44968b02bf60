#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/ops/as_one.h>
#include <tessera/ops/family.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

/// New tensors made after another one.
namespace tessera::ops {

Table factory_rules() {
  constexpr auto kAny = LikeInput::Size::any;
  return {
      {{"zeros_like", "ones_like", "full_like"}, LikeInput{}},
      {{"empty_like"}, LikeInput{.keeps_partial = true}},
      {{"new_zeros", "new_ones", "new_full"}, LikeInput{.size = kAny}},
      {{"new_empty", "new_empty_strided"}, LikeInput{.keeps_partial = true, .size = kAny}},
  };
}

}  // namespace tessera::ops

// --- autograd

namespace tessera {

namespace {

/// libtorch chooses the kernel by the device that a call names too, and puts meta before us: on meta the tensor would be plain.
at::Tensor to_copy(c10::DispatchKeySet keys, const at::Tensor& self, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> layout, std::optional<at::Device> device,
                   std::optional<bool> pin_memory, bool non_blocking,
                   std::optional<at::MemoryFormat> memory_format) {
  if (!device || !device->is_meta() || !DTensorImpl::of(self))
    return as_one<at::_ops::_to_copy>(keys, self, dtype, layout, device, pin_memory, non_blocking,
                                      memory_format);
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::empty_like(self, dtype.value_or(self.scalar_type()), layout, device, pin_memory, memory_format);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { library.impl("_to_copy", to_copy); }

}  // namespace

}  // namespace tessera
