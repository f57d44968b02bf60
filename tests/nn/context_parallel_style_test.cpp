// Modules whose attention is over a sharded sequence, against one device.

#include <tessera/comm/run.h>
#include <tessera/dtensor/context_parallel.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/style.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/nn/support.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace testing;

struct SelfAttentionImpl : torch::nn::Module {
  SelfAttentionImpl() {
    project = register_module("project", torch::nn::Linear(32, 96));
    out = register_module("out", torch::nn::Linear(32, 32));
  }
  at::Tensor forward(const at::Tensor& x) {
    method = context_parallel_options();
    std::vector<at::Tensor> parts = project(x).split(32, -1);
    for (at::Tensor& part : parts) part = part.unflatten(-1, {4, 8}).transpose(1, 2);
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
    return x + out(y.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear project{nullptr}, out{nullptr};
  std::optional<ContextParallelOptions> method;
};
TORCH_MODULE(SelfAttention);

TEST(ContextParallelStyle, TrainsAsOnOneDevice) {
  for (const auto& shape : {std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}}) {
    run(4, [&] {
      const bool with_batch = shape.size() == 2;
      const auto names = with_batch ? DeviceMesh::Names{"dp", "cp"} : DeviceMesh::Names{"cp"};
      const auto mesh = init_device_mesh(at::kCPU, shape, names);
      const int64_t ranks = mesh.size("cp");
      for (const ContextMethod method :
           {ContextMethod::allgather, ContextMethod::ulysses, ContextMethod::ring}) {
        for (const bool zigzag : {false, true}) {
          SelfAttention model, reference;
          for (SelfAttention* each : {&model, &reference}) {
            (*each)->to(at::kDouble);
            fill(**each);
          }
          distribute_module(*model, mesh);
          parallelize_module(*model, mesh, ContextParallel({.method = method, .zigzag = zigzag}),
                             {.dim = "cp"});
          const at::Tensor x = small({2, 13, 32}).to(at::kDouble);
          const at::Tensor expected = reference->forward(x);
          expected.square().sum().backward();
          Placements placements = replicated(mesh);
          if (with_batch) placements[0] = Shard(0);
          const at::Tensor given = zigzag ? to_zigzag(x, 1, ranks) : x;
          const at::Tensor input = distribute_tensor(given, mesh, placements, std::nullopt);
          const at::Tensor actual = call(model, input);
          EXPECT_EQ(model->method->method, method);
          EXPECT_FALSE(context_parallel_options());
          EXPECT_EQ(DTensor(actual).placements().back(), Shard(1));
          actual.square().sum().backward();
          const at::Tensor full = unsharded(actual.detach());
          expect_close(zigzag ? from_zigzag(full, 1, ranks) : full, expected.detach(), "output");
          for (const auto& each : reference->named_parameters())
            expect_close(unsharded(model->named_parameters()[each.key()].grad()), each.value().grad(),
                         each.key());
        }
      }
      // The scope ends with an error too.
      SelfAttention model;
      distribute_module(*model, mesh);
      parallelize_module(*model, mesh, ContextParallel(), {.dim = "cp"});
      const at::Tensor wrong = distribute_tensor(small({2, 4, 31}), mesh, replicated(mesh), std::nullopt);
      EXPECT_ANY_THROW(call(model, wrong));
      EXPECT_FALSE(context_parallel_options());
    });
  }
}

}  // namespace
}  // namespace tessera
