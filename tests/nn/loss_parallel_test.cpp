// Losses over classes that are sharded, against one device.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/guards.h>

#include <torch/nn/functional/loss.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::expect_error;
namespace F = torch::nn::functional;

struct Case {
  std::vector<int64_t> shape;  // samples, classes, positions
  F::CrossEntropyFuncOptions::reduction_t reduction = torch::kMean;
  double label_smoothing = 0;
  bool weighted = false;
  bool ignores = false;
};

constexpr int64_t kIgnored = -100;

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& weight,
                   const Case& c) {
  return F::cross_entropy(logits, target,
                          F::CrossEntropyFuncOptions()
                              .reduction(c.reduction)
                              .label_smoothing(c.label_smoothing)
                              .weight(weight)
                              .ignore_index(kIgnored));
}

/// Only numbers per sample are exchanged: no rank ever has the logits of others.
void compare(const Case& c, const std::vector<int64_t>& mesh_shape) {
  std::vector<int64_t> of_target = c.shape;
  of_target.erase(of_target.begin() + 1);
  const int64_t classes = c.shape[1];
  const at::Tensor numbers = testing::numbers(c.shape);
  at::Tensor target = at::remainder(at::arange(c10::multiply_integers(of_target), at::kLong) * 3 + 1, classes)
                          .view(of_target);
  if (c.ignores) target.view({-1})[1] = kIgnored;
  const at::Tensor weight = c.weighted ? at::arange(1, classes + 1).to(at::kFloat) / classes : at::Tensor();
  const at::Tensor plain = numbers.clone().requires_grad_();
  const at::Tensor expected = loss_of(plain, target, weight, c);
  const at::Tensor weights = testing::numbers(expected.sizes(), 5) + 7;
  (expected * weights).sum().backward();
  run(c10::multiply_integers(mesh_shape), [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, mesh_shape);
    Placements of_logits{Shard(1)}, of_samples{Replicate()}, of_classes{Shard(0)}, replicated{Replicate()};
    if (mesh.ndim() == 2) {
      of_logits.insert(of_logits.begin(), Shard(0));
      of_samples.insert(of_samples.begin(), Shard(0));
      of_classes.insert(of_classes.begin(), Replicate());
      replicated.push_back(Replicate());
    }
    const at::Tensor logits = distribute_tensor(numbers, mesh, of_logits).requires_grad_();
    const at::Tensor of_class = c.weighted ? at::Tensor(distribute_tensor(weight, mesh, of_classes)) : weight;
    const at::Tensor mine = distribute_tensor(target, mesh, of_samples);
    const at::Tensor factors = distribute_tensor(weights, mesh, replicated);
    CommDebugMode counts;
    at::Tensor actual;
    {
      const LossParallel guard;
      actual = loss_of(logits, mine, of_class, c);
      (actual * factors).sum().backward();
    }
    // The weights of samples that are not ignored are selected, and rebalanced.
    EXPECT_LE(counts.calls("all_to_all"), c.label_smoothing > 0 ? 1 : 0) << counts;
    for (const auto& [name, count] : counts.get_comm_counts()) {
      EXPECT_LE(count.bytes / count.calls, static_cast<int64_t>(target.nbytes())) << name;
    }
    expect_close(DTensor(actual.detach()).full_tensor(), expected.detach(), "loss");
    EXPECT_EQ(DTensor(logits.grad()).placements(), of_logits);
    expect_close(DTensor(logits.grad()).full_tensor(), plain.grad(), "gradient");
  });
}

TEST(LossParallel, EqualsOneDevice) {
  const std::vector<F::CrossEntropyFuncOptions::reduction_t> reductions{torch::kMean, torch::kSum,
                                                                        torch::kNone};
  for (const auto& reduction : reductions) {
    for (const double smoothing : {0.0, 0.2}) {
      for (const bool weighted : {false, true}) {
        for (const bool ignores : {false, true}) {
          for (const auto& shape : std::vector<std::vector<int64_t>>{{6, 8}, {5, 7}, {3, 7, 2}, {4, 6}}) {
            compare({shape, reduction, smoothing, weighted, ignores}, {4});
          }
          compare({{6, 7}, reduction, smoothing, weighted, ignores}, {2, 2});
        }
      }
    }
  }
}

TEST(LossParallel, RefusesToGather) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor logits = distribute_tensor(testing::numbers({4, 6}), mesh, {Shard(1)});
    const at::Tensor targets = distribute_tensor(at::arange(4, at::kLong), mesh, {Shard(0)});
    const at::Tensor expected = F::cross_entropy(testing::numbers({4, 6}), at::arange(4, at::kLong));
    expect_close(DTensor(F::cross_entropy(logits, targets)).full_tensor(), expected, "loss");
    const LossParallel guard;
    expect_error<c10::Error>([&] { F::cross_entropy(logits, targets); }, {"nll_loss", "would be gathered"});
  });
}

}  // namespace
}  // namespace tessera
