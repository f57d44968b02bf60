// Training that was interrupted, and goes on from a checkpoint on other ranks, against training that was not.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/nn/style.h>
#include <tessera/random/generator.h>
#include <tessera/random/random.h>
#include <tessera/sharded/module.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include "tests/checkpoint/scratch.h"
#include "tests/nn/support.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using tessera::testing::small;
using tessera::testing::unsharded;
using ::testing::HasSubstr;

struct NetImpl : torch::nn::Module {
  NetImpl() : first(6, 8), norm(8), second(8, 4) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(norm(torch::relu(first(x)))); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second;
};
TORCH_MODULE(Net);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

template <class O, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<O>(std::move(parameters), options);
  };
}

/// A model on a mesh, or on one device, and what trains it.
struct Training {
  explicit Training(const std::vector<int64_t>& mesh_shape, const MakeOptimizer& make) {
    tessera::testing::fill(*net);
    if (!mesh_shape.empty()) {
      mesh = init_device_mesh(at::kCPU, mesh_shape);
      parallelize_module(*net->first, *mesh, ColwiseParallel());
      parallelize_module(*net->second, *mesh, RowwiseParallel());
    }
    optimizer = make(net->parameters());
    scheduler = std::make_unique<torch::optim::StepLR>(*optimizer, 2, 0.5);
  }

  void step(int64_t index) {
    optimizer->zero_grad();
    at::Tensor x = small({5, 6}, index);
    const at::Tensor hidden = net->first(x);
    const at::Tensor loss = unsharded(net->second(torch::relu(hidden))).square().sum();
    loss.backward();
    optimizer->step();
    scheduler->step();
  }

  StateDict state() { return StateDict::of(*net, *optimizer, *scheduler); }

  std::vector<at::Tensor> parameters() {
    std::vector<at::Tensor> result;
    for (const at::Tensor& parameter : net->parameters())
      result.push_back(unsharded(parameter.detach()).clone());
    return result;
  }

  Net net;
  std::optional<DeviceMesh> mesh;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<torch::optim::StepLR> scheduler;
};

class Optimizers : public ::testing::TestWithParam<std::pair<const char*, MakeOptimizer>> {};

INSTANTIATE_TEST_SUITE_P(
    All, Optimizers,
    ::testing::Values(
        std::pair{"SGD", maker<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))},
        std::pair{"Adam", maker<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true))},
        std::pair{"AdamW", maker<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))},
        std::pair{"Adagrad", maker<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05))},
        std::pair{
            "RMSprop",
            maker<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true))}),
    [](const auto& info) { return info.param.first; });

/// Three steps, a checkpoint, three more on the same ranks: the same bits as six steps.
TEST_P(Optimizers, GoOnAsIfNeverInterrupted) {
  const Scratch scratch;
  const MakeOptimizer& make = GetParam().second;
  run(2, [&] {
    Training global({2}, make);
    for (int64_t i = 0; i < 6; ++i) global.step(i);
    Training first({2}, make);
    for (int64_t i = 0; i < 3; ++i) first.step(i);
    save(first.state(), scratch / "x");
    Training second({2}, make);
    load(second.state(), scratch / "x");
    for (int64_t i = 3; i < 6; ++i) second.step(i);
    const auto expected = global.parameters(), found = second.parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i])) << i;
  });
}

/// On other ranks, and on none.
TEST_P(Optimizers, GoOnAnywhere) {
  const Scratch scratch;
  const MakeOptimizer& make = GetParam().second;
  std::vector<at::Tensor> expected;
  {
    Training global({}, make);
    for (int64_t i = 0; i < 6; ++i) global.step(i);
    expected = global.parameters();
  }
  run(4, [&] {
    Training first({4}, make);
    for (int64_t i = 0; i < 3; ++i) first.step(i);
    save(first.state(), scratch / "x");
  });
  const auto go_on = [&](const std::vector<int64_t>& mesh) {
    Training second(mesh, make);
    load(second.state(), scratch / "x");
    EXPECT_DOUBLE_EQ(second.optimizer->param_groups()[0].options().get_lr(),
                     0.5 * make({at::zeros({1}).requires_grad_()})->param_groups()[0].options().get_lr());
    for (int64_t i = 3; i < 6; ++i) second.step(i);
    const auto found = second.parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::allclose(expected[i], found[i], 1e-4, 1e-5)) << i;
  };
  run(2, [&] { go_on({2}); });
  run(3, [&] { go_on({3}); });
  go_on({});
}

TEST(Optimizers, StateThatTheCheckpointDoesNotHaveGoes) {
  const Scratch scratch;
  const auto make = maker<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  Training fresh({}, make);
  save(fresh.state(), scratch / "x");
  Training used({}, make);
  used.step(0);
  load(used.state(), scratch / "x");
  EXPECT_TRUE(used.optimizer->state().empty());
}

TEST(StateDict, OptimizersOfOtherParametersAreAnError) {
  Net net, other;
  torch::optim::SGD optimizer(other->parameters(), 0.1);
  EXPECT_THAT(error_of([&] { StateDict::of(*net, optimizer); }), HasSubstr("none of the module's"));
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THAT(error_of([&] { StateDict::of(*net, lbfgs); }), HasSubstr("LBFGS"));
}

TEST(StateDict, BuffersAndRandomNumbersGoOn) {
  const Scratch scratch;
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const auto make = maker<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
    Training training({}, make);
    training.net->forward(small({5, 6}));
    const at::Tensor mean = training.net->norm->running_mean.clone();
    random::manual_seed(5);
    rand({4}, mesh, {Shard(0)});
    save(training.state(), scratch / "x");
    const at::Tensor expected = rand({4}, mesh, {Shard(0)}).full_tensor();
    random::manual_seed(9);
    Training other({}, make);
    load(other.state(), scratch / "x");
    EXPECT_TRUE(at::equal(rand({4}, mesh, {Shard(0)}).full_tensor(), expected));
    EXPECT_TRUE(at::equal(other.net->norm->running_mean, mean));
  });
}

}  // namespace
}  // namespace tessera::checkpoint
