// libtorch's own modules and optimisers on distributed parameters, against one device.

#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

at::Tensor numbers(at::IntArrayRef shape, int64_t seed) {
  const int64_t count = c10::multiply_integers(shape);
  return ((at::remainder(at::arange(count, at::kLong) * 7 + seed, 11) - 5).to(at::kFloat) / 10).view(shape);
}

struct Model : torch::nn::Module {
  Model() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    second = register_module("second", torch::nn::Linear(8, 4));
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes(), seed++));
  }
  /// What is trained: what the members are now.
  std::vector<at::Tensor> trained() const {
    return {first->weight, first->bias, norm->weight, norm->bias, second->weight, second->bias};
  }
  at::Tensor forward(const at::Tensor& x) {
    return second->forward(norm->forward(torch::relu(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

/// Ten steps; the loss of each.
template <class MakeOptimizer>
std::vector<float> train(Model& model, const at::Tensor& x, const MakeOptimizer& make) {
  auto optimizer = make(model.trained());
  std::vector<float> losses;
  for (int step = 0; step < 10; ++step) {
    const at::Tensor loss = optimizer->step([&] {
      optimizer->zero_grad();
      const at::Tensor value = model.forward(x).pow(2).mean();
      value.backward();
      return value;
    });
    losses.push_back(loss.item<float>());
  }
  return losses;
}

template <class MakeOptimizer>
void compare(const MakeOptimizer& make) {
  Model reference;
  const auto expected = train(reference, numbers({5, 6}, 9), make);
  EXPECT_LT(expected.back(), expected.front());
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    Model model;
    auto place = [&](at::Tensor& parameter, const Placement& placement) {
      parameter = distribute_tensor(parameter, mesh, {Replicate(), placement});
    };
    place(model.first->weight, Shard(0));
    place(model.first->bias, Shard(0));
    place(model.norm->weight, Replicate());
    place(model.norm->bias, Replicate());
    place(model.second->weight, Shard(1));
    place(model.second->bias, Replicate());
    const auto losses =
        train(model, distribute_tensor(numbers({5, 6}, 9), mesh, {Shard(0), Replicate()}), make);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4) << "step " << i;
    EXPECT_EQ(DTensor(model.first->weight).placements(), (Placements{Replicate(), Shard(0)}));
  });
}

TEST(Modules, TrainWithSgd) {
  compare([](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  });
}

TEST(Modules, TrainWithAdamW) {
  compare([](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
  });
}

TEST(Modules, TrainWithAdagrad) {
  compare([](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.05));
  });
}

TEST(Modules, TrainWithRMSprop) {
  compare([](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::RMSprop>(parameters,
                                                   torch::optim::RMSpropOptions(0.005).momentum(0.5));
  });
}

TEST(Modules, TrainWithLBFGS) {
  compare([](const std::vector<at::Tensor>& parameters) {
    return std::make_unique<torch::optim::LBFGS>(parameters, torch::optim::LBFGSOptions(0.1).max_iter(4));
  });
}

}  // namespace
}  // namespace tessera
