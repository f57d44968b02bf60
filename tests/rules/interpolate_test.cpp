// Interpolation and padding of images whose spatial dims are sharded: by halos, against one device.

#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/cache.h>

#include "tests/rules/spatial.h"

namespace tessera {
namespace {

using namespace testing;

class InterpolatedSpatial : public Spatial {};

INSTANTIATE_TEST_SUITE_P(Meshes, InterpolatedSpatial, kSpatialMeshes);

TEST_P(InterpolatedSpatial, Upsampling) {
  const at::Tensor image = numbers({2, 2, 5, 3});
  for (const std::vector<int64_t>& size : {std::vector<int64_t>{10, 9}, {5, 6}, {7, 3}}) {
    check([=](const Tensors& x) { return at::upsample_nearest2d(x[0], size); }, {image});
    check([=](const Tensors& x) { return at::_upsample_nearest_exact2d(x[0], size); }, {image});
  }
  check([](const Tensors& x) { return at::upsample_nearest1d(x[0], at::IntArrayRef{12}, 3.0); },
        {numbers({2, 2, 4})});
  check([](const Tensors& x) { return at::upsample_nearest1d(x[0], at::IntArrayRef{12}, 2.9); },
        {numbers({2, 2, 4})});
  check([](const Tensors& x) { return at::upsample_nearest3d(x[0], {4, 2, 6}); }, {numbers({1, 2, 2, 2, 3})});
}

using Scale = std::optional<double>;
/// Operators on two spatial dims.
struct Filter {
  const char* name;
  at::Tensor (*forward)(const at::Tensor&, at::IntArrayRef, bool, Scale, Scale);
  at::Tensor (*backward)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, bool, Scale, Scale);
  bool aligns = true;   // knows what align_corners is
  bool smooth = false;  // against aliasing
};
const std::vector<Filter>& filters() {
  static const std::vector<Filter> all{
      {"bilinear", at::upsample_bilinear2d, at::upsample_bilinear2d_backward},
      {"bicubic", at::upsample_bicubic2d, at::upsample_bicubic2d_backward},
      {"bilinear, smooth", at::_upsample_bilinear2d_aa, at::_upsample_bilinear2d_aa_backward, true, true},
      {"bicubic, smooth", at::_upsample_bicubic2d_aa, at::_upsample_bicubic2d_aa_backward, true, true},
      {"lanczos, smooth", at::_upsample_lanczos2d_aa, at::_upsample_lanczos2d_aa_backward, true, true},
      {"nearest",
       [](const at::Tensor& x, at::IntArrayRef size, bool, Scale h, Scale w) {
         return at::upsample_nearest2d(x, size, h, w);
       },
       [](const at::Tensor& g, at::IntArrayRef size, at::IntArrayRef input, bool, Scale h, Scale w) {
         return at::upsample_nearest2d_backward(g, size, input, h, w);
       },
       false},
      {"nearest exact",
       [](const at::Tensor& x, at::IntArrayRef size, bool, Scale h, Scale w) {
         return at::_upsample_nearest_exact2d(x, size, h, w);
       },
       [](const at::Tensor& g, at::IntArrayRef size, at::IntArrayRef input, bool, Scale h, Scale w) {
         return at::_upsample_nearest_exact2d_backward(g, size, input, h, w);
       },
       false},
  };
  return all;
}

TEST_P(InterpolatedSpatial, Interpolation) {
  const at::Tensor image = numbers({2, 2, 5, 3});
  for (const Filter& filter : filters()) {
    for (const std::vector<int64_t>& size : {std::vector<int64_t>{9, 2}, {3, 7}, {5, 4}, {4, 1}}) {
      for (const bool align : {false, true}) {
        if (align && !filter.aligns) continue;
        check([&](const Tensors& x) { return filter.forward(x[0], size, align, {}, {}); }, {image});
      }
    }
    check([&](const Tensors& x) { return filter.forward(x[0], {7, 4}, false, 1.45, 1.5); }, {image});
  }
  for (const bool align : {false, true}) {
    check([&](const Tensors& x) { return at::upsample_linear1d(x[0], at::IntArrayRef{11}, align); },
          {numbers({2, 2, 7})});
    check(
        [&](const Tensors& x) {
          return at::upsample_trilinear3d(x[0], {3, 5, 2}, align);
        },
        {numbers({1, 2, 4, 3, 5})});
  }
}

/// Every place of the result as libtorch computes it, whatever the sizes, in both precisions.
TEST(Interpolation, TakesWhatLibtorchTakes) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    auto placed = [&](const at::Tensor& x) {
      return distribute_tensor(x, mesh, {Shard(kHeight)}, std::nullopt);
    };
    for (const Filter& filter : filters()) {
      for (const int64_t in : {1, 2, 5, 8, 19}) {
        for (const int64_t out : {1, 3, 5, 8, 16, 37}) {
          const double ratio = static_cast<double>(out) / static_cast<double>(in);
          for (const Scale scale : {Scale(), Scale(ratio * 1.01), Scale(ratio * 0.97)}) {
            for (const bool align : {false, true}) {
              if (align && (!filter.aligns || scale)) continue;
              for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
                const double tolerance = dtype == at::kDouble ? 1e-11 : 1e-4;
                const std::string what = c10::str(filter.name, ' ', in, " -> ", out, scale ? " scaled" : "",
                                                  align ? " aligned " : " ", dtype);
                const std::vector<int64_t> input{1, 2, in, 3}, size{out, 2};
                const at::Tensor x = at::sin(at::arange(in * 6, dtype)).view(input);
                const at::Tensor y = filter.forward(x, size, align, scale, {});
                const at::Tensor dy = filter.forward(placed(x), size, align, scale, {});
                EXPECT_TRUE(at::allclose(DTensor(dy).full_tensor(), y, tolerance, tolerance)) << what;
                const at::Tensor g = at::cos(at::arange(out * 4, dtype)).view(y.sizes());
                const at::Tensor dg = filter.backward(placed(g), size, input, align, scale, {});
                EXPECT_TRUE(at::allclose(DTensor(dg).full_tensor(),
                                         filter.backward(g, size, input, align, scale, {}), tolerance,
                                         tolerance))
                    << "backward of " << what;
              }
            }
          }
        }
      }
    }
  });
}

TEST(Interpolation, OtherTypes) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kByte}) {
      const at::Tensor x = (numbers({1, 2, 9, 4}) + 5).to(dtype);
      const at::Tensor placed = distribute_tensor(x, mesh, {Shard(kHeight)}, std::nullopt);
      for (const Filter& filter : filters()) {
        if (dtype != at::kByte && filter.smooth) continue;  // libtorch has none on CPUs
        const at::Tensor y = filter.forward(x, {5, 7}, false, {}, {}),
                         dy = filter.forward(placed, {5, 7}, false, {}, {});
        ASSERT_EQ(dy.scalar_type(), dtype);
        const double tolerance = dtype == at::kHalf ? 2e-3 : dtype == at::kBFloat16 ? 2e-2 : 0;
        EXPECT_TRUE(
            at::allclose(DTensor(dy).full_tensor().to(at::kFloat), y.to(at::kFloat), tolerance, tolerance))
            << filter.name << ' ' << dtype;
      }
    }
  });
}

TEST_P(InterpolatedSpatial, Padding) {
  for (const std::vector<int64_t>& pads : {std::vector<int64_t>{1, 2, 3, 1}, {0, 0, 4, 4}, {2, 1, 0, 0}}) {
    check([&](const Tensors& x) { return at::reflection_pad2d(x[0], pads); }, {numbers({2, 2, 5, 3})});
    check([&](const Tensors& x) { return at::replication_pad2d(x[0], pads); }, {numbers({2, 2, 5, 3})});
  }
  check([](const Tensors& x) { return at::replication_pad2d(x[0], {1, 5, 9, 2}); }, {numbers({2, 2, 2, 3})});
  for (const int64_t size : {5, 8, 2}) {
    check([](const Tensors& x) { return at::reflection_pad1d(x[0], {1, 1}); }, {numbers({2, 2, size})});
    check([](const Tensors& x) { return at::replication_pad1d(x[0], {3, 5}); }, {numbers({2, size})});
  }
  check(
      [](const Tensors& x) {
        return at::reflection_pad3d(x[0], {1, 1, 0, 2, 3, 0});
      },
      {numbers({1, 2, 4, 3, 2})});
  check(
      [](const Tensors& x) {
        return at::replication_pad3d(x[0], {1, 1, 0, 2, 3, 0});
      },
      {numbers({1, 2, 4, 3, 2})});
  // Cropped: by libtorch itself.
  check([](const Tensors& x) { return at::replication_pad2d(x[0], {1, 1, -1, 2}); }, {numbers({2, 2, 5, 3})});
}

/// Where nothing is to be done, the result is a copy all the same.
TEST(Interpolation, ResultsAreNew) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const DTensor x = distribute_tensor(numbers({1, 2, 8, 4}), mesh, {Shard(kHeight)}, std::nullopt);
    const at::Tensor before = x.full_tensor();
    for (const Filter& filter : filters()) filter.forward(x, {8, 4}, false, {}, {}).fill_(7);
    for (const Filter& filter : filters()) filter.backward(x, {8, 4}, {1, 2, 8, 4}, false, {}, {}).fill_(7);
    at::replication_pad2d(x, {0, 0, 0, 0}).fill_(7);
    EXPECT_TRUE(at::equal(x.full_tensor(), before));
  });
}

/// Less than half of what gathering the image moves, and the result stays sharded.
TEST(Interpolation, MovesHalosOnly) {
  std::vector<Function> functions{
      [](const Tensors& x) {
        return at::reflection_pad2d(x[0], {1, 1, 1, 1});
      },
      [](const Tensors& x) {
        return at::replication_pad2d(x[0], {1, 1, 1, 1});
      },
      [](const Tensors& x) {
        return at::adaptive_avg_pool2d(x[0], {14, 3});
      },
      [](const Tensors& x) {
        return std::get<0>(at::adaptive_max_pool2d(x[0], {14, 3}));
      },
  };
  for (const Filter& filter : filters()) {
    functions.emplace_back([&](const Tensors& x) { return filter.forward(x[0], {64, 8}, false, {}, {}); });
    functions.emplace_back([&](const Tensors& x) { return filter.forward(x[0], {23, 3}, false, {}, {}); });
  }
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const size_t i : c10::irange(functions.size())) {
      const DTensor x =
          distribute_tensor(numbers({2, 3, 32, 4}).requires_grad_(), mesh, {Shard(kHeight)}, std::nullopt);
      CommDebugMode counts;
      DTensor(x).redistribute({Replicate()});
      const int64_t gathered = counts.total_bytes();
      ASSERT_GT(gathered, 0);
      counts.reset();
      const DTensor y(functions[i]({x}));
      EXPECT_EQ(y.placements(), Placements{Shard(kHeight)}) << i;
      EXPECT_LT(counts.total_bytes(), gathered / 2) << i;
      const at::Tensor gradient = distribute_tensor(numbers(y.sizes()), mesh, {Shard(kHeight)}, std::nullopt);
      counts.reset();
      y.backward(gradient);
      EXPECT_EQ(DTensor(x.grad()).placements(), Placements{Shard(kHeight)}) << i;
      EXPECT_LT(counts.total_bytes(), gathered / 2) << i;
    }
    EXPECT_TRUE(fallback_counts().empty());
  });
}

}  // namespace
}  // namespace tessera
