#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/ops/composites.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/_pad_packed_sequence.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>

namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

}  // namespace

at::Tensor replicated_tensor(const at::Tensor& plain, const DeviceMesh& mesh) {
  return DTensor::from_local(plain, mesh, replicated(mesh));
}

void compose(const c10::OperatorHandle& op, Stack* stack) {
  std::optional<DeviceMesh> mesh;
  bool all_distributed = true;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const DTensorImpl* impl = DTensorImpl::of(value.toTensor());
    if (impl) mesh = impl->spec().mesh();
    all_distributed = all_distributed && (impl || value.toTensor().dim() == 0);
  }
  {
    std::optional<ImplicitReplicationGuard> guard;
    if (all_distributed) guard.emplace();
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (mesh && value.isTensor() && value.toTensor().defined() && !DTensorImpl::of(value.toTensor()))
      value = replicated_tensor(value.toTensor(), *mesh);
  }
}

void register_composed(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compose>());
}

at::Tensor full_of(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

std::vector<int64_t> integers_of(const at::Tensor& tensor) {
  const at::Tensor values = full_of(tensor.detach()).to(at::kCPU, at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

// --- operators of no family

namespace {

at::Tensor one_hot(const at::Tensor& self, int64_t classes) {
  TESSERA_CHECK(self.scalar_type() == at::kLong, "one_hot: expected a tensor of int64, got ",
                self.scalar_type(), ".");
  TESSERA_CHECK(self.numel() > 0 || classes > 0,
                "one_hot: an empty tensor does not say how many classes there are; give num_classes.");
  if (self.numel() > 0) {
    const auto least = self.min().item<int64_t>(), largest = self.max().item<int64_t>();
    if (classes == -1) classes = largest + 1;
    TESSERA_CHECK(least >= 0 && largest < classes, "one_hot: the classes are from ", least, " to ", largest,
                  ", but must be from 0 to ", classes - 1, ".");
  }
  const at::Tensor numbers =
      replicated_tensor(at::arange(classes, self.options()), DTensor(self).device_mesh());
  return self.unsqueeze(-1).eq(numbers).to(at::kLong);
}

/// Those of a distributed tensor; which ones, libtorch says of their plain numbers.
at::Tensor rows_of(const at::Tensor& tensor, const at::Tensor& numbers) {
  return tensor.index_select(0, replicated_tensor(numbers.flatten(), DTensor(tensor).device_mesh()));
}

/// How many sequences there are at each step is plain: layers read it.
std::tuple<at::Tensor, at::Tensor> pack_padded_sequence(const at::Tensor& input, const at::Tensor& lengths,
                                                        bool batch_first) {
  const at::Tensor known = full_of(lengths);
  if (!DTensor::is_dtensor(input) || input.numel() == 0)
    return at::_pack_padded_sequence(full_of(input), known, batch_first);
  const at::Tensor numbers = at::arange(input.size(0) * input.size(1)).view({input.size(0), input.size(1)});
  const auto [rows, batch_sizes] = at::_pack_padded_sequence(numbers, known, batch_first);
  return {rows_of(input.flatten(0, 1), rows.to(input.device())), batch_sizes};
}

std::tuple<at::Tensor, at::Tensor> pad_packed_sequence(const at::Tensor& data, const at::Tensor& batch_sizes,
                                                       bool batch_first, const at::Scalar& padding_value,
                                                       int64_t total_length) {
  const at::Tensor known = full_of(batch_sizes);
  if (!DTensor::is_dtensor(data))
    return at::_pad_packed_sequence(data, known, batch_first, padding_value, total_length);
  const auto [rows, lengths] =
      at::_pad_packed_sequence(at::arange(1, data.size(0) + 1), known, batch_first, 0, total_length);
  const at::Tensor padding = at::full_like(data.narrow(0, 0, 1), padding_value);
  const at::Tensor all = rows_of(at::cat({padding, data}), rows.to(data.device()));
  return {all.unflatten(0, rows.sizes()), lengths};
}

/// The data of a distributed tensor can be set to that of any other; by libtorch's own test only to one with
/// the same dispatch keys.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return DTensor::is_dtensor(self) && DTensor::is_dtensor(from);
}

void register_composites(torch::Library& library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  register_composed(library, {"combinations", "istft", "trapezoid.dx", "trapezoid.x", "trapz.dx", "trapz.x"});
  library.impl("one_hot", one_hot);
  library.impl("_pad_packed_sequence", pad_packed_sequence);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_composites(library);
  library.impl("_pack_padded_sequence", pack_padded_sequence);
}

}  // namespace

}  // namespace tessera
