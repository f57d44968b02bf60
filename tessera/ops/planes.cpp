#include <tessera/kernels/window.h>
#include <tessera/ops/planes.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <limits>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/util/irange.h>

namespace tessera::ops {

Rule planes(int64_t inner, size_t results, bool backward, bool linear) {
  return {"cut along batch and channels",
          [=](const OpCall& call) -> std::optional<Strategies> {
            const auto self = call.tensor("self");
            const Spec& spec = call.tensors[self ? *self : 0];
            const int64_t outer = spec.ndim() - inner;
            if (outer < 1 || spec.numel() == 0) return std::nullopt;
            Shape shape = spec.shape().vec();
            const bool sized = call.position("input_size").has_value();
            if (sized) shape = call.integers("input_size");
            if (!backward) std::fill(shape.begin() + outer, shape.end(), kLocal);
            Strategies strategies;
            strategies.results.assign(results, Result{shape});
            for (int64_t d = 0; d < outer; ++d) {
              // There may be no batch, but there must be channels.
              Strategy strategy{
                  Placements(call.tensors.size(), Shard(d)), {Shard(d)}, d == outer - 1 ? shape[d] : 0};
              strategies.options.push_back(std::move(strategy));
            }
            for (const Spec& tensor : call.tensors) {
              if (tensor.ndim() != spec.ndim()) return std::nullopt;
            }
            if (linear) {
              Strategy strategy{Placements(call.tensors.size(), Replicate()), {Partial()}};
              strategy.inputs[0] = Partial();
              strategies.options.push_back(std::move(strategy));
            }
            if (sized) {
              strategies.localize = [position = *call.position("input_size")](const ChosenSpecs& chosen) {
                return LocalCall{{{position, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
              };
            }
            return strategies;
          },
          {"input_size"}};
}

namespace {

/// What a range of the result looks at: from the first to the last tap.
Range reach(const LinearMap& map, const Range& of_result) {
  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (const int64_t place : c10::irange(of_result.offset, of_result.end())) {
    for (const Tap& tap : map.taps(place)) {
      first = std::min(first, tap.place);
      last = std::max(last, tap.place);
    }
  }
  return {first, last - first + 1};
}

/// A part of a linear map: from what a rank needs of the input to what it holds of the result.
class LocalMap {
 public:
  LocalMap(int64_t dim, const LinearMap& map, const Range& needed, const Range& held)
      : dim_(dim), needed_(needed.size), is_identity_(needed == held) {
    struct Places {
      std::vector<int64_t> to, from;
      std::vector<double> weights;
    };
    std::vector<Places> all;  // of the first taps, of the second ones, ...
    bool weighs = false;
    for (const int64_t place : c10::irange(held.offset, held.end())) {
      const Taps taps = map.taps(place);
      if (taps.size() > all.size()) all.resize(taps.size());
      for (const size_t k : c10::irange(taps.size())) {
        all[k].to.push_back(place - held.offset);
        all[k].from.push_back(taps[k].place - needed.offset);
        all[k].weights.push_back(taps[k].weight);
        weighs |= taps[k].weight != 1;
      }
      is_identity_ &= taps.size() == 1 && taps[0].place == place;
    }
    is_identity_ &= !weighs;
    for (const Places& each : all) {
      Term& term = terms_.emplace_back(at::tensor(each.from));
      if (static_cast<int64_t>(each.to.size()) < held.size) term.to = at::tensor(each.to);
      if (weighs) term.weights = at::tensor(each.weights, at::kDouble);
    }
  }

  at::Tensor operator()(const at::Tensor& input) const {
    if (is_identity_) return input;
    at::Tensor result;
    for (const Term& term : terms_) {
      const at::Tensor part = weighted(taken(input, term.from), term);
      if (!result.defined())
        result = part;  // all places have a first tap
      else if (term.to.defined())
        result.index_add_(dim_, term.to.to(input.device()), part);
      else
        result.add_(part);
    }
    return result;
  }

  /// From the gradient of the one to that of the other.
  at::Tensor transposed(const at::Tensor& gradient) const {
    if (is_identity_) return gradient;
    auto shape = gradient.sizes().vec();
    shape[dim_] = needed_;
    at::Tensor result = at::zeros(shape, gradient.options());
    for (const Term& term : terms_) {
      const at::Tensor part = weighted(term.to.defined() ? taken(gradient, term.to) : gradient, term);
      result.index_add_(dim_, term.from.to(gradient.device()), part);
    }
    return result;
  }

 private:
  /// Taps that different places have.
  struct Term {
    at::Tensor from;          // which
    at::Tensor to = {};       // whose; undefined: all places have one
    at::Tensor weights = {};  // undefined: 1
  };

  at::Tensor along(const at::Tensor& values, const at::Tensor& like) const {
    Shape shape(like.dim(), 1);
    shape[dim_] = -1;
    return values.to(like.device()).view(shape);
  }

  at::Tensor taken(const at::Tensor& tensor, const at::Tensor& places) const {
    if (dim_ < tensor.dim() - 1) return tensor.index_select(dim_, places.to(tensor.device()));
    // The same, but several times as fast along the last dim.
    auto shape = tensor.sizes().vec();
    shape[dim_] = places.numel();
    return tensor.gather(dim_, along(places, tensor).expand(shape));
  }

  at::Tensor weighted(const at::Tensor& values, const Term& term) const {
    return term.weights.defined() ? at::mul(values, along(term.weights.to(values.scalar_type()), values))
                                  : values;
  }

  int64_t dim_, needed_;
  bool is_identity_;
  std::vector<Term> terms_;
};

/// A rank's part of a call.
struct SeparablePart {
  Halos halos;
  std::vector<LocalMap> maps = {};  // none if the rank has nothing to do
  Shape input_shape, result_shape;  // of what the rank holds
  bool copies;

  SeparablePart(const Spec& input, const Spec& result, const std::vector<LinearMap>& all, bool copies)
      : halos(halos_of(input, result, all)),
        input_shape(input.local_shape().vec()),
        result_shape(result.local_shape().vec()),
        copies(copies) {
    if (halos.empty() || halos.idle()) return;
    for (const size_t i : c10::irange(all.size())) {
      const int64_t dim = first(input, all) + static_cast<int64_t>(i);
      const Halo* halo = halos.of(dim);
      maps.emplace_back(dim, all[i], halo ? halo->needed() : Range{0, input.shape()[dim]},
                        halo ? halo->held() : Range{0, result.shape()[dim]});
    }
  }

  at::Tensor forward(const at::Tensor& input) const {
    at::Tensor x = halos.fetch(input, 0);
    if (halos.idle()) return new_memory(result_shape, input.options());
    if (!copies) x = x.to(at::toOpMathType(x.scalar_type()));
    for (const LocalMap& map : maps) x = map(x);
    return fresh(x, input);
  }

  at::Tensor backward(const at::Tensor& gradient) const {
    at::Tensor x = gradient.to(at::toOpMathType(gradient.scalar_type()));
    if (halos.idle()) x = at::zeros(halos.shaped(at::empty({1}).expand(input_shape)).sizes(), x.options());
    for (auto map = maps.rbegin(); map != maps.rend(); ++map) x = map->transposed(x);
    return fresh(halos.give_back(x), gradient);
  }

 private:
  /// What was made of a tensor, in its dtype; never that tensor itself.
  static at::Tensor fresh(const at::Tensor& made, const at::Tensor& of) {
    return made.is_same(of) ? made.clone() : made.to(of.scalar_type());
  }

  static int64_t first(const Spec& input, const std::vector<LinearMap>& all) {
    return input.ndim() - static_cast<int64_t>(all.size());
  }

  static Halos halos_of(const Spec& input, const Spec& result, const std::vector<LinearMap>& all) {
    std::vector<Reach> reaches;
    for (const LinearMap& map : all)
      reaches.emplace_back([map](const Range& range) { return reach(map, range); });
    return {input, result, first(input, all), reaches};
  }
};

Rule separable(const Separable& op, bool backward) {
  const Rule of_planes = planes(op.inner, 1, backward, /*linear=*/true);
  Rule rule{
      op.text,
      [=](const OpCall& call) -> std::optional<Strategies> {
        auto strategies = of_planes.propose(call);
        if (!strategies) return strategies;
        const Spec& given = call.tensors[0];
        if (given.dtype() == at::kBool) return std::nullopt;
        if (!op.copies && !at::isFloatingType(given.dtype())) return strategies;
        Shape input = given.shape().vec();
        if (backward)
          input = call.position("input_size") ? call.integers("input_size") : call.tensors[1].shape().vec();
        const bool fits = static_cast<int64_t>(input.size()) == given.ndim();
        const auto maps =
            fits ? op.maps(call, c10::IntArrayRef(input).slice(given.ndim() - op.inner)) : std::nullopt;
        if (!maps) return strategies;
        Shape result = input;
        for (const size_t i : c10::irange(maps->size()))
          result[result.size() - maps->size() + i] = (*maps)[i].size;
        if (backward && given.shape() != c10::IntArrayRef(result)) return strategies;
        if (!backward) strategies->results = {{result}};
        for (int64_t dim = given.ndim() - op.inner; dim < given.ndim(); ++dim) {
          strategies->options.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}});
          strategies->options.back().contiguous = true;
        }
        strategies->localize = [=, copies = op.copies,
                                of_planes = strategies->localize](const ChosenSpecs& chosen) {
          const Spec &given = chosen.inputs[0], &made = chosen.outputs[0];
          const auto part = backward ? std::make_shared<const SeparablePart>(made, given, *maps, copies)
                                     : std::make_shared<const SeparablePart>(given, made, *maps, copies);
          if (part->halos.empty()) return of_planes ? of_planes(chosen) : LocalCall{};
          LocalCall local;
          local.communicates = part->halos.communicates();
          local.compute = [=](const c10::OperatorHandle&, const Stack& arguments) {
            const at::Tensor x = arguments[0].toTensor();
            return Stack{backward ? part->backward(x) : part->forward(x)};
          };
          return local;
        };
        return strategies;
      },
      of_planes.reads};
  rule.reads.insert(rule.reads.end(), op.reads.begin(), op.reads.end());
  return rule;
}

}  // namespace

Rule separable(const Separable& op) { return separable(op, false); }
Rule separable_backward(const Separable& op) { return separable(op, true); }

}  // namespace tessera::ops
