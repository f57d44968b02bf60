// libtorch's optimisers, schedules, clipping and autocast on distributed parameters, against one device.

#include <tessera/comm/run.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>

#include <ATen/autocast_mode.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include "tests/nn/support.h"
#include "tests/support/compare.h"

namespace tessera {
namespace {

using testing::small;
using torch::optim::Optimizer;
using Tensors = std::vector<at::Tensor>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    second = register_module("second", torch::nn::Linear(8, 4));
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(norm(torch::relu(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net);

using Place = std::function<at::Tensor(const at::Tensor&)>;
/// Trains, on inputs that are placed, and returns the losses.
using Train = std::function<std::vector<double>(Net&, const Place&)>;

/// On one device, and on a 2 x 2 mesh: with gradients reduced in buckets, and by the optimiser itself.
void compare(const Train& train, double tolerance = 1e-4) {
  Net reference;
  const auto expected = train(reference, [](const at::Tensor& x) { return x; });
  EXPECT_LT(expected.back(), expected.front());
  for (const bool in_buckets : {true, false}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
      Net net;
      parallelize_module(*net, mesh, {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}},
                         {.dim = "tp"});
      in_buckets ? replicate(*net, mesh) : distribute_module(*net, mesh);
      const auto losses = train(net, [&](const at::Tensor& x) {
        return distribute_tensor(x, mesh, {Shard(0), Replicate()}, std::nullopt);
      });
      ASSERT_EQ(losses.size(), expected.size());
      for (size_t i = 0; i < losses.size(); ++i)
        EXPECT_NEAR(losses[i], expected[i], tolerance) << "step " << i;
      EXPECT_EQ(DTensor(net->first->weight).placements(), (Placements{Replicate(), Shard(0)}));
    });
  }
}

at::Tensor loss_of(Net& net, const at::Tensor& x) { return net->forward(x).pow(2).mean(); }

/// Eight steps; `prepare` may change gradients before each, `after` is called with its loss.
std::vector<double> steps(Net& net, Optimizer& optimizer, const Place& place,
                          const std::function<void(const Tensors&)>& prepare = {},
                          const std::function<void(double)>& after = {}) {
  std::vector<double> losses;
  const at::Tensor x = place(small({5, 6}, 9));
  for (int step = 0; step < 8; ++step) {
    const at::Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor value = loss_of(net, x);
      value.backward();
      if (prepare) prepare(net->parameters());
      return value;
    });
    losses.push_back(loss.item<double>());
    if (after) after(losses.back());
  }
  return losses;
}

template <class O, class Options>
Train with(const Options& options) {
  return [=](Net& net, const Place& place) {
    O optimizer(net->parameters(), options);
    return steps(net, optimizer, place);
  };
}

TEST(Optimizers, Sgd) {
  compare(with<torch::optim::SGD>(
      torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(true)));
}
TEST(Optimizers, Adam) {
  compare(with<torch::optim::Adam>(torch::optim::AdamOptions(0.01).weight_decay(0.01).amsgrad(true)));
}
TEST(Optimizers, AdamW) { compare(with<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))); }
TEST(Optimizers, Adagrad) {
  compare(with<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05).lr_decay(0.1).weight_decay(0.01)));
}
TEST(Optimizers, RmsProp) {
  compare(with<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.005).momentum(0.5).centered(true)));
}
TEST(Optimizers, Lbfgs) {
  compare(
      with<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe")),
      1e-3);
}

TEST(Schedules, StepLr) {
  compare([](Net& net, const Place& place) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
    torch::optim::StepLR schedule(optimizer, 2, 0.5);
    auto losses = steps(net, optimizer, place, {}, [&](double) { schedule.step(); });
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05 / 8);
    return losses;
  });
}

TEST(Schedules, ReduceOnPlateau) {
  compare([](Net& net, const Place& place) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));
    torch::optim::ReduceLROnPlateauScheduler schedule(
        optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, 0, 0.5);
    return steps(net, optimizer, place, {}, [&](double loss) { schedule.step(static_cast<float>(loss)); });
  });
}

TEST(Clipping, ByNorm) {
  for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    compare([=](Net& net, const Place& place) {
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
      return steps(net, optimizer, place, [=](const Tensors& parameters) {
        torch::nn::utils::clip_grad_norm_(parameters, 0.1, norm_type);
      });
    });
  }
}

TEST(Clipping, ByValue) {
  compare([](Net& net, const Place& place) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
    return steps(net, optimizer, place,
                 [](const Tensors& parameters) { torch::nn::utils::clip_grad_value_(parameters, 0.02); });
  });
}

TEST(Accumulation, OfTwoPasses) {
  compare([](Net& net, const Place& place) {
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    std::vector<double> losses;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      double sum = 0;
      for (int64_t half = 0; half < 2; ++half) {
        const at::Tensor loss = loss_of(net, place(small({5, 6}, half)));
        loss.backward();
        sum += loss.item<double>();
      }
      optimizer.step();
      losses.push_back(sum);
    }
    return losses;
  });
}

TEST(Autocast, ToBFloat16) {
  compare(
      [](Net& net, const Place& place) {
        torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
        std::vector<double> losses;
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          at::autocast::set_autocast_enabled(at::kCPU, true);
          const at::Tensor output = net->forward(place(small({5, 6}, 9)));
          EXPECT_EQ(output.scalar_type(), at::kBFloat16);
          const at::Tensor loss = output.to(at::kFloat).pow(2).mean();
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          loss.backward();
          EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
          optimizer.step();
          losses.push_back(loss.item<double>());
        }
        return losses;
      },
      5e-3);
}

}  // namespace
}  // namespace tessera
