// A two-layer perceptron over four ranks: the first layer is sharded by columns, the second by rows, so one
// all-reduce a pass is all they need. The model's code knows nothing of it.

#include <tessera/tessera.h>

#include <iostream>

#include <torch/nn.h>
#include <torch/optim.h>

using namespace tessera;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(64, 256));
    down = register_module("down", torch::nn::Linear(256, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

int main() {
  launch(4, [] {
    auto mesh = init_device_mesh(at::kCPU, {4});
    Mlp model;
    parallelize_module(*model, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    random::manual_seed(0);  // numbers on a mesh: the same however many ranks there are
    model->up->reset_parameters();
    model->down->reset_parameters();
    torch::optim::SGD optimizer(model->parameters(), 0.05);

    const at::Tensor x = randn({32, 64}, mesh, {Replicate()});
    const at::Tensor y = randn({32, 8}, mesh, {Replicate()});
    double first = 0, last = 0;
    CommDebugMode counts;
    for (int step = 0; step < 50; ++step) {
      counts.reset();
      const at::Tensor loss = torch::mse_loss(model->forward(x), y);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    if (mesh.get_rank() != 0) return;
    std::cout << "up.weight is " << DTensor(model->up->weight).spec() << "\nloss " << first << " -> " << last
              << "\ncollectives of a step: " << counts << '\n';
  });
}
