#pragma once

#include <tessera/export.h>
#include <tessera/sharded/metadata.h>
#include <tessera/sharded/ranks.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace at {
class Tensor;
}

namespace tessera::sharded {

class ShardedTensor;

/// How tensors are split into shards, and which rank and device has each. Derive from it to define your own;
/// all that works on any tiling (init, gather, reshard, shard_parameter, ...) works on yours.
class TESSERA_API ShardingSpec {
 public:
  virtual ~ShardingSpec();

  /// All shards of a tensor of that size. Throws if the spec does not fit the size.
  virtual ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                               const TensorProperties& properties) const = 0;
  /// A text that is equal exactly for equal specs of one class.
  virtual std::string str() const = 0;
  virtual std::shared_ptr<const ShardingSpec> clone() const = 0;

  /// Shards the tensor of the `src_rank`-th rank of the group and scatters the shards. Collective. The
  /// other ranks give tensors of the same size and dtype, whose values do not count.
  virtual ShardedTensor shard(const at::Tensor& tensor, int64_t src_rank = 0,
                              const Ranks& process_group = {}) const;

  /// The same class and the same text.
  friend TESSERA_API bool operator==(const ShardingSpec& a, const ShardingSpec& b);
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const ShardingSpec& spec);
};

using ShardingSpecPtr = std::shared_ptr<const ShardingSpec>;

/// Splits one dim (negative counts from the end) into as many chunks as there are placements, as torch.chunk
/// does: 10 rows on 4 ranks are 3, 3, 3 and 1; 2 rows are 1, 1, 0 and 0. A rank may have several placements.
///   ChunkShardingSpec(0, {"rank:0/cpu", "rank:1/cpu"})
class TESSERA_API ChunkShardingSpec final : public ShardingSpec {
 public:
  /// Throws without placements.
  ChunkShardingSpec(int64_t dim, std::vector<RemoteDevice> placements);

  int64_t dim() const { return dim_; }
  const std::vector<RemoteDevice>& placements() const { return placements_; }

  ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                       const TensorProperties& properties) const override;
  /// "chunk 0: rank:0/cpu, rank:1/cpu"
  std::string str() const override;
  ShardingSpecPtr clone() const override;

 private:
  int64_t dim_;
  std::vector<RemoteDevice> placements_;
};

/// Names every shard.
class TESSERA_API EnumerableShardingSpec final : public ShardingSpec {
 public:
  /// Throws if there are none, or they overlap, or differ in ndim.
  explicit EnumerableShardingSpec(std::vector<ShardMetadata> shards);

  const std::vector<ShardMetadata>& shards() const { return shards_; }

  ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                       const TensorProperties& properties) const override;
  /// "enumerable: [0, 0]+[5, 4] rank:0/cpu, [5, 0]+[5, 4] rank:1/cpu"
  std::string str() const override;
  ShardingSpecPtr clone() const override;

 private:
  std::vector<ShardMetadata> shards_;
};

/// The two specs above from their text; null if it is of another spec.
TESSERA_API ShardingSpecPtr parse_sharding_spec(std::string_view text);

/// The spec that gives these shards: a ChunkShardingSpec if there is one, else an EnumerableShardingSpec.
TESSERA_API ShardingSpecPtr infer_sharding_spec(const std::vector<ShardMetadata>& shards);

/// The device of something that is not sharded. Derive from it to define your own.
class TESSERA_API PlacementSpec {
 public:
  virtual ~PlacementSpec();
};

/// On one device.
struct TESSERA_API DevicePlacementSpec final : PlacementSpec {
  explicit DevicePlacementSpec(RemoteDevice on) : device(std::move(on)) {}
  RemoteDevice device;
  bool operator==(const DevicePlacementSpec& other) const { return device == other.device; }
};

}  // namespace tessera::sharded
