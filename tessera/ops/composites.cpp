#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/ops/composites.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/_pad_packed_sequence.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/tensor_split.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// Operators that libtorch composes of others decompose by themselves, but for these: libtorch's composition
/// makes plain tensors, or reads the memory of its arguments.
namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

at::Tensor replicate(const at::Tensor& plain, const DeviceMesh& mesh) {
  return DTensor::from_local(plain, mesh, replicated(mesh));
}

}  // namespace

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
      value = replicate(value.toTensor(), *mesh);
  }
}

namespace {

/// By view, whose sizes are global; libtorch's way is to say the strides too, which no rank's memory has.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  const auto shape = at::infer_size(C10_AS_INTARRAYREF_SLOW(sizes), self.numel());
  if (at::detail::computeStride(self.sizes(), self.strides(), c10::IntArrayRef(shape)))
    return self.view(shape);
  return at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), shape);
}

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
  const at::Tensor numbers = replicate(at::arange(classes, self.options()), DTensor(self).device_mesh());
  return self.unsqueeze(-1).eq(numbers).to(at::kLong);
}

at::Tensor trace_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  return replicate(at::eye(shape[0], shape[1], grad.options()), DTensor(grad).device_mesh()) * grad;
}

at::Tensor full_of(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

std::vector<int64_t> integers(const at::Tensor& tensor) {
  const at::Tensor values = full_of(tensor.detach()).to(at::kCPU, at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices_or_sections,
                                     int64_t dim) {
  // A scalar tensor or a list, which is checked there as ever.
  const at::Tensor value = full_of(indices_or_sections.detach());
  if (!DTensor::is_dtensor(self) || value.dim() > 1 || value.scalar_type() != at::kLong)
    return at::tensor_split(full_of(self), value, dim);
  const std::vector<int64_t> numbers = integers(value);
  return value.dim() == 0 ? at::tensor_split(self, numbers[0], dim) : at::tensor_split(self, numbers, dim);
}

/// libtorch reads the memory of what needs no gradient. It takes floats only then.
at::Tensor max_pool1d(const at::Tensor& self, c10::IntArrayRef kernel_size, c10::IntArrayRef stride,
                      c10::IntArrayRef padding, c10::IntArrayRef dilation, bool ceil_mode) {
  TESSERA_CHECK_AS(c10::NotImplementedError, self.is_floating_point(), "max_pool1d: not implemented for ",
                   self.scalar_type(), ".");
  return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

/// Those of a distributed tensor; which ones, libtorch says of their plain numbers.
at::Tensor rows_of(const at::Tensor& tensor, const at::Tensor& numbers) {
  return tensor.index_select(0, replicate(numbers.flatten(), DTensor(tensor).device_mesh()));
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

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets, const at::Tensor& input_lengths,
                    const at::Tensor& target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  return at::ctc_loss(log_probs, targets, integers(input_lengths), integers(target_lengths), blank, reduction,
                      zero_infinity);
}

/// Its gradient is a corner of the exponential of [[A^H, G], [0, A^H]].
struct MatrixExp : torch::autograd::Function<MatrixExp> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({self});
    return at::linalg_matrix_exp(self);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor transposed = context->get_saved_variables()[0].mH();
    const int64_t size = transposed.size(-1);
    const at::Tensor upper = at::cat({transposed, gradients[0]}, -1);
    const at::Tensor lower = at::cat({at::zeros_like(transposed), transposed}, -1);
    const at::Tensor block = at::linalg_matrix_exp(at::cat({upper, lower}, -2));
    return {block.narrow(-2, 0, size).narrow(-1, size, size)};
  }
};

at::Tensor linalg_matrix_exp(const at::Tensor& self) { return MatrixExp::apply(self); }

/// The data of a distributed tensor can be set to that of any other; by libtorch's own test only to one with
/// the same dispatch keys.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return DTensor::is_dtensor(self) && DTensor::is_dtensor(from);
}

/// In one operator, whose mask is replicated also where the input is a partial sum.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: p must be from 0 to 1, got ", p, ".");
  if (!train || p == 0 || input.numel() == 0) return input;
  TESSERA_CHECK_AS(c10::NotImplementedError, !input.is_complex() || p == 1, "dropout: not implemented for ",
                   input.scalar_type(), ".");
  return std::get<0>(at::native_dropout(input, p, true));
}

void register_composites(torch::Library& library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  for (const char* name : {"_scaled_dot_product_attention_math", "combinations", "ctc_loss.IntList", "istft",
                           "linalg_matrix_power", "linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float",
                           "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor",
                           "nanquantile", "nanquantile.scalar", "quantile", "quantile.scalar", "trapezoid.dx",
                           "trapezoid.x", "trapz.dx", "trapz.x"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compose>());
  }
  library.impl("ctc_loss.Tensor", ctc_loss);
  library.impl("dropout", dropout);
  library.impl("max_pool1d", max_pool1d);
  library.impl("one_hot", one_hot);
  library.impl("_pad_packed_sequence", pad_packed_sequence);
  library.impl("reshape", reshape);
  library.impl("tensor_split.tensor_indices_or_sections", tensor_split);
  library.impl("trace_backward", trace_backward);
}

// In inference mode there is no autograd above us.
TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_composites(library);
  library.impl("linalg_matrix_exp", linalg_matrix_exp);
  library.impl("_pack_padded_sequence", pack_padded_sequence);
}

}  // namespace

}  // namespace tessera
