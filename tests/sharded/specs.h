#pragma once

#include <tessera/comm/run.h>
#include <tessera/sharded/sharded_tensor.h>
#include <tessera/sharded/spec.h>

#include <functional>
#include <random>
#include <vector>

#include <ATen/ATen.h>

/// What the tests of sharded tensors have in common.
namespace tessera::testing {

using sharded::ChunkShardingSpec;
using sharded::EnumerableShardingSpec;
using sharded::RemoteDevice;
using sharded::ShardMetadata;

/// Chunks of a dim on the CPUs of these ranks.
ChunkShardingSpec chunks(int64_t dim, const std::vector<int64_t>& ranks);
/// A 2-d tensor split into 2 x 2 unequal boxes, dealt to the ranks in turn.
EnumerableShardingSpec grid_spec(std::vector<int64_t> size, int64_t ranks);
/// Of a tensor of size {7, 5}: boxes that no grid gives, on four ranks, one of which has none.
EnumerableShardingSpec irregular_spec();
/// A tensor split into so many boxes at random, dealt to ranks at random.
EnumerableShardingSpec random_spec(std::mt19937& random, const std::vector<int64_t>& size, size_t count,
                                   int64_t ranks);

/// The same numbers on every rank, all different.
at::Tensor global_tensor(at::IntArrayRef size);
/// A contiguous copy of a box of it.
at::Tensor part(const at::Tensor& global, const std::vector<int64_t>& offsets,
                const std::vector<int64_t>& sizes);

/// What this rank holds of a tensor is what it should be.
void expect_parts(const sharded::ShardedTensor& tensor, const at::Tensor& global);

/// Ranks that are threads, with one thread in each operator.
void on_ranks(int64_t count, const std::function<void(int64_t rank)>& body);

}  // namespace tessera::testing
