#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/extremes.h>

#include <limits>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

void max_over_ranks(const at::Tensor& values, const DeviceMesh& mesh, const std::vector<int64_t>& mesh_dims) {
  comm::all_reduce(values, c10d::ReduceOp::MAX, group_of(mesh, mesh_dims)).wait();
}

std::vector<double> column_bounds(const at::Tensor& columns, const Spec& spec) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor found = at::full({2, columns.size(1)}, -kInfinity, columns.options());
  if (columns.size(0) > 0) found = at::stack({at::amin(columns, 0).neg_(), at::amax(columns, 0)});
  // Ranks have to agree on NaN too, which a maximum might drop.
  found.nan_to_num_(kInfinity, kInfinity, -kInfinity);
  max_over_ranks(found, spec.mesh(), mesh_dims_of(spec));
  const at::Tensor known = found.to(at::kCPU, at::kDouble);
  std::vector<double> bounds;
  for (const int64_t i : c10::irange(known.size(1))) {
    bounds.push_back(-known[0][i].item<double>());
    bounds.push_back(known[1][i].item<double>());
  }
  return bounds;
}

int64_t count_bins(const at::Tensor& local, const Spec& spec) {
  // The least too, so that all find a negative one, not only its rank.
  const at::Tensor bounds =
      at::full({2}, std::numeric_limits<int64_t>::min(), local.options().dtype(at::kLong));
  if (local.numel() > 0)
    bounds.copy_(at::stack({local.max().to(at::kLong), local.min().to(at::kLong).neg()}));
  max_over_ranks(bounds, spec.mesh(), mesh_dims_of(spec));
  const auto below_zero = bounds[1].item<int64_t>();
  TESSERA_CHECK(below_zero <= 0, "bincount: expected values that are not negative, got ", -below_zero, ".");
  return bounds[0].item<int64_t>() + 1;
}

}  // namespace tessera::kernels
