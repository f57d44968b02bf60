#pragma once

#include <tessera/export.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::sharded {

/// Replaces a parameter of the module itself by a sharded one: each rank gets its shards of what the
/// `src_rank`-th rank of the group has. Collective. Throws if there is no such parameter, it is not
/// contiguous, or somebody else holds it (an optimiser made too early, or a member that is not known), who
/// would go on with the old one.
TESSERA_API void shard_parameter(torch::nn::Module& module, const std::string& name, const ShardingSpec& spec,
                                 int64_t src_rank = 0, const Ranks& process_group = {});

/// Shards a module as a spec cannot: by a code of one's own.
class TESSERA_API Sharder {
 public:
  virtual ~Sharder();
  /// The sharded version of a module: itself, changed, or another one that replaces it in its parent's
  /// list. (A member of the parent that is a handle on it is the parent's to change.)
  virtual std::shared_ptr<torch::nn::Module> shard(std::shared_ptr<torch::nn::Module> module) = 0;
};

/// How to shard a module.
struct TESSERA_API ShardingPlan {
  using Entry = std::variant<ShardingSpecPtr, std::shared_ptr<Sharder>>;
  /// Specs by the names of parameters, sharders by the names of modules.
  std::map<std::string, Entry> plan = {};
  /// The sharding of module outputs that are sharded tensors; "" is the root.
  std::map<std::string, ShardingSpecPtr> output_plan = {};
  /// Modules whose sharded outputs are to be returned as the local tensor.
  std::vector<std::string> return_local_tensor = {};
};

class TESSERA_API ShardingPlanner {
 public:
  virtual ~ShardingPlanner();
  virtual ShardingPlan build_plan(const torch::nn::Module& module) = 0;
};

/// Shards the module as the plan says. Collective. Throws on names that the module does not have, on
/// parameters inside a module that has a sharder, and on entries without a spec or sharder.
TESSERA_API void shard_module(torch::nn::Module& module, const ShardingPlan& plan, int64_t src_rank = 0,
                              const Ranks& process_group = {});

/// C++ modules have no hooks around `forward`: those below run where the module is called by `call`. A
/// sharded tensor that the module returns is resharded by `spec`, and anything else left as it is.
TESSERA_API void reshard_output(torch::nn::Module& module, const ShardingSpec& spec);
/// A sharded tensor that the module returns becomes its local tensor, without the dim that is sharded into
/// chunks if that has size 1 there: of a [4, 16] tensor on four ranks each gets a [16].
TESSERA_API void collect_local_shard(torch::nn::Module& module);

/// What the hooks of a module make of its output.
TESSERA_API at::Tensor with_output_hooks(const torch::nn::Module& module, at::Tensor output);

/// `module->forward(arguments...)`, with the module's hooks on what it returns.
template <class Holder, class... Arguments>
at::Tensor call(Holder&& module, Arguments&&... arguments) {
  return with_output_hooks(*module, module->forward(std::forward<Arguments>(arguments)...));
}

}  // namespace tessera::sharded
