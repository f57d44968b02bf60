#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

namespace tessera::rules {

namespace {

/// A product of the last two tensors, as letters say; one before them, if any, is added.
Rule product(const std::string& text, bool added = false) {
  return {
      text, [text, added](const Call& call) -> std::optional<Proposal> {
        Einsum product = einsum(text.substr(text.find('+') == std::string::npos ? 0 : text.find('+') + 1));
        const size_t first = added ? 1 : 0;
        if (call.tensors.size() != 2 + first) return std::nullopt;
        Shape shape;
        for (size_t i = 0; i < 2; ++i) {
          const Spec& spec = call.tensors[first + i];
          if (spec.ndim() != static_cast<int64_t>(product.inputs[i].size())) return std::nullopt;
        }
        auto size_of = [&](char letter) -> int64_t {
          for (size_t i = 0; i < 2; ++i) {
            for (size_t d = 0; d < product.inputs[i].size(); ++d) {
              if (product.inputs[i][d] == letter) return call.tensors[first + i].shape()[d];
            }
          }
          return 1;
        };
        for (size_t i = 0; i < 2; ++i) {
          for (size_t d = 0; d < product.inputs[i].size(); ++d) {
            // Sizes that do not fit are the operator's to complain of.
            if (call.tensors[first + i].shape()[d] != size_of(product.inputs[i][d])) return std::nullopt;
          }
        }
        for (const char letter : product.outputs[0]) shape.push_back(size_of(letter));
        product.linear = {{0}, {1}};
        if (added) {
          const Spec& term = call.tensors[0];
          // libtorch refuses a factor that is no integer only where there is nothing to multiply: on some
          // ranks.
          if (c10::isIntegralType(term.dtype(), true)) return std::nullopt;
          if (term.ndim() > static_cast<int64_t>(shape.size())) return std::nullopt;
          if (!at::is_expandable_to(term.shape(), shape)) return std::nullopt;
          product.inputs.insert(product.inputs.begin(), broadcast(term.shape(), shape, product.outputs[0]));
          product.linear = {{0, 1}, {0, 2}};
          product.added = {0};
        }
        if (std::any_of(call.tensors.begin(), call.tensors.end(),
                        [](const Spec& spec) { return spec.dtype() == c10::ScalarType::Bool; }))
          return std::nullopt;
        Proposal proposal{rows(product), {{shape}}};
        // libtorch forgets to broadcast what is added to a product with an empty matrix and a vector.
        if (added && shape.size() == 1 && call.tensors[0].shape() != c10::IntArrayRef(shape)) {
          proposal.localize = [](const Chosen&) {
            Local local;
            local.compute = [](const c10::OperatorHandle& op, Stack arguments) {
              arguments[0] = arguments[0].toTensor().expand({arguments[1].toTensor().size(0)});
              op.callBoxed(arguments);
              return arguments;
            };
            return local;
          };
        }
        return proposal;
      }};
}

/// Letters for what is contracted, and for the dims that only one factor has. Others are those of identity().
constexpr char kInner = 'K', kLeft = 'M', kRight = 'N';

Letters with(Letters letters, std::initializer_list<char> more) {
  letters.append(more);
  return letters;
}

/// Any number of dims before the last.
std::optional<Proposal> linear(const Call& call) {
  const auto input = call.tensor("input"), weight = call.tensor("weight"), bias = call.tensor("bias");
  if (!input || !weight) return std::nullopt;
  const Spec &x = call.tensors[*input], &w = call.tensors[*weight];
  if (x.ndim() < 1 || w.ndim() < 1 || w.ndim() > 2 || x.shape().back() != w.shape().back())
    return std::nullopt;
  if (x.dtype() == c10::ScalarType::Bool) return std::nullopt;
  const Letters places = identity(x.ndim() - 1);
  Shape shape(x.shape().begin(), x.shape().end() - 1);
  Einsum product{.inputs = {with(places, {kInner}), {kInner}}, .outputs = {places}, .linear = {{0}, {1}}};
  if (w.ndim() == 2) {
    product.inputs[1] = {kRight, kInner};
    product.outputs[0].push_back(kRight);
    shape.push_back(w.shape()[0]);
  }
  if (bias) {
    const Spec& term = call.tensors[*bias];
    if (!at::is_expandable_to(term.shape(), shape)) return std::nullopt;
    product.inputs.push_back(broadcast(term.shape(), shape, product.outputs[0]));
    product.linear = {{0, 2}, {1, 2}};
    product.added = {2};
  }
  return Proposal{rows(product), {{shape}}};
}

/// Of what a rank holds: libtorch has the operator, but no kernel for ordinary tensors.
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

std::optional<Proposal> linear_backward(const Call& call) {
  const Spec &x = call.tensors.at(0), &w = call.tensors.at(2);
  const Letters places = identity(x.ndim() - 1);
  const Letters own = w.ndim() == 2 ? Letters{kRight} : Letters{};
  const Letters weight = with(own, {kInner});
  Letters output = places;
  output.append(own.begin(), own.end());
  const Letters input = with(places, {kInner});
  Proposal proposal{rows({.inputs = {input, output, weight}, .outputs = {input, weight, own}}), {}};
  // What does not depend on what is cut, or has yet to be reduced, is whole.
  for (Row& row : proposal.rows) {
    if (row.inputs[1].is_replicate()) row.outputs[2] = Replicate();
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
    const Placement whole = Replicate(), partial = Partial(op);
    proposal.rows.push_back({{whole, partial, whole}, {partial}});
    proposal.rows.back().outputs.assign(3, partial);
    proposal.rows.push_back({{partial, whole, whole}, {whole, partial, whole}});
    proposal.rows.push_back({{whole, whole, partial}, {partial, whole, whole}});
  }
  const Shape bias(w.shape().begin(), w.shape().end() - 1);
  proposal.results = {{x.shape().vec()}, {w.shape().vec()}, {bias}};
  proposal.localize = [](const Chosen&) { return Local{{}, linear_gradients}; };
  return proposal;
}

/// Matrices in the last two dims, those before them broadcast; a tensor of one dim is a vector.
std::optional<Proposal> matmul(const Call& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &a = call.tensors[0], &b = call.tensors[1];
  if (a.ndim() < 1 || b.ndim() < 1 || a.dtype() == c10::ScalarType::Bool) return std::nullopt;
  if (a.shape().back() != b.shape()[std::max<int64_t>(b.ndim() - 2, 0)]) return std::nullopt;
  auto batch_of = [](const Spec& spec) {
    return spec.shape().slice(0, spec.ndim() - std::min<int64_t>(spec.ndim(), 2));
  };
  if (!at::are_expandable(batch_of(a), batch_of(b))) return std::nullopt;
  Shape shape = at::infer_size(batch_of(a), batch_of(b));
  const Letters places = identity(shape.size());
  Einsum product{.inputs = {broadcast(batch_of(a), shape, places), broadcast(batch_of(b), shape, places)},
                 .outputs = {places},
                 .linear = {{0}, {1}}};
  if (a.ndim() > 1) {
    product.inputs[0].push_back(kLeft);
    product.outputs[0].push_back(kLeft);
    shape.push_back(a.shape()[a.ndim() - 2]);
  }
  product.inputs[0].push_back(kInner);
  product.inputs[1].push_back(kInner);
  if (b.ndim() > 1) {
    product.inputs[1].push_back(kRight);
    product.outputs[0].push_back(kRight);
    shape.push_back(b.shape().back());
  }
  return Proposal{rows(product), {{shape}}};
}

/// The product of three, each without some of the dims, summed along others.
std::optional<Proposal> trilinear(const Call& call) {
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
  return Proposal{rows(product), {{shape}}};
}

std::optional<Proposal> any_einsum(const Call& call) {
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
  return Proposal{rows(*product), {{shape}}};
}

}  // namespace

Table matmul_rules() {
  constexpr bool kAdded = true;
  return {
      {{"mm"}, product("mk,kn->mn")},
      {{"bmm"}, product("bmk,bkn->bmn")},
      {{"mv"}, product("mk,k->m")},
      {{"dot", "vdot"}, product("k,k->")},
      {{"addmm"}, product("mn+mk,kn->mn", kAdded)},
      {{"baddbmm"}, product("bmn+bmk,bkn->bmn", kAdded)},
      {{"addbmm"}, product("mn+bmk,bkn->mn", kAdded)},
      {{"addmv"}, product("m+mk,k->m", kAdded)},
      {{"addr"}, product("mn+m,n->mn", kAdded)},
      {{"linear"}, {"..k,nk(,n)->..n", linear}},
      {{"linear_backward"}, {"..k,..n,nk->..k,nk,n", linear_backward}},
      {{"matmul"}, {"..mk,..kn->..mn", matmul}},
      {{"_trilinear"},
       {"all dims cut; summed ones: P(sum)", trilinear, {"expand1", "expand2", "expand3", "sumdim"}}},
      {{"einsum"}, {"as the equation says", any_einsum, {"equation"}}},
  };
}

}  // namespace tessera::rules
