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
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {

namespace {

using torch::autograd::variable_list;

/// A reduction that is under way, and the memory it works on.
struct UnderWay {
  std::optional<comm::Pending> scattered;
  /// What is to be reduced along other mesh dims after that, and starts to be.
  std::function<std::vector<comm::Pending>()> then;
  std::vector<comm::Pending> collectives;
  at::Tensor input;
  // Those that are reduced where they lie: while they are here, nobody takes them for their own and writes them.
  std::vector<at::Tensor> gradients;

  /// Frees what is not needed any more. What is left goes on with the results alone.
  void advance() {
    if (scattered) scattered->wait();
    scattered.reset();
    input.reset();
    gradients.clear();
    if (then) collectives = std::exchange(then, {})();
  }

  void wait() {
    advance();
    for (comm::Pending& each : std::exchange(collectives, {})) each.wait();
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
  at::Tensor gradient;        // undefined: this rank has none
  at::Tensor local;           // of this rank, gathered, dense; undefined: it has none
  std::vector<int64_t> dims;  // of the parameter's mesh, along which the result is to be reduced too
  bool averages = false;
  std::optional<size_t> item = {};  // of the message; none: it is reduced where it lies
  int64_t offset = 0;               // of its result then, in bytes
};

variable_list ShardUnit::reduced(variable_list gradients, bool local, const std::vector<bool>& trained) {
  in_backward_.reset();
  if (frees_after_backward()) reshard();
  schedule_->backward();
  for (const size_t i : c10::irange(gradients.size())) {
    at::Tensor& kept = unreduced_[i];
    if (!kept.defined()) continue;
    gradients[i] = gradients[i].defined() ? kept + gradients[i] : kept;
    kept.reset();
  }
  unreduced_local_.reset();
  if (syncs_gradients_) return reduced_now(std::move(gradients), local, trained);
  for (at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = gradient.to(reduce_dtype(gradient.scalar_type()));
  }
  unreduced_ = std::move(gradients);
  unreduced_local_ = local;
  return variable_list(unreduced_.size());
}

void ShardUnit::reduce_kept() {
  if (!syncs_gradients_ || !unreduced_local_) return;
  const bool local = *std::exchange(unreduced_local_, std::nullopt);
  const at::NoGradGuard no_grad;
  std::vector<bool> trained;
  for (const Parameter& each : parameters_) trained.push_back(each.tensor.requires_grad());
  const variable_list results =
      reduced_now(std::exchange(unreduced_, variable_list(parameters_.size())), local, trained);
  for (const size_t i : c10::irange(results.size())) {
    if (!results[i].defined() || !trained[i]) continue;
    (*torch::autograd::impl::grad_accumulator(parameters_[i].tensor))({results[i]});
  }
}

variable_list ShardUnit::reduced_now(variable_list gradients, bool local, const std::vector<bool>& trained) {
  variable_list results(gradients.size());
  std::map<at::ScalarType, std::vector<Part>> parts;
  for (const size_t i : c10::irange(gradients.size())) {
    const at::Tensor gradient = std::exchange(gradients[i], {});
    // A graph of the gradient is made of one operator for each.
    const bool alone = at::GradMode::is_enabled();
    // Which parameters a local batch uses is known to its rank alone: all of them take part.
    if (local && !alone ? !trained[i] : !gradient.defined()) continue;
    auto part = alone ? std::nullopt : part_of(i, gradient);
    if (!part) {
      results[i] = reduced_alone(i, gradient);
      continue;
    }
    parts[reduce_dtype(layouts_[i].gathered.dtype())].push_back(std::move(*part));
  }
  const at::NoGradGuard no_grad;
  for (auto& [dtype, list] : parts) reduce_together(std::move(list), dtype, local, results);
  return results;
}

at::ScalarType ShardUnit::reduce_dtype(at::ScalarType own) const {
  return at::isFloatingType(own) ? options_.mp_policy.reduce_dtype.value_or(own) : own;
}

std::optional<ShardUnit::Part> ShardUnit::part_of(size_t index, const at::Tensor& gradient) const {
  const Layout& layout = layouts_[index];
  const ShardDims dims = dims_.on(layout.sharded.mesh());
  const DTensorImpl* impl = gradient.defined() ? DTensorImpl::of(gradient) : nullptr;
  if (!impl || impl->spec().mesh() != layout.gathered.mesh()) {  // of a local batch
    Part part{index, gradient, {}, dims.replicate, /*averages=*/true};
    if (!gradient.defined()) return part;
    const at::Tensor local =
        impl ? DTensorImpl::of(as_parameter(DTensor(gradient), layout.inner))->local() : gradient;
    part.local = dense(local, layout.gathered);
    return part;
  }
  Part part{index, gradient, {}, {}};
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
  TESSERA_CHECK(impl && impl->spec().mesh() == layout.gathered.mesh(),
                "fully_shard: gradients of gradients need distributed batches; distribute the batch on ",
                dims_.mesh, ".");
  return as_parameter(DTensor(gradient), layout.sharded).to(layout.sharded.dtype());
}

/// Where the gradient lies in the message: each rank gets all of one that is not sharded.
Packing::Item ShardUnit::packed(const Part& part, at::ScalarType dtype) const {
  const Layout& layout = layouts_[part.index];
  Packing::Item item = layout.item.value_or(Packing::Item{1, dims_.shards(), 1});
  item.dtype = dtype;
  return item;
}

bool ShardUnit::is_reduced_directly(const Part& part, at::ScalarType dtype) const {
  const Layout& layout = layouts_[part.index];
  return layout.is_direct() && part.dims.empty() && layout.gathered.dtype() == dtype;
}

void ShardUnit::reduce_together(std::vector<Part> parts, at::ScalarType dtype, bool local,
                                variable_list& results) {
  schedule_->advance_reduction();
  const auto key = [&](const Part& part) {
    return std::pair(part.dims, part.dims.empty() ? "" : layouts_[part.index].sharded.mesh().str());
  };
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
  std::vector<Packing::Item> items;
  int64_t direct_bytes = 0;  // of the results of those that are not packed
  for (Part& part : parts) {
    if (is_reduced_directly(part, dtype)) {
      part.offset = direct_bytes;
      direct_bytes = aligned(direct_bytes + layouts_[part.index].bytes / dims_.shards());
    } else {
      part.item = items.size();
      items.push_back(packed(part, dtype));
    }
  }
  // Of local batches each rank also learns how many ranks have each gradient.
  const auto count = static_cast<int64_t>(parts.size());
  if (local) items.push_back({1, dims_.shards(), count, dtype});
  const size_t last_item = items.size() - 1;
  const Packing packing(std::move(items), dims_.shards());
  const int64_t rank = dims_.mesh.get_local_rank(MeshDim(dims_.shard));
  const auto options =
      DTensorImpl::of(parameters_[parts[0].index].tensor)->local().options().dtype(at::kByte);
  const auto under_way = std::make_shared<UnderWay>();
  const comm::MemoryInFlight in_flight;
  under_way->input = new_memory({packing.ranks() * packing.bytes()}, options);
  const at::Tensor output =
      packing.ranks() > 1 ? new_memory({direct_bytes + packing.bytes()}, options) : under_way->input;
  const at::Tensor message = output.narrow(0, direct_bytes, packing.bytes());
  const at::Tensor present = local ? at::ones({count}, options.dtype(dtype)) : at::Tensor();
  comm::Tensors inputs, outputs;
  std::vector<size_t> missing;  // here
  for (const size_t i : c10::irange(parts.size())) {
    at::Tensor value = std::exchange(parts[i].local, {});
    const Layout& layout = layouts_[parts[i].index];
    if (!value.defined()) {
      missing.push_back(i);
      present[static_cast<int64_t>(i)].zero_();
      value = at::zeros(layout.gathered.local_shape(), options.dtype(dtype));
    }
    if (parts[i].item) {
      packing.pack(under_way->input, *parts[i].item,
                   layout.item ? value : value.expand({packing.ranks()}).contiguous());
      continue;
    }
    value = value.to(dtype);
    const auto size = static_cast<int64_t>(value.element_size());
    inputs.push_back(view_of(value, value.storage_offset() * size, {value.numel()}, {1}, dtype));
    outputs.push_back(view_of(output, parts[i].offset, {value.numel() / packing.ranks()}, {1}, dtype));
    under_way->gradients.push_back(std::exchange(parts[i].gradient, {}));
  }
  if (local) packing.pack(under_way->input, last_item, present.expand({packing.ranks(), count}).contiguous());
  if (packing.ranks() > 1 && packing.bytes() > 0) {
    inputs.push_back(under_way->input.view(dtype));
    outputs.push_back(message.view(dtype));
  }
  if (!inputs.empty()) {
    const Group group = dims_.mesh.get_group(MeshDim(dims_.shard));
    under_way->scattered.emplace(
        inputs.size() == 1 ? comm::reduce_scatter_from(outputs[0], inputs[0], c10d::ReduceOp::SUM, group)
                           : comm::reduce_scatter_from(outputs, inputs, c10d::ReduceOp::SUM, group));
  }
  std::vector<std::pair<at::Tensor, Group>> again;  // to be reduced along other mesh dims too
  for (size_t first = 0, end = 0; first < parts.size(); first = end) {
    while (end < parts.size() && key(parts[end]) == key(parts[first])) ++end;
    if (parts[first].dims.empty()) continue;
    const at::Tensor begin = packing.shard(message, *parts[first].item, rank),
                     last =
                         packing.shard(message, end == parts.size() ? last_item : *parts[end - 1].item, rank);
    const int64_t size = last.storage_offset() + last.numel() - begin.storage_offset();
    const std::vector<MeshDim> dims(parts[first].dims.begin(), parts[first].dims.end());
    again.emplace_back(begin.as_strided({size}, {1}),
                       layouts_[parts[first].index].sharded.mesh().get_group(dims));
  }
  if (!again.empty()) {
    under_way->then = [again = std::move(again)] {
      std::vector<comm::Pending> collectives;
      for (const auto& [values, group] : again)
        collectives.push_back(comm::all_reduce(values, c10d::ReduceOp::SUM, group));
      return collectives;
    };
  }
  const bool waits = !options_.overlap;
  // Whether another rank has what is missing here decides whether there is a gradient.
  if (waits || !missing.empty()) under_way->wait();
  std::vector<bool> is_used(parts.size(), true);
  for (const size_t i : missing)
    is_used[i] = !output.is_meta() &&
                 packing.shard(message, last_item, rank)[static_cast<int64_t>(i)].ne(0).item<bool>();
  for (const size_t i : c10::irange(parts.size())) {
    if (!is_used[i]) continue;
    const Spec& spec = layouts_[parts[i].index].sharded;
    const double divide_by = parts[i].averages ? divisor() : 1;
    const int64_t offset = parts[i].item ? packing.shard(message, *parts[i].item, rank).storage_offset() *
                                               static_cast<int64_t>(c10::elementSize(dtype))
                                         : parts[i].offset;
    const auto finish = [under_way,
                         shard = view_of(output, offset, spec.local_shape(), spec.local_strides(), dtype),
                         dtype = spec.dtype(), divide_by] {
      under_way->wait();
      return (divide_by == 1 ? shard : shard.div_(divide_by)).to(dtype);
    };
    results[parts[i].index] = waits ? make_dtensor(finish(), spec)
                                    : make_dtensor(std::make_shared<PendingTensor>(std::nullopt, finish),
                                                   spec, output.options().dtype(spec.dtype()));
  }
  if (!waits)
    schedule_->set_reduction([under_way] { under_way->advance(); }, [under_way] { under_way->wait(); });
}

}  // namespace tessera
