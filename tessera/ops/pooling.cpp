#include <tessera/kernels/window.h>
#include <tessera/ops/planes.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <functional>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/native/AdaptivePooling.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// Places of planes count row by row. From places in planes of sizes `from` to those in planes of sizes `to`;
/// `moved` tells where a place comes to lie along one of the dims.
at::Tensor renumbered(at::Tensor places, const Shape& from, const Shape& to,
                      const std::function<at::Tensor(size_t dim, const at::Tensor& place)>& moved) {
  at::Tensor result = at::zeros_like(places);
  int64_t weight = 1;
  for (size_t i = from.size(); i-- > 0;) {
    result.add_(moved(i, at::remainder(places, from[i])), weight);
    weight *= to[i];
    places = at::floor_divide(places, from[i]);
  }
  return result;
}

/// A rank's part of a call: what it sees of the planes, and what it holds of the result.
struct Part {
  int64_t first;  // spatial dim
  Shape sizes;    // of the input's spatial dims
  Halos halos;
  Spec result;

  Part(int64_t first, Shape sizes, const Spec& input, const Spec& result, const std::vector<Reach>& reaches)
      : first(first), sizes(std::move(sizes)), halos(input, result, first, reaches), result(result) {}

  int64_t dim(size_t i) const { return first + static_cast<int64_t>(i); }
  const Halo* halo(size_t i) const { return halos.of(dim(i)); }
  /// What the rank sees in spatial dim `i`, and what it holds of the result there.
  Range seen(size_t i) const { return halo(i) ? halo(i)->needed() : Range{0, sizes[i]}; }
  Range held(size_t i) const { return halo(i) ? halo(i)->held() : Range{0, result.shape()[dim(i)]}; }
  Shape seen_sizes() const {
    Shape all;
    for (const size_t i : c10::irange(sizes.size())) all.push_back(seen(i).size);
    return all;
  }
  /// A tensor of one dim, along spatial dim `i`.
  at::Tensor along(size_t i, const at::Tensor& values) const {
    Shape shape(sizes.size(), 1);
    shape[i] = -1;
    return values.view(shape);
  }
};

template <typename P>
using Compute = std::function<Stack(const P& part, const c10::OperatorHandle& op, Stack arguments)>;

/// That spatial dims may be cut too. `shape`: of the result. Parts are made of `all`, which tells of the
/// call.
template <typename P, typename All>
void add_halos(Strategies& strategies, const OpCall& call, const All& all, const Shape& shape, bool backward,
               const Compute<P>& compute) {
  const size_t self = *call.tensor("self");
  if (!backward) strategies.results.assign(strategies.results.size(), Result{shape});
  for (int64_t dim = all.first; dim < call.tensors[self].ndim(); ++dim) {
    strategies.options.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}});
    strategies.options.back().contiguous = true;
  }
  strategies.localize = [=](const ChosenSpecs& chosen) {
    const Spec& result = backward ? chosen.inputs[0] : chosen.outputs[0];
    const auto part = std::make_shared<const P>(all, chosen.inputs[self], result);
    LocalCall local;
    if (part->halos.empty()) return local;
    local.communicates = part->halos.communicates();
    local.compute = [part, compute](const c10::OperatorHandle& op, Stack arguments) {
      return compute(*part, op, std::move(arguments));
    };
    return local;
  };
}

/// Gradients of maxima, to the places where these are.
Stack max_backward(const Part& part, const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), places = arguments.back().toTensor();
  const auto shape = part.halos.shaped(arguments[1].toTensor()).sizes().vec();
  const at::Tensor result = at::zeros(shape, gradient.options());
  if (gradient.numel() > 0) {
    const at::Tensor seen =
        renumbered(places, part.sizes, part.seen_sizes(),
                   [&](size_t i, const at::Tensor& place) { return at::sub(place, part.seen(i).offset); });
    const int64_t first = part.first;
    result.flatten(first).scatter_add_(first, seen.flatten(first), gradient.flatten(first));
  }
  return {part.halos.give_back(result)};
}

/// Of a rank that holds nothing of the result.
Stack no_maxima(const Part& part, const at::Tensor& x) {
  const auto shape = part.result.local_shape();
  return {new_memory(shape, x.options()), new_memory(shape, x.options().dtype(at::kLong))};
}

/// A call of a pooling operator: its windows in the last dims, which are the spatial ones.
struct Pool {
  size_t self = 0;    // number of the input among the tensors
  int64_t first = 0;  // spatial dim
  Shape sizes = {};   // of the input's spatial dims
  std::vector<Sliding> windows = {};
  std::optional<size_t> padding = {}, divisor = {};  // positions of arguments
  bool counts_padding = true;
  std::optional<int64_t> divides_by = {};

  /// Nothing if it is not sane, which libtorch is to say. `shape`: of the result.
  static std::optional<Pool> of(const OpCall& call, int64_t inner, Shape& shape) {
    Pool pool;
    const auto self = call.tensor("self");
    if (!self) return std::nullopt;
    pool.self = *self;
    const Spec& x = call.tensors[*self];
    pool.first = x.ndim() - inner;
    shape = x.shape().vec();
    auto each = [&](const char* name, int64_t otherwise) {
      Shape values = call.position(name) ? call.integers(name) : Shape{};
      if (values.empty()) values = {otherwise};
      if (values.size() == 1) values.resize(inner, values[0]);
      return values;
    };
    const Shape kernel = each("kernel_size", 1), padding = each("padding", 0), dilation = each("dilation", 1);
    const Shape stride = call.integers("stride").empty() ? kernel : each("stride", 1);
    const bool ceil = call.flag("ceil_mode");
    for (const int64_t i : c10::irange(inner)) {
      const Sliding window{kernel[i], stride[i], padding[i], dilation[i]};
      int64_t& size = shape[pool.first + i];
      const bool sane = window.kernel > 0 && window.stride > 0 && window.dilation > 0 &&
                        window.padding >= 0 && window.padding <= (window.extent() + 1) / 2;
      if (!sane) return std::nullopt;
      pool.sizes.push_back(size);
      pool.windows.push_back(window);
      size = window.size(size, ceil);
      if (size < 1) return std::nullopt;
    }
    pool.padding = call.position("padding");
    pool.divisor = call.position("divisor_override");
    if (pool.divisor) {
      pool.counts_padding = call.flag("count_include_pad");
      if (call.has("divisor_override")) pool.divides_by = call.integer("divisor_override");
      if (pool.divides_by == 0) return std::nullopt;
    }
    return pool;
  }

  std::vector<Reach> reaches() const {
    std::vector<Reach> all;
    for (const Sliding& window : windows)
      all.emplace_back([window](const Range& range) { return window.reach(range); });
    return all;
  }
};

/// A rank's part of such a call.
struct PoolPart : Part {
  Pool pool;

  PoolPart(const Pool& pool, const Spec& input, const Spec& result)
      : Part(pool.first, pool.sizes, input, result, pool.reaches()), pool(pool) {}

  /// Dims that are cut bring their padding along.
  void put_padding(Stack& arguments) const {
    Shape pads;
    for (const size_t i : c10::irange(pool.windows.size()))
      pads.push_back(halo(i) ? 0 : pool.windows[i].padding);
    arguments[*pool.padding] = pads;
  }

  /// From places in what the rank sees to places in the whole planes.
  at::Tensor global(const at::Tensor& places) const {
    return renumbered(places, seen_sizes(), sizes, [&](size_t i, const at::Tensor& seen_place) {
      const at::Tensor place = at::add(seen_place, seen(i).offset);
      // Where all is as low as the padding, the first place that is none counts.
      return halo(i) ? at::where(at::lt(place, 0), at::remainder(place, pool.windows[i].dilation), place)
                     : place;
    });
  }

  /// By what sums over windows are divided, of what the rank holds of the result.
  at::Tensor divisors(const at::TensorOptions& options) const {
    if (pool.divides_by) return at::scalar_tensor(*pool.divides_by, options);
    at::Tensor product = at::ones({}, options);
    for (const size_t i : c10::irange(pool.windows.size())) {
      const Sliding& window = pool.windows[i];
      std::vector<double> counts;
      for (const int64_t o : c10::irange(held(i).offset, held(i).end())) {
        int64_t begin = o * window.stride - window.padding;
        int64_t end = std::min(begin + window.kernel, sizes[i] + window.padding);
        if (!pool.counts_padding) {
          begin = std::max<int64_t>(begin, 0);
          end = std::min(end, sizes[i]);
        }
        counts.push_back(static_cast<double>(end - begin));
      }
      product = at::mul(product, along(i, at::tensor(counts).to(options)));
    }
    return product;
  }
};

Stack max_pool(const PoolPart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor();
  arguments[0] = part.halos.fetch(x, *neutral(ReduceOp::max, x.scalar_type()));
  if (part.halos.idle()) return no_maxima(part, x);
  part.put_padding(arguments);
  Stack results = call_operator(op, std::move(arguments));
  results[1] = part.global(results[1].toTensor());
  return results;
}

Stack avg_pool(const PoolPart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = part.halos.fetch(arguments[0].toTensor(), 0);
  if (part.halos.idle()) return {new_memory(part.result.local_shape(), x.options())};
  arguments[0] = x;
  arguments[*part.pool.divisor] = 1;
  part.put_padding(arguments);
  return {call_operator(op, std::move(arguments))[0].toTensor().div_(part.divisors(x.options()))};
}

Stack avg_pool_backward(const PoolPart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), x = part.halos.shaped(arguments[1].toTensor());
  if (part.halos.idle()) return {part.halos.give_back(at::zeros(x.sizes(), gradient.options()))};
  arguments[0] = at::div(gradient, part.divisors(gradient.options()));
  arguments[1] = x;
  arguments[*part.pool.divisor] = 1;
  part.put_padding(arguments);
  return {part.halos.give_back(call_operator(op, std::move(arguments))[0].toTensor())};
}

/// Windows over the last `inner` dims: these may be cut too, with halos.
Rule pool_rule(int64_t inner, size_t results, bool backward, bool linear, const Compute<PoolPart>& compute) {
  const Rule of_planes = planes(inner, results, backward, linear);
  Rule rule{"cut along batch and channels; spatial dims with halos",
            [=](const OpCall& call) -> std::optional<Strategies> {
              auto strategies = of_planes.propose(call);
              Shape shape;
              const auto pool = strategies ? Pool::of(call, inner, shape) : std::nullopt;
              if (!pool) return strategies;
              if (pool->divisor && !at::isFloatingType(call.tensors[0].dtype())) return strategies;
              if (backward && call.tensors[0].shape() != c10::IntArrayRef(shape)) return strategies;
              add_halos<PoolPart>(*strategies, call, *pool, shape, backward, compute);
              return strategies;
            },
            of_planes.reads};
  for (const char* name :
       {"kernel_size", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override"})
    rule.reads.emplace_back(name);
  return rule;
}

/// A call of an operator whose windows are as large as it takes to have as many as are wanted.
struct Adaptive {
  int64_t first = 0;      // spatial dim
  Shape sizes, wanted{};  // of the spatial dims, of the input and the result

  /// What place `o` of the result looks at.
  Range window(size_t i, int64_t o) const {
    const int64_t begin = at::native::start_index(o, wanted[i], sizes[i]);
    return {begin, at::native::end_index(o, wanted[i], sizes[i]) - begin};
  }

  std::vector<Reach> reaches() const {
    std::vector<Reach> all;
    for (const size_t i : c10::irange(sizes.size())) {
      all.emplace_back([*this, i](const Range& range) {
        const int64_t begin = window(i, range.offset).offset;
        return Range{begin, window(i, range.end() - 1).end() - begin};
      });
    }
    return all;
  }
};

/// A rank's part of such a call. Along cut dims windows are laid side by side, all as large as the largest,
/// so that the operator itself finds them.
struct AdaptivePart : Part {
  /// Of a dim where that changes anything.
  struct Tiles {
    at::Tensor places;    // in what the rank sees, of each that is laid out
    at::Tensor repeated;  // which of these only make a window larger: its last place again
    at::Tensor ratios;    // of each window, by how much
  };
  std::vector<std::optional<Tiles>> tiles = {};

  AdaptivePart(const Adaptive& all, const Spec& input, const Spec& result)
      : Part(all.first, all.sizes, input, result, all.reaches()) {
    for (const size_t i : c10::irange(sizes.size())) {
      tiles.emplace_back();
      if (!halo(i)) continue;
      int64_t largest = 0;
      for (const int64_t o : c10::irange(held(i).offset, held(i).end()))
        largest = std::max(largest, all.window(i, o).size);
      std::vector<int64_t> places, repeated;
      std::vector<double> ratios;
      for (const int64_t o : c10::irange(held(i).offset, held(i).end())) {
        const Range window = all.window(i, o);
        for (const int64_t k : c10::irange(largest)) {
          places.push_back(std::min(window.offset + k, window.end() - 1) - seen(i).offset);
          repeated.push_back(k >= window.size);
        }
        ratios.push_back(static_cast<double>(largest) / static_cast<double>(window.size));
      }
      if (static_cast<int64_t>(places.size()) != seen(i).size)  // else windows lie side by side already
        tiles[i] = {at::tensor(places), at::tensor(repeated).to(at::kBool), at::tensor(ratios)};
    }
  }

  Shape tiled_sizes() const {
    Shape all = seen_sizes();
    for (const size_t i : c10::irange(all.size())) {
      if (tiles[i]) all[i] = tiles[i]->places.numel();
    }
    return all;
  }
  Shape held_sizes() const {
    Shape all;
    for (const size_t i : c10::irange(sizes.size())) all.push_back(held(i).size);
    return all;
  }

  at::Tensor tiled(at::Tensor x) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (tiles[i]) x = x.index_select(dim(i), tiles[i]->places.to(x.device()));
    }
    return x;
  }
  /// The converse, for gradients.
  at::Tensor untiled(at::Tensor x) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (!tiles[i]) continue;
      auto shape = x.sizes().vec();
      shape[dim(i)] = seen(i).size;
      x = at::zeros(shape, x.options()).index_add_(dim(i), tiles[i]->places.to(x.device()), x);
    }
    return x;
  }
  /// Without what is there only to make windows larger.
  at::Tensor blanked(at::Tensor x) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (tiles[i]) x = x.masked_fill(along(i, tiles[i]->repeated.to(x.device())), 0);
    }
    return x;
  }
  /// As if windows had not been made larger.
  at::Tensor weighted(at::Tensor means) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (tiles[i]) means = at::mul(means, along(i, tiles[i]->ratios.to(means.options())));
    }
    return means;
  }
  /// From places in what is laid out to places in the whole planes.
  at::Tensor global(const at::Tensor& places) const {
    return renumbered(places, tiled_sizes(), sizes, [&](size_t i, const at::Tensor& place) {
      return at::add(tiles[i] ? at::take(tiles[i]->places.to(place.device()), place) : place, seen(i).offset);
    });
  }
};

Stack adaptive_max_pool(const AdaptivePart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = part.halos.fetch(arguments[0].toTensor(), 0);
  if (part.halos.idle()) return no_maxima(part, x);
  Stack results = call_operator(op, {part.tiled(x), part.held_sizes()});
  results[1] = part.global(results[1].toTensor());
  return results;
}

Stack adaptive_avg_pool(const AdaptivePart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = part.halos.fetch(arguments[0].toTensor(), 0);
  if (part.halos.idle()) return {new_memory(part.result.local_shape(), x.options())};
  return {part.weighted(call_operator(op, {part.blanked(part.tiled(x)), part.held_sizes()})[0].toTensor())};
}

Stack adaptive_avg_pool_backward(const AdaptivePart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), seen = part.halos.shaped(arguments[1].toTensor());
  if (part.halos.idle()) return {part.halos.give_back(at::zeros(seen.sizes(), gradient.options()))};
  Shape shape = seen.sizes().vec();
  const Shape sizes = part.tiled_sizes();
  std::copy(sizes.begin(), sizes.end(), shape.begin() + part.first);
  const at::Tensor tiled =
      call_operator(op, {part.weighted(gradient), at::empty({1}, gradient.options()).expand(shape)})[0]
          .toTensor();
  return {part.halos.give_back(part.untiled(part.blanked(tiled)))};
}

/// The same of such windows.
Rule adaptive_rule(int64_t inner, size_t results, bool backward, bool averages,
                   const Compute<AdaptivePart>& compute) {
  const Rule of_planes = planes(inner, results, backward, averages || backward);
  Rule rule{"cut along batch and channels; spatial dims with halos",
            [=](const OpCall& call) -> std::optional<Strategies> {
              auto strategies = of_planes.propose(call);
              const auto self = call.tensor("self");
              if (!strategies || !self) return strategies;
              if (averages && !at::isFloatingType(call.tensors[0].dtype())) return strategies;
              Shape shape = call.tensors[*self].shape().vec();
              const auto first = static_cast<int64_t>(shape.size()) - inner;
              Adaptive all{first, {shape.begin() + first, shape.end()}, {}};
              if (backward)
                all.wanted = call.tensors[0].shape().slice(first).vec();
              else
                all.wanted = call.integers("output_size");
              const bool sane =
                  static_cast<int64_t>(all.wanted.size()) == inner &&
                  std::all_of(all.wanted.begin(), all.wanted.end(), [](int64_t n) { return n > 0; });
              if (!sane) return strategies;
              std::copy(all.wanted.begin(), all.wanted.end(), shape.begin() + first);
              add_halos<AdaptivePart>(*strategies, call, all, shape, backward, compute);
              return strategies;
            },
            of_planes.reads};
  rule.reads.emplace_back("output_size");
  return rule;
}

/// Windows that numbers of each plane place: `samples`, which always have a batch.
Rule fractional_pool(int64_t inner) {
  return {
      "cut along batch and channels", [inner](const OpCall& call) -> std::optional<Strategies> {
        const auto self = call.tensor("self"), samples = call.tensor("random_samples");
        if (!self || !samples) return std::nullopt;
        const Spec& x = call.tensors[*self];
        const int64_t outer = x.ndim() - inner;
        if (outer < 1 || outer > 2 || x.numel() == 0 || call.tensors[*samples].ndim() != 3)
          return std::nullopt;
        Shape shape = x.shape().vec();
        std::fill(shape.begin() + outer, shape.end(), kLocal);
        Strategies strategies{{}, {{shape}, {shape}}};
        // There may be no batch, but there must be channels.
        strategies.options.push_back({{Shard(outer - 1), Shard(1)}, {Shard(outer - 1)}, shape[outer - 1]});
        if (outer == 2) strategies.options.push_back({{Shard(0), Shard(0)}, {Shard(0)}});
        return strategies;
      }};
}

}  // namespace

/// Averages in three dims, of which CPUs lack kernels of the smaller floats.
Rule of_large_floats(Rule rule) {
  rule.may_refuse_dtypes = [](Dtypes dtypes) {
    return not_one_float(dtypes) || at::isReducedFloatingType(dtypes[0]);
  };
  return rule;
}

Table pooling_rules() {
  constexpr bool kForward = false, kBackward = true, kLinear = true, kAverages = true;
  return {
      {{"max_pool2d_with_indices"}, pool_rule(2, 2, kForward, !kLinear, max_pool)},
      {{"max_pool3d_with_indices"}, pool_rule(3, 2, kForward, !kLinear, max_pool)},
      {{"max_pool2d_with_indices_backward"}, pool_rule(2, 1, kBackward, kLinear, max_backward)},
      {{"max_pool3d_with_indices_backward"}, pool_rule(3, 1, kBackward, kLinear, max_backward)},
      {{"avg_pool2d"}, pool_rule(2, 1, kForward, kLinear, avg_pool)},
      {{"avg_pool3d"}, of_large_floats(pool_rule(3, 1, kForward, kLinear, avg_pool))},
      {{"avg_pool2d_backward"}, pool_rule(2, 1, kBackward, kLinear, avg_pool_backward)},
      {{"avg_pool3d_backward"}, of_large_floats(pool_rule(3, 1, kBackward, kLinear, avg_pool_backward))},
      {{"fractional_max_pool2d"}, fractional_pool(2)},
      {{"fractional_max_pool3d"}, fractional_pool(3)},
      {{"fractional_max_pool2d_backward"}, planes(2, 1, kBackward)},
      {{"fractional_max_pool3d_backward"}, planes(3, 1, kBackward)},
      {{"_adaptive_avg_pool2d"}, adaptive_rule(2, 1, kForward, kAverages, adaptive_avg_pool)},
      {{"_adaptive_avg_pool3d"},
       of_large_floats(adaptive_rule(3, 1, kForward, kAverages, adaptive_avg_pool))},
      {{"_adaptive_avg_pool2d_backward"},
       adaptive_rule(2, 1, kBackward, kAverages, adaptive_avg_pool_backward)},
      {{"_adaptive_avg_pool3d_backward"},
       of_large_floats(adaptive_rule(3, 1, kBackward, kAverages, adaptive_avg_pool_backward))},
      {{"adaptive_max_pool2d"}, adaptive_rule(2, 2, kForward, !kAverages, adaptive_max_pool)},
      {{"adaptive_max_pool3d"}, adaptive_rule(3, 2, kForward, !kAverages, adaptive_max_pool)},
      {{"adaptive_max_pool2d_backward"}, adaptive_rule(2, 1, kBackward, !kAverages, max_backward)},
      {{"adaptive_max_pool3d_backward"}, adaptive_rule(3, 1, kBackward, !kAverages, max_backward)},
      {{"max_unpool2d"}, planes(2, 1, kForward)},
      {{"max_unpool3d"}, planes(3, 1, kForward)},
  };
}

}  // namespace tessera::ops
