#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/ops/select.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::ops {

LocalIndices::LocalIndices(const at::Tensor& global, int64_t offset, int64_t held, int64_t size,
                           int64_t other, bool wraps, bool is_index_error) {
  const at::Tensor known = wraps ? at::where(at::lt(global, 0), at::add(global, size), global) : global;
  if (global.numel() > 0 && global.is_cpu()) {
    const auto [lowest, highest] = at::aminmax(known);
    if (lowest.item<int64_t>() < 0 || highest.item<int64_t>() >= size) {
      const std::string message =
          c10::str("an index is out of range: indices go from ", lowest.item<int64_t>(), " to ",
                   highest.item<int64_t>(), " in a dim of size ", size, ".");
      TESSERA_CHECK_INDEX(!is_index_error, message);
      TESSERA_CHECK(false, message);
    }
  }
  indices = at::sub(known, offset);
  elsewhere = at::logical_or(at::lt(indices, 0), at::ge(indices, held));
  indices = indices.masked_fill(elsewhere, other);
}

namespace {

/// Whether libtorch raises an IndexError if an index of the operator is out of range.
bool has_index_error(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const auto begins = [&](std::string_view prefix) { return name.rfind(prefix, 0) == 0; };
  return !begins("aten::gather") && !begins("aten::scatter") && !begins("aten::index_add");
}

/// What is picked where the dim is cut: by the rank that holds it; the others have zeros there.
Placement picked(const Spec& spec) {
  return Partial(spec.dtype() == c10::ScalarType::Bool ? ReduceOp::any : ReduceOp::sum);
}

/// Runs the operator on a rank's part of argument 0 with its indices into it.
/// `spread`: makes the mask meet the result.
Localize masked_pick(int64_t dim, bool wraps, std::function<at::Tensor(at::Tensor)> spread,
                     const std::function<void(Stack&, const at::Tensor&)>& put_index,
                     const std::function<at::Tensor(const Stack&)>& get_index) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& self = chosen.inputs[0];
    if (mesh_dims_of(self, dim).empty()) return local;
    local.compute = [=, output = chosen.outputs[0]](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      const int64_t held = self.local_shape()[dim];
      const LocalIndices masked(get_index(arguments), self.global_offset()[dim], held, self.shape()[dim], 0,
                                wraps, has_index_error(op));
      if (held == 0) return Stack{at::zeros(output.local_shape(), x.options())};
      put_index(arguments, masked.indices);
      at::Tensor found = call_operator(op, std::move(arguments))[0].toTensor();
      return Stack{found.masked_fill_(spread(masked.elsewhere), 0)};
    };
    return local;
  };
}

/// The letter of the one dim of an index: `letter`, but of an index that is a number, and stands for a dim of
/// size 1. Nothing if it has more dims.
std::optional<char> index_letter(const OpCall& call, char letter) {
  const auto index = call.tensor("index");
  const int64_t ndim = index ? call.tensors[*index].ndim() : 0;
  if (ndim > 1) return std::nullopt;
  return ndim == 1 ? letter : kUnsharded;
}

/// The letters of the index itself, if it is among the tensors.
void add_index(const OpCall& call, char letter, Einsum& einsum) {
  if (const auto index = call.tensor("index"))
    einsum.inputs.emplace_back(call.tensors[*index].ndim(), letter);
}

std::optional<Strategies> index_select(const OpCall& call) {
  const auto self = call.tensor("self"), index = call.tensor("index");
  const auto letter = index_letter(call, 'z');
  if (!self || !letter) return std::nullopt;
  const Spec& x = call.tensors[*self];
  // A number is whole.
  if (x.ndim() == 0) return Strategies{{}, {{Shape()}}};
  const int64_t dim = wrapped(call.integer("dim"), x.ndim());
  Letters output = identity(x.ndim());
  const Letters input = output;
  output[dim] = *letter;
  Einsum einsum{.inputs = {input}, .outputs = {output}, .contracted = picked(x)};
  add_index(call, *letter, einsum);
  einsum.linear = linear_tensors(call, {{first_argument(call)}});
  einsum.contiguous = true;
  Shape shape = x.shape().vec();
  shape[dim] = index ? call.tensors[*index].numel() : 1;
  Strategies strategies{strategies_of(einsum), {{shape}}};
  strategies.localize = masked_pick(
      dim, /*wraps=*/false,
      [dim, ndim = x.ndim()](const at::Tensor& mask) {
        Shape sizes(ndim, 1);
        sizes[dim] = mask.numel();
        return mask.view(sizes);
      },
      [](Stack& arguments, const at::Tensor& indices) { arguments[2] = indices; },
      [](const Stack& arguments) { return arguments[2].toTensor(); });
  return strategies;
}

/// Letters for dims in which all have the same size; others, and `dim`, are whole.
Letters common(const std::vector<c10::IntArrayRef>& shapes, int64_t dim) {
  Letters letters = identity(shapes[0].size());
  for (size_t d = 0; d < letters.size(); ++d) {
    const bool same = std::all_of(shapes.begin(), shapes.end(),
                                  [&](c10::IntArrayRef shape) { return shape[d] == shapes[0][d]; });
    if (!same || static_cast<int64_t>(d) == dim) letters[d] = kUnsharded;
  }
  return letters;
}

std::optional<Strategies> gather(const OpCall& call) {
  const auto self = call.tensor("self"), index = call.tensor("index");
  if (!self || !index) return std::nullopt;
  const Spec &x = call.tensors[*self], &i = call.tensors[*index];
  if (x.ndim() == 0 || x.ndim() != i.ndim()) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dim"), x.ndim());
  for (const int64_t d : c10::irange(x.ndim())) {
    if (d != dim && i.shape()[d] > x.shape()[d]) return std::nullopt;
  }
  Letters input = common({x.shape(), i.shape()}, dim), output = input;
  input[dim] = 'x';
  output[dim] = 'z';
  // A dim of which not all is looked at: what is cut of the one is not what is cut of the other.
  Einsum einsum{.inputs = {input, output}, .outputs = {output}, .contracted = picked(x)};
  einsum.linear = linear_tensors(call, {{first_argument(call)}});
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{i.shape().vec()}}};
  strategies.localize = masked_pick(
      dim, /*wraps=*/false, [](at::Tensor mask) { return mask; },
      [](Stack& arguments, const at::Tensor& indices) { arguments[2] = indices; },
      [](const Stack& arguments) { return arguments[2].toTensor(); });
  return strategies;
}

/// Runs the operator on argument 0 with one more place along `dim`, to which all goes that belongs to other
/// ranks.
Localize with_bin(int64_t dim, bool wraps, const std::function<void(Stack&, const at::Tensor&)>& put_index,
                  const std::function<at::Tensor(const Stack&)>& get_index) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& self = chosen.inputs[0];
    if (mesh_dims_of(self, dim).empty()) return local;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      const int64_t held = self.local_shape()[dim];
      Shape bin = x.sizes().vec();
      bin[dim] = 1;
      arguments[0] = at::cat({x, at::zeros(bin, x.options())}, dim);
      const LocalIndices masked(get_index(arguments), self.global_offset()[dim], held, self.shape()[dim],
                                held, wraps, has_index_error(op));
      put_index(arguments, masked.indices);
      return Stack{call_operator(op, std::move(arguments))[0].toTensor().narrow(dim, 0, held).clone()};
    };
    return local;
  };
}

void put_second(Stack& arguments, const at::Tensor& indices) { arguments[2] = indices; }
at::Tensor get_second(const Stack& arguments) { return arguments[2].toTensor(); }

/// scatter and its kin: values go to places along `dim`. `adds`: they are added to what is there.
Rule scatter_rule(bool adds) {
  return {adds ? "the dim of self cut, or of what is added: P(sum); others cut alike"
               : "the dim of self cut; others cut alike",
          [adds](const OpCall& call) -> std::optional<Strategies> {
            const auto self = call.tensor("self"), index = call.tensor("index"), source = call.tensor("src");
            if (!self || !index) return std::nullopt;
            const Spec &x = call.tensors[*self], &i = call.tensors[*index];
            if (call.tensors.size() != (source ? 3u : 2u)) return std::nullopt;
            if (x.ndim() == 0 || x.ndim() != i.ndim() || (source && call.tensors[*source].ndim() != x.ndim()))
              return std::nullopt;
            const int64_t dim = wrapped(call.integer("dim"), x.ndim());
            std::vector<c10::IntArrayRef> shapes{x.shape(), i.shape()};
            if (source) shapes.push_back(call.tensors[*source].shape());
            const Letters others = common(shapes, dim);
            Letters of_self = others, of_index = others;
            of_self[dim] = 'x';
            if (adds && source && call.tensors[*source].shape()[dim] == i.shape()[dim]) of_index[dim] = 'z';
            Einsum einsum{.inputs = {of_self, of_index}, .outputs = {of_self}};
            if (source) einsum.inputs.push_back(of_index);
            einsum.added = {0};
            einsum.contiguous = true;
            if (x.dtype() == c10::ScalarType::Bool) einsum.contracted = std::nullopt;
            if (adds) einsum.linear = linear_tensors(call, {{"self", "src"}, {"self", "source"}});
            Strategies strategies{strategies_of(einsum), {{x.shape().vec()}}};
            strategies.localize = with_bin(dim, /*wraps=*/false, put_second, get_second);
            return strategies;
          },
          {"dim"}};
}

/// index_add and its kin: slices go to places along `dim`.
Rule index_write_rule(bool adds) {
  return {adds ? "the dim of self cut, or of what is added: P(sum); others cut alike"
               : "the dim of self cut; others cut alike",
          [adds](const OpCall& call) -> std::optional<Strategies> {
            const auto self = call.tensor("self"), source = call.tensor("source");
            const auto letter = index_letter(call, adds ? 'z' : kUnsharded);
            if (!self || !letter) return std::nullopt;
            const Spec& x = call.tensors[*self];
            // A number is whole.
            if (x.ndim() == 0) return Strategies{{}, {{Shape()}}};
            if (call.position("source") && !source) return std::nullopt;
            if (source && call.tensors[*source].ndim() != x.ndim()) return std::nullopt;
            const int64_t dim = wrapped(call.integer("dim"), x.ndim());
            Letters of_self = identity(x.ndim()), of_source = of_self;
            of_self[dim] = 'x';
            of_source[dim] = *letter;
            Einsum einsum{.inputs = {of_self}, .outputs = {of_self}};
            add_index(call, *letter, einsum);
            if (source) einsum.inputs.push_back(of_source);
            for (size_t extra = einsum.inputs.size(); extra < call.tensors.size(); ++extra)
              einsum.inputs.emplace_back(call.tensors[extra].ndim(), kUnsharded);
            einsum.added = {0};
            einsum.contiguous = true;
            if (x.dtype() == c10::ScalarType::Bool) einsum.contracted = std::nullopt;
            if (adds) einsum.linear = linear_tensors(call, {{"self", "src"}, {"self", "source"}});
            Strategies strategies{strategies_of(einsum), {{x.shape().vec()}}};
            strategies.localize = with_bin(dim, /*wraps=*/false, put_second, get_second);
            return strategies;
          },
          {"dim"}};
}

/// How x[i, :, j] is laid out: which dims are indexed, and where the indices' own dims come to stand.
struct Indexing {
  Shape dims;                     // indexed ones
  Shape shape;                    // of the indices together
  Letters self, indices, output;  // indices: of their dims together
  Shape result;

  static std::optional<Indexing> of(const OpCall& call) {
    const auto self = call.tensor("self");
    if (!self) return std::nullopt;
    const Spec& x = call.tensors[*self];
    Indexing found;
    int64_t dim = 0;
    size_t next = *self + 1;
    for (const c10::IValue& item : call.value("indices").toListRef()) {
      if (is_index(item)) {
        const at::Tensor& index = item.toTensor();
        if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return std::nullopt;
        if (next >= call.tensors.size() || call.tensors[next].shape() != index.sizes()) return std::nullopt;
        found.dims.push_back(dim);
        found.shape = at::infer_size(found.shape, index.sizes());
        ++next;
      }
      ++dim;
    }
    if (found.dims.empty() || dim > x.ndim()) return std::nullopt;
    found.self = identity(x.ndim());
    for (size_t i = 0; i < found.shape.size(); ++i) found.indices.push_back(static_cast<char>('A' + i));
    const bool adjacent =
        found.dims.back() - found.dims.front() + 1 == static_cast<int64_t>(found.dims.size());
    auto put_indices = [&] {
      found.output.insert(found.output.end(), found.indices.begin(), found.indices.end());
      found.result.insert(found.result.end(), found.shape.begin(), found.shape.end());
    };
    if (!adjacent) put_indices();
    for (int64_t d = 0; d < x.ndim(); ++d) {
      if (adjacent && d == found.dims.front()) put_indices();
      if (contains(found.dims, d)) continue;
      found.output.push_back(found.self[d]);
      found.result.push_back(x.shape()[d]);
    }
    return found;
  }
};

/// The one index of a list of indices.
void put_listed(Stack& arguments, const at::Tensor& indices) {
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& item : arguments[1].toListRef())
    list.push_back(is_index(item) ? std::optional(indices) : std::nullopt);
  arguments[1] = list;
}
at::Tensor get_listed(const Stack& arguments) {
  for (const c10::IValue& item : arguments[1].toListRef()) {
    if (is_index(item)) return item.toTensor();
  }
  return {};
}

std::optional<Strategies> index(const OpCall& call) {
  if (auto strategies = masked_index(call)) return strategies;
  auto indexing = Indexing::of(call);
  if (!indexing) return std::nullopt;
  const Spec& x = call.tensors[0];
  const bool one = indexing->dims.size() == 1;
  for (const int64_t dim : indexing->dims) {
    if (!one) indexing->self[dim] = kUnsharded;
  }
  Einsum einsum{.inputs = {indexing->self}, .outputs = {indexing->output}, .contracted = picked(x)};
  for (size_t i = 1; i < call.tensors.size(); ++i)
    einsum.inputs.push_back(broadcast(call.tensors[i].shape(), indexing->shape, indexing->indices));
  einsum.linear = linear_tensors(call, {{first_argument(call)}});
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{indexing->result}}};
  if (one) {
    const int64_t dim = indexing->dims[0], after = x.ndim() - dim - 1;
    strategies.localize = masked_pick(
        dim, /*wraps=*/true,
        [after](at::Tensor mask) {
          for (int64_t i = 0; i < after; ++i) mask = mask.unsqueeze(-1);
          return mask;
        },
        put_listed, get_listed);
  }
  return strategies;
}

std::optional<Strategies> index_put(const OpCall& call) {
  if (auto strategies = masked_index_put(call)) return strategies;
  auto indexing = Indexing::of(call);
  if (!indexing) return std::nullopt;
  const auto values = call.tensor("values");
  const Spec& x = call.tensors[0];
  const bool one = indexing->dims.size() == 1, adds = call.flag("accumulate");
  for (const int64_t dim : indexing->dims) {
    if (!one) indexing->self[dim] = kUnsharded;
  }
  if (values && !at::is_expandable_to(call.tensors[*values].shape(), indexing->result)) return std::nullopt;
  // Only what is added may be given in parts.
  if (!adds || !values || x.dtype() == c10::ScalarType::Bool) {
    for (Letters* letters : {&indexing->indices, &indexing->output}) {
      for (char& letter : *letters) letter = letter >= 'A' && letter <= 'Z' ? kUnsharded : letter;
    }
  }
  Einsum einsum{.inputs = {indexing->self}, .outputs = {indexing->self}};
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    const bool is_value = values && i == *values;
    einsum.inputs.push_back(is_value
                                ? broadcast(call.tensors[i].shape(), indexing->result, indexing->output)
                                : broadcast(call.tensors[i].shape(), indexing->shape, indexing->indices));
  }
  // A value that is the same for all indices would be added by each rank for those it has: that is right too.
  einsum.added = {0};
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{x.shape().vec()}}};
  if (one) strategies.localize = with_bin(indexing->dims[0], /*wraps=*/true, put_listed, get_listed);
  return strategies;
}

/// Places in a tensor that counts row by row: which of them a rank holds, and where these lie in what it
/// holds.
struct HeldPlaces {
  at::Tensor inside, places;  // of each; 0 for those that are elsewhere

  HeldPlaces(const at::Tensor& index, const Spec& spec) {
    at::Tensor rest = LocalIndices(index, 0, spec.numel(), spec.numel(), 0, /*wraps=*/true).indices;
    places = at::zeros_like(rest);
    inside = at::ones_like(rest, at::kBool);
    int64_t weight = 1;
    for (int64_t dim = spec.ndim(); dim-- > 0;) {
      const int64_t size = spec.shape()[dim], held = spec.local_shape()[dim];
      const at::Tensor place = at::sub(at::remainder(rest, size), spec.global_offset()[dim]);
      inside.logical_and_(at::ge(place, 0)).logical_and_(at::lt(place, held));
      places.add_(place, weight);
      weight *= held;
      rest = at::floor_divide(rest, size);
    }
    places.masked_fill_(at::logical_not(inside), 0);
  }
};

std::optional<Strategies> take(const OpCall& call) {
  const auto self = call.tensor("self"), index = call.tensor("index");
  if (!self || !index) return std::nullopt;
  const Spec &x = call.tensors[*self], &i = call.tensors[*index];
  if (x.numel() == 0) return std::nullopt;
  const Letters places = identity(i.ndim());
  Einsum einsum{.inputs = {{}, places}, .outputs = {places}, .contracted = picked(x)};
  for (int64_t d = 0; d < x.ndim(); ++d) einsum.inputs[0].push_back(static_cast<char>('A' + d));
  einsum.linear = linear_tensors(call, {{first_argument(call)}});
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{i.shape().vec()}}};
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    if (!x.is_sharded()) return local;
    local.compute = [x](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor held = arguments[0].toTensor();
      const HeldPlaces here(arguments[1].toTensor(), x);
      if (held.numel() == 0) return Stack{at::zeros(here.places.sizes(), held.options())};
      arguments[1] = here.places;
      at::Tensor found = call_operator(op, std::move(arguments))[0].toTensor();
      return Stack{found.masked_fill_(at::logical_not(here.inside), 0)};
    };
    return local;
  };
  return strategies;
}

std::optional<Strategies> put(const OpCall& call) {
  const auto self = call.tensor("self"), index = call.tensor("index"), source = call.tensor("source");
  if (!self || !index || !source) return std::nullopt;
  const Spec& x = call.tensors[*self];
  if (x.numel() == 0 || call.tensors[*index].shape() != call.tensors[*source].shape()) return std::nullopt;
  Strategies strategies;
  strategies.results = {{x.shape().vec(), dense_strides(x)}};
  for (int64_t d = 0; d < x.ndim(); ++d) {
    strategies.options.push_back({{Shard(d), Replicate(), Replicate()}, {Shard(d)}});
    strategies.options.back().contiguous = true;
  }
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    if (!x.is_sharded()) return local;
    local.compute = [x](const c10::OperatorHandle& op, Stack arguments) {
      const HeldPlaces here(arguments[1].toTensor(), x);
      const at::Tensor which = at::nonzero(here.inside.flatten()).squeeze(1);
      arguments[1] = at::index_select(here.places.flatten(), 0, which);
      arguments[2] = at::index_select(arguments[2].toTensor().flatten(), 0, which);
      return call_operator(op, std::move(arguments));
    };
    return local;
  };
  return strategies;
}

/// Each element by itself, looked for in another tensor, which is whole.
std::optional<Strategies> is_in(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &x = call.tensors[0], &y = call.tensors[1];
  const Letters all = identity(x.ndim());
  Einsum einsum{.inputs = {all, Letters(y.ndim(), kUnsharded)}, .outputs = {all}};
  return Strategies{strategies_of(einsum), {{x.shape().vec()}}};
}

}  // namespace

Table index_rules() {
  return {
      {{"index_select"},
       {"the dim cut: P(sum), zeros where a rank has nothing; the index cut", index_select, {"dim"}}},
      {{"gather"}, {"the dim cut: P(sum), zeros where a rank has nothing; the index cut", gather, {"dim"}}},
      {{"scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_reduce.two"},
       scatter_rule(false)},
      {{"scatter_add"}, scatter_rule(true)},
      {{"index_add"}, index_write_rule(true)},
      {{"index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce"},
       index_write_rule(false)},
      {{"take"}, {"any dim cut: P(sum), zeros where a rank has nothing; the index cut", take}},
      {{"put"}, {"any dim of self cut", put}},
      {{"isin.Tensor_Tensor"}, {"elements cut, test elements whole", is_in}},
      {{"index.Tensor", "_unsafe_index.Tensor"},
       {"dims without index cut; one indexed dim cut: P(sum), zeros where a rank has nothing; the indices "
        "cut; masks as masked_select",
        index,
        {"indices"}}},
      {{"index_put", "_unsafe_index_put", "_index_put_impl"},
       {"dims without index cut; one indexed dim cut; what is added cut: P(sum); masks as masked_scatter",
        index_put,
        {"indices", "accumulate"}}},
      {{"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"},
       composed({"clamp", "index", "masked_fill"})},
  };
}

}  // namespace tessera::ops
