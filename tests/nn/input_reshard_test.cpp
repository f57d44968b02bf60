#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/nn/input_reshard.h>
#include <tessera/nn/style.h>

#include <torch/nn.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_close;

TEST(InputReshard, GathersInBackwardWhatItSharded) {
  for (const int64_t batch : {4, 5, 1}) {
    torch::nn::Linear reference(6, 8);
    const at::Tensor x = testing::numbers({batch, 3, 6}), weight = testing::numbers({8, 6}, 1);
    reference->weight.detach().copy_(weight);
    reference(x).pow(2).sum().backward();
    run(2, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
      torch::nn::Linear linear(6, 8);
      linear->weight.detach().copy_(weight);
      linear->bias.detach().copy_(reference->bias.detach());
      parallelize_module(*linear, mesh, ColwiseParallel());
      const at::Tensor input = distribute_tensor(x, mesh, {Replicate()});
      at::Tensor output;
      {
        const InputReshard saving(mesh, 0);
        output = linear(input);
      }
      CommDebugMode counts;
      output.pow(2).sum().backward();
      EXPECT_EQ(counts.calls("all_gather"), 1) << counts;  // the input, for the gradient of the weight
      expect_close(DTensor(linear->weight.grad()).full_tensor(), reference->weight.grad(), "weight");
      linear->zero_grad();
      counts.reset();
      linear(input).pow(2).sum().backward();
      EXPECT_EQ(counts.calls("all_gather"), 0) << counts;  // nothing is sharded outside its scope
    });
  }
}

TEST(InputReshard, SaysWhatIsWrong) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    testing::expect_error<c10::ValueError>([&] { const InputReshard scope(mesh, 0); }, {"2 dims"});
    testing::expect_error<c10::IndexError>([&] { const InputReshard scope(mesh, -1, 1); }, {"-1"});
  });
}

}  // namespace
}  // namespace tessera
