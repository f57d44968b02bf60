// The model of the demo (examples/train_gpt) as a pipeline of two stages, each of which is data parallel on two ranks,
// and the same on one device.

#include <tessera/tessera.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <vector>

#include <torch/nn.h>
#include <torch/optim.h>

#include "stage.h"

using namespace tessera;

namespace {

constexpr gpt::Config kModel{.vocabulary = 32, .context = 16, .width = 32, .heads = 4, .layers = 4};
constexpr int64_t kSteps = 20, kBatch = 8, kMicrobatches = 4;

/// Sequences that count upwards from somewhere, by some step.
at::Tensor text_of(int64_t step) {
  const at::Tensor numbers = at::arange(kBatch).unsqueeze(1) + step;
  const at::Tensor stride = numbers % 5 + 1;
  return (numbers * 7 + stride * at::arange(kModel.context + 1)) % kModel.vocabulary;
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

std::vector<double> train_on_one_device(gpt::GPT model) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor text = text_of(step);
    const at::Tensor loss = loss_of(model->forward(text.slice(1, 0, kModel.context)), text.slice(1, 1));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// Each rank trains its stage. The losses are known to the ranks of the last one.
std::vector<double> train_as_pipeline(gpt::Stage stage, const DeviceMesh& mesh) {
  const int64_t index = mesh.get_local_rank("pp"), count = mesh.size("pp");
  replicate(*stage, mesh["dp"]);
  torch::optim::AdamW optimizer(stage->parameters(), torch::optim::AdamWOptions(3e-3));
  Schedule1F1B schedule(PipelineStage(stage, index, count, mesh["pp"]), kMicrobatches, loss_of);
  if (mesh.get_rank() == 0) std::cout << grid(schedule.table()) << "\n\n";
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor text = distribute_tensor(text_of(step), mesh["dp"], {Shard(0)}, std::nullopt);
    optimizer.zero_grad();
    const PipelineResult result = schedule.step(text.slice(1, 0, kModel.context), text.slice(1, 1));
    optimizer.step();
    if (result.loss.defined()) losses.push_back(result.loss.item<double>());
  }
  return losses;
}

gpt::GPT make_model() {
  torch::manual_seed(0);
  return gpt::GPT(kModel);
}

}  // namespace

int main() {
  const auto expected = train_on_one_device(make_model());
  // Ranks that are threads share libtorch's generator, so their models are made one after the other.
  std::vector<gpt::GPT> models;
  for (int rank = 0; rank < 4; ++rank) models.push_back(make_model());
  run(4, [&] {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
    gpt::Stage stage(std::exchange(models[mesh.get_rank()], gpt::GPT(nullptr)), mesh.get_local_rank("pp"), 2);
    const auto losses = train_as_pipeline(stage, mesh);
    if (mesh.get_rank() != mesh.rank_at({1, 0})) return;
    double largest = 0;
    for (size_t i = 0; i < losses.size(); ++i) largest = std::max(largest, std::abs(losses[i] - expected[i]));
    std::printf("loss %.4f, then %.4f: on 2 x 2 ranks %s on one device (difference %.0e)\n", losses.front(),
                losses.back(), largest < 1e-3 ? "as" : "NOT as", largest);
  });
}
