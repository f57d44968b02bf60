#include <tessera/comm/agreement.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/attachment.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/tree.h>

#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

namespace tessera {

namespace {

/// Called when the gradient of a parameter has been accumulated.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(std::shared_ptr<GradientReduction> reduction, std::unique_ptr<PostAccumulateGradHook> before)
      : reduction_(std::move(reduction)), before_(std::move(before)) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    reduction_->ready(parameter);
  }

 private:
  std::shared_ptr<GradientReduction> reduction_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

}  // namespace

void replicate(torch::nn::Module& module, const DeviceMesh& mesh, const ReplicateOptions& options) {
  std::shared_ptr<GradientReduction> reduction;
  Attachment& ours = attachment(module);
  comm::together(
      "replicate", mesh.joint_group_or_null(),
      [&] {
        reduction = std::make_shared<GradientReduction>(mesh, options);
        TESSERA_CHECK(!ours.reduction, "replicate: this ", module.name(), " is replicated already.");
        return c10::str(module.name(), ", ", mesh, ", ", tensors_text(module));
      },
      [&] {
        distribute_module(module, mesh);
        for (const auto& tensors : {module.parameters(), module.buffers()}) {
          for (const at::Tensor& tensor : tensors) {
            if (!is_distributed_on(tensor, mesh)) broadcast_values(tensor, mesh);
          }
        }
      });
  ours.reduction = std::move(reduction);
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
  before_ = reduction_->enabled();
  reduction_->set_enabled(false);
}

NoSync::~NoSync() { reduction_->set_enabled(before_); }

}  // namespace tessera
