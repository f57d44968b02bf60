#include <tessera/comm/collectives.h>
#include <tessera/comm/observer.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/gradient_reduction.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

namespace {

at::Tensor local_of(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensorImpl::of(tensor)->local() : tensor.detach();
}

/// In the order in which every rank has it.
at::Tensor flattened(const at::Tensor& tensor) {
  if (!DTensor::is_dtensor(tensor)) return tensor.detach().reshape(-1);
  const DTensorImpl& impl = *DTensorImpl::of(tensor);
  return laid_out(impl.local(), impl.spec()).as_strided({impl.local().numel()}, {1});
}

}  // namespace

/// How gradients are reduced: those with the same go into one bucket.
struct GradientReduction::Reduction {
  DeviceMesh mesh;
  std::vector<int64_t> dims;  // of the mesh, to reduce along
  bool average;
  at::ScalarType dtype;
  at::Device device;
  bool operator==(const Reduction&) const = default;
};

/// What there is to reduce in a backward pass, and in those inside of it, where activations are computed
/// again.
struct GradientReduction::Backward {
  struct Bucket {
    Reduction reduction;
    std::vector<at::Tensor> parameters = {};
    int64_t bytes = 0;
  };
  struct Started {
    std::vector<at::Tensor> parameters;
    at::Tensor flat;
    comm::Pending pending;
    bool average;
  };

  Bucket& bucket(const Reduction& reduction) {
    for (Bucket& known : buckets) {
      if (known.reduction == reduction) return known;
    }
    return buckets.emplace_back(Bucket{reduction});
  }

  /// Of a parameter whose gradient has been accumulated once more before it was reduced.
  void withdraw(const at::Tensor& parameter) {
    for (Bucket& each : buckets) {
      const auto found = std::find_if(each.parameters.begin(), each.parameters.end(),
                                      [&](const at::Tensor& known) { return known.is_same(parameter); });
      if (found == each.parameters.end()) continue;
      each.bytes -= static_cast<int64_t>(local_of(parameter.grad()).nbytes());
      each.parameters.erase(found);
      return;
    }
  }

  void start(Bucket& bucket) {
    std::vector<at::Tensor> parameters = std::exchange(bucket.parameters, {});
    bucket.bytes = 0;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters) {
      TESSERA_CHECK(parameter.grad().defined(),
                    "replicate: a gradient was removed while backward was under way; do so after it.");
      gradients.push_back(flattened(parameter.grad()));
      waiting.erase(parameter.unsafeGetTensorImpl());
    }
    const auto& [mesh, dims, average, dtype, device] = bucket.reduction;
    // A copy, also of a single one: autograd may have given several parameters the same memory.
    const comm::MemoryInFlight in_flight;
    at::Tensor flat = at::cat(gradients);
    auto pending = comm::all_reduce(flat, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM,
                                    mesh.get_group(std::vector<MeshDim>(dims.begin(), dims.end())));
    started.push_back({std::move(parameters), std::move(flat), std::move(pending), average});
  }

  /// Reduces what is left, and lets the gradients be views of what they were reduced to.
  void finish() {
    for (Bucket& each : buckets) {
      if (!each.parameters.empty()) start(each);
    }
    for (Started& each : std::exchange(started, {})) {
      each.pending.wait();
      int64_t offset = 0;
      for (const at::Tensor& parameter : each.parameters) {
        const at::Tensor& gradient = parameter.grad();
        const int64_t size = local_of(gradient).numel();
        if (DTensor::is_dtensor(gradient)) {
          // An average leaves the placements alone: it is over other ranks.
          const Spec& given = DTensorImpl::of(gradient)->spec();
          const Spec spec = each.average ? given
                                         : given.with_placements(DTensor(parameter).placements(),
                                                                 DTensor(parameter).spec().order());
          parameter.mutable_grad() =
              make_dtensor(each.flat.as_strided(spec.local_shape(), spec.local_strides(), offset), spec);
        } else {
          parameter.mutable_grad() = each.flat.narrow(0, offset, size).view(gradient.sizes());
        }
        offset += size;
      }
    }
  }

  std::set<int> tasks;          // of the engine, that call us in the end
  std::vector<Bucket> buckets;  // in the order of their first gradients, the same on all ranks
  std::vector<Started> started;
  std::set<const c10::TensorImpl*> waiting;  // parameters in buckets
};

bool is_distributed_on(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!DTensor::is_dtensor(tensor)) return false;
  const DeviceMesh& its = DTensorImpl::of(tensor)->spec().mesh();
  if (its == mesh) return true;
  const auto& names = mesh.mesh_dim_names();
  const auto& its_names = its.mesh_dim_names();
  return !names.empty() && mesh.root() == its.root() &&
         std::all_of(names.begin(), names.end(), [&](const std::string& name) {
           return std::find(its_names.begin(), its_names.end(), name) != its_names.end();
         });
}

void broadcast_values(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const at::Tensor local = local_of(tensor);
  local.copy_(distribute_tensor(local, mesh, replicated(mesh)).to_local());
}

GradientReduction::GradientReduction(DeviceMesh mesh, Options options)
    : mesh_(std::move(mesh)), options_(options) {
  TESSERA_CHECK_VALUE(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "replicate: buckets of ",
                      options.first_bucket_bytes, " and ", options.bucket_bytes,
                      " bytes make no sense; give positive sizes.");
}

GradientReduction::~GradientReduction() = default;

std::optional<GradientReduction::Reduction> GradientReduction::reduction_of(
    const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  Reduction reduction{mesh_, {}, true, gradient.scalar_type(), gradient.device()};
  if (!is_distributed_on(parameter, mesh_)) {
    for (const int64_t dim : c10::irange(mesh_.ndim())) reduction.dims.push_back(dim);
    return reduction;
  }
  if (!DTensor::is_dtensor(gradient)) return std::nullopt;
  const Spec& wanted = DTensorImpl::of(parameter)->spec();
  const Spec& given = DTensorImpl::of(gradient)->spec();
  if (given.placements() == wanted.placements() && given.order() == wanted.order()) return std::nullopt;
  reduction.mesh = given.mesh();
  reduction.average = false;
  Placements placements = given.placements();
  for (const int64_t dim : c10::irange(given.mesh().ndim())) {
    if (placements[dim] != Partial() || !wanted.placement(dim).is_replicate()) continue;
    placements[dim] = Replicate();
    reduction.dims.push_back(dim);
  }
  if (placements == wanted.placements() && given.mesh() == wanted.mesh()) return reduction;
  // Not a matter of sums alone: by itself.
  parameter.mutable_grad() = DTensor(gradient).redistribute(
      wanted.placements(), {.order = {wanted.order().begin(), wanted.order().end()}});
  return std::nullopt;
}

void GradientReduction::ready(const at::Tensor& parameter) {
  if (!enabled_ || !parameter.grad().defined()) return;
  const at::NoGradGuard no_grad;
  const auto backward = current_backward();
  if (!backward->waiting.insert(parameter.unsafeGetTensorImpl()).second) backward->withdraw(parameter);
  const auto reduction = reduction_of(parameter);
  if (!reduction) {
    backward->waiting.erase(parameter.unsafeGetTensorImpl());
    return;
  }
  Backward::Bucket& bucket = backward->bucket(*reduction);
  bucket.parameters.push_back(parameter);
  bucket.bytes += static_cast<int64_t>(local_of(parameter.grad()).nbytes());
  const int64_t limit = backward->started.empty() ? options_.first_bucket_bytes : options_.bucket_bytes;
  if (bucket.bytes >= limit) backward->start(bucket);
}

std::shared_ptr<GradientReduction::Backward> GradientReduction::current_backward() {
  auto backward = backward_.lock();
  if (!backward) {
    backward = std::make_shared<Backward>();
    backward_ = backward;
  }
  if (backward->tasks.insert(torch::autograd::get_current_graph_task_id()).second) {
    torch::autograd::Engine::get_default_engine().queue_callback([backward] {
      const at::NoGradGuard no_grad;
      backward->finish();
    });
  }
  return backward;
}

}  // namespace tessera
