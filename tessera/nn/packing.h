#pragma once

#include <tessera/placement/chunk.h>

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Where the shards of several tensors lie in one message for each rank: rank r's message has, one after the
/// other, its shards of all tensors, of any dtypes. All messages have the same size, that of the largest.
class Packing {
 public:
  /// A dense tensor, seen as [outer, size, inner] in the order of its memory: `size` is what the ranks share.
  struct Item {
    int64_t outer = 1, size = 0, inner = 1;
    at::ScalarType dtype = at::kFloat;
  };

  Packing(std::vector<Item> items, int64_t ranks);

  int64_t ranks() const { return ranks_; }
  /// The size of each message.
  int64_t bytes() const { return bytes_; }
  /// The part of the item that is rank `rank`'s.
  Range range(size_t item, int64_t rank) const;
  /// Where it lies in that rank's message, as a flat tensor of the item's dtype.
  at::Tensor shard(const at::Tensor& message, size_t item, int64_t rank) const;

  /// Copy the shards of all ranks between a dense tensor and the messages, which lie one after the other in
  /// `messages`, bytes. Packing casts to the item's dtype.
  void pack(const at::Tensor& messages, size_t item, const at::Tensor& tensor) const;
  void unpack(const at::Tensor& messages, size_t item, const at::Tensor& tensor) const;

 private:
  int64_t offset(size_t item, int64_t rank) const { return offsets_[item * ranks_ + rank]; }

  std::vector<Item> items_;
  int64_t ranks_;
  std::vector<int64_t> offsets_;  // in bytes: of each item, in the message of each rank
  int64_t bytes_ = 0;
};

}  // namespace tessera
