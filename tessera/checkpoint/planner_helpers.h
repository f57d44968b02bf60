#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

/// What torch.distributed.checkpoint asks of a tensor and plans with, under its names: for those who store tensors in a way
/// of their own. `save` and `load` (checkpoint.h) need nothing of it.
///
/// Tensors are DTensors, ShardedTensors or plain ones, which a rank has in full. Nothing here is collective.
namespace tessera::checkpoint {

/// A box of a global tensor.
struct TESSERA_API ChunkStorageMetadata {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  bool operator==(const ChunkStorageMetadata&) const = default;
};

/// The chunk of a tensor that begins there.
struct TESSERA_API MetadataIndex {
  std::string fqn;
  std::vector<int64_t> offset;
  bool operator==(const MetadataIndex&) const = default;
};

/// A chunk to be stored.
struct TESSERA_API WriteItem {
  MetadataIndex index;
  ChunkStorageMetadata chunk;
  std::vector<int64_t> size;  // of the global tensor
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool is_shard = false;  // false for a plain tensor
};

/// A box that a stored and a wanted chunk share: its offsets in either, and its sizes.
struct TESSERA_API ReadItem {
  MetadataIndex dest_index;
  std::vector<int64_t> dest_offsets;
  MetadataIndex storage_index;
  std::vector<int64_t> storage_offsets;
  std::vector<int64_t> lengths;
  bool operator==(const ReadItem&) const = default;
};

/// The chunks that this rank has: one of a DTensor, but for strided shards; as many of a ShardedTensor as it has local shards;
/// none without elements. Throws for partial values.
TESSERA_API std::vector<ChunkStorageMetadata> create_chunk_list(const at::Tensor& tensor);

TESSERA_API std::vector<WriteItem> create_write_items(const std::string& fqn, const at::Tensor& tensor);

/// The elements of the chunk that begins at `index.offset`: they share memory with the tensor. Throws if this rank has
/// none there.
TESSERA_API at::Tensor get_tensor_shard(const at::Tensor& tensor, const MetadataIndex& index);

/// What has to be read of the stored chunks to fill the wanted ones.
TESSERA_API std::vector<ReadItem> create_read_items(const std::string& fqn,
                                                    c10::ArrayRef<ChunkStorageMetadata> stored,
                                                    c10::ArrayRef<ChunkStorageMetadata> wanted);

}  // namespace tessera::checkpoint
