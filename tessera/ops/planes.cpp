#include <tessera/ops/planes.h>

#include <memory>

#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// An operator, or its gradient.
enum class Direction { forward, backward };

Localize by_maps(const std::vector<LinearMap>& maps, bool copies, Direction direction) {
  const bool backward = direction == Direction::backward;
  return [=](const ChosenSpecs& chosen) {
    const Spec &given = chosen.inputs[0], &made = chosen.outputs[0];
    const auto local_maps = backward ? std::make_shared<const LinearMaps>(made, given, maps, copies)
                                     : std::make_shared<const LinearMaps>(given, made, maps, copies);
    LocalCall local;
    if (local_maps->halos().empty()) return local;
    local.communicates = local_maps->halos().communicates();
    local.compute = [=](const c10::OperatorHandle&, const Stack& arguments) {
      const at::Tensor x = self_tensor(arguments);
      return Stack{backward ? local_maps->backward(x) : local_maps->forward(x)};
    };
    return local;
  };
}

std::optional<SpatialSharding> sharding_of(const Separable& op, const OpCall& call, Direction direction) {
  const bool backward = direction == Direction::backward;
  const Spec& given = call.tensors[0];
  if (!op.copies && !at::isFloatingType(given.dtype())) return std::nullopt;
  Shape input = given.shape().vec();
  if (backward)
    input = call.position("input_size") ? call.integers("input_size") : call.tensors[1].shape().vec();
  if (static_cast<int64_t>(input.size()) != given.ndim()) return std::nullopt;
  const auto first = given.ndim() - op.inner;
  const auto maps = op.maps(call, c10::IntArrayRef(input).slice(first));
  if (!maps) return std::nullopt;
  Shape sizes;
  for (const LinearMap& map : *maps) sizes.push_back(map.size);
  Shape result(input.begin(), input.begin() + first);
  result.insert(result.end(), sizes.begin(), sizes.end());
  if (backward && given.shape() != c10::IntArrayRef(result)) return std::nullopt;
  return SpatialSharding{sizes, by_maps(*maps, op.copies, direction)};
}

Planes separable(const Separable& op, Direction direction) {
  return {.inner = op.inner,
          .gradient = direction == Direction::backward,
          .linear = true,
          .except = {at::kBool},
          .spatial = [=](const OpCall& call) { return sharding_of(op, call, direction); },
          .spatial_reads = op.reads};
}

}  // namespace

Planes separable(const Separable& op) { return separable(op, Direction::forward); }
Planes separable_backward(const Separable& op) { return separable(op, Direction::backward); }

}  // namespace tessera::ops
