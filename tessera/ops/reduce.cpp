#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>

namespace tessera::ops {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

size_t position_of(const c10::OperatorHandle& op, const char* name) {
  return *op.schema().argumentIndexWithName(name);
}

}  // namespace

Rule norm_rule(const std::string& order) {
  return {"`dim` reduced: P(norm p); P(max), P(min), P(sum) for infinite and zero p",
          [order](const OpCall& call) -> std::optional<Strategies> {
            const Spec& spec = call.tensors[0];
            const auto reduction = ReducedDims::of(call, /*empty_is_all=*/false);
            if (!reduction || reduction->empty(spec)) return std::nullopt;
            const double p = call.has(order) ? call.value(order).toScalar().toDouble() : 2.0;
            if (std::isnan(p)) return std::nullopt;
            const Placement contracted = p == kInfinity    ? Partial(ReduceOp::max)
                                         : p == -kInfinity ? Partial(ReduceOp::min)
                                         : p == 0          ? Partial(ReduceOp::sum)
                                                           : NormPartial(p);
            const bool converts = call.position("dtype") && call.has("dtype");
            Einsum einsum{
                .inputs = {identity(spec.ndim())}, .outputs = {reduction->letters}, .contracted = contracted};
            if (converts) einsum.contracted = std::nullopt;
            Strategies strategies{strategies_of(einsum), {{reduction->shape}}};
            if (converts) return strategies;
            // A norm of norms.
            if (contracted.is_partial(ReduceOp::norm))
              strategies.options.push_back({{contracted}, {contracted}});
            if (std::isinf(p) || p < 0) {
              strategies.localize =
                  neutral_if_empty(reduction->dims, {p > 0 ? 0.0 : kInfinity}, /*real=*/true);
            }
            return strategies;
          },
          {order, "dim", "keepdim", "dtype"}};
}

namespace {

/// The dims that a call of a decomposition reduces, and whether they stay with size 1.
struct Reduced {
  Shape dims;
  bool keep;

  Reduced(const c10::OperatorHandle& op, const Stack& arguments) {
    const auto& dim = arguments[position_of(op, "dim")];
    const int64_t ndim = arguments[0].toTensor().dim();
    dims = wrapped(dim.isNone() ? Shape() : dim.isInt() ? Shape{dim.toInt()} : dim.toIntVector(), ndim);
    keep = arguments[position_of(op, "keepdim")].toBool();
  }
};

enum class Variance { variance, deviation };

/// By the mean, and the mean of squared differences.
template <Variance kind, bool kWithMean>
Stack variance(const c10::OperatorHandle& op, Stack arguments) {
  const Reduced reduced(op, arguments);
  const at::Tensor x = arguments[0].toTensor();
  const c10::IValue& given = arguments[position_of(op, "correction")];
  const double correction = given.isNone() ? 1 : given.toScalar().toDouble();
  double count = 1;
  for (const int64_t dim : reduced.dims) count *= static_cast<double>(x.size(dim));
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor values = x.scalar_type() == wide ? x : x.to(wide);
  const at::Tensor difference = at::sub(values, at::mean(values, reduced.dims, /*keepdim=*/true));
  at::Tensor result = at::div(at::sum(at::mul(difference, difference), reduced.dims, reduced.keep),
                              std::max(0.0, count - correction));
  if (kind == Variance::deviation) result = at::sqrt(result);
  Stack results{result.to(x.scalar_type())};
  if (kWithMean) results.emplace_back(at::mean(values, reduced.dims, reduced.keep).to(x.scalar_type()));
  return results;
}

Reduction variance_form(const Function& compute, size_t results) {
  return {
      .results = results, .empty_is_all = true, .if_sharded = Decomposition{{"mean", "sub", "sum"}, compute}};
}

Stack logsumexp(const c10::OperatorHandle& op, Stack arguments) {
  const Reduced reduced(op, arguments);
  const at::Tensor x = arguments[0].toTensor();
  // Infinite values stay so without being subtracted from one another.
  const at::Tensor highest = at::nan_to_num(at::amax(x, reduced.dims, /*keepdim=*/true), 0, 0, 0);
  at::Tensor result =
      at::add(at::log(at::sum(at::exp(at::sub(x, highest)), reduced.dims, /*keepdim=*/true)), highest);
  if (!reduced.keep) result = at::squeeze(result, reduced.dims);
  return {result};
}

/// How many elements are in each bin; between which bounds, if that is not said, all have to know.
std::optional<Strategies> histogram(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (call.tensors.size() != 1 || spec.numel() == 0) return std::nullopt;
  const double low = call.value("min").toScalar().toDouble(), high = call.value("max").toScalar().toDouble();
  if (low == high && spec.is_sharded()) {
    Strategies strategies;
    strategies.decompose = [](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      double least = x.min().item<double>(), most = x.max().item<double>();
      if (least == most) {
        least -= 1;
        most += 1;
      }
      return Stack{at::histc(x, arguments[1].toInt(), least, most)};
    };
    return strategies;
  }
  Einsum einsum{.inputs = {identity(spec.ndim())}, .outputs = {{kUnsharded}}};
  if (low == high) einsum.contracted = std::nullopt;
  Strategies strategies{strategies_of(einsum), {{{call.integer("bins")}}}};
  strategies.localize = [bins = call.integer("bins")](const ChosenSpecs& chosen) {
    LocalCall local;
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    local.compute = [bins](const c10::OperatorHandle&, Stack arguments) {
      return Stack{at::zeros({bins}, arguments[0].toTensor().options())};
    };
    return local;
  };
  return strategies;
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
            [kind](const OpCall& call) -> std::optional<Strategies> {
              const auto self = call.tensor("self"), weight = call.tensor("weight");
              if (!self) return std::nullopt;
              const Spec& x = call.tensors[*self];
              const bool of_rows = kind != Histogram::elements, counts = kind != Histogram::edges_of_rows;
              if (x.numel() == 0 || (of_rows && x.ndim() < 2)) return std::nullopt;
              Strategies strategies;
              const bool is_sharded_on = x.is_sharded() || (weight && call.tensors[*weight].is_sharded());
              if (counts && call.flag("density")) {
                if (is_sharded_on) strategies.decompose = histogram_density;
                return strategies;
              }
              Placements outputs{counts ? Partial() : Replicate()};
              if (call.schema->returns().size() == 2) outputs.push_back(Replicate());
              for (int64_t dim = 0; dim < x.ndim() - (of_rows ? 1 : 0); ++dim) {
                Strategy strategy{Placements(call.tensors.size(), Replicate()), outputs};
                strategy.inputs[*self] = Shard(dim);
                if (weight) strategy.inputs[*weight] = Shard(dim);
                strategies.options.push_back(std::move(strategy));
              }
              const auto range = call.position("range");
              if (!range || call.has("range")) return strategies;
              strategies.localize = [=, number = *self](const ChosenSpecs& chosen) {
                LocalCall local;
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
              return strategies;
            },
            std::move(reads)};
  rule.may_refuse_dtypes = [](Dtypes dtypes) {
    return not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]);
  };
  return rule;
}

/// How often each number occurs; how many there are, all have to know.
std::optional<Strategies> bincount(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (!call.tensor("self") || spec.ndim() != 1 || spec.numel() == 0) return std::nullopt;
  if (call.tensors.size() == 2 && call.tensors[1].shape() != spec.shape()) return std::nullopt;
  Strategies strategies{{{Placements(call.tensors.size(), Shard(0)), {Partial()}}}, {{{kLocal}}}};
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
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
  return strategies;
}

/// Of what a rank holds another diagonal is summed.
std::optional<Strategies> trace(const OpCall& call) {
  if (call.tensors[0].ndim() != 2) return std::nullopt;
  Einsum einsum{.inputs = {letters("ab")}, .outputs = {{}}, .linear = {{0}}};
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{Shape()}}};
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!chosen.inputs[0].is_sharded()) return local;
    const auto offset = chosen.inputs[0].global_offset();
    local.compute = [diagonal = offset[0] - offset[1]](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      const bool none = x.numel() == 0 || diagonal <= -x.size(0) || diagonal >= x.size(1);
      return Stack{at::sum(none ? x.flatten().narrow(0, 0, 0) : at::diagonal(x, diagonal))};
    };
    return local;
  };
  return strategies;
}

/// Segments of a dim, which is whole; how long they are may differ along the dims before it.
std::optional<Strategies> segments(const OpCall& call) {
  const auto data = call.tensor("data"), offsets = call.tensor("offsets");
  if (!data || call.tensor("indices")) return std::nullopt;
  const Spec& x = call.tensors[*data];
  if (x.ndim() == 0 || x.numel() == 0 || !at::isFloatingType(x.dtype())) return std::nullopt;
  const int64_t axis = wrapped(call.integer("axis"), x.ndim());
  Letters all = identity(x.ndim());
  all[axis] = kUnsharded;
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
  if (backward) einsum.linear = linear_tensors(call, {{first_argument(call)}});
  Strategies strategies{strategies_of(einsum), {{shape}}};
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& result = chosen.outputs[0];
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    local.compute = [result](const c10::OperatorHandle&, Stack arguments) {
      return Stack{at::zeros(result.local_shape(), arguments[0].toTensor().options())};
    };
    return local;
  };
  return strategies;
}

}  // namespace

Table reduce_rules() {
  const Placement max = Partial(ReduceOp::max), min = Partial(ReduceOp::min);
  Table all = tried({
      {{"sum", "sum.dim_IntList"}, Reduction{.partial = {Partial()}, .linear = true, .empty_is_all = true}},
      {{"nansum", "count_nonzero", "count_nonzero.dim_IntList"}, Reduction{.partial = {Partial()}}},
      {{"mean", "mean.dim"},
       Reduction{.partial = {Partial()}, .linear = true, .empty_is_all = true, .by_share = true}},
      {{"prod", "prod.dim_int"},
       Reduction{.partial = {Partial(ReduceOp::product)}, .keeps = {ReduceOp::product}}},
      {{"amax", "max"},
       Reduction{.partial = {max},
                 .keeps = {ReduceOp::max},
                 .empty_is_all = true,
                 .except = {at::kBool},
                 .neutral = {-kInfinity}}},
      {{"amin", "min"},
       Reduction{.partial = {min},
                 .keeps = {ReduceOp::min},
                 .empty_is_all = true,
                 .except = {at::kBool},
                 .neutral = {kInfinity}}},
      {{"aminmax"},
       Reduction{.partial = {min, max}, .except = {at::kBool}, .neutral = {kInfinity, -kInfinity}}},
      // Of bytes the result is a byte.
      {{"any", "any.dim", "any.dims"}, Reduction{.partial = {Partial(ReduceOp::any)}, .except = {at::kByte}}},
      {{"all", "all.dim", "all.dims"}, Reduction{.partial = {Partial(ReduceOp::all)}, .except = {at::kByte}}},
      {{"linalg_vector_norm"}, norm_rule("ord")},
      {{"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype"},
       norm_rule("p")},
      {{"var.correction"}, variance_form(variance<Variance::variance, false>, 1)},
      {{"std.correction"}, variance_form(variance<Variance::deviation, false>, 1)},
      {{"var_mean.correction"}, variance_form(variance<Variance::variance, true>, 2)},
      {{"std_mean.correction"}, variance_form(variance<Variance::deviation, true>, 2)},
      {{"logsumexp"}, Reduction{.if_sharded = Decomposition{{"amax", "exp", "sum", "log"}, logsumexp}}},
      {{"mode", "median.dim", "nanmedian.dim", "kthvalue"}, Reduction{.results = 2}},
      {{"trace"},
       {"any dim sharded: P(sum), linear, no strided shards",
        trace,
        {},
        "a rank sums another diagonal of its local matrix"}},
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
  Rule segmented{"the segmented dim unsharded", segments, {"axis"}};
  segmented.checks_values_of = {"lengths", "offsets"};
  all.push_back({{"segment_reduce", "_segment_reduce_backward"}, std::move(segmented)});
  return all;
}

}  // namespace tessera::ops
