#include "tests/support/device/kernels.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "tests/support/device/device.h"
#include "tests/support/device/memory.h"

namespace tessera::testing::device {

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

std::atomic<bool>& strict_comparisons() {
  static std::atomic<bool> instance = true;
  return instance;
}

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

/// Kernels of the CPU see neither autograd nor autocast, which were before us.
struct OnHost {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset};
};

/// A tensor of the host whose memory is that of the device. Reading it takes an Access.
at::Tensor host_alias(void* data, size_t bytes, const at::Tensor& like, int64_t offset) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, c10::kCPU), nullptr, false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return result;
}

void* memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

at::Tensor host_alias(const at::Tensor& tensor) {
  return host_alias(memory_of(tensor), tensor.storage().nbytes(), tensor, tensor.storage_offset());
}

void take_bits(const at::Tensor& tensor, const at::Tensor& from) {
  tensor._set_conj(from.is_conj());
  tensor._set_neg(from.is_neg());
}

/// The tensor without its conjugate and negative bits: its memory as it is.
at::Tensor raw(const at::Tensor& tensor) {
  at::Tensor result = tensor.alias();
  result._set_conj(false);
  result._set_neg(false);
  return result;
}

/// New memory of the host with the shape, strides and memory contents of a tensor of the device.
at::Tensor copied(const at::Tensor& tensor) {
  const at::Tensor from = host_alias(tensor);
  int64_t span = from.numel() == 0 ? 0 : 1;
  for (int64_t dim = 0; dim < from.dim() && span > 0; ++dim) span += (from.size(dim) - 1) * from.stride(dim);
  const at::Tensor memory = at::empty({span}, at::TensorOptions(from.dtype()));
  at::Tensor result = memory.as_strided(from.sizes(), from.strides());
  if (span > 0) {
    const auto size = static_cast<int64_t>(from.element_size());
    std::memcpy(memory.mutable_data_ptr(),
                static_cast<const char*>(memory_of(tensor)) + tensor.storage_offset() * size, span * size);
  }
  return result;
}

/// The memory of `tensor` gets that of `values`, when its stream comes to it. Both have the same strides.
void publish(const at::Tensor& tensor, const at::Tensor& values) {
  if (values.numel() == 0) return;
  void* const memory = memory_of(tensor);
  const size_t bytes = tensor.storage().nbytes();
  at::Tensor to = host_alias(memory, bytes, tensor, tensor.storage_offset());
  current_stream(tensor.device()).submit([memory, to, values] {
    const OnHost on_host;
    const at::InferenceMode inference(false);
    const Access access({memory});
    if (values.is_non_overlapping_and_dense()) {
      const auto offset = static_cast<int64_t>(to.element_size()) * to.storage_offset();
      std::memcpy(static_cast<char*>(memory) + offset, values.const_data_ptr(), values.nbytes());
    } else {
      to.copy_(values);
    }
  });
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "a tile tensor is dense");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType), kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "a tile tensor is dense");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

/// One call of an operator, with tensors of the host in the place of the device's.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    const c10::DeviceGuard guard(device_);
    current_stream(device_).wait();
    {
      const OnHost on_host;
      for (size_t i = 0; i < schema_.arguments().size(); ++i)
        to_host(schema_.arguments()[i], stack_[first_ + i]);
      std::vector<const void*> addresses;
      for (const Given& each : given_) addresses.push_back(memory_of(each.tensor));
      const Access access(std::move(addresses));
      for (Given& each : given_)
        if (each.is_written) fill(each);
      op_.callBoxed(&stack_);
    }
    for (const Given& each : given_)
      if (each.is_written) write_back(each);
    for (c10::IValue& result : stack_) to_device(result);  // all that is left of the stack is ours
  }

 private:
  struct Given {
    at::Tensor tensor;  // of the device
    at::Tensor host;    // instead of it
    bool is_written;
  };

  void look_at(const at::Tensor& tensor) {
    if (is_ours(tensor) && !has_device_) device_ = tensor.device(), has_device_ = true;
  }

  void find_device() {
    for (size_t i = first_; i < stack_.size(); ++i) {
      const c10::IValue& value = stack_[i];
      if (value.isTensor()) look_at(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& each : value.toTensorVector()) look_at(each);
      if (value.isDevice() && value.toDevice().type() == kType && !has_device_) device_ = value.toDevice();
    }
    if (!device_.has_index()) device_ = c10::impl::getDeviceGuardImpl(kType)->getDevice();
  }

  at::Tensor host_of(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      check_beside(tensor);
      return tensor;
    }
    TORCH_CHECK(tensor.device() == device_, schema_.name(), ": tensors are on ", device_, " and on ",
                tensor.device());
    for (const Given& each : given_)
      if (each.tensor.is_same(tensor) && each.is_written == is_written) return each.host;
    Given given{tensor, host_alias(tensor), is_written};
    if (is_written) {
      // Filled when the memory can be read. A kernel may resize it.
      given.host = at::empty({0}, at::TensorOptions(tensor.dtype()));
    } else {
      take_bits(given.host, tensor);
    }
    given_.push_back(given);
    return given.host;
  }

  void fill(const Given& given) const {
    const at::Tensor values = copied(given.tensor);
    given.host.unsafeGetTensorImpl()->set_storage_keep_dtype(values.storage());
    given.host.unsafeGetTensorImpl()->set_sizes_and_strides(values.sizes(), values.strides());
    take_bits(given.host, given.tensor);
  }

  void check_beside(const at::Tensor& tensor) const {
    static const std::set<std::string> kTakeIndices{"aten::index",         "aten::index_put",
                                                    "aten::index_put_",    "aten::_index_put_impl_",
                                                    "aten::_unsafe_index", "aten::_unsafe_index_put"};
    static const std::set<std::string> kCompare{"aten::equal", "aten::isclose", "aten::allclose"};
    const bool may_be = tensor.dim() == 0 || kTakeIndices.count(schema_.name()) ||
                        (!strict_comparisons() && kCompare.count(schema_.name()));
    TORCH_CHECK(may_be, "Expected all tensors to be on the same device, but ", schema_.name(),
                " was given one on ", device_, " and one on ", tensor.device());
  }

  void to_host(const c10::Argument& argument, c10::IValue& value) {
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = host_of(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all = value.toTensorVector();
      for (at::Tensor& each : all) each = host_of(each, is_written);
      value = c10::IValue(std::move(all));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        all.push_back(each ? std::optional(host_of(*each, is_written)) : std::nullopt);
      value = c10::IValue(std::move(all));
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      value = c10::IValue(drawn_from(value));
    }
  }

  /// A generator of the host for this call, seeded from that of the device.
  at::Generator drawn_from(const c10::IValue& given) const {
    at::Generator generator =
        given.isNone() ? at::globalContext().defaultGenerator(device_) : given.toGenerator();
    TORCH_CHECK(generator.device().type() == kType, schema_.name(), ": expected a generator of ", device_,
                ", but it is of ", generator.device());
    const std::lock_guard lock(generator.mutex());
    const uint64_t offset = generator.get_offset();
    generator.set_offset(offset + 4);
    return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() * 0x9e3779b97f4a7c15 + offset);
  }

  static void write_back(const Given& given) {
    const at::Tensor& tensor = given.tensor;
    if (given.host.sizes() != tensor.sizes() || given.host.strides() != tensor.strides()) {
      const size_t bytes = at::detail::computeStorageNbytes(given.host.sizes(), given.host.strides(),
                                                            tensor.element_size(), tensor.storage_offset());
      if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(given.host.sizes(), given.host.strides(),
                                                          tensor.storage_offset());
    }
    publish(tensor, raw(given.host));
  }

  at::Tensor result_of(const at::Tensor& host) const {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (const Given& each : given_)
      if (each.host.is_same(host)) return each.tensor;
    for (const Given& each : given_) {
      if (!host.has_storage() || !host.storage().is_alias_of(each.host.storage())) continue;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(each.tensor.storage()), each.tensor.key_set(), host.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      take_bits(view, host);
      return view;
    }
    TORCH_CHECK(host.layout() == at::kStrided && !host.is_quantized(), schema_.name(),
                ": a tile tensor is dense");
    at::Tensor result =
        empty_strided(host.sizes(), host.strides(), host.scalar_type(), at::kStrided, device_, false);
    publish(result,
            host._is_zerotensor() ? at::zeros(host.sizes(), at::TensorOptions(host.dtype())) : raw(host));
    take_bits(result, host);
    return result;
  }

  void to_device(c10::IValue& value) const {
    if (value.isTensor()) {
      value = result_of(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all = value.toTensorVector();
      for (at::Tensor& each : all) each = result_of(each);
      value = c10::IValue(std::move(all));
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t first_;
  c10::Device device_{kType, -1};
  bool has_device_ = false;
  std::vector<Given> given_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::Stack own(stack->end() - static_cast<int64_t>(op.schema().arguments().size()), stack->end());
  stack->resize(stack->size() - own.size());
  HostCall(op, own).run();
  stack->insert(stack->end(), own.begin(), own.end());
}

/// A tensor of the host with the values of `tensor`, which its stream must have come to.
at::Tensor values_of(const at::Tensor& tensor) {
  const Access access({memory_of(tensor)});
  at::Tensor from = host_alias(tensor);
  take_bits(from, tensor);
  return from.clone().resolve_conj().resolve_neg();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const OnHost on_host;
  if (is_ours(to)) {
    if (is_ours(from)) current_stream(from.device()).wait();
    // Memory of the host is not pinned here, so it is read at once even if nobody waits for the copy.
    const at::Tensor source = is_ours(from) ? values_of(from) : from;
    const at::Tensor values = at::empty_strided(to.sizes(), to.strides(), at::TensorOptions(to.dtype()));
    take_bits(values, to);
    values.copy_(source);
    publish(to, raw(values));
    if (!is_ours(from) && !non_blocking) current_stream(to.device()).wait();
    return to;
  }
  Stream& stream = current_stream(from.device());
  stream.submit([from = host_alias(from), is_conj = from.is_conj(), is_neg = from.is_neg(),
                 memory = memory_of(from), to] {
    const OnHost below;
    const at::InferenceMode inference(false);
    const Access access({memory});
    from._set_conj(is_conj);
    from._set_neg(is_neg);
    to.copy_(from);
  });
  if (!non_blocking) stream.wait();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  const OnHost on_host;
  current_stream(tensor.device()).wait();
  return values_of(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      sizes, tensor.element_size(), static_cast<size_t>(tensor.storage_offset()));
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& from) {
  return set_storage(tensor, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0 : 1 / (1 - p)), mask};
}

/// Calls another operator on the host instead of one that libtorch leaves to devices.
template <class... Args>
torch::jit::Stack call_on_host(const char* name, const char* overload, Args&&... args) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  torch::jit::Stack stack{c10::IValue(std::forward<Args>(args))...};
  HostCall(op, stack).run();
  return stack;
}

/// Composed of operators, of which none would take a tensor of the host.
bool allclose(const at::Tensor& self, const at::Tensor& other, double rtol, double atol, bool equal_nan) {
  return call_on_host("aten::allclose", "", self, other, rtol, atol, equal_nan)[0].toBool();
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  return call_on_host("aten::convolution", "", input, weight, bias, stride, padding, dilation, transposed,
                      output_padding, groups)[0]
      .toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const std::optional<std::vector<int64_t>> bias_sizes(
      std::vector<int64_t>{transposed ? weight.size(1) * groups : weight.size(0)});
  const c10::List<bool> wanted({mask[0], mask[1], mask[2]});
  const auto results = call_on_host("aten::convolution_backward", "", gradient, input, weight, bias_sizes,
                                    stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

at::Tensor cast_mm(const at::Tensor& a, const at::Tensor& b) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kType);
  return at::mm(at::autocast::cached_cast(dtype, a, kType), at::autocast::cached_cast(dtype, b, kType));
}

}  // namespace

void set_strict_comparisons(bool strict) { strict_comparisons() = strict; }
bool has_strict_comparisons() { return strict_comparisons(); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(impl->device());
  c10::DataPtr memory = c10::GetAllocator(kType)->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    const void* from = impl->_mutable_data_ptr_no_checks().get();
    current_stream(impl->device()).submit([from, to = memory.get(), kept] {
      const Access access({from, to});
      std::memcpy(to, from, kept);
    });
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

void register_kernels() {
  static torch::Library fallback(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__,
                                 __LINE__);
  fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  static torch::Library own(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  own.impl("empty.memory_format", &empty);
  own.impl("empty_strided", &empty_strided);
  own.impl("_copy_from", &copy_from);
  own.impl("_copy_from_and_resize", &copy_from_and_resize);
  own.impl("_local_scalar_dense", &local_scalar_dense);
  own.impl("resize_", &resize);
  own.impl("set_.source_Storage", &set_whole_storage);
  own.impl("set_.source_Storage_storage_offset", &set_storage);
  own.impl("set_.source_Tensor", &set_tensor);
  own.impl("view", &at::native::view);
  own.impl("as_strided", &at::native::as_strided_tensorimpl);
  own.impl("_reshape_alias", &at::native::_reshape_alias);
  own.impl("record_stream", &record_stream);
  own.impl("allclose", &allclose);
  own.impl("native_dropout", &native_dropout);
  own.impl("convolution_overrideable", &convolution);
  own.impl("convolution_backward_overrideable", &convolution_backward);
  // Autocast: of one operator, for tests.
  static torch::Library no_casts(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__,
                                 __LINE__);
  no_casts.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library casts(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__,
                              __LINE__);
  casts.impl("mm", &cast_mm);
  // Copies look at these bits themselves; libtorch's kernels for them would clone, which copies.
  static torch::Library conjugate(torch::Library::IMPL, "aten", c10::DispatchKey::Conjugate, __FILE__,
                                  __LINE__);
  conjugate.impl("_copy_from", torch::CppFunction::makeFallthrough());
  static torch::Library negative(torch::Library::IMPL, "aten", c10::DispatchKey::Negative, __FILE__,
                                 __LINE__);
  negative.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace tessera::testing::device
