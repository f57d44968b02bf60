#include <tessera/rules/rule.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>

namespace tessera::rules {

namespace {

constexpr double kImpossible = 1e30;

/// What it takes, in units of the tensor's bytes on one rank's link, to place along a mesh dim of `n` ranks
/// what is `from` as `to`. A rough price, to choose between strategies; the planner of redistributions finds
/// the real way.
double price(const Placement& from, const Placement& to, int64_t n) {
  if (from == to || n == 1) return 0;
  const auto parts = static_cast<double>(n);
  const double share = (parts - 1) / parts;
  if (from.is_replicate()) return to.is_partial() ? 0.02 : 0.01;  // a slice: no communication, but some work
  if (from.is_partial()) return to.is_replicate() ? 2 * share : to.is_partial() ? 2 * share : share;
  return to.is_replicate() ? share : to.is_partial() ? share : share / parts;
}

double bytes_of(const Spec& spec) {
  return static_cast<double>(std::max<int64_t>(1, spec.numel())) *
         static_cast<double>(c10::elementSize(spec.dtype()));
}

/// The placements, on one mesh dim, of all inputs and of the output.
struct Strategy {
  Placements inputs;
  Placement output;
};

std::optional<int64_t> position(const Letters& letters, char letter) {
  const auto found = std::find(letters.begin(), letters.end(), letter);
  if (found == letters.end()) return std::nullopt;
  return found - letters.begin();
}

std::vector<Strategy> strategies(const Einsum& einsum) {
  const size_t count = einsum.inputs.size();
  std::vector<Strategy> result;
  std::string letters;
  auto collect = [&](const Letters& of) {
    for (const char letter : of) {
      if (letter != kFree && letters.find(letter) == std::string::npos) letters += letter;
    }
  };
  collect(einsum.output);  // kept letters first: ties go to results that stay sharded
  for (const Letters& input : einsum.inputs) collect(input);
  for (const char letter : letters) {
    Strategy strategy;
    for (const Letters& input : einsum.inputs) {
      const auto dim = position(input, letter);
      strategy.inputs.push_back(dim ? Shard(*dim) : Replicate());
    }
    const auto dim = position(einsum.output, letter);
    strategy.output = dim ? Shard(*dim) : Partial();
    result.push_back(std::move(strategy));
  }
  Strategy whole;
  whole.inputs.assign(count, Replicate());
  result.push_back(whole);
  if (einsum.linear == Einsum::Linear::jointly) {
    Strategy strategy;
    strategy.inputs.assign(count, Partial());
    strategy.output = Partial();
    result.push_back(std::move(strategy));
  }
  if (einsum.linear == Einsum::Linear::each) {
    for (size_t i = 0; i < count; ++i) {
      Strategy strategy = whole;
      strategy.inputs[i] = Partial();
      strategy.output = Partial();
      result.push_back(std::move(strategy));
    }
  }
  return result;
}

/// Whether all inputs have one and the same layout, cut by cut.
bool same_layout(const Call& call, const Einsum& einsum) {
  return std::all_of(call.tensors.begin(), call.tensors.end(),
                     [&](const Spec& spec) {
                       return spec.shape() == call.tensors[0].shape() &&
                              spec.placements() == call.tensors[0].placements() &&
                              spec.order() == call.tensors[0].order();
                     }) &&
         std::all_of(einsum.inputs.begin(), einsum.inputs.end(),
                     [&](const Letters& letters) { return letters == einsum.output; });
}

Letters identity(size_t ndim) {
  Letters letters;
  for (size_t i = 0; i < ndim; ++i) letters.push_back(static_cast<char>('a' + i));
  return letters;
}

/// Strides without gaps, with the dims in the same order in memory.
std::vector<int64_t> dense_strides(const Spec& spec) {
  const auto strides = local_strides(spec.strides(), spec.shape());
  return {strides.begin(), strides.end()};
}

// --- families
// ------------------------------------------------------------------------------------------------------------

/// Dims meet from the right, as in broadcasting.
std::optional<Decision> pointwise(Call& call, Einsum::Linear linear) {
  std::vector<int64_t> shape;
  for (const Spec& spec : call.tensors) shape = at::infer_size(shape, spec.shape());
  Einsum einsum;
  einsum.output = identity(shape.size());
  for (const Spec& spec : call.tensors) {
    const size_t missing = shape.size() - spec.shape().size();
    Letters letters;
    for (size_t i = 0; i < spec.shape().size(); ++i) {
      letters.push_back(spec.shape()[i] == shape[missing + i] ? einsum.output[missing + i] : kFree);
    }
    einsum.inputs.push_back(std::move(letters));
  }
  // A plain number added to a partial sum would be added once for each rank.
  einsum.linear = linear == Einsum::Linear::jointly && call.has_plain ? Einsum::Linear::none : linear;
  // As the first input of that shape lies in memory.
  for (const Spec& spec : call.tensors) {
    if (spec.shape() != c10::IntArrayRef(shape)) continue;
    call.output_strides = dense_strides(spec);
    break;
  }
  call.output_shape = std::move(shape);
  return decide(einsum, call);
}

std::optional<Decision> transparent(Call& call) {
  if (call.tensors.size() != 1) return std::nullopt;
  Decision decision;
  decision.inputs = {call.tensors[0].placements()};
  decision.output = call.tensors[0].placements();
  decision.output_shape = call.tensors[0].shape().vec();
  decision.output_strides = call.tensors[0].strides().vec();
  decision.order = call.tensors[0].order();
  return decision;
}

/// The same, in memory of its own.
std::optional<Decision> copied(Call& call) {
  auto decision = transparent(call);
  if (decision) decision->output_strides = dense_strides(call.tensors[0]);
  return decision;
}

/// A new tensor placed like this one, but for what is partial: its value is whole on every rank.
std::optional<Decision> like(Call& call) {
  auto decision = copied(call);
  if (decision) {
    for (Placement& placement : decision->output) {
      if (placement.is_partial()) placement = Replicate();
    }
  }
  return decision;
}

/// The same value written everywhere.
std::optional<Decision> fill(Call& call) {
  if (call.tensors[0].has_partial()) return std::nullopt;
  return transparent(call);
}

/// Matrix products: the last two inputs are multiplied; one before them, if any, is added.
std::optional<Decision> matrix_product(Call& call, bool added) {
  const size_t count = call.tensors.size();
  if (count != (added ? 3 : 2)) return std::nullopt;
  const Spec &left = call.tensors[count - 2], &right = call.tensors[count - 1];
  if (left.ndim() != 2 || right.ndim() != 2 || left.shape()[1] != right.shape()[0]) return std::nullopt;
  Einsum einsum;
  einsum.inputs = {{'m', 'k'}, {'k', 'n'}};
  einsum.output = {'m', 'n'};
  einsum.linear = Einsum::Linear::each;
  call.output_shape = {left.shape()[0], right.shape()[1]};
  if (added) {
    Letters letters;
    const auto shape = call.tensors[0].shape();
    if (shape.size() > 2) return std::nullopt;
    for (size_t i = 0; i < shape.size(); ++i) {
      const size_t dim = 2 - shape.size() + i;
      letters.push_back(shape[i] == call.output_shape[dim] ? einsum.output[dim] : kFree);
    }
    einsum.inputs.insert(einsum.inputs.begin(), letters);
    einsum.linear = Einsum::Linear::none;
  }
  auto decision = decide(einsum, call);
  // A sum that is still partial would have the added tensor in it once for each rank.
  if (added && decision) {
    for (size_t i = 0; i < decision->output.size(); ++i) {
      if (decision->output[i].is_partial() && call.tensors[0].mesh().shape()[i] > 1) return std::nullopt;
    }
  }
  return decision;
}

/// The input's dim d becomes the result's target_of[d]; kGone: it is not there any more, or not whole, so it
/// must not be cut.
constexpr int64_t kGone = -1;
std::optional<Decision> moved_dims(const Call& call, const std::vector<int64_t>& target_of,
                                   std::vector<int64_t> output_shape, std::vector<int64_t> output_strides) {
  const Spec& spec = call.tensors[0];
  Decision decision;
  decision.inputs = {spec.placements()};
  decision.order = spec.order();
  decision.output_shape = std::move(output_shape);
  decision.output_strides = std::move(output_strides);
  for (const Placement& placement : spec.placements()) {
    if (!placement.is_shard_like()) {
      decision.output.push_back(placement);
      continue;
    }
    const int64_t target = target_of[placement.dim()];
    if (target == kGone) return std::nullopt;
    decision.output.push_back(placement.is_shard() ? Shard(target) : StridedShard(target, placement.split()));
  }
  return decision;
}

/// The result's dim i is the input's dims[i].
std::optional<Decision> permuted(Call& call, std::vector<int64_t> dims) {
  const auto shape = call.tensors[0].shape();
  std::vector<int64_t> target_of(shape.size(), kGone), output_shape, output_strides;
  for (int64_t& dim : dims) {
    dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(shape.size()));
    target_of[dim] = static_cast<int64_t>(output_shape.size());
    output_shape.push_back(shape[dim]);
    output_strides.push_back(call.tensors[0].strides()[dim]);
  }
  return moved_dims(call, target_of, std::move(output_shape), std::move(output_strides));
}

std::optional<Decision> swapped(Call& call, int64_t first, int64_t second) {
  const int64_t ndim = call.tensors[0].ndim();
  if (ndim == 0) return transparent(call);
  std::vector<int64_t> dims(ndim);
  std::iota(dims.begin(), dims.end(), 0);
  std::swap(dims[at::maybe_wrap_dim(first, ndim)], dims[at::maybe_wrap_dim(second, ndim)]);
  return permuted(call, std::move(dims));
}

std::optional<Decision> transpose(Call& call) {
  if (call.tensors[0].ndim() != 2) return std::nullopt;
  return swapped(call, 0, 1);
}

/// Without one dim (select, squeeze), or with one of size 1 more (unsqueeze).
std::optional<Decision> dim_removed(Call& call, int64_t dim) {
  const Spec& spec = call.tensors[0];
  std::vector<int64_t> target_of, shape = spec.shape().vec(), strides = spec.strides().vec();
  dim = at::maybe_wrap_dim(dim, spec.ndim());
  for (int64_t d = 0; d < spec.ndim(); ++d) target_of.push_back(d == dim ? kGone : d - (d > dim));
  shape.erase(shape.begin() + dim);
  strides.erase(strides.begin() + dim);
  return moved_dims(call, target_of, std::move(shape), std::move(strides));
}
std::optional<Decision> dim_added(Call& call, int64_t dim) {
  const Spec& spec = call.tensors[0];
  std::vector<int64_t> target_of, shape = spec.shape().vec(), strides = spec.strides().vec();
  dim = at::maybe_wrap_dim(dim, spec.ndim() + 1);
  for (int64_t d = 0; d < spec.ndim(); ++d) target_of.push_back(d + (d >= dim));
  const int64_t stride = dim < spec.ndim() ? std::max<int64_t>(shape[dim], 1) * strides[dim] : 1;
  shape.insert(shape.begin() + dim, 1);
  strides.insert(strides.begin() + dim, stride);
  return moved_dims(call, target_of, std::move(shape), std::move(strides));
}
std::optional<Decision> squeezed(Call& call, int64_t dim) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return transparent(call);
  dim = at::maybe_wrap_dim(dim, spec.ndim());
  if (spec.shape()[dim] == 1) return dim_removed(call, dim);
  // Nothing happens, unless a rank holds just 1 of the dim and would remove it.
  const bool is_cut = std::any_of(spec.placements().begin(), spec.placements().end(),
                                  [&](const Placement& placement) { return placement.is_shard_like(dim); });
  return is_cut ? std::nullopt : transparent(call);
}

/// A range of one dim, which must not be cut.
std::optional<Decision> sliced(Call& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = at::maybe_wrap_dim(call.arguments[1].toInt(), spec.ndim());
  const int64_t size = spec.shape()[dim];
  auto bound = [&](size_t position, int64_t missing) {
    int64_t value = call.arguments[position].isNone() ? missing : call.arguments[position].toInt();
    if (value < 0) value += size;
    return std::clamp<int64_t>(value, 0, size);
  };
  const int64_t start = bound(2, 0), end = std::max(start, bound(3, size)), step = call.arguments[4].toInt();
  if (step < 1) return std::nullopt;
  std::vector<int64_t> target_of(spec.ndim()), output_shape = spec.shape().vec();
  std::iota(target_of.begin(), target_of.end(), 0);
  output_shape[dim] = (end - start + step - 1) / step;
  if (output_shape[dim] != size) target_of[dim] = kGone;
  std::vector<int64_t> output_strides = spec.strides().vec();
  output_strides[dim] *= step;
  return moved_dims(call, target_of, std::move(output_shape), std::move(output_strides));
}

/// New dims in front, and dims of size 1 repeated.
std::optional<Decision> expanded(Call& call) {
  const auto shape = call.tensors[0].shape();
  std::vector<int64_t> output_shape = call.arguments[1].toIntVector(), output_strides(output_shape.size(), 0),
                       target_of;
  if (output_shape.size() < shape.size()) return std::nullopt;
  const size_t added = output_shape.size() - shape.size();
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    int64_t& size = output_shape[added + dim];
    if (size == -1) size = shape[dim];
    target_of.push_back(size == shape[dim] ? static_cast<int64_t>(added + dim) : kGone);
    if (size == shape[dim]) output_strides[added + dim] = call.tensors[0].strides()[dim];
  }
  auto decision = moved_dims(call, target_of, std::move(output_shape), std::move(output_strides));
  if (decision) decision->sizes_argument = 1;
  return decision;
}

/// Sums over some dims. `dims` empty: over all.
std::optional<Decision> sum(Call& call, std::vector<int64_t> dims, bool keep) {
  if (call.tensors.size() != 1) return std::nullopt;
  const auto shape = call.tensors[0].shape();
  const auto ndim = static_cast<int64_t>(shape.size());
  for (int64_t& dim : dims) dim = at::maybe_wrap_dim(dim, ndim);
  Einsum einsum;
  einsum.inputs = {identity(shape.size())};
  einsum.linear = Einsum::Linear::jointly;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    const bool reduced = dims.empty() || std::find(dims.begin(), dims.end(), dim) != dims.end();
    if (reduced && !keep) continue;
    einsum.output.push_back(reduced ? kFree : einsum.inputs[0][dim]);
    call.output_shape.push_back(reduced ? 1 : shape[dim]);
  }
  return decide(einsum, call);
}

/// Each maximal run of dims that the view leaves alone, splits or joins. A cut survives if it is of the first
/// dim of a run on both sides and falls on the same elements: where both sizes divide by the number of ranks.
/// Dims of size 1 come and go.
std::optional<Decision> view(Call& call, size_t sizes_argument) {
  if (call.tensors.size() != 1) return std::nullopt;
  const Spec& spec = call.tensors[0];
  const std::vector<int64_t> to = at::infer_size(call.arguments[sizes_argument].toIntVector(), spec.numel());
  const auto from = spec.shape();
  if (spec.numel() == 0 || !spec.order().empty()) return std::nullopt;

  std::vector<int64_t> target_of(from.size(), -1);  // the dim of `to` that begins where this one does
  size_t i = 0, j = 0;
  auto skip_ones = [&] {
    while (i < from.size() && from[i] == 1) ++i;
    while (j < to.size() && to[j] == 1) ++j;
  };
  for (skip_ones(); i < from.size() && j < to.size(); skip_ones()) {
    target_of[i] = static_cast<int64_t>(j);
    int64_t a = from[i++], b = to[j++];
    while (a != b) {
      if (a < b) {
        a *= from[i++];
      } else {
        b *= to[j++];
      }
    }
  }
  Decision decision;
  decision.inputs = {spec.placements()};
  decision.output_shape = to;
  if (const auto strides = at::detail::computeStride(from, spec.strides(), to))
    decision.output_strides = *strides;
  decision.sizes_argument = sizes_argument;
  std::vector<int64_t> ranks(from.size(), 1);
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (spec.placement(m).is_shard()) ranks[spec.placement(m).dim()] *= spec.mesh().shape()[m];
  }
  for (const Placement& placement : spec.placements()) {
    if (!placement.is_shard_like()) {
      decision.output.push_back(placement);
      continue;
    }
    const int64_t dim = placement.dim(), target = target_of[dim];
    const bool same_size = target >= 0 && from[dim] == to[target];
    const bool divides =
        target >= 0 && placement.is_shard() && from[dim] % ranks[dim] == 0 && to[target] % ranks[dim] == 0;
    if (!(divides || (same_size && placement.is_shard()))) return std::nullopt;
    decision.output.push_back(Shard(target));
  }
  return decision;
}

using L = Einsum::Linear;
constexpr bool kReadsArguments = true;

std::optional<Decision> jointly_linear(Call& call) { return pointwise(call, L::jointly); }
std::optional<Decision> multilinear(Call& call) { return pointwise(call, L::each); }
std::optional<Decision> elementwise(Call& call) { return pointwise(call, L::none); }

const std::map<std::string, Rule>& table() {
  static const std::map<std::string, Rule> rules{
      // The same on every rank, whatever it holds.
      {"aten::detach", {transparent}},
      {"aten::alias", {transparent}},
      {"aten::clone", {copied}},
      {"aten::empty_like", {copied}},
      {"aten::zeros_like", {like}},
      {"aten::ones_like", {like}},
      {"aten::full_like", {like}},
      {"aten::zero_", {fill}},
      {"aten::fill_.Scalar", {fill}},
      {"aten::_to_copy", {elementwise}},
      // Sums of sums, and multiples of sums.
      {"aten::add.Tensor", {jointly_linear}},
      {"aten::sub.Tensor", {jointly_linear}},
      {"aten::add_.Tensor", {jointly_linear}},
      {"aten::sub_.Tensor", {jointly_linear}},
      {"aten::neg", {jointly_linear}},
      {"aten::copy_", {jointly_linear}},
      {"aten::mul.Tensor", {multilinear}},
      {"aten::mul_.Tensor", {multilinear}},
      // Contractions.
      {"aten::mm", {[](Call& call) { return matrix_product(call, false); }}},
      {"aten::addmm", {[](Call& call) { return matrix_product(call, true); }}},
      {"aten::sum", {[](Call& call) { return sum(call, {}, false); }}},
      {"aten::sum.dim_IntList",
       {[](Call& call) {
          const auto& dims = call.arguments[1];
          return sum(call, dims.isNone() ? std::vector<int64_t>() : dims.toIntVector(),
                     call.arguments[2].toBool());
        },
        kReadsArguments}},
      // Views.
      {"aten::t", {transpose}},
      {"aten::transpose.int",
       {[](Call& call) { return swapped(call, call.arguments[1].toInt(), call.arguments[2].toInt()); },
        kReadsArguments}},
      {"aten::permute",
       {[](Call& call) { return permuted(call, call.arguments[1].toIntVector()); }, kReadsArguments}},
      {"aten::select.int",
       {[](Call& call) { return dim_removed(call, call.arguments[1].toInt()); }, kReadsArguments}},
      {"aten::squeeze.dim",
       {[](Call& call) { return squeezed(call, call.arguments[1].toInt()); }, kReadsArguments}},
      {"aten::unsqueeze",
       {[](Call& call) { return dim_added(call, call.arguments[1].toInt()); }, kReadsArguments}},
      {"aten::slice.Tensor", {sliced, kReadsArguments}},
      {"aten::expand", {expanded, kReadsArguments}},
      {"aten::view", {[](Call& call) { return view(call, 1); }, kReadsArguments}},
      {"aten::_unsafe_view", {[](Call& call) { return view(call, 1); }, kReadsArguments}},
  };
  return rules;
}

}  // namespace

std::optional<Decision> decide(const Einsum& einsum, const Call& call) {
  const Spec& first = call.tensors[0];
  const auto mesh_shape = first.mesh().shape();
  Decision decision;
  decision.inputs.resize(call.tensors.size());
  decision.output_shape = call.output_shape;
  decision.output_strides = call.output_strides;

  const bool special = std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& spec) {
    return !spec.order().empty() || std::any_of(spec.placements().begin(), spec.placements().end(),
                                                [](const Placement& p) { return p.is_strided_shard(); });
  });
  if (special && same_layout(call, einsum) && !first.has_partial()) {
    // Cuts that letters cannot tell: kept as they are where all have the same.
    for (Placements& input : decision.inputs) input = first.placements();
    decision.output = first.placements();
    decision.order = first.order();
    return decision;
  }
  if (special && call.written && !(call.tensors[*call.written].order().empty())) return std::nullopt;

  const auto candidates = strategies(einsum);
  for (size_t m = 0; m < mesh_shape.size(); ++m) {
    const Strategy* best = nullptr;
    double lowest = kImpossible;
    for (const Strategy& strategy : candidates) {
      double cost = 0;
      for (size_t i = 0; i < call.tensors.size(); ++i) {
        const Placement& now = call.tensors[i].placement(m);
        if (call.written == i && now != strategy.inputs[i]) cost = kImpossible;
        cost += bytes_of(call.tensors[i]) * price(now, strategy.inputs[i], mesh_shape[m]);
      }
      if (cost < lowest) {
        lowest = cost;
        best = &strategy;
      }
    }
    if (!best) return std::nullopt;
    for (size_t i = 0; i < call.tensors.size(); ++i) decision.inputs[i].push_back(best->inputs[i]);
    decision.output.push_back(best->output);
  }
  return decision;
}

const Rule* find_rule(const std::string& name, bool is_pointwise) {
  const auto found = table().find(name);
  if (found != table().end()) return &found->second;
  static const Rule any_pointwise{elementwise};
  return is_pointwise ? &any_pointwise : nullptr;
}

}  // namespace tessera::rules
