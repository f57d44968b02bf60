#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/gradient_reduction.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace tessera {

using ReplicateOptions = GradientReduction::Options;

/// Data parallel: parameters and buffers that are not distributed yet are replicated on the mesh (those of
/// the mesh's first rank count), and gradients are reduced once per parameter, in buckets, while backward
/// goes on where the backend works in the background (gloo, nccl). After backward each gradient has the
/// placements of its parameter.
///
///   replicate(*model, mesh);
///   at::Tensor x = DTensor::from_local(batch, mesh, {Shard(0)});      // each rank's shard of the batch
///   loss(model->forward(x)).backward();                              // of the global batch
///
/// The loss is that of the global batch, so gradients are sums: nothing is divided by the number of ranks.
/// Parameters that get no gradient are left alone: all ranks have the same graph, so they agree on which.
/// Also the way to reduce the gradients of modules that `parallelize_module` distributed on a mesh of several
/// dims. Without `replicate` results are the same: the optimiser's operators reduce each gradient when they
/// need it.
///
/// Parameters that are distributed on other ranks, such as those on mesh["tp"] for a `mesh` that is
/// mesh["dp"], are replicas that each rank trains with its own batch: they get the values of the first rank
/// now, and their gradients are averaged.
TESSERA_API void replicate(torch::nn::Module& module, const DeviceMesh& mesh,
                           const ReplicateOptions& options = {});

/// While it lives, gradients of a replicated module stay partial values: for all but the last of several
/// backward passes that add up.
///   { NoSync accumulate(*model); loss(first).backward(); }
///   loss(second).backward();                                          // reduces both at once
class TESSERA_API NoSync {
 public:
  explicit NoSync(torch::nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<GradientReduction> reduction_;
  bool before_;
};

}  // namespace tessera
