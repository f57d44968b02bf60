#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>
#include <tessera/thread_scope.h>

#include <map>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

/// Sharded tensors in what is saved: each rank saves and loads its own shards.
namespace tessera::sharded {

/// While alive, makes tensors that the calling thread loads shared by these ranks, instead of by all. Throws
/// if there is one already.
class TESSERA_API LoadWithProcessGroup {
 public:
  explicit LoadWithProcessGroup(Ranks process_group);
  ~LoadWithProcessGroup();
  LoadWithProcessGroup(const LoadWithProcessGroup&) = delete;
  LoadWithProcessGroup& operator=(const LoadWithProcessGroup&) = delete;

  /// The ranks that tensors are loaded on now.
  static Ranks current();

 private:
  const Ranks ranks_;
  ThreadScope<const Ranks*, LoadWithProcessGroup> scope_;
};

/// Tensors by name, plain and sharded.
using TensorDict = std::map<std::string, at::Tensor>;

/// All parameters and buffers of a module and its submodules, by dotted name after `prefix`. Plain ones share
/// the module's memory; sharded ones are the module's own.
TESSERA_API TensorDict state_dict(const torch::nn::Module& module, const std::string& prefix = "");

/// Adds the sharded parameters and buffers of a module and its submodules.
TESSERA_API void state_dict_hook(const torch::nn::Module& module, TensorDict& destination,
                                 const std::string& prefix = "");

/// Puts the sharded tensors of `state` into the module: where it has a parameter or buffer of that name and
/// tiling, the values are copied into that; else this becomes the tensor of `state`, whatever it was before.
/// Throws if somebody else holds the old one (an optimiser made too early), who would go on with it.
TESSERA_API void pre_load_state_dict_hook(torch::nn::Module& module, const TensorDict& state,
                                          const std::string& prefix = "");

/// Sharded tensors as above; the values of plain ones are copied. Throws, naming them, if `strict` and names
/// are missing or too many, and where sizes differ.
TESSERA_API void load_state_dict(torch::nn::Module& module, const TensorDict& state, bool strict = true,
                                 const std::string& prefix = "");

/// As bytes, of this rank; and back, on the same rank of as many: see ShardedTensor::from_bytes.
TESSERA_API std::string to_bytes(const TensorDict& state);
TESSERA_API TensorDict from_bytes(std::string_view bytes);

}  // namespace tessera::sharded
