#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/mixed_precision.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace tessera {

class ShardUnit;

struct FullyShardOptions {
  /// Which dims of the mesh ranks train together on: one that shards, or one that replicates and one that shards.
  /// By default all dims of the mesh. Along the others parameters stay as they are: {.dims = {"dp"}} on
  /// mesh(dp=2, tp=2) after parallelize_module.
  std::vector<MeshDim> dims = {};
  /// Free the gathered parameters after forward, and gather them again for backward. By default all units do but
  /// the outermost, whose parameters backward needs first. If that one is told to, it does so also between
  /// two uses.
  std::optional<bool> reshard_after_forward = {};
  /// Parameters that are freed after forward stay sharded over groups of so many neighbouring ranks, instead of all,
  /// and backward gathers them there: on a host, say, if there are several. It divides the number of ranks.
  std::optional<int64_t> post_forward_ranks = {};
  /// The dim to shard a parameter along, by its name in the module; by default the first.
  std::function<int64_t(const std::string& name, const at::Tensor& parameter)> shard_dim = {};
  MixedPrecisionPolicy mp_policy = {};
  /// Communicate while units compute: the next unit is gathered ahead, and gradients are reduced while backward
  /// goes on. This takes the memory of two more units.
  bool overlap = true;
  /// Parameters to leave alone.
  std::vector<at::Tensor> ignored_params = {};
  /// The rank of the mesh whose parameters count; with none, each rank's own.
  std::optional<int64_t> source = 0;
};

/// Makes the parameters of a module, but those of units inside of it, one unit, whose parameters, gradients and
/// optimizer states are sharded over the ranks. Call it for the parts of a model, then for all of it:
///
///   for (const auto& block : *model->blocks) fully_shard(*block, mesh);
///   fully_shard(*model, mesh);
///   torch::optim::AdamW optimizer(model->parameters());               // made afterwards
///   at::Tensor x = distribute_tensor(batch, mesh, {Shard(0)});
///   loss(model->forward(x)).backward();                               // of the global batch
///
/// A unit's parameters are gathered in one all-gather when an operator first needs one of them, freed when the
/// next unit begins, and gathered again in backward; then their gradients are reduce-scattered in one
/// collective. Nothing in the model changes (docs/parallel.md says how, and what it costs).
///
/// Parameters may have any dtypes and sizes, be shared by modules of the unit, and be frozen. Those that are
/// distributed on other mesh dims keep their placements there. Buffers are replicated.
TESSERA_API void fully_shard(torch::nn::Module& module, const DeviceMesh& mesh,
                             const FullyShardOptions& options = {});

/// Gathers the parameters of the unit now, and frees them.
TESSERA_API void unshard(torch::nn::Module& module);
TESSERA_API void reshard(torch::nn::Module& module);

/// Whether backward reduces the gradients of the units in `module`. While it does not, each rank keeps them
/// unsharded, without communication, for the next backward that does.
TESSERA_API void set_requires_gradient_sync(torch::nn::Module& module, bool requires_gradient_sync);

}  // namespace tessera
