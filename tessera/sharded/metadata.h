#pragma once

#include <tessera/export.h>
#include <tessera/sharded/remote_device.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/DefaultDtype.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

namespace at {
class Tensor;
}

/// What is known of a sharded tensor without its data: values that can be compared, hashed, printed and
/// written as bytes. `parse(x.str())` and `from_bytes(x.to_bytes())` are x again.
namespace tessera::sharded {

/// A box of the global tensor, and the rank and device that have it.
struct TESSERA_API ShardMetadata {
  std::vector<int64_t> shard_offsets;
  std::vector<int64_t> shard_sizes;
  std::optional<RemoteDevice> placement;

  ShardMetadata() = default;
  /// Throws unless there are as many offsets as sizes, none of them negative.
  ShardMetadata(std::vector<int64_t> shard_offsets, std::vector<int64_t> shard_sizes,
                std::optional<RemoteDevice> placement = std::nullopt);

  int64_t dim() const { return static_cast<int64_t>(shard_offsets.size()); }
  /// How many elements it holds. Throws if 64 bits cannot count them.
  int64_t numel() const;

  bool operator==(const ShardMetadata&) const = default;
  size_t hash() const;
  /// "[0, 4]+[2, 4] rank:1/cpu": offsets, sizes, and the placement if there is one.
  std::string str() const;
  static ShardMetadata parse(std::string_view text);
  std::string to_bytes() const;
  static ShardMetadata from_bytes(std::string_view bytes);
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const ShardMetadata& shard);
};

/// What all shards have in common.
struct TESSERA_API TensorProperties {
  c10::ScalarType dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  c10::Layout layout = c10::kStrided;
  bool requires_grad = false;
  c10::MemoryFormat memory_format = c10::MemoryFormat::Contiguous;
  bool pin_memory = false;

  static TensorProperties of(const at::Tensor& tensor);

  bool operator==(const TensorProperties&) const = default;
  size_t hash() const;
  /// "f32", "f32 requires_grad pinned"; layout and memory format where they are not the default.
  std::string str() const;
  static TensorProperties parse(std::string_view text);
  std::string to_bytes() const;
  static TensorProperties from_bytes(std::string_view bytes);
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const TensorProperties& properties);
};

/// All shards of a tensor, on whatever rank.
struct TESSERA_API ShardedTensorMetadata {
  std::vector<ShardMetadata> shards_metadata;
  std::vector<int64_t> size;
  TensorProperties tensor_properties;

  /// Throws if 64 bits cannot count them, or a size is negative.
  int64_t numel() const;

  bool operator==(const ShardedTensorMetadata&) const = default;
  size_t hash() const;
  /// "[10, 4] f32: [0, 0]+[5, 4] rank:0/cpu, [5, 0]+[5, 4] rank:1/cpu"
  std::string str() const;
  static ShardedTensorMetadata parse(std::string_view text);
  std::string to_bytes() const;
  static ShardedTensorMetadata from_bytes(std::string_view bytes);
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const ShardedTensorMetadata& metadata);
};

}  // namespace tessera::sharded

template <>
struct std::hash<tessera::sharded::ShardMetadata> {
  size_t operator()(const tessera::sharded::ShardMetadata& value) const { return value.hash(); }
};
template <>
struct std::hash<tessera::sharded::TensorProperties> {
  size_t operator()(const tessera::sharded::TensorProperties& value) const { return value.hash(); }
};
template <>
struct std::hash<tessera::sharded::ShardedTensorMetadata> {
  size_t operator()(const tessera::sharded::ShardedTensorMetadata& value) const { return value.hash(); }
};
