#include <tessera/comm/collectives.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/nn/attachment.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/replicate.h>
#include <tessera/redistribute/memory.h>

#include <map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

namespace tessera {

namespace {

/// Gradients that are reduced along the same mesh dims, together.
struct Bucket {
  std::vector<at::Tensor> parameters;
  std::vector<Spec> reduced;  // of each gradient, then
  std::vector<at::Tensor> locals;
  int64_t bytes = 0;
};

/// Gradients under way.
struct Reducing {
  Bucket bucket;
  at::Tensor flat;
  comm::Pending pending;
};

/// What makes gradients go into the same bucket.
struct BucketKey {
  DeviceMesh mesh;
  std::vector<int64_t> dims;  // of the mesh, to reduce along
  at::ScalarType dtype;
  bool operator==(const BucketKey&) const = default;
};

}  // namespace

/// One per replicated module and rank.
class GradientReduction : public std::enable_shared_from_this<GradientReduction> {
 public:
  explicit GradientReduction(ReplicateOptions options) : options_(options) {}

  void pause(int by) { paused_ += by; }

  /// The gradient of `parameter` is complete for this backward pass.
  void ready(const at::Tensor& parameter) {
    if (paused_ > 0 || !DTensor::is_dtensor(parameter.grad())) return;
    const Spec& wanted = DTensorImpl::of(parameter)->spec();
    const Spec& given = DTensorImpl::of(parameter.grad())->spec();
    if (given.placements() == wanted.placements() && given.order() == wanted.order()) return;
    std::vector<int64_t> dims;
    Placements placements = given.placements();
    for (const int64_t dim : c10::irange(given.mesh().ndim())) {
      if (placements[dim] != Partial() || !wanted.placement(dim).is_replicate()) continue;
      placements[dim] = Replicate();
      dims.push_back(dim);
    }
    if (placements != wanted.placements() || given.mesh() != wanted.mesh()) {
      // Not a matter of sums alone.
      const DTensor gradient(parameter.grad());
      parameter.mutable_grad() = gradient.redistribute(
          wanted.placements(), {.order = {wanted.order().begin(), wanted.order().end()}});
      return;
    }
    Pass& pass = current_pass();
    const at::Tensor& local = DTensorImpl::of(parameter.grad())->local();
    const BucketKey key{given.mesh(), std::move(dims), local.scalar_type()};
    Bucket& bucket = pass.bucket(key);
    bucket.parameters.push_back(parameter);
    bucket.reduced.push_back(given.with_placements(placements));
    bucket.locals.push_back(local);
    bucket.bytes += static_cast<int64_t>(local.nbytes());
    const int64_t limit = pass.under_way.empty() ? options_.first_bucket_bytes : options_.bucket_bytes;
    if (bucket.bytes >= limit) pass.start(key, std::exchange(bucket, {}));
  }

 private:
  /// One backward pass.
  struct Pass {
    std::vector<std::pair<BucketKey, Bucket>> buckets;  // in the order of their first gradients, on all ranks
    std::vector<Reducing> under_way;

    Bucket& bucket(const BucketKey& key) {
      for (auto& [known, bucket] : buckets) {
        if (known == key) return bucket;
      }
      return buckets.emplace_back(key, Bucket()).second;
    }

    void start(const BucketKey& key, Bucket bucket) {
      const Group group = key.mesh.get_group(std::vector<MeshDim>(key.dims.begin(), key.dims.end()));
      // A copy, also of a single one: autograd may have given several parameters the same memory.
      std::vector<at::Tensor> rows;
      for (const size_t i : c10::irange(bucket.locals.size()))
        rows.push_back(
            laid_out(bucket.locals[i], bucket.reduced[i]).as_strided({bucket.locals[i].numel()}, {1}));
      at::Tensor flat = at::cat(rows);
      auto pending = comm::all_reduce(flat, c10d::ReduceOp::SUM, group);
      under_way.push_back({std::move(bucket), std::move(flat), std::move(pending)});
    }

    void finish() {
      for (auto& [key, bucket] : buckets) {
        if (!bucket.parameters.empty()) start(key, std::exchange(bucket, {}));
      }
      for (Reducing& each : under_way) {
        each.pending.wait();
        int64_t offset = 0;
        for (const size_t i : c10::irange(each.bucket.parameters.size())) {
          const Spec& spec = each.bucket.reduced[i];
          at::Tensor local = each.flat.as_strided(spec.local_shape(), spec.local_strides(), offset);
          offset += local.numel();
          each.bucket.parameters[i].mutable_grad() = make_dtensor(std::move(local), spec);
        }
      }
    }
  };

  /// That of the graph that is run now. It ends with it, also if that fails.
  Pass& current_pass() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (auto known = passes_[task].lock()) return *known;
    std::erase_if(passes_, [](const auto& each) { return each.second.expired(); });
    auto pass = std::make_shared<Pass>();
    passes_[task] = pass;
    torch::autograd::Engine::get_default_engine().queue_callback([pass] {
      const at::NoGradGuard no_grad;
      pass->finish();
    });
    return *pass;
  }

  const ReplicateOptions options_;
  int paused_ = 0;
  std::map<int, std::weak_ptr<Pass>> passes_;
};

namespace {

/// Called when the gradient of a parameter has been accumulated.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(std::shared_ptr<GradientReduction> reduction, std::unique_ptr<PostAccumulateGradHook> before)
      : reduction_(std::move(reduction)), before_(std::move(before)) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    const at::NoGradGuard no_grad;
    reduction_->ready(parameter);
  }

 private:
  std::shared_ptr<GradientReduction> reduction_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

}  // namespace

void replicate(torch::nn::Module& module, const DeviceMesh& mesh, const ReplicateOptions& options) {
  TESSERA_CHECK_VALUE(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "replicate: buckets of ",
                      options.first_bucket_bytes, " and ", options.bucket_bytes,
                      " bytes make no sense; give positive sizes.");
  Attachment& ours = attachment(module);
  TESSERA_CHECK(!ours.reduction, "replicate: this ", module.name(), " is replicated already.");
  distribute_module(module, mesh);
  ours.reduction = std::make_shared<GradientReduction>(options);
  for (const at::Tensor& parameter : module.parameters()) {
    if (!parameter.requires_grad()) continue;
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<ReadyHook>(ours.reduction, std::move(hook)));
  }
}

NoSync::NoSync(torch::nn::Module& module) {
  const Attachment* ours = find_attachment(module);
  TESSERA_CHECK_VALUE(ours && ours->reduction, "NoSync: this ", module.name(),
                      " is not replicated; call tessera::replicate first, with the same module.");
  reduction_ = ours->reduction;
  reduction_->pause(1);
}

NoSync::~NoSync() { reduction_->pause(-1); }

}  // namespace tessera
