#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/redistribute/memory.h>
#include <tessera/rules/exchange.h>
#include <tessera/rules/family.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

namespace tessera::rules {

namespace {

/// Which dims a call reduces, and what is left.
struct Reduction {
  Shape dims;  // ascending
  bool keep = false;
  Shape shape;      // of the result
  Letters letters;  // likewise

  /// Nothing for lists of dims that are given and empty: what these mean differs.
  static std::optional<Reduction> of(const Call& call, bool empty_is_all = false) {
    const Spec& spec = call.tensors[0];
    Reduction result;
    Shape dims;
    if (call.position("dim")) {
      if (call.has("dim")) {
        dims = call.integers("dim");
        if (dims.empty() && !empty_is_all) return std::nullopt;
      }
      result.keep = call.position("keepdim") && call.flag("keepdim");
    }
    dims = wrapped(dims, spec.ndim());
    const Letters all = identity(spec.ndim());
    for (int64_t d = 0; d < spec.ndim(); ++d) {
      const bool reduced = contains(dims, d);
      if (reduced) result.dims.push_back(d);
      if (reduced && !result.keep) continue;
      result.letters.push_back(reduced ? kWhole : all[d]);
      result.shape.push_back(reduced ? 1 : spec.shape()[d]);
    }
    return result;
  }

  bool empty(const Spec& spec) const {
    return std::any_of(dims.begin(), dims.end(), [&](int64_t d) { return spec.shape()[d] == 0; });
  }
  /// Along dims that are not cut.
  int64_t count(const Spec& spec) const {
    int64_t product = 1;
    for (const int64_t d : dims) product *= spec.shape()[d];
    return product;
  }
};

Proposal reduced(const Call& call, const Reduction& reduction, std::optional<Placement> contracted,
                 bool linear = false, std::vector<ReduceOp> kept = {}, size_t results = 1) {
  Einsum einsum;
  einsum.inputs = {identity(call.tensors[0].ndim())};
  einsum.outputs.assign(results, reduction.letters);
  einsum.contracted = contracted;
  if (linear) einsum.linear = linear_tensors(call, {{0}});
  einsum.kept = std::move(kept);
  return {rows(einsum), std::vector<Result>(results, Result{reduction.shape})};
}

Rule sum_rule() {
  return {"reduced dims cut: P(sum)",
          [](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call, true);
            return reduced(call, *reduction, Partial(), converts_parts(call));
          },
          {"dim", "keepdim", "dtype"}};
}

/// Sums of what has no meaning but its number.
Rule count_rule() {
  return {"reduced dims cut: P(sum)",
          [](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call);
            if (!reduction) return std::nullopt;
            return reduced(call, *reduction, Partial());
          },
          {"dim", "keepdim"}};
}

/// A rank's mean counts as much as what it holds.
Rule mean_rule() {
  return {"reduced dims cut: P(sum) of local means, each by its share",
          [](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call, true);
            if (reduction->empty(call.tensors[0])) return std::nullopt;
            Proposal proposal = reduced(call, *reduction, Partial(), true);
            proposal.localize = [dims = reduction->dims](const Chosen& chosen) {
              Local local;
              if (!is_cut(chosen.inputs[0], dims)) return local;
              const double share = local_share(chosen.inputs[0], dims);
              local.compute = [share](const c10::OperatorHandle& op, Stack arguments) {
                Stack results = call_operator(op, std::move(arguments));
                at::Tensor mean = results[0].toTensor();
                return share == 0 ? Stack{mean.zero_()} : Stack{mean.mul_(share)};
              };
              return local;
            };
            return proposal;
          },
          {"dim", "keepdim"}};
}

/// Ranks that hold nothing of what is reduced have the neutral element.
std::function<Local(const Chosen&)> neutral_if_empty(Shape dims, std::vector<double> values,
                                                     bool real = false) {
  return [=](const Chosen& chosen) {
    Local local;
    const Spec& input = chosen.inputs[0];
    if (!is_cut(input, dims)) return local;
    if (std::none_of(dims.begin(), dims.end(), [&](int64_t d) { return input.local_shape()[d] == 0; }))
      return local;
    local.compute = [=, output = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      Stack results;
      for (const double value : values) {
        const auto dtype = real ? c10::toRealValueType(x.scalar_type()) : x.scalar_type();
        at::Tensor filled = new_memory(output.local_shape(), x.options().dtype(dtype));
        if (std::isinf(value) && !at::isFloatingType(dtype)) {
          const auto op = value > 0 ? ReduceOp::min : ReduceOp::max;
          filled.fill_(*neutral(op, dtype));
        } else {
          filled.fill_(value);
        }
        results.emplace_back(filled);
      }
      return results;
    };
    return local;
  };
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Rule extreme_rule(ReduceOp op) {
  return {op == ReduceOp::max ? "reduced dims cut: P(max)" : "reduced dims cut: P(min)",
          [op](const Call& call) -> std::optional<Proposal> {
            const Spec& spec = call.tensors[0];
            const auto reduction = Reduction::of(call, true);
            if (reduction->empty(spec) || spec.dtype() == c10::ScalarType::Bool || call.tensors.size() != 1)
              return std::nullopt;
            Proposal proposal = reduced(call, *reduction, Partial(op), false, {op});
            proposal.localize =
                neutral_if_empty(reduction->dims, {op == ReduceOp::max ? -kInfinity : kInfinity});
            return proposal;
          },
          {"dim", "keepdim"}};
}

std::optional<Proposal> both_extremes(const Call& call) {
  const Spec& spec = call.tensors[0];
  const auto reduction = Reduction::of(call);
  if (!reduction || reduction->empty(spec) || spec.dtype() == c10::ScalarType::Bool) return std::nullopt;
  Proposal proposal = reduced(call, *reduction, Partial(), false, {}, 2);
  for (Row& row : proposal.rows) {
    if (row.outputs[0].is_partial()) row.outputs = {Partial(ReduceOp::min), Partial(ReduceOp::max)};
  }
  proposal.localize = neutral_if_empty(reduction->dims, {kInfinity, -kInfinity});
  return proposal;
}

Rule logical_rule(ReduceOp op) {
  return {op == ReduceOp::any ? "reduced dims cut: P(any)" : "reduced dims cut: P(all)",
          [op](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call);
            // Of bytes the result is a byte.
            if (!reduction || call.tensors[0].dtype() == c10::ScalarType::Byte) return std::nullopt;
            return reduced(call, *reduction, Partial(op));
          },
          {"dim", "keepdim"}};
}

Rule product_rule() {
  return {"reduced dims cut: P(product)",
          [](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call);
            if (!reduction) return std::nullopt;
            const bool keeps = converts_parts(call);
            return reduced(call, *reduction, Partial(ReduceOp::product), false,
                           keeps ? std::vector{ReduceOp::product} : std::vector<ReduceOp>{});
          },
          {"dim", "keepdim", "dtype"}};
}

}  // namespace

Rule norm_rule(const std::string& order) {
  return {"reduced dims cut: P(norm p); P(max), P(min), P(sum) for infinite and zero p",
          [order](const Call& call) -> std::optional<Proposal> {
            const Spec& spec = call.tensors[0];
            const auto reduction = Reduction::of(call);
            if (!reduction || reduction->empty(spec)) return std::nullopt;
            const double p = call.has(order) ? call.value(order).toScalar().toDouble() : 2.0;
            if (std::isnan(p)) return std::nullopt;
            const Placement contracted = p == kInfinity    ? Partial(ReduceOp::max)
                                         : p == -kInfinity ? Partial(ReduceOp::min)
                                         : p == 0          ? Partial(ReduceOp::sum)
                                                           : NormPartial(p);
            const bool converts = call.position("dtype") && call.has("dtype");
            if (converts) return reduced(call, *reduction, std::nullopt);
            Proposal proposal = reduced(call, *reduction, contracted);
            // A norm of norms.
            if (contracted.is_partial(ReduceOp::norm)) proposal.rows.push_back({{contracted}, {contracted}});
            if (std::isinf(p) || p < 0) {
              proposal.localize = neutral_if_empty(reduction->dims, {p > 0 ? 0.0 : kInfinity}, /*real=*/true);
            }
            return proposal;
          },
          {order, "dim", "keepdim", "dtype"}};
}

namespace {

/// Values and where they are, both without the dim, which must be whole.
Rule whole_dim() {
  return {"the dim whole",
          [](const Call& call) -> std::optional<Proposal> {
            const auto reduction = Reduction::of(call);
            if (!reduction) return std::nullopt;
            return reduced(call, *reduction, std::nullopt, false, {}, 2);
          },
          {"dim", "keepdim"}};
}

/// By the mean, and the mean of squared differences, where what is reduced is cut.
Rule variance_rule(bool root, bool with_mean) {
  return {"reduced dims cut: by sums of squared differences from the mean",
          [=](const Call& call) -> std::optional<Proposal> {
            const Spec& spec = call.tensors[0];
            const auto reduction = Reduction::of(call, true);
            if (!is_cut(spec, reduction->dims))
              return reduced(call, *reduction, std::nullopt, false, {}, with_mean ? 2 : 1);
            if (!at::isFloatingType(spec.dtype()) || reduction->empty(spec)) return std::nullopt;
            const auto count = static_cast<double>(reduction->count(spec));
            const double correction =
                call.has("correction") ? call.value("correction").toScalar().toDouble() : 1.0;
            Proposal proposal;
            proposal.decompose = [=, dims = reduction->dims, keep = reduction->keep](
                                     const c10::OperatorHandle&, Stack arguments) {
              const at::Tensor x = arguments[0].toTensor();
              const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
              const at::Tensor values = x.scalar_type() == wide ? x : x.to(wide);
              const at::Tensor mean = at::mean(values, dims, /*keepdim=*/true);
              const at::Tensor difference = at::sub(values, mean);
              at::Tensor result = at::div(at::sum(at::mul(difference, difference), dims, keep),
                                          std::max(0.0, count - correction));
              if (root) result = at::sqrt(result);
              Stack results{result.to(x.scalar_type())};
              if (with_mean) {
                results.emplace_back(at::mean(values, dims, keep).to(x.scalar_type()));
              }
              return results;
            };
            return proposal;
          },
          {"dim", "keepdim", "correction"}};
}

std::optional<Proposal> logsumexp(const Call& call) {
  const Spec& spec = call.tensors[0];
  const auto reduction = Reduction::of(call);
  if (!reduction) return std::nullopt;
  if (!is_cut(spec, reduction->dims)) return reduced(call, *reduction, std::nullopt);
  if (!at::isFloatingType(spec.dtype()) || reduction->empty(spec)) return std::nullopt;
  Proposal proposal;
  proposal.decompose = [dims = reduction->dims, keep = reduction->keep](const c10::OperatorHandle&,
                                                                        Stack arguments) {
    const at::Tensor x = arguments[0].toTensor();
    // Infinite values stay so without being subtracted from one another.
    const at::Tensor highest = at::nan_to_num(at::amax(x, dims, /*keepdim=*/true), 0, 0, 0);
    at::Tensor result =
        at::add(at::log(at::sum(at::exp(at::sub(x, highest)), dims, /*keepdim=*/true)), highest);
    if (!keep) result = at::squeeze(result, dims);
    return Stack{result};
  };
  return proposal;
}

/// How many elements are in each bin; between which bounds, if that is not said, all have to know.
std::optional<Proposal> histogram(const Call& call) {
  const Spec& spec = call.tensors[0];
  if (call.tensors.size() != 1 || spec.numel() == 0) return std::nullopt;
  const double low = call.value("min").toScalar().toDouble(), high = call.value("max").toScalar().toDouble();
  if (low == high && spec.is_sharded()) {
    Proposal proposal;
    proposal.decompose = [](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      double least = x.min().item<double>(), most = x.max().item<double>();
      if (least == most) {
        least -= 1;
        most += 1;
      }
      return Stack{at::histc(x, arguments[1].toInt(), least, most)};
    };
    return proposal;
  }
  Einsum einsum{.inputs = {identity(spec.ndim())}, .outputs = {{kWhole}}};
  if (low == high) einsum.contracted = std::nullopt;
  Proposal proposal{rows(einsum), {{{call.integer("bins")}}}};
  proposal.localize = [bins = call.integer("bins")](const Chosen& chosen) {
    Local local;
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    local.compute = [bins](const c10::OperatorHandle&, Stack arguments) {
      return Stack{at::zeros({bins}, arguments[0].toTensor().options())};
    };
    return local;
  };
  return proposal;
}

size_t position_of(const c10::OperatorHandle& op, const char* name) {
  return *op.schema().argumentIndexWithName(name);
}

/// The least and the greatest of all that the ranks along some mesh dims hold, column by column. Collective.
std::vector<double> extremes(const at::Tensor& columns, const Spec& spec,
                             const std::vector<int64_t>& mesh_dims) {
  at::Tensor found = at::full({2, columns.size(1)}, -kInfinity, columns.options());
  if (columns.size(0) > 0) found = at::stack({at::amin(columns, 0).neg_(), at::amax(columns, 0)});
  // What is no number is told to all ranks as what is not finite.
  found.nan_to_num_(kInfinity, kInfinity, -kInfinity);
  comm::all_reduce(found, c10d::ReduceOp::MAX, group_of(spec.mesh(), mesh_dims)).wait();
  const at::Tensor known = found.to(at::kCPU, at::kDouble);
  std::vector<double> range;
  for (int64_t i = 0; i < known.size(1); ++i) {
    range.push_back(-known[0][i].item<double>());
    range.push_back(known[1][i].item<double>());
  }
  return range;
}

/// Counts over how many there are in all, and over the bins' lengths.
Stack histogram_density(const c10::OperatorHandle& op, Stack arguments) {
  arguments[position_of(op, "density")] = false;
  std::vector<at::Tensor> edges;
  if (arguments[1].isTensorList()) edges = arguments[1].toTensorVector();
  if (arguments[1].isIntList()) {
    const auto range = arguments[position_of(op, "range")].toOptional<std::vector<double>>();
    edges = at::_histogramdd_bin_edges(arguments[0].toTensor(), arguments[1].toIntVector(),
                                       range ? std::optional<c10::ArrayRef<double>>(*range) : std::nullopt);
  }
  Stack results = call_operator(op, std::move(arguments));
  if (results.size() == 2) edges = {results[1].toTensor()};
  // Reduced here once, not at each use.
  at::Tensor counts = at::add(results[0].toTensor(), 0);
  counts = at::div(counts, at::sum(counts));
  for (size_t dim = 0; dim < edges.size(); ++dim) {
    Shape shape(counts.dim(), 1);
    shape[dim] = -1;
    counts = at::div(counts, at::diff(edges[dim]).reshape(shape));
  }
  results[0] = counts;
  return results;
}

/// How many elements are in each bin, or of rows, which have an element in each dim of the bins; and where
/// the bins end.
enum class Histogram { elements, rows, edges_of_rows };

Rule histogram_rule(Histogram kind, std::vector<std::string> reads) {
  Rule rule{kind == Histogram::edges_of_rows
                ? "rows cut; between bounds that are given, or found by one reduction"
                : "cut: P(sum), between bounds that are given, or found by one reduction",
            [kind](const Call& call) -> std::optional<Proposal> {
              const auto self = call.tensor("self"), weight = call.tensor("weight");
              if (!self) return std::nullopt;
              const Spec& x = call.tensors[*self];
              const bool of_rows = kind != Histogram::elements, counts = kind != Histogram::edges_of_rows;
              if (x.numel() == 0 || (of_rows && x.ndim() < 2)) return std::nullopt;
              Proposal proposal;
              const bool is_cut = x.is_sharded() || (weight && call.tensors[*weight].is_sharded());
              if (counts && call.flag("density")) {
                if (is_cut) proposal.decompose = histogram_density;
                return proposal;
              }
              Placements outputs{counts ? Partial() : Replicate()};
              if (call.schema->returns().size() == 2) outputs.push_back(Replicate());
              for (int64_t dim = 0; dim < x.ndim() - (of_rows ? 1 : 0); ++dim) {
                Row row{Placements(call.tensors.size(), Replicate()), outputs};
                row.inputs[*self] = Shard(dim);
                if (weight) row.inputs[*weight] = Shard(dim);
                proposal.rows.push_back(std::move(row));
              }
              const auto range = call.position("range");
              if (!range || call.has("range")) return proposal;
              proposal.localize = [=, number = *self](const Chosen& chosen) {
                Local local;
                const Spec& x = chosen.inputs[number];
                const std::vector<int64_t> mesh_dims = mesh_dims_of(x);
                if (mesh_dims.empty()) return local;
                local.communicates = true;
                local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
                  const at::Tensor held = arguments[0].toTensor();
                  arguments[*range] = extremes(held.reshape({-1, of_rows ? held.size(-1) : 1}), x, mesh_dims);
                  return call_operator(op, std::move(arguments));
                };
                return local;
              };
              return proposal;
            },
            std::move(reads)};
  rule.may_refuse_dtypes = [](Dtypes dtypes) {
    return not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]);
  };
  return rule;
}

/// How often each number occurs; how many there are, all have to know.
std::optional<Proposal> bincount(const Call& call) {
  const Spec& spec = call.tensors[0];
  if (!call.tensor("self") || spec.ndim() != 1 || spec.numel() == 0) return std::nullopt;
  if (call.tensors.size() == 2 && call.tensors[1].shape() != spec.shape()) return std::nullopt;
  Proposal proposal{{{Placements(call.tensors.size(), Shard(0)), {Partial()}}}, {{{kLocal}}}};
  proposal.localize = [](const Chosen& chosen) {
    Local local;
    const Spec& spec = chosen.inputs[0];
    const std::vector<int64_t> mesh_dims = mesh_dims_of(spec, 0);
    if (mesh_dims.empty()) return local;
    local.communicates = true;
    local.compute = [spec, mesh_dims](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      // The least too, so that all find a negative one, not only its rank.
      const at::Tensor bounds =
          at::full({2}, std::numeric_limits<int64_t>::min(), x.options().dtype(at::kLong));
      if (x.numel() > 0) bounds.copy_(at::stack({x.max().to(at::kLong), x.min().to(at::kLong).neg()}));
      comm::all_reduce(bounds, c10d::ReduceOp::MAX, group_of(spec.mesh(), mesh_dims)).wait();
      TESSERA_CHECK(bounds[1].item<int64_t>() <= 0, "bincount: expected numbers that are not negative, got ",
                    -bounds[1].item<int64_t>(), ".");
      arguments[2] = std::max(arguments[2].toInt(), bounds[0].item<int64_t>() + 1);
      if (x.numel() == 0 && arguments[1].isTensor()) {
        // libtorch forgets of what type weights are if there are none.
        const auto dtype = arguments[1].toTensor().scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
        return Stack{at::zeros({arguments[2].toInt()}, x.options().dtype(dtype))};
      }
      return call_operator(op, std::move(arguments));
    };
    return local;
  };
  return proposal;
}

/// Of what a rank holds another diagonal is summed.
std::optional<Proposal> trace(const Call& call) {
  if (call.tensors[0].ndim() != 2) return std::nullopt;
  Einsum einsum{.inputs = {letters("ab")}, .outputs = {{}}, .linear = {{0}}};
  einsum.ranges = true;
  Proposal proposal{rows(einsum), {{Shape()}}};
  proposal.localize = [](const Chosen& chosen) {
    Local local;
    if (!chosen.inputs[0].is_sharded()) return local;
    const auto offset = chosen.inputs[0].global_offset();
    local.compute = [diagonal = offset[0] - offset[1]](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      const bool none = x.numel() == 0 || diagonal <= -x.size(0) || diagonal >= x.size(1);
      return Stack{at::sum(none ? x.flatten().narrow(0, 0, 0) : at::diagonal(x, diagonal))};
    };
    return local;
  };
  return proposal;
}

/// Segments of a dim, which is whole; how long they are may differ along the dims before it.
std::optional<Proposal> segments(const Call& call) {
  const auto data = call.tensor("data"), offsets = call.tensor("offsets");
  if (!data || call.tensor("indices")) return std::nullopt;
  const Spec& x = call.tensors[*data];
  if (x.ndim() == 0 || x.numel() == 0 || !at::isFloatingType(x.dtype())) return std::nullopt;
  const int64_t axis = wrapped(call.integer("axis"), x.ndim());
  Letters all = identity(x.ndim());
  all[axis] = kWhole;
  const bool backward = call.tensor("grad").has_value();
  Einsum einsum{.inputs = {}, .outputs = {all}};
  Shape shape = x.shape().vec();
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const std::string& name = call.schema->arguments()[call.positions[i]].name();
    const bool tells = name == "lengths" || name == "offsets";
    einsum.inputs.emplace_back(all.begin(), tells ? all.begin() + axis + 1 : all.end());
    const Spec& spec = call.tensors[i];
    if (spec.ndim() != static_cast<int64_t>(einsum.inputs.back().size())) return std::nullopt;
    if (spec.shape().slice(0, axis) != x.shape().slice(0, axis)) return std::nullopt;
    if (tells && !backward) shape[axis] = spec.shape()[axis] - (offsets ? 1 : 0);
  }
  if (backward) einsum.linear = linear_tensors(call, {{0}});
  Proposal proposal{rows(einsum), {{shape}}};
  proposal.localize = [](const Chosen& chosen) {
    Local local;
    const Spec& result = chosen.outputs[0];
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    local.compute = [result](const c10::OperatorHandle&, Stack arguments) {
      return Stack{at::zeros(result.local_shape(), arguments[0].toTensor().options())};
    };
    return local;
  };
  return proposal;
}

}  // namespace

Table reduce_rules() {
  Table all = tried({
      {{"sum", "sum.dim_IntList"}, sum_rule()},
      {{"nansum", "count_nonzero", "count_nonzero.dim_IntList"}, count_rule()},
      {{"mean", "mean.dim"}, mean_rule()},
      {{"prod", "prod.dim_int"}, product_rule()},
      {{"amax", "max"}, extreme_rule(ReduceOp::max)},
      {{"amin", "min"}, extreme_rule(ReduceOp::min)},
      {{"aminmax"}, {"reduced dims cut: P(min) and P(max)", both_extremes, {"dim", "keepdim"}}},
      {{"any", "any.dim", "any.dims"}, logical_rule(ReduceOp::any)},
      {{"all", "all.dim", "all.dims"}, logical_rule(ReduceOp::all)},
      {{"linalg_vector_norm"}, norm_rule("ord")},
      {{"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype"},
       norm_rule("p")},
      {{"var.correction"}, variance_rule(false, false)},
      {{"std.correction"}, variance_rule(true, false)},
      {{"var_mean.correction"}, variance_rule(false, true)},
      {{"std_mean.correction"}, variance_rule(true, true)},
      {{"logsumexp"}, {"reduced dims cut: by amax, exp and sum", logsumexp, {"dim", "keepdim"}}},
      {{"mode", "median.dim", "nanmedian.dim", "kthvalue"}, whole_dim()},
      {{"trace"}, {"cut: P(sum), with the diagonal of what a rank holds", trace}},
  });
  const Table counts = tried({
      {{"histc"},
       {"cut: P(sum), between bounds that are given, or found by min and max",
        histogram,
        {"bins", "min", "max"}}},
      {{"histogram.bins_tensor"}, histogram_rule(Histogram::elements, {"density"})},
      {{"histogram.bin_ct"}, histogram_rule(Histogram::elements, {"range", "density"})},
      {{"_histogramdd_bin_edges"}, histogram_rule(Histogram::edges_of_rows, {"range"})},
      {{"_histogramdd_from_bin_cts"}, histogram_rule(Histogram::rows, {"range", "density"})},
      {{"_histogramdd_from_bin_tensors"}, histogram_rule(Histogram::rows, {"density"})},
      {{"bincount"}, {"cut: P(sum); how many there are by one reduction", bincount}},
  });
  all.insert(all.end(), counts.begin(), counts.end());
  Rule segmented{"the segmented dim whole", segments, {"axis"}};
  segmented.checks_values_of = {"lengths", "offsets"};
  all.push_back({{"segment_reduce", "_segment_reduce_backward"}, std::move(segmented)});
  return all;
}

}  // namespace tessera::rules
