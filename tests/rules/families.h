#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"

namespace tessera {

/// Over meshes, and over sizes that split evenly, unevenly and into nothing.
class Families : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  static constexpr size_t kLimit = 40;  // placements of a case

  /// Of a matrix with 5 rows (uneven on 4 ranks), 8 (even) and 2 (some ranks hold nothing).
  void matrices(const testing::Function& function, bool partial = true) {
    for (const int64_t size : {5, 8, 2})
      testing::compare_all(function, {testing::numbers({size, 3}) * 0.3 + 0.1}, GetParam(), partial, kLimit);
  }
  void check(const testing::Function& function, const testing::Tensors& inputs, bool partial = true) {
    testing::compare_all(function, inputs, GetParam(), partial, kLimit);
  }
};

}  // namespace tessera
