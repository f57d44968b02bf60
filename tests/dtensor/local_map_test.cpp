// Functions on local tensors as functions on distributed ones.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/local_map.h>

#include <tuple>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace testing;

TEST(LocalMap, IsThatOfOneDevice) {
  run(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto product = [](const at::Tensor& x, const at::Tensor& y) { return x.mm(y); };
    const auto mapped = local_map(
        product, {.out_placements = {{{Partial()}}}, .in_placements = {{{Shard(1)}}, {{Shard(0)}}}});
    compare(
        [&](const Tensors& x) {
          return DTensor::is_dtensor(x[0]) ? mapped(x[0], x[1]) : product(x[0], x[1]);
        },
        {numbers({3, 4}), numbers({4, 5}, 1)}, mesh, {{Shard(1)}, {Shard(0)}});
    // Plain arguments go to the function itself.
    const at::Tensor x = numbers({3, 4}), y = numbers({4, 5}, 1);
    EXPECT_TRUE(at::equal(mapped(x, y), product(x, y)));
  });
}

TEST(LocalMap, TakesOtherArgumentsAndReturnsSeveralResults) {
  run(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const DTensor x = distribute_tensor(numbers({4, 3}), mesh, {Shard(0)}, std::nullopt);
    const auto both = local_map([](double factor, const at::Tensor& t,
                                   int64_t dim) { return std::tuple(t * factor, t.sum(dim), t.size(0)); },
                                {.out_placements = {{{Shard(0)}}, {{Partial()}}}});
    const auto [scaled, sum, rows] = both(2.0, x, 0);
    EXPECT_EQ(rows, 2);
    EXPECT_TRUE(at::equal(DTensor(scaled).full_tensor(), numbers({4, 3}) * 2));
    EXPECT_TRUE(at::equal(DTensor(sum).full_tensor(), numbers({4, 3}).sum(0)));
    const auto list = local_map(
        [](const at::Tensor& t) {
          return Tensors{t, t + 1};
        },
        {.out_placements = {{{Shard(0)}}, std::nullopt}});
    const Tensors results = list(x);
    EXPECT_TRUE(DTensor::is_dtensor(results[0]));
    EXPECT_FALSE(DTensor::is_dtensor(results[1]));
  });
}

TEST(LocalMap, PlacesGradients) {
  run(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    DTensor weight = distribute_tensor(numbers({3, 2}), mesh, {Replicate()}, std::nullopt);
    weight.requires_grad_();
    const DTensor x = distribute_tensor(numbers({4, 3}, 1), mesh, {Shard(0)}, std::nullopt);
    const auto layer =
        local_map([](const at::Tensor& t, const at::Tensor& w) { return t.mm(w); },
                  {.out_placements = {{{Shard(0)}}}, .in_grad_placements = {{{Shard(0)}}, {{Partial()}}}});
    layer(x, weight).sum().backward();
    const at::Tensor plain = numbers({3, 2}).requires_grad_();
    numbers({4, 3}, 1).mm(plain).sum().backward();
    EXPECT_TRUE(at::equal(DTensor(weight.grad()).full_tensor(), plain.grad()));
  });
}

TEST(LocalMap, ChecksAndRedistributesInputs) {
  run(2, [] {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const DTensor x = distribute_tensor(numbers({4, 2}), mesh, {Shard(1)}, std::nullopt);
    LocalMapOptions options{.out_placements = {{{Shard(0)}}}, .in_placements = {{{Shard(0)}}}};
    const auto identity = [](const at::Tensor& t) { return t * 1; };
    expect_error<c10::ValueError>([&] { local_map(identity, options)(x); },
                                  {"tensor 0", "S(1)", "S(0)", "redistribute_inputs"});
    options.redistribute_inputs = true;
    EXPECT_TRUE(at::equal(DTensor(local_map(identity, options)(x)).full_tensor(), numbers({4, 2})));
    options.in_placements.emplace_back(std::nullopt);
    expect_error<c10::ValueError>([&] { local_map(identity, options)(x); }, {"2 entries", "1 tensors"});
    options.in_placements.assign(1, std::nullopt);
    expect_error<c10::ValueError>([&] { local_map(identity, options)(x); }, {"tensor 0 is distributed"});
    expect_error<c10::ValueError>([&] { local_map(identity, {.out_placements = {}})(x); },
                                  {"more tensors than the 0"});
    expect_error<c10::ValueError>(
        [&] {
          local_map(identity, {.out_placements = {std::nullopt, std::nullopt}})(x);
        },
        {"2 entries", "returned 1"});
    expect_error<c10::ValueError>(
        [&] {
          local_map([&](const at::Tensor&) -> at::Tensor { return x; },
                    {.out_placements = {{{Shard(0)}}}})(x);
        },
        {"distributed already"});
  });
}

}  // namespace
}  // namespace tessera
