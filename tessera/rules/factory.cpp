#include <tessera/rules/family.h>

#include <algorithm>

namespace tessera::rules {

namespace {

std::optional<Proposal> like(const Call& call) { return like_first(call); }

/// What is not set yet may be partial.
std::optional<Proposal> empty_like(const Call& call) {
  const Spec& spec = call.tensors[0];
  const Letters all = identity(spec.ndim());
  return moved(all, all, {spec.shape().vec(), new_strides(call)});
}

/// A new tensor of given sizes: placed like this one if these are its own, else replicated. `place` says how
/// it is placed like this one.
std::optional<Proposal> sized(const Call& call, std::optional<Proposal> (*place)(const Call&)) {
  const Spec& spec = call.tensors[0];
  const Shape size = call.integers("size");
  const bool strided = call.position("stride").has_value();
  if (c10::IntArrayRef(size) != spec.shape()) {
    // Whatever the tensor is: its values do not matter.
    Proposal proposal;
    for (int64_t dim = 0; dim < spec.ndim(); ++dim) proposal.rows.push_back({{Shard(dim)}, {Replicate()}});
    proposal.rows.push_back({{Partial()}, {Replicate()}});
    proposal.rows.back().any_partial = true;
    proposal.results = {{size, strided ? call.integers("stride") : Shape()}};
    if (strided && size.empty()) proposal.results[0].strides.clear();
    return proposal;
  }
  auto proposal = place(call);
  proposal->results[0].strides = strided ? call.integers("stride") : Shape();
  proposal->localize = [strides = proposal->results[0].strides](const Chosen& chosen) {
    const auto shape = chosen.outputs[0].local_shape();
    Local local{{{1, c10::IValue(shape.vec())}}};
    if (!strides.empty()) {
      const auto held = local_strides(strides, shape);
      local.arguments.emplace_back(2, c10::IValue(std::vector<int64_t>(held.begin(), held.end())));
    }
    return local;
  };
  return proposal;
}

std::optional<Proposal> new_like(const Call& call) { return sized(call, like); }
std::optional<Proposal> new_empty(const Call& call) { return sized(call, empty_like); }

}  // namespace

Table factory_rules() {
  return {
      {{"zeros_like", "ones_like", "full_like"}, {"placed like the input, P as R", like, {"memory_format"}}},
      {{"empty_like"}, {"placed like the input", empty_like, {"memory_format"}}},
      {{"new_zeros", "new_ones", "new_full"},
       {"placed like the input, P as R, if of its sizes; else replicated", new_like, {"size"}}},
      {{"new_empty"}, {"placed like the input if of its sizes; else replicated", new_empty, {"size"}}},
      {{"new_empty_strided"},
       {"placed like the input if of its sizes; else replicated", new_empty, {"size", "stride"}}},
  };
}

}  // namespace tessera::rules
