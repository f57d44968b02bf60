#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <ATen/core/Generator.h>
#include <c10/core/Scalar.h>

namespace tessera::sharded {

/// A copy that is a leaf, if the tensor is one, with the same requires_grad.
TESSERA_API ShardedTensor deepcopy(const ShardedTensor& tensor);

/// Fill the local shards, as torch::nn::init does plain tensors; fans are those of the global tensor.
namespace init {

/// For the fans of `kaiming_uniform_`.
enum class FanMode { fan_in, fan_out };

TESSERA_API ShardedTensor uniform_(ShardedTensor tensor, double a = 0, double b = 1,
                                   std::optional<at::Generator> generator = std::nullopt);
TESSERA_API ShardedTensor normal_(ShardedTensor tensor, double mean = 0, double std = 1,
                                  std::optional<at::Generator> generator = std::nullopt);
/// With the gain of leaky_relu of slope `a`. Throws if the tensor has less than 2 dims.
TESSERA_API ShardedTensor kaiming_uniform_(ShardedTensor tensor, double a = 0, FanMode mode = FanMode::fan_in,
                                           std::optional<at::Generator> generator = std::nullopt);
TESSERA_API ShardedTensor constant_(ShardedTensor tensor, const at::Scalar& value);

}  // namespace init

}  // namespace tessera::sharded
