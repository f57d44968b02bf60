#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>

#include <vector>

#include <ATen/core/Tensor.h>

/// Rows that go from rank to rank, as many as the data say: what layers of experts are made of. Of plain tensors,
/// which are what each rank has by itself; `local_map` gives them to a function of distributed ones.
namespace tessera {

/// The rows that the ranks along a mesh dim send to this one, one after the other in their order. Rank r is sent
/// `input_split_sizes[r]` rows of `input`, from the first on, and sends `output_split_sizes[r]`. Empty sizes: as
/// many rows to each, and from each. Collective and differentiable: its gradient is the exchange back, so that
/// backward must reach it on every rank or on none.
TESSERA_API at::Tensor all_to_all_single(const at::Tensor& input, std::vector<int64_t> output_split_sizes,
                                         std::vector<int64_t> input_split_sizes, const DeviceMesh& mesh,
                                         const MeshDim& dim = 0);

/// What the ranks along a mesh dim say to this one, of what each says to each: the output sizes of an
/// all_to_all_single that has these input sizes. Collective.
TESSERA_API std::vector<int64_t> exchange_sizes(const std::vector<int64_t>& sizes, const DeviceMesh& mesh,
                                                const MeshDim& dim = 0);

}  // namespace tessera
