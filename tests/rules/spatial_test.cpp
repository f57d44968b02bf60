// Convolution and pooling of images whose spatial dims are sharded: by halos, against one device. Interpolation
// and padding: interpolate_test.cpp.

#include "tests/rules/spatial.h"

#include <tessera/dispatch/cache.h>

namespace tessera {
namespace {

using namespace testing;

INSTANTIATE_TEST_SUITE_P(Meshes, Spatial, kSpatialMeshes);

struct Window {
  int64_t kernel, stride, padding, dilation;
};
/// Halos of one place, of many, wider than what a neighbour holds, and none; gaps between windows.
constexpr Window kWindows[] = {{3, 1, 1, 1}, {3, 2, 1, 1}, {5, 1, 2, 1}, {3, 1, 0, 2}, {3, 1, 4, 3},
                               {2, 3, 0, 1}, {1, 1, 0, 1}, {1, 2, 0, 1}, {2, 2, 0, 1}, {7, 1, 3, 1}};

TEST_P(Spatial, Convolution1d) {
  for (const Window& w : kWindows) {
    for (const int64_t size : {7, 8}) {
      check(
          [w](const Tensors& x) {
            return at::conv1d(x[0], x[1], x[2], at::IntArrayRef{w.stride}, at::IntArrayRef{w.padding},
                              at::IntArrayRef{w.dilation});
          },
          {numbers({2, 2, size}), numbers({3, 2, w.kernel}, 1), numbers({3}, 2)});
    }
  }
}

TEST_P(Spatial, TransposedConvolution1d) {
  for (const Window& w : kWindows) {
    for (const int64_t size : {4, 7}) {
      for (const int64_t more : {int64_t{0}, w.stride - 1}) {
        if ((size - 1) * w.stride - 2 * w.padding + w.dilation * (w.kernel - 1) + more < 0) continue;
        check(
            [=](const Tensors& x) {
              return at::conv_transpose1d(x[0], x[1], x[2], at::IntArrayRef{w.stride},
                                          at::IntArrayRef{w.padding}, at::IntArrayRef{more}, 1,
                                          at::IntArrayRef{w.dilation});
            },
            {numbers({2, 2, size}), numbers({2, 3, w.kernel}, 1), numbers({3}, 2)});
      }
    }
  }
}

TEST_P(Spatial, Convolution2d) {
  check(
      [](const Tensors& x) {
        return at::conv2d(x[0], x[1], x[2], at::IntArrayRef{1, 2}, at::IntArrayRef{1, 0},
                          at::IntArrayRef{1, 2});
      },
      {numbers({2, 2, 6, 9}), numbers({2, 2, 3, 2}, 1), numbers({2}, 2)});
  // Less of the result than there are ranks.
  check([](const Tensors& x) { return at::conv2d(x[0], x[1]); },
        {numbers({1, 2, 5, 5}), numbers({2, 2, 4, 4}, 1)});
  // Less of the input.
  check([](const Tensors& x) { return at::conv2d(x[0], x[1], {}, at::IntArrayRef{1}, at::IntArrayRef{3}); },
        {numbers({1, 2, 2, 2}), numbers({2, 2, 3, 3}, 1)});
  // Depthwise, and by groups.
  check(
      [](const Tensors& x) {
        return at::conv2d(x[0], x[1], x[2], at::IntArrayRef{1}, at::IntArrayRef{1}, at::IntArrayRef{1}, 4);
      },
      {numbers({2, 4, 5, 4}), numbers({8, 1, 3, 3}, 1), numbers({8}, 2)});
  check(
      [](const Tensors& x) {
        return at::conv_transpose2d(x[0], x[1], x[2], at::IntArrayRef{2, 1}, at::IntArrayRef{1, 0},
                                    at::IntArrayRef{1, 0}, 2);
      },
      {numbers({2, 4, 5, 4}), numbers({4, 3, 3, 3}, 1), numbers({6}, 2)});
  // Only one of the gradients.
  check([](const Tensors& x) { return at::conv2d(x[0], x[1].detach(), {}, 1, 1); },
        {numbers({2, 2, 6, 5}), numbers({2, 2, 3, 3}, 1)});
  check([](const Tensors& x) { return at::conv2d(x[0].detach(), x[1], {}, 1, 1); },
        {numbers({2, 2, 6, 5}), numbers({2, 2, 3, 3}, 1)});
}

TEST_P(Spatial, Convolution3d) {
  check(
      [](const Tensors& x) {
        return at::conv3d(x[0], x[1], x[2], at::IntArrayRef{1, 2, 1}, at::IntArrayRef{1});
      },
      {numbers({1, 2, 4, 5, 3}), numbers({2, 2, 3, 3, 3}, 1), numbers({2}, 2)});
}

TEST_P(Spatial, Groups) {
  // Sharded along the groups, with the weight sharded too.
  run(c10::multiply_integers(GetParam()), [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, GetParam());
    for (const int64_t groups : {2, 4, 8}) {
      for (const Placements& placed : all_placements(mesh.ndim(), 2, false)) {
        Placements of_weight, of_bias;
        for (const Placement& each : placed) {
          of_weight.push_back(each.is_shard(1) ? Shard(0) : Replicate());
          of_bias.push_back(of_weight.back());
        }
        compare(
            [groups](const Tensors& x) {
              return at::conv2d(x[0], x[1], x[2], at::IntArrayRef{1}, at::IntArrayRef{1}, at::IntArrayRef{1},
                                groups);
            },
            {numbers({3, 8, 4, 3}), numbers({16, 8 / groups, 3, 3}, 1), numbers({16}, 2)}, mesh,
            {placed, of_weight, of_bias});
      }
    }
  });
}

TEST_P(Spatial, MaxPool) {
  for (const Window& w : {Window{2, 2, 0, 1}, {3, 2, 1, 1}, {3, 1, 1, 2}, {2, 3, 1, 1}, {3, 1, 0, 1}}) {
    for (const bool ceil : {false, true}) {
      for (const int64_t size : {5, 8}) {
        auto pool = [=](const Tensors& x) {
          return at::max_pool2d_with_indices(x[0], {w.kernel, 2}, {w.stride, 1}, {w.padding, 0},
                                             {w.dilation, 1}, ceil);
        };
        const at::Tensor image = numbers({2, 2, size, 4}) * 100 + at::arange(size * 16).view({2, 2, size, 4});
        check([=](const Tensors& x) { return std::get<0>(pool(x)); }, {image});
        check([=](const Tensors& x) { return std::get<1>(pool(x)).to(at::kFloat); }, {image});
      }
    }
  }
  // Nothing is larger than the padding.
  const at::Tensor low = at::full({1, 2, 6, 5}, -std::numeric_limits<float>::infinity());
  check(
      [](const Tensors& x) { return std::get<1>(at::max_pool2d_with_indices(x[0], 3, 1, 1)).to(at::kFloat); },
      {low});
  check([](const Tensors& x) { return at::max_pool3d(x[0], 2, 1, 1); }, {numbers({1, 2, 4, 3, 5})});
  check([](const Tensors& x) { return at::max_pool1d(x[0], 3, 2, 1); }, {numbers({2, 2, 9})});
}

TEST_P(Spatial, AvgPool) {
  for (const Window& w : {Window{2, 2, 0, 1}, {3, 2, 1, 1}, {3, 3, 1, 1}, {4, 1, 2, 1}}) {
    for (const bool ceil : {false, true}) {
      for (const bool counts_padding : {false, true}) {
        for (const std::optional<int64_t> divisor : {std::optional<int64_t>(), {5}}) {
          check(
              [=](const Tensors& x) {
                return at::avg_pool2d(x[0], {w.kernel, 2}, {w.stride, 1}, {w.padding, 1}, ceil,
                                      counts_padding, divisor);
              },
              {numbers({2, 2, 9, 4})});
        }
      }
    }
  }
  check([](const Tensors& x) { return at::avg_pool3d(x[0], 2, 1, 1, true, false); },
        {numbers({1, 2, 4, 3, 5})});
  check([](const Tensors& x) { return at::avg_pool1d(x[0], 3, 2, 1); }, {numbers({2, 2, 9})});
}

TEST_P(Spatial, AdaptivePool) {
  // Windows that are even, that overlap, that are more than there are elements; less of them than ranks.
  for (const std::vector<int64_t>& size :
       {std::vector<int64_t>{4, 2}, {8, 3}, {3, 2}, {5, 4}, {7, 5}, {11, 1}, {1, 7}}) {
    const at::Tensor image = numbers({2, 2, 8, 6}) * 100 + at::arange(192).view({2, 2, 8, 6});
    check([=](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], size); }, {numbers({2, 2, 8, 6})});
    check([=](const Tensors& x) { return std::get<0>(at::adaptive_max_pool2d(x[0], size)); }, {image});
    check([=](const Tensors& x) { return std::get<1>(at::adaptive_max_pool2d(x[0], size)).to(at::kFloat); },
          {image});
  }
  check(
      [](const Tensors& x) {
        return at::adaptive_avg_pool3d(x[0], {2, 2, 3});
      },
      {numbers({1, 2, 4, 2, 6})});
  const at::Tensor space = numbers({1, 2, 5, 3, 7}) * 100 + at::arange(210).view({1, 2, 5, 3, 7});
  for (const std::vector<int64_t>& size : {std::vector<int64_t>{3, 2, 4}, {7, 1, 5}}) {
    check([=](const Tensors& x) { return at::adaptive_avg_pool3d(x[0], size); }, {space * 0.01});
    check([=](const Tensors& x) { return std::get<0>(at::adaptive_max_pool3d(x[0], size)); }, {space});
    check([=](const Tensors& x) { return std::get<1>(at::adaptive_max_pool3d(x[0], size)).to(at::kFloat); },
          {space});
  }
  check([](const Tensors& x) { return at::adaptive_avg_pool1d(x[0], 4); }, {numbers({2, 2, 9})});
  check([](const Tensors& x) { return std::get<0>(at::adaptive_max_pool1d(x[0], 4)); }, {numbers({2, 2, 9})});
  check([](const Tensors& x) { return at::adaptive_avg_pool2d(x[0], {3, 4}); }, {numbers({2, 7, 6})});
  // Equal values, infinite ones and those that are no numbers.
  at::Tensor odd = at::zeros({1, 2, 7, 5});
  check(
      [](const Tensors& x) {
        return std::get<1>(at::adaptive_max_pool2d(x[0], {4, 3})).to(at::kFloat);
      },
      {odd});
  odd.index_put_({0, 0, 3, 2}, std::numeric_limits<float>::infinity());
  check([](const Tensors& x) { return at::adaptive_avg_pool2d(x[0].detach(), {4, 3}); }, {odd});
  odd.index_put_({0, 1, 2, 1}, std::numeric_limits<float>::quiet_NaN());
  check(
      [](const Tensors& x) {
        return std::get<1>(at::adaptive_max_pool2d(x[0], {4, 3})).to(at::kFloat);
      },
      {odd});
}

TEST_P(Spatial, Rearrangements) {
  const at::Tensor image = numbers({3, 8, 4, 6});
  check([](const Tensors& x) { return at::pixel_shuffle(x[0], 2); }, {image});
  check([](const Tensors& x) { return at::pixel_unshuffle(x[0], 2); }, {image});
  check([](const Tensors& x) { return x[0].unfold(2, 3, 1) * 2; }, {image});
  check([](const Tensors& x) { return at::channel_shuffle(x[0], 2); }, {image});
  check([](const Tensors& x) { return at::diag_embed(x[0].select(1, 0), 1, 0); }, {image});
  check(
      [](const Tensors& x) {
        const auto [values, positions] = at::max_pool2d_with_indices(x[0], 2);
        return at::max_unpool2d(values, positions, {4, 6});
      },
      {image});
  check([](const Tensors& x) { return at::grid_sampler(x[0], x[1], 0, 0, false); },
        {image * 0.1, numbers({3, 5, 2, 2}, 1) * 0.19}, 2);
}

TEST_P(Spatial, Columns) {
  for (const Window& w : {Window{2, 2, 0, 1}, {3, 1, 1, 1}, {2, 1, 0, 1}, {3, 2, 2, 2}}) {
    for (const int64_t size : {8, 5}) {
      check(
          [=](const Tensors& x) {
            return at::im2col(x[0], {w.kernel, 2}, {w.dilation, 1}, {w.padding, 1}, {w.stride, 1});
          },
          {numbers({2, 4, size, 3})});
      const int64_t rows = (size + 2 * w.padding - w.dilation * (w.kernel - 1) - 1) / w.stride + 1;
      check(
          [=](const Tensors& x) {
            return at::col2im(x[0], {size, 3}, {w.kernel, 2}, {w.dilation, 1}, {w.padding, 1}, {w.stride, 1});
          },
          {numbers({2, 8 * w.kernel, rows * 4})});
    }
  }
  check(
      [](const Tensors& x) {
        return at::im2col(x[0], {2, 3}, {1, 1}, {1, 0}, {2, 1});
      },
      {numbers({8, 6, 4})});
}

/// What is not moved: anything where windows end with what a rank holds; more than the halo elsewhere.
TEST(SpatialCommunication, OnlyHalos) {
  const Placement same = Replicate(), rows = Shard(kHeight), sum = Partial();
  const at::Tensor image = numbers({2, 4, 16, 4}), w = numbers({4, 4, 2, 2}), point = numbers({4, 4, 1, 1});
  expect_no_communication([](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 2); }, {image, w},
                          {rows, same}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::conv2d(t[0], t[1]); }, {image, point},
                          {rows, same}, rows, true);
  expect_no_communication([](const Tensors& t) { return at::max_pool2d(t[0], 2); }, {image}, {rows}, rows,
                          true);
  expect_no_communication([](const Tensors& t) { return at::avg_pool2d(t[0], 4); }, {image}, {rows}, rows,
                          true);
  expect_no_communication(
      [](const Tensors& t) {
        return at::adaptive_avg_pool2d(t[0], {8, 2});
      },
      {image}, {rows}, rows, true);
  expect_no_communication(
      [](const Tensors& t) {
        return at::adaptive_avg_pool2d(t[0], {1, 1});
      },
      {image}, {rows}, sum);
  expect_no_communication(
      [](const Tensors& t) {
        return at::conv2d(t[0], t[1], {}, at::IntArrayRef{1}, at::IntArrayRef{1}, at::IntArrayRef{1}, 4);
      },
      {image, numbers({8, 1, 3, 3})}, {Shard(1), Shard(kBatch)}, Shard(1), true);
}

TEST(SpatialCommunication, HalosKeepTheSharding) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(numbers({2, 2, 16, 5}), mesh, {Shard(kHeight)}, std::nullopt);
    const at::Tensor w = distribute_tensor(numbers({3, 2, 3, 3}), mesh, {Replicate()}, std::nullopt);
    EXPECT_EQ(DTensor(at::conv2d(x, w, {}, 1, 1)).placements(), Placements{Shard(kHeight)});
    EXPECT_EQ(DTensor(at::max_pool2d(x, 3, 1, 1)).placements(), Placements{Shard(kHeight)});
    const DTensor columns(at::im2col(x, {3, 3}, {1, 1}, {1, 1}, {1, 1}));
    EXPECT_EQ(columns.placements(), Placements{Shard(2)});
    EXPECT_EQ(DTensor(at::col2im(columns, {16, 5}, {3, 3}, {1, 1}, {1, 1}, {1, 1})).placements(),
              Placements{Shard(kHeight)});
    EXPECT_FALSE(fallback_counts().contains("aten::convolution"));
    EXPECT_FALSE(fallback_counts().contains("aten::max_pool2d_with_indices"));
    const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
    EXPECT_THROW(at::conv2d(x, w, {}, 1, 1), c10::Error);
  });
}

}  // namespace
}  // namespace tessera
