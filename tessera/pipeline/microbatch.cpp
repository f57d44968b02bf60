#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/pipeline/microbatch.h>

#include <algorithm>
#include <optional>

namespace tessera {

namespace {

struct Rows {
  int64_t start, size;
};

/// Part `index` of `count`, as torch.tensor_split cuts.
Rows part_of(int64_t rows, int64_t count, int64_t index) {
  const int64_t size = rows / count, larger = rows % count;
  return {index * size + std::min(index, larger), size + (index < larger ? 1 : 0)};
}

/// The mesh dims that shard dim 0; none if it is sharded in a way that cannot be split shard by shard.
std::vector<int64_t> dims_that_shard_rows(const Spec& spec) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < spec.placements().size(); ++i) {
    const Placement& placement = spec.placements()[i];
    if (placement.is_shard(0)) dims.push_back(static_cast<int64_t>(i));
    if (placement.is_strided_shard()) return {};
  }
  return spec.order().empty() ? dims : std::vector<int64_t>{};
}

bool contains(const std::vector<int64_t>& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// The shape of micro-batch `index` if each rank takes a part of its own shard; none if these parts are no shards of a
/// tensor, or all empty. The same on every rank.
std::optional<c10::DimVector> shape_of_parts(const Spec& spec, const std::vector<int64_t>& dims,
                                             int64_t count, int64_t index) {
  const auto coordinates = spec.mesh().coordinates();
  auto part_at = [&](const c10::DimVector& coordinate) {
    return part_of(spec.local_shape(coordinate)[0], count, index).size;
  };
  c10::DimVector shape(spec.shape());
  shape[0] = 0;
  for (const auto& coordinate : coordinates) {
    bool counts = true;  // replicas count once
    for (size_t i = 0; i < coordinate.size(); ++i)
      counts = counts && (coordinate[i] == 0 || contains(dims, static_cast<int64_t>(i)));
    if (counts) shape[0] += part_at(coordinate);
  }
  if (shape[0] == 0) return std::nullopt;
  const Spec part(spec.mesh(), spec.placements(), shape, std::nullopt, spec.dtype());
  for (const auto& coordinate : coordinates) {
    if (part.local_shape(coordinate)[0] != part_at(coordinate)) return std::nullopt;
  }
  return shape;
}

/// The shapes of all micro-batches of a batch that is split shard by shard; empty if it is not.
std::vector<c10::DimVector> shapes_of_parts(const at::Tensor& batch, int64_t count) {
  if (!DTensor::is_dtensor(batch)) return {};
  const Spec spec = DTensor(batch).spec();
  const auto dims = dims_that_shard_rows(spec);
  if (dims.empty() || !spec.mesh().is_member()) return {};
  std::vector<c10::DimVector> shapes;
  for (int64_t i = 0; i < count; ++i) {
    const auto shape = shape_of_parts(spec, dims, count, i);
    if (!shape) return {};
    shapes.push_back(*shape);
  }
  return shapes;
}

}  // namespace

std::vector<at::Tensor> split_microbatches(const at::Tensor& batch, int64_t count) {
  TESSERA_CHECK_VALUE(batch.defined() && batch.dim() > 0,
                      "A batch that is split into micro-batches needs a first dim, the samples.");
  TESSERA_CHECK_VALUE(batch.size(0) >= count, "A batch of ", batch.size(0), " cannot be split into ", count,
                      " micro-batches; its shape is ", batch.sizes(), ".");
  std::vector<at::Tensor> parts;
  const auto shapes = shapes_of_parts(batch, count);
  if (shapes.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      const auto [start, size] = part_of(batch.size(0), count, i);
      parts.push_back(batch.narrow(0, start, size));
    }
    return parts;
  }
  const DTensor distributed(batch);
  const at::Tensor local = distributed.to_local();
  for (int64_t i = 0; i < count; ++i) {
    const auto [start, size] = part_of(local.size(0), count, i);
    DTensor::FromLocalOptions options;
    options.shape = {shapes[i].begin(), shapes[i].end()};
    parts.push_back(DTensor::from_local(local.narrow(0, start, size), distributed.device_mesh(),
                                        distributed.placements(), options));
  }
  return parts;
}

std::string split_rule(const at::Tensor& batch, int64_t count) {
  std::string text = c10::str(batch.size(0), " rows");
  if (shapes_of_parts(batch, count).empty()) return text;
  const DTensor distributed(batch);
  const DeviceMesh& mesh = distributed.device_mesh();
  for (const int64_t dim : dims_that_shard_rows(distributed.spec())) {
    const auto names = mesh.mesh_dim_names();
    text +=
        c10::str(", sharded over ", names.empty() ? std::to_string(dim) : names[dim], "=", mesh.size(dim));
  }
  return text;
}

}  // namespace tessera
