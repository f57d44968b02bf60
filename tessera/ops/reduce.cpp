#include <tessera/dtensor/dtensor.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/extremes.h>
#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The dims that a call of a decomposition reduces, and whether they stay with size 1.
struct Reduced {
  Shape dims;
  bool keep;

  explicit Reduced(const NamedArguments& arguments) {
    const c10::IValue& dim = arguments["dim"];
    const int64_t ndim = arguments.tensor("self").dim();
    dims = wrapped(dim.isNone() ? Shape() : dim.isInt() ? Shape{dim.toInt()} : dim.toIntVector(), ndim);
    keep = arguments["keepdim"].toBool();
  }
};

enum class Variance { variance, deviation };
enum class Results { one, with_mean };

/// By the mean, and the mean of squared differences.
template <Variance kind, Results given>
Stack variance(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const Reduced reduced(arguments);
  const at::Tensor x = arguments.tensor("self");
  const double correction = arguments.has("correction") ? arguments["correction"].toScalar().toDouble() : 1;
  double count = 1;
  for (const int64_t dim : reduced.dims) count *= static_cast<double>(x.size(dim));
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor values = x.scalar_type() == wide ? x : x.to(wide);
  const at::Tensor difference = at::sub(values, at::mean(values, reduced.dims, /*keepdim=*/true));
  at::Tensor result = at::div(at::sum(at::mul(difference, difference), reduced.dims, reduced.keep),
                              std::max(0.0, count - correction));
  if (kind == Variance::deviation) result = at::sqrt(result);
  Stack results{result.to(x.scalar_type())};
  if (given == Results::with_mean)
    results.emplace_back(at::mean(values, reduced.dims, reduced.keep).to(x.scalar_type()));
  return results;
}

template <Variance kind, Results given>
Reduction variance_form() {
  return {.results = given == Results::with_mean ? 2u : 1u,
          .empty_is_all = true,
          .if_sharded = Decomposition{{"mean", "sub", "sum"}, variance<kind, given>}};
}

/// Each rank's own, and that of these.
Rule logsumexp() {
  const auto of_all = [](const OpCall&, const Shape& dims) -> Localize {
    return [dims](const ChosenSpecs& chosen) {
      LocalCall local;
      const Spec& x = chosen.inputs[0];
      std::vector<int64_t> mesh_dims;
      for (const int64_t dim : dims) std::ranges::copy(mesh_dims_of(x, dim), std::back_inserter(mesh_dims));
      if (mesh_dims.empty()) return local;
      std::ranges::sort(mesh_dims);
      local.communicates = true;
      local.compute = [group = group_of(x.mesh(), mesh_dims)](const c10::OperatorHandle& op,
                                                              Stack arguments) {
        op.callBoxed(arguments);
        return Stack{at::logsumexp(gathered(arguments.back().toTensor(), group), 0)};
      };
      return local;
    };
  };
  return Reduction{
      .collective = Collective{.text = "each rank's, and that of these", .of = of_all, .contiguous = false}};
}

// --- histograms

/// Counts between bounds; without any, between the least and the most of all data, which ranks exchange.
Localize counts_of_shard(int64_t bins, bool has_bounds) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    const bool is_empty = c10::multiply_integers(x.local_shape()) == 0;
    const auto none = [bins](const at::Tensor& own) { return Stack{at::zeros({bins}, own.options())}; };
    if (has_bounds || !x.is_sharded()) {
      if (!is_empty) return local;
      local.compute = [none](const c10::OperatorHandle&, Stack arguments) {
        return none(self_tensor(arguments));  // libtorch refuses to count nothing
      };
      return local;
    }
    local.communicates = true;
    local.compute = [=, group = group_of(x.mesh(), mesh_dims_of(x))](const c10::OperatorHandle&,
                                                                     Stack arguments) {
      const at::Tensor& own = self_tensor(arguments);
      const at::Tensor all = gathered(
          is_empty ? at::tensor({kInfinity, -kInfinity}, own.options()) : at::stack({own.min(), own.max()}),
          group);
      double least = all.select(1, 0).min().item<double>(), most = all.select(1, 1).max().item<double>();
      if (least == most) {
        least -= 1;
        most += 1;
      }
      // Bounds that libtorch refuses, all ranks refuse.
      const at::Tensor counts = at::histc(is_empty ? at::zeros({1}, own.options()) : own, bins, least, most);
      return is_empty ? none(own) : Stack{counts};
    };
    return local;
  };
}

std::optional<Strategies> histc(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (call.tensors.size() != 1 || spec.numel() == 0) return std::nullopt;
  const bool has_bounds = call.value("min").toScalar().toDouble() != call.value("max").toScalar().toDouble();
  const Einsum einsum{.inputs = {identity(spec.ndim())}, .outputs = {{kUnsharded}}};
  const int64_t bins = call.integer("bins");
  return Strategies{strategies_of(einsum), {{{bins}}}, counts_of_shard(bins, has_bounds)};
}

/// Counts over how many there are in all, and over the bins' lengths.
Stack histogram_density(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  arguments["density"] = false;
  std::vector<at::Tensor> edges;
  if (arguments["bins"].isTensorList()) edges = arguments["bins"].toTensorVector();
  if (arguments["bins"].isIntList()) {
    const auto range = arguments["range"].toOptional<std::vector<double>>();
    edges = at::_histogramdd_bin_edges(arguments.tensor("self"), arguments["bins"].toIntVector(),
                                       range ? std::optional<c10::ArrayRef<double>>(*range) : std::nullopt);
  }
  Stack results = call_operator(op, stack);
  if (results.size() == 2) edges = {results[1].toTensor()};
  // Reduced here once, not at each use.
  at::Tensor counts = at::add(results[0].toTensor(), 0);
  counts = at::div(counts, at::sum(counts));
  for (const size_t dim : c10::irange(edges.size())) {
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

/// Between the bounds of all data, which the ranks find by one reduction.
Localize between_bounds(Histogram kind, size_t self) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[self];
    if (mesh_dims_of(x).empty()) return local;
    local.communicates = true;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor values = self_tensor(arguments);
      const int64_t columns = kind == Histogram::elements ? 1 : values.size(-1);
      NamedArguments(op, arguments)["range"] = column_bounds(values.reshape({-1, columns}), x);
      return call_operator(op, std::move(arguments));
    };
    return local;
  };
}

std::optional<Strategies> histogram(const OpCall& call, Histogram kind) {
  const auto self = call.tensor("self"), weight = call.tensor("weight");
  if (!self) return std::nullopt;
  const Spec& x = call.tensors[*self];
  const bool of_rows = kind != Histogram::elements, counts = kind != Histogram::edges_of_rows;
  if (x.numel() == 0 || (of_rows && x.ndim() < 2)) return std::nullopt;
  if (counts && call.flag("density")) {
    const bool is_sharded = x.is_sharded() || (weight && call.tensors[*weight].is_sharded());
    return is_sharded ? Strategies{{}, {}, {}, histogram_density} : Strategies{};
  }
  Strategies strategies;
  Placements outputs{counts ? Partial() : Replicate()};
  if (call.schema->returns().size() == 2) outputs.push_back(Replicate());
  for (const int64_t dim : c10::irange(x.ndim() - (of_rows ? 1 : 0))) {
    Strategy strategy{Placements(call.tensors.size(), Replicate()), outputs};
    strategy.inputs[*self] = Shard(dim);
    if (weight) strategy.inputs[*weight] = Shard(dim);
    strategies.options.push_back(std::move(strategy));
  }
  if (call.position("range") && !call.has("range")) strategies.localize = between_bounds(kind, *self);
  return strategies;
}

Rule histogram_rule(Histogram kind, Names reads) {
  Rule rule{kind == Histogram::edges_of_rows ? "rows sharded; bounds are given, or found by one reduction"
                                             : "sharded: P(sum); bounds are given, or found by one reduction",
            [kind](const OpCall& call) { return histogram(call, kind); }, std::move(reads),
            "densities need all counts, and the edges of bins are never partial"};
  rule.may_refuse_dtypes = [](Dtypes dtypes) {
    return not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]);
  };
  return rule;
}

/// How often each value occurs. All ranks have to know how many bins there are.
Rule bincount() {
  Rule rule = Pattern{.letters = {"n,n?->."}};
  rule.local = {
      "how many bins there are by one reduction", [](const OpCall&) -> Localize {
        return [](const ChosenSpecs& chosen) {
          LocalCall local;
          const Spec& spec = chosen.inputs[0];
          if (mesh_dims_of(spec).empty()) return local;
          local.communicates = true;
          local.compute = [spec](const c10::OperatorHandle& op, Stack stack) {
            const NamedArguments arguments(op, stack);
            const at::Tensor x = arguments.tensor("self");
            const int64_t least = arguments["minlength"].toInt();
            if (least < 0) op.callBoxed(stack);  // which refuses it
            const int64_t bins = std::max(least, count_bins(x, spec));
            if (x.numel() == 0 && arguments.has("weights")) {
              // libtorch forgets of what type weights are if there are none.
              const auto given = arguments.tensor("weights").scalar_type();
              return Stack{at::zeros({bins}, x.options().dtype(given == at::kFloat ? given : at::kDouble))};
            }
            arguments["minlength"] = bins;
            return call_operator(op, std::move(stack));
          };
          return local;
        };
      }};
  return rule;
}

// --- others

/// Which diagonal of its shard a rank sums follows from where that begins.
Rule trace() {
  Rule rule = Pattern{.letters = {"mn->"}, .linear = {{"self"}}, .contiguous = "mn"};
  rule.local = {"the diagonal as it is in the shard", [](const OpCall&) -> Localize {
                  return [](const ChosenSpecs& chosen) {
                    LocalCall local;
                    if (!chosen.inputs[0].is_sharded()) return local;
                    const auto offset = chosen.inputs[0].global_offset();
                    local.compute = [diagonal = offset[0] - offset[1]](const c10::OperatorHandle&,
                                                                       Stack arguments) {
                      const at::Tensor x = self_tensor(arguments);
                      const bool none = x.numel() == 0 || diagonal <= -x.size(0) || diagonal >= x.size(1);
                      return Stack{at::sum(none ? x.flatten().narrow(0, 0, 0) : at::diagonal(x, diagonal))};
                    };
                    return local;
                  };
                }};
  return rule;
}

/// libtorch refuses to reduce nothing.
LocalCall zeros_of_empty(const ChosenSpecs& chosen) {
  LocalCall local;
  if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
  local.compute = [result = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
    return Stack{at::zeros(result.local_shape(), self_tensor(arguments).options())};
  };
  return local;
}

/// Segments of a dim, which is unsharded; how long they are may differ along the dims before it.
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
  for (const size_t i : c10::irange(call.tensors.size())) {
    const std::string& name = call.name_of(i);
    const bool is_geometry = name == "lengths" || name == "offsets";
    einsum.inputs.emplace_back(all.begin(), is_geometry ? all.begin() + axis + 1 : all.end());
    const Spec& spec = call.tensors[i];
    if (is_geometry && spec.dtype() != at::kInt && spec.dtype() != at::kLong) return std::nullopt;
    if (spec.ndim() != static_cast<int64_t>(einsum.inputs.back().size())) return std::nullopt;
    if (spec.shape().slice(0, axis) != x.shape().slice(0, axis)) return std::nullopt;
    if (is_geometry && !backward) shape[axis] = spec.shape()[axis] - (offsets ? 1 : 0);
  }
  if (backward) einsum.linear = linear_tensors(call, {{"grad"}});
  return Strategies{strategies_of(einsum), {{shape}}, zeros_of_empty};
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
      {{"linalg_vector_norm"}, Norm{"ord"}},
      {{"linalg__powsum"}, Norm{.order = "ord", .powers = true}},
      {{"norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype"}, Norm{"p"}},
      {{"var.correction"}, variance_form<Variance::variance, Results::one>()},
      {{"std.correction"}, variance_form<Variance::deviation, Results::one>()},
      {{"var_mean.correction"}, variance_form<Variance::variance, Results::with_mean>()},
      {{"std_mean.correction"}, variance_form<Variance::deviation, Results::with_mean>()},
      {{"logsumexp"}, logsumexp()},
      {{"mode", "median.dim", "nanmedian.dim", "kthvalue"}, Reduction{.results = 2}},
      {{"trace"}, trace()},
  });
  const Table counts = tried({
      {{"histc"},
       {"sharded: P(sum), between bounds that are given, or those of all data, which ranks exchange",
        histc,
        {"bins", "min", "max"},
        "bounds that are not given are those of all data"}},
      {{"histogram.bins_tensor"}, histogram_rule(Histogram::elements, {"density"})},
      {{"histogram.bin_ct"}, histogram_rule(Histogram::elements, {"range", "density"})},
      {{"_histogramdd_bin_edges"}, histogram_rule(Histogram::edges_of_rows, {"range"})},
      {{"_histogramdd_from_bin_cts"}, histogram_rule(Histogram::rows, {"range", "density"})},
      {{"_histogramdd_from_bin_tensors"}, histogram_rule(Histogram::rows, {"density"})},
      {{"bincount"}, bincount()},
  });
  all.insert(all.end(), counts.begin(), counts.end());
  Rule segmented{"`axis` unsharded, others alike",
                 segments,
                 {"axis"},
                 "`lengths` and `offsets` have the dims up to `axis` only"};
  segmented.checks_values_of = {"lengths", "offsets"};
  all.push_back({{"segment_reduce", "_segment_reduce_backward"}, std::move(segmented)});
  return all;
}

}  // namespace tessera::ops

// --- composites

namespace tessera {

namespace {

at::Tensor trace_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  return replicated_tensor(at::eye(shape[0], shape[1], grad.options()), DTensor(grad).device_mesh()) * grad;
}

void register_reduce_composites(torch::Library& library) { library.impl("trace_backward", trace_backward); }

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_reduce_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { register_reduce_composites(library); }

}  // namespace

}  // namespace tessera
