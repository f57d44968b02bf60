// What ranks exchange along a sharded dim, against the same on the global tensor.

#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/linear_map.h>
#include <tessera/kernels/mask_runs.h>
#include <tessera/kernels/window.h>

#include <algorithm>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::kernels {
namespace {

at::Tensor local_of(const at::Tensor& global, const Spec& spec) {
  const OptionalPlacements as_the_tensor;  // gcc 12 takes a temporary for uninitialised
  return distribute_tensor(global, spec.mesh(), spec.placements(), std::nullopt).to_local(as_the_tensor);
}

Spec spec_of(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef shape,
             at::ScalarType dtype = at::kFloat) {
  return Spec(mesh, placements, shape, std::nullopt, dtype);
}

TEST(Exchange, CopiesSegmentsAsOneRankDoes) {
  run(4, [] {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{4}, {2, 2}}) {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, shape);
      const Placements rows(shape.size(), Shard(0));
      std::mt19937 random(7);  // the same on all ranks
      for (int trial = 0; trial < 60; ++trial) {
        auto draw = [&](int64_t low, int64_t high) {
          return std::uniform_int_distribution<int64_t>(low, high)(random);
        };
        const int64_t from_size = draw(1, 11), to_size = draw(1, 11);
        // from + k * from_step lies in the source and to + k * to_step in the target.
        StridedSegment segment{draw(0, to_size - 1), draw(1, 3), draw(0, from_size - 1), draw(1, 3), 0};
        if (draw(0, 1)) segment.from_step = -segment.from_step;
        for (int64_t to = segment.to, from = segment.from; to < to_size && from >= 0 && from < from_size;
             to += segment.to_step, from += segment.from_step)
          ++segment.count;
        const at::Tensor source = at::arange(from_size * 3, at::kFloat).view({from_size, 3});
        at::Tensor expected = at::full({to_size, 3}, -1.0);
        for (int64_t k = 0; k < segment.count; ++k)
          expected[segment.to + k * segment.to_step].copy_(source[segment.from + k * segment.from_step]);
        const Spec of_source = spec_of(mesh, rows, source.sizes()),
                   of_target = spec_of(mesh, rows, expected.sizes());
        const at::Tensor target = at::full(of_target.local_shape(), -1.0);
        exchange(target, of_target, local_of(source, of_source), of_source, 0, {segment});
        EXPECT_TRUE(at::equal(target, local_of(expected, of_target))) << "trial " << trial;
      }
    }
  });
}

TEST(ShardGroup, JoinsInTheOrderOfShards) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    // Mesh dim 1 shards first, so that shards do not lie in the order of ranks; one is empty.
    const ShardOrder order{1, 0};
    const Spec spec(mesh, {Shard(0), Shard(0)}, {3}, std::nullopt, at::kLong, order);
    const at::Tensor global = at::arange(3);
    const at::Tensor local =
        at::slice(global, 0, spec.global_offset()[0], spec.global_offset()[0] + spec.local_shape()[0]);
    const ShardGroup group(spec, mesh_dims_of(spec, 0), 0);
    const std::vector<int64_t> sizes = group.sizes(local, 0);
    EXPECT_EQ(sizes, group.shard_sizes());
    EXPECT_TRUE(at::equal(group.join(local, 0, sizes), global));
    if (local.numel() > 0) EXPECT_EQ(group.before(sizes), spec.global_offset()[0]);
  });
}

TEST(MaskRuns, CountCollectAndSpreadAsMaskedSelect) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    for (const Placements& placements : {Placements{Shard(0), Shard(1)}, Placements{Shard(1), Replicate()},
                                         Placements{Shard(0), Shard(0)}}) {
      for (const int64_t keep : {0, 1, 2, 3}) {
        const at::Tensor values = at::arange(35).view({5, 7});
        const at::Tensor mask = values.remainder(4) < keep;
        const Spec spec = spec_of(mesh, placements, mask.sizes(), at::kBool);
        const at::Tensor local_mask = local_of(mask, spec);
        const at::Tensor local_values =
            local_of(values, spec_of(mesh, placements, values.sizes(), at::kLong));
        const MaskRuns runs(local_mask, spec, {});
        const at::Tensor expected = values.masked_select(mask);
        ASSERT_EQ(runs.count(), expected.numel());
        const at::Tensor own = local_values.masked_select(local_mask);
        EXPECT_TRUE(at::equal(expected.index_select(0, runs.indices()), own));

        Placements rows(2, Replicate());
        for (const int64_t m : mesh_dims_of(spec)) rows[m] = Shard(0);
        const Spec of_rows = spec_of(mesh, rows, {runs.count()}, at::kLong);
        const at::Tensor collected = runs.collect(own, runs.count());
        EXPECT_TRUE(at::equal(collected, local_of(expected, of_rows)));
        EXPECT_TRUE(at::equal(runs.spread(collected, runs.count()), own));
      }
    }
  });
}

/// Every window of every small geometry, one position at a time.
TEST(Sliding, SizeAndReachAreThoseOfTheWindows) {
  for (const int64_t kernel : {1, 2, 3}) {
    for (const int64_t stride : {1, 2, 3}) {
      for (const int64_t padding : {0, 1}) {
        for (const int64_t dilation : {1, 2}) {
          const Sliding sliding{kernel, stride, padding, dilation};
          for (int64_t input = sliding.extent() + 1; input < 12; ++input) {
            int64_t windows = 0;
            while (windows * stride + sliding.extent() < input + 2 * padding) ++windows;
            EXPECT_EQ(sliding.size(input), windows);
            for (int64_t first = 0; first < windows; ++first) {
              for (int64_t end = first + 1; end <= windows; ++end) {
                const Range reach = sliding.reach({first, end - first});
                EXPECT_EQ(reach.offset, first * stride - padding);
                EXPECT_EQ(reach.end(), (end - 1) * stride - padding + sliding.extent() + 1);
              }
            }
          }
        }
      }
    }
  }
}

/// Against the product with the matrices of the maps.
TEST(LinearMaps, MapTheGlobalTensorAndItsGradient) {
  const auto rows_taps = [](int64_t p) { return Taps{{p * 6 / 8, 0.25}, {std::min<int64_t>(p, 6), 2}}; };
  const auto columns_taps = [](int64_t p) { return Taps{{p, 1}, {p + 1, -2}}; };
  const std::vector<LinearMap> maps{{9, rows_taps}, {4, columns_taps}};
  const auto matrix_of = [](const LinearMap& map, int64_t inputs) {
    at::Tensor matrix = at::zeros({map.size, inputs});
    for (int64_t p = 0; p < map.size; ++p) {
      for (const Tap& tap : map.taps(p)) matrix[p][tap.position] += tap.weight;
    }
    return matrix;
  };
  const at::Tensor x = at::arange(2 * 7 * 5, at::kFloat).view({2, 7, 5}),
                   gradient = at::arange(2 * 9 * 4, at::kFloat).view({2, 9, 4});
  const at::Tensor rows = matrix_of(maps[0], 7), columns = matrix_of(maps[1], 5);
  const at::Tensor expected = at::einsum("ai,bj,nij->nab", {rows, columns, x}),
                   of_input = at::einsum("ai,bj,nab->nij", {rows, columns, gradient});
  for (const int64_t ranks : {2, 3, 4}) {
    run(ranks, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks});
      for (const int64_t dim : {1, 2}) {
        const Spec input = spec_of(mesh, {Shard(dim)}, x.sizes()),
                   result = spec_of(mesh, {Shard(dim)}, expected.sizes());
        const LinearMaps local(input, result, maps, /*copies=*/false);
        EXPECT_TRUE(at::allclose(local.forward(local_of(x, input)), local_of(expected, result)))
            << dim << " of " << ranks;
        EXPECT_TRUE(at::allclose(local.backward(local_of(gradient, result)), local_of(of_input, input)))
            << dim << " of " << ranks;
      }
    });
  }
}

TEST(Halo, FetchesWhatWindowsNeedAndGivesGradientsBack) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    for (const int64_t size : {4, 7, 10}) {
      const Sliding sliding{3, 1, 1, 1};
      const Spec spec = spec_of(mesh, {Shard(0)}, {size});
      const at::Tensor global = at::arange(1, size + 1, at::kFloat);
      const Halo halo(spec, spec, 0, [&](const Range& range) { return sliding.reach(range); });
      const at::Tensor needed = halo.fetch(local_of(global, spec), -1);
      ASSERT_EQ(needed.size(0), halo.needed().size);
      for (int64_t i = 0; i < needed.size(0); ++i) {
        const int64_t position = halo.needed().offset + i;
        EXPECT_EQ(needed[i].item<float>(), position < 0 || position >= size ? -1 : position + 1);
      }
      // Each position gets one from each rank whose windows look at it.
      const at::Tensor gradient = halo.give_back(at::ones_like(needed));
      at::Tensor expected = at::zeros({size});
      for (int64_t rank = 0; rank < 4; ++rank) {
        const std::vector<int64_t> coordinate{rank};
        const int64_t offset = spec.global_offset(coordinate)[0], count = spec.local_shape(coordinate)[0];
        if (count == 0) continue;
        const int64_t first = std::max<int64_t>(offset - 1, 0), end = std::min(offset + count + 1, size);
        expected.slice(0, first, end).add_(1);
      }
      EXPECT_TRUE(at::equal(gradient, local_of(expected, spec)));
    }
  });
}

}  // namespace
}  // namespace tessera::kernels
