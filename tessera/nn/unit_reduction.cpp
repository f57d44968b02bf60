// How the gradients of a unit are reduced: all of them in one reduce-scatter, for each dtype that they have.

#include <tessera/comm/observer.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/gathered_parameters.h>
#include <tessera/nn/shard_unit.h>
#include <tessera/nn/unit_schedule.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

using torch::autograd::variable_list;

/// Reductions that are under way, and the memory they work on.
struct UnderWay {
  std::vector<comm::Pending> collectives;
  at::Tensor input;

  void wait() {
    for (comm::Pending& each : collectives) each.wait();
    collectives.clear();
    input.reset();
  }
};

DTensor as_parameter(const DTensor& gradient, const Spec& parameter) {
  return gradient.redistribute(parameter.placements(),
                               {.order = {parameter.order().begin(), parameter.order().end()}});
}

/// In memory as the spec's dense local tensors are.
at::Tensor dense(const at::Tensor& local, const Spec& spec) {
  if (local.strides() == spec.local_strides()) return local;
  return at::empty_strided(spec.local_shape(), spec.local_strides(), local.options()).copy_(local);
}

}  // namespace

/// A gradient that is reduced together with others.
struct ShardUnit::Part {
  size_t index;               // of the parameter
  at::Tensor local;           // this rank's, gathered, dense
  std::vector<int64_t> dims;  // of the parameter's mesh, along which the result is to be reduced too
  bool averages = false;
};

variable_list ShardUnit::reduced(variable_list gradients) {
  in_backward_.reset();
  if (reshard_after_backward_) reshard();
  schedule_->backward();
  variable_list results(gradients.size());
  for (const size_t i : c10::irange(gradients.size())) {
    at::Tensor& kept = unreduced_[i];
    if (!kept.defined()) continue;
    gradients[i] = gradients[i].defined() ? kept + gradients[i] : kept;
    kept.reset();
  }
  if (!syncs_gradients_) {
    for (at::Tensor& gradient : gradients) {
      if (gradient.defined()) gradient = gradient.to(reduce_dtype(gradient));
    }
    unreduced_ = std::move(gradients);
    return results;
  }
  std::map<at::ScalarType, std::vector<Part>> parts;
  for (const size_t i : c10::irange(gradients.size())) {
    const at::Tensor gradient = std::exchange(gradients[i], {});
    if (!gradient.defined()) continue;
    // A graph of the gradient is made of one operator for each.
    auto part = at::GradMode::is_enabled() ? std::nullopt : part_of(i, gradient);
    if (!part) {
      results[i] = reduced_alone(i, gradient);
      continue;
    }
    parts[reduce_dtype(gradient)].push_back(std::move(*part));
  }
  const at::NoGradGuard no_grad;
  for (auto& [dtype, list] : parts) reduce_together(std::move(list), dtype, results);
  return results;
}

at::ScalarType ShardUnit::reduce_dtype(const at::Tensor& gradient) const {
  const at::ScalarType own = gradient.scalar_type();
  return at::isFloatingType(own) ? options_.mp_policy.reduce_dtype.value_or(own) : own;
}

std::optional<ShardUnit::Part> ShardUnit::part_of(size_t index, const at::Tensor& gradient) const {
  const Layout& layout = layouts_[index];
  if (!layout.item) return std::nullopt;
  const ShardDims dims = dims_.on(layout.sharded.mesh());
  const DTensorImpl* impl = DTensorImpl::of(gradient);
  if (!impl || impl->spec().mesh() != layout.gathered.mesh()) {  // of a local batch
    at::Tensor local =
        impl ? DTensorImpl::of(as_parameter(DTensor(gradient), layout.inner))->local() : gradient;
    return Part{index, dense(local, layout.gathered), dims.replicate, /*averages=*/true};
  }
  Part part{index, {}, {}};
  const Spec& spec = impl->spec();
  if (spec.placement(dims.shard) != Partial() || spec.order() != layout.gathered.order()) return std::nullopt;
  for (const int64_t i : c10::irange(spec.mesh().ndim())) {
    if (i == dims.shard || spec.placement(i) == layout.gathered.placement(i)) continue;
    if (spec.placement(i) != Partial() || !layout.gathered.placement(i).is_replicate()) return std::nullopt;
    part.dims.push_back(i);
  }
  part.local = dense(impl->local(), layout.gathered);
  return part;
}

at::Tensor ShardUnit::reduced_alone(size_t index, const at::Tensor& gradient) const {
  const Layout& layout = layouts_[index];
  const DTensorImpl* impl = DTensorImpl::of(gradient);
  if (impl && impl->spec().mesh() == layout.gathered.mesh())
    return as_parameter(DTensor(gradient), layout.sharded).to(layout.sharded.dtype());
  TESSERA_CHECK(!at::GradMode::is_enabled(),
                "fully_shard: gradients of gradients need distributed batches; distribute the batch on ",
                dims_.mesh, ".");
  const at::Tensor local =
      impl ? DTensorImpl::of(as_parameter(DTensor(gradient), layout.inner))->local() : gradient;
  const at::Tensor result = local.to(layout.sharded.dtype(), /*non_blocking=*/false, /*copy=*/true);
  std::vector<MeshDim> all(dims_.replicate.begin(), dims_.replicate.end());
  all.emplace_back(dims_.shard);
  comm::all_reduce(result, c10d::ReduceOp::SUM, dims_.mesh.get_group(all)).wait();
  result.div_(divisor());
  return make_dtensor(result, layout.sharded);
}

void ShardUnit::reduce_together(std::vector<Part> parts, at::ScalarType dtype, variable_list& results) {
  schedule_->finish_reduction();
  const auto key = [&](const Part& part) {
    return std::pair(part.dims, part.dims.empty() ? "" : layouts_[part.index].sharded.mesh().str());
  };
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
  std::vector<Packing::Item> items;
  for (const Part& part : parts) {
    items.push_back(packing_->item(*layouts_[part.index].item));
    items.back().dtype = dtype;
  }
  const Packing packing(std::move(items), dims_.shards());
  const int64_t rank = dims_.mesh.get_local_rank(MeshDim(dims_.shard));
  const auto options = parts[0].local.options().dtype(at::kByte);
  const auto under_way = std::make_shared<UnderWay>();
  const comm::MemoryInFlight in_flight;
  under_way->input = new_memory({packing.ranks() * packing.bytes()}, options);
  for (const size_t i : c10::irange(parts.size())) {
    packing.pack(under_way->input, i, parts[i].local);
    parts[i].local.reset();
  }
  at::Tensor output = under_way->input;
  if (packing.ranks() > 1 && packing.bytes() > 0) {
    output = new_memory({packing.bytes()}, options);
    under_way->collectives.push_back(
        comm::reduce_scatter_from(output.view(dtype), under_way->input.view(dtype), c10d::ReduceOp::SUM,
                                  dims_.mesh.get_group(MeshDim(dims_.shard))));
  }
  for (size_t first = 0, end = 0; first < parts.size(); first = end) {
    while (end < parts.size() && key(parts[end]) == key(parts[first])) ++end;
    if (parts[first].dims.empty()) continue;
    under_way->wait();
    const at::Tensor begin = packing.shard(output, first, rank), last = packing.shard(output, end - 1, rank);
    const int64_t size = last.storage_offset() + last.numel() - begin.storage_offset();
    const std::vector<MeshDim> dims(parts[first].dims.begin(), parts[first].dims.end());
    under_way->collectives.push_back(
        comm::all_reduce(begin.as_strided({size}, {1}), c10d::ReduceOp::SUM,
                         layouts_[parts[first].index].sharded.mesh().get_group(dims)));
  }
  const bool waits = !options_.overlap;
  if (waits) under_way->wait();
  for (const size_t i : c10::irange(parts.size())) {
    const Spec& spec = layouts_[parts[i].index].sharded;
    const double divide_by = parts[i].averages ? divisor() : 1;
    const auto finish = [under_way, output, shard = packing.shard(output, i, rank), spec, divide_by] {
      under_way->wait();
      at::Tensor value = divide_by == 1 ? shard : shard.div_(divide_by);
      return value.to(spec.dtype()).as_strided(spec.local_shape(), spec.local_strides());
    };
    results[parts[i].index] = waits ? make_dtensor(finish(), spec)
                                    : make_dtensor(std::make_shared<PendingTensor>(std::nullopt, finish),
                                                   spec, output.options().dtype(spec.dtype()));
  }
  if (!waits) schedule_->set_reduction([under_way] { under_way->wait(); });
}

}  // namespace tessera
