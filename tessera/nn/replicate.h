#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <memory>

namespace torch::nn {
class Module;
}

namespace tessera {

struct ReplicateOptions {
  /// How many bytes of gradients are reduced together. The first bucket of a backward pass is smaller, so
  /// that communication begins early.
  int64_t bucket_bytes = 25 << 20;
  int64_t first_bucket_bytes = 1 << 20;
};

/// Data parallel: parameters and buffers that are not distributed yet are replicated on the mesh (those of
/// the mesh's first rank count), and gradients are reduced once per parameter, in buckets, while backward
/// goes on where the backend works by itself (gloo, nccl). After backward each gradient is placed as its
/// parameter.
///
///   replicate(*model, mesh);
///   at::Tensor x = DTensor::from_local(batch, mesh, {Shard(0)});      // each rank's part of the batch
///   loss(model->forward(x)).backward();                              // of the whole batch
///
/// The loss is that of the whole batch, so gradients are sums: nothing is divided by the number of ranks.
/// Parameters that get no gradient are left alone: all ranks have the same graph, so they agree on which.
/// Also the way to reduce the gradients of modules that `parallelize_module` distributed on a mesh of several
/// dims. Without `replicate` results are the same: the optimiser's operators reduce each gradient when they
/// need it.
TESSERA_API void replicate(torch::nn::Module& module, const DeviceMesh& mesh,
                           const ReplicateOptions& options = {});

/// While it lives, gradients of a replicated module stay partial sums: for all but the last of several
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
  std::shared_ptr<class GradientReduction> reduction_;
};

}  // namespace tessera
