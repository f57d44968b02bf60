#include <tessera/rules/exchange.h>
#include <tessera/rules/family.h>

#include <ATen/ATen.h>

namespace tessera::rules {

namespace {

/// Rows of the table that a rank does not hold are zeros there.
std::optional<Proposal> embedding(const Call& call) {
  const auto table = call.tensor("weight"), which = call.tensor("indices");
  if (!table || !which || call.tensors[*table].ndim() != 2) return std::nullopt;
  const Spec &weight = call.tensors[*table], &indices = call.tensors[*which];
  const Letters places = identity(indices.ndim());
  Letters output = places;
  output.push_back('y');
  Einsum einsum{.inputs = {letters("xy"), places}, .outputs = {output}};
  einsum.ranges = true;
  Shape shape = indices.shape().vec();
  shape.push_back(weight.shape()[1]);
  Proposal proposal{rows(einsum), {{shape}}};
  proposal.rows.push_back({{Partial(), Replicate()}, {Partial()}});
  proposal.localize = [](const Chosen& chosen) {
    Local local;
    const Spec& weight = chosen.inputs[0];
    if (mesh_dims_of(weight, 0).empty()) return local;
    local.compute = [weight, output = chosen.outputs[0]](const c10::OperatorHandle& op, Stack arguments) {
      const int64_t size = weight.local_shape()[0];
      const Masked masked(arguments[1].toTensor(), weight.global_offset()[0], size, weight.shape()[0], 0);
      if (size == 0) return Stack{at::zeros(output.local_shape(), arguments[0].toTensor().options())};
      arguments[1] = masked.indices;
      at::Tensor found = call_operator(op, std::move(arguments))[0].toTensor();
      return Stack{found.masked_fill_(masked.elsewhere.unsqueeze(-1), 0)};
    };
    return local;
  };
  return proposal;
}

std::optional<Proposal> embedding_backward(const Call& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &gradient = call.tensors[0], &indices = call.tensors[1];
  const Letters places = identity(indices.ndim());
  Letters input = places;
  input.push_back('y');
  if (gradient.ndim() != indices.ndim() + 1) return std::nullopt;
  Einsum einsum{.inputs = {input, places}, .outputs = {letters(".y")}, .linear = {{0}}};
  // How often an index occurs is known only to who has all of them.
  if (call.flag("scale_grad_by_freq")) einsum.contracted = std::nullopt;
  return Proposal{rows(einsum), {{{call.integer("num_weights"), gradient.shape().back()}}}};
}

}  // namespace

Table embedding_rules() {
  return {
      {{"embedding"}, {"xy,i->iy; rows cut: P(sum), zeros where a rank has no row", embedding}},
      {{"embedding_dense_backward"}, {"iy,i->.y", embedding_backward, {"num_weights", "scale_grad_by_freq"}}},
  };
}

}  // namespace tessera::rules
