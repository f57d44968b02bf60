#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// A batch in `count` parts along dim 0, as torch.tensor_split splits it. Where a distributed batch is sharded along dim 0,
/// every rank splits its own shard, so that nothing is moved: micro-batch i is part i of all shards. (Unless those would
/// be no shards as torch.chunk makes them, or all empty; then the rows are split as those of a plain tensor.)
/// Throws if there are fewer rows than parts.
TESSERA_API std::vector<at::Tensor> split_microbatches(const at::Tensor& batch, int64_t count);

/// Says which rows are in which micro-batch, as far as `split_microbatches` decides that. Inputs and targets belong
/// together if it is the same for both.
///   "8 rows"     "8 rows, sharded over dp=2"
TESSERA_API std::string split_rule(const at::Tensor& batch, int64_t count);

}  // namespace tessera
