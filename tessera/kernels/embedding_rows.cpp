#include <tessera/comm/collectives.h>
#include <tessera/kernels/embedding_rows.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/indices.h>

#include <limits>

#include <ATen/ATen.h>

namespace tessera::kernels {

namespace {

constexpr int64_t kRows = 0;  // the dim of the weight
constexpr int64_t kNoPadding = -1;

/// What the local rows get of the gradient of each index. `padding`: an index that counts for nothing.
at::Tensor row_gradient(const at::Tensor& gradient, const at::Tensor& indices, const Spec& weight,
                        int64_t padding, bool scales) {
  const int64_t rows = weight.local_shape()[kRows];
  // What belongs to other ranks, and padding, goes to one more row, which counts as padding.
  const LocalIndices local(indices, weight, kRows, rows);
  const at::Tensor which =
      padding < 0 ? local.indices : local.indices.masked_fill(at::eq(indices, padding), rows);
  return at::embedding_dense_backward(gradient, which, rows + 1, rows, scales).narrow(0, 0, rows);
}

/// Of the indices of all bags, those into local rows.
struct LocalBags {
  at::Tensor positions;  // of these indices, among all
  at::Tensor rows;       // what they point to, among the local rows
  at::Tensor offsets;    // where bags begin among these

  LocalBags(const at::Tensor& indices, const at::Tensor& global_offsets, const Spec& weight,
            int64_t padding) {
    const LocalIndices local(indices, weight, kRows, 0, {.is_index_error = false});
    at::Tensor is_local = at::logical_not(local.elsewhere);
    if (padding >= 0) is_local = at::logical_and(is_local, at::ne(indices, padding));
    positions = at::nonzero(is_local).squeeze(1);
    rows = at::index_select(local.indices, 0, positions);
    const at::Tensor before = at::constant_pad_nd(at::cumsum(is_local, 0, at::kLong), {1, 0});
    offsets = at::index_select(before, 0, global_offsets).to(global_offsets.scalar_type());
  }
};

/// Which bag each index is in. Those after the last bag, if that has an end, are in none: they count for it.
at::Tensor bags_of(const at::Tensor& offsets, int64_t bags, int64_t indices) {
  const at::Tensor positions = at::arange(indices, offsets.options());
  return at::searchsorted(offsets.narrow(0, 0, bags).contiguous(), positions, /*out_int32=*/false,
                          /*right=*/true)
      .sub_(1);
}

/// The largest of each bag over all ranks, and which row it is of: the first, if several are. Collective.
std::pair<at::Tensor, at::Tensor> largest_of_bags(const at::Tensor& weight, const at::Tensor& indices,
                                                  const LocalBags& local, int64_t bags, const Spec& spec) {
  const auto group = group_of(spec.mesh(), mesh_dims_of(spec, kRows));
  const int64_t columns = weight.size(1), count = indices.numel();
  const at::Tensor bag =
      bags_of(local.offsets, bags, local.rows.numel()).unsqueeze(1).expand({local.rows.numel(), columns});
  const at::Tensor candidates = at::index_select(weight, 0, local.rows);
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  const at::Tensor values = at::full({bags, columns}, kLowest, weight.options());
  values.scatter_reduce_(0, bag, candidates, "amax");
  comm::all_reduce(values, c10d::ReduceOp::MAX, group).wait();
  const at::Tensor is_it = at::eq(candidates, at::gather(values, 0, bag));
  const at::Tensor positions = local.positions.unsqueeze(1).expand({local.rows.numel(), columns});
  const at::Tensor first = at::full({bags, columns}, count, indices.options().dtype(at::kLong));
  first.scatter_reduce_(0, bag, at::where(is_it, positions, count), "amin");
  comm::all_reduce(first, c10d::ReduceOp::MIN, group).wait();
  const at::Tensor none = at::logical_and(at::eq(first, count), at::eq(values, kLowest));
  const at::Tensor rows = at::constant_pad_nd(indices, {0, 1}).index({first});
  return {values.masked_fill(none, 0), rows};
}

/// The sums of the local rows of each bag.
at::Tensor sums_of_bags(const at::Tensor& weight, const LocalBags& local, int64_t bags,
                        const c10::OperatorHandle& op, Stack stack) {
  if (local.rows.numel() == 0) return at::zeros({bags, weight.size(1)}, weight.options());
  const NamedArguments arguments(op, stack);
  arguments["indices"] = local.rows.to(arguments.tensor("indices").scalar_type());
  arguments["offsets"] = local.offsets;
  arguments["mode"] = static_cast<int64_t>(kSum);
  if (const at::Tensor weights = arguments.tensor("per_sample_weights"); weights.defined())
    arguments["per_sample_weights"] = at::index_select(weights, 0, local.positions);
  arguments["padding_idx"] = kNoPadding;
  return call_operator(op, std::move(stack))[0].toTensor();
}

}  // namespace

Stack embedding_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor rows = arguments.tensor("weight");
  const LocalIndices local(arguments.tensor("indices"), weight, kRows, 0);
  if (rows.size(0) == 0) {
    auto shape = local.indices.sizes().vec();
    shape.push_back(rows.size(1));
    return {at::zeros(shape, rows.options())};
  }
  arguments["indices"] = local.indices;
  at::Tensor found = call_operator(op, std::move(stack))[0].toTensor();
  return {found.masked_fill_(local.elsewhere.unsqueeze(-1), 0)};
}

Stack gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  return {row_gradient(arguments.tensor("grad"), arguments.tensor("indices"), weight,
                       arguments["padding_idx"].toInt(), arguments["scale_grad_by_freq"].toBool())};
}

Stack bags_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor rows = arguments.tensor("weight"), indices = arguments.tensor("indices"),
                   offsets = arguments.tensor("offsets");
  const int64_t mode = arguments["mode"].toInt();
  const int64_t bags = offsets.size(0) - arguments["include_last_offset"].toBool();
  const LocalBags local(indices, offsets, weight, arguments["padding_idx"].toInt());
  // The results that describe the bags do not depend on the rows: they are those of a weight of one column.
  Stack about = stack;
  NamedArguments(op, about)["weight"] = at::zeros({1, 1}, rows.options()).expand({weight.shape()[kRows], 1});
  Stack results = call_operator(op, std::move(about));
  if (mode == kMax) {
    std::tie(results[0], results[3]) = largest_of_bags(rows, indices, local, bags, weight);
    return results;
  }
  const at::Tensor sums = sums_of_bags(rows, local, bags, op, std::move(stack));
  if (mode == kMean) sums.div_(results[2].toTensor().clamp_min(1).unsqueeze(1));
  results[0] = sums;
  return results;
}

Stack bag_gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor gradient = arguments.tensor("grad"), indices = arguments.tensor("indices");
  const at::Tensor bags = bags_of(arguments.tensor("offsets"), gradient.size(0), indices.numel());
  at::Tensor each = at::index_select(gradient, 0, bags);
  if (const at::Tensor weights = arguments.tensor("per_sample_weights"); weights.defined())
    each.mul_(weights.unsqueeze(1));
  if (arguments["mode"].toInt() == kMean)
    each.div_(at::index_select(arguments.tensor("bag_size"), 0, bags).clamp_min(1).unsqueeze(1));
  return {row_gradient(each, indices, weight, arguments["padding_idx"].toInt(),
                       arguments["scale_grad_by_freq"].toBool())};
}

Stack sample_weight_gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor gradient = arguments.tensor("grad"), rows = arguments.tensor("weight"),
                   indices = arguments.tensor("indices"), offsets = arguments.tensor("offsets");
  const LocalBags local(indices, offsets, weight, arguments["padding_idx"].toInt());
  const at::Tensor bags =
      at::index_select(bags_of(offsets, gradient.size(0), indices.numel()), 0, local.positions);
  const at::Tensor values =
      at::sum(at::mul(at::index_select(rows, 0, local.rows), at::index_select(gradient, 0, bags)), 1);
  return {at::zeros(indices.sizes(), rows.options()).index_copy_(0, local.positions, values)};
}

}  // namespace tessera::kernels
