// What neural networks are made of: normalisation, losses, embeddings, attention, convolution, pooling; and
// linear algebra.

#include <tessera/comm/run.h>

#include <torch/csrc/autograd/autograd.h>

#include "tests/rules/families.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace testing;

class LayerFamilies : public Families {};

INSTANTIATE_TEST_SUITE_P(Meshes, LayerFamilies,
                         ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

/// Batches are aligned from the right, and may be broadcast.
TEST_P(LayerFamilies, LinearAlgebraOfBatches) {
  auto matrices = [](at::IntArrayRef batch) {
    std::vector<int64_t> shape = batch.vec();
    shape.insert(shape.end(), {3, 3});
    return numbers(shape) * 0.1 + 4 * at::eye(3);
  };
  auto solve = [](const Tensors& x) { return at::linalg_solve(x[0], x[1]); };
  auto triangular = [](const Tensors& x) { return at::linalg_solve_triangular(x[0].triu(), x[1], true); };
  for (const auto& function : {Function(solve), Function(triangular)}) {
    check(function, {matrices({2}), numbers({2, 2, 3, 1}, 1)}, false);
    check(function, {matrices({2, 2}), numbers({2, 3, 1}, 1)}, false);
    check(function, {matrices({3}), numbers({3, 2}, 1)}, false);
    check(function, {matrices({5}), numbers({5, 3, 2}, 1)}, false);
  }
  check(solve, {matrices({5}), numbers({5, 3}, 1)}, false);
}

TEST(LinearAlgebra, OneBadMatrixIsAnErrorOnEveryRank) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    at::Tensor plain = at::eye(3).repeat({4, 1, 1});
    plain.select(0, 1).neg_();
    EXPECT_THROW(at::linalg_cholesky(distribute_tensor(plain, mesh, {Shard(0)})), c10::Error);
    EXPECT_THROW(at::linalg_inv(distribute_tensor(plain * 0, mesh, {Shard(0)})), c10::Error);
  });
}

/// So that the gradient of the weight of a linear layer, which is multiplied by transposed, needs no copy.
TEST(Products, TheGradientOfAMatrixLiesAsTheMatrix) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor plain = numbers({2, 4, 3}, 1);
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(1)});
    for (const bool transposed : {false, true}) {
      const at::Tensor values = transposed ? numbers({5, 3}).t() : numbers({3, 5});
      const at::Tensor matrix = (transposed ? distribute_tensor(values.t(), mesh, {Replicate()}).t()
                                            : at::Tensor(distribute_tensor(values, mesh, {Replicate()})))
                                    .detach()
                                    .requires_grad_();
      const at::Tensor found = torch::autograd::grad({at::matmul(x, matrix).pow(2).sum()}, {matrix})[0];
      EXPECT_EQ(found.strides(), matrix.strides());
      const at::Tensor alone = values.detach().clone().requires_grad_();
      const at::Tensor expected = torch::autograd::grad({at::matmul(plain, alone).pow(2).sum()}, {alone})[0];
      EXPECT_TRUE(at::allclose(DTensor(found).full_tensor(), expected)) << transposed;
    }
  });
}

/// What autograd does not need for a product, it does not keep.
TEST(Products, WithoutAGradientOfOneSide) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor weight = distribute_tensor(numbers({3, 4}), mesh, {Shard(1)});
    const at::Tensor bias = distribute_tensor(numbers({3}), mesh, {Replicate()}).requires_grad_();
    for (const auto& product : {Function([](const Tensors& t) { return at::matmul(t[0], t[1].t()); }),
                                Function([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }),
                                Function([](const Tensors& t) {
                                  return at::einsum("btk,nk->btn", {t[0], t[1]});
                                })}) {
      const at::Tensor x = distribute_tensor(numbers({2, 5, 4}, 1), mesh, {Shard(1)}).requires_grad_();
      at::Tensor written = x * 1;
      const at::Tensor y = product({written, weight, bias});
      written.add_(1);
      y.sum().backward();
      expect_close(DTensor(x.grad()).full_tensor(), numbers({3, 4}).sum(0).expand({2, 5, 4}), "gradient");
    }
    expect_close(DTensor(bias.grad()).full_tensor(), at::full({3}, 10.0), "bias");
  });
}

TEST_P(LayerFamilies, Softmax) {
  for (const int64_t dim : {0, 1}) {
    matrices([dim](const Tensors& x) { return at::softmax(x[0], dim); });
    matrices([dim](const Tensors& x) { return at::log_softmax(x[0], dim); });
  }
  check([](const Tensors& x) { return at::softmax(x[0].to(at::kBFloat16), 0).to(at::kFloat) * 0; },
        {numbers({5, 3})});
}
TEST_P(LayerFamilies, Norms) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor x0 = numbers({size, 3, 4}) * 0.3, w = numbers({4}, 1), b = numbers({4}, 2);
    check([](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1], x[2]); }, {x0, w, b});
    check([](const Tensors& x) { return at::layer_norm(x[0], {3, 4}); }, {x0});
    check([](const Tensors& x) { return at::rms_norm(x[0], {4}, x[1]); }, {x0, w});
    const at::Tensor image = numbers({size, 4, 3, 2}) * 0.3;
    check([](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); }, {image, w, b});
    check([](const Tensors& x) { return at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false); },
          {image, w, b});
    check(
        [](const Tensors& x) {
          return at::batch_norm(x[0], x[1], x[2], x[1].detach() * 0.1, x[1].detach() * 0 + 2, false, 0.1,
                                1e-5, false);
        },
        {image, w, b});
    check(
        [](const Tensors& x) {
          const at::Tensor mean = x[1].detach() * 0.1, var = x[1].detach() * 0 + 2;
          return std::get<0>(at::_native_batch_norm_legit_no_training(x[0].detach(), x[1].detach(),
                                                                      x[2].detach(), mean, var, 0.1, 1e-5)) +
                 x[0] * 0;
        },
        {image, w, b});
    check(
        [](const Tensors& x) {
          at::Tensor mean = at::zeros_like(x[1]).detach(), var = at::ones_like(x[1]).detach();
          const at::Tensor y = at::batch_norm(x[0], x[1], x[2], mean, var, true, 0.3, 1e-5, false);
          return y + mean.view({1, 4, 1, 1}) + var.view({1, 4, 1, 1});
        },
        {image, w, b});
  }
}
TEST_P(LayerFamilies, ElementwiseLosses) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3}) * 0.1, b = numbers({size, 3}, 2) * 0.1, p = a * 0.8 + 0.5;
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      check([=](const Tensors& x) { return at::mse_loss(x[0], x[1], reduction); }, {a, b});
      check([=](const Tensors& x) { return at::l1_loss(x[0], x[1], reduction); }, {a, b});
      check([=](const Tensors& x) { return at::smooth_l1_loss(x[0], x[1], reduction, 0.3); }, {a, b});
      check([=](const Tensors& x) { return at::huber_loss(x[0], x[1], reduction, 0.3); }, {a, b});
      check([=](const Tensors& x) { return at::kl_div(x[0], x[1], reduction); }, {a, p});
      check([=](const Tensors& x) { return at::soft_margin_loss(x[0], x[1].detach(), reduction); }, {a, b});
      check([=](const Tensors& x) { return at::binary_cross_entropy(x[0], x[1].detach(), {}, reduction); },
            {p.clamp(0.01, 0.99), p.flip(0).clamp(0.01, 0.99).contiguous()});
      check(
          [=](const Tensors& x) {
            return at::binary_cross_entropy_with_logits(x[0], x[1].detach(), {}, x[2].detach(), reduction);
          },
          {a, p, numbers({3}) * 0.1 + 1});
    }
  }
}
TEST_P(LayerFamilies, Linear) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor x = numbers({size, 3, 4}), w = numbers({6, 4}, 1), b = numbers({6}, 2);
    check([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }, {x, w, b});
    check([](const Tensors& t) { return at::linear(t[0], t[1]); }, {x.transpose(0, 1), w});
    check([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }, {numbers({2, size, 3, 4}), w, b});
    check([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
          {numbers({3, size}), numbers({6, size}), b});
    check([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
          {numbers({size}), numbers({6, size}), b});
    check([](const Tensors& t) { return at::linear(t[0], t[1]); }, {x, numbers({4})});
    check([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }, {x, w, numbers({1})});
  }
}
TEST_P(LayerFamilies, Matmul) {
  auto product = [](const Tensors& t) { return at::matmul(t[0], t[1]); };
  for (const int64_t size : {5, 8, 2}) {
    check(product, {numbers({size, 3, 4}), numbers({4, 6}, 1)});
    check([](const Tensors& t) { return at::matmul(t[0], t[1].t()); },
          {numbers({size, 3, 4}), numbers({6, 4}, 1)});
    check(product, {numbers({2, size, 3, 4}), numbers({2, size, 4, 3}, 1)});
    check(product, {numbers({size, 1, 3, 4}), numbers({2, 4, 3}, 1)});
    check(product, {numbers({3, size}), numbers({2, size, 3}, 1)});
    check(product, {numbers({size}), numbers({2, size, 3}, 1)});
    check(product, {numbers({2, 3, size}), numbers({size}, 1)});
    check(product, {numbers({size}), numbers({size}, 1)});
    check(product, {numbers({3, size}), numbers({size}, 1)});
  }
}
TEST_P(LayerFamilies, Einsum) {
  auto einsum = [](const char* equation) {
    return [equation](const Tensors& t) { return at::einsum(equation, t); };
  };
  for (const int64_t size : {5, 8, 2}) {
    check(einsum("bhmk,bhnk->bmhn"), {numbers({2, size, 3, 4}), numbers({2, size, 2, 4}, 1)});
    check(einsum("...k,nk"), {numbers({size, 3, 4}), numbers({2, 4}, 1)});
    check(einsum("ab,bc,cd->da"), {numbers({size, 2}), numbers({2, 3}, 1), numbers({3, 4}, 2)});
    check(einsum("ij,kl->k"), {numbers({size, 2}), numbers({3, size}, 1)});
    check(einsum("ii,ij->j"), {numbers({size, size}), numbers({size, 3}, 1)});
    check(einsum("ij->j"), {numbers({size, 3})});
    check(einsum("ij,ij->i"), {numbers({size, 3}), numbers({size, 1})});
  }
}
/// Gradients of gradients, and those of complex numbers.
TEST(LayersGradients, OfProducts) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    for (const int way : {0, 1, 2}) {
      const bool is_linear = way == 0;
      for (const Placements& sharded :
           {Placements{Shard(0), Shard(1)}, {Shard(2), Shard(0)}, {Replicate(), Shard(1)}}) {
        for (const at::ScalarType dtype : {at::kDouble, at::kComplexDouble}) {
          auto second = [&](bool distributed) {
            Tensors inputs{numbers({3, 5, 4}),
                           numbers(is_linear ? at::IntArrayRef{6, 4} : at::IntArrayRef{4, 6}, 1)};
            for (at::Tensor& input : inputs) {
              input = (input * at::ones({}, dtype) + (dtype == at::kDouble ? 0 : 1)).to(dtype);
              if (dtype == at::kComplexDouble)
                input = input * at::scalar_tensor(c10::complex<double>(1, 0.5), dtype);
              const Placements placed = input.dim() == 3 ? sharded : Placements{Shard(1), Shard(0)};
              if (distributed) input = distribute_tensor(input, mesh, placed);
              input.requires_grad_();
            }
            const at::Tensor y = is_linear  ? at::linear(inputs[0], inputs[1])
                                 : way == 1 ? at::matmul(inputs[0], inputs[1])
                                            : at::einsum("abk,kn->nab", inputs);
            const auto first = torch::autograd::grad({at::abs(y * y).sum()}, inputs, {}, true, true);
            const auto of = at::abs(first[0] * first[0]).sum() + at::abs(first[1] * first[1]).sum();
            Tensors result = torch::autograd::grad({of}, inputs);
            for (at::Tensor& each : result) {
              if (distributed) each = DTensor(each).full_tensor();
            }
            return result;
          };
          const Tensors expected = second(false), actual = second(true);
          for (size_t i = 0; i < 2; ++i) expect_close(actual[i], expected[i], "second gradient");
        }
      }
    }
  });
}
TEST_P(LayerFamilies, CrossEntropy) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor logits = numbers({size, 4}) * 0.3, weight = numbers({4}, 1).abs() * 0.1 + 0.2;
    const at::Tensor target = at::remainder(at::arange(size) * 3, 4);
    const at::Tensor images = numbers({size, 4, 3}) * 0.3,
                     targets = at::remainder(at::arange(size * 3) * 3, 4).view({size, 3});
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      check([=](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction); },
            {logits, target}, false);
      check([=](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], x[2].detach(), reduction, 2); },
            {logits, target, weight}, false);
      check([=](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction, 1); },
            {images, targets}, false);
      check([=](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], {}, reduction, -100, 0.1); },
            {logits, target}, false);
    }
  }
}
TEST_P(LayerFamilies, Embedding) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor table = numbers({size, 3});
    const at::Tensor indices = at::remainder(at::arange(6) * 3, size).view({2, 3});
    check([](const Tensors& x) { return at::embedding(x[0], x[1]); }, {table, indices}, false);
    check([](const Tensors& x) { return at::embedding(x[0], x[1], 1); }, {table, indices}, false);
    check([](const Tensors& x) { return at::embedding(x[0], x[1], -1, /*scale_grad_by_freq=*/true); },
          {table, indices}, false);
  }
}
/// A rank never makes the gradient of rows that others have.
TEST(Embedding, GradientOfRowsThatAreSharded) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const at::Tensor indices = distribute_tensor(at::arange(6), mesh, {Shard(0), Replicate()}, std::nullopt);
    const at::Tensor table =
        distribute_tensor(numbers({1000, 4}), mesh, {Replicate(), Shard(0)}, std::nullopt).requires_grad_();
    at::embedding(table, indices).sum().backward();
    const DTensor gradient(table.grad());
    EXPECT_EQ(gradient.placements(), (Placements{Partial(), Shard(0)}));
    EXPECT_EQ(gradient.to_local().sizes(), (std::vector<int64_t>{500, 4}));
    for (const int64_t mode : {0, 1}) {
      table.mutable_grad() = at::Tensor();
      const at::Tensor offsets = distribute_tensor(at::tensor({0, 2}), mesh, {Replicate(), Replicate()});
      std::get<0>(at::embedding_bag(table, indices, offsets, false, mode)).sum().backward();
      EXPECT_EQ(DTensor(table.grad()).to_local().sizes(), (std::vector<int64_t>{500, 4}));
    }
  });
}
TEST_P(LayerFamilies, EmbeddingBag) {
  for (const int64_t size : {5, 2}) {
    const at::Tensor table = numbers({size, 3});
    const at::Tensor indices = at::remainder(at::arange(9) * 3 + 1, size), weights = numbers({9}, 4) + 6;
    const at::Tensor offsets = at::tensor({0, 2, 2, 7}), ends = at::tensor({0, 2, 2, 7, 9});
    for (const int64_t mode : {0, 1, 2}) {
      for (const std::optional<int64_t> padding : {std::optional<int64_t>(), {1}}) {
        check(
            [=](const Tensors& x) {
              return std::get<0>(at::embedding_bag(x[0], x[1], x[2], false, mode, false, {}, false, padding));
            },
            {table, indices, offsets}, false);
        check(
            [=](const Tensors& x) {
              return std::get<0>(at::embedding_bag(x[0], x[1], x[2], false, mode, false, {}, true, padding));
            },
            {table, indices, ends}, false);
        if (mode != 0) continue;
        check(
            [=](const Tensors& x) {
              return std::get<0>(
                  at::embedding_bag(x[0], x[1], x[2], false, mode, false, x[3], false, padding));
            },
            {table, indices, offsets, weights}, false);
      }
    }
    // Rows that are equal: the gradient goes to the first in the bag.
    check(
        [](const Tensors& x) {
          return std::get<0>(at::embedding_bag(x[0] * 0 + 1, x[1], x[2], false, 2, false, {}, false));
        },
        {table, indices, offsets}, false);
  }
}
TEST_P(LayerFamilies, Attention) {
  for (const int64_t size : {5, 2}) {
    const at::Tensor q = numbers({size, 4, 3, 2}) * 0.3, k = numbers({size, 4, 5, 2}, 1) * 0.3,
                     v = numbers({size, 4, 5, 2}, 2);
    check([](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2]); }, {q, k, v},
          false);
    check(
        [](const Tensors& x) {
          return at::scaled_dot_product_attention(x[0], x[1], x[1] * 2, {}, 0, true)
              .transpose(1, 2)
              .flatten(2);
        },
        {k, k.flip(2).contiguous()}, false);
    check([](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach()); },
          {q, k, v, numbers({3, 5}, 4)}, false);
    check(
        [](const Tensors& x) {
          return std::get<0>(at::_scaled_dot_product_attention_math(x[0], x[1], x[2]));
        },
        {q, k, v}, false);
  }
}
TEST_P(LayerFamilies, Convolution) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor image = numbers({size, 4, 5, 5}), w = numbers({8, 4, 3, 3}, 1) * 0.1,
                     b = numbers({8}, 2);
    check(
        [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], at::IntArrayRef{1}, at::IntArrayRef{1}); },
        {image, w, b});
    check(
        [](const Tensors& x) {
          return at::conv2d(x[0], x[1], at::Tensor(), at::IntArrayRef{2}, at::IntArrayRef{0},
                            at::IntArrayRef{1}, 2);
        },
        {image, numbers({8, 2, 3, 3}) * 0.1});
    check([](const Tensors& x) { return at::conv_transpose2d(x[0], x[1], x[2]); },
          {image, numbers({4, 8, 2, 2}, 1) * 0.1, b});
    check([](const Tensors& x) { return at::conv1d(x[0], x[1]); },
          {numbers({size, 4, 6}), numbers({4, 4, 2}) * 0.1});
    check([](const Tensors& x) { return at::conv3d(x[0], x[1], x[2]); },
          {numbers({size, 2, 3, 3, 3}), numbers({4, 2, 2, 2, 2}) * 0.1, numbers({4})});
  }
}
TEST_P(LayerFamilies, Pooling) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor image = numbers({size, 4, 4, 6});
    check([](const Tensors& x) { return at::max_pool2d(x[0], 2); }, {image});
    check([](const Tensors& x) { return at::avg_pool2d(x[0], 2); }, {image});
    check([](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], {2, 3}); }, {image});
    check([](const Tensors& x) { return at::upsample_nearest2d(x[0], {8, 12}) * 2; }, {image});
    check([](const Tensors& x) { return at::upsample_bilinear2d(x[0], {5, 5}, false); }, {image});
    check([](const Tensors& x) { return at::reflection_pad2d(x[0], {1, 1, 1, 1}); }, {image});
    check([](const Tensors& x) { return at::max_pool1d(x[0].flatten(2), 2); }, {image});
    check([](const Tensors& x) { return at::avg_pool1d(x[0].flatten(2), 2); }, {image});
  }
}
TEST_P(LayerFamilies, LinearAlgebra) {
  for (const int64_t size : {5, 8, 2}) {
    const at::Tensor a = numbers({size, 3, 3}) * 0.1 + at::eye(3) * 2;
    check([](const Tensors& x) { return at::linalg_inv(x[0]); }, {a});
    check([](const Tensors& x) { return at::linalg_inv(x[0]).reshape({-1}); }, {a});
    check([](const Tensors& x) { return at::linalg_det(x[0]) + std::get<1>(at::linalg_slogdet(x[0])); }, {a});
    check([](const Tensors& x) { return at::linalg_cholesky(at::matmul(x[0], x[0].mT())); }, {a});
    check([](const Tensors& x) { return std::get<0>(at::linalg_eigh(x[0] + x[0].mT())); }, {a});
    check([](const Tensors& x) { return at::linalg_solve(x[0], x[1]); }, {a, numbers({size, 3, 2})});
    check([](const Tensors& x) { return at::linalg_solve(x[0], x[1]); }, {a, numbers({size, 3})});
    check([](const Tensors& x) { return at::linalg_svdvals(x[0]); }, {a});
    check(
        [](const Tensors& x) {
          const auto [u, s, vh] = at::linalg_svd(x[0], false);
          return at::matmul(u * s.unsqueeze(-2), vh);
        },
        {a});
    check([](const Tensors& x) { return at::linalg_solve_triangular(x[0], x[1], true); },
          {a, numbers({size, 3, 2})});
    check([](const Tensors& x) { return at::cdist(x[0], x[1], 1.0); },
          {numbers({size, 3}), numbers({4, 3}, 1) + 0.5});
    check([](const Tensors& x) { return at::cdist(x[0], x[1], 3.0); },
          {numbers({2, size, 3}), numbers({2, 4, 3}, 1) + 0.5});
    check([](const Tensors& x) { return at::trace(x[0]); }, {numbers({size, 3})});
    check([](const Tensors& x) { return at::renorm(x[0], 2, 0, 3.0); }, {numbers({size, 3})});
    check([](const Tensors& x) { return at::_weight_norm(x[0], x[1], 0); },
          {numbers({size, 3}), numbers({size, 1}, 2)});
    check([](const Tensors& x) { return at::_weight_norm(x[0], x[1], 1); },
          {numbers({size, 3}), numbers({1, 3}, 2)});
    check(
        [](const Tensors& x) {
          // Squared, as some are 0, where abs has no gradient.
          return at::abs(at::fft_fft(x[0], {}, 0)).square() +
                 at::abs(at::fft_rfft(x[0], {}, 1)).square().sum();
        },
        {a});
    check([](const Tensors& x) { return at::view_as_real(at::view_as_complex(x[0]).conj() * 2); },
          {numbers({size, 3, 2})});
  }
}

TEST(LayersErrors, TargetThatIsNoClass) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor scores = distribute_tensor(numbers({3, 5}), mesh, {Shard(1)});
    for (const int64_t wrong : {5, -1}) {
      const at::Tensor target =
          distribute_tensor(at::tensor(std::vector<int64_t>{0, 1, wrong}), mesh, {Replicate()});
      expect_error<c10::IndexError>([&] { at::nll_loss(scores, target); },
                                    {"nll_loss_forward", "but must be classes from 0 to 4"});
      EXPECT_NO_THROW(at::nll_loss(scores, target, {}, at::Reduction::Sum, wrong));
    }
  });
}

TEST(LayersCommunication, NoneWhereNoneIsNeeded) {
  const Placement sum = Partial(), batch = Shard(0), same = Replicate();
  const at::Tensor x = numbers({5, 3, 4}) * 0.3, w = numbers({4}), image = numbers({5, 4, 4, 4});
  expect_no_communication([](const Tensors& t) { return at::softmax(t[0], 2); }, {x}, {batch}, batch, true);
  expect_no_communication([](const Tensors& t) { return at::layer_norm(t[0], {4}, t[1], t[1]); }, {x, w},
                          {batch, same}, batch, true);
  expect_no_communication([](const Tensors& t) { return at::layer_norm(t[0], {4}, t[1], t[1]); }, {x, w},
                          {Shard(1), same}, Shard(1), true);
  expect_no_communication([](const Tensors& t) { return at::group_norm(t[0], 2, t[1], t[1]); }, {image, w},
                          {batch, same}, batch, true);
  expect_no_communication([](const Tensors& t) { return at::mse_loss(t[0], t[0] * 2); }, {x}, {batch}, sum,
                          true);
  expect_no_communication([](const Tensors& t) { return at::conv2d(t[0], t[1]); },
                          {image, numbers({4, 4, 3, 3})}, {batch, same}, batch, true);
  expect_no_communication([](const Tensors& t) { return at::conv2d(t[0], t[1]); },
                          {image, numbers({4, 4, 3, 3})}, {same, batch}, Shard(1), true);
  expect_no_communication([](const Tensors& t) { return at::max_pool2d(t[0], 2); }, {image}, {batch}, batch,
                          true);
  for (const Placement& sharded : {Shard(0), Shard(1)}) {
    const at::Tensor q = numbers({4, 4, 3, 2}) * 0.3;
    expect_no_communication(
        [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true); },
        {q, q + 1, q + 2}, {sharded, sharded, sharded}, sharded, true);
  }
  const at::Tensor long_input = numbers({3, 5, 4}), weight = numbers({8, 4}), bias = numbers({8});
  auto linear = [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); };
  for (const Placement& sharded : {Shard(0), Shard(1)})
    expect_no_communication(linear, {long_input, weight, bias}, {sharded, same, same}, sharded, true);
  expect_no_communication(linear, {long_input, weight, bias}, {same, Shard(0), Shard(0)}, Shard(2), true);
  expect_no_communication(linear, {long_input, weight, bias}, {Shard(2), Shard(1), same}, sum, true);
  for (const Placement& sharded : {Shard(0), Shard(1)})
    expect_no_communication([](const Tensors& t) { return at::matmul(t[0], t[1].mT()); },
                            {numbers({2, 4, 3, 5}), numbers({2, 4, 6, 5})}, {sharded, sharded}, sharded,
                            true);
  expect_no_communication([](const Tensors& t) { return at::einsum("bthd,bshd->bhts", t); },
                          {numbers({2, 5, 4, 3}), numbers({2, 6, 4, 3})}, {Shard(2), Shard(2)}, Shard(1),
                          true);
  const at::Tensor indices = at::remainder(at::arange(6), 5);
  expect_no_communication([](const Tensors& t) { return at::embedding(t[0], t[1]); },
                          {numbers({5, 4}), indices}, {batch, same}, sum, true);
  expect_no_communication([](const Tensors& t) { return at::embedding(t[0], t[1]); },
                          {numbers({5, 4}), indices}, {same, batch}, batch, true);
  for (const int64_t mode : {0, 1}) {
    for (const auto& [of_table, of_result] : {std::pair{batch, sum}, {Shard(1), Shard(1)}}) {
      expect_no_communication(
          [mode](const Tensors& t) { return std::get<0>(at::embedding_bag(t[0], t[1], t[2], false, mode)); },
          {numbers({5, 4}), indices, at::tensor({0, 2, 3})}, {of_table, same, same}, of_result, true);
    }
  }
  expect_no_communication([](const Tensors& t) { return std::get<0>(at::linalg_solve_ex(t[0], t[1])); },
                          {at::eye(3).repeat({5, 1, 1}) * 2, numbers({5, 3, 2})}, {batch, batch}, batch,
                          true);
  expect_no_communication([](const Tensors& t) { return at::cdist(t[0], t[1], 1.0); },
                          {numbers({5, 3}), numbers({4, 3}, 1)}, {batch, same}, batch, true);
  expect_no_communication([](const Tensors& t) { return at::embedding(t[0], t[1]); },
                          {numbers({5, 4}), indices}, {Shard(1), same}, Shard(1), true);
  expect_no_communication(
      [](const Tensors& t) { return at::cross_entropy_loss(t[0], t[1], {}, at::Reduction::Sum); },
      {numbers({6, 5}), indices.remainder(5)}, {batch, batch}, sum, true);
  // Of classes that are sharded: each rank knows of its own.
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Sum})
    expect_no_communication(
        [=](const Tensors& t) { return at::nll_loss(t[0], t[1], t[2].detach(), reduction, 2); },
        {numbers({6, 5}), indices.remainder(5), numbers({5})}, {Shard(1), same, Shard(0)}, sum, true);
}

}  // namespace
}  // namespace tessera
