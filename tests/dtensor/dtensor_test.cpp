// Distributed tensors against the same computation on one device: values, gradients, views, writes, errors.

#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>

#include <functional>
#include <sstream>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_error;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

/// The same numbers on every rank: small whole ones, so that sums are exact in any order.
at::Tensor numbers(at::IntArrayRef shape, int64_t seed = 0) {
  const int64_t count = c10::multiply_integers(shape);
  return (at::remainder(at::arange(count, at::kLong) * 7 + seed, 11) - 5).to(at::kFloat).view(shape);
}

/// All lists of placements, one for each of `mesh_ndim` mesh dims, of a tensor of `ndim` dims.
std::vector<Placements> all_placements(int64_t mesh_ndim, int64_t ndim, bool partial) {
  std::vector<Placement> choices{Replicate()};
  for (int64_t dim = 0; dim < ndim; ++dim) choices.push_back(Shard(dim));
  if (partial) choices.push_back(Partial());
  std::vector<Placements> lists{{}};
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& choice : choices) {
        longer.push_back(list);
        longer.back().push_back(choice);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

std::string words(const std::vector<Placements>& placements) {
  std::ostringstream out;
  for (const Placements& list : placements) out << list << ' ';
  return out.str();
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-4, 1e-4)) << what << "\nactual:\n"
                                                          << actual << "\nexpected:\n"
                                                          << expected;
}

/// `function` of inputs placed so, and the gradients of a weighted sum of its result, against plain tensors.
void compare(const Function& function, const Tensors& inputs, const DeviceMesh& mesh,
             const std::vector<Placements>& placements) {
  const std::string what = words(placements) + mesh.str();
  Tensors plain, distributed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    plain.push_back(inputs[i].clone().requires_grad_());
    distributed.push_back(
        distribute_tensor(inputs[i].clone().requires_grad_(), mesh, placements[i], std::nullopt));
    ASSERT_TRUE(distributed.back().is_leaf());
  }
  const at::Tensor expected = function(plain);
  const at::Tensor actual = function(distributed);
  ASSERT_TRUE(DTensor::is_dtensor(actual)) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  expect_close(DTensor(actual).full_tensor(), expected.detach(), what);

  const at::Tensor weights = numbers(expected.sizes(), 3);
  (expected * weights).sum().backward();
  (actual * distribute_tensor(weights, mesh, Placements(mesh.ndim(), Replicate()), std::nullopt))
      .sum()
      .backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(plain[i].grad().defined(), distributed[i].grad().defined()) << what;
    if (!plain[i].grad().defined()) continue;
    ASSERT_TRUE(DTensor::is_dtensor(distributed[i].grad())) << what;
    expect_close(DTensor(distributed[i].grad()).full_tensor(), plain[i].grad(),
                 "gradient " + std::to_string(i) + " of " + what);
  }
}

/// Over all placements of all inputs.
void compare_all(const Function& function, const Tensors& inputs, at::IntArrayRef mesh_shape,
                 bool partial = true) {
  const std::vector<int64_t> shape = mesh_shape.vec();
  run(c10::multiply_integers(mesh_shape), [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, shape);
    std::vector<std::vector<Placements>> combinations{{}};
    for (const at::Tensor& input : inputs) {
      std::vector<std::vector<Placements>> longer;
      for (const auto& combination : combinations) {
        for (const Placements& list : all_placements(mesh.ndim(), input.dim(), partial)) {
          longer.push_back(combination);
          longer.back().push_back(list);
        }
      }
      combinations = std::move(longer);
    }
    for (const auto& placements : combinations) compare(function, inputs, mesh, placements);
  });
}

class Operators : public ::testing::TestWithParam<std::vector<int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Meshes, Operators,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 2}));

TEST_P(Operators, Add) {
  compare_all([](const Tensors& x) { return at::add(x[0], x[1], 2); }, {numbers({5, 4}), numbers({5, 4}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return x[0] + x[1]; }, {numbers({5, 4}), numbers({4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return x[0] + 1; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Mul) {
  compare_all([](const Tensors& x) { return x[0] * x[1]; }, {numbers({5, 4}), numbers({5, 1}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return x[0] * 3; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Relu) {
  compare_all([](const Tensors& x) { return at::relu(x[0]); }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, Mm) {
  compare_all([](const Tensors& x) { return at::mm(x[0], x[1]); }, {numbers({5, 3}), numbers({3, 4}, 1)},
              GetParam());
}
TEST_P(Operators, Addmm) {
  if (GetParam().size() > 1) {  // 64 times as many combinations: only those without partial inputs
    compare_all([](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); },
                {numbers({4}, 2), numbers({5, 3}), numbers({3, 4}, 1)}, GetParam(), false);
  } else {
    compare_all([](const Tensors& x) { return at::addmm(x[0], x[1], x[2]); },
                {numbers({4}, 2), numbers({5, 3}), numbers({3, 4}, 1)}, GetParam());
  }
}
TEST_P(Operators, Transpose) {
  compare_all([](const Tensors& x) { return x[0].t() * 2; }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, View) {
  compare_all([](const Tensors& x) { return x[0].view({2, 6, 2}); }, {numbers({12, 2})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].view({16, 6}); }, {numbers({12, 8})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].view({-1}); }, {numbers({4, 6})}, GetParam());
}
TEST_P(Operators, Sum) {
  compare_all([](const Tensors& x) { return x[0].sum(); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].sum(0); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return x[0].sum(-1, true); }, {numbers({5, 4})}, GetParam());
}
TEST_P(Operators, CloneAndDetach) {
  compare_all([](const Tensors& x) { return x[0].clone() + x[0].detach(); }, {numbers({5, 4})}, GetParam());
}
/// Operators without a rule are computed on replicas.
TEST_P(Operators, OnReplicas) {
  compare_all([](const Tensors& x) { return at::softmax(x[0], 1); }, {numbers({5, 4})}, GetParam());
  compare_all(
      [](const Tensors& x) {
        return at::cat({x[0], x[1]}, 0).cumsum(0);
      },
      {numbers({5, 4}), numbers({2, 4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return std::get<0>(at::sort(x[0], 0)); }, {numbers({5, 4})}, GetParam());
  compare_all([](const Tensors& x) { return at::layer_norm(x[0], {4}, x[1]); },
              {numbers({5, 4}), numbers({4}, 1)}, GetParam());
  compare_all([](const Tensors& x) { return x[0].split(2, 0)[1].mean(0) + x[0].select(1, 0)[0]; },
              {numbers({5, 4})}, GetParam());
  compare_all(
      [](const Tensors& x) {
        return x[0].index({at::tensor({0, 2, 2})});
      },
      {numbers({5, 4})}, GetParam(), false);
}
TEST_P(Operators, SmallAndEmptyTensors) {
  compare_all([](const Tensors& x) { return at::relu(x[0]) + x[1]; }, {numbers({1, 4}), numbers({1, 4}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return at::mm(x[0], x[1]); }, {numbers({2, 1}), numbers({1, 2}, 1)},
              GetParam());
  compare_all([](const Tensors& x) { return at::relu(x[0]).sum(0); }, {numbers({0, 4})}, GetParam());
}

TEST(DTensorApi, LocalAndBack) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const at::Tensor whole = numbers({5, 7});
    for (const Placements& placements : all_placements(2, 2, true)) {
      const DTensor x = distribute_tensor(whole, mesh, placements);
      EXPECT_EQ(x.placements(), placements);
      EXPECT_EQ(x.device_mesh(), mesh);
      EXPECT_EQ(x.sizes(), whole.sizes());
      EXPECT_EQ(x.to_local().sizes(), x.spec().local_shape());
      EXPECT_TRUE(at::equal(x.full_tensor(), whole));
      DTensor::FromLocalOptions options;
      options.run_check = true;
      const DTensor again = DTensor::from_local(x.to_local(), mesh, placements, options);
      EXPECT_EQ(again.spec(), x.spec());
      EXPECT_TRUE(at::equal(again.full_tensor(), whole));
      EXPECT_TRUE(again.to_local().is_alias_of(x.to_local()));
      for (const Placements& others : all_placements(2, 2, true)) {
        EXPECT_TRUE(at::equal(x.redistribute(others).full_tensor(), whole)) << placements << " -> " << others;
      }
    }
  });
}

/// A tensor that differs on the ranks: the first one's counts, or each one's own.
TEST(DTensorApi, DistributeFromARank) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const at::Tensor mine = numbers({5, 7}, get_rank());
    EXPECT_TRUE(
        at::equal(distribute_tensor(mine, mesh, {Shard(0), Shard(1)}).full_tensor(), numbers({5, 7}, 0)));
    EXPECT_TRUE(at::equal(distribute_tensor(mine, mesh, {Shard(0), Replicate()}, 3).full_tensor(),
                          numbers({5, 7}, 3)));
    EXPECT_TRUE(
        at::equal(distribute_tensor(mine, mesh, {Replicate(), Replicate()}, std::nullopt).to_local(), mine));
    EXPECT_TRUE(distribute_tensor(mine.clone().requires_grad_(), mesh, {Shard(0), Shard(1)}).requires_grad());
  });
}

TEST(DTensorApi, Factories) {
  run(3, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {3});
    for (const Placement& placement :
         {Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::max), Partial(ReduceOp::product)}) {
      EXPECT_TRUE(at::equal(zeros({4, 5}, mesh, {placement}).full_tensor(), at::zeros({4, 5})));
      EXPECT_TRUE(
          at::equal(ones({4, 5}, mesh, {placement}, at::kLong).full_tensor(), at::ones({4, 5}, at::kLong)));
      EXPECT_TRUE(at::equal(full({4, 5}, 7, mesh, {placement}).full_tensor(), at::full({4, 5}, 7.0f)));
      const DTensor some =
          empty({4, 5}, mesh, {placement}, at::TensorOptions().dtype(at::kHalf).requires_grad(true));
      EXPECT_EQ(some.to_local().sizes(), some.spec().local_shape());
      EXPECT_EQ(some.scalar_type(), at::kHalf);
      EXPECT_TRUE(some.requires_grad());
    }
  });
}

TEST(DTensorApi, GradientsThroughLocalTensors) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    for (const Placement& placement : {Replicate(), Shard(0), Partial()}) {
      at::Tensor local = numbers({2, 3}, get_rank()).requires_grad_();
      const DTensor x = DTensor::from_local(local, mesh, {placement});
      const DTensor y(x * 3);
      y.redistribute({Shard(1)}).to_local().sum().backward();
      // Each element of the whole adds 3 to the sum of all local sums; of a partial tensor, each rank's part
      // does.
      EXPECT_TRUE(at::equal(local.grad(), at::full({2, 3}, 3.0f))) << placement;
    }
    at::Tensor whole = numbers({4, 3}).requires_grad_();
    const DTensor x = distribute_tensor(whole, mesh, {Shard(0)});
    (x * x).sum().backward();
    EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(0)});
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), whole.detach() * 2));
  });
}

TEST(DTensorApi, TheReadmeExample) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const at::Tensor w = distribute_tensor(numbers({6, 8}), mesh, {Replicate(), Shard(1)}).requires_grad_();
    const at::Tensor x = distribute_tensor(numbers({4, 6}, 1), mesh, {Shard(0), Replicate()});
    const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
    const at::Tensor y = at::relu(at::mm(x, w));
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(0), Shard(1)}));
    y.sum().backward();
    EXPECT_EQ(DTensor(w.grad()).placements(), (Placements{Partial(), Shard(1)}));
    std::ostringstream out;
    out << DTensor(w.grad());
    EXPECT_THAT(out.str(), HasSubstr("DTensor [P(sum), S(1)] on mesh(dp=2, tp=2): f32[6, 8]"));
  });
}

TEST(DTensorAutograd, TwiceAndAgainAndHooks) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor start = numbers({4, 3});
    at::Tensor plain = start.clone().requires_grad_();
    at::Tensor x = distribute_tensor(start, mesh, {Shard(0)}).requires_grad_();
    int calls = 0;
    x.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      EXPECT_TRUE(DTensor::is_dtensor(gradient));
      return gradient * 2;
    });
    plain.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    auto cube = [](const at::Tensor& t) { return (t * t * t).sum(); };
    cube(plain).backward();
    cube(plain).backward();
    const at::Tensor loss = cube(x);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(at::equal(DTensor(x.grad()).full_tensor(), plain.grad()));
  });
}

TEST(DTensorInPlace, WritesStayInTheirPlacement) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    for (const Placements& placements : all_placements(2, 2, true)) {
      at::Tensor plain = numbers({5, 4});
      at::Tensor x = distribute_tensor(plain, mesh, placements);
      const at::Tensor y = distribute_tensor(numbers({5, 4}, 2), mesh, {Replicate(), Shard(0)});
      const at::Tensor local = DTensor(x).to_local();
      x.add_(y).mul_(2).relu_().cumsum_(0).clamp_(0, 50);
      plain.add_(numbers({5, 4}, 2)).mul_(2).relu_().cumsum_(0).clamp_(0, 50);
      EXPECT_EQ(DTensor(x).placements(), placements);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
      EXPECT_TRUE(DTensor(x).to_local().is_alias_of(local));
      x.copy_(y);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({5, 4}, 2))) << placements;
      x.zero_();
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), at::zeros({5, 4}))) << placements;
      x.fill_(3);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), at::full({5, 4}, 3.0f))) << placements;
    }
  });
}

TEST(DTensorViews, ShareMemoryOrRefuseWrites) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    at::Tensor plain = numbers({4, 6});
    at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    x.t().mul_(2);
    x.view({2, 2, 6}).add_(1);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain * 2 + 1));
    at::Tensor row = x.select(0, 3);  // on one rank only: a copy
    expect_error<c10::Error>([&] { row.add_(1); }, {"aten::add_", "could not share the memory", "clone()"});
    EXPECT_TRUE(at::equal(DTensor(row.clone().add_(1)).full_tensor(), (plain * 2 + 2).select(0, 3)));

    at::Tensor leaf = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)}).requires_grad_();
    at::Tensor reference = numbers({4, 6}).requires_grad_();
    auto through_view = [](const at::Tensor& t) {
      at::Tensor y = t * 2;
      y.t().mul_(3);
      return (y * y).sum();
    };
    through_view(leaf).backward();
    through_view(reference).backward();
    EXPECT_TRUE(at::equal(DTensor(leaf.grad()).full_tensor(), reference.grad()));
  });
}

TEST(DTensorModes, InferenceNoGradAndAutocastFreeCode) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)}).requires_grad_();
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(at::equal(DTensor(x * 2).full_tensor(), numbers({4, 6}) * 2));
      EXPECT_TRUE(at::equal(DTensor(at::softmax(x, 0)).full_tensor(), at::softmax(numbers({4, 6}), 0)));
    }
    const at::NoGradGuard no_grad;
    EXPECT_FALSE((x * 2).requires_grad());
    x.detach().add_(1);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), numbers({4, 6}) + 1));
  });
}

TEST(DTensorValues, ItemEqualAndRandomAgreeOnAllRanks) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    const at::Tensor p = distribute_tensor(numbers({4, 6}), mesh, {Partial()});
    EXPECT_EQ(p.sum().item<float>(), numbers({4, 6}).sum().item<float>());
    EXPECT_EQ(p.max().item<float>(), 5);
    EXPECT_TRUE(at::equal(x, p));
    EXPECT_FALSE(at::equal(x, p + 1));
    const DTensor noise(at::rand_like(x));
    const DTensor same = DTensor::from_local(noise.to_local(), mesh, {Shard(0)});
    at::Tensor other = noise.full_tensor();
    EXPECT_TRUE(at::equal(distribute_tensor(other, mesh, {Replicate()}, 0).to_local(), other));
    EXPECT_EQ(same.size(0), 8);
  });
}

TEST(DTensorErrors, AreForPeople) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const at::Tensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0), Replicate()});
    expect_error<c10::ValueError>(
        [&] {
          x + at::ones({4, 6});
        },
        {"aten::add", "'other'", "[4, 6]", "distribute_tensor", "ImplicitReplicationGuard"});
    {
      const ImplicitReplicationGuard guard;
      EXPECT_TRUE(at::equal(DTensor(x + at::ones({4, 6})).full_tensor(), numbers({4, 6}) + 1));
    }
    const DeviceMesh flat = init_device_mesh(at::kCPU, {4});
    expect_error<c10::ValueError>(
        [&] {
          x + distribute_tensor(numbers({4, 6}), flat, {Shard(0)});
        },
        {"aten::add", "'other'", "mesh(4)", "mesh(dp=2, tp=2)"});
    expect_error<c10::ValueError>(
        [&] {
          distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
        },
        {"1 placements", "mesh(dp=2, tp=2)"});
    expect_error<c10::IndexError>(
        [&] {
          distribute_tensor(numbers({4, 6}), mesh, {Shard(2), Replicate()});
        },
        {"S(2)"});
    expect_error<c10::ValueError>([&] { DTensor(at::ones({2})); }, {"not distributed", "from_local"});
    expect_error<c10::ValueError>(
        [&] {
          distribute_tensor(x, mesh, {Shard(0), Shard(0)});
        },
        {"redistribute"});
    EXPECT_THAT(error_of([&] { x.storage(); }), HasSubstr("to_local()"));
    EXPECT_THAT(error_of([&] { x.data_ptr(); }), HasSubstr("storage"));
    DTensor::FromLocalOptions check;
    check.run_check = true;
    const at::Tensor wrong = at::ones({get_rank() == 3 ? 5 : 4, 6});
    expect_error<c10::ValueError>(
        [&] {
          DTensor::from_local(wrong, mesh, {Shard(0), Replicate()}, check);
        },
        {"[1, 1]", "[5, 6]"});
    const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden);
    expect_error<c10::Error>([&] { at::softmax(x, 0); },
                             {"_softmax", "'self'", "[S(0), R]", "redistribute()"});
    at::relu(x);
  });
}

TEST(DTensorErrors, RanksOutsideTheMesh) {
  run(3, [] {
    const DeviceMesh mesh(at::kCPU, {2}, {0, 2});
    const DTensor x = distribute_tensor(numbers({4, 6}), mesh, {Shard(0)});
    EXPECT_EQ(x.sizes(), at::IntArrayRef({4, 6}));
    if (get_rank() != 1) {
      EXPECT_TRUE(at::equal(DTensor(at::relu(x)).full_tensor(), at::relu(numbers({4, 6}))));
    } else {
      EXPECT_EQ(x.to_local().numel(), 0);
      expect_error<c10::Error>([&] { at::relu(x); }, {"aten::relu", "rank 1 is not in"});
    }
  });
}

}  // namespace
}  // namespace tessera
