#include <tessera/comm/collectives.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>

#include <limits>

#include <ATen/ATen.h>

namespace tessera::ops {

namespace {

/// Rows of the table that a rank does not hold are zeros there.
std::optional<Strategies> embedding(const OpCall& call) {
  const auto table = call.tensor("weight"), which = call.tensor("indices");
  if (!table || !which || call.tensors[*table].ndim() != 2) return std::nullopt;
  const Spec &weight = call.tensors[*table], &indices = call.tensors[*which];
  const Letters places = identity(indices.ndim());
  Letters output = places;
  output.push_back('y');
  Einsum einsum{.inputs = {letters("xy"), places}, .outputs = {output}};
  einsum.contiguous = true;
  Shape shape = indices.shape().vec();
  shape.push_back(weight.shape()[1]);
  Strategies strategies{strategies_of(einsum), {{shape}}};
  strategies.options.push_back({{Partial(), Replicate()}, {Partial()}});
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& weight = chosen.inputs[0];
    if (mesh_dims_of(weight, 0).empty()) return local;
    local.compute = [weight, output = chosen.outputs[0]](const c10::OperatorHandle& op, Stack arguments) {
      const int64_t size = weight.local_shape()[0];
      const LocalIndices masked(arguments[1].toTensor(), weight.global_offset()[0], size, weight.shape()[0],
                                0);
      if (size == 0) return Stack{at::zeros(output.local_shape(), arguments[0].toTensor().options())};
      arguments[1] = masked.indices;
      at::Tensor found = call_operator(op, std::move(arguments))[0].toTensor();
      return Stack{found.masked_fill_(masked.elsewhere.unsqueeze(-1), 0)};
    };
    return local;
  };
  return strategies;
}

std::optional<Strategies> embedding_backward(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &gradient = call.tensors[0], &indices = call.tensors[1];
  const Letters places = identity(indices.ndim());
  Letters input = places;
  input.push_back('y');
  if (gradient.ndim() != indices.ndim() + 1) return std::nullopt;
  Einsum einsum{.inputs = {input, places}, .outputs = {letters(".y")}, .linear = {{0}}};
  // How often an index occurs is known only to who has all of them.
  if (call.flag("scale_grad_by_freq")) einsum.contracted = std::nullopt;
  return Strategies{strategies_of(einsum), {{{call.integer("num_weights"), gradient.shape().back()}}}};
}

/// What the rows that a rank holds get of the gradient of each index. `padding`: an index that counts for
/// nothing; -1: none.
at::Tensor gradient_of_held_rows(const at::Tensor& gradient, const at::Tensor& indices, const Spec& weight,
                                 int64_t padding, bool scales) {
  const int64_t held = weight.local_shape()[0];
  // What belongs to other ranks, and padding, goes to one more row, which counts as padding.
  const LocalIndices masked(indices, weight.global_offset()[0], held, weight.shape()[0], held);
  const at::Tensor rows =
      padding < 0 ? masked.indices : masked.indices.masked_fill(at::eq(indices, padding), held);
  return at::embedding_dense_backward(gradient, rows, held + 1, held, scales).narrow(0, 0, held);
}

/// With the table itself, whose rows may be cut: each rank has what its own rows get.
std::optional<Strategies> embedding_backward_of_table(const OpCall& call) {
  if (call.tensors.size() != 3) return std::nullopt;
  const Spec& indices = call.tensors[1];
  const Letters places = identity(indices.ndim());
  Letters gradient = places;
  gradient.push_back('y');
  Einsum einsum{.inputs = {gradient, places, letters("xy")}, .outputs = {letters("xy")}};
  einsum.contiguous = true;
  if (call.flag("scale_grad_by_freq")) einsum.contracted = std::nullopt;
  Strategies strategies{strategies_of(einsum), {{call.tensors[2].shape().vec()}}};
  strategies.options.push_back({{Partial(), Replicate(), Replicate()}, {Partial()}});
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& weight = chosen.inputs[2];
    if (mesh_dims_of(weight, 0).empty()) return local;
    local.compute = [weight](const c10::OperatorHandle&, Stack arguments) {
      return Stack{gradient_of_held_rows(arguments[0].toTensor(), arguments[1].toTensor(), weight,
                                         arguments[3].toInt(), arguments[4].toBool())};
    };
    return local;
  };
  return strategies;
}

// --- bags: sums, means or maxima of rows
// -----------------------------------------------------------------------

enum BagMode : int64_t { kSum = 0, kMean = 1, kMax = 2 };

/// Of the indices of all bags, those into rows that a rank holds.
struct HeldIndices {
  at::Tensor numbers;  // of these, among all
  at::Tensor rows;     // what they point to, among the rows that are held
  at::Tensor offsets;  // where bags begin among these

  /// `padding`: an index that counts for nothing; -1: none.
  HeldIndices(const at::Tensor& indices, const at::Tensor& offsets, const Spec& weight, int64_t padding) {
    const LocalIndices masked(indices, weight.global_offset()[0], weight.local_shape()[0], weight.shape()[0],
                              0,
                              /*wraps=*/false, /*is_index_error=*/false);
    at::Tensor held = at::logical_not(masked.elsewhere);
    if (padding >= 0) held = at::logical_and(held, at::ne(indices, padding));
    numbers = at::nonzero(held).squeeze(1);
    rows = at::index_select(masked.indices, 0, numbers);
    const at::Tensor before = at::constant_pad_nd(at::cumsum(held, 0, at::kLong), {1, 0});
    this->offsets = at::index_select(before, 0, offsets).to(offsets.scalar_type());
  }
};

/// Which bag each index is in. Those after the last bag, if that has an end, are in none: they count for it.
at::Tensor bags_of(const at::Tensor& offsets, int64_t bags, int64_t indices) {
  const at::Tensor numbers = at::arange(indices, offsets.options());
  return at::searchsorted(offsets.narrow(0, 0, bags).contiguous(), numbers, /*out_int32=*/false,
                          /*right=*/true)
      .sub_(1);
}

/// The largest of each bag over all ranks that hold rows, and which row it is of: the first, if several are.
std::pair<at::Tensor, at::Tensor> largest_of_all(const at::Tensor& weight, const at::Tensor& indices,
                                                 const HeldIndices& held, int64_t bags, const Spec& spec) {
  const auto group = group_of(spec.mesh(), mesh_dims_of(spec, 0));
  const int64_t columns = weight.size(1), count = indices.numel();
  const at::Tensor bag =
      bags_of(held.offsets, bags, held.rows.numel()).unsqueeze(1).expand({held.rows.numel(), columns});
  const at::Tensor candidates = at::index_select(weight, 0, held.rows);
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  const at::Tensor values = at::full({bags, columns}, kLowest, weight.options());
  values.scatter_reduce_(0, bag, candidates, "amax");
  comm::all_reduce(values, c10d::ReduceOp::MAX, group).wait();
  const at::Tensor is_it = at::eq(candidates, at::gather(values, 0, bag));
  const at::Tensor numbers = held.numbers.unsqueeze(1).expand({held.rows.numel(), columns});
  const at::Tensor first = at::full({bags, columns}, count, indices.options().dtype(at::kLong));
  first.scatter_reduce_(0, bag, at::where(is_it, numbers, count), "amin");
  comm::all_reduce(first, c10d::ReduceOp::MIN, group).wait();
  const at::Tensor none = at::logical_and(at::eq(first, count), at::eq(values, kLowest));
  const at::Tensor rows = at::constant_pad_nd(indices, {0, 1}).index({first});
  return {values.masked_fill(none, 0), rows};
}

/// The operator on what a rank holds of the rows: sums are partial; the largest are found by two reductions.
Stack bag_of_held_rows(const Spec& spec, const Spec& output, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor weight = arguments[0].toTensor(), indices = arguments[1].toTensor(),
                   offsets = arguments[2].toTensor();
  const int64_t mode = arguments[4].toInt(), padding = arguments[8].toInt(), bags = output.shape()[0];
  const HeldIndices held(indices, offsets, spec, padding);
  // What is told of the bags does not depend on the rows: it is that of a table of one column.
  Stack about = arguments;
  about[0] = at::zeros({1, 1}, weight.options()).expand({spec.shape()[0], 1});
  Stack results = call_operator(op, std::move(about));
  if (mode == kMax) {
    const auto [values, rows] = largest_of_all(weight, indices, held, bags, spec);
    results[0] = values;
    results[3] = rows;
    return results;
  }
  at::Tensor sums = at::zeros(output.local_shape(), weight.options());
  if (held.rows.numel() > 0) {
    arguments[1] = held.rows.to(indices.scalar_type());
    arguments[2] = held.offsets;
    arguments[4] = static_cast<int64_t>(kSum);
    if (arguments[6].isTensor() && arguments[6].toTensor().defined())
      arguments[6] = at::index_select(arguments[6].toTensor(), 0, held.numbers);
    arguments[8] = -1;
    sums = call_operator(op, std::move(arguments))[0].toTensor();
  }
  if (mode == kMean) sums.div_(results[2].toTensor().clamp_min(1).unsqueeze(1));
  results[0] = sums;
  return results;
}

std::optional<Strategies> embedding_bag(const OpCall& call) {
  const auto weight = call.tensor("weight"), indices = call.tensor("indices"),
             offsets = call.tensor("offsets");
  if (!weight || !indices || !offsets) return std::nullopt;
  const Spec &w = call.tensors[*weight], &i = call.tensors[*indices], &o = call.tensors[*offsets];
  const int64_t mode = call.integer("mode"),
                bags = o.ndim() == 1 ? o.shape()[0] - call.flag("include_last_offset") : 0;
  if (w.ndim() != 2 || w.numel() == 0 || i.ndim() != 1 || i.numel() == 0 || bags < 1) return std::nullopt;
  const Placement r = Replicate();
  Strategies strategies;
  const Shape shape{bags, w.shape()[1]};
  strategies.results = {{shape}, {{kLocal}}, {{kLocal}}, mode == kMax ? Result{shape} : Result{{kLocal}}};
  auto add = [&](const Placement& of_weight, Placements outputs) {
    Strategy strategy{Placements(call.tensors.size(), r), std::move(outputs)};
    strategy.inputs[0] = of_weight;
    strategies.options.push_back(std::move(strategy));
  };
  add(Shard(1), {Shard(1), r, r, mode == kMax ? Shard(1) : r});
  add(Shard(0), {mode == kMax ? r : Partial(), r, r, r});
  strategies.options.back().contiguous = true;
  if (mode != kMax) add(Partial(), {Partial(), r, r, r});
  strategies.localize = [mode](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& w = chosen.inputs[0];
    if (mesh_dims_of(w, 0).empty()) return local;
    local.communicates = mode == kMax;
    local.compute = [w, output = chosen.outputs[0]](const c10::OperatorHandle& op, Stack arguments) {
      return bag_of_held_rows(w, output, op, std::move(arguments));
    };
    return local;
  };
  return strategies;
}

std::optional<Strategies> embedding_bag_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad"), largest = call.tensor("maximum_indices");
  if (!gradient || !largest || call.tensors[*gradient].ndim() != 2) return std::nullopt;
  if (call.position("sparse") && call.flag("sparse")) return std::nullopt;
  const Placement r = Replicate();
  Strategy columns{Placements(call.tensors.size(), r), {Shard(1)}}, sums{columns.inputs, {Partial()}};
  columns.inputs[*gradient] = Shard(1);
  if (call.integer("mode") == kMax) columns.inputs[*largest] = Shard(1);
  sums.inputs[*gradient] = Partial();
  return Strategies{{columns, sums}, {{{call.integer("num_weights"), call.tensors[*gradient].shape()[1]}}}};
}

/// With the table itself, whose rows may be cut: each rank has what its own rows get. Of sums and means.
std::optional<Strategies> embedding_bag_backward_of_table(const OpCall& call) {
  const size_t weight = *call.tensor("weight");
  const Spec& table = call.tensors[weight];
  auto strategy = [&](const Placement& gradient, const Placement& of_weight, const Placement& result) {
    Strategy strategy{Placements(call.tensors.size(), Replicate()), {result}, 0, /*contiguous=*/true};
    strategy.inputs[0] = gradient;
    strategy.inputs[weight] = of_weight;
    return strategy;
  };
  Strategies strategies{{strategy(Replicate(), Shard(0), Shard(0)), strategy(Shard(1), Shard(1), Shard(1)),
                         strategy(Partial(), Replicate(), Partial())},
                        {{table.shape().vec()}}};
  strategies.localize = [weight](const ChosenSpecs& chosen) {
    LocalCall local;
    local.compute = [table = chosen.inputs[weight]](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor gradient = arguments[0].toTensor(), indices = arguments[1].toTensor(),
                       offsets = arguments[2].toTensor();
      const at::Tensor bags = bags_of(offsets, gradient.size(0), indices.numel());
      at::Tensor each = at::index_select(gradient, 0, bags);
      if (arguments[4].isTensor() && arguments[4].toTensor().defined())
        each.mul_(arguments[4].toTensor().unsqueeze(1));
      if (arguments[7].toInt() == kMean)
        each.div_(at::index_select(arguments[3].toTensor(), 0, bags).clamp_min(1).unsqueeze(1));
      return Stack{gradient_of_held_rows(each, indices, table, arguments[8].toInt(), arguments[6].toBool())};
    };
    return local;
  };
  return strategies;
}

std::optional<Strategies> sample_weights_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad"), weight = call.tensor("weight"), indices = call.tensor("indices"),
             offsets = call.tensor("offsets");
  if (call.tensors.size() != 5 || !gradient || !weight || !indices || !offsets) return std::nullopt;
  const Spec& w = call.tensors[*weight];
  if (w.ndim() != 2 || w.numel() == 0) return std::nullopt;
  const Placement r = Replicate(), sum = Partial();
  Strategies strategies{{{{Shard(1), Shard(1), r, r, r}, {sum}},
                         {{r, Shard(0), r, r, r}, {sum}},
                         {{sum, r, r, r, r}, {sum}},
                         {{r, sum, r, r, r}, {sum}}},
                        {{call.tensors[*indices].shape().vec()}}};
  strategies.options[1].contiguous = true;
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& w = chosen.inputs[1];
    if (mesh_dims_of(w, 0).empty()) return local;
    local.compute = [w](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor gradient = arguments[0].toTensor(), weight = arguments[1].toTensor(),
                       indices = arguments[2].toTensor(), offsets = arguments[3].toTensor();
      const HeldIndices held(indices, offsets, w, arguments[6].toInt());
      const at::Tensor bags =
          at::index_select(bags_of(offsets, gradient.size(0), indices.numel()), 0, held.numbers);
      const at::Tensor values =
          at::sum(at::mul(at::index_select(weight, 0, held.rows), at::index_select(gradient, 0, bags)), 1);
      return Stack{at::zeros(indices.sizes(), weight.options()).index_copy_(0, held.numbers, values)};
    };
    return local;
  };
  return strategies;
}

}  // namespace

Table embedding_rules() {
  return {
      {{"embedding"}, {"xy,i->iy; rows cut: P(sum), zeros where a rank has no row", embedding}},
      {{"embedding_dense_backward"}, {"iy,i->.y", embedding_backward, {"num_weights", "scale_grad_by_freq"}}},
      {{"tessera::embedding_backward"},
       {"iy,i,xy->xy; rows cut: of those that a rank has",
        embedding_backward_of_table,
        {"scale_grad_by_freq"}}},
      {{"_embedding_bag", "_embedding_bag_forward_only"},
       {"columns cut; rows cut: P(sum) of the rows that a rank has, the largest by two reductions",
        embedding_bag,
        {"mode", "include_last_offset"}}},
      {{"_embedding_bag_backward", "_embedding_bag_dense_backward"},
       {"columns cut; linear in the gradient", embedding_bag_backward, {"mode", "num_weights", "sparse"}}},
      {{"tessera::embedding_bag_backward"},
       {"columns cut; rows cut: of those that a rank has; linear in the gradient",
        embedding_bag_backward_of_table}},
      {{"_embedding_bag_per_sample_weights_backward"},
       {"columns or rows cut: P(sum); linear in the gradient and the rows", sample_weights_backward}},
  };
}

}  // namespace tessera::ops
