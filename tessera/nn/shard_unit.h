#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/export.h>
#include <tessera/nn/mixed_precision.h>
#include <tessera/nn/packing.h>
#include <tessera/nn/shard_target.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace tessera {

class UnitSchedule;

/// Parameters that are sharded, and gathered and freed together: see fully_shard.h. One for each rank.
///
///   - Gathered: all parameters in one all-gather, into memory that they share, when the first of them is used.
///   - Freed: that memory is given back. What autograd saved still refers to it, and it comes back, by a new
///     all-gather, when backward needs it.
///   - Gradients: one node of autograd has all gathered parameters as its results. When all of their gradients
///     are there, it frees the parameters and reduce-scatters the gradients, once.
class TESSERA_API ShardUnit : public std::enable_shared_from_this<ShardUnit> {
 public:
  struct Options {
    /// Free parameters after forward. By default all but those of the outermost unit, which backward needs first.
    std::optional<bool> reshard_after_forward = {};
    /// Freed for backward, each rank keeps what it needs to gather them among so many neighbours; by default its
    /// own shards, for all ranks.
    std::optional<int64_t> post_forward_ranks = {};
    MixedPrecisionPolicy mp_policy = {};
    /// Gather the next unit while this one computes, and reduce gradients while backward goes on.
    bool overlap = true;
    /// Give gathered parameters to operators between begin_forward and end_forward only.
    bool only_in_forward = false;
  };
  struct Parameter {
    std::string name;
    at::Tensor tensor;  // distributed, as shard_target says
  };

  static std::shared_ptr<ShardUnit> make(std::vector<Parameter> parameters, ShardDims dims,
                                         const Options& options);
  ~ShardUnit();

  const ShardDims& dims() const { return dims_; }
  const Options& options() const { return options_; }
  /// `inner`, and what is inside of it, is used while this one is.
  void adopt(ShardUnit& inner);

  /// Other tensors in the place of the parameters, in the same order.
  void set_parameters(const std::vector<at::Tensor>& tensors);

  /// The unit of a parameter, and which of its parameters it is; null if it is none.
  static std::pair<std::shared_ptr<ShardUnit>, size_t> of(const at::Tensor& parameter);

  /// That of all units of the model.
  const std::shared_ptr<UnitSchedule>& schedule() const { return schedule_; }

  /// Whether operators cast their inputs to param_dtype. (Python casts those of modules.)
  bool casts_inputs() const {
    return options_.mp_policy.param_dtype && options_.mp_policy.cast_forward_inputs &&
           !options_.only_in_forward;
  }
  /// Whether an operator that takes a parameter gets it gathered; `uses_weight`: it is one that modules use
  /// their weights with.
  bool gives(bool uses_weight) const;
  /// The gathered parameter, for one operator: distributed, or plain if batches are local.
  at::Tensor gathered(size_t index);

  bool is_gathered() const;
  void unshard();
  /// Frees them, and what is kept for backward.
  void reshard();

  /// Around forward of the unit's module, where that is known. `local`: each rank has a batch of its own, as
  /// plain tensors, and gradients are averaged; otherwise tensors are distributed on the mesh, and gradients
  /// are sums. Nothing: as the units around it; local, if there are none.
  void begin_forward(std::optional<bool> local);
  void end_forward();
  /// Before backward of the unit, where that is known: what is plain cannot be restored when it is read.
  void begin_backward();

  bool syncs_gradients() const { return syncs_gradients_; }
  /// While it does not, gradients are kept, unsharded and not reduced, for the next backward that does.
  void set_syncs_gradients(bool syncs) { syncs_gradients_ = syncs; }
  /// By what the sum of the gradients of local batches is divided; by default the number of ranks.
  void set_gradient_divisor(double divisor) { gradient_divisor_ = divisor; }
  void set_reshard_after_forward(bool reshard) { options_.reshard_after_forward = reshard; }
  /// Whether memory is freed after backward.
  void set_reshard_after_backward(bool reshard) { reshard_after_backward_ = reshard; }

 private:
  friend class UnitSchedule;
  class Gathered;
  class Backward;
  struct Layout;
  struct Part;

  ShardUnit(std::vector<Parameter> parameters, ShardDims dims, const Options& options);
  void describe();
  /// What changes when somebody writes a parameter.
  std::vector<uint64_t> state() const;
  bool has_state(const std::vector<uint64_t>& state) const;
  void start();
  /// Of the ranks that gather parameters for backward: the place of this one in its group.
  struct Neighbours {
    Group group;
    int64_t ranks = 0, rank = 0;
  };
  Neighbours neighbours() const;
  /// Frees the parameters until they are used again.
  void release();
  bool keeps_after_forward() const;
  bool frees_after_backward() const;
  c10::intrusive_ptr<torch::autograd::Node> node();
  /// Whether its gradient is reduced in the order in which it lies, without a copy.
  bool is_reduced_directly(const Part& part, at::ScalarType dtype) const;
  double divisor() const { return gradient_divisor_.value_or(static_cast<double>(dims_.ranks())); }
  bool is_in_backward() const { return !in_backward_.expired(); }
  /// Frees the parameters; the gradients placed as the parameters. `trained`: which parameters may have one, on
  /// some rank.
  torch::autograd::variable_list reduced(torch::autograd::variable_list gradients, bool local,
                                         const std::vector<bool>& trained);
  torch::autograd::variable_list reduced_now(torch::autograd::variable_list gradients, bool local,
                                             const std::vector<bool>& trained);
  /// Of gradients that are kept, if no backward that reduces came here: adds them to those of the parameters.
  void reduce_kept();
  at::Tensor reduced_alone(size_t index, const at::Tensor& gradient) const;
  std::optional<Part> part_of(size_t index, const at::Tensor& gradient) const;
  at::ScalarType reduce_dtype(at::ScalarType own) const;
  Packing::Item packed(const Part& part, at::ScalarType dtype) const;
  void reduce_together(std::vector<Part> parts, at::ScalarType dtype, bool local,
                       torch::autograd::variable_list& results);

  std::vector<Parameter> parameters_;
  const ShardDims dims_;
  Options options_;
  std::vector<Layout> layouts_;  // of the parameters
  std::optional<Packing> packing_;
  int64_t gathered_bytes_ = 0;
  std::optional<Neighbours> neighbours_;
  std::shared_ptr<UnitSchedule> schedule_;
  std::weak_ptr<ShardUnit> outer_;
  std::array<std::weak_ptr<ShardUnit>, 2> next_;  // in forward and in backward, when it was last used
  std::shared_ptr<Gathered> gathered_;
  c10::weak_intrusive_ptr<torch::autograd::Node> node_{c10::intrusive_ptr<torch::autograd::Node>()};
  std::vector<at::Tensor> unreduced_;    // gradients that are kept
  std::optional<bool> unreduced_local_;  // whether they are of local batches; none: none are kept
  std::weak_ptr<void> in_backward_;      // begin_backward was called, and this backward is not done
  uint64_t sequence_nr_ = 0;             // of the node
  bool syncs_gradients_ = true;
  std::optional<double> gradient_divisor_;
  bool reshard_after_backward_ = true;
};

}  // namespace tessera
