#pragma once

#include <tessera/placement/spec.h>

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

/// What operators have to know of all data before each rank can count its own. All are collective.
namespace tessera::kernels {

/// In place, element by element: the largest value among the ranks along some mesh dims.
void max_over_ranks(const at::Tensor& values, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims);

/// The least and the greatest value of each column, one after the other, among the rows of all ranks along
/// the mesh dims that shard the tensor; rows of NaN make them infinite. `columns`: the rows of this rank.
std::vector<double> column_bounds(const at::Tensor& columns, const Spec& spec);

/// One more than the largest of all elements of a vector, at most 0 if it is empty. Throws on all ranks if an
/// element is negative. `local`: the elements of this rank.
int64_t count_bins(const at::Tensor& local, const Spec& spec);

}  // namespace tessera::kernels
