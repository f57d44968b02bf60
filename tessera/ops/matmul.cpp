#include <tessera/ops/as_one.h>
#include <tessera/ops/family.h>
#include <tessera/rules/einsum.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/einsum_native.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_native.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

Pattern product(Names letters) { return {.letters = std::move(letters), .product = true}; }

/// With something added. libtorch refuses factors of it that are no integers only where there is something to
/// multiply: on some ranks.
Pattern added_product(const char* letters) {
  return {.letters = {letters}, .product = true, .no_integers = true};
}

/// libtorch forgets to broadcast what is added to the product of an empty matrix and a vector.
Rule addmv() {
  Rule rule = added_product("+m,mk,k->m");
  rule.local.of = [](const OpCall& call) -> Localize {
    if (call.tensors[0].shape() == call.tensors[1].shape().slice(0, 1)) return {};
    return [](const ChosenSpecs&) {
      return LocalCall{{}, [](const c10::OperatorHandle& op, Stack arguments) {
                         const NamedArguments named(op, arguments);
                         named["self"] = named.tensor("self").expand({named.tensor("mat").size(0)});
                         return call_operator(op, std::move(arguments));
                       }};
    };
  };
  return rule;
}

/// Letters for what is contracted, and for the dims that only one factor has. Others are those of identity().
constexpr char kInner = 'K', kLeft = 'M', kRight = 'N';

Letters with(Letters letters, std::initializer_list<char> more) {
  letters.append(more);
  return letters;
}

/// On local tensors: libtorch has the operator, but no kernel for ordinary tensors.
Stack linear_gradients(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor x = arguments.tensor("self");
  at::Tensor gradient = arguments.tensor("grad_output"), w = arguments.tensor("weight");
  const auto mask = arguments["output_mask"].toBoolList();
  const bool is_vector = w.dim() == 1;
  if (is_vector) {
    w = w.unsqueeze(0);
    gradient = gradient.unsqueeze(-1);
  }
  auto matrix = [](const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); };
  at::Tensor of_x, of_w, of_bias;
  if (mask[0]) of_x = at::matmul(gradient, w);
  if (mask[1]) of_w = at::mm(matrix(gradient).t(), matrix(x));
  if (mask[1] && is_vector) of_w = of_w.squeeze(0);
  if (mask[2]) of_bias = at::sum(matrix(gradient), 0);
  if (mask[2] && is_vector) of_bias = of_bias.squeeze(0);
  return {of_x, of_w, of_bias};
}

std::optional<Strategies> linear_backward(const OpCall& call) {
  const Spec &x = call.tensors.at(0), &w = call.tensors.at(2);
  const Letters batch = identity(x.ndim() - 1);
  const Letters own = w.ndim() == 2 ? Letters{kRight} : Letters{};
  const Letters weight = with(own, {kInner});
  Letters output = batch;
  output.append(own.begin(), own.end());
  const Letters input = with(batch, {kInner});
  Strategies strategies{strategies_of({.inputs = {input, output, weight}, .outputs = {input, weight, own}}),
                        {}};
  // What does not depend on what is sharded, or has yet to be reduced, is replicated.
  for (Strategy& strategy : strategies.options) {
    if (strategy.inputs[1].is_replicate()) strategy.outputs[2] = Replicate();
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
    const Placement same = Replicate(), partial = Partial(op);
    strategies.options.push_back({{same, partial, same}, {partial}});
    strategies.options.back().outputs.assign(3, partial);
    strategies.options.push_back({{partial, same, same}, {same, partial, same}});
    strategies.options.push_back({{same, same, partial}, {partial, same, same}});
  }
  const Shape bias(w.shape().begin(), w.shape().end() - 1);
  strategies.results = {{x.shape().vec()}, {w.shape().vec()}, {bias}};
  strategies.localize = [](const ChosenSpecs&) { return LocalCall{{}, linear_gradients}; };
  return strategies;
}

/// The product of three, each without some of the dims, summed along others.
std::optional<Strategies> trilinear(const OpCall& call) {
  if (call.tensors.size() != 3 || call.tensors[0].dtype() == c10::ScalarType::Bool) return std::nullopt;
  const Shape missing[] = {call.integers("expand1"), call.integers("expand2"), call.integers("expand3")};
  const auto ndim = call.tensors[0].ndim() + static_cast<int64_t>(missing[0].size());
  const Letters all = identity(ndim);
  auto without = [&](const Shape& dims) {
    Letters letters;
    for (int64_t d = 0; d < ndim; ++d) {
      if (!contains(dims, d)) letters.push_back(all[d]);
    }
    return letters;
  };
  Einsum product{.inputs = {}, .outputs = {without(call.integers("sumdim"))}, .linear = {{0}, {1}, {2}}};
  std::vector<c10::IntArrayRef> shapes;
  for (size_t i = 0; i < 3; ++i) {
    product.inputs.push_back(without(missing[i]));
    shapes.push_back(call.tensors[i].shape());
    if (product.inputs[i].size() != shapes[i].size()) return std::nullopt;
  }
  const auto sizes = letter_sizes(product.inputs, shapes);
  if (!sizes || static_cast<int64_t>(sizes->size()) != ndim) return std::nullopt;
  Shape shape;
  for (const char letter : product.outputs[0]) shape.push_back(sizes->at(letter));
  return Strategies{strategies_of(product), {{shape}}};
}

std::optional<Strategies> any_einsum(const OpCall& call) {
  Shape ndims;
  std::vector<c10::IntArrayRef> shapes;
  for (const Spec& spec : call.tensors) {
    ndims.push_back(spec.ndim());
    shapes.push_back(spec.shape());
  }
  auto product = from_equation(call.value("equation").toStringRef(), ndims);
  if (!product) return std::nullopt;
  const auto sizes = letter_sizes(product->inputs, shapes);
  if (!sizes) return std::nullopt;
  for (size_t i = 0; i < ndims.size(); ++i) product->linear.push_back({i});
  Shape shape;
  for (const char letter : product->outputs[0]) shape.push_back(sizes->at(letter));
  return Strategies{strategies_of(*product), {{shape}}};
}

}  // namespace

Table matmul_rules() {
  return {
      {{"mm"}, product({"mk,kn->mn"})},
      {{"bmm"}, product({"bmk,bkn->bmn"})},
      {{"mv"}, product({"mk,k->m"})},
      {{"dot", "vdot"}, product({"k,k->"})},
      {{"addmm"}, added_product("+mn,mk,kn->mn")},
      {{"baddbmm"}, added_product("+bmn,bmk,bkn->bmn")},
      {{"addbmm"}, added_product("+mn,bmk,bkn->mn")},
      {{"addmv"}, addmv()},
      {{"addr"}, added_product("+mn,m,n->mn")},
      {{"linear"}, product({"Bk,nk,+n?->Bn", "Bk,k,+?->B"})},
      {{"linear_backward"},
       {"Bk,Bn,nk->Bk,nk,n",
        linear_backward,
        {},
        "the bias gradient is replicated where the output gradient is, whatever else is sharded"}},
      {{"matmul"}, product({"Bmk,Bkn->Bmn", "k,Bkn->Bn", "Bmk,k->Bm", "k,k->"})},
      {{"_trilinear"},
       {"all dims sharded; summed ones: P(sum)",
        trilinear,
        {"expand1", "expand2", "expand3", "sumdim"},
        "lists of dims say which dims the inputs lack"}},
      {{"einsum"}, {"as the equation says", any_einsum, {"equation"}, "the equation is the rule"}},
  };
}

}  // namespace tessera::ops

// --- autograd

/// Products that libtorch composes of others by joining dims into matrices, which gathers them where they are
/// sharded. Here each is one operator, with a rule and a gradient of its own.
namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The gradient of a product, as if vectors were matrices.
at::Tensor as_matrices(const at::Tensor& gradient, int64_t dims_of_self, int64_t dims_of_other) {
  const at::Tensor result = dims_of_other == 1 ? gradient.unsqueeze(-1) : gradient;
  return dims_of_self == 1 ? result.unsqueeze(-2) : result;
}

at::Tensor gradient_of_self(const at::Tensor& gradient, c10::IntArrayRef self, const at::Tensor& other) {
  std::vector<int64_t> sizes = self.vec();
  if (self.size() == 1) sizes.insert(sizes.begin(), 1);
  const at::Tensor g = as_matrices(gradient, static_cast<int64_t>(self.size()), other.dim());
  const at::Tensor b = other.dim() == 1 ? other.unsqueeze(-1) : other;
  const at::Tensor result = at::sum_to(at::matmul(g, b.mT()), sizes);
  return self.size() == 1 ? result.squeeze(0) : result;
}

/// libtorch has it for nested tensors only.
std::tuple<at::Tensor, at::Tensor> matmul_gradients(const at::Tensor& gradient, const at::Tensor& self,
                                                    const at::Tensor& other, std::array<bool, 2> mask) {
  if (!gradient.defined()) return {};
  at::Tensor of_self, of_other;
  if (mask[0]) of_self = gradient_of_self(gradient, self.sizes(), other);
  if (mask[1]) {
    const at::Tensor g = as_matrices(gradient, self.dim(), other.dim());
    const at::Tensor a = self.dim() == 1 ? self.unsqueeze(0) : self;
    const at::Tensor b = other.dim() == 1 ? other.unsqueeze(-1) : other;
    // One matrix for all batches: as for the weight of a linear layer, without a product for each batch. There it is the
    // transposed weight, and so is its gradient, which then lies in memory as the weight.
    const bool is_one = b.dim() == 2 && a.dim() > 2 && !at::GradMode::is_enabled();
    const bool is_transposed = is_one && b.stride(0) == 1 && b.stride(1) == b.size(0);
    if (is_transposed) {
      of_other = std::get<1>(at::linear_backward(a, g, b.t(), {false, true, false})).t();
    } else if (is_one) {
      of_other = std::get<1>(at::linear_backward(g, a, b, {false, true, false}));
    } else {
      of_other = at::sum_to(at::matmul(a.mT(), g), b.sizes());
    }
    if (other.dim() == 1) of_other = of_other.squeeze(-1);
  }
  return {of_self, of_other};
}

// The formulas that autograd has for these are in use for nested tensors, and know no complex numbers.

/// Where the right side needs no gradient, the left one need not be kept.
struct ByConstant : torch::autograd::Function<ByConstant> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& self, const at::Tensor& other) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({other});
    context->saved_data["sizes"] = self.sizes().vec();
    return at::matmul(self, other);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradient_of_self(gradients[0], context->saved_data["sizes"].toIntVector(),
                             context->get_saved_variables()[0]),
            at::Tensor()};
  }
};

/// The same of a layer whose weight is frozen.
struct LinearByConstant : torch::autograd::Function<LinearByConstant> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({weight});
    context->saved_data["has_bias"] = bias && bias->defined();
    return at::linear(input, weight, bias);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    at::Tensor of_bias;
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) {
      std::vector<int64_t> others(gradient.dim() - 1);
      std::iota(others.begin(), others.end(), 0);
      of_bias = others.empty() ? gradient : gradient.sum(others);
    }
    return {at::matmul(gradient, context->get_saved_variables()[0]), at::Tensor(), of_bias};
  }
};

/// Whether of two tensors the first alone has a gradient.
bool first_alone(const at::Tensor& first, const at::Tensor& second) {
  return at::GradMode::is_enabled() && first.requires_grad() && !second.requires_grad();
}

// In forward-mode AD, only what libtorch composes these of has formulas.

at::Tensor linear(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  if (input.is_complex() || weight.is_complex() || has_tangent(input) || has_tangent(weight) ||
      (bias && has_tangent(*bias)))
    return at::native::linear(input, weight, bias);
  if (first_alone(input, weight) && weight.dim() == 2) return LinearByConstant::apply(input, weight, bias);
  return as_one<at::_ops::linear>(keys, input, weight, bias);
}

at::Tensor matmul(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other) {
  if (self.is_complex() || other.is_complex() || has_tangent(self) || has_tangent(other))
    return at::native::matmul(self, other);
  if (first_alone(self, other)) return ByConstant::apply(self, other);
  return as_one<at::_ops::matmul>(keys, self, other);
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
  static at::Tensor forward(AutogradContext* context, const std::string& equation, const at::Tensor& a,
                            const at::Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    // Each is kept for the gradient of the other.
    context->save_for_backward({b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor()});
    context->saved_data["equation"] = equation;
    context->saved_data["a"] = a.sizes().vec();
    context->saved_data["b"] = b.sizes().vec();
    return at::einsum(equation, {a, b});
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const std::vector<std::vector<int64_t>> shapes{context->saved_data["a"].toIntVector(),
                                                   context->saved_data["b"].toIntVector()};
    const rules::Einsum product = *rules::from_equation(
        context->saved_data["equation"].toStringRef(),
        {static_cast<int64_t>(shapes[0].size()), static_cast<int64_t>(shapes[1].size())});
    variable_list result{at::Tensor(), at::Tensor(), at::Tensor()};
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
      result[1 + i] = gradient.expand(shapes[i]);
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
  const auto all = rules::from_equation({equation.data(), equation.size()}, ndims);
  if (!all || tensors.size() < 2 || path || !rules::letter_sizes(all->inputs, shapes) ||
      std::any_of(tensors.begin(), tensors.end(), has_tangent))
    return at::native::einsum(equation, tensors, path);
  at::Tensor result = tensors[0];
  rules::Letters known = all->inputs[0];
  for (size_t i = 1; i < tensors.size(); ++i) {
    rules::Letters next = all->outputs[0];
    if (i + 1 < tensors.size()) {
      next.clear();
      for (const rules::Letters& from : {known, all->inputs[i]}) {
        for (const char letter : from) {
          bool needed = contains(all->outputs[0], letter);
          for (size_t later = i + 1; later < tensors.size(); ++later)
            needed = needed || contains(all->inputs[later], letter);
          if (needed && !contains(next, letter)) next.push_back(letter);
        }
      }
    }
    result = ProductOfTwo::apply(equation_of({known, all->inputs[i]}, next), result, tensors[i]);
    known = std::move(next);
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
