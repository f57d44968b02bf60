#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Whether `tensor` is distributed over the ranks of `mesh`, perhaps among others: on it, or on a mesh of the
/// same root that has all its dims.
TESSERA_API bool is_distributed_on(const at::Tensor& tensor, const DeviceMesh& mesh);

/// Gives each rank of the mesh the values that the first one has, in place: of a plain tensor, or of the
/// local tensor of one that is distributed on other ranks.
TESSERA_API void broadcast_values(const at::Tensor& tensor, const DeviceMesh& mesh);

/// Reduces the gradients of parameters over the ranks of a mesh: once per parameter and backward pass, in
/// buckets, in the background where the backend can. One per replicated module and rank.
///
///   - Parameters that are distributed on the mesh (see above) get gradients with their own placements; what
///     was partial is summed.
///   - Gradients of other parameters, plain ones or such that are distributed on other ranks, are averaged.
///
/// All ranks must get gradients of the same parameters in the same order, as they do from the same graph.
class TESSERA_API GradientReduction {
 public:
  struct Options {
    /// How many bytes of gradients are reduced together.
    int64_t bucket_bytes = 25 << 20;
    /// Of the first bucket of a backward pass: smaller, so that communication begins early.
    int64_t first_bucket_bytes = 1 << 20;
  };

  GradientReduction(DeviceMesh mesh, Options options);
  ~GradientReduction();

  const DeviceMesh& mesh() const { return mesh_; }
  const Options& options() const { return options_; }

  bool enabled() const { return enabled_; }
  /// While it is not, gradients are left as each rank computes them.
  void set_enabled(bool enabled) { enabled_ = enabled; }

  /// To be called, inside backward, when the gradient of a parameter was accumulated. It may be called
  /// several times in one pass, for a parameter that is also used where activations are computed again.
  void ready(const at::Tensor& parameter);

 private:
  struct Backward;
  struct Reduction;

  /// What to do for the gradient; none if nothing is left to do.
  std::optional<Reduction> reduction_of(const at::Tensor& parameter) const;
  std::shared_ptr<Backward> current_backward();

  const DeviceMesh mesh_;
  const Options options_;
  bool enabled_ = true;
  std::weak_ptr<Backward> backward_;  // the engine's callbacks own it: nothing is left of one that failed
};

}  // namespace tessera
