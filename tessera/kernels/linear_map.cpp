#include <tessera/kernels/linear_map.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

namespace {

using Shape = std::vector<int64_t>;

/// What a range of the result looks at: from the first to the last tap.
Range reach(const LinearMap& map, const Range& of_result) {
  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (const int64_t position : c10::irange(of_result.offset, of_result.end())) {
    for (const Tap& tap : map.taps(position)) {
      first = std::min(first, tap.position);
      last = std::max(last, tap.position);
    }
  }
  return {first, last - first + 1};
}

int64_t first_dim(const Spec& input, const std::vector<LinearMap>& all) {
  return input.ndim() - static_cast<int64_t>(all.size());
}

Halos halos_of(const Spec& input, const Spec& result, const std::vector<LinearMap>& all) {
  std::vector<Reach> reaches;
  for (const LinearMap& map : all)
    reaches.emplace_back([map](const Range& range) { return reach(map, range); });
  return {input, result, first_dim(input, all), reaches};
}

/// What was made of a tensor, in its dtype; never that tensor itself.
at::Tensor fresh(const at::Tensor& made, const at::Tensor& of) {
  return made.is_same(of) ? made.clone() : made.to(of.scalar_type());
}

}  // namespace

/// A rank's part of a linear map: from what a rank needs of the input to its shard of the result.
class LinearMaps::Local {
 public:
  Local(int64_t dim, const LinearMap& map, const Range& needed, const Range& local)
      : dim_(dim), needed_(needed.size), is_identity_(needed == local) {
    struct Positions {
      std::vector<int64_t> to, from;
      std::vector<double> weights;
    };
    std::vector<Positions> all;  // of the first taps, of the second ones, ...
    bool weighs = false;
    for (const int64_t position : c10::irange(local.offset, local.end())) {
      const Taps taps = map.taps(position);
      if (taps.size() > all.size()) all.resize(taps.size());
      for (const size_t k : c10::irange(taps.size())) {
        all[k].to.push_back(position - local.offset);
        all[k].from.push_back(taps[k].position - needed.offset);
        all[k].weights.push_back(taps[k].weight);
        weighs |= taps[k].weight != 1;
      }
      is_identity_ &= taps.size() == 1 && taps[0].position == position;
    }
    is_identity_ &= !weighs;
    for (const Positions& each : all) {
      Term& term = terms_.emplace_back(at::tensor(each.from));
      if (static_cast<int64_t>(each.to.size()) < local.size) term.to = at::tensor(each.to);
      if (weighs) term.weights = at::tensor(each.weights, at::kDouble);
    }
  }

  at::Tensor operator()(const at::Tensor& input) const {
    if (is_identity_) return input;
    at::Tensor result;
    for (const Term& term : terms_) {
      const at::Tensor part = weighted(taken(input, term.from), term);
      if (!result.defined())
        result = part;  // all positions have a first tap
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
  /// Taps that different positions have.
  struct Term {
    at::Tensor from;          // which
    at::Tensor to = {};       // whose; undefined: all positions have one
    at::Tensor weights = {};  // undefined: 1
  };

  at::Tensor along(const at::Tensor& values, const at::Tensor& like) const {
    Shape shape(like.dim(), 1);
    shape[dim_] = -1;
    return values.to(like.device()).view(shape);
  }

  at::Tensor taken(const at::Tensor& tensor, const at::Tensor& positions) const {
    if (dim_ < tensor.dim() - 1) return tensor.index_select(dim_, positions.to(tensor.device()));
    // The same, but several times as fast along the last dim.
    auto shape = tensor.sizes().vec();
    shape[dim_] = positions.numel();
    return tensor.gather(dim_, along(positions, tensor).expand(shape));
  }

  at::Tensor weighted(const at::Tensor& values, const Term& term) const {
    return term.weights.defined() ? at::mul(values, along(term.weights.to(values.scalar_type()), values))
                                  : values;
  }

  int64_t dim_, needed_;
  bool is_identity_;
  std::vector<Term> terms_;
};

LinearMaps::LinearMaps(const Spec& input, const Spec& result, const std::vector<LinearMap>& all, bool copies)
    : halos_(halos_of(input, result, all)),
      input_shape_(input.local_shape().vec()),
      result_shape_(result.local_shape().vec()),
      copies_(copies) {
  if (halos_.empty() || halos_.idle()) return;
  for (const size_t i : c10::irange(all.size())) {
    const int64_t dim = first_dim(input, all) + static_cast<int64_t>(i);
    const Halo* halo = halos_.of(dim);
    maps_.emplace_back(dim, all[i], halo ? halo->needed() : Range{0, input.shape()[dim]},
                       halo ? halo->local() : Range{0, result.shape()[dim]});
  }
}
LinearMaps::~LinearMaps() = default;

at::Tensor LinearMaps::forward(const at::Tensor& input) const {
  at::Tensor x = halos_.fetch(input, 0);
  if (halos_.idle()) return new_memory(result_shape_, input.options());
  if (!copies_) x = x.to(at::toOpMathType(x.scalar_type()));
  for (const Local& map : maps_) x = map(x);
  return fresh(x, input);
}

at::Tensor LinearMaps::backward(const at::Tensor& gradient) const {
  at::Tensor x = gradient.to(at::toOpMathType(gradient.scalar_type()));
  if (halos_.idle()) x = at::zeros(halos_.shaped(at::empty({1}).expand(input_shape_)).sizes(), x.options());
  for (auto map = maps_.rbegin(); map != maps_.rend(); ++map) x = map->transposed(x);
  return fresh(halos_.give_back(x), gradient);
}

}  // namespace tessera::kernels
