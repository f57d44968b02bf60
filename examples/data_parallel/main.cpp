// A small convolutional network on four ranks, each with its part of the batch. Two passes are accumulated
// for each step: gradients are reduced once, in one bucket.

#include <tessera/tessera.h>

#include <iostream>

#include <torch/nn.h>
#include <torch/optim.h>

using namespace tessera;

int main() {
  launch(4, [] {
    auto mesh = init_device_mesh(at::kCPU, {4});
    torch::nn::Sequential model(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)),
                                torch::nn::ReLU(), torch::nn::Flatten(), torch::nn::Linear(8 * 8 * 8, 4));
    replicate(*model, mesh);
    random::manual_seed(0);  // numbers on a mesh: the same however many ranks there are
    for (const auto& layer : model->modules()) {
      if (auto* conv = layer->as<torch::nn::Conv2d>()) conv->reset_parameters();
      if (auto* linear = layer->as<torch::nn::Linear>()) linear->reset_parameters();
    }
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));

    // Each rank makes its own images: of class c, those with a bright quarter c.
    auto pass = [&] {
      const at::Tensor classes = torch::randint(4, {16}, random::torch_generator());
      at::Tensor images = torch::randn({16, 1, 8, 8}, random::torch_generator()) * 0.5;
      for (int i = 0; i < 16; ++i) {
        const auto c = classes[i].item<int64_t>();
        images[i].slice(1, c / 2 * 4, c / 2 * 4 + 4).slice(2, c % 2 * 4, c % 2 * 4 + 4).add_(1);
      }
      const at::Tensor batch = DTensor::from_local(images, mesh, {Shard(0)});
      const at::Tensor targets = DTensor::from_local(classes, mesh, {Shard(0)});
      const at::Tensor loss = torch::nn::functional::cross_entropy(model->forward(batch), targets);
      loss.backward();
      return loss.item<double>();  // over all 64 images
    };
    double first = 0, last = 0;
    CommDebugMode counts;
    for (int step = 0; step < 40; ++step) {
      counts.reset();
      optimizer.zero_grad();
      {
        const NoSync accumulate(*model);
        pass();
      }
      last = pass();
      optimizer.step();
      if (step == 0) first = last;
    }
    if (mesh.get_rank() == 0)
      std::cout << "loss " << first << " -> " << last << "\ncollectives of a step: " << counts << '\n';
  });
}
