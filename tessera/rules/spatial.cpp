#include <tessera/rules/family.h>
#include <tessera/rules/window.h>

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

/// Each plane by itself: batch and channels may be cut, the last `planes` dims not.
Rule planes(int64_t inner, size_t results, bool backward, bool linear = false) {
  return {"cut along batch and channels",
          [=](const Call& call) -> std::optional<Proposal> {
            const auto self = call.tensor("self");
            const Spec& spec = call.tensors[self ? *self : 0];
            const int64_t outer = spec.ndim() - inner;
            if (outer < 1 || spec.numel() == 0) return std::nullopt;
            Shape shape = spec.shape().vec();
            const bool sized = call.position("input_size").has_value();
            if (sized) shape = call.integers("input_size");
            if (!backward) std::fill(shape.begin() + outer, shape.end(), kLocal);
            Proposal proposal;
            proposal.results.assign(results, Result{shape});
            for (int64_t d = 0; d < outer; ++d) {
              // There may be no batch, but there must be channels.
              Row row{Placements(call.tensors.size(), Shard(d)), {Shard(d)}, d == outer - 1 ? shape[d] : 0};
              proposal.rows.push_back(std::move(row));
            }
            for (const Spec& tensor : call.tensors) {
              if (tensor.ndim() != spec.ndim()) return std::nullopt;
            }
            if (linear) {
              Row row{Placements(call.tensors.size(), Replicate()), {Partial()}};
              row.inputs[0] = Partial();
              proposal.rows.push_back(std::move(row));
            }
            if (sized) {
              proposal.localize = [position = *call.position("input_size")](const Chosen& chosen) {
                return Local{{{position, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
              };
            }
            return proposal;
          },
          {"input_size"}};
}

/// Windows that numbers of each plane place: `samples`, which always have a batch.
Rule fractional_pool(int64_t inner) {
  return {"cut along batch and channels", [inner](const Call& call) -> std::optional<Proposal> {
            const auto self = call.tensor("self"), samples = call.tensor("random_samples");
            if (!self || !samples) return std::nullopt;
            const Spec& x = call.tensors[*self];
            const int64_t outer = x.ndim() - inner;
            if (outer < 1 || outer > 2 || x.numel() == 0 || call.tensors[*samples].ndim() != 3)
              return std::nullopt;
            Shape shape = x.shape().vec();
            std::fill(shape.begin() + outer, shape.end(), kLocal);
            Proposal proposal{{}, {{shape}, {shape}}};
            // There may be no batch, but there must be channels.
            proposal.rows.push_back({{Shard(outer - 1), Shard(1)}, {Shard(outer - 1)}, shape[outer - 1]});
            if (outer == 2) proposal.rows.push_back({{Shard(0), Shard(0)}, {Shard(0)}});
            return proposal;
          }};
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
  static std::optional<Pool> of(const Call& call, int64_t inner, Shape& shape) {
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
    }
    return pool;
  }

  Halos halos(const Spec& input, const Spec& result) const {
    std::vector<int64_t> dims;
    std::vector<Reach> reaches;
    for (const size_t i : c10::irange(windows.size())) {
      dims.push_back(first + static_cast<int64_t>(i));
      reaches.emplace_back([window = windows[i]](const Range& range) { return window.reach(range); });
    }
    return {input, result, dims, reaches};
  }
};

/// A rank's part of such a call.
struct PoolPart {
  Pool pool;
  Halos halos;
  Spec input, result;

  /// Dims that are cut bring their padding along.
  void put_padding(Stack& arguments) const {
    Shape pads;
    for (const size_t i : c10::irange(pool.windows.size()))
      pads.push_back(halo(i) ? 0 : pool.windows[i].padding);
    arguments[*pool.padding] = pads;
  }

  const Halo* halo(size_t i) const { return halos.of(pool.first + static_cast<int64_t>(i)); }
  /// What the rank looks at in spatial dim `i`.
  Range seen(size_t i) const { return halo(i) ? halo(i)->needed() : Range{0, pool.sizes[i]}; }

  /// From places in what the rank looks at to places in the whole planes, which count row by row.
  at::Tensor global(at::Tensor places) const {
    at::Tensor result = at::zeros_like(places);
    int64_t weight = 1;
    for (size_t i = pool.windows.size(); i-- > 0;) {
      const Range range = seen(i);
      at::Tensor place = at::add(at::remainder(places, range.size), range.offset);
      // Where all is as low as the padding, the first place that is none counts.
      if (halo(i)) place = at::where(at::lt(place, 0), at::remainder(place, pool.windows[i].dilation), place);
      result.add_(place, weight);
      weight *= pool.sizes[i];
      places = at::floor_divide(places, range.size);
    }
    return result;
  }
  /// The converse.
  at::Tensor local(at::Tensor places) const {
    at::Tensor result = at::zeros_like(places);
    int64_t weight = 1;
    for (size_t i = pool.windows.size(); i-- > 0;) {
      const Range range = seen(i);
      result.add_(at::sub(at::remainder(places, pool.sizes[i]), range.offset), weight);
      weight *= range.size;
      places = at::floor_divide(places, pool.sizes[i]);
    }
    return result;
  }

  /// By what sums over windows are divided, of what the rank holds of the result.
  at::Tensor divisors(const at::TensorOptions& options) const {
    if (pool.divides_by) return at::scalar_tensor(*pool.divides_by, options);
    at::Tensor result = at::ones({}, options);
    for (const size_t i : c10::irange(pool.windows.size())) {
      const Sliding& window = pool.windows[i];
      const auto dim = pool.first + static_cast<int64_t>(i);
      std::vector<double> counts;
      for (const int64_t o : c10::irange(result_range(dim).offset, result_range(dim).end())) {
        int64_t begin = o * window.stride - window.padding;
        int64_t end = std::min(begin + window.kernel, pool.sizes[i] + window.padding);
        if (!pool.counts_padding) {
          begin = std::max<int64_t>(begin, 0);
          end = std::min(end, pool.sizes[i]);
        }
        counts.push_back(static_cast<double>(end - begin));
      }
      Shape shape(pool.windows.size(), 1);
      shape[i] = static_cast<int64_t>(counts.size());
      result = at::mul(result, at::tensor(counts).to(options).view(shape));
    }
    return result;
  }

 private:
  Range result_range(int64_t dim) const {
    return {result.local_shape()[dim] > 0 ? result.global_offset()[dim] : 0, result.local_shape()[dim]};
  }
};

using PoolFunction = Stack (*)(const PoolPart&, const c10::OperatorHandle&, Stack);

Stack max_pool(const PoolPart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor();
  const at::Tensor seen = part.halos.fetch(x, *neutral(ReduceOp::max, x.scalar_type()));
  if (part.halos.idle()) {
    const auto shape = part.result.local_shape();
    return {at::empty(shape, x.options()), at::empty(shape, x.options().dtype(at::kLong))};
  }
  arguments[0] = seen;
  part.put_padding(arguments);
  Stack results = call_operator(op, std::move(arguments));
  results[1] = part.global(results[1].toTensor());
  return results;
}

Stack max_pool_backward(const PoolPart& part, const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), places = arguments.back().toTensor();
  const auto seen = part.halos.shaped(arguments[1].toTensor()).sizes().vec();
  const at::Tensor result = at::zeros(seen, gradient.options());
  if (gradient.numel() > 0) {
    const int64_t first = part.pool.first;
    result.flatten(first).scatter_add_(first, part.local(places).flatten(first), gradient.flatten(first));
  }
  return {part.halos.give_back(result)};
}

Stack avg_pool(const PoolPart& part, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = part.halos.fetch(arguments[0].toTensor(), 0);
  if (part.halos.idle()) return {at::empty(part.result.local_shape(), x.options())};
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
Rule pool_rule(int64_t inner, size_t results, bool backward, PoolFunction compute) {
  const Rule of_planes = planes(inner, results, backward, compute != max_pool);
  Rule rule{"cut along batch and channels; spatial dims with halos",
            [=](const Call& call) -> std::optional<Proposal> {
              auto proposal = of_planes.propose(call);
              Shape shape;
              const auto pool = proposal ? Pool::of(call, inner, shape) : std::nullopt;
              if (!pool) return proposal;
              const Spec& x = call.tensors[pool->self];
              if (pool->divisor && !at::isFloatingType(x.dtype())) return proposal;
              if (backward && call.tensors[0].shape() != c10::IntArrayRef(shape)) return proposal;
              if (!backward) proposal->results.assign(results, Result{shape});
              for (int64_t dim = pool->first; dim < x.ndim(); ++dim) {
                proposal->rows.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}});
                proposal->rows.back().ranges = true;
              }
              proposal->localize = [=](const Chosen& chosen) {
                const Spec &input = chosen.inputs[pool->self],
                           &result = backward ? chosen.inputs[0] : chosen.outputs[0];
                Local local;
                auto part =
                    std::make_shared<const PoolPart>(*pool, pool->halos(input, result), input, result);
                if (part->halos.empty()) return local;
                local.communicates = part->halos.communicates();
                local.compute = [part, compute](const c10::OperatorHandle& op, Stack arguments) {
                  return compute(*part, op, std::move(arguments));
                };
                return local;
              };
              return proposal;
            },
            of_planes.reads};
  for (const char* name :
       {"kernel_size", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override"})
    rule.reads.emplace_back(name);
  return rule;
}

/// Windows of adaptive pooling that all have the same size and share nothing.
std::optional<Shape> even_windows(c10::IntArrayRef input, c10::IntArrayRef result, int64_t inner) {
  Shape kernel;
  for (auto i = static_cast<int64_t>(input.size()) - inner; i < static_cast<int64_t>(input.size()); ++i) {
    if (result[i] < 1 || input[i] % result[i] != 0) return std::nullopt;
    kernel.push_back(input[i] / result[i]);
  }
  return kernel;
}

using AdaptiveFunction = Stack (*)(const Shape& kernel, const Stack& arguments);

Stack adaptive_avg_pool(const Shape& kernel, const Stack& arguments) {
  const at::Tensor x = arguments[0].toTensor();
  return {kernel.size() == 2 ? at::avg_pool2d(x, kernel) : at::avg_pool3d(x, kernel)};
}
Stack adaptive_avg_pool_backward(const Shape& kernel, const Stack& arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), x = arguments[1].toTensor();
  const Shape none(kernel.size(), 0);
  return {kernel.size() == 2
              ? at::avg_pool2d_backward(gradient, x, kernel, kernel, none, false, true, std::nullopt)
              : at::avg_pool3d_backward(gradient, x, kernel, kernel, none, false, true, std::nullopt)};
}
Stack adaptive_max_pool(const Shape& kernel, const Stack& arguments) {
  const at::Tensor x = arguments[0].toTensor();
  const auto [values, places] =
      kernel.size() == 2 ? at::max_pool2d_with_indices(x, kernel) : at::max_pool3d_with_indices(x, kernel);
  return {values, places};
}
Stack adaptive_max_pool_backward(const Shape& kernel, const Stack& arguments) {
  const at::Tensor gradient = arguments[0].toTensor(), x = arguments[1].toTensor(),
                   places = arguments[2].toTensor();
  const Shape none(kernel.size(), 0), one(kernel.size(), 1);
  return {kernel.size() == 2
              ? at::max_pool2d_with_indices_backward(gradient, x, kernel, kernel, none, one, false, places)
              : at::max_pool3d_with_indices_backward(gradient, x, kernel, kernel, none, one, false, places)};
}

/// Where a spatial dim is cut and windows are even: by the pooling that has windows of that size.
Rule adaptive_rule(int64_t inner, size_t results, bool backward, AdaptiveFunction by_pool) {
  const Rule of_planes = planes(inner, results, backward, backward || by_pool == adaptive_avg_pool);
  Rule rule{"cut along batch and channels; spatial dims, if windows are even, as in pooling",
            [=](const Call& call) -> std::optional<Proposal> {
              const auto self = call.tensor("self");
              if (!self || call.tensors[*self].ndim() <= inner) return of_planes.propose(call);
              const Spec& x = call.tensors[*self];
              Shape spatial, shape = backward ? call.tensors[0].shape().vec() : x.shape().vec();
              for (int64_t dim = x.ndim() - inner; dim < x.ndim(); ++dim) spatial.push_back(dim);
              if (!backward) {
                const Shape wanted = call.integers("output_size");
                if (static_cast<int64_t>(wanted.size()) != inner) return of_planes.propose(call);
                std::copy(wanted.begin(), wanted.end(), shape.end() - inner);
              }
              const auto kernel = static_cast<int64_t>(shape.size()) == x.ndim()
                                      ? even_windows(x.shape(), shape, inner)
                                      : std::nullopt;
              if (!kernel || x.numel() == 0 || !is_cut(x, spatial)) return of_planes.propose(call);
              Proposal proposal;
              proposal.decompose = [by_pool, kernel = *kernel](const c10::OperatorHandle&,
                                                               const Stack& arguments) {
                return by_pool(kernel, arguments);
              };
              return proposal;
            },
            of_planes.reads};
  rule.reads.emplace_back("output_size");
  return rule;
}

/// Each place repeated, a whole number of times along each of the last dims.
struct Repeats {
  int64_t first;  // of these dims
  Shape times;

  /// Nothing if the sizes, or a scale that is said, are not such.
  static std::optional<Repeats> of(const Call& call, c10::IntArrayRef input, c10::IntArrayRef result) {
    const Shape sizes = call.integers("output_size");
    const auto inner = static_cast<int64_t>(sizes.size()), outer = static_cast<int64_t>(input.size()) - inner;
    if (inner == 0 || outer < 1 || result.size() != input.size()) return std::nullopt;
    Repeats repeats{outer, {}};
    for (int64_t dim = outer; dim < outer + inner; ++dim) {
      if (input[dim] < 1 || result[dim] < 1 || result[dim] % input[dim] != 0) return std::nullopt;
      repeats.times.push_back(result[dim] / input[dim]);
    }
    const std::vector<std::string_view> scales =
        inner == 1 ? std::vector<std::string_view>{"scales"}
                   : std::vector<std::string_view>{"scales_d", "scales_h", "scales_w"};
    for (int64_t i = 0; i < inner; ++i) {
      const std::string_view name = scales[scales.size() - inner + i];
      if (call.has(name) && call.value(name).toDouble() != static_cast<double>(repeats.times[i]))
        return std::nullopt;
    }
    return repeats;
  }

  Halos halos(const Spec& input, const Spec& result) const {
    std::vector<int64_t> dims;
    std::vector<Reach> reaches;
    for (const size_t i : c10::irange(times.size())) {
      dims.push_back(first + static_cast<int64_t>(i));
      reaches.emplace_back([n = times[i]](const Range& range) {
        return Range{range.offset / n, (range.end() - 1) / n - range.offset / n + 1};
      });
    }
    return {input, result, dims, reaches};
  }

  Range cover(const Halo& halo) const {
    const int64_t n = times[halo.dim() - first];
    return {halo.needed().offset * n, halo.needed().size * n};
  }
};

/// By the nearest place: spatial dims may be cut too where each is repeated.
Rule nearest_rule(int64_t inner, bool backward) {
  const Rule of_planes = planes(inner, 1, backward, /*linear=*/true);
  Rule rule{"cut along batch and channels; spatial dims, if places are repeated, with halos",
            [=](const Call& call) -> std::optional<Proposal> {
              auto proposal = of_planes.propose(call);
              if (!proposal || call.tensors.size() != 1) return proposal;
              const Spec& given = call.tensors[0];
              Shape input = backward ? call.integers("input_size") : given.shape().vec();
              Shape result = given.shape().vec();
              if (!backward) {
                const Shape sizes = call.integers("output_size");
                if (static_cast<int64_t>(sizes.size()) != inner) return proposal;
                std::copy(sizes.begin(), sizes.end(), result.end() - inner);
              }
              const auto repeats = Repeats::of(call, input, result);
              if (!repeats) return proposal;
              if (!backward) proposal->results = {{result}};
              for (int64_t dim = repeats->first; dim < given.ndim(); ++dim) {
                proposal->rows.push_back({{Shard(dim)}, {Shard(dim)}});
                proposal->rows.back().ranges = true;
              }
              proposal->localize = [=, of_planes = proposal->localize,
                                    sizes = *call.position("output_size")](const Chosen& chosen) {
                const Spec &input = backward ? chosen.outputs[0] : chosen.inputs[0],
                           &result = backward ? chosen.inputs[0] : chosen.outputs[0];
                auto halos = std::make_shared<const Halos>(repeats->halos(input, result));
                if (halos->empty()) return of_planes ? of_planes(chosen) : Local{};
                Local local;
                local.communicates = halos->communicates();
                local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
                  const at::Tensor x = arguments[0].toTensor();
                  const Halos::Cover cover = [&](const Halo& halo) { return repeats->cover(halo); };
                  Shape small = backward ? input.local_shape().vec() : x.sizes().vec(), large;
                  for (int64_t dim = repeats->first; dim < x.dim(); ++dim) {
                    if (const Halo* halo = halos->of(dim)) small[dim] = halo->needed().size;
                    large.push_back(small[dim] * repeats->times[dim - repeats->first]);
                  }
                  arguments[sizes] = large;
                  if (backward) {
                    if (halos->idle()) return Stack{halos->give_back(at::zeros(small, x.options()))};
                    arguments[0] = halos->padded(x, cover);
                    arguments[sizes + 1] = small;
                    return Stack{halos->give_back(call_operator(op, std::move(arguments))[0].toTensor())};
                  }
                  arguments[0] = halos->fetch(x, 0);
                  if (halos->idle()) return Stack{at::empty(result.local_shape(), x.options())};
                  return Stack{halos->cropped(call_operator(op, std::move(arguments))[0].toTensor(), cover)};
                };
                return local;
              };
              return proposal;
            },
            of_planes.reads};
  for (const char* name : {"output_size", "scales", "scales_d", "scales_h", "scales_w"})
    rule.reads.emplace_back(name);
  return rule;
}

/// "nc..,npq.->ncpq": the grid tells where to look in each image.
std::optional<Proposal> grid_sampler(const Call& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &x = call.tensors[0], &grid = call.tensors[1];
  if (x.ndim() < 4 || x.ndim() != grid.ndim() || x.numel() == 0 || grid.numel() == 0) return std::nullopt;
  const auto inner = static_cast<size_t>(x.ndim() - 2);
  Letters image = letters("nc"), places = letters("n"), output = image;
  Shape shape{x.shape()[0], x.shape()[1]};
  for (size_t i = 0; i < inner; ++i) {
    image.push_back(kWhole);
    places.push_back(static_cast<char>('p' + i));
    output.push_back(places.back());
    shape.push_back(grid.shape()[i + 1]);
  }
  places.push_back(kWhole);
  Einsum einsum{.inputs = {image, places}, .outputs = {output}, .linear = {{0}}};
  return Proposal{rows(einsum), {{shape}}};
}

/// "ncpq,nc..,npq.->nc..,npq."
std::optional<Proposal> grid_sampler_backward(const Call& call) {
  if (call.tensors.size() != 3) return std::nullopt;
  const Spec &x = call.tensors[1], &grid = call.tensors[2];
  if (x.ndim() < 4 || x.ndim() != grid.ndim() || x.numel() == 0 || grid.numel() == 0) return std::nullopt;
  const auto inner = static_cast<size_t>(x.ndim() - 2);
  Letters image = letters("nc"), places = letters("n"), output = image;
  for (size_t i = 0; i < inner; ++i) {
    image.push_back(kWhole);
    places.push_back(static_cast<char>('p' + i));
    output.push_back(places.back());
  }
  places.push_back(kWhole);
  Einsum einsum{.inputs = {output, image, places}, .outputs = {image, places}, .linear = {{0}}};
  return Proposal{rows(einsum), {{x.shape().vec()}, {grid.shape().vec()}}};
}

/// Dims that are cut in the input and the result where both are cut evenly: `blocks` of each is how many
/// parts there may be at the most, and divides both; 0: the dim is the same in both.
std::optional<Proposal> in_blocks(const Call& call, const Shape& shape, const Shape& blocks) {
  Proposal proposal;
  proposal.results = {{shape}};
  for (size_t d = 0; d < blocks.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    proposal.rows.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}, blocks[d]});
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    proposal.rows.push_back({{Partial(op)}, {Partial(op)}});
  return proposal;
}

/// Blocks of channels become, or are made of, blocks of places.
std::optional<Proposal> pixel_shuffle(const Call& call, bool back) {
  const Spec& x = call.tensors[0];
  const int64_t factor = call.integer(back ? "downscale_factor" : "upscale_factor"), n = x.ndim();
  if (n < 3 || factor < 1 || x.numel() == 0) return std::nullopt;
  Shape shape = x.shape().vec(), blocks(n, 0);
  if (back ? shape[n - 1] % factor || shape[n - 2] % factor : shape[n - 3] % (factor * factor))
    return std::nullopt;
  shape[n - 3] = back ? shape[n - 3] * factor * factor : shape[n - 3] / (factor * factor);
  for (const int64_t d : {n - 2, n - 1}) shape[d] = back ? shape[d] / factor : shape[d] * factor;
  for (int64_t d = n - 3; d < n; ++d) blocks[d] = std::min(shape[d], x.shape()[d]);
  auto proposal = in_blocks(call, shape, blocks);
  proposal->localize = [](const Chosen& chosen) {
    Local local;
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    // libtorch leaves the shape of what is empty as it is.
    local.compute = [result = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
      return Stack{at::empty(result.local_shape(), arguments[0].toTensor().options())};
    };
    return local;
  };
  return proposal;
}

/// Windows as columns: batch and channels cut.
std::optional<Proposal> columns(const Call& call, bool back) {
  const Spec& x = call.tensors[0];
  const int64_t outer = x.ndim() - (back ? 2 : 3);
  if ((outer != 0 && outer != 1) || x.numel() == 0) return std::nullopt;
  const Shape kernel = call.integers("kernel_size");
  if (kernel.size() != 2) return std::nullopt;
  const int64_t area = kernel[0] * kernel[1], given = x.shape()[outer];
  if (area < 1 || (back && given % area)) return std::nullopt;
  Shape shape(x.shape().begin(), x.shape().begin() + outer), blocks(outer + 1, 0);
  shape.push_back(back ? given / area : given * area);
  blocks[outer] = back ? given / area : given;
  return in_blocks(call, shape, blocks);
}

}  // namespace

Table spatial_rules() {
  constexpr bool kForward = false, kBackward = true, kLinear = true;
  return {
      {{"max_pool2d_with_indices"}, pool_rule(2, 2, kForward, max_pool)},
      {{"max_pool3d_with_indices"}, pool_rule(3, 2, kForward, max_pool)},
      {{"max_pool2d_with_indices_backward"}, pool_rule(2, 1, kBackward, max_pool_backward)},
      {{"max_pool3d_with_indices_backward"}, pool_rule(3, 1, kBackward, max_pool_backward)},
      {{"avg_pool2d"}, pool_rule(2, 1, kForward, avg_pool)},
      {{"avg_pool3d"}, pool_rule(3, 1, kForward, avg_pool)},
      {{"avg_pool2d_backward"}, pool_rule(2, 1, kBackward, avg_pool_backward)},
      {{"avg_pool3d_backward"}, pool_rule(3, 1, kBackward, avg_pool_backward)},
      {{"upsample_nearest1d", "_upsample_nearest_exact1d"}, nearest_rule(1, kForward)},
      {{"upsample_nearest1d_backward", "_upsample_nearest_exact1d_backward"}, nearest_rule(1, kBackward)},
      {{"upsample_nearest2d", "_upsample_nearest_exact2d"}, nearest_rule(2, kForward)},
      {{"upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward"}, nearest_rule(2, kBackward)},
      {{"upsample_nearest3d", "_upsample_nearest_exact3d"}, nearest_rule(3, kForward)},
      {{"upsample_nearest3d_backward", "_upsample_nearest_exact3d_backward"}, nearest_rule(3, kBackward)},
      {{"fractional_max_pool2d"}, fractional_pool(2)},
      {{"fractional_max_pool3d"}, fractional_pool(3)},
      {{"fractional_max_pool2d_backward"}, planes(2, 1, kBackward)},
      {{"fractional_max_pool3d_backward"}, planes(3, 1, kBackward)},
      {{"max_unpool2d"}, planes(2, 1, kForward)},
      {{"max_unpool3d"}, planes(3, 1, kForward)},
      {{"channel_shuffle"},
       {"channels whole",
        [](const Call& call) -> std::optional<Proposal> {
          const Spec& spec = call.tensors[0];
          if (spec.ndim() < 3 || spec.numel() == 0) return std::nullopt;
          return whole_dims(call, {1}, {{spec.shape().vec()}});
        }}},
      {{"grid_sampler_2d", "grid_sampler_3d"}, {"nc..,npq.->ncpq", grid_sampler}},
      {{"grid_sampler_2d_backward", "grid_sampler_3d_backward"},
       {"ncpq,nc..,npq.->nc..,npq.", grid_sampler_backward}},
      {{"pixel_shuffle"},
       {"batch cut; channels and places evenly",
        [](const Call& call) { return pixel_shuffle(call, kForward); },
        {"upscale_factor"}}},
      {{"pixel_unshuffle"},
       {"batch cut; channels and places evenly",
        [](const Call& call) { return pixel_shuffle(call, kBackward); },
        {"downscale_factor"}}},
      {{"im2col"},
       {"batch cut; channels evenly",
        [](const Call& call) { return columns(call, kForward); },
        {"kernel_size"}}},
      {{"col2im"},
       {"batch cut; channels evenly",
        [](const Call& call) { return columns(call, kBackward); },
        {"kernel_size"}}},
      {{"_adaptive_avg_pool2d"}, adaptive_rule(2, 1, kForward, adaptive_avg_pool)},
      {{"_adaptive_avg_pool3d"}, adaptive_rule(3, 1, kForward, adaptive_avg_pool)},
      {{"adaptive_max_pool2d"}, adaptive_rule(2, 2, kForward, adaptive_max_pool)},
      {{"adaptive_max_pool3d"}, adaptive_rule(3, 2, kForward, adaptive_max_pool)},
      {{"_adaptive_avg_pool2d_backward"}, adaptive_rule(2, 1, kBackward, adaptive_avg_pool_backward)},
      {{"_adaptive_avg_pool3d_backward"}, adaptive_rule(3, 1, kBackward, adaptive_avg_pool_backward)},
      {{"adaptive_max_pool2d_backward"}, adaptive_rule(2, 1, kBackward, adaptive_max_pool_backward)},
      {{"adaptive_max_pool3d_backward"}, adaptive_rule(3, 1, kBackward, adaptive_max_pool_backward)},
      {{"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
        "reflection_pad2d", "replication_pad2d"},
       planes(2, 1, kForward, kLinear)},
      {{"upsample_trilinear3d", "reflection_pad3d", "replication_pad3d"}, planes(3, 1, kForward, kLinear)},
      {{"upsample_linear1d", "reflection_pad1d", "replication_pad1d"}, planes(1, 1, kForward, kLinear)},
      {{"upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "_upsample_bilinear2d_aa_backward",
        "_upsample_bicubic2d_aa_backward", "reflection_pad2d_backward", "replication_pad2d_backward"},
       planes(2, 1, kBackward, kLinear)},
      {{"upsample_trilinear3d_backward", "reflection_pad3d_backward", "replication_pad3d_backward"},
       planes(3, 1, kBackward, kLinear)},
      {{"upsample_linear1d_backward", "reflection_pad1d_backward", "replication_pad1d_backward"},
       planes(1, 1, kBackward, kLinear)},
  };
}

}  // namespace tessera::rules
