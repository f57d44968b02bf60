// The formulae of docs/parallel.md that no other test asserts.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/all_to_all.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>

#include "examples/train_gpt/gpt.h"
#include "tests/nn/support.h"
#include "tests/support/compare.h"

namespace tessera {
namespace {

const gpt::Config kModel{.vocabulary = 20, .context = 12, .width = 16, .heads = 4, .layers = 3};
constexpr int64_t kBatch = 8;

at::Tensor text_on(const DeviceMesh& mesh, Placement placement) {
  return distribute_tensor(at::arange(kBatch * kModel.context).remainder(20).view({kBatch, kModel.context}),
                           mesh, {placement}, std::nullopt);
}

int64_t bytes_of(const CommDebugMode& counts, const std::string& name) {
  const auto found = counts.get_comm_counts().find(name);
  return found == counts.get_comm_counts().end() ? 0 : found->second.bytes;
}

/// All gradients, once.
TEST(Costs, DataParallel) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    gpt::GPT model(kModel);
    int64_t gradients = 0;
    for (const at::Tensor& each : model->parameters()) gradients += static_cast<int64_t>(each.nbytes());
    replicate(*model, mesh);
    CommDebugMode counts;
    const at::Tensor output = model->forward(text_on(mesh, Shard(0)));
    EXPECT_EQ(counts.get_total_counts(), 0) << counts;
    output.sum().backward();
    EXPECT_EQ(bytes_of(counts, "all_reduce"), gradients) << counts;
    EXPECT_EQ(counts.total_bytes(), gradients) << counts;
  });
}

/// For each pair of layers, the activations between pairs: once forward, once backward. With a sharded sequence they
/// are reduce-scattered and gathered instead, which sends as much.
TEST(Costs, TensorParallel) {
  const int64_t pairs = 2 * kModel.layers, activations = kBatch * kModel.context * kModel.width * 4;
  for (const bool sequence : {false, true}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
      gpt::GPT model(kModel);
      const Placement stream = sequence ? Placement(Shard(1)) : Placement(Replicate());
      ParallelPlan plan{{"blocks.*.qkv", ColwiseParallel()},
                        {"blocks.*.projection", RowwiseParallel({.output_layouts = stream})},
                        {"blocks.*.up", ColwiseParallel()},
                        {"blocks.*.down", RowwiseParallel({.output_layouts = stream})}};
      if (sequence) plan.emplace_back("blocks.*.norm?", SequenceParallel());
      parallelize_module(*model, mesh, plan);
      distribute_module(*model, mesh);
      at::Tensor x = distribute_tensor(testing::small({kBatch, kModel.context, kModel.width}), mesh, {stream},
                                       std::nullopt);
      x.set_requires_grad(true);
      CommDebugMode counts;
      at::Tensor y = x;
      for (const auto& block : *model->blocks) y = block->as<gpt::Block>()->forward(y);
      if (sequence) {
        EXPECT_EQ(bytes_of(counts, "all_gather"), pairs * activations) << counts;
        EXPECT_EQ(bytes_of(counts, "reduce_scatter"), pairs * activations) << counts;
      } else {
        EXPECT_EQ(bytes_of(counts, "all_reduce"), pairs * activations) << counts;
      }
      const int64_t forward = counts.total_bytes();
      EXPECT_EQ(forward, (sequence ? 2 : 1) * pairs * activations) << counts;
      counts.reset();
      y.pow(2).sum().backward();
      const int64_t scalar = 4;  // the loss, where each rank has a part of y
      EXPECT_LE(counts.total_bytes() - forward, scalar) << counts;
      EXPECT_GE(counts.total_bytes(), forward) << counts;
    });
  }
}

/// Each token goes to k experts and comes back, and so do gradients. Tokens are spread evenly here.
TEST(Costs, Experts) {
  constexpr int64_t kRanks = 4, kTokens = 12, kChosen = 2, kFeatures = 5;
  run(kRanks, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {kRanks}, {"ep"});
    const int64_t bytes = kChosen * kTokens * kFeatures * 4;
    const at::Tensor x = at::ones({kChosen * kTokens, kFeatures}).requires_grad_();
    const std::vector<int64_t> sent(kRanks, kChosen * kTokens / kRanks);
    CommDebugMode counts;
    const auto received = exchange_sizes(sent, mesh, "ep");
    EXPECT_EQ(received, sent);
    const int64_t sizes = counts.total_bytes();
    EXPECT_EQ(sizes, kRanks * 8) << counts;
    const at::Tensor there = all_to_all_single(x, received, sent, mesh, "ep").tanh();
    const at::Tensor back = all_to_all_single(there, sent, received, mesh, "ep");
    EXPECT_EQ(counts.total_bytes() - sizes, 2 * bytes) << counts;
    back.sum().backward();
    EXPECT_EQ(counts.total_bytes() - sizes, 4 * bytes) << counts;
  });
}

}  // namespace
}  // namespace tessera
