#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ATen.h>

namespace tessera::rules {

namespace {

/// Where the channels of a weight are.
struct Channels {
  int64_t in, out;
  explicit Channels(bool transposed) : in(transposed ? 0 : 1), out(transposed ? 1 : 0) {}
};

/// Batch, output channels or input channels may be cut; with groups, the batch. Channels evenly: no rank may
/// have none.
std::optional<Proposal> convolution(const Call& call) {
  const auto input = call.tensor("input"), weight = call.tensor("weight"), bias = call.tensor("bias");
  if (!input || !weight) return std::nullopt;
  const Spec &x = call.tensors[*input], &w = call.tensors[*weight];
  if (x.ndim() < 3 || x.ndim() != w.ndim() || x.numel() == 0) return std::nullopt;
  const Channels channels(call.flag("transposed"));
  const int64_t groups = call.integer("groups");
  const int64_t outputs = channels.out == 0 ? w.shape()[0] : w.shape()[1] * groups;
  Shape shape{x.shape()[0], outputs};
  shape.resize(x.ndim(), kLocal);
  Proposal proposal;
  proposal.results = {{shape}};
  auto add = [&](Placement of_input, Placement of_weight, Placement of_bias, Placement of_output,
                 int64_t divisor) {
    Row row{{of_input, of_weight}, {of_output}, divisor};
    if (bias) row.inputs.push_back(of_bias);
    proposal.rows.push_back(std::move(row));
  };
  add(Shard(0), Replicate(), Replicate(), Shard(0), 0);
  if (groups == 1) {
    add(Replicate(), Shard(channels.out), Shard(0), Shard(1), outputs);
    add(Shard(1), Shard(channels.in), Partial(), Partial(), x.shape()[1]);
  }
  if (!bias) add(Partial(), Replicate(), Replicate(), Partial(), 0);
  return proposal;
}

std::optional<Proposal> convolution_backward(const Call& call) {
  const auto gradient = call.tensor("grad_output"), input = call.tensor("input"),
             weight = call.tensor("weight");
  if (!gradient || !input || !weight) return std::nullopt;
  const Spec &g = call.tensors[*gradient], &x = call.tensors[*input], &w = call.tensors[*weight];
  if (x.ndim() < 3 || x.ndim() != w.ndim() || x.numel() == 0) return std::nullopt;
  const Channels channels(call.flag("transposed"));
  const Placement r = Replicate(), sum = Partial();
  Proposal proposal;
  proposal.results = {{x.shape().vec()}, {w.shape().vec()}, {{g.shape()[1]}}};
  proposal.rows = {{{Shard(0), Shard(0), r}, {Shard(0), sum, sum}}};
  if (call.integer("groups") == 1) {
    proposal.rows.push_back(
        {{Shard(1), r, Shard(channels.out)}, {sum, Shard(channels.out), Shard(0)}, g.shape()[1]});
    proposal.rows.push_back(
        {{r, Shard(1), Shard(channels.in)}, {Shard(1), Shard(channels.in), r}, x.shape()[1]});
  }
  proposal.rows.push_back({{sum, r, r}, {sum, sum, sum}});
  if (call.has("bias_sizes")) {
    proposal.localize = [position = *call.position("bias_sizes"),
                         gradient = *gradient](const Chosen& chosen) {
      return Local{{{position, c10::IValue(Shape{chosen.inputs[gradient].local_shape()[1]})}}};
    };
  }
  return proposal;
}

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

}  // namespace

Table spatial_rules() {
  constexpr bool kForward = false, kBackward = true, kLinear = true;
  return {
      {{"convolution"},
       {"nc..,oc..(,o)->no..; channels evenly, without groups", convolution, {"transposed", "groups"}}},
      {{"convolution_backward"},
       {"no..,nc..,oc..->nc..,oc..,o; channels evenly, without groups",
        convolution_backward,
        {"transposed", "groups", "bias_sizes"}}},
      {{"max_pool2d_with_indices", "adaptive_max_pool2d"}, planes(2, 2, kForward)},
      {{"max_pool3d_with_indices", "adaptive_max_pool3d"}, planes(3, 2, kForward)},
      {{"avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
        "upsample_bicubic2d", "_upsample_nearest_exact2d", "reflection_pad2d", "replication_pad2d"},
       planes(2, 1, kForward, kLinear)},
      {{"avg_pool3d", "_adaptive_avg_pool3d", "upsample_nearest3d", "upsample_trilinear3d",
        "_upsample_nearest_exact3d", "reflection_pad3d", "replication_pad3d"},
       planes(3, 1, kForward, kLinear)},
      {{"upsample_nearest1d", "upsample_linear1d", "_upsample_nearest_exact1d", "reflection_pad1d",
        "replication_pad1d"},
       planes(1, 1, kForward, kLinear)},
      {{"max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward", "avg_pool2d_backward",
        "_adaptive_avg_pool2d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward", "_upsample_nearest_exact2d_backward", "reflection_pad2d_backward",
        "replication_pad2d_backward"},
       planes(2, 1, kBackward, kLinear)},
      {{"max_pool3d_with_indices_backward", "adaptive_max_pool3d_backward", "avg_pool3d_backward",
        "_adaptive_avg_pool3d_backward", "upsample_nearest3d_backward", "upsample_trilinear3d_backward",
        "_upsample_nearest_exact3d_backward", "reflection_pad3d_backward", "replication_pad3d_backward"},
       planes(3, 1, kBackward, kLinear)},
      {{"upsample_nearest1d_backward", "upsample_linear1d_backward", "_upsample_nearest_exact1d_backward",
        "reflection_pad1d_backward", "replication_pad1d_backward"},
       planes(1, 1, kBackward, kLinear)},
  };
}

}  // namespace tessera::rules
