#include <tessera/kernels/call.h>
#include <tessera/kernels/pooling.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <functional>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/native/AdaptivePooling.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

namespace {

using Shape = std::vector<int64_t>;

/// Positions of planes count row by row. From positions in planes of sizes `from` to those in planes of sizes
/// `to`; `moved` says where a position comes to lie along one of the dims.
at::Tensor renumbered(at::Tensor positions, const Shape& from, const Shape& to,
                      const std::function<at::Tensor(size_t dim, const at::Tensor& position)>& moved) {
  at::Tensor result = at::zeros_like(positions);
  int64_t weight = 1;
  for (size_t i = from.size(); i-- > 0;) {
    result.add_(moved(i, at::remainder(positions, from[i])), weight);
    weight *= to[i];
    positions = at::floor_divide(positions, from[i]);
  }
  return result;
}

/// A rank's part of a call: what it sees of the planes, with its halo, and its shard of the result.
struct PoolShard {
  int64_t first;  // dim of the planes
  Shape sizes;    // of the input's
  Halos halos;
  Spec result;

  PoolShard(int64_t first, Shape sizes, const Spec& input, const Spec& result,
            const std::vector<Reach>& reaches)
      : first(first), sizes(std::move(sizes)), halos(input, result, first, reaches), result(result) {}

  int64_t dim(size_t i) const { return first + static_cast<int64_t>(i); }
  const Halo* halo(size_t i) const { return halos.of(dim(i)); }
  /// What the rank sees in dim `i` of the planes, and its shard of the result there.
  Range seen(size_t i) const { return halo(i) ? halo(i)->needed() : Range{0, sizes[i]}; }
  Range local(size_t i) const { return halo(i) ? halo(i)->local() : Range{0, result.shape()[dim(i)]}; }
  Shape seen_sizes() const {
    Shape all;
    for (const size_t i : c10::irange(sizes.size())) all.push_back(seen(i).size);
    return all;
  }
  /// A tensor of one dim, along dim `i` of the planes.
  at::Tensor along(size_t i, const at::Tensor& values) const {
    Shape shape(sizes.size(), 1);
    shape[i] = -1;
    return values.view(shape);
  }
};

/// Gradients of maxima, to the positions where these are.
Stack max_backward(const PoolShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = named.tensor("grad_output"), indices = named.tensor("indices");
  const auto shape = shard.halos.shaped(named.tensor("self")).sizes().vec();
  const at::Tensor result = at::zeros(shape, gradient.options());
  if (gradient.numel() > 0) {
    const at::Tensor seen = renumbered(
        indices, shard.sizes, shard.seen_sizes(),
        [&](size_t i, const at::Tensor& position) { return at::sub(position, shard.seen(i).offset); });
    const int64_t first = shard.first;
    result.flatten(first).scatter_add_(first, seen.flatten(first), gradient.flatten(first));
  }
  return {shard.halos.give_back(result)};
}

/// Of a rank that has nothing of the result.
Stack no_maxima(const PoolShard& shard, const at::Tensor& x) {
  const auto shape = shard.result.local_shape();
  return {new_memory(shape, x.options()), new_memory(shape, x.options().dtype(at::kLong))};
}

// --- windows that slide

std::vector<Reach> reaches(const SlidingPool& pool) {
  std::vector<Reach> all;
  for (const Sliding& window : pool.windows)
    all.emplace_back([window](const Range& range) { return window.reach(range); });
  return all;
}

struct SlidingShard : PoolShard {
  SlidingPool pool;

  SlidingShard(const SlidingPool& pool, const Spec& input, const Spec& result)
      : PoolShard(pool.first, pool.sizes, input, result, reaches(pool)), pool(pool) {}

  /// Dims that are sharded bring their padding along.
  void put_padding(const c10::OperatorHandle& op, Stack& arguments) const {
    Shape pads;
    for (const size_t i : c10::irange(pool.windows.size()))
      pads.push_back(halo(i) ? 0 : pool.windows[i].padding);
    NamedArguments(op, arguments)["padding"] = pads;
  }

  /// From positions in what the rank sees to positions in the global planes.
  at::Tensor global(const at::Tensor& positions) const {
    return renumbered(positions, seen_sizes(), sizes, [&](size_t i, const at::Tensor& seen_position) {
      const at::Tensor position = at::add(seen_position, seen(i).offset);
      if (!halo(i)) return position;
      // Where all is as low as the padding, the first position that is none counts.
      return at::where(at::lt(position, 0), at::remainder(position, pool.windows[i].dilation), position);
    });
  }

  /// What sums over windows are divided by, of the shard of the result.
  at::Tensor divisors(const at::TensorOptions& options) const {
    if (pool.divisor) return at::scalar_tensor(*pool.divisor, options);
    at::Tensor product = at::ones({}, options);
    for (const size_t i : c10::irange(pool.windows.size())) {
      const Sliding& window = pool.windows[i];
      std::vector<double> counts;
      for (const int64_t o : c10::irange(local(i).offset, local(i).end())) {
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

Stack max_pool(const SlidingShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  c10::IValue& self = NamedArguments(op, arguments)["self"];
  const at::Tensor x = self.toTensor();
  self = shard.halos.fetch(x, *neutral(ReduceOp::max, x.scalar_type()));
  if (shard.halos.idle()) return no_maxima(shard, x);
  shard.put_padding(op, arguments);
  Stack results = call_operator(op, std::move(arguments));
  results[1] = shard.global(results[1].toTensor());
  return results;
}

Stack avg_pool(const SlidingShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = shard.halos.fetch(named.tensor("self"), 0);
  if (shard.halos.idle()) return {new_memory(shard.result.local_shape(), x.options())};
  named["self"] = x;
  named["divisor_override"] = 1;
  shard.put_padding(op, arguments);
  return {call_operator(op, std::move(arguments))[0].toTensor().div_(shard.divisors(x.options()))};
}

Stack avg_backward(const SlidingShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = named.tensor("grad_output"), x = shard.halos.shaped(named.tensor("self"));
  if (shard.halos.idle()) return {shard.halos.give_back(at::zeros(x.sizes(), gradient.options()))};
  named["grad_output"] = at::div(gradient, shard.divisors(gradient.options()));
  named["self"] = x;
  named["divisor_override"] = 1;
  shard.put_padding(op, arguments);
  return {shard.halos.give_back(call_operator(op, std::move(arguments))[0].toTensor())};
}

// --- windows of different sizes

/// What position `o` of the result looks at.
Range window_of(const AdaptivePool& pool, size_t i, int64_t o) {
  const int64_t begin = at::native::start_index(o, pool.wanted[i], pool.sizes[i]);
  return {begin, at::native::end_index(o, pool.wanted[i], pool.sizes[i]) - begin};
}

std::vector<Reach> reaches(const AdaptivePool& pool) {
  std::vector<Reach> all;
  for (const size_t i : c10::irange(pool.sizes.size())) {
    all.emplace_back([pool, i](const Range& range) {
      const int64_t begin = window_of(pool, i, range.offset).offset;
      return Range{begin, window_of(pool, i, range.end() - 1).end() - begin};
    });
  }
  return all;
}

/// A rank's part of such a call. Along sharded dims windows are laid side by side, all as large as the
/// largest, so that the operator itself finds them.
struct AdaptiveShard : PoolShard {
  /// Of a dim where that changes anything.
  struct Tiles {
    at::Tensor positions;  // in what the rank sees, of each that is laid out
    at::Tensor repeated;   // which of these only make a window larger: its last position again
    at::Tensor ratios;     // of each window, by how much
  };
  std::vector<std::optional<Tiles>> tiles = {};

  AdaptiveShard(const AdaptivePool& all, const Spec& input, const Spec& result)
      : PoolShard(all.first, all.sizes, input, result, reaches(all)) {
    for (const size_t i : c10::irange(sizes.size())) {
      tiles.emplace_back();
      if (!halo(i)) continue;
      int64_t largest = 0;
      for (const int64_t o : c10::irange(local(i).offset, local(i).end()))
        largest = std::max(largest, window_of(all, i, o).size);
      std::vector<int64_t> positions, repeated;
      std::vector<double> ratios;
      for (const int64_t o : c10::irange(local(i).offset, local(i).end())) {
        const Range window = window_of(all, i, o);
        for (const int64_t k : c10::irange(largest)) {
          positions.push_back(std::min(window.offset + k, window.end() - 1) - seen(i).offset);
          repeated.push_back(k >= window.size);
        }
        ratios.push_back(static_cast<double>(largest) / static_cast<double>(window.size));
      }
      if (static_cast<int64_t>(positions.size()) != seen(i).size)  // else windows lie side by side already
        tiles[i] = {at::tensor(positions), at::tensor(repeated).to(at::kBool), at::tensor(ratios)};
    }
  }

  Shape tiled_sizes() const {
    Shape all = seen_sizes();
    for (const size_t i : c10::irange(all.size())) {
      if (tiles[i]) all[i] = tiles[i]->positions.numel();
    }
    return all;
  }
  Shape local_sizes() const {
    Shape all;
    for (const size_t i : c10::irange(sizes.size())) all.push_back(local(i).size);
    return all;
  }

  at::Tensor tiled(at::Tensor x) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (tiles[i]) x = x.index_select(dim(i), tiles[i]->positions.to(x.device()));
    }
    return x;
  }
  /// The converse, for gradients.
  at::Tensor untiled(at::Tensor x) const {
    for (const size_t i : c10::irange(tiles.size())) {
      if (!tiles[i]) continue;
      auto shape = x.sizes().vec();
      shape[dim(i)] = seen(i).size;
      x = at::zeros(shape, x.options()).index_add_(dim(i), tiles[i]->positions.to(x.device()), x);
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
  /// From positions in what is laid out to positions in the global planes.
  at::Tensor global(const at::Tensor& positions) const {
    return renumbered(positions, tiled_sizes(), sizes, [&](size_t i, const at::Tensor& position) {
      return at::add(tiles[i] ? at::take(tiles[i]->positions.to(position.device()), position) : position,
                     seen(i).offset);
    });
  }
};

Stack max_pool(const AdaptiveShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = shard.halos.fetch(self_tensor(arguments), 0);
  if (shard.halos.idle()) return no_maxima(shard, x);
  Stack results = call_operator(op, {shard.tiled(x), shard.local_sizes()});
  results[1] = shard.global(results[1].toTensor());
  return results;
}

Stack avg_pool(const AdaptiveShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor x = shard.halos.fetch(self_tensor(arguments), 0);
  if (shard.halos.idle()) return {new_memory(shard.result.local_shape(), x.options())};
  const at::Tensor tiled = shard.blanked(shard.tiled(x));
  return {shard.weighted(call_operator(op, {tiled, shard.local_sizes()})[0].toTensor())};
}

Stack avg_backward(const AdaptiveShard& shard, const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = named.tensor("grad_output"), seen = shard.halos.shaped(named.tensor("self"));
  if (shard.halos.idle()) return {shard.halos.give_back(at::zeros(seen.sizes(), gradient.options()))};
  Shape shape = seen.sizes().vec();
  const Shape sizes = shard.tiled_sizes();
  std::copy(sizes.begin(), sizes.end(), shape.begin() + shard.first);
  const at::Tensor tiled =
      call_operator(op, {shard.weighted(gradient), at::empty({1}, gradient.options()).expand(shape)})[0]
          .toTensor();
  return {shard.halos.give_back(shard.untiled(shard.blanked(tiled)))};
}

// --- both

template <typename Shard, typename Windows>
rules::Localize pooled(const Windows& pool, Pool kind, size_t self) {
  return [=](const rules::ChosenSpecs& chosen) {
    const Spec& result = is_backward(kind) ? chosen.inputs[0] : chosen.outputs[0];
    const auto shard = std::make_shared<const Shard>(pool, chosen.inputs[self], result);
    rules::LocalCall local;
    if (shard->halos.empty()) return local;
    local.communicates = shard->halos.communicates();
    local.compute = [shard, kind](const c10::OperatorHandle& op, Stack arguments) {
      switch (kind) {
        case Pool::max:
          return max_pool(*shard, op, std::move(arguments));
        case Pool::max_backward:
          return max_backward(*shard, op, std::move(arguments));
        case Pool::avg:
          return avg_pool(*shard, op, std::move(arguments));
        default:
          return avg_backward(*shard, op, std::move(arguments));
      }
    };
    return local;
  };
}

}  // namespace

rules::Localize pooled(const SlidingPool& pool, Pool kind, size_t self) {
  return pooled<SlidingShard>(pool, kind, self);
}
rules::Localize pooled(const AdaptivePool& pool, Pool kind, size_t self) {
  return pooled<AdaptiveShard>(pool, kind, self);
}

}  // namespace tessera::kernels
