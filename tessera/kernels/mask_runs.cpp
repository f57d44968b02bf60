#include <tessera/comm/collectives.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/mask_runs.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

MaskRuns::Runs MaskRuns::Runs::within(const Range& range) const {
  const at::Tensor from = at::clamp(starts, range.offset, range.end());
  return {from, at::sub(at::clamp(at::add(starts, counts), range.offset, range.end()), from)};
}

int64_t MaskRuns::Runs::total() const { return at::sum(counts).item<int64_t>(); }

at::Tensor MaskRuns::Runs::indices() const {
  const at::Tensor before = at::sub(at::cumsum(counts, 0), counts);
  const at::Tensor shift = at::repeat_interleave(at::sub(starts, before), counts);
  return at::add(shift, at::arange(shift.numel()));
}

MaskRuns::MaskRuns(const at::Tensor& marks, const Spec& spec, const ShardOrder& order)
    : spec_(spec), order_(order), device_(marks.device()), mesh_dims_(mesh_dims_of(spec)) {
  for (const int64_t m : mesh_dims_) last_ = std::max(last_, spec.placement(m).dim());
  for (const auto& coordinate : spec.mesh().coordinates_along(mesh_dims_of(spec, last_)))
    offsets_.push_back(spec.global_offset(coordinate)[last_]);
  std::sort(offsets_.begin(), offsets_.end());
  offsets_.erase(std::unique(offsets_.begin(), offsets_.end()), offsets_.end());

  auto sizes = spec.shape().slice(0, last_).vec();
  sizes.push_back(static_cast<int64_t>(offsets_.size()));
  counts_ = at::zeros(sizes, marks.options().dtype(at::kLong));
  const auto here = *spec.mesh().get_coordinate();
  if (marks.numel() > 0) part(counts_, here).copy_(marks.flatten(last_).ne(0).sum({last_}));
  comm::all_reduce(counts_, c10d::ReduceOp::SUM, group_of(spec.mesh(), mesh_dims_)).wait();
  counts_ = counts_.cpu();
  const at::Tensor through = at::cumsum(counts_.flatten(), 0);
  starts_ = at::sub(through.view(counts_.sizes()), counts_);
  count_ = through.numel() > 0 ? through[-1].item<int64_t>() : 0;
}

at::Tensor MaskRuns::part(const at::Tensor& table, c10::IntArrayRef coordinate) const {
  const auto offset = spec_.global_offset(coordinate), shape = spec_.local_shape(coordinate);
  at::Tensor result = table;
  for (const int64_t dim : c10::irange(last_)) result = result.narrow(dim, offset[dim], shape[dim]);
  return result.select(last_, std::find(offsets_.begin(), offsets_.end(), offset[last_]) - offsets_.begin());
}

MaskRuns::Runs MaskRuns::runs(c10::IntArrayRef coordinate) const {
  return {part(starts_, coordinate).flatten(), part(counts_, coordinate).flatten()};
}

at::Tensor MaskRuns::indices() const { return runs(*spec_.mesh().get_coordinate()).indices().to(device_); }

MaskRuns::Routes MaskRuns::routes(int64_t size) const {
  const DeviceMesh& mesh = spec_.mesh();
  Placements placements(mesh.ndim(), Replicate());
  for (const int64_t m : mesh_dims_) placements[m] = Shard(0);
  const Spec rows(mesh, placements, {size}, std::nullopt, at::kLong, order_);
  const auto here = *mesh.get_coordinate();
  const Runs own = runs(here);
  Routes result;
  result.local = rows.local_shape()[0];
  result.group = group_of(mesh, mesh_dims_);
  const Range local_rows{rows.global_offset()[0], result.local};
  std::vector<int64_t> offsets;
  for (const auto& coordinate : mesh.coordinates_along(mesh_dims_)) {
    const Range there{rows.global_offset(coordinate)[0], rows.local_shape(coordinate)[0]};
    offsets.push_back(there.offset);
    result.to.push_back(own.within(there).total());
    result.from.push_back(
        at::sub(runs(coordinate).within(local_rows).indices(), local_rows.offset).to(device_));
  }
  result.order.resize(offsets.size());
  std::iota(result.order.begin(), result.order.end(), 0);
  std::stable_sort(result.order.begin(), result.order.end(),
                   [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  return result;
}

at::Tensor MaskRuns::collect(const at::Tensor& values, int64_t size) const {
  const Routes routes = this->routes(size);
  auto shape = values.sizes().vec();
  comm::Tensors sent(routes.to.size()), received;
  int64_t done = 0;
  for (const size_t i : routes.order) {
    sent[i] = values.narrow(0, done, routes.to[i]).contiguous();
    done += routes.to[i];
  }
  for (const at::Tensor& rows : routes.from) {
    shape[0] = rows.numel();
    received.push_back(new_memory(shape, values.options()));
  }
  comm::all_to_all(received, sent, routes.group).wait();
  shape[0] = routes.local;
  const at::Tensor result = at::zeros(shape, values.options());
  for (const size_t i : c10::irange(received.size())) result.index_copy_(0, routes.from[i], received[i]);
  return result;
}

at::Tensor MaskRuns::spread(const at::Tensor& rows, int64_t size) const {
  const Routes routes = this->routes(size);
  auto shape = rows.sizes().vec();
  comm::Tensors sent, received(routes.to.size()), values;
  for (const at::Tensor& wanted : routes.from) sent.push_back(at::index_select(rows, 0, wanted));
  for (const size_t i : routes.order) {
    shape[0] = routes.to[i];
    received[i] = new_memory(shape, rows.options());
    values.push_back(received[i]);
  }
  comm::all_to_all(received, sent, routes.group).wait();
  return at::cat(values);
}

}  // namespace tessera::kernels
