// Modules of libtorch and of users, parallelised, against one device.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/guards.h>
#include <tessera/nn/style.h>

#include <ATen/autocast_mode.h>
#include <torch/nn.h>

#include "tests/nn/support.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::fill;
using testing::small;
using testing::unsharded;
using torch::nn::Module;

/// The same module, distributed by `distribute` and on one device: outputs and the gradients of all
/// parameters and of the input. Ranks get the global input on each, and may do with it as they like.
template <class Make, class Forward>
void compare(const Make& make, const at::Tensor& input, at::IntArrayRef mesh_shape,
             const std::function<void(Module&, const DeviceMesh&)>& distribute,
             const std::function<at::Tensor(const at::Tensor&, const DeviceMesh&)>& place,
             const Forward& forward) {
  auto expected_module = make();
  fill(*expected_module);
  const at::Tensor expected_input =
      input.is_floating_point() ? input.clone().requires_grad_() : input.clone();
  const at::Tensor expected = forward(expected_module, expected_input);
  const at::Tensor weights = testing::numbers(expected.sizes(), 3);
  (expected * weights).sum().backward();
  run(c10::multiply_integers(mesh_shape), [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, mesh_shape);
    auto module = make();
    fill(*module);
    distribute(*module, mesh);
    const at::Tensor mine = input.is_floating_point() ? input.clone().requires_grad_() : input.clone();
    const at::Tensor actual = forward(module, place(mine, mesh));
    expect_close(unsharded(actual.detach()), expected.detach(), "output");
    const Placements replicated(mesh.ndim(), Replicate());
    (actual * (DTensor::is_dtensor(actual)
                   ? at::Tensor(distribute_tensor(weights, mesh, replicated, std::nullopt))
                   : weights))
        .sum()
        .backward();
    if (mine.grad().defined())
      expect_close(unsharded(mine.grad()), expected_input.grad(), "gradient of input");
    const auto named = expected_module->named_parameters();
    for (const auto& parameter : module->named_parameters()) {
      ASSERT_TRUE(parameter->grad().defined()) << parameter.key();
      expect_close(unsharded(parameter->grad()), named[parameter.key()].grad(), parameter.key());
    }
  });
}

auto as_it_is = [](const at::Tensor& input, const DeviceMesh&) { return input; };
auto call_forward = [](auto& module, const at::Tensor& input) { return module->forward(input); };

struct MlpImpl : Module {
  MlpImpl(bool bias = true) {
    up = register_module("up", torch::nn::Linear(torch::nn::LinearOptions(6, 10).bias(bias)));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(10, 5).bias(bias)));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

/// On one dim, from a plain input, of any number of dims.
TEST(Styles, MlpOnPlainInput) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 6}, {2, 4, 6}, {6}}) {
    for (const bool bias : {false, true}) {
      compare([&] { return Mlp(bias); }, small(shape), {3},
              [](Module& module, const DeviceMesh& mesh) {
                parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
              },
              as_it_is, call_forward);
    }
  }
}

TEST(Styles, MlpOnTwoDimsOfMesh) {
  compare([] { return Mlp(); }, small({4, 3, 6}), {2, 2},
          [](Module& module, const DeviceMesh& mesh) {
            parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}},
                               {.dim = 1});
            EXPECT_EQ(DTensor(module.named_parameters()["up.weight"]).placements(),
                      (Placements{Replicate(), Shard(0)}));
          },
          [](const at::Tensor& input, const DeviceMesh& mesh) {
            return DTensor::from_local(input, mesh, {Replicate(), Replicate()})
                .redistribute({Shard(0), Replicate()});
          },
          call_forward);
}

TEST(Styles, EveryHandleSeesTheDistributedTensor) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Mlp module;
    parallelize_module(*module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    EXPECT_TRUE(module->up->weight.is_same(module->named_parameters()["up.weight"]));
    EXPECT_TRUE(module->up->weight.is_same(module->up->parameters()[0]));
    EXPECT_EQ(DTensor(module->up->weight).placements(), Placements{Shard(0)});
    EXPECT_EQ(DTensor(module->down->weight).placements(), Placements{Shard(1)});
    EXPECT_EQ(DTensor(module->down->bias).placements(), Placements{Replicate()});
    EXPECT_TRUE(module->up->weight.requires_grad() && module->up->weight.is_leaf());
  });
}

/// Replicas of the same values on each rank.
auto replicated = [](const at::Tensor& input, const DeviceMesh& mesh) -> at::Tensor {
  return DTensor::from_local(input, mesh, Placements(mesh.ndim(), Replicate()));
};

auto with_style = [](const ParallelStyle& style) {
  return [style](Module& module, const DeviceMesh& mesh) { parallelize_module(module, mesh, style); };
};

TEST(Styles, LinearWithOtherLayouts) {
  for (const Placement& output : {Replicate(), Shard(0), Shard(1), Shard(-1)}) {
    const auto make = [] { return torch::nn::Linear(6, 7); };
    for (const bool plain : {false, true}) {
      const auto place = [&](const at::Tensor& x, const DeviceMesh& mesh) {
        return plain ? x : replicated(x, mesh);
      };
      compare(make, small({3, 5, 6}), {3},
              with_style(ColwiseParallel({.input_layouts = Replicate(), .output_layouts = output})), place,
              call_forward);
      compare(make, small({3, 5, 6}), {3},
              with_style(RowwiseParallel({.input_layouts = Replicate(), .output_layouts = output})), place,
              call_forward);
    }
  }
}

/// Outputs as local tensors: what the ranks have, put together, is the output of one device, and so are the
/// gradients, whatever number of dims there are and whether there is a bias.
TEST(Styles, LocalOutputs) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 6}, {4, 2, 6}}) {
    for (const bool colwise : {true, false}) {
      for (const Placement& output : {Replicate(), Shard(0), Shard(-1), Partial()}) {
        torch::nn::Linear reference(6, 8);
        fill(*reference);
        const at::Tensor expected = reference(small(shape));
        const at::Tensor weights = testing::numbers(expected.sizes(), 3);
        (expected * weights).sum().backward();
        run(2, [&] {
          const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
          torch::nn::Linear linear(6, 8);
          fill(*linear);
          const ParallelStyle style =
              colwise
                  ? ParallelStyle(ColwiseParallel({.output_layouts = output, .use_local_output = true}))
                  : ParallelStyle(RowwiseParallel(
                        {.input_layouts = Replicate(), .output_layouts = output, .use_local_output = true}));
          parallelize_module(*linear, mesh, style);
          const at::Tensor actual = linear(small(shape));
          ASSERT_FALSE(DTensor::is_dtensor(actual));
          const auto& placement = output;
          expect_close(DTensor::from_local(actual.detach(), mesh, {placement}).full_tensor(),
                       expected.detach(), "output");
          const Placement of_gradient = placement.is_partial() ? Replicate() : placement;
          (actual * distribute_tensor(weights, mesh, {of_gradient}).to_local()).sum().backward();
          expect_close(unsharded(linear->weight.grad()), reference->weight.grad(), "weight");
          expect_close(unsharded(linear->bias.grad()), reference->bias.grad(), "bias");
        });
      }
    }
  }
}

/// The same beside another dim of the mesh, however the input is placed there.
TEST(Styles, LocalOutputsOnTwoDimsOfMesh) {
  const std::vector<std::vector<int64_t>> shapes{{4, 6}, {4, 2, 6}};
  for (const auto& shape : shapes) {
    torch::nn::Linear reference(6, 8);
    fill(*reference);
    const at::Tensor expected = reference(small(shape));
    const at::Tensor weights = testing::numbers(expected.sizes(), 3);
    (expected * weights).sum().backward();
    for (const Placement& input : {Replicate(), Shard(0), Shard(1), Partial()}) {
      for (const Placement& output : {Replicate(), Shard(0), Shard(-1), Partial()}) {
        run(4, [&] {
          const std::string what = c10::str(" of ", shape, " from ", input, " to ", output);
          const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
          auto call = [&](torch::nn::Linear linear, bool use_local_output) {
            fill(*linear);
            parallelize_module(
                *linear, mesh,
                ColwiseParallel({.output_layouts = output, .use_local_output = use_local_output}),
                {.dim = "tp"});
            return linear(distribute_tensor(small(shape), mesh, {input, Replicate()}, std::nullopt));
          };
          torch::nn::Linear linear(6, 8);
          const at::Tensor actual = call(linear, true);
          ASSERT_FALSE(DTensor::is_dtensor(actual));
          Placements placements = DTensor(call(torch::nn::Linear(6, 8), false)).placements();
          expect_close(DTensor::from_local(actual.detach(), mesh, placements).full_tensor(),
                       expected.detach(), "output" + what);
          for (Placement& each : placements)
            if (each.is_partial()) each = Replicate();
          (actual * distribute_tensor(weights, mesh, placements, std::nullopt).to_local()).sum().backward();
          expect_close(unsharded(linear->weight.grad()), reference->weight.grad(), "weight" + what);
          expect_close(unsharded(linear->bias.grad()), reference->bias.grad(), "bias" + what);
        });
      }
    }
  }
}

/// Of a plain input each rank knows its own shard alone, and shards may be uneven and empty.
TEST(Styles, UnevenPlainInputs) {
  auto shard_along = [](int64_t dim) {
    return [dim](const at::Tensor& x, const DeviceMesh& mesh) {
      return DTensor(replicated(x, mesh)).redistribute({Shard(dim)}).to_local();
    };
  };
  for (const int64_t ranks : {4, 6}) {
    compare([] { return Mlp(); }, small({2, 4, 6}), {ranks},
            [](Module& module, const DeviceMesh& mesh) {
              parallelize_module(
                  module, mesh,
                  {{"up", ColwiseParallel({.use_local_output = true})}, {"down", RowwiseParallel()}});
            },
            as_it_is, call_forward);
  }
  for (const int64_t dim : {0, 1, 2}) {
    compare([] { return torch::nn::Linear(6, 7); }, small({3, 5, 6}), {4},
            with_style(ColwiseParallel({.input_layouts = Shard(dim)})), shard_along(dim), call_forward);
  }
  for (const int64_t length : {7, 5, 1}) {
    compare([] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})); }, small({3, length, 6}), {4},
            with_style(SequenceParallel()), shard_along(1), call_forward);
  }
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    torch::nn::LayerNorm module(torch::nn::LayerNormOptions({6}));
    parallelize_module(*module, mesh, SequenceParallel());
    expect_error<c10::ValueError>(
        [&] {
          module(small({3, get_rank() == 0 ? 2 : 5, 6}));
        },
        {"SequenceParallel", "[3, 7, 6]", "as torch.chunk splits"});
  });
}

TEST(Styles, Embeddings) {
  const at::Tensor indices = at::remainder(at::arange(12, at::kLong) * 5, 7).view({3, 4});
  const auto make = [] { return torch::nn::Embedding(7, 5); };
  for (const Placement& output : {Replicate(), Shard(0), Shard(1), Shard(-1)}) {
    compare(make, indices, {3}, with_style(RowwiseParallel({.output_layouts = output})), as_it_is,
            call_forward);
    compare(make, indices, {3}, with_style(ColwiseParallel({.output_layouts = output})), as_it_is,
            call_forward);
  }
}

/// Where ranks have partial values of the gradient of a layer's input, they are reduced where it begins:
/// those of a sharded input in one reduce-scatter.
TEST(Styles, GradientsOfInputsAreReducedOnce) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    torch::nn::Linear linear(6, 8);
    parallelize_module(*linear, mesh, ColwiseParallel());
    for (const auto& [placement, collective] :
         {std::pair{Replicate(), "all_reduce"}, {Shard(0), "reduce_scatter"}}) {
      const at::Tensor x = distribute_tensor(small({4, 6}).requires_grad_(), mesh, {placement});
      const at::Tensor y = x * 1;
      y.retain_grad();
      const at::Tensor loss = linear(y).sum();
      const CommDebugMode counts;
      loss.backward();
      EXPECT_EQ(DTensor(y.grad()).placements(), Placements{placement});
      EXPECT_EQ(counts.calls(collective), 1) << counts;
      EXPECT_EQ(counts.get_total_counts(), 1) << counts;
    }
  });
}

/// Projections of one input to queries, keys and values: their partial gradients are added up, and reduced once.
TEST(Styles, LayersThatShareAnInputShareTheReductionOfItsGradient) {
  using Layers = std::vector<torch::nn::Linear>;
  const auto loss_of = [](Layers& layers, const at::Tensor& input) {
    at::Tensor sum;
    for (const size_t i : c10::irange(layers.size())) {
      const at::Tensor output = layers[i](input).pow(2).sum();
      sum = sum.defined() ? sum + output : output;
    }
    return sum;
  };
  const auto make = [] {
    Layers layers;
    for (const int64_t i : c10::irange(3)) {
      layers.emplace_back(6, 8);
      layers.back()->weight.detach().copy_(small({8, 6}, i));
      layers.back()->bias.detach().copy_(small({8}, i));
    }
    return layers;
  };
  const at::Tensor plain = small({4, 6}).requires_grad_();
  Layers reference = make();
  loss_of(reference, plain).backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Layers layers = make();
    for (auto& layer : layers) parallelize_module(*layer, mesh, ColwiseParallel());
    for (const auto& [placement, collective] :
         {std::pair{Replicate(), "all_reduce"}, {Shard(0), "reduce_scatter"}}) {
      const at::Tensor x = distribute_tensor(plain.detach(), mesh, {placement}).requires_grad_();
      // Gathered once, as by PrepareModuleInput.
      const at::Tensor input = placement.is_shard() ? DTensor(x).redistribute({Replicate()}) : x;
      for (int repeat = 0; repeat < 2; ++repeat) {
        x.mutable_grad().reset();
        const at::Tensor loss = loss_of(layers, input);
        const at::Tensor reduced = DTensor(loss).redistribute({Replicate()});
        const CommDebugMode counts;
        reduced.backward({}, /*retain_graph=*/true);
        EXPECT_EQ(counts.calls(collective), 1) << counts;
        EXPECT_EQ(counts.get_total_counts(), 1) << counts;
        EXPECT_EQ(DTensor(x.grad()).placements(), Placements{placement});
        expect_close(DTensor(x.grad()).full_tensor(), plain.grad(), "input");
      }
    }
  });
}

/// The reduction is shared only among uses of the same value.
TEST(Styles, InputsThatAreWrittenBetweenLayersDoNotShareTheReduction) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    torch::nn::Linear first(6, 8), second(6, 8);
    for (auto* layer : {&first, &second}) {
      (*layer)->weight.requires_grad_(false);  // so that it does not save its input
      parallelize_module(**layer, mesh, ColwiseParallel());
    }
    const at::Tensor x = distribute_tensor(small({4, 6}), mesh, {Replicate()}).requires_grad_();
    at::Tensor y = x * 1;
    at::Tensor sum = first(y).sum();
    y.add_(x);
    sum = sum + second(y).sum();
    sum.backward();
    const at::Tensor expected =
        (DTensor(first->weight).full_tensor() + 2 * DTensor(second->weight).full_tensor()).sum(0);
    expect_close(DTensor(x.grad()).full_tensor(), expected.expand({4, 6}), "input");
  });
}

/// Bags of any length: offsets and weights are replicated if they are plain.
TEST(Styles, EmbeddingBagsWithOffsets) {
  const at::Tensor indices = at::remainder(at::arange(12, at::kLong) * 5, 7);
  const at::Tensor offsets = at::tensor({0, 3, 3, 10}, at::kLong);
  const auto make = [] {
    return torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(7, 6).mode(torch::kSum));
  };
  const auto forward = [&](auto& module, const at::Tensor& input) {
    return module->forward(input, offsets, small({12}, 5));
  };
  for (const ParallelStyle& style : {ParallelStyle(ColwiseParallel()), ParallelStyle(RowwiseParallel())})
    compare(make, indices, {3}, with_style(style), as_it_is, forward);
}

/// A model that splits an output finds each piece sharded.
TEST(Styles, OutputsThatAreSplit) {
  const auto forward = [](auto& module, const at::Tensor& input) {
    const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden, true);
    const auto pieces = module->forward(input).chunk(3, -1);
    return pieces[0] * pieces[1] + pieces[2];
  };
  compare([] { return torch::nn::Linear(6, 12); }, small({3, 6}), {2},
          with_style(ColwiseParallel({.blocks = 3})), replicated, forward);
  expect_error<c10::ValueError>([] { ColwiseParallel({.blocks = 0}); }, {"blocks", "got 0"});
}

TEST(Styles, Convolutions) {
  const auto conv = [] { return torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).padding(1)); };
  const auto transposed = [] {
    return torch::nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(4, 6, 3));
  };
  compare(conv, small({2, 4, 5, 5}), {2}, with_style(ColwiseParallel()), replicated, call_forward);
  compare(conv, small({2, 4, 5, 5}), {2}, with_style(RowwiseParallel()), replicated, call_forward);
  compare(transposed, small({2, 4, 5}), {2}, with_style(ColwiseParallel()), replicated, call_forward);
  compare(transposed, small({2, 4, 5}), {2}, with_style(RowwiseParallel()), replicated, call_forward);
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    torch::nn::Conv2d module = conv();
    parallelize_module(*module, mesh, ColwiseParallel());
    EXPECT_EQ(DTensor(module(small({2, 4, 5, 5}))).placements(), Placements{Shard(1)});
  });
}

struct SequenceBlockImpl : Module {
  SequenceBlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    mlp = register_module("mlp", Mlp());
    last = register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
  }
  at::Tensor forward(const at::Tensor& x) { return last(mlp->forward(norm(x))); }
  torch::nn::LayerNorm norm{nullptr}, last{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(SequenceBlock);

TEST(Styles, SequenceParallel) {
  for (const int64_t length : {4, 5, 1}) {  // even, uneven, and an empty shard
    compare([] { return SequenceBlock(); }, small({3, length, 6}), {2},
            [](Module& module, const DeviceMesh& mesh) {
              parallelize_module(module, mesh,
                                 {{"norm", SequenceParallel()},
                                  {"mlp.up", ColwiseParallel()},
                                  {"mlp.down", RowwiseParallel({.output_layouts = Shard(1)})},
                                  {"last", SequenceParallel()}});
            },
            replicated,
            [](auto& module, const at::Tensor& input) {
              const at::Tensor output = module->forward(input);
              if (DTensor::is_dtensor(output)) EXPECT_EQ(DTensor(output).placements(), Placements{Shard(1)});
              return output;
            });
  }
}

TEST(Styles, MultiheadAttention) {
  const auto forward = [](auto& module, const at::Tensor& x) {
    return std::get<0>(module->forward(x, x, x));
  };
  const auto make = [] { return torch::nn::MultiheadAttention(8, 4); };
  compare(make, small({3, 2, 8}), {2}, with_style(ColwiseParallel()), replicated, forward);
  const auto other = [] {
    return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 4).kdim(6).vdim(6));
  };
  const auto with_memory = [](auto& module, const at::Tensor& x) {
    return std::get<0>(module->forward(x, x.slice(2, 0, 6), x.slice(2, 0, 6)));
  };
  compare(other, small({3, 2, 8}), {2}, with_style(ColwiseParallel()), replicated, with_memory);
  run(3, [] {
    torch::nn::MultiheadAttention module(8, 4);
    expect_error<c10::ValueError>(
        [&] { parallelize_module(*module, init_device_mesh(at::kCPU, {3}), ColwiseParallel()); },
        {"4 heads", "3 ranks"});
  });
}

TEST(Styles, TransformerEncoder) {
  const auto make = [] {
    return torch::nn::TransformerEncoder(
        torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0)),
        2);
  };
  compare(
      make, small({3, 2, 8}), {2},
      [](Module& module, const DeviceMesh& mesh) {
        parallelize_module(module, mesh,
                           {{"layers.*.self_attn", ColwiseParallel()},
                            {"layers.*.linear1", ColwiseParallel()},
                            {"layers.*.linear2", RowwiseParallel()}});
        distribute_module(module, mesh);
      },
      replicated, call_forward);
}

/// A user's module, whose parameters and buffers are members of its own.
struct ScaledImpl : Module {
  ScaledImpl() {
    scale = register_parameter("scale", torch::ones({6}));
    shift = register_buffer("shift", torch::ones({6}));
    extra = {register_parameter("extra", torch::ones({6}))};
  }
  at::Tensor forward(const at::Tensor& x) { return x * scale + shift * extra[0]; }
  at::Tensor scale, shift;
  std::vector<at::Tensor> extra;
};
TORCH_MODULE(Scaled);

TEST(DistributeModule, NeedsToKnowMembers) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Scaled module;
    expect_error<c10::Error>([&] { distribute_module(*module, mesh); },
                             {"parameter 'scale' of the module", "ScaledImpl", "register_members<M>"});
    EXPECT_FALSE(DTensor::is_dtensor(module->scale));
    EXPECT_TRUE(module->scale.is_same(module->parameters()[0]));  // nothing has changed
  });
  register_members<ScaledImpl>(&ScaledImpl::scale, &ScaledImpl::shift, &ScaledImpl::extra);
  compare([] { return Scaled(); }, small({4, 6}), {2},
          [](Module& module, const DeviceMesh& mesh) {
            distribute_module(module, mesh, [](const std::string&, Module& each, const DeviceMesh& on) {
              distribute_parameter(each, "scale", on, {Shard(0)});
            });
            auto& scaled = *module.as<ScaledImpl>();
            EXPECT_EQ(DTensor(scaled.scale).placements(), Placements{Shard(0)});
            EXPECT_EQ(DTensor(scaled.shift).placements(), Placements{Replicate()});
            EXPECT_TRUE(scaled.shift.is_same(module.buffers()[0]));
            EXPECT_TRUE(scaled.extra[0].is_same(module.named_parameters()["extra"]));
          },
          replicated, call_forward);
}

TEST(DistributeModule, RefusesWhatOthersHold) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Mlp module;
    const auto parameters = module->parameters();
    expect_error<c10::Error>(
        [&] {
          parallelize_module(*module, mesh, {{"up", ColwiseParallel()}});
        },
        {"'weight' of 'up'", "optimiser"});
  });
}

TEST(DistributeModule, CallsFunctionsAroundForward) {
  for (const bool by_call : {false, true}) {
    compare(
        [] { return Mlp(); }, small({4, 6}), {2},
        [&](Module& module, const DeviceMesh& mesh) {
          const auto to_dtensor = [](std::vector<at::Tensor>& tensors, const DeviceMesh& on) {
            if (!DTensor::is_dtensor(tensors.at(0)))
              tensors[0] = DTensor::from_local(tensors[0], on, {Replicate()});
          };
          const auto to_local = [](std::vector<at::Tensor>& tensors, const DeviceMesh&) {
            tensors.at(0) = DTensor(tensors.at(0)).full_tensor();
          };
          // Around a module of libtorch always; around one's own where it is called by `call`.
          distribute_module(by_call ? module : *module.as<MlpImpl>()->up, mesh, {}, to_dtensor);
          distribute_module(module, mesh, {}, {}, by_call ? PrepareFn(to_local) : PrepareFn());
        },
        as_it_is,
        [&](auto& module, const at::Tensor& x) { return by_call ? call(module, x) : module->forward(x); });
  }
}

/// Two inputs and two outputs, and something that is no tensor.
struct PairImpl : Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& a, double factor, const at::Tensor& b) {
    EXPECT_EQ(DTensor::is_dtensor(a), expects_distributed);
    if (expects_distributed) EXPECT_EQ(DTensor(a).placements(), Placements{Shard(0)});
    return {a * factor, b};
  }
  bool expects_distributed = true;
};
TORCH_MODULE(Pair);

TEST(Styles, PrepareInputsAndOutputs) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor a = small({4, 6}), b = small({3});
    Pair module;
    parallelize_module(
        *module, mesh,
        PrepareModuleInputOutput(
            {.input_layouts = {Replicate(), std::nullopt}, .desired_input_layouts = {Shard(0), std::nullopt}},
            {.output_layouts = {Shard(0), Replicate()}, .desired_output_layouts = {Replicate(), Shard(0)}}));
    const auto [first, second] = call(module, a, 2.0, b);
    EXPECT_EQ(DTensor(first).placements(), Placements{Replicate()});
    EXPECT_EQ(DTensor(second).placements(), Placements{Shard(0)});
    expect_close(unsharded(first), a * 2, "first");
    expect_close(unsharded(second), b, "second");

    Pair local;
    local->expects_distributed = false;
    parallelize_module(*local, mesh,
                       PrepareModuleInput({.input_layouts = {Replicate(), std::nullopt},
                                           .desired_input_layouts = {Shard(0), std::nullopt},
                                           .use_local_output = true}));
    EXPECT_EQ(std::get<0>(call(local, a, 2.0, b)).size(0), 2);
    EXPECT_EQ(std::get<0>(module->forward(DTensor::from_local(a, mesh, {Shard(0)}), 1, b)).size(0), 8);

    // Without a desired layout distributed tensors stay as they are.
    Pair kept;
    parallelize_module(*kept, mesh,
                       PrepareModuleInput({.input_layouts = {Replicate(), std::nullopt},
                                           .desired_input_layouts = {std::nullopt, std::nullopt}}));
    EXPECT_EQ(DTensor(std::get<0>(call(kept, at::Tensor(DTensor::from_local(a, mesh, {Shard(0)})), 1.0, b)))
                  .placements(),
              Placements{Shard(0)});

    // Around a module of libtorch.
    Mlp mlp;
    fill(*mlp);
    const at::Tensor expected = mlp(a).detach();
    parallelize_module(*mlp, mesh,
                       {{"up", ColwiseParallel()},
                        {"down", RowwiseParallel()},
                        {"down", PrepareModuleOutput({.output_layouts = {Replicate()},
                                                      .desired_output_layouts = {Shard(0)}})}});
    const at::Tensor output = mlp(a);
    EXPECT_EQ(DTensor(output).placements(), Placements{Shard(0)});
    expect_close(unsharded(output), expected, "output");

    expect_error<c10::ValueError>(
        [] { PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {}}); },
        {"PrepareModuleInput", "1 layouts", "0 desired"});
    expect_error<c10::ValueError>(
        [&] {
          call(module, a, 2.0, at::Tensor(b));
          module->expects_distributed = true;
          parallelize_module(
              *module, mesh,
              PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Shard(0)}}));
          call(module, a, 2.0, b);
        },
        {"2 tensors", "1 layouts"});
  });
}

struct TiedImpl : Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(9, 4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 9).bias(false)));
    head->weight = embedding->weight;
  }
  at::Tensor forward(const at::Tensor& x) { return head(embedding(x)); }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tied);

TEST(Styles, TiedWeights) {
  Tied reference;
  fill(*reference);
  const at::Tensor indices = at::arange(6, at::kLong).view({2, 3});
  const at::Tensor expected = reference->forward(indices);
  (expected * testing::numbers(expected.sizes(), 3)).sum().backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Tied module;
    fill(*module);
    // Each use of the weight has its own style.
    parallelize_module(*module, mesh, {{"embedding", RowwiseParallel()}});
    EXPECT_TRUE(module->head->weight.is_same(module->embedding->weight));
    add_hooks(*module->head, {}, [&](std::vector<at::Tensor>& tensors) {
      EXPECT_EQ(DTensor(tensors.at(0)).placements(), Placements{Shard(2)});
    });
    const at::Tensor actual = module->forward(indices);
    EXPECT_EQ(DTensor(actual).placements(), Placements{Shard(2)});
    expect_close(unsharded(actual.detach()), expected.detach(), "output");
    (actual * distribute_tensor(testing::numbers(expected.sizes(), 3), mesh, {Replicate()})).sum().backward();
    expect_close(unsharded(module->embedding->weight.grad()), reference->embedding->weight.grad(), "weight");
  });
}

TEST(Styles, NamesWithWildcards) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    torch::nn::Sequential module(Mlp(), torch::nn::ReLU(), torch::nn::Linear(5, 5));
    parallelize_module(*module, mesh,
                       {{"[02]", ParallelStyle([&](Module& each, const ParallelDim& where) {
                           EXPECT_TRUE(each.as<MlpImpl>() || each.as<torch::nn::LinearImpl>());
                           EXPECT_EQ(where.mesh, mesh);
                         })},
                        {"*.u?", ColwiseParallel()},
                        {"0.down", RowwiseParallel()},
                        {"", SequenceParallel()}});
    EXPECT_TRUE(DTensor::is_dtensor(module->named_parameters()["0.up.weight"]));
    EXPECT_FALSE(DTensor::is_dtensor(module->named_parameters()["2.weight"]));
    expect_error<c10::ValueError>(
        [&] {
          parallelize_module(*module, mesh, {{"0.upp", ColwiseParallel()}});
        },
        {"\"0.upp\" matches nothing", "\"upp\"", "up", "down"});
    expect_error<c10::NotImplementedError>(
        [&] {
          parallelize_module(*module, mesh, {{"1", ColwiseParallel()}});
        },
        {"ColwiseParallel", "ReLU", "Linear"});
    expect_error<c10::ValueError>(
        [&] {
          parallelize_module(*module, mesh, {{"0.up", RowwiseParallel()}});
        },
        {"'weight'", "S(0) already", "S(1)"});
  });
}

TEST(Styles, SayWhatIsWrong) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    Mlp module;
    expect_error<c10::ValueError>(
        [&] {
          parallelize_module(*module, mesh, {{"up", ColwiseParallel()}});
        },
        {"mesh(dp=2, tp=2) has 2 dims", ".dim"});
    parallelize_module(*module, mesh, {{"up", ColwiseParallel()}}, {.dim = "tp"});
    expect_error<c10::ValueError>(
        [&] {
          module->up(small({4, 6}));
        },
        {"ColwiseParallel", "plain tensor", "mesh(dp=2, tp=2)", "from_local"});
    const DTensor elsewhere = distribute_tensor(small({4, 6}), mesh["tp"], {Replicate()});
    expect_error<c10::ValueError>([&] { module->up(elsewhere); }, {"mesh(tp=2)", "mesh(dp=2, tp=2)"});
    expect_error<c10::ValueError>([&] { distribute_parameter(*module->up, "weigth", mesh, {Replicate()}); },
                                  {"weigth", "weight", "bias"});
    expect_error<c10::ValueError>(
        [&] { distribute_parameter(*module->up, "weight", mesh["tp"], {Replicate()}); },
        {"'weight'", "is distributed already, on mesh(dp=2, tp=2)"});
    torch::nn::Embedding embedding(4, 6);
    parallelize_module(*embedding, mesh, ColwiseParallel(), {.dim = "tp"});
    const torch::NoGradGuard no_grad;
    expect_error<c10::ValueError>([&] { small({4, 6}).add_(embedding->weight); }, {"add_", "plain"});
  });
}

/// Styles hold where nothing is recorded, where the dtype is another one, and under autocast.
TEST(Styles, HoldInOtherModes) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Mlp module, reference;
    fill(*module);
    fill(*reference);
    parallelize_module(*module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    const at::Tensor x = small({4, 6});
    {
      const c10::InferenceMode inference;
      expect_close(unsharded(module(x)), reference(x), "inference mode");
    }
    {
      const torch::NoGradGuard no_grad;
      expect_close(unsharded(module(x)), reference(x), "without gradients");
    }
    module->to(at::kDouble);
    reference->to(at::kDouble);
    EXPECT_EQ(DTensor(module->up->weight).placements(), Placements{Shard(0)});
    EXPECT_EQ(module->up->weight.scalar_type(), at::kDouble);
    expect_close(unsharded(module(x.to(at::kDouble)).detach()), reference(x.to(at::kDouble)).detach(),
                 "double");
    module->to(at::kFloat);
    reference->to(at::kFloat);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor output = module(x), expected = reference(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_LT((unsharded(output.detach()) - expected.detach()).abs().max().item<float>(), 0.01);
  });
}

}  // namespace
}  // namespace tessera
