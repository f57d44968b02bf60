#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/mask_runs.h>
#include <tessera/ops/family.h>
#include <tessera/ops/select.h>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

/// Operators whose results are as large as the data say. Ranks tell each other how much they found; what they
/// found becomes a tensor that is cut evenly anew, so that only what changes its rank is moved.
namespace tessera::ops {

namespace {

/// Whether telling how many places are marked takes less than moving the marks where this dim is cut: a
/// number is told for each run of places that one rank holds.
bool few_runs(const Spec& marks, int64_t dim) {
  return dim == 0 || c10::multiply_integers(marks.shape().slice(dim)) >= 32 * marks.mesh().size();
}

/// The dims for which that is so.
Shape dims_to_cut(const Spec& marks) {
  Shape dims;
  for (const int64_t dim : c10::irange(marks.ndim())) {
    if (few_runs(marks, dim)) dims.push_back(dim);
  }
  return dims;
}

/// The results, on local tensors.
using Compute =
    std::function<Stack(const c10::OperatorHandle&, Stack arguments, const MaskRuns&, const ChosenSpecs&)>;

/// `marks`: the argument that tells of the places, or a list that begins with it. `sized`: see LocalCall.
Localize with_marks(const OpCall& call, const char* marks, bool sized, const Compute& compute) {
  return [=, position = *call.position(marks), number = *call.tensor(marks)](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!chosen.inputs[number].is_sharded()) return local;
    local.communicates = true;
    local.sized = sized;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      const c10::IValue& given = arguments[position];
      const at::Tensor held = given.isTensor() ? given.toTensor() : given.toListRef()[0].toTensor();
      const MaskRuns marked(held, chosen.inputs[number], chosen.order);
      return compute(op, std::move(arguments), marked, chosen);
    };
    return local;
  };
}

/// What this rank selected, as rows, and their shape in all.
Stack collected(const at::Tensor& rows, const MaskRuns& marked) {
  auto shape = rows.sizes().vec();
  shape[0] = marked.count();
  return {marked.collect(rows, marked.count()), shape};
}

Stack select_and_collect(const c10::OperatorHandle& op, Stack arguments, const MaskRuns& marked,
                         const ChosenSpecs& /*chosen*/) {
  return collected(call_operator(op, std::move(arguments))[0].toTensor(), marked);
}

/// Each rank holds one range of what is cut.
Strategy ranges(Placements inputs, const Placement& output) {
  return {std::move(inputs), {output}, 0, /*contiguous=*/true};
}

/// What is selected from partial values is partial.
Strategy selected_partial() {
  return {{Partial(), Replicate()}, {Partial()}, 0, false, /*any_partial=*/true};
}

/// With the first two arguments, a tensor and a mask, broadcast.
Strategies broadcast_first() {
  Strategies strategies;
  strategies.decompose = [](const c10::OperatorHandle& op, Stack arguments) {
    const at::Tensor x = arguments[0].toTensor(), mask = arguments[1].toTensor();
    const auto shape = at::infer_size(x.sizes(), mask.sizes());
    arguments[0] = x.expand(shape);
    arguments[1] = mask.expand(shape);
    return call_operator(op, std::move(arguments));
  };
  return strategies;
}

std::optional<Strategies> masked_select(const OpCall& call) {
  const auto self = call.tensor("self"), mask = call.tensor("mask");
  if (!self || !mask) return std::nullopt;
  const Spec &x = call.tensors[*self], &marks = call.tensors[*mask];
  if (x.shape() != marks.shape()) return broadcast_first();
  Strategies strategies;
  for (const int64_t dim : dims_to_cut(marks))
    strategies.options.push_back(ranges({Shard(dim), Shard(dim)}, Shard(0)));
  strategies.options.push_back(selected_partial());
  strategies.results = {{{kLocal}}};
  strategies.localize = with_marks(call, "mask", true, select_and_collect);
  return strategies;
}

std::optional<Strategies> nonzero(const OpCall& call) {
  const Spec& x = call.tensors[0];
  Strategies strategies;
  for (const int64_t dim : dims_to_cut(x)) strategies.options.push_back(ranges({Shard(dim)}, Shard(0)));
  strategies.results = {{{kLocal, x.ndim()}}};
  strategies.localize = with_marks(
      call, "self", true,
      [](const c10::OperatorHandle&, Stack arguments, const MaskRuns& marked, const ChosenSpecs& chosen) {
        const at::Tensor places = at::nonzero(arguments[0].toTensor());
        const at::Tensor begin = at::tensor(chosen.inputs[0].global_offset(), at::kLong);
        return collected(at::add(places, begin.to(places.device())), marked);
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

/// With the places that masks mark instead of them.
Stack by_places(const c10::OperatorHandle& op, Stack arguments) {
  c10::List<std::optional<at::Tensor>> indices;
  for (const c10::IValue& item : arguments[1].toListRef()) {
    if (!is_index(item)) {
      indices.push_back(std::nullopt);
    } else if (is_mask(item.toTensor())) {
      for (const at::Tensor& places : at::nonzero(item.toTensor()).unbind(1)) indices.push_back(places);
    } else {
      indices.push_back(item.toTensor());
    }
  }
  arguments[1] = indices;
  return call_operator(op, std::move(arguments));
}

/// What goes to the places that this rank has marked, from rows for all of them.
at::Tensor rows_for_here(const at::Tensor& rows, const Spec& spec, const MaskRuns& marked) {
  return mesh_dims_of(spec, 0).empty() ? at::index_select(rows, 0, marked.numbers())
                                       : marked.spread(rows, spec.shape()[0]);
}

/// How such rows may lie: cut as the marks are, unless they are everywhere already.
Placement rows_of_marks(const Spec& rows) { return rows.is_replicated() ? Replicate() : Shard(0); }

}  // namespace

std::optional<Strategies> masked_index(const OpCall& call) {
  const auto masks = Masks::of(call);
  if (!masks) return std::nullopt;
  Strategies strategies;
  if (!masks->leading) {
    strategies.decompose = by_places;
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
  strategies.localize = with_marks(call, "indices", true,
                                   [shape](const c10::OperatorHandle& op, Stack arguments,
                                           const MaskRuns& marked, const ChosenSpecs& chosen) {
                                     Stack results =
                                         select_and_collect(op, std::move(arguments), marked, chosen);
                                     Shape whole = shape;
                                     whole[0] = marked.count();
                                     results[1] = whole;
                                     return results;
                                   });
  return strategies;
}

std::optional<Strategies> masked_index_put(const OpCall& call) {
  const auto masks = Masks::of(call);
  if (!masks) return std::nullopt;
  Strategies strategies;
  if (!masks->leading) {
    strategies.decompose = by_places;
    return strategies;
  }
  const Spec &x = call.tensors[0], &marks = call.tensors[1];
  const auto number = call.tensor("values");
  const c10::IntArrayRef rest = x.shape().slice(masks->dims);
  bool differ = false;
  if (number) {
    const c10::IntArrayRef values = call.tensors[*number].shape();
    if (values.size() > rest.size() + 1) return std::nullopt;
    differ = values.size() == rest.size() + 1 && values[0] != 1;
    if (!at::is_expandable_to(values.size() > rest.size() ? values.slice(1) : values, rest))
      return std::nullopt;
  }
  auto strategy = [&](const Placement& self, const Placement& mask, const Placement& values) {
    Strategy result{{self, mask}, {self}, 0, /*contiguous=*/differ};
    if (number) result.inputs.push_back(values);
    return result;
  };
  for (const int64_t dim : c10::irange(x.ndim())) {
    if (dim < masks->dims) {
      if (!differ || few_runs(marks, dim))
        strategies.options.push_back(strategy(
            Shard(dim), Shard(dim), differ ? rows_of_marks(call.tensors[*number]) : Placement(Replicate())));
      continue;
    }
    Placement values = Replicate();
    if (number) {
      const Spec& spec = call.tensors[*number];
      const int64_t met = spec.ndim() - (x.ndim() - dim);
      if (met >= 0 && spec.shape()[met] != 1) values = Shard(met);
    }
    strategies.options.push_back(strategy(Shard(dim), Replicate(), values));
  }
  if (number) strategies.options.push_back({{Partial(), Replicate(), Partial()}, {Partial()}});
  strategies.results = {{x.shape().vec(), dense_strides(x)}};
  if (!differ) return strategies;
  strategies.localize = with_marks(
      call, "indices", false,
      [](const c10::OperatorHandle& op, Stack arguments, const MaskRuns& marked, const ChosenSpecs& chosen) {
        const Spec& values = chosen.inputs[2];
        TESSERA_CHECK_INDEX(marked.count() == values.shape()[0], "index_put: the mask marks ", marked.count(),
                            " places, but there are values for ", values.shape()[0], ".");
        arguments[2] = rows_for_here(arguments[2].toTensor(), values, marked);
        return call_operator(op, std::move(arguments));
      });
  return strategies;
}

namespace {

std::optional<Strategies> masked_scatter(const OpCall& call) {
  const auto self = call.tensor("self"), mask = call.tensor("mask"), source = call.tensor("source");
  if (!self || !mask || !source) return std::nullopt;
  const Spec &x = call.tensors[*self], &marks = call.tensors[*mask], &values = call.tensors[*source];
  if (x.shape() != marks.shape()) return broadcast_first();
  const Placement rows = values.ndim() == 1 ? rows_of_marks(values) : Placement(Replicate());
  Strategies strategies;
  for (const int64_t dim : dims_to_cut(marks))
    strategies.options.push_back(ranges({Shard(dim), Shard(dim), rows}, Shard(dim)));
  strategies.results = {{x.shape().vec()}};
  strategies.localize = with_marks(
      call, "mask", false,
      [](const c10::OperatorHandle& op, Stack arguments, const MaskRuns& marked, const ChosenSpecs& chosen) {
        const Spec& values = chosen.inputs[2];
        TESSERA_CHECK(marked.count() <= values.numel(), "masked_scatter: the mask has ", marked.count(),
                      " places, but the source only ", values.numel(), " elements.");
        arguments[2] = rows_for_here(arguments[2].toTensor().flatten(), values, marked);
        return call_operator(op, std::move(arguments));
      });
  return strategies;
}

std::optional<Strategies> masked_scatter_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad_output"), mask = call.tensor("mask");
  if (!gradient || !mask) return std::nullopt;
  const Spec &g = call.tensors[*gradient], &marks = call.tensors[*mask];
  if (g.shape() != marks.shape()) return broadcast_first();
  const Shape sizes = call.integers("sizes");
  Strategies strategies;
  for (const int64_t dim : dims_to_cut(marks))
    strategies.options.push_back(
        ranges({Shard(dim), Shard(dim)}, sizes.size() == 1 ? Placement(Shard(0)) : Partial()));
  strategies.results = {{sizes}};
  strategies.localize = with_marks(
      call, "mask", false,
      [sizes](const c10::OperatorHandle&, Stack arguments, const MaskRuns& marked, const ChosenSpecs&) {
        const at::Tensor taken = at::masked_select(arguments[0].toTensor(), arguments[1].toTensor());
        if (sizes.size() == 1) return Stack{marked.collect(taken, sizes[0])};
        const at::Tensor result = at::zeros(sizes, taken.options());
        result.view({-1}).index_copy_(0, marked.numbers(), taken);
        return Stack{result};
      });
  return strategies;
}

/// What ranks found each by itself, together: by the operator again, on what all found. `consecutive`: the
/// order matters.
Rule unique_rule(bool consecutive) {
  return {
      consecutive ? "the dim cut, or the first: each rank's, and the operator again on all of these"
                  : "the dim cut, or any: each rank's, and the operator again on all of these",
      [=](const OpCall& call) -> std::optional<Strategies> {
        const Spec& x = call.tensors[0];
        if (x.ndim() == 0) return std::nullopt;
        const bool by_dim = call.position("dim") && call.has("dim");
        const int64_t dim = by_dim ? wrapped(call.integer("dim"), x.ndim()) : 0;
        const auto inverse = call.position("return_inverse"), counts = call.position("return_counts");
        const bool with_inverse = call.flag("return_inverse"),
                   with_counts = counts && call.flag("return_counts");
        Strategies strategies;
        for (const int64_t d : c10::irange(x.ndim())) {
          if (d != dim && (by_dim || consecutive)) continue;
          Strategy strategy{{Shard(d)}, {Replicate(), Replicate()}, 0, /*contiguous=*/by_dim || consecutive};
          if (with_inverse) strategy.outputs[1] = by_dim ? Shard(0) : Shard(d);
          if (counts) strategy.outputs.push_back(Replicate());
          strategies.options.push_back(std::move(strategy));
        }
        Shape places{0};
        if (with_inverse) places = by_dim ? Shape{x.shape()[dim]} : x.shape().vec();
        strategies.results = {{}, {places}};
        if (counts) strategies.results.push_back({{kLocal}});
        strategies.localize = [=](const ChosenSpecs& chosen) {
          LocalCall local;
          // libtorch gives some results unasked.
          const auto wanted = [=](Stack results) {
            const at::Tensor nothing = at::empty({0}, results[1].toTensor().options());
            if (!with_inverse) results[1] = nothing;
            if (counts && !with_counts) results[2] = nothing;
            return results;
          };
          const Spec& spec = chosen.inputs[0];
          if (!spec.is_sharded()) {
            local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
              return wanted(call_operator(op, std::move(arguments)));
            };
            return local;
          }
          local.communicates = true;
          local.compute = [=, ranks = ShardGroup(spec, mesh_dims_of(spec), dim)](
                              const c10::OperatorHandle& op, Stack arguments) {
            arguments[*inverse] = true;
            if (counts) arguments[*counts] = true;
            const Stack own = call_operator(op, arguments);
            const at::Tensor values = own[0].toTensor();
            const std::vector<int64_t> sizes = ranks.sizes(values, dim);
            arguments[0] = ranks.join(values, dim, sizes);
            Stack results = call_operator(op, std::move(arguments));
            const at::Tensor where = results[1].toTensor();
            if (with_inverse) results[1] = at::take(where, at::add(own[1].toTensor(), ranks.before(sizes)));
            if (with_counts) {
              const at::Tensor often = at::zeros_like(results[2].toTensor());
              results[2] = often.index_add_(0, where, ranks.join(own[2].toTensor(), 0, sizes));
            }
            return wanted(std::move(results));
          };
          return local;
        };
        return strategies;
      },
      {"dim", "return_inverse", "return_counts"}};
}

}  // namespace

Table select_rules() {
  return {
      {{"masked_select"},
       {"cut alike: what each rank selects, cut evenly anew; ranks tell each other how many places they have",
        masked_select}},
      {{"nonzero"},
       {"cut: what each rank finds, cut evenly anew; ranks tell each other how many places they have",
        nonzero}},
      {{"masked_scatter"},
       {"cut alike, the source too; ranks tell each other how many places they have", masked_scatter}},
      {{"masked_scatter_backward"},
       {"cut alike: what each rank takes, cut evenly anew, or P(sum); ranks tell each other how many places "
        "they have",
        masked_scatter_backward,
        {"sizes"}}},
      {{"_unique", "_unique2", "unique_dim"}, unique_rule(false)},
      {{"unique_consecutive", "unique_dim_consecutive"}, unique_rule(true)},
  };
}

}  // namespace tessera::ops
