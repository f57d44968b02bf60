#include <tessera/ops/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

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
                         arguments[0] = arguments[0].toTensor().expand({arguments[1].toTensor().size(0)});
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
Stack linear_gradients(const c10::OperatorHandle&, Stack arguments) {
  at::Tensor x = arguments[0].toTensor(), gradient = arguments[1].toTensor(), w = arguments[2].toTensor();
  const auto mask = arguments[3].toBoolList();
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
  const Letters places = identity(x.ndim() - 1);
  const Letters own = w.ndim() == 2 ? Letters{kRight} : Letters{};
  const Letters weight = with(own, {kInner});
  Letters output = places;
  output.append(own.begin(), own.end());
  const Letters input = with(places, {kInner});
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
