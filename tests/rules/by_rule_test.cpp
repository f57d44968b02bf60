// Operators that users meet seldom: right against one device, and by rules, never by the replicated fallback.

#include <tessera/dispatch/cache.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/rules/families.h"

namespace tessera {
namespace {

using namespace testing;

at::Tensor integers(const std::vector<int64_t>& values) { return at::tensor(values); }

constexpr int64_t kReductions[] = {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum};

class ByRule : public Families {
 protected:
  /// Even, uneven and empty shards.
  static constexpr int64_t kSizes[] = {8, 5, 2};

  void TearDown() override { EXPECT_EQ(fallbacks(), before_); }

 private:
  /// Numbers that programs ask for are the same on all ranks.
  static std::map<std::string, uint64_t> fallbacks() {
    auto counts = fallback_counts();
    counts.erase("aten::_local_scalar_dense");
    return counts;
  }
  const std::map<std::string, uint64_t> before_ = fallbacks();
};
INSTANTIATE_TEST_SUITE_P(Meshes, ByRule,
                         ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}));

TEST_P(ByRule, CopiesOfViews) {
  for (const int64_t size : kSizes) {
    const at::Tensor a = numbers({size, 4});
    check([](const Tensors& x) { return at::alias_copy(x[0]) + at::detach_copy(x[0].detach()); }, {a});
    check([](const Tensors& x) { return at::t_copy(x[0]) * at::transpose_copy(x[0], 0, -1); }, {a});
    check([](const Tensors& x) { return at::permute_copy(x[0], {1, 0}) * 2; }, {a});
    check([](const Tensors& x) { return at::squeeze_copy(at::unsqueeze_copy(x[0], 1)) * 2; }, {a});
    check([](const Tensors& x) { return at::squeeze_copy(at::unsqueeze_copy(x[0], 0), 0) * 2; }, {a});
    check(
        [](const Tensors& x) {
          return at::squeeze_copy(x[0].unsqueeze(-1), at::IntArrayRef{0, 2}) * 2;
        },
        {a});
    check([](const Tensors& x) { return at::view_copy(x[0], {2, -1}) * 2; }, {a});
    check([](const Tensors& x) { return at::_reshape_copy(x[0], {-1}) * 2; }, {a});
    check([](const Tensors& x) { return at::expand_copy(x[0].unsqueeze(1), {-1, 3, -1}) * 2; }, {a});
    check([](const Tensors& x) { return at::diagonal_copy(x[0], 1) * 2; }, {a});
    check([](const Tensors& x) { return at::unfold_copy(x[0], 1, 2, 1) * 2; }, {a});
    check([](const Tensors& x) { return at::select_copy(x[0], 0, 1) + at::select_copy(x[0], 1, 2).sum(); },
          {a});
    check([](const Tensors& x) { return at::slice_copy(x[0], 0, 1, 7) * 2; }, {a});
    check(
        [](const Tensors& x) {
          return at::narrow_copy(x[0], 0, 1, 1) * at::narrow_copy(x[0], 1, 1, 2).sum();
        },
        {a});
    check([](const Tensors& x) { return at::split_copy(x[0], 3, 1)[1] * at::unbind_copy(x[0], 1)[0].sum(); },
          {a});
    check([](const Tensors& x) { return at::unbind_copy(x[0])[1] * 2; }, {a});
    check(
        [](const Tensors& x) {
          return at::split_with_sizes_copy(x[0], {1, x[0].size(0) - 1})[1] * 2;
        },
        {a});
    check([](const Tensors& x) { return at::view_as_real_copy(at::view_as_complex_copy(x[0].detach()) * 2); },
          {numbers({size, 3, 2})});
  }
  check([](const Tensors& x) { return at::as_strided_copy(x[0], {5, 4}, {4, 1}) * 2; }, {numbers({5, 4})});
}

/// What is written into a copy does not show in what it was copied from, nor the other way round.
TEST_P(ByRule, CopiesAreNew) {
  check(
      [](const Tensors& x) {
        at::Tensor base = x[0] * 1;
        at::Tensor copy = at::view_copy(base, {-1}), row = at::select_copy(base, 0, 1);
        copy.mul_(3);
        row.add_(1);
        base.mul_(2);
        return base + copy.view({5, 4}) + row;
      },
      {numbers({5, 4})});
}

TEST_P(ByRule, ScatteredDiagonals) {
  for (const int64_t size : kSizes) {
    check([](const Tensors& x) { return at::diagonal_scatter(x[0], x[1], 1, 1, 2); },
          {numbers({size, 4, 5}), numbers({size, 4}, 1)});
    check([](const Tensors& x) { return at::diagonal_scatter(x[0], x[1]); },
          {numbers({size, size}), numbers({size}, 1)});
  }
}

TEST_P(ByRule, Joined) {
  for (const int64_t size : kSizes) {
    check(
        [](const Tensors& x) {
          return at::block_diag({x[0], x[1], x[2]});
        },
        {numbers({size, 3}), numbers({size}, 1), numbers({}, 2)});
    check(
        [](const Tensors& x) {
          return at::_chunk_cat({x[0].detach(), x[1].detach()}, 0, 3);
        },
        {numbers({size, 3}), numbers({4}, 1)});
    check(
        [](const Tensors& x) {
          return at::_chunk_cat({x[0].detach(), x[1].detach()}, 1, 2);
        },
        {numbers({size, 3}), numbers({size, 4}, 1)});
  }
}

TEST_P(ByRule, LossesOfSamples) {
  for (const int64_t size : kSizes) {
    const at::Tensor scores = numbers({size, 4}) * 0.3, target = at::remainder(at::arange(size) * 3, 4);
    const at::Tensor weight = numbers({4}, 1).abs() * 0.1 + 0.2;
    const at::Tensor labels = at::remainder(at::arange(size * 4), 5).view({size, 4}) - 1;
    for (const int64_t reduction : kReductions) {
      check([=](const Tensors& x) { return at::multi_margin_loss(x[0], x[1], 1, 1, {}, reduction); },
            {scores, target}, false);
      check(
          [=](const Tensors& x) {
            return at::multi_margin_loss(x[0], x[1], 2, 0.5, x[2].detach(), reduction);
          },
          {scores, target, weight}, false);
      check([=](const Tensors& x) { return at::multilabel_margin_loss(x[0], x[1], reduction); },
            {scores, labels}, false);
    }
  }
  check([=](const Tensors& x) { return at::multilabel_margin_loss(x[0], x[1]); },
        {numbers({4}) * 0.3, integers({1, 0, -1, 2})}, false);
}

TEST_P(ByRule, LossesOfSequences) {
  for (const int64_t size : kSizes) {
    const at::Tensor scores = numbers({6, size, 4}) * 0.3;
    const at::Tensor targets = at::remainder(at::arange(size * 3), 3).view({size, 3}) + 1;
    // The longest targets are one rank's.
    std::vector<int64_t> inputs(size, 6), lengths(size, 1);
    inputs[0] = 5;
    lengths[1] = 3;
    for (const bool zero_infinity : {false, true}) {
      check(
          [=](const Tensors& x) {
            return std::get<0>(
                at::_ctc_loss(at::log_softmax(x[0], 2), x[1], inputs, lengths, 0, zero_infinity));
          },
          {scores, targets}, false);
    }
    check(
        [=](const Tensors& x) {
          return std::get<0>(at::_ctc_loss(at::log_softmax(x[0], 2), x[1], x[2], x[3]));
        },
        {scores, targets, at::tensor(inputs), at::tensor(lengths)}, false);
    for (const int64_t reduction : kReductions) {
      check(
          [=](const Tensors& x) {
            return at::ctc_loss(at::log_softmax(x[0], 2), x[1], x[2], x[3], 0, reduction);
          },
          {scores, targets, at::tensor(inputs), at::tensor(lengths)}, false);
    }
  }
}

TEST_P(ByRule, Bilinear) {
  for (const int64_t size : kSizes) {
    check([](const Tensors& x) { return at::bilinear(x[0], x[1], x[2], x[3]); },
          {numbers({size, 3}), numbers({size, 4}, 1), numbers({5, 3, 4}, 2), numbers({5}, 3)});
    check([](const Tensors& x) { return at::bilinear(x[0], x[1], x[2], {}); },
          {numbers({2, size}), numbers({2, 4}, 1), numbers({3, size, 4}, 2)});
  }
}

TEST_P(ByRule, LinearAlgebra) {
  for (const int64_t size : {5, 2}) {
    const at::Tensor a = numbers({size, 4, 3}) * 0.1 + at::eye(4, 3) * 2;
    check([](const Tensors& x) { return at::linalg_cross(x[0], x[1]); },
          {numbers({size, 3}), numbers({1, 3}, 1)});
    check([](const Tensors& x) { return at::linalg_cross(x[0], x[1], 1); },
          {numbers({size, 3, 1}), numbers({size, 3, 2}, 1)});
    check([](const Tensors& x) { return at::linalg_pinv(x[0]); }, {a});
    check([](const Tensors& x) { return at::linalg_pinv(x[0], x[1].detach()); },
          {a, numbers({size}, 1).abs() * 0.01});
    for (const char* driver : {"gelsy", "gels"}) {
      check([=](const Tensors& x) { return std::get<0>(at::linalg_lstsq(x[0], x[1], {}, driver)); },
            {a, numbers({size, 4, 2}, 1)});
      check([=](const Tensors& x) { return std::get<0>(at::linalg_lstsq(x[0], x[1], {}, driver)); },
            {a, numbers({size, 4}, 1)});
    }
    check([](const Tensors& x) { return std::get<1>(at::linalg_lstsq(x[0], x[1], {}, "gels")); },
          {a, numbers({size, 4, 4}, 1)});
    check([](const Tensors& x) { return std::get<2>(at::linalg_lstsq(x[0], x[1], {})).to(at::kFloat); },
          {a, numbers({size, 4, 2}, 1)});
    check([](const Tensors& x) { return std::get<3>(at::linalg_lstsq(x[0].mT(), x[1], {}, "gelsd")); },
          {a, numbers({size, 3, 2}, 1)});
  }
}

TEST_P(ByRule, Histograms) {
  for (const int64_t size : kSizes) {
    const at::Tensor x = numbers({size, 3}), weight = numbers({size, 3}, 1).abs();
    const at::Tensor row_weight = numbers({size}, 1).abs() + 1, bounds = at::tensor({-3.f, -1.f, 0.f, 5.f});
    // They have no gradients.
    auto check_values = [&](const testing::Function& function, const Tensors& inputs) {
      check(
          [&](Tensors given) {
            for (at::Tensor& each : given) each = each.detach();
            return function(given);
          },
          inputs);
    };
    for (const bool density : {false, true}) {
      auto both = [](const std::tuple<at::Tensor, at::Tensor>& found) {
        return at::cat({std::get<0>(found), std::get<1>(found)});
      };
      check_values([=](const Tensors& t) { return both(at::histogram(t[0], t[1], {}, density)); },
                   {x, bounds});
      check_values([=](const Tensors& t) { return both(at::histogram(t[0], t[1], t[2], density)); },
                   {x, bounds, weight});
      check_values([=](const Tensors& t) { return both(at::histogram(t[0], 4, {}, {}, density)); }, {x});
      check_values(
          [=](const Tensors& t) {
            return both(at::histogram(t[0], 4, at::ArrayRef<double>{-2, 3}, t[1], density));
          },
          {x, weight});
      check_values([=](const Tensors& t) { return both(at::histogram(t[0] * 0 + 2, 4, {}, {}, density)); },
                   {x});
      check_values(
          [=](const Tensors& t) {
            const auto [counts, edges] =
                at::histogramdd(t[0], at::IntArrayRef{2, 3, 2}, std::nullopt, t[1], density);
            return at::cat({counts.flatten(), edges[0], edges[1], edges[2]});
          },
          {x, row_weight});
      check_values(
          [=](const Tensors& t) {
            return std::get<0>(
                at::histogramdd(t[0], at::TensorList{t[1], t[1], t[1] * 2}, std::nullopt, {}, density));
          },
          {x, bounds});
    }
  }
}

TEST_P(ByRule, Segments) {
  for (const int64_t size : {5, 2}) {
    for (const char* reduce : {"sum", "mean", "max", "min", "prod"}) {
      check([=](const Tensors& x) { return at::segment_reduce(x[0], reduce, x[1]); },
            {numbers({4, size}) * 0.3, integers({3, 1})}, false);
      check([=](const Tensors& x) { return at::segment_reduce(x[0], reduce, {}, {}, x[1]); },
            {numbers({4, size, 2}) * 0.3, integers({0, 1, 4})}, false);
      check([=](const Tensors& x) { return at::segment_reduce(x[0], reduce, x[1], {}, {}, 1); },
            {numbers({size, 4, 2}) * 0.3, integers({1, 3}).expand({size, 2}).contiguous()}, false);
    }
  }
}

TEST_P(ByRule, BatchNorm) {
  auto with_statistics = [](const Tensors& x, const auto& normalized) {
    at::Tensor mean = at::zeros_like(x[1]).detach(), variance = at::ones_like(x[1]).detach();
    const at::Tensor y = normalized(mean, variance);
    return y + mean.view({1, 4, 1}) + variance.view({1, 4, 1});
  };
  for (const int64_t size : kSizes) {
    const Tensors inputs{numbers({size, 4, 3}) * 0.3, numbers({4}, 1), numbers({4}, 2)};
    for (const bool training : {true, false}) {
      check(
          [=](const Tensors& x) {
            return with_statistics(x, [&](at::Tensor& mean, at::Tensor& variance) {
              return std::get<0>(
                  at::_native_batch_norm_legit(x[0], x[1], x[2], mean, variance, training, 0.3, 1e-5));
            });
          },
          inputs);
    }
    check(
        [=](const Tensors& x) {
          return with_statistics(x, [&](at::Tensor& mean, at::Tensor& variance) {
            return std::get<0>(at::_batch_norm_with_update(x[0], x[1], x[2], mean, variance, 0.3, 1e-5));
          });
        },
        inputs);
    check(
        [=](const Tensors& x) {
          return with_statistics(x, [&](const at::Tensor& mean, const at::Tensor& variance) {
            return std::get<0>(at::_batch_norm_no_update(x[0], x[1], x[2], mean, variance, 0.3, 1e-5));
          });
        },
        inputs);
    check(
        [=](const Tensors& x) {
          const auto found = at::_native_batch_norm_legit_functional(x[0], x[1], x[2], x[1].detach() * 0,
                                                                     x[1].detach() * 0 + 1, true, 0.3, 1e-5);
          return std::get<0>(found) + std::get<3>(found).view({1, 4, 1}) + std::get<4>(found).view({1, 4, 1});
        },
        inputs);
  }
}

TEST_P(ByRule, FractionalPooling) {
  for (const int64_t size : kSizes) {
    const at::Tensor samples = (numbers({size, 3, 2}, 1) + 6) / 13;
    check(
        [](const Tensors& x) {
          return std::get<0>(at::fractional_max_pool2d(x[0], {2, 2}, {3, 3}, x[1].detach()));
        },
        {numbers({size, 3, 6, 6}), samples}, false);
    check(
        [](const Tensors& x) {
          return std::get<0>(at::fractional_max_pool2d(x[0], {2, 2}, {3, 3}, x[1].detach()));
        },
        {numbers({size, 6, 6}), samples.transpose(0, 1).contiguous().narrow(0, 0, 1)}, false);
    check(
        [](const Tensors& x) {
          return std::get<0>(at::fractional_max_pool3d(x[0], {2, 2, 2}, {2, 2, 2}, x[1].detach()));
        },
        {numbers({size, 3, 4, 4, 4}), (numbers({size, 3, 3}, 1) + 6) / 13}, false);
  }
}

TEST_P(ByRule, IndicesOfOneElement) {
  for (const int64_t size : kSizes) {
    const at::Tensor x = numbers({size, 3}), row = numbers({1, 3}, 1), one = at::scalar_tensor(1, at::kLong);
    check([](const Tensors& t) { return at::index_select(t[0], 0, t[1]); }, {x, one}, false);
    check([](const Tensors& t) { return at::index_select(t[0], 0, at::scalar_tensor(1, at::kLong)); }, {x},
          false);
    check([](const Tensors& t) { return at::index_select(t[0], 1, t[1]); }, {x, one}, false);
    check([](const Tensors& t) { return at::index_add(t[0], 0, t[2], t[1], 2); }, {x, row, one}, false);
    check([](const Tensors& t) { return at::index_copy(t[0], 0, t[2], t[1]); }, {x, row, one}, false);
    check([](const Tensors& t) { return at::index_fill(t[0], 0, t[1], 7); }, {x, one}, false);
    check([](const Tensors& t) { return at::index_fill(t[0], 0, at::scalar_tensor(1, at::kLong), 7); }, {x},
          false);
  }
}

TEST_P(ByRule, IndicesIntoNumbers) {
  const at::Tensor number = numbers({}, 1), index = integers({0});
  check([](const Tensors& t) { return at::index_select(t[0], 0, t[1]); }, {number, index}, false);
  check([](const Tensors& t) { return at::index_add(t[0], 0, t[1], t[2]); }, {number, index, number + 1},
        false);
  check([](const Tensors& t) { return at::index_copy(t[0], 0, t[1], t[2]); }, {number, index, number + 1},
        false);
  check([](const Tensors& t) { return at::index_fill(t[0], 0, t[1], 7); }, {number, index}, false);
  for (const char* reduce : {"amax", "mean", "prod"})
    check([=](const Tensors& t) { return at::index_reduce(t[0], 0, t[1], t[2], reduce); },
          {number, index, number + 1}, false);
}

TEST_P(ByRule, MaskedIndices) {
  for (const int64_t size : kSizes) {
    const at::Tensor index = integers({0, 1, 7, -9}), mask = integers({1, 1, 0, 0}).to(at::kBool);
    auto list = [](const at::Tensor& item) {
      return c10::List<std::optional<at::Tensor>>({std::optional(item)});
    };
    check([=](const Tensors& t) { return at::_unsafe_masked_index(t[0], t[1], list(t[2]), 3); },
          {numbers({size}), mask, index}, false);
    check(
        [=](const Tensors& t) {
          return at::_unsafe_masked_index_put_accumulate(t[0], t[1], list(t[2]), t[3]);
        },
        {numbers({size}), mask, index, numbers({4}, 1)}, false);
  }
}

TEST_P(ByRule, Comparisons) {
  auto equal = [](const Tensors& x) { return x[0] * (at::equal(x[0], x[1]) ? 2 : 3); };
  check(equal, {numbers({5, 3}), numbers({5, 3})});
  check(equal, {numbers({5, 3}), numbers({5, 4})});
}

TEST(ByRuleCommunication, NoneWhereNoneIsNeeded) {
  const Placement sum = Partial(), rows = Shard(0), same = Replicate();
  const at::Tensor x = numbers({5, 4}), target = integers({0, 1, 2, 3, 0});
  expect_no_communication(
      [](const Tensors& t) {
        return at::view_copy(t[0], {5, 2, 2});
      },
      {x}, {rows}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::t_copy(t[0]); }, {x}, {rows}, Shard(1), true);
  expect_no_communication([](const Tensors& t) { return at::unbind_copy(t[0], 1)[2]; }, {x}, {rows}, rows,
                          true);
  expect_no_communication([](const Tensors& t) { return at::permute_copy(t[0], {1, 0}); }, {x}, {sum}, sum);
  expect_no_communication([](const Tensors& t) { return at::multi_margin_loss(t[0], t[1]); }, {x, target},
                          {rows, rows}, sum, true);
  expect_no_communication([](const Tensors& t) { return at::multilabel_margin_loss(t[0], t[1]); },
                          {x, at::zeros({5, 4}, at::kLong)}, {rows, rows}, sum, true);
  expect_no_communication(
      [](const Tensors& t) {
        const std::vector<int64_t> inputs(5, 6), lengths{1, 2, 2, 1, 3};
        return std::get<0>(at::_ctc_loss(at::log_softmax(t[0], 2), t[1], inputs, lengths));
      },
      {numbers({6, 5, 4}) * 0.3, at::ones({5, 3}, at::kLong)}, {Shard(1), rows}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::bilinear(t[0], t[1], t[2], {}); },
                          {x, x + 1, numbers({3, 4, 4})}, {rows, rows, same}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::linalg_cross(t[0], t[1]); },
                          {numbers({5, 3}), numbers({1, 3})}, {rows, same}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::linalg_pinv(t[0]); },
                          {numbers({5, 3, 2}) * 0.1 + at::eye(3, 2)}, {rows}, rows, true);
  expect_no_communication(
      [](const Tensors& t) {
        return std::get<0>(at::histogram(t[0], 4, at::ArrayRef<double>{-2, 3}));
      },
      {x}, {rows}, sum);
  expect_no_communication([](const Tensors& t) { return at::segment_reduce(t[0], "max", t[1]); },
                          {numbers({4, 5}), integers({1, 3})}, {Shard(1), same}, Shard(1), true);
  expect_no_communication(
      [](const Tensors& t) {
        return std::get<0>(at::fractional_max_pool2d(t[0], {2, 2}, {3, 3}, t[1].detach()));
      },
      {numbers({5, 3, 6, 6}), (numbers({5, 3, 2}, 1) + 6) / 13}, {rows, rows}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::gather(t[0], 1, t[1]); },
                          {x, at::ones({5, 4}, at::kLong)}, {rows, rows}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::index_select(t[0], 1, t[1]); },
                          {x, at::scalar_tensor(1, at::kLong)}, {rows, same}, rows, true);
}

}  // namespace
}  // namespace tessera
