#include <tessera/rules/einsum.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/einsum_native.h>
#include <ATen/ops/linear_backward.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/matmul_native.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// Products that libtorch composes of others by joining dims into matrices, which gathers them where they are
/// cut. Here each is one operator, with a rule and a gradient of its own.
namespace tessera {

namespace {

/// libtorch has it for nested tensors only.
std::tuple<at::Tensor, at::Tensor> matmul_gradients(const at::Tensor& gradient, const at::Tensor& self,
                                                    const at::Tensor& other, std::array<bool, 2> mask) {
  if (!gradient.defined()) return {};
  // Vectors as matrices.
  const at::Tensor a = self.dim() == 1 ? self.unsqueeze(0) : self;
  const at::Tensor b = other.dim() == 1 ? other.unsqueeze(-1) : other;
  at::Tensor g = other.dim() == 1 ? gradient.unsqueeze(-1) : gradient;
  if (self.dim() == 1) g = g.unsqueeze(-2);
  at::Tensor of_self, of_other;
  if (mask[0]) {
    of_self = at::sum_to(at::matmul(g, b.mT()), a.sizes());
    if (self.dim() == 1) of_self = of_self.squeeze(0);
  }
  if (mask[1]) {
    // One matrix for all batches: as for the weight of a linear layer, without a product for each batch.
    of_other = b.dim() == 2 && a.dim() > 2 && !at::GradMode::is_enabled()
                   ? std::get<1>(at::linear_backward(g, a, b, {false, true, false}))
                   : at::sum_to(at::matmul(a.mT(), g), b.sizes());
    if (other.dim() == 1) of_other = of_other.squeeze(-1);
  }
  return {of_self, of_other};
}

/// Products that are operators of their own here, not composed of others: with the formulas that autograd has
/// for them, which are in use for nested tensors and know no complex numbers.
template <class Operator, class... Arguments>
at::Tensor as_one(c10::DispatchKeySet keys, const Arguments&... arguments) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Operator::name, Operator::overload_name)
                             .template typed<typename Operator::schema>();
  return op.redispatch(keys.add(c10::DispatchKey::AutogradNestedTensor), arguments...);
}

at::Tensor linear(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  return input.is_complex() || weight.is_complex() ? at::native::linear(input, weight, bias)
                                                   : as_one<at::_ops::linear>(keys, input, weight, bias);
}

at::Tensor matmul(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other) {
  return self.is_complex() || other.is_complex() ? at::native::matmul(self, other)
                                                 : as_one<at::_ops::matmul>(keys, self, other);
}

std::string equation_of(const std::vector<rules::Letters>& inputs, const rules::Letters& output) {
  std::string text;
  for (const rules::Letters& input : inputs) {
    if (&input != &inputs.front()) text += ',';
    text.append(input.begin(), input.end());
  }
  return text.append("->").append(output.begin(), output.end());
}

bool contains(const rules::Letters& letters, char letter) {
  return std::find(letters.begin(), letters.end(), letter) != letters.end();
}

/// The gradient of a product of two is a product of its gradient and the other.
struct ProductOfTwo : torch::autograd::Function<ProductOfTwo> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const std::string& equation,
                            const at::Tensor& a, const at::Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({a, b});
    context->saved_data["equation"] = equation;
    return at::einsum(equation, {a, b});
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const rules::Einsum product = *rules::from_equation(context->saved_data["equation"].toStringRef(),
                                                        {saved[0].dim(), saved[1].dim()});
    torch::autograd::variable_list result{at::Tensor(), at::Tensor(), at::Tensor()};
    for (const size_t i : {0, 1}) {
      if (!context->needs_input_grad(i)) continue;
      const rules::Letters &own = product.inputs[i], &other = product.inputs[1 - i],
                           &output = product.outputs[0];
      rules::Letters known;  // what was summed over in this one alone is the same all along
      for (const char letter : own) {
        if (contains(other, letter) || contains(output, letter)) known.push_back(letter);
      }
      at::Tensor gradient =
          at::einsum(equation_of({output, other}, known), {gradients[0], saved[1 - i].conj()});
      for (size_t d = 0; d < own.size(); ++d) {
        if (!contains(known, own[d])) gradient = gradient.unsqueeze(static_cast<int64_t>(d));
      }
      result[1 + i] = gradient.expand(saved[i].sizes());
    }
    return result;
  }
};

/// Two at a time, from the left. What occurs twice in one tensor, or is broadcast, is left to libtorch.
at::Tensor einsum(c10::string_view equation, at::TensorList tensors, at::OptionalIntArrayRef path) {
  std::vector<int64_t> ndims;
  std::vector<c10::IntArrayRef> shapes;
  for (const at::Tensor& tensor : tensors) {
    ndims.push_back(tensor.dim());
    shapes.push_back(tensor.sizes());
  }
  const auto whole = rules::from_equation({equation.data(), equation.size()}, ndims);
  if (!whole || tensors.size() < 2 || path || !rules::letter_sizes(whole->inputs, shapes))
    return at::native::einsum(equation, tensors, path);
  at::Tensor result = tensors[0];
  rules::Letters held = whole->inputs[0];
  for (size_t i = 1; i < tensors.size(); ++i) {
    rules::Letters next = whole->outputs[0];
    if (i + 1 < tensors.size()) {
      next.clear();
      for (const rules::Letters& from : {held, whole->inputs[i]}) {
        for (const char letter : from) {
          bool needed = contains(whole->outputs[0], letter);
          for (size_t later = i + 1; later < tensors.size(); ++later)
            needed = needed || contains(whole->inputs[later], letter);
          if (needed && !contains(next, letter)) next.push_back(letter);
        }
      }
    }
    result = ProductOfTwo::apply(equation_of({held, whole->inputs[i]}, next), result, tensors[i]);
    held = std::move(next);
  }
  return result;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("einsum", einsum);
  library.impl("linear", linear);
  library.impl("matmul", matmul);
  library.impl("matmul_backward", matmul_gradients);
}

}  // namespace

}  // namespace tessera
