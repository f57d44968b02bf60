// Operators with sharding rules against one device: values and gradients over placements, meshes, and sizes
// that split evenly, unevenly and into nothing; and that nothing moves where nothing has to.

#include "tests/rules/families.h"

#include <tessera/comm/run.h>

#include <cmath>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Partial values that are converted each by itself are not partial values of the sum.
TEST_P(Families, PartialSumsInAnotherDtype) {
  for (const at::ScalarType dtype : {at::kLong, at::kBool, at::kDouble}) {
    matrices([=](const Tensors& x) { return at::sum(x[0].detach(), {0}, false, dtype).to(at::kFloat); });
    if (dtype != at::kBool)
      matrices([=](const Tensors& x) { return at::cumsum(x[0].detach(), 0, dtype).to(at::kFloat); });
    matrices([=](const Tensors& x) { return at::prod(x[0].detach(), 0, false, dtype).to(at::kFloat); });
  }
}

/// Nor are those of integers that wrap around.
TEST_P(Families, PartialSumsThatWrap) {
  const std::vector<Function> functions{
      [](const Tensors& x) { return x[0].sum(0, false, at::kChar) * 0.5; },
      [](const Tensors& x) { return x[0].sum(0, false, at::kChar) / 2; },
      [](const Tensors& x) { return (x[0].sum(0, false, at::kChar) * at::scalar_tensor(2, at::kFloat)); },
      [](const Tensors& x) { return x[0].sum(0, false, at::kChar).sum().to(at::kFloat); },
      [](const Tensors& x) { return x[0].sum(0, false, at::kChar).cumsum(0).to(at::kFloat); },
      [](const Tensors& x) { return x[0].sum(0, false, at::kChar).sum(0, false, at::kFloat); },
      [](const Tensors& x) {
        return (x[0].sum(0, false, at::kChar) + x[0].select(0, 0).to(at::kLong)).to(at::kFloat);
      },
      [](const Tensors& x) { return at::trapezoid(x[0], 1, 0); },
  };
  for (const Function& function : functions)
    check(function, {at::full({8, 3}, 100, at::kChar)}, /*partial=*/false);
}

/// Norms of small dtypes are far from what these can hold when squared.
TEST(Norms, OfHalves) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
      const double large = dtype == at::kHalf ? 300 : 1e18;
      const at::Tensor plain = at::full({8}, large, dtype), x = distribute_tensor(plain, mesh, {Shard(0)});
      EXPECT_NEAR(DTensor(x.norm()).full_tensor().item<double>() / large, std::sqrt(8.0), 0.02);
      const auto norms = at::_foreach_norm(std::vector{x, x});
      EXPECT_NEAR(DTensor(at::stack(norms).norm()).full_tensor().item<double>() / large, 4.0, 0.02);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Families,
                         ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

TEST_P(Families, Sums) {
  matrices([](const Tensors& x) { return x[0].sum(); });
  matrices([](const Tensors& x) { return x[0].sum(at::IntArrayRef{0}, true); });
  matrices([](const Tensors& x) { return at::nansum(x[0], at::IntArrayRef{1}); });
  matrices([](const Tensors& x) { return x[0].mean(); });
  matrices([](const Tensors& x) { return x[0].mean(at::IntArrayRef{0}); });
  matrices([](const Tensors& x) { return x[0].mean(at::IntArrayRef{-1}, true); });
  matrices([](const Tensors& x) { return x[0].mean(at::IntArrayRef{0, 1}, true); });
  matrices([](const Tensors& x) { return at::count_nonzero(x[0], at::IntArrayRef{0}).to(at::kFloat); });
  matrices([](const Tensors& x) { return x[0].prod(); });
  matrices([](const Tensors& x) { return x[0].prod(0, true); });
  matrices([](const Tensors& x) { return x[0].cumsum(0) + x[0].cumsum(1); });
  matrices([](const Tensors& x) { return x[0].cumprod(0); });
}
TEST_P(Families, Extremes) {
  matrices([](const Tensors& x) { return x[0].max() + x[0].min(); });
  matrices([](const Tensors& x) { return x[0].amax(0) * 2; });
  matrices([](const Tensors& x) { return x[0].amin(at::IntArrayRef{0, 1}); });
  matrices(
      [](const Tensors& x) { return std::get<0>(x[0].aminmax(0, true)) + std::get<1>(x[0].aminmax(0)); });
  matrices([](const Tensors& x) { return std::get<0>(x[0].max(0)) + std::get<0>(x[0].min(1)).sum(); });
  matrices([](const Tensors& x) { return x[0].argmax(0).to(at::kFloat) + x[0].argmin().to(at::kFloat); });
  matrices([](const Tensors& x) { return std::get<0>(at::cummax(x[0], 0)); });
  matrices([](const Tensors& x) { return std::get<0>(at::kthvalue(x[0], 1, 0)) + at::median(x[0]); });
  matrices([](const Tensors& x) {
    return at::logsumexp(x[0], 0) + at::logsumexp(x[0], at::IntArrayRef{0, 1}, true);
  });
  matrices([](const Tensors& x) { return at::logsumexp(x[0], 1); });
}
TEST_P(Families, Logical) {
  matrices(
      [](const Tensors& x) { return (x[0] > 1).any(0).to(at::kFloat) + (x[0] > -1).all().to(at::kFloat); });
  matrices([](const Tensors& x) {
    return (x[0] > 1).any().to(at::kFloat) + (x[0] > -1).all(1, true).to(at::kFloat);
  });
}
TEST_P(Families, Norms) {
  for (const double p : {2.0, 1.0, 3.0, 0.0, kInfinity, -kInfinity}) {
    matrices([p](const Tensors& x) { return at::linalg_vector_norm(x[0], p); });
    matrices([p](const Tensors& x) { return at::linalg_vector_norm(x[0], p, at::IntArrayRef{0}, true); });
  }
  matrices([](const Tensors& x) { return at::norm(x[0]) + at::norm(x[0], 1, at::IntArrayRef{0}); });
}
TEST_P(Families, Variance) {
  matrices([](const Tensors& x) { return at::var(x[0], at::IntArrayRef{0}, 0) + at::var(x[0]); });
  matrices([](const Tensors& x) { return at::std(x[0], at::IntArrayRef{1}, 1, true); });
  matrices([](const Tensors& x) { return at::std(x[0], at::IntArrayRef{0, 1}); });
  matrices([](const Tensors& x) {
    const auto [var, mean] = at::var_mean(x[0], at::IntArrayRef{0});
    return var * mean;
  });
}
TEST_P(Families, Products) {
  const at::Tensor a = numbers({5, 3}), b = numbers({3, 4}, 1), v = numbers({3}, 2), w = numbers({5}, 4);
  const at::Tensor batch = numbers({2, 5, 3}), other = numbers({2, 3, 4}, 1);
  check([](const Tensors& x) { return at::mm(x[0], x[1]); }, {a, b});
  check([](const Tensors& x) { return at::bmm(x[0], x[1]); }, {batch, other});
  check([](const Tensors& x) { return at::baddbmm(x[2], x[0], x[1], 2, 3); },
        {batch, other, numbers({2, 5, 4}, 5)});
  check([](const Tensors& x) { return at::addbmm(x[2], x[0], x[1]); }, {batch, other, numbers({5, 4}, 5)});
  check([](const Tensors& x) { return at::addmm(x[2], x[0], x[1], 2, 3); }, {a, b, numbers({4}, 2)});
  check([](const Tensors& x) { return at::mv(x[0], x[1]); }, {a, v});
  check([](const Tensors& x) { return at::addmv(x[2], x[0], x[1], 3, 2); }, {a, v, w});
  check([](const Tensors& x) { return at::dot(x[0], x[1]); }, {v, v + 1});
  check([](const Tensors& x) { return at::outer(x[0], x[1]); }, {w, v});
  check([](const Tensors& x) { return at::matmul(x[0], x[1]); }, {batch, b});
  check([](const Tensors& x) { return at::linear(x[0], x[1], x[2]); },
        {batch, numbers({4, 3}, 3), numbers({4}, 1)});
  check([](const Tensors& x) { return at::einsum("bij,bjk->ik", {x[0], x[1]}); }, {batch, other});
}
TEST_P(Families, Pointwise) {
  const at::Tensor a = numbers({5, 3}) * 0.3, b = numbers({5, 3}, 1) * 0.3, mask = numbers({5, 3}, 2) > 0;
  check([](const Tensors& x) { return at::where(x[2], x[0], x[1]); }, {a, b, mask});
  check([](const Tensors& x) { return at::lerp(x[0], x[1], 0.3) + at::lerp(x[0], x[1], x[1]); }, {a, b});
  check([](const Tensors& x) { return at::addcmul(x[0], x[1], x[2], 2); }, {a, b, numbers({3}, 4)});
  check([](const Tensors& x) { return at::addcdiv(x[0], x[1], x[2] + 7, 2); }, {a, b, numbers({5, 1}, 4)});
  check([](const Tensors& x) { return x[0].masked_fill(x[1], 7); }, {a, mask});
  check([](const Tensors& x) { return at::clamp(x[0], -0.5, 0.5) + at::clamp_min(x[0], x[1]); }, {a, b});
  check([](const Tensors& x) { return x[0] / 3 + x[0] / (x[1] + 9) + 2 * x[0] - 1 + x[0].pow(2); }, {a, b});
  check([](const Tensors& x) { return at::gelu(x[0]) * at::silu(x[0]) + at::tanh(x[0]) * at::sigmoid(x[0]); },
        {a});
  check(
      [](const Tensors& x) {
        return at::elu(x[0]) + at::leaky_relu(x[0]) + at::hardswish(x[0]) + at::softplus(x[0]);
      },
      {a});
  check([](const Tensors& x) { return at::prelu(x[0], x[1]); }, {a, numbers({3}, 1) * 0.1});
  check([](const Tensors& x) { return x[0] * (at::allclose(x[0], x[0] * 1.0) ? 2 : 1); }, {a});
  check([](const Tensors& x) { return x[0] * (at::allclose(x[0], x[0] * 1.5) ? 2 : 1); }, {a});
  check([](const Tensors& x) { return at::_safe_softmax(x[0], 0) * at::_safe_softmax(x[0], 1); }, {a});
  check([](const Tensors& x) { return at::log_sigmoid(x[0]) + at::mish(x[0]) + at::hardtanh(x[0]); }, {a});
  check(
      [](const Tensors& x) {
        return at::maximum(x[0], x[1]) - at::minimum(x[0], x[1]) + at::atan2(x[0], x[1]);
      },
      {a, b});
  check([](const Tensors& x) { return x[0].to(at::kDouble) + x[1].to(at::kLong); }, {a, b});
}
TEST_P(Families, Views) {
  const at::Tensor a = numbers({6, 4});
  for (const int64_t rows : {6, 5, 2}) {
    const at::Tensor x0 = numbers({rows, 4});
    check([](const Tensors& x) { return x[0].select(0, 1) * x[0].select(0, -1); }, {x0});
    check([](const Tensors& x) { return x[0].slice(0, 1, 5) * 2; }, {x0});
    check([](const Tensors& x) { return x[0].slice(0, 0, -1, 2) * 2 + x[0].slice(1, 3).sum(); }, {x0});
    check([](const Tensors& x) { return x[0].split(2, 0)[0] * 2; }, {x0});
    check([](const Tensors& x) { return x[0].split_with_sizes({1, 3}, 1)[1] * x[0].split(3, 1)[1]; }, {x0});
    check([](const Tensors& x) { return x[0].unbind(0)[1] + x[0].unbind(1)[2].sum(); }, {x0});
    check([](const Tensors& x) { return x[0].diagonal(1) * 2; }, {x0});
    check([](const Tensors& x) { return x[0].unfold(1, 2, 1) * 2 + x[0].unfold(0, 2, 1).sum(); }, {x0});
    check([](const Tensors& x) { return x[0].unsqueeze(1).squeeze(1).squeeze() * 2; }, {x0});
    check([](const Tensors& x) { return x[0].unsqueeze(0).squeeze(at::IntArrayRef{0, 1}) * 2; }, {x0});
    check([](const Tensors& x) { return x[0].flatten() * x[0].reshape({-1}); }, {x0});
    check([](const Tensors& x) { return x[0].t().reshape({2, -1}) * 2; }, {x0});
    check([](const Tensors& x) { return x[0].t().contiguous().view({-1}) * 2; }, {x0});
    check([](const Tensors& x) { return x[0].expand({2, -1, -1}) * 2; }, {x0});
  }
  check(
      [](const Tensors& x) {
        return (x[0].view({-1, 3}) * x[1]).view({2, 4, 8, 3}) * 2;
      },
      {numbers({2, 8, 4, 3}), numbers({3})});
  check(
      [](const Tensors& x) {
        return at::addmm(x[1], x[0].view({-1, 4}), x[2]).view({2, 8, 3});
      },
      {numbers({2, 8, 4}), numbers({3}), numbers({4, 3})});
  check([](const Tensors& x) { return x[0].as_strided({3, 2}, {4, 2}, 1) * 2; }, {a}, false);
  check([](const Tensors& x) { return x[0].unflatten(0, {2, 3}).movedim(0, 2) * 2; }, {a});
}
TEST_P(Families, Factories) {
  const at::Tensor a = numbers({5, 4});
  check(
      [](const Tensors& x) {
        return x[0] + at::ones_like(x[0]) + at::full_like(x[0], 3) + at::zeros_like(x[0]);
      },
      {a});
  check(
      [](const Tensors& x) {
        return x[0] + x[0].new_ones({5, 4}) + x[0].new_full({4}, 2) + x[0].new_zeros({5, 1});
      },
      {a});
}

TEST(FamiliesCommunication, NoneWhereNoneIsNeeded) {
  expect_no_communication(
      [](const Tensors& x) {
        return at::addmm(x[1], x[0].flatten(0, 1), x[2]).unflatten(0, {3, 8});
      },
      {numbers({3, 8, 4}), numbers({5}), numbers({4, 5})}, {Shard(1), Replicate(), Replicate()}, Shard(1),
      true);
  const at::Tensor a = numbers({5, 4}), b = numbers({4, 8}, 1), batch = numbers({5, 3, 4});
  const Placement sum = Partial(), rows = Shard(0), columns = Shard(1), same = Replicate();
  expect_no_communication([](const Tensors& x) { return at::mm(x[0], x[1]); }, {a, b}, {rows, same}, rows,
                          true);
  expect_no_communication([](const Tensors& x) { return at::mm(x[0], x[1]); }, {a, b}, {columns, rows}, sum,
                          true);
  expect_no_communication([](const Tensors& x) { return at::addmm(x[2], x[0], x[1]); }, {a, b, numbers({8})},
                          {columns, rows, same}, sum);
  expect_no_communication([](const Tensors& x) { return x[0].mean(); }, {a}, {rows}, sum, true);
  expect_no_communication([](const Tensors& x) { return x[0].sum(1); }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return x[0].amax(0); }, {a}, {rows}, Partial(ReduceOp::max));
  expect_no_communication([](const Tensors& x) { return at::linalg_vector_norm(x[0]); }, {a}, {rows},
                          NormPartial(2));
  expect_no_communication([](const Tensors& x) { return at::var(x[0], 1); }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return x[0].cumsum(1); }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return x[0].select(0, 2); }, {a}, {rows}, sum);
  expect_no_communication([](const Tensors& x) { return x[0].select(1, 2); }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return x[0].split(2, 1)[0]; }, {a}, {rows}, rows, true);
  expect_no_communication([](const Tensors& x) { return at::relu(x[0]) * 3 - x[0] / 2; }, {a}, {rows}, rows,
                          true);
  expect_no_communication([](const Tensors& x) { return x[0] * 3 - x[0] / 2; }, {a}, {sum}, sum);
  expect_no_communication([](const Tensors& x) { return at::relu(x[0]); }, {a}, {Partial(ReduceOp::max)},
                          Partial(ReduceOp::max));
  expect_no_communication([](const Tensors& x) { return at::linear(x[0], x[1], x[2]); },
                          {batch, numbers({8, 4}), numbers({8})}, {same, rows, rows}, Shard(2), true);
}

}  // namespace
}  // namespace tessera
