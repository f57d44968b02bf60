#include <tessera/redistribute/memory.h>
#include <tessera/rules/dim_map.h>
#include <tessera/rules/form.h>
#include <tessera/rules/indexed_dim.h>
#include <tessera/rules/pattern.h>
#include <tessera/rules/planes.h>
#include <tessera/rules/rule.h>
#include <tessera/rules/shape.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

bool returns_tensors(const OpCall& call) {
  return std::all_of(call.schema->returns().begin(), call.schema->returns().end(), [](const auto& result) {
    return result.type()->kind() == c10::TypeKind::TensorType ||
           result.type()->kind() == c10::TypeKind::ListType;
  });
}

/// Whether integers stay of their dtype. Their sums wrap around, so that partial values of these must not be
/// converted.
bool keeps_integers(const OpCall& call) {
  std::optional<at::ScalarType> dtype;
  bool keeps = true;
  const auto add = [&](at::ScalarType other) {
    if (other == at::kBool) return;
    keeps = keeps && at::isIntegralType(other, /*includeBool=*/false) && dtype.value_or(other) == other;
    dtype = other;
  };
  const bool has_dims =
      std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& s) { return s.ndim() > 0; });
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() > 0 || !has_dims || !at::isIntegralType(spec.dtype(), /*includeBool=*/true))
      add(spec.dtype());
  }
  for (const c10::IValue& plain : call.arguments) {
    if (plain.isTensor() &&
        (!has_dims || !at::isIntegralType(plain.toTensor().scalar_type(), /*includeBool=*/true)))
      add(plain.toTensor().scalar_type());
  }
  return keeps;
}

// --- Pointwise

std::vector<std::vector<size_t>> linear_tensors(const Pointwise& form, const OpCall& call) {
  const bool one_dtype = std::all_of(call.tensors.begin(), call.tensors.end(), [&](const Spec& spec) {
    return spec.dtype() == call.tensors[0].dtype();
  });
  if (form.same_dtype && !one_dtype) return {};
  auto sets = linear_tensors(call, form.linear);
  const bool integers = form.same_dtype || (form.integers && keeps_integers(call));
  std::erase_if(sets, [&](const std::vector<size_t>& set) {
    return !integers && std::any_of(set.begin(), set.end(), [&](size_t i) {
      return at::isIntegralType(call.tensors[i].dtype(), /*includeBool=*/false);
    });
  });
  return sets;
}

/// Largest and smallest values that may be left to be found among the results.
std::vector<Strategy> ordered_options(const Pointwise& form, const OpCall& call) {
  const bool is_real = std::all_of(call.tensors.begin(), call.tensors.end(),
                                   [](const Spec& spec) { return at::isFloatingType(spec.dtype()); });
  std::vector<Strategy> options;
  if (!is_real) return options;
  const auto add = [&](const std::vector<size_t>& partial, ReduceOp from, ReduceOp to) {
    Placements inputs;
    inputs.assign(call.tensors.size(), Replicate());
    for (const size_t i : partial) inputs[i] = Partial(from);
    options.push_back({std::move(inputs), {Partial(to)}});
  };
  std::vector<size_t> rising;
  for (const std::string& name : form.rises) {
    const auto tensor = call.tensor(name);
    if (!tensor) continue;
    rising.push_back(*tensor);
    for (const ReduceOp op : {ReduceOp::max, ReduceOp::min}) add({*tensor}, op, op);
  }
  if (form.joins && rising.size() > 1) add(rising, *form.joins, *form.joins);
  for (const std::string& name : form.falls) {
    const auto tensor = call.tensor(name);
    if (!tensor) continue;
    add({*tensor}, ReduceOp::max, ReduceOp::min);
    add({*tensor}, ReduceOp::min, ReduceOp::max);
  }
  return options;
}

std::optional<Strategies> strategies_of(const Pointwise& form, const OpCall& call) {
  if (!returns_tensors(call)) return std::nullopt;
  Shape shape;
  for (const Spec& spec : call.tensors) shape = at::infer_size(shape, spec.shape());
  Einsum einsum;
  const Letters all = identity(shape.size());
  einsum.outputs.assign(std::max<size_t>(1, call.schema->returns().size()), all);
  for (const size_t i : c10::irange(call.tensors.size())) {
    const Spec& spec = call.tensors[i];
    if (call.written[i] && spec.shape() != c10::IntArrayRef(shape) && call.schema->returns().size() == 1)
      return std::nullopt;
    einsum.inputs.push_back(broadcast(spec.shape(), shape, all));
  }
  einsum.linear = linear_tensors(form, call);
  for (const ReduceOp op : form.keeps) {
    const bool orders = op == ReduceOp::max || op == ReduceOp::min;
    if (!orders || !c10::isComplexType(call.tensors[0].dtype())) einsum.kept.push_back(op);
  }
  Result result{shape};
  // As the first input of that shape lies in memory.
  for (const Spec& spec : call.tensors) {
    if (spec.shape() != c10::IntArrayRef(shape)) continue;
    result.strides = dense_strides(spec);
    break;
  }
  Strategies strategies{strategies_of(einsum), std::vector<Result>(einsum.outputs.size(), result)};
  std::ranges::move(ordered_options(form, call), std::back_inserter(strategies.options));
  return strategies;
}

/// What the ranks may compute together, besides.
void add(const Collective& collective, const OpCall& call, const Shape& dims, Strategies& strategies) {
  Localize localize = call.tensors.size() == 1 && !dims.empty() ? collective.of(call, dims) : Localize();
  if (!localize) return;
  for (const int64_t dim : dims) {
    const Placement result = collective.shards_results ? Shard(dim) : Replicate();
    Strategy option{{Shard(dim)}, Placements(strategies.results.size(), result)};
    option.contiguous = collective.contiguous;
    strategies.options.push_back(std::move(option));
  }
  strategies.localize = std::move(localize);
}

// --- Reduction

Localize by_share(const Shape& dims) {
  return [dims](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!is_sharded_on(chosen.inputs[0], dims)) return local;
    const double share = local_share(chosen.inputs[0], dims);
    local.compute = [share](const c10::OperatorHandle& op, Stack arguments) {
      op.callBoxed(arguments);  // which leaves the result in their place
      const at::Tensor mean = arguments.back().toTensor();
      return share == 0 ? Stack{mean.zero_()} : Stack{mean.mul_(share)};
    };
    return local;
  };
}

std::optional<Strategies> strategies_of(const Reduction& form, const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const auto reduced = ReducedDims::of(call, form.empty_is_all);
  if (!reduced || call.tensors.size() != 1 ||
      std::find(form.except.begin(), form.except.end(), spec.dtype()) != form.except.end())
    return std::nullopt;
  const bool is_empty = reduced->empty(spec);
  if (is_empty && (!form.neutral.empty() || form.by_share)) return std::nullopt;
  if (form.if_sharded && is_sharded_on(spec, reduced->dims)) {
    if (is_empty || !at::isFloatingType(spec.dtype())) return std::nullopt;
    return Strategies{{}, {}, {}, form.if_sharded->compute, form.if_sharded->writes};
  }
  const size_t results = form.partial.empty() ? form.results : form.partial.size();
  Einsum einsum{.inputs = {identity(spec.ndim())},
                .outputs = std::vector<Letters>(results, reduced->letters),
                .contracted = form.partial.empty() ? std::nullopt : std::optional(form.partial[0])};
  const bool converts = converts_partial_values(call);
  if (form.linear && converts) einsum.linear = linear_tensors(call, {{call.name_of(0)}});
  if (converts || !call.position("dtype")) einsum.kept = form.keeps;
  Strategies strategies{strategies_of(einsum), std::vector<Result>(results, Result{reduced->shape})};
  for (Strategy& option : strategies.options) {
    const bool contracts = option.inputs[0].is_shard() && option.outputs[0].is_partial();
    if (contracts) option.outputs = form.partial;
  }
  if (form.by_share) strategies.localize = by_share(reduced->dims);
  if (!form.neutral.empty()) strategies.localize = neutral_if_empty(reduced->dims, form.neutral);
  if (form.collective && !is_empty) add(*form.collective, call, reduced->dims, strategies);
  return strategies;
}

// --- Norm

std::optional<Strategies> strategies_of(const Norm& form, const OpCall& call) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Spec& spec = call.tensors[0];
  const auto reduced = ReducedDims::of(call, /*empty_is_all=*/false);
  if (!reduced || reduced->empty(spec)) return std::nullopt;
  const double p = call.has(form.order) ? call.value(form.order).toScalar().toDouble() : 2.0;
  if (std::isnan(p) || (form.powers && std::isinf(p))) return std::nullopt;
  const Placement partial = form.powers || p == 0 || p == 1 ? Partial(ReduceOp::sum)
                            : p == kInfinity                ? Partial(ReduceOp::max)
                            : p == -kInfinity               ? Partial(ReduceOp::min)
                                                            : NormPartial(p);
  const bool converts = call.position("dtype") && call.has("dtype");
  Einsum einsum{.inputs = {identity(spec.ndim())}, .outputs = {reduced->letters}, .contracted = partial};
  if (converts) einsum.contracted = std::nullopt;
  Strategies strategies{strategies_of(einsum), {{reduced->shape}}};
  if (converts) return strategies;
  // A norm of norms.
  if (partial.is_partial(ReduceOp::norm)) strategies.options.push_back({{partial}, {partial}});
  if (!form.powers && (std::isinf(p) || p < 0))
    strategies.localize = neutral_if_empty(reduced->dims, {p > 0 ? 0.0 : kInfinity}, /*real=*/true);
  return strategies;
}

// --- UnshardedDims

/// The unsharded dims of a call whose tensors have so many.
Shape dims_of(const UnshardedDims& form, const OpCall& call, int64_t ndim) {
  Shape dims;
  if (ndim == 0) return dims;
  for (const std::string& name : form.dims) {
    for (const int64_t dim : call.integers(name)) dims.push_back(wrapped(dim, ndim));
  }
  for (const int64_t dim : form.last) dims.push_back(wrapped(dim, ndim));
  if (!form.all_but) return dims;
  Shape others;
  for (const int64_t dim : c10::irange(ndim)) {
    if (!contains(dims, dim)) others.push_back(dim);
  }
  return others;
}

std::optional<Strategies> strategies_of(const UnshardedDims& form, const OpCall& call) {
  const Spec& first = call.tensors[0];
  if (form.never_empty && first.numel() == 0) return std::nullopt;
  const Shape dims = dims_of(form, call, first.ndim());
  Letters all = identity(first.ndim());
  for (const int64_t dim : dims) all[dim] = kUnsharded;
  Shape shape = first.shape().vec();
  bool is_sharded = false;
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() != first.ndim()) return std::nullopt;
    for (const int64_t dim : c10::irange(first.ndim())) {
      const int64_t size = spec.shape()[dim];
      if (all[dim] == kUnsharded || size == shape[dim]) continue;
      if (!form.broadcasts || (size != 1 && shape[dim] != 1)) return std::nullopt;
      if (shape[dim] == 1) shape[dim] = size;
    }
    is_sharded |= is_sharded_on(spec, dims);
  }
  if (form.if_sharded && is_sharded && first.numel() > 0)
    return Strategies{{}, {}, {}, form.if_sharded->compute, form.if_sharded->writes};
  Einsum einsum{.inputs = {}, .outputs = std::vector<Letters>(form.results, all)};
  for (const Spec& spec : call.tensors) {
    Letters& input = einsum.inputs.emplace_back(all);
    for (const int64_t dim : c10::irange(first.ndim())) {
      if (spec.shape()[dim] != shape[dim]) input[dim] = kUnsharded;
    }
  }
  if (!call.position("dtype") || converts_partial_values(call))
    einsum.linear = linear_tensors(call, form.linear);
  Result result{shape};
  for (const int64_t dim : dims) {
    if (!form.same_size) result.shape[dim] = kLocal;
  }
  if (form.keeps_strides) result.strides = dense_strides(first);
  Strategies strategies{strategies_of(einsum), std::vector<Result>(form.results, result)};
  for (Strategy& option : strategies.options) {
    if (form.never_empty && option.inputs[0].is_shard())
      option.divisor = first.shape()[option.inputs[0].dim()];
  }
  if (form.collective) add(*form.collective, call, dims, strategies);
  return strategies;
}

// --- LikeInput

/// Of a new tensor with the sizes, and strides, that the call says.
Localize with_local_geometry(const OpCall& call, const Shape& strides) {
  return
      [strides, size = *call.position("size"), stride = call.position("stride")](const ChosenSpecs& chosen) {
        const auto shape = chosen.outputs[0].local_shape();
        LocalCall local{{{size, c10::IValue(shape.vec())}}};
        if (stride && !strides.empty()) {
          const auto dense = local_strides(strides, shape);
          local.arguments.emplace_back(*stride, c10::IValue(Shape(dense.begin(), dense.end())));
        }
        return local;
      };
}

std::optional<Strategies> strategies_of(const LikeInput& form, const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (call.tensors.size() != 1) return std::nullopt;
  const bool strided = call.position("stride").has_value();
  Strategies strategies;
  for (const int64_t dim : c10::irange(spec.ndim()))
    strategies.options.push_back({{Shard(dim)}, {Shard(dim)}});
  strategies.options.push_back({{Partial()}, {form.keeps_partial ? Partial() : Replicate()}});
  strategies.options.back().any_partial = true;
  if (form.size == LikeInput::Size::same && call.position("size") &&
      c10::IntArrayRef(call.integers("size")) != spec.shape())
    return std::nullopt;
  if (form.size != LikeInput::Size::any) {
    strategies.results = {{spec.shape().vec(), new_strides(call)}};
    return strategies;
  }
  const Shape size = call.integers("size"), strides = strided ? call.integers("stride") : Shape();
  strategies.results = {{size, strides}};
  if (c10::IntArrayRef(size) == spec.shape()) {
    strategies.localize = with_local_geometry(call, strides);
  } else {
    for (Strategy& option : strategies.options) option.outputs = {Replicate()};
  }
  return strategies;
}

// --- the others

std::optional<Strategies> strategies_of(const AsItIs& form, const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (call.tensors.size() != 1) return std::nullopt;
  const Letters all = identity(spec.ndim());
  Einsum einsum{.inputs = {all}, .outputs = {all}, .keeps_all = true};
  return Strategies{strategies_of(einsum),
                    {{spec.shape().vec(), form.is_view ? spec.strides().vec() : new_strides(call)}}};
}

std::optional<Strategies> strategies_of(const Decomposition& form, const OpCall& /*call*/) {
  return Strategies{{}, {}, {}, form.compute, form.writes};
}

std::optional<Strategies> strategies_of(const ByFunction& form, const OpCall& call) {
  return form.propose(call);
}

std::optional<Strategies> strategies_of(const Cases& form, const OpCall& call) {
  const c10::IValue& given = call.value(form.argument);
  for (const Cases::Case& each : form.cases) {
    const auto* flag = std::get_if<bool>(&each.value);
    if (flag ? given.toBool() == *flag : given.toInt() == std::get<int64_t>(each.value))
      return each.rule->propose(call);
  }
  return std::nullopt;
}

}  // namespace

Cases::Case::Case(std::string name, std::variant<bool, int64_t> value, Rule rule)
    : name(std::move(name)), value(value), rule(std::make_shared<const Rule>(std::move(rule))) {}

std::vector<std::vector<size_t>> linear_tensors(const OpCall& call, const std::vector<Names>& linear) {
  std::vector<std::vector<size_t>> result;
  for (const Names& set : linear) {
    std::vector<size_t> tensors;
    for (const std::string& name : set) {
      // A plain scalar added to a partial sum would be added once for each rank.
      if (const auto index = call.tensor(name)) tensors.push_back(*index);
    }
    const bool sums = std::none_of(tensors.begin(), tensors.end(),
                                   [&](size_t i) { return call.tensors[i].dtype() == at::kBool; });
    if (tensors.size() == set.size() && sums) result.push_back(std::move(tensors));
  }
  return result;
}

bool converts_partial_values(const OpCall& call) {
  const auto from = call.tensors[0].dtype();
  const bool is_given = call.has("dtype");
  // Sums of integers wrap around, so that partial values of these must not be widened; sums of them are
  // int64.
  if (at::isIntegralType(from, /*includeBool=*/false))
    return from == (is_given ? call.value("dtype").toScalarType() : at::kLong);
  if (!is_given) return true;
  const auto to = call.value("dtype").toScalarType();
  return to != at::kBool && (!at::isIntegralType(to, false) || at::isIntegralType(from, false)) &&
         (at::isComplexType(to) || !at::isComplexType(from));
}

std::optional<ReducedDims> ReducedDims::of(const OpCall& call, bool empty_is_all) {
  const Spec& spec = call.tensors[0];
  ReducedDims result;
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
    result.letters.push_back(reduced ? kUnsharded : all[d]);
    result.shape.push_back(reduced ? 1 : spec.shape()[d]);
  }
  return result;
}

bool ReducedDims::empty(const Spec& spec) const {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t d) { return spec.shape()[d] == 0; });
}

int64_t ReducedDims::count(const Spec& spec) const {
  int64_t product = 1;
  for (const int64_t d : dims) product *= spec.shape()[d];
  return product;
}

Localize neutral_if_empty(Shape dims, std::vector<double> values, bool real) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& input = chosen.inputs[0];
    if (!is_sharded_on(input, dims)) return local;
    if (std::none_of(dims.begin(), dims.end(), [&](int64_t d) { return input.local_shape()[d] == 0; }))
      return local;
    local.compute = [=, output = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = self_tensor(arguments);
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

std::optional<Strategies> propose(const Form& form, const OpCall& call) {
  return std::visit([&](const auto& each) { return strategies_of(each, call); }, form);
}

}  // namespace tessera::rules
