#pragma once

#include <tessera/comm/run.h>

#include <vector>

#include <gtest/gtest.h>

#include "tests/support/compare.h"

namespace tessera {

inline constexpr int64_t kBatch = 0, kHeight = 2;  // dims of images

/// All images with every placement, other tensors replicated; on meshes of one and of two dims.
class Spatial : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  static void check(const testing::Function& function, const testing::Tensors& inputs, size_t images = 1) {
    run(c10::multiply_integers(GetParam()), [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, GetParam());
      for (const Placements& placed : testing::all_placements(mesh.ndim(), inputs[0].dim(), false)) {
        std::vector<Placements> placements(inputs.size(), Placements(mesh.ndim(), Replicate()));
        for (size_t i = 0; i < images; ++i) placements[i] = placed;
        testing::compare(function, inputs, mesh, placements);
      }
    });
  }
};
inline const auto kSpatialMeshes = ::testing::Values(std::vector<int64_t>{4}, std::vector<int64_t>{2, 2});

}  // namespace tessera
