#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/mask_runs.h>
#include <tessera/kernels/unique.h>
#include <tessera/ops/family.h>
#include <tessera/ops/select.h>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

/// Operators whose output size depends on the data. Ranks exchange how much they found; what they found
/// becomes a tensor that is sharded evenly, so that only what changes its rank is moved.
namespace tessera::ops {

namespace {

/// Whether it takes less to exchange how many positions a mask selects than to move the mask, where this dim
/// is sharded: there is a count for each run of positions that one rank holds.
bool few_runs(const Spec& mask, int64_t dim) {
  return dim == 0 || c10::multiply_integers(mask.shape().slice(dim)) >= 32 * mask.mesh().size();
}

/// The dims for which that is so.
Shape dims_to_shard(const Spec& marks) {
  Shape dims;
  for (const int64_t dim : c10::irange(marks.ndim())) {
    if (few_runs(marks, dim)) dims.push_back(dim);
  }
  return dims;
}

/// The results, on local tensors.
using Compute =
    std::function<Stack(const c10::OperatorHandle&, Stack arguments, const MaskRuns&, const ChosenSpecs&)>;

/// Whether `compute` returns the global shapes of its results too; see LocalCall.
enum class Sized { no, yes };

/// `mask`: the argument that is the mask, or a list that begins with it.
Localize with_mask(const OpCall& call, const char* mask, Sized sized, const Compute& compute) {
  return [=, position = *call.position(mask), index = *call.tensor(mask)](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!chosen.inputs[index].is_sharded()) return local;
    local.communicates = true;
    local.sized = sized == Sized::yes;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      const c10::IValue& given = arguments[position];
      const at::Tensor own = given.isTensor() ? given.toTensor() : given.toListRef()[0].toTensor();
      const MaskRuns runs(own, chosen.inputs[index], chosen.order);
      return compute(op, std::move(arguments), runs, chosen);
    };
    return local;
  };
}

/// What this rank selected, as rows, and their shape in all.
Stack collected(const at::Tensor& rows, const MaskRuns& runs) {
  auto shape = rows.sizes().vec();
  shape[0] = runs.count();
  return {runs.collect(rows, runs.count()), shape};
}

Stack select_and_collect(const c10::OperatorHandle& op, Stack arguments, const MaskRuns& runs,
                         const ChosenSpecs& /*chosen*/) {
  return collected(call_operator(op, std::move(arguments))[0].toTensor(), runs);
}

/// Each rank holds one contiguous range.
Strategy ranges(Placements inputs, const Placement& output) {
  return {std::move(inputs), {output}, 0, /*contiguous=*/true};
}

/// What is selected from partial values is partial.
Strategy selected_partial() {
  return {{Partial(), Replicate()}, {Partial()}, 0, false, /*any_partial=*/true};
}

/// A tensor of which the operator selects elements, and the mask that selects them.
struct Masked {
  const char* name;  // of the tensor
  Spec tensor, mask;

  /// Nothing if one of them is plain.
  static std::optional<Masked> of(const OpCall& call, const char* name) {
    const auto tensor = call.tensor(name), mask = call.tensor("mask");
    if (!tensor || !mask) return std::nullopt;
    return Masked{name, call.tensors[*tensor], call.tensors[*mask]};
  }

  bool needs_broadcast() const { return tensor.shape() != mask.shape(); }

  /// By the operator itself, with both broadcast.
  Strategies broadcast() const {
    Strategies strategies;
    strategies.decompose = [name = name](const c10::OperatorHandle& op, Stack arguments) {
      const NamedArguments named(op, arguments);
      const at::Tensor x = named.tensor(name), mask = named.tensor("mask");
      const auto shape = at::infer_size(x.sizes(), mask.sizes());
      named[name] = x.expand(shape);
      named["mask"] = mask.expand(shape);
      return call_operator(op, std::move(arguments));
    };
    return strategies;
  }
};

std::optional<Strategies> masked_select(const OpCall& call) {
  const auto given = Masked::of(call, "self");
  if (!given) return std::nullopt;
  if (given->needs_broadcast()) return given->broadcast();
  Strategies strategies;
  for (const int64_t dim : dims_to_shard(given->mask))
    strategies.options.push_back(ranges({Shard(dim), Shard(dim)}, Shard(0)));
  strategies.options.push_back(selected_partial());
  strategies.results = {{{kLocal}}};
  strategies.localize = with_mask(call, "mask", Sized::yes, select_and_collect);
  return strategies;
}

std::optional<Strategies> nonzero(const OpCall& call) {
  const Spec& x = call.tensors[0];
  Strategies strategies;
  for (const int64_t dim : dims_to_shard(x)) strategies.options.push_back(ranges({Shard(dim)}, Shard(0)));
  strategies.results = {{{kLocal, x.ndim()}}};
  strategies.localize = with_mask(
      call, "self", Sized::yes,
      [](const c10::OperatorHandle&, Stack arguments, const MaskRuns& runs, const ChosenSpecs& chosen) {
        const at::Tensor positions = at::nonzero(self_tensor(arguments));
        const at::Tensor begin = at::tensor(chosen.inputs[0].global_offset(), at::kLong);
        return collected(at::add(positions, begin.to(positions.device())), runs);
      });
  return strategies;
}

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

/// Masks among indices.
struct Masks {
  bool leading = false;  // one mask for the first dims, and no other index
  int64_t dims = 0;      // of that mask

  /// Nothing if there are none, or they do not fit, which libtorch is to say.
  static std::optional<Masks> of(const OpCall& call) {
    const auto self = call.tensor("self");
    if (!self) return std::nullopt;
    const c10::IntArrayRef shape = call.tensors[*self].shape();
    Masks found;
    size_t dim = 0, indices = 0;
    for (const c10::IValue& item : call.value("indices").toListRef()) {
      size_t covered = 1;
      if (is_index(item)) {
        const at::Tensor& index = item.toTensor();
        ++indices;
        if (is_mask(index)) {
          covered = index.dim();
          if (covered == 0 || dim + covered > shape.size() || shape.slice(dim, covered) != index.sizes())
            return std::nullopt;
          found = {dim == 0, index.dim()};
        }
      }
      dim += covered;
    }
    if (found.dims == 0) return std::nullopt;
    found.leading = found.leading && indices == 1;
    return found;
  }
};

/// With the positions that masks select instead of the masks.
Stack by_positions(const c10::OperatorHandle& op, Stack arguments) {
  c10::IValue& given = NamedArguments(op, arguments)["indices"];
  c10::List<std::optional<at::Tensor>> indices;
  for (const c10::IValue& item : given.toListRef()) {
    if (!is_index(item)) {
      indices.push_back(std::nullopt);
    } else if (is_mask(item.toTensor())) {
      for (const at::Tensor& positions : at::nonzero(item.toTensor()).unbind(1)) indices.push_back(positions);
    } else {
      indices.push_back(item.toTensor());
    }
  }
  given = indices;
  return call_operator(op, std::move(arguments));
}

/// What goes to the positions that this rank's mask selects, from rows for all of them.
at::Tensor rows_for_here(const at::Tensor& rows, const Spec& spec, const MaskRuns& runs) {
  return mesh_dims_of(spec, 0).empty() ? at::index_select(rows, 0, runs.indices())
                                       : runs.spread(rows, spec.shape()[0]);
}

/// How such rows may be placed: sharded with the mask, unless they are replicated already.
Placement rows_of_mask(const Spec& rows) { return rows.is_replicated() ? Replicate() : Shard(0); }

}  // namespace

std::optional<Strategies> masked_index(const OpCall& call) {
  const auto masks = Masks::of(call);
  if (!masks) return std::nullopt;
  Strategies strategies;
  if (!masks->leading) {
    strategies.decompose = by_positions;
    return strategies;
  }
  const Spec &x = call.tensors[0], &marks = call.tensors[1];
  Shape shape{kLocal};
  for (const int64_t dim : c10::irange(x.ndim())) {
    if (dim >= masks->dims) {
      strategies.options.push_back({{Shard(dim), Replicate()}, {Shard(dim - masks->dims + 1)}});
      shape.push_back(x.shape()[dim]);
    } else if (few_runs(marks, dim)) {
      strategies.options.push_back(ranges({Shard(dim), Shard(dim)}, Shard(0)));
    }
  }
  strategies.options.push_back(selected_partial());
  strategies.results = {{shape}};
  strategies.localize = with_mask(call, "indices", Sized::yes,
                                  [shape](const c10::OperatorHandle& op, Stack arguments,
                                          const MaskRuns& runs, const ChosenSpecs& chosen) {
                                    Stack results =
                                        select_and_collect(op, std::move(arguments), runs, chosen);
                                    Shape global = shape;
                                    global[0] = runs.count();
                                    results[1] = global;
                                    return results;
                                  });
  return strategies;
}

std::optional<Strategies> masked_index_put(const OpCall& call) {
  const auto masks = Masks::of(call);
  if (!masks) return std::nullopt;
  Strategies strategies;
  if (!masks->leading) {
    strategies.decompose = by_positions;
    return strategies;
  }
  const Spec &x = call.tensors[0], &marks = call.tensors[1];
  const auto given = call.tensor("values");
  const c10::IntArrayRef rest = x.shape().slice(masks->dims);
  bool differ = false;
  if (given) {
    const c10::IntArrayRef values = call.tensors[*given].shape();
    if (values.size() > rest.size() + 1) return std::nullopt;
    differ = values.size() == rest.size() + 1 && values[0] != 1;
    if (!at::is_expandable_to(values.size() > rest.size() ? values.slice(1) : values, rest))
      return std::nullopt;
  }
  auto strategy = [&](const Placement& self, const Placement& mask, const Placement& values) {
    Strategy result{{self, mask}, {self}, 0, /*contiguous=*/differ};
    if (given) result.inputs.push_back(values);
    return result;
  };
  for (const int64_t dim : c10::irange(x.ndim())) {
    if (dim < masks->dims) {
      if (!differ || few_runs(marks, dim))
        strategies.options.push_back(strategy(
            Shard(dim), Shard(dim), differ ? rows_of_mask(call.tensors[*given]) : Placement(Replicate())));
      continue;
    }
    Placement values = Replicate();
    if (given) {
      const Spec& spec = call.tensors[*given];
      const int64_t met = spec.ndim() - (x.ndim() - dim);
      if (met >= 0 && spec.shape()[met] != 1) values = Shard(met);
    }
    strategies.options.push_back(strategy(Shard(dim), Replicate(), values));
  }
  if (given) strategies.options.push_back({{Partial(), Replicate(), Partial()}, {Partial()}});
  strategies.results = {{x.shape().vec(), dense_strides(x)}};
  if (!differ) return strategies;
  strategies.localize = with_mask(
      call, "indices", Sized::no,
      [](const c10::OperatorHandle& op, Stack arguments, const MaskRuns& runs, const ChosenSpecs& chosen) {
        const Spec& values = chosen.inputs[2];
        TESSERA_CHECK_INDEX(runs.count() == values.shape()[0], "index_put: the mask selects ", runs.count(),
                            " positions, but there are values for ", values.shape()[0], ".");
        c10::IValue& rows = NamedArguments(op, arguments)["values"];
        rows = rows_for_here(rows.toTensor(), values, runs);
        return call_operator(op, std::move(arguments));
      });
  return strategies;
}

namespace {

std::optional<Strategies> masked_scatter(const OpCall& call) {
  const auto given = Masked::of(call, "self");
  const auto source = call.tensor("source");
  if (!given || !source) return std::nullopt;
  if (given->needs_broadcast()) return given->broadcast();
  const Spec& values = call.tensors[*source];
  const Placement rows = values.ndim() == 1 ? rows_of_mask(values) : Placement(Replicate());
  Strategies strategies;
  for (const int64_t dim : dims_to_shard(given->mask))
    strategies.options.push_back(ranges({Shard(dim), Shard(dim), rows}, Shard(dim)));
  strategies.results = {{given->tensor.shape().vec()}};
  strategies.localize = with_mask(
      call, "mask", Sized::no,
      [](const c10::OperatorHandle& op, Stack arguments, const MaskRuns& runs, const ChosenSpecs& chosen) {
        const Spec& values = chosen.inputs[2];
        TESSERA_CHECK(runs.count() <= values.numel(), "masked_scatter: the mask selects ", runs.count(),
                      " positions, but the source has only ", values.numel(), " elements.");
        c10::IValue& rows = NamedArguments(op, arguments)["source"];
        rows = rows_for_here(rows.toTensor().flatten(), values, runs);
        return call_operator(op, std::move(arguments));
      });
  return strategies;
}

std::optional<Strategies> masked_scatter_backward(const OpCall& call) {
  const auto given = Masked::of(call, "grad_output");
  if (!given) return std::nullopt;
  if (given->needs_broadcast()) return given->broadcast();
  const Shape sizes = call.integers("sizes");
  Strategies strategies;
  for (const int64_t dim : dims_to_shard(given->mask))
    strategies.options.push_back(
        ranges({Shard(dim), Shard(dim)}, sizes.size() == 1 ? Placement(Shard(0)) : Partial()));
  strategies.results = {{sizes}};
  strategies.localize = with_mask(
      call, "mask", Sized::no,
      [sizes](const c10::OperatorHandle& op, Stack stack, const MaskRuns& runs, const ChosenSpecs&) {
        const NamedArguments arguments(op, stack);
        const at::Tensor taken = at::masked_select(arguments.tensor("grad_output"), arguments.tensor("mask"));
        if (sizes.size() == 1) return Stack{runs.collect(taken, sizes[0])};
        const at::Tensor result = at::zeros(sizes, taken.options());
        result.view({-1}).index_copy_(0, runs.indices(), taken);
        return Stack{result};
      });
  return strategies;
}

/// What a call of unique or one of its kin compares, and what it asks for.
struct Unique {
  bool by_dim = false;       // slices along `dim`; else elements
  int64_t dim = 0;           // along which results of ranks are joined
  bool consecutive = false;  // only neighbours are compared, so that the order matters
  UniqueResults wanted = {};

  Unique(const OpCall& call, bool consecutive)
      : by_dim(call.position("dim") && call.has("dim")), consecutive(consecutive) {
    if (by_dim) dim = wrapped(call.integer("dim"), call.tensors[0].ndim());
    wanted.inverse = call.flag("return_inverse");
    wanted.has_counts = call.position("return_counts").has_value();
    wanted.counts = wanted.has_counts && call.flag("return_counts");
  }

  std::vector<Strategy> options(int64_t ndim) const {
    std::vector<Strategy> result;
    const bool only_dim = by_dim || consecutive;
    for (const int64_t d : c10::irange(ndim)) {
      if (only_dim && d != dim) continue;
      Strategy option{
          {Shard(d)}, Placements(wanted.has_counts ? 3 : 2, Replicate()), 0, /*contiguous=*/only_dim};
      if (wanted.inverse) option.outputs[1] = Shard(by_dim ? 0 : d);
      result.push_back(std::move(option));
    }
    return result;
  }

  std::vector<Result> results(const Spec& x) const {
    Shape inverse{0};
    if (wanted.inverse) inverse = by_dim ? Shape{x.shape()[dim]} : x.shape().vec();
    std::vector<Result> result{{}, {inverse}};
    if (wanted.has_counts) result.push_back({{kLocal}});
    return result;
  }

  LocalCall local(const Spec& x) const {
    LocalCall result;
    if (!x.is_sharded()) {
      result.compute = [wanted = wanted](const c10::OperatorHandle& op, Stack arguments) {
        return unique(op, std::move(arguments), wanted);
      };
      return result;
    }
    result.communicates = true;
    result.compute = [wanted = wanted, dim = dim, ranks = ShardGroup(x, mesh_dims_of(x), dim)](
                         const c10::OperatorHandle& op, Stack arguments) {
      return unique_of_all(op, std::move(arguments), wanted, ranks, dim);
    };
    return result;
  }
};

enum class Compares { all, neighbours };

/// What ranks found each by itself, together: by the operator again, on what all found.
Rule unique_rule(const char* text, Compares compares) {
  return {text,
          [compares](const OpCall& call) -> std::optional<Strategies> {
            const Spec& x = call.tensors[0];
            if (x.ndim() == 0) return std::nullopt;
            const Unique unique(call, compares == Compares::neighbours);
            return Strategies{unique.options(x.ndim()), unique.results(x),
                              [unique](const ChosenSpecs& chosen) { return unique.local(chosen.inputs[0]); }};
          },
          {"dim", "return_inverse", "return_counts"},
          "which results there are, and how large, depends on what is asked for"};
}

}  // namespace

Table select_rules() {
  const std::string why = "which dims may be sharded depends on how many runs the mask makes of them";
  return {
      {{"masked_select"},
       {"sharded alike: what each rank selects, sharded evenly; ranks exchange counts",
        masked_select,
        {},
        why}},
      {{"nonzero"},
       {"sharded: what each rank finds, sharded evenly; ranks exchange counts", nonzero, {}, why}},
      {{"masked_scatter"}, {"sharded alike, the source too; ranks exchange counts", masked_scatter, {}, why}},
      {{"masked_scatter_backward"},
       {"sharded alike: what each rank takes, sharded evenly, or P(sum); ranks exchange counts",
        masked_scatter_backward,
        {"sizes"},
        why}},
      {{"_unique", "_unique2", "unique_dim"},
       unique_rule("`dim` sharded, or any: each rank's, and the operator again on all of these",
                   Compares::all)},
      {{"unique_consecutive", "unique_dim_consecutive"},
       unique_rule("`dim` sharded, or the first: each rank's, and the operator again on all of these",
                   Compares::neighbours)},
  };
}

}  // namespace tessera::ops
