#pragma once

#include <tessera/export.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/layer_plan.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A layer that ColwiseParallel or RowwiseParallel has sharded: what its hooks do with what flows in and out.
/// It knows no module, so that hooks of C++ and of Python share it.
class TESSERA_API ParallelLayer {
 public:
  struct Layouts {
    std::optional<Placement> input = {};   // of plain inputs; none: as the layer needs them
    std::optional<Placement> output = {};  // none: as the layer returns it
  };

  /// `features`: the size of the weight's feature dim, if the plan has one. `module` names the layer in
  /// errors.
  ParallelLayer(LayerStyle style, LayerPlan plan, ParallelDim where, const Layouts& layouts,
                std::optional<int64_t> features, std::string_view module);

  /// Of what the layer is called with: the plan's inputs, then all other tensors. Undefined tensors are
  /// skipped, and a tensor that is there several times is the same tensor afterwards.
  void prepare_inputs(std::vector<at::Tensor>& tensors) const;
  at::Tensor prepare_output(const at::Tensor& output) const;

 private:
  ParallelDim where_;
  size_t num_inputs_;
  ActivationLayout input_, output_;
  std::string what_;  // "of ColwiseParallel on Linear"
};

/// Throws unless the heads of a MultiheadAttention can be divided evenly between the ranks.
TESSERA_API void check_heads(int64_t heads, const ParallelDim& where);

}  // namespace tessera
