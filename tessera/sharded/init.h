#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <optional>
#include <vector>

namespace tessera::sharded {

struct Options {
  std::optional<at::ScalarType> dtype = {};  // by default libtorch's default
  at::Layout layout = at::kStrided;
  bool requires_grad = false;
  bool pin_memory = false;
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
  Ranks process_group = {};
  /// Let the ranks know each other's shards: see ShardedTensor::remote_shards. Collective.
  bool init_rrefs = false;
};

/// New tensors, of which each rank allocates only its shards. Throw on other layouts and memory formats than
/// the defaults, and on placements that are not in the group.
TESSERA_API ShardedTensor empty(const ShardingSpec& spec, at::IntArrayRef size, const Options& options = {});
TESSERA_API ShardedTensor ones(const ShardingSpec& spec, at::IntArrayRef size, const Options& options = {});
TESSERA_API ShardedTensor zeros(const ShardingSpec& spec, at::IntArrayRef size, const Options& options = {});
TESSERA_API ShardedTensor full(const ShardingSpec& spec, at::IntArrayRef size, const at::Scalar& value,
                               const Options& options = {});
/// Uniform in [0, 1), and normal: numbers that do not depend on the spec, but on the seed and the call
/// (docs/random.md).
TESSERA_API ShardedTensor rand(const ShardingSpec& spec, at::IntArrayRef size, const Options& options = {});
TESSERA_API ShardedTensor randn(const ShardingSpec& spec, at::IntArrayRef size, const Options& options = {});

struct InitOptions {
  Ranks process_group = {};
  bool init_rrefs = false;
};

/// Stands for the size of a dim that is not known.
inline constexpr int64_t kUnknownSize = -1;

/// The tensor of which each rank holds these shards. Collective: the ranks exchange their metadata,
/// and whatever does not fit (overlaps, gaps, other dtypes, a wrong rank, ...) on whichever rank is an error
/// on every one. The tensors must be contiguous, and are shared, not copied.
///
/// If a size of `global_size` is unknown, each rank must have exactly one shard, and these lie one after the
/// other along dim 0, in the order of their ranks: sizes and offsets are found from the tensors.
TESSERA_API ShardedTensor init_from_local_shards(std::vector<LocalShard> local_shards,
                                                 at::IntArrayRef global_size,
                                                 const InitOptions& options = {});

/// The tensor sharded by `spec` of which this rank's only shard is `local_tensor`. Nothing is compared
/// between ranks. On ranks for which the spec has no shard the tensor is ignored.
TESSERA_API ShardedTensor init_from_local_tensor(const at::Tensor& local_tensor, const ShardingSpec& spec,
                                                 at::IntArrayRef global_size,
                                                 const InitOptions& options = {});

/// The tensor that `metadata` describes, of which this rank holds these shards, given in any order. Nothing
/// is compared between ranks. Without `spec` it is inferred.
TESSERA_API ShardedTensor init_from_local_shards_and_global_metadata(std::vector<LocalShard> local_shards,
                                                                     ShardedTensorMetadata metadata,
                                                                     const InitOptions& options = {},
                                                                     ShardingSpecPtr spec = nullptr);

}  // namespace tessera::sharded
