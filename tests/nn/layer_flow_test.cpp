// Each layer that the styles know: values and gradients as on one device, placements and the number of
// collectives as layer_flow.txt says, which the modules of Python are compared with too.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/nn/layer_plan.h>
#include <tessera/nn/style.h>

#include <fstream>
#include <sstream>

#include <torch/nn.h>

#include "tests/nn/support.h"
#include "tests/support/compare.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::small;
using testing::unsharded;
using torch::nn::Module;

struct Layer {
  std::string name;
  at::Tensor input;
  std::function<std::shared_ptr<Module>()> make;
  std::function<at::Tensor(Module&, const at::Tensor&)> forward;
};

template <class Impl, class Options>
Layer layer(std::string name, at::Tensor input, Options options) {
  return {std::move(name), std::move(input), [options] { return std::make_shared<Impl>(options); },
          [](Module& module, const at::Tensor& x) { return dynamic_cast<Impl&>(module).forward(x); }};
}

std::vector<Layer> layers() {
  using namespace torch::nn;
  const at::Tensor indices = at::remainder(at::arange(12, at::kLong) * 5, 8).view({3, 4});
  const Layer attention{
      "multihead_attention", small({3, 2, 8}),
      [] { return std::make_shared<MultiheadAttentionImpl>(MultiheadAttentionOptions(8, 4)); },
      [](Module& module, const at::Tensor& x) {
        return std::get<0>(call(&dynamic_cast<MultiheadAttentionImpl&>(module), x, x, x));
      }};
  return {
      layer<LinearImpl>("linear", small({4, 6}), LinearOptions(6, 8)),
      layer<EmbeddingImpl>("embedding", indices, EmbeddingOptions(8, 6)),
      layer<EmbeddingBagImpl>("embedding_bag", indices, EmbeddingBagOptions(8, 6)),
      layer<Conv1dImpl>("conv1d", small({2, 4, 5}), Conv1dOptions(4, 6, 3)),
      layer<Conv2dImpl>("conv2d", small({2, 4, 5, 5}), Conv2dOptions(4, 6, 3)),
      layer<Conv3dImpl>("conv3d", small({2, 4, 3, 3, 3}), Conv3dOptions(4, 6, 3)),
      layer<ConvTranspose1dImpl>("conv_transpose1d", small({2, 4, 5}), ConvTranspose1dOptions(4, 6, 3)),
      layer<ConvTranspose2dImpl>("conv_transpose2d", small({2, 4, 5, 5}), ConvTranspose2dOptions(4, 6, 3)),
      layer<ConvTranspose3dImpl>("conv_transpose3d", small({2, 4, 3, 3, 3}), ConvTranspose3dOptions(4, 6, 3)),
      attention,
  };
}

at::Tensor leaf(const at::Tensor& input) {
  const at::Tensor result = input.clone();
  return input.is_floating_point() ? result.requires_grad_() : result;
}

std::string placements_of(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).placements()[0].str() : "plain";
}

/// "linear colwise local: output plain, forward 0, backward 1 collectives; gradients: input plain, weight
/// S(0), ..."
std::string flow(const Layer& layer, const std::string& style, bool local) {
  const auto reference = layer.make();
  testing::fill(*reference);
  const at::Tensor expected_input = leaf(layer.input);
  const at::Tensor expected = layer.forward(*reference, expected_input);
  const at::Tensor weights = testing::numbers(expected.sizes(), 3);
  (expected * weights).sum().backward();

  std::string result;
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const auto module = layer.make();
    testing::fill(*module);
    parallelize_module(*module, mesh,
                       style == "colwise" ? ParallelStyle(ColwiseParallel({.use_local_output = local}))
                                          : ParallelStyle(RowwiseParallel({.use_local_output = local})));
    // A plain input is the local tensor of what the layer needs.
    const LayerStyle which = style == "colwise" ? LayerStyle::colwise : LayerStyle::rowwise;
    const auto kind = layer_kind(layer.name == "embedding_bag" ? "embedding" : layer.name);
    const LayerPlan plan = *layer_plan(which, *kind);
    at::Tensor input = distribute_tensor(leaf(layer.input), mesh, {local ? plan.input : Replicate()});
    if (local) input = leaf(DTensor(input).to_local().detach());
    CommDebugMode forward;
    at::Tensor output = layer.forward(*module, input);
    const int64_t in_forward = forward.get_total_counts();
    EXPECT_EQ(DTensor::is_dtensor(output), !local);
    const DTensor distributed = local ? DTensor::from_local(output, mesh, {plan.output}) : DTensor(output);
    expect_close(unsharded(distributed.detach()), expected.detach(), layer.name);
    const DTensor weight = distribute_tensor(weights, mesh, distributed.placements());
    const at::Tensor loss = (output * (local ? weight.to_local() : at::Tensor(weight))).sum();
    CommDebugMode backward;
    loss.backward();
    const int64_t in_backward = backward.get_total_counts();
    std::ostringstream line;
    line << layer.name << ' ' << style << (local ? " local" : " distributed") << ": output "
         << placements_of(output) << ", collectives " << in_forward << " forward, " << in_backward
         << " backward; gradients:";
    if (input.requires_grad()) {
      const at::Tensor& gradient = input.grad();
      line << " input " << placements_of(gradient) << ',';
      const at::Tensor all =
          local ? DTensor::from_local(gradient, mesh, {plan.input}).full_tensor() : unsharded(gradient);
      expect_close(all, expected_input.grad(), layer.name + " input");
    }
    const auto expected_parameters = reference->named_parameters();
    const char* separator = " ";
    for (const auto& parameter : module->named_parameters()) {
      line << std::exchange(separator, ", ") << parameter.key() << ' ' << placements_of(parameter->grad());
      expect_close(unsharded(parameter->grad()), expected_parameters[parameter.key()].grad(),
                   layer.name + " " + parameter.key());
    }
    if (get_rank() == 0) result = line.str();
  });
  return result;
}

TEST(LayerFlow, IsAsTheTableSays) {
  std::ifstream file(TESSERA_LAYER_FLOW);
  ASSERT_TRUE(file) << TESSERA_LAYER_FLOW;
  std::string expected;
  for (std::string line; std::getline(file, line);) {
    // No module of libtorch is of this kind.
    if (!line.empty() && !line.starts_with('#') && !line.starts_with("linear_transposed"))
      expected += line + '\n';
  }
  std::string actual;
  for (const Layer& layer : layers()) {
    for (const char* style : {"colwise", "rowwise"}) {
      if (style == std::string("rowwise") && layer.name == "multihead_attention") continue;
      for (const bool local : {false, true}) actual += flow(layer, style, local) + '\n';
    }
  }
  EXPECT_EQ(actual, expected) << actual;
}

}  // namespace
}  // namespace tessera
