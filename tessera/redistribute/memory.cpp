#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/memory.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include <ATen/Functions.h>

namespace tessera {

namespace {

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

// Equal but for the strides of dims that are never stepped along.
bool steps_alike(const at::Tensor& local, c10::IntArrayRef strides) {
  if (local.numel() == 0) return true;
  for (int64_t dim = 0; dim < local.dim(); ++dim) {
    if (local.size(dim) > 1 && local.stride(dim) != strides[dim]) return false;
  }
  return true;
}

// What is asked of a view that leaves gaps, or whose elements share memory.
bool is_ordered(const at::Tensor& local, c10::IntArrayRef strides) {
  if (local.numel() == 0) return true;
  for (int64_t a = 0; a < local.dim(); ++a) {
    if (local.size(a) <= 1) continue;
    if (strides[a] == 1 && local.stride(a) != 1) return false;
    for (int64_t b = 0; b < local.dim(); ++b) {
      if (local.size(b) > 1 && strides[a] > strides[b] && strides[b] > 0 && local.stride(a) < local.stride(b))
        return false;
    }
  }
  return true;
}

// `memory` is new, so all of its storage is its own.
at::Tensor filled(at::Tensor memory) {
  static const bool fill = is_set("TESSERA_FILL_MEMORY");
  // Ones in all bits are NaN in every floating point type, and -1 or the largest integer; true is 1.
  // Where elements share memory, there is less of it than nbytes() says.
  if (fill && memory.is_cpu() && memory.storage().nbytes() > 0)
    std::memset(memory.storage().mutable_data(), memory.scalar_type() == at::kBool ? 1 : 0xff,
                memory.storage().nbytes());
  return memory;
}

}  // namespace

bool lies_as(const at::Tensor& local, const Spec& spec) {
  if (local.is_conj() || local.is_neg()) return false;
  if (!spec.is_dense()) return is_ordered(local, spec.strides());
  return local.strides() == spec.local_strides() || steps_alike(local, spec.local_strides());
}

at::Tensor laid_out(const at::Tensor& local, const Spec& spec) {
  const c10::IntArrayRef strides = spec.local_strides();
  if (local.is_conj() || local.is_neg()) [[unlikely]]
    return laid_out(local.resolve_conj().resolve_neg(), spec);
  if (spec.is_dense() ? local.strides() == strides : is_ordered(local, spec.strides())) [[likely]]
    return local;
  // Strides that are never used must be alike on all ranks too: results get theirs from them.
  if (spec.is_dense() && steps_alike(local, strides)) return local.as_strided(local.sizes(), strides);
  return at::empty_strided(local.sizes(), strides, local.options()).copy_(local);
}

void check_local(const at::Tensor& local, const Spec& spec, const char* what) {
  const bool fits =
      local.defined() && local.sizes() == spec.local_shape() && local.scalar_type() == spec.dtype();
  if (fits) [[likely]]
    return;
  TESSERA_CHECK_VALUE(false, what, ": rank ", spec.mesh().get_rank(), " has ",
                      local.defined()
                          ? c10::str("a local tensor ", to_text(local.scalar_type()), local.sizes())
                          : "no local tensor",
                      ", but that of ", spec, " is ", to_text(spec.dtype()), spec.local_shape(), " there.");
}

#ifdef NDEBUG
const bool detail::checks_layout = is_set("TESSERA_CHECK_LAYOUT");
#else
const bool detail::checks_layout = true;
#endif

void detail::check_layout(const at::Tensor& local, const Spec& spec) {
  TESSERA_CHECK(!spec.mesh().is_member() || lies_as(local, spec), "rank ", spec.mesh().get_rank(), " has ",
                "a local tensor of shape ", local.sizes(), " and strides ", local.strides(), ", but ", spec,
                " with global strides ", spec.strides(), " says strides ", spec.local_strides(),
                ". This is a fault of Tessera; please report it.");
}

at::Tensor new_memory(c10::IntArrayRef shape, const at::TensorOptions& options) {
  return filled(at::empty(shape, options));
}

at::Tensor new_memory(c10::IntArrayRef shape, c10::IntArrayRef strides, const at::TensorOptions& options) {
  return filled(at::empty_strided(shape, strides, options));
}

at::Tensor new_memory(const Spec& spec, const at::TensorOptions& options) {
  return new_memory(spec.local_shape(), spec.local_strides(), options);
}

at::Tensor view_of(const at::Tensor& memory, int64_t offset, c10::IntArrayRef shape, c10::IntArrayRef strides,
                   at::ScalarType dtype) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(offset % size == 0);
  at::Tensor view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(memory.storage()),
                                               memory.key_set(), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides, offset / size);
  return view;
}

}  // namespace tessera
