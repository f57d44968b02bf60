#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

namespace torch::nn {
class Module;
}

namespace tessera::sharded {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// All parameters of a module, and of its submodules if asked for, plain and sharded, each once, by dotted
/// name after `prefix`.
TESSERA_API NamedParameters named_params_with_sharded_tensor(const torch::nn::Module& module,
                                                             const std::string& prefix = "",
                                                             bool recurse = true);

/// Runs any of libtorch's optimisers on plain parameters and on the local shards of sharded ones: element by
/// element that is the same as on the global tensor.
///
///   ShardedOptimizer optimizer(named_params_with_sharded_tensor(*model),
///                              ShardedOptimizer::of<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
class TESSERA_API ShardedOptimizer {
 public:
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;

  /// How to make an `Optimizer` with those options.
  template <class Optimizer, class... Options>
  static Make of(Options... options) {
    return [=](std::vector<at::Tensor> parameters) {
      return std::make_unique<Optimizer>(std::move(parameters), options...);
    };
  }

  ShardedOptimizer(NamedParameters named_params, const Make& make);

  /// `set_to_none`: forget the gradients instead of making them zero.
  void zero_grad(bool set_to_none = true);
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// More parameters, with the optimiser's default options or those given.
  void add_param_group(NamedParameters named_params,
                       std::unique_ptr<torch::optim::OptimizerOptions> options = nullptr);

  const NamedParameters& named_params() const { return named_params_; }
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() { return optimizer_->param_groups(); }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  /// The state of this rank's local shards, as bytes; and back, on the same rank and parameters.
  std::string state_dict() const;
  void load_state_dict(const std::string& state);

 private:
  NamedParameters named_params_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace tessera::sharded
