// Data parallel training against one device.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/nn/members.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include "tests/nn/support.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::small;
using torch::nn::Module;

struct NetImpl : Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    second = register_module("second", torch::nn::Linear(8, 4));
    unused = register_module("unused", torch::nn::Linear(3, 3));
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

at::Tensor loss_of(Net& net, const at::Tensor& x) { return net->forward(x).pow(2).mean(); }

at::Tensor batch_of(const at::Tensor& batch, const DeviceMesh& mesh) {
  Placements placements(mesh.ndim(), Replicate());
  placements[0] = Shard(0);
  return distribute_tensor(batch, mesh, placements, std::nullopt);
}

void expect_same_gradients(Net& net, Net& reference, const std::string& what) {
  const auto expected = reference->named_parameters();
  for (const auto& parameter : net->named_parameters()) {
    const at::Tensor& gradient = parameter->grad();
    ASSERT_EQ(gradient.defined(), expected[parameter.key()].grad().defined()) << parameter.key() << what;
    if (!gradient.defined()) continue;
    EXPECT_EQ(DTensor(gradient).placements(), DTensor(parameter.value()).placements())
        << parameter.key() << what;
    expect_close(DTensor(gradient).full_tensor(), expected[parameter.key()].grad(), parameter.key() + what);
  }
}

/// All gradients in one bucket, in one for each parameter, and in some between; of an uneven batch too.
TEST(Replicate, ReducesGradientsInBuckets) {
  // Gradients of 16 and 128 bytes, then of 32 and 192.
  auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 4));
    testing::fill(*net);
    return net;
  };
  struct Case {
    int64_t bytes, reductions;
  };
  for (const int64_t batch : {8, 7}) {
    auto reference = make();
    reference->forward(small({batch, 6}, 9)).pow(2).mean().backward();
    for (const auto& [bytes, reductions] : {Case{1 << 20, 1}, Case{1, 4}, Case{150, 2}}) {
      run(4, [&] {
        const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
        auto net = make();
        replicate(*net, mesh, {.bucket_bytes = bytes, .first_bucket_bytes = bytes});
        const at::Tensor loss = net->forward(batch_of(small({batch, 6}, 9), mesh)).pow(2).mean();
        CommDebugMode counts;
        loss.backward();
        EXPECT_EQ(counts.calls("all_reduce"), reductions) << counts;
        EXPECT_EQ(counts.get_total_counts(), reductions) << counts;
        const auto expected = reference->parameters(), actual = net->parameters();
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_EQ(DTensor(actual[i].grad()).placements(), Placements{Replicate()});
          expect_close(DTensor(actual[i].grad()).full_tensor(), expected[i].grad(), c10::str("gradient ", i));
        }
      });
    }
  }
}

TEST(Replicate, TrainsAsOneDevice) {
  auto train = [](Net& net, const std::function<at::Tensor(const at::Tensor&)>& place) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    std::vector<double> losses;
    for (int64_t step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(net, place(small({8, 6}, step)));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  Net reference;
  const auto expected = train(reference, [](const at::Tensor& x) { return x; });
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    Net net;
    replicate(*net, mesh);
    const auto losses = train(net, [&](const at::Tensor& x) { return batch_of(x, mesh); });
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
    expect_close(DTensor(net->norm->running_mean).full_tensor(), reference->norm->running_mean, "buffer");
  });
}

/// Between passes gradients stay partial values; all are reduced at once in the last.
TEST(Replicate, AccumulatesWithoutReducing) {
  Net reference;
  for (int64_t pass = 0; pass < 3; ++pass) loss_of(reference, small({8, 6}, pass)).backward();
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    Net net;
    replicate(*net, mesh);
    {
      const NoSync accumulate(*net);
      for (int64_t pass = 0; pass < 2; ++pass) loss_of(net, batch_of(small({8, 6}, pass), mesh)).backward();
      EXPECT_EQ(DTensor(net->second->weight.grad()).placements(), Placements{Partial()});
    }
    loss_of(net, batch_of(small({8, 6}, 2), mesh)).backward();
    expect_same_gradients(net, reference, " accumulated");

    // Reduced in each pass it is the same.
    net->zero_grad();
    for (int64_t pass = 0; pass < 3; ++pass) loss_of(net, batch_of(small({8, 6}, pass), mesh)).backward();
    expect_same_gradients(net, reference, " reduced three times");
  });
}

struct SumImpl : Module {
  SumImpl() {
    a = register_parameter("a", small({2, 3}, 1));
    b = register_parameter("b", small({3, 2}, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return x * (a.view({6}) + b.view({6})); }
  at::Tensor a, b;
};

/// Autograd gives both parameters the same memory as gradients.
TEST(Replicate, GradientsMayShareMemory) {
  register_members<SumImpl>(&SumImpl::a, &SumImpl::b);
  SumImpl reference;
  reference.forward(small({8, 6}, 9)).sum().backward();
  ASSERT_EQ(reference.a.grad().const_data_ptr(), reference.b.grad().const_data_ptr());
  for (const int64_t bytes : {1, 1 << 20}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
      SumImpl net;
      replicate(net, mesh, {.bucket_bytes = bytes, .first_bucket_bytes = bytes});
      net.forward(batch_of(small({8, 6}, 9), mesh)).sum().backward();
      const auto expected = reference.named_parameters();
      for (const auto& parameter : net.named_parameters())
        expect_close(DTensor(parameter->grad()).full_tensor(), expected[parameter.key()].grad(),
                     parameter.key());
    });
  }
}

/// On two dims of a mesh, after parallelize_module: some gradients are partial along one, some along both.
TEST(Replicate, WithTensorParallel) {
  Net reference;
  loss_of(reference, small({8, 6}, 9)).backward();
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    Net net;
    parallelize_module(*net, mesh, {{"first", ColwiseParallel()}, {"second", RowwiseParallel()}},
                       {.dim = "tp"});
    replicate(*net, mesh);
    loss_of(net, batch_of(small({8, 6}, 9), mesh)).backward();
    EXPECT_EQ(DTensor(net->first->weight).placements(), (Placements{Replicate(), Shard(0)}));
    EXPECT_EQ(DTensor(net->unused->weight).placements(), (Placements{Replicate(), Replicate()}));
    expect_same_gradients(net, reference, "");
  });
}

/// Parameters on mesh["tp"] are replicas along "dp": each rank has a batch of its own, and gradients are
/// averaged.
TEST(Replicate, AveragesParametersOnOtherRanks) {
  auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 4));
    testing::fill(*net);
    return net;
  };
  auto reference = make();
  reference->forward(small({8, 6}, 9)).pow(2).mean().backward();
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto net = make();
    if (mesh.get_local_rank("dp") == 1) {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.mul_(2);
    }
    parallelize_module(*net, mesh["tp"], {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    replicate(*net, mesh["dp"]);
    const at::Tensor batch = small({8, 6}, 9).chunk(2)[mesh.get_local_rank("dp")];
    const at::Tensor loss = net->forward(batch).pow(2).mean();
    const CommDebugMode counts;
    loss.backward();
    EXPECT_EQ(counts.calls("all_reduce"), 1) << counts;
    const auto actual = net->named_parameters(), expected = reference->named_parameters();
    for (const auto& parameter : actual) {
      EXPECT_EQ(DTensor(parameter->grad()).placements(), DTensor(parameter.value()).placements());
      expect_close(DTensor(parameter->grad()).full_tensor(), expected[parameter.key()].grad(),
                   parameter.key());
    }
  });
}

/// A backward pass that fails leaves nothing behind for the next.
TEST(Replicate, SurvivesFailedBackward) {
  struct Fails : torch::autograd::Function<Fails> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list) {
      throw std::runtime_error("on purpose");
    }
  };
  Net reference;
  loss_of(reference, small({8, 6}, 9)).backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Net net;
    replicate(*net, mesh);
    const at::Tensor x = batch_of(small({8, 6}, 9), mesh);
    const at::Tensor hidden = Fails::apply(net->first(x));
    EXPECT_THROW(net->second(hidden).pow(2).mean().backward(), std::exception);
    net->zero_grad();
    loss_of(net, x).backward();
    expect_same_gradients(net, reference, " after a failure");
  });
}

TEST(Replicate, SaysWhatIsWrong) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Net net;
    expect_error<c10::ValueError>([&] { const NoSync none(*net); }, {"NetImpl", "replicate first"});
    expect_error<c10::ValueError>([&] { replicate(*net, mesh, {.bucket_bytes = 0}); }, {"0 bytes"});
    replicate(*net, mesh);
    expect_error<c10::Error>([&] { replicate(*net, mesh); }, {"NetImpl", "replicated already"});
  });
}

RANK_BODY(replicate_on_processes) {
  init_process_group();
  Net reference;
  loss_of(reference, small({8, 6}, 9)).backward();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {get_world_size()});
  Net net;
  replicate(*net, mesh, {.bucket_bytes = 150, .first_bucket_bytes = 150});
  loss_of(net, batch_of(small({8, 6}, 9), mesh)).backward();
  expect_same_gradients(net, reference, " on processes");
  destroy_process_group();
}

TEST(Replicate, OnProcesses) { testing::expect_ok_over_processes("replicate_on_processes", 2); }

}  // namespace
}  // namespace tessera
