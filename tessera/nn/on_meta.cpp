#include <tessera/dispatch_keys.h>
#include <tessera/nn/on_meta.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

namespace tessera {

namespace {

/// What all factories of libtorch come to. They have no tensor, so that kHooksKey is theirs only inside of an OnMeta.
at::Tensor empty_on_meta(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const c10::impl::ExcludeDispatchKeyGuard no_more(kHooksKey);
  return at::empty_symint(size, dtype ? dtype : OnMeta::dtype(), layout,
                          device.value_or(at::Device(at::kMeta)), pin_memory, format);
}

at::Tensor empty_strided_on_meta(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                 std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                 std::optional<at::Device> device, std::optional<bool> pin_memory) {
  const c10::impl::ExcludeDispatchKeyGuard no_more(kHooksKey);
  return at::empty_strided_symint(size, stride, dtype ? dtype : OnMeta::dtype(), layout,
                                  device.value_or(at::Device(at::kMeta)), pin_memory);
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, library) {
  library.impl("empty.memory_format", empty_on_meta);
  library.impl("empty_strided", empty_strided_on_meta);
}
static_assert(kHooksKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper);

}  // namespace

OnMeta::OnMeta(std::optional<c10::ScalarType> dtype) : scope_(dtype), include_(kHooksKey) {}
OnMeta::~OnMeta() = default;

std::optional<c10::ScalarType> OnMeta::dtype() {
  return ThreadScope<std::optional<c10::ScalarType>, OnMeta>::current();
}

}  // namespace tessera
