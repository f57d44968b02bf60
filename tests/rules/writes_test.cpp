// Writes into views and arguments, against one device: also where a view splits a dim that is sharded already.

#include <tessera/comm/run.h>
#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/register.h>
#include <tessera/rules/einsum.h>
#include <tessera/rules/rule.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using namespace testing;
using Write = std::function<void(at::Tensor)>;

const std::vector<Write>& writes() {
  static const std::vector<Write> all{
      [](at::Tensor x) { x.slice(0, 2, 4).fill_(7); },
      [](at::Tensor x) { x.slice(0, 1, 100, 2).mul_(3); },
      [](at::Tensor x) { x.slice(1, 1, 3).add_(1); },
      [](at::Tensor x) { x.slice(0, 1, 4).slice(1, 0, 2).zero_(); },
      [](at::Tensor x) { x.slice(0, 1, 5).t().add_(1); },
      [](at::Tensor x) { x.select(0, 3).copy_(x.select(0, 0)); },
      [](at::Tensor x) { x.select(1, 2).mul_(2); },
      [](at::Tensor x) { x.slice(0, 1, 5).select(0, 2).relu_(); },
      [](at::Tensor x) { x.select(0, 4).slice(0, 1, 2).fill_(9); },
      [](at::Tensor x) { x.diagonal().fill_(5); },
      [](at::Tensor x) { x.view({-1}).slice(0, 3, 7).neg_(); },
      [](at::Tensor x) { x.narrow(0, 3, 3).copy_(x.narrow(0, 0, 3)); },
  };
  return all;
}

TEST(Writes, ThroughViewsOfShardedDims) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4}, {2, 2}}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, shape);
      for (size_t i = 0; i < writes().size(); ++i) {
        for (const Placements& placements : all_placements(mesh.ndim(), 2, true)) {
          at::Tensor plain = numbers({6, 4}), x = distribute_tensor(plain, mesh, placements);
          writes()[i](x);
          writes()[i](plain);
          EXPECT_EQ(DTensor(x).placements(), placements);
          EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain))
              << "write " << i << ' ' << placements << '\n'
              << DTensor(x).full_tensor() << plain;
        }
      }
    });
  }
}

/// Also where autograd does not count writes: in inference mode, and through `data`.
TEST(Writes, AreSeenByViewsThatAutogradDoesNotTell) {
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const bool inference : {true, false}) {
      const c10::InferenceMode mode(inference);
      at::Tensor plain = numbers({6, 4}), x = distribute_tensor(plain, mesh, {Shard(0)});
      std::vector<at::Tensor> actual_views, expected_views;
      auto each = [&](const std::function<void(at::Tensor&, std::vector<at::Tensor>&)>& write) {
        for (at::Tensor* base : {&plain, &x}) {
          std::vector<at::Tensor> views{base->slice(0, 1, 5), base->slice(0, 2, 6),
                                        base->slice(0, 1, 5).slice(0, 1, 3)};
          write(*base, views);
          (base == &x ? actual_views : expected_views) = views;
        }
        for (size_t i = 0; i < actual_views.size(); ++i)
          EXPECT_TRUE(at::equal(DTensor(actual_views[i]).full_tensor(), expected_views[i])) << i;
        EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain));
      };
      each([](at::Tensor& base, auto&) { base.data().add_(1); });
      each([](at::Tensor& base, auto&) { base.view({-1}).add_(1); });
      each([](at::Tensor& base, auto& views) {
        base.detach().add_(1);
        views[0].data().mul_(2);
      });
      each([](at::Tensor&, auto& views) { views[2].add_(3); });
      each([](at::Tensor&, auto& views) {
        views[1].mul_(2);
        views[0].add_(views[1] * 1);
      });
    }
  });
}

/// Places that share memory do so after a write into the base as well.
TEST(Writes, AreSeenByWhatWasExpanded) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    at::Tensor plain = numbers({1, 6}), x = distribute_tensor(plain, mesh, {Shard(0)});
    const at::Tensor view = x.expand({3, 6}), row = view.select(0, 1);
    for (int i = 0; i < 2; ++i) {
      x.add_(1);
      plain.add_(1);
      EXPECT_TRUE(at::equal(DTensor(view).full_tensor(), plain.expand({3, 6})));
      EXPECT_TRUE(at::equal(DTensor(row).full_tensor(), plain[0]));
    }
    // A write where each place has memory of its own.
    at::Tensor column = numbers({6, 1}), y = distribute_tensor(column, mesh, {Shard(0)});
    for (const at::Tensor& each : {column, y}) each.expand({6, 6}).diagonal().mul_(2);
    EXPECT_TRUE(at::equal(DTensor(y).full_tensor(), column));
  });
}

/// What is written into a norm that has yet to be reduced need not be one.
TEST(Writes, IntoNorms) {
  const std::vector<std::function<void(at::Tensor&)>> all{
      [](at::Tensor& n) { n.sub_(10); }, [](at::Tensor& n) { n.neg_(); }, [](at::Tensor& n) { n.fill_(-2); },
      [](at::Tensor& n) { n.view({1}).mul_(-3); }, [](at::Tensor& n) { at::_foreach_neg_(std::vector{n}); }};
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const double p : {1.0, 2.0, 3.0}) {
      const at::Tensor plain = numbers({8}), x = distribute_tensor(plain, mesh, {Shard(0)});
      for (const auto& write : all) {
        at::Tensor expected = plain.norm(p), actual = x.norm(p);
        write(expected);
        write(actual);
        expect_close(DTensor(actual).full_tensor(), expected, c10::str("norm ", p));
      }
      expect_close(DTensor(at::stack({x.norm(p), x.sum(), x.norm(p)})).full_tensor(),
                   at::stack({plain.norm(p), plain.sum(), plain.norm(p)}), "stack");
    }
  });
}

/// Averages of integers are made without leaving their range.
TEST(Writes, IntoAveragesOfIntegers) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const at::ScalarType dtype : {at::kChar, at::kByte, at::kInt, at::kLong}) {
      const at::Tensor plain = at::full({3}, 100, dtype);
      const at::Tensor x = distribute_tensor(at::zeros({3}, dtype), mesh, {Partial(ReduceOp::avg)});
      x.fill_(100);
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << dtype;
      x.copy_(distribute_tensor(plain, mesh, {Shard(0)}));
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << dtype;
      const DTensor sums(distribute_tensor(plain, mesh, {Partial()}));
      EXPECT_TRUE(at::equal(sums.redistribute({Partial(ReduceOp::avg)}).full_tensor(), plain)) << dtype;
    }
  });
}

/// A view that is a copy must show what is written into its base later.
TEST(Writes, AreSeenByViews) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const Placements& placements : all_placements(1, 2, true)) {
      at::Tensor plain = numbers({6, 4}), x = distribute_tensor(plain, mesh, placements);
      std::vector<at::Tensor> seen;
      for (const at::Tensor& each : {x, plain}) {
        const at::Tensor part = each.slice(0, 1, 5), row = part.select(0, 2), turned = part.t();
        each.add_(1);
        row.mul_(2);
        each.mul_(3);
        part.sub_(4);
        turned.add_(2);
        each.select(1, 1).zero_();
        for (const at::Tensor& view : {part, row, turned}) seen.push_back(view * 1);
      }
      for (size_t i = 0; i < 3; ++i)
        expect_close(DTensor(seen[i]).full_tensor(), seen[3 + i],
                     DTensor(x).spec().str() + std::to_string(i));
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
    }
  });
}

/// Of operators that return several views; autograd does not take such writes.
TEST(Writes, ThroughSeveralViews) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const Placements& placements : all_placements(1, 2, true)) {
      at::Tensor plain = numbers({6, 4}), x = distribute_tensor(plain, mesh, placements);
      for (const at::Tensor& each : {x, plain}) {
        each.split(2, 0)[1].add_(10);
        each.unbind(1)[0].add_(20);
        each.unbind(0)[2].mul_(3);
      }
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
    }
  });
}

TEST(Writes, ThroughViewsUnderAutograd) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4}, {2, 2}}) {
    for (const Write& write : writes()) {
      compare_all(
          [&](const Tensors& x) {
            at::Tensor y = x[0] * 2;
            write(y);
            return y * y;
          },
          {numbers({6, 4})}, shape, true, 20);
    }
  }
}

TEST(Writes, InPlaceViews) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    for (const Placements& placements : all_placements(2, 3, true)) {
      for (const auto& change : std::vector<Write>{
               [](at::Tensor x) { x.squeeze_(1); }, [](at::Tensor x) { x.unsqueeze_(0); },
               [](at::Tensor x) { x.transpose_(0, 2); }, [](at::Tensor x) { x.squeeze_(); },
               [](at::Tensor x) { x.squeeze_(1).t_(); }, [](at::Tensor x) { x.swapaxes_(0, 1); }}) {
        at::Tensor plain = numbers({5, 1, 4}), x = distribute_tensor(plain, mesh, placements);
        change(plain);
        change(x);
        ASSERT_EQ(x.sizes(), plain.sizes());
        EXPECT_EQ(DTensor(x).spec().shape(), plain.sizes());
        EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
      }
    }
    // A view stays one of what the base was.
    for (const Placements& placements : all_placements(2, 2, false)) {
      at::Tensor plain = numbers({5, 4}), x = distribute_tensor(plain, mesh, placements);
      at::Tensor of_plain = plain.slice(0, 1, 3), of_x = x.slice(0, 1, 3);
      for (const auto& [base, view] : {std::pair(plain, of_plain), std::pair(x, of_x)}) {
        base.t_();
        view.mul_(2);
        base.add_(1);
      }
      EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << placements;
      EXPECT_TRUE(at::equal(DTensor(of_x).full_tensor(), of_plain)) << placements;
    }
    // Of a view, which stays one.
    at::Tensor plain = numbers({5, 1, 4}), x = distribute_tensor(plain, mesh, {Shard(0), Shard(1)});
    for (const at::Tensor& each : {x, plain}) each.slice(0, 1, 4).squeeze_(1).t_().add_(3);
    EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain));

    at::Tensor leaf = distribute_tensor(numbers({5, 1}), mesh, {Shard(0), Replicate()}).requires_grad_();
    at::Tensor y = leaf * 2;
    y.squeeze_(1);
    (y * y).sum().backward();
    EXPECT_TRUE(at::equal(DTensor(leaf.grad()).full_tensor(), numbers({5, 1}) * 8));
  });
}

TEST(Writes, InPlaceAndOut) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4}, {2, 2}}) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, shape);
      const std::vector<std::function<void(at::Tensor&, const at::Tensor&)>> calls{
          [](at::Tensor& x, const at::Tensor& y) { x.add_(y, 2); },
          [](at::Tensor& x, const at::Tensor& y) { x.mul_(y); },
          [](at::Tensor& x, const at::Tensor& y) { x.copy_(y); },
          [](at::Tensor& x, const at::Tensor& y) { x.lerp_(y, 0.5); },
          [](at::Tensor& x, const at::Tensor&) { x.relu_().cumsum_(0); },
          [](at::Tensor& x, const at::Tensor& y) { x.addcmul_(y, y); },
          [](at::Tensor& x, const at::Tensor& y) { at::add_out(x, y, y); },
          [](at::Tensor& x, const at::Tensor& y) { at::mul_out(x, y, y); },
          [](at::Tensor& x, const at::Tensor& y) { at::mean_out(x, y.unsqueeze(0), at::IntArrayRef{0}); },
          [](at::Tensor& x, const at::Tensor& y) { at::clamp_out(x, y, 0, 2); },
          [](at::Tensor& x, const at::Tensor& y) { x.masked_fill_(y > 0, 3); },
          [](at::Tensor& x, const at::Tensor& y) { x.zero_().sub_(y); },
      };
      for (size_t i = 0; i < calls.size(); ++i) {
        for (const Placements& of_x : all_placements(mesh.ndim(), 2, true)) {
          for (const Placements& of_y : all_placements(mesh.ndim(), 2, true)) {
            at::Tensor plain = numbers({5, 4});
            at::Tensor x = distribute_tensor(plain, mesh, of_x, std::nullopt);
            const at::Tensor other = numbers({5, 4}, 2);
            calls[i](x, distribute_tensor(other, mesh, of_y, std::nullopt));
            calls[i](plain, other);
            EXPECT_EQ(DTensor(x).placements(), of_x);
            EXPECT_TRUE(at::equal(DTensor(x).full_tensor(), plain)) << "call " << i << ' ' << of_x << of_y;
          }
        }
      }
    });
  }
}

/// Different on one rank only: all must know.
TEST(Writes, EqualIsGlobal) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor a = numbers({8, 2});
    at::Tensor b = a.clone();
    b[7][1] += 1;
    EXPECT_FALSE(at::equal(distribute_tensor(a, mesh, {Shard(0)}), distribute_tensor(b, mesh, {Shard(0)})));
    EXPECT_TRUE(at::equal(distribute_tensor(a, mesh, {Shard(0)}), distribute_tensor(a, mesh, {Shard(1)})));
  });
}

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& factors) { return x * factors.unsqueeze(1); }

TEST(RegisterSharding, AddsAndReplaces) {
  static auto& definition =
      *new torch::Library(torch::Library::FRAGMENT, "tessera_rules_test", std::nullopt, __FILE__, __LINE__);
  definition.def("scale_rows(Tensor x, Tensor factors) -> Tensor");
  static auto& implementation = *new torch::Library(torch::Library::IMPL, "tessera_rules_test",
                                                    c10::DispatchKey::CPU, __FILE__, __LINE__);
  implementation.impl("scale_rows", scale_rows);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera_rules_test::scale_rows", "")
                      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  const at::Tensor x = numbers({5, 4}), factors = numbers({5}, 1);
  auto placement_of_result = [&](bool by_rule) {
    Placements result;
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
      const uint64_t before = fallback_counts()["tessera_rules_test::scale_rows"];
      const DTensor y(op.call(distribute_tensor(x, mesh, {Shard(0)}, std::nullopt),
                              distribute_tensor(factors, mesh, {Replicate()}, std::nullopt)));
      EXPECT_TRUE(at::equal(y.full_tensor(), scale_rows(x, factors)));
      EXPECT_EQ(fallback_counts()["tessera_rules_test::scale_rows"] > before, !by_rule);
      if (get_rank() == 0) result = y.placements();
    });
    return result;
  };
  EXPECT_EQ(placement_of_result(false), Placements{Replicate()});
  register_sharding("tessera_rules_test::scale_rows",
                    rules::explicit_strategies({{{Shard(0), Shard(0)}, {Shard(0)}}}));
  EXPECT_EQ(placement_of_result(true), Placements{Shard(0)});
  register_sharding("tessera_rules_test::scale_rows",
                    rules::explicit_strategies({{{Shard(1), Replicate()}, {Shard(1)}}}));
  EXPECT_EQ(placement_of_result(true), Placements{Shard(1)});
}

}  // namespace
}  // namespace tessera
