#include <tessera/rules/planes.h>
#include <tessera/rules/shape.h>

#include <algorithm>

#include <c10/util/irange.h>

namespace tessera::rules {

std::optional<Strategies> strategies_of(const Planes& form, const OpCall& call) {
  const auto self = call.tensor("self"), rows = call.tensor(form.rows);
  const Spec& spec = call.tensors[self.value_or(0)];
  const int64_t outer = spec.ndim() - form.inner;  // batch, if any, and channels
  if (outer < 1 || spec.numel() == 0) return std::nullopt;
  if (std::find(form.except.begin(), form.except.end(), spec.dtype()) != form.except.end())
    return std::nullopt;
  if (!form.rows.empty() && (!rows || outer > 2 || call.tensors[*rows].ndim() < 2)) return std::nullopt;
  for (const size_t i : c10::irange(call.tensors.size())) {
    if (i != rows && call.tensors[i].ndim() != spec.ndim()) return std::nullopt;
  }
  const auto size_position = call.position("input_size");
  Shape shape = size_position ? call.integers("input_size") : spec.shape().vec();
  if (static_cast<int64_t>(shape.size()) != spec.ndim()) return std::nullopt;
  if (!form.gradient) std::fill(shape.begin() + outer, shape.end(), kLocal);

  Strategies strategies;
  for (const int64_t dim : c10::irange(outer)) {
    Strategy strategy{Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}};
    const bool is_channels = dim == outer - 1;
    if (is_channels) strategy.divisor = shape[dim];
    if (rows) strategy.inputs[*rows] = Shard(is_channels ? 1 : 0);
    strategies.options.push_back(std::move(strategy));
  }
  if (form.linear) {
    Strategy strategy{Placements(call.tensors.size(), Replicate()), {Partial()}};
    strategy.inputs[0] = Partial();
    strategies.options.push_back(std::move(strategy));
  }
  if (size_position) {
    strategies.localize = [position = *size_position](const ChosenSpecs& chosen) {
      return LocalCall{{{position, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
    };
  }
  if (const auto spatial = form.spatial ? form.spatial(call) : std::nullopt) {
    if (!form.gradient) std::copy(spatial->sizes.begin(), spatial->sizes.end(), shape.begin() + outer);
    for (const int64_t dim : c10::irange(outer, spec.ndim())) {
      strategies.options.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}});
      strategies.options.back().contiguous = true;
    }
    strategies.localize = [of_planes = std::move(strategies.localize),
                           of_shards = spatial->localize](const ChosenSpecs& chosen) {
      LocalCall local = of_shards(chosen);
      return local.compute || !of_planes ? local : of_planes(chosen);
    };
  }
  strategies.results.assign(form.results, Result{shape});
  return strategies;
}

}  // namespace tessera::rules
