// What one device refuses, as pure metadata: no ranks run.

#include <tessera/dispatch/refusal.h>

#include <algorithm>
#include <vector>

#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include "tests/dispatch/support.h"
#include "tests/placement/fake_mesh.h"

namespace tessera {
namespace {

using testing::PreparedCall;
using testing::tensor_of;

std::vector<c10::DimVector> all_coordinates(c10::IntArrayRef mesh_shape) {
  std::vector<c10::DimVector> result{{}};
  for (const int64_t size : mesh_shape) {
    std::vector<c10::DimVector> longer;
    for (const c10::DimVector& each : result) {
      for (int64_t i = 0; i < size; ++i) {
        longer.push_back(each);
        longer.back().push_back(i);
      }
    }
    result = std::move(longer);
  }
  return result;
}

std::vector<Placements> all_placements(size_t ndim) {
  const Placement each[] = {Replicate(),        Partial(),          Shard(0),          Shard(1),
                            StridedShard(0, 2), StridedShard(0, 3), StridedShard(1, 2)};
  std::vector<Placements> result{{}};
  for (size_t m = 0; m < ndim; ++m) {
    std::vector<Placements> longer;
    for (const Placements& placements : result) {
      for (const Placement& placement : each) {
        longer.push_back(placements);
        longer.back().push_back(placement);
      }
    }
    result = std::move(longer);
  }
  return result;
}

/// For every layout, against a count over all coordinates. The first rank always holds something.
TEST(Refusal, HoldsNothingSomewhere) {
  int64_t in_the_middle = 0;
  for (const std::vector<int64_t>& mesh_shape :
       std::vector<std::vector<int64_t>>{{1}, {2}, {4}, {2, 3}, {3, 2}, {2, 2, 2}}) {
    const DeviceMesh mesh = fake_mesh(mesh_shape);
    const auto coordinates = all_coordinates(mesh_shape);
    for (const Placements& placements : all_placements(mesh_shape.size())) {
      for (const int64_t rows : {0, 1, 2, 3, 5, 6, 7, 8}) {
        for (const int64_t columns : {1, 4}) {
          const Spec spec(mesh, placements, {rows, columns}, std::nullopt, at::kLong);
          std::vector<int64_t> held;
          for (const c10::DimVector& coordinate : coordinates)
            held.push_back(c10::multiply_integers(spec.local_shape(coordinate)));
          const bool expected = rows > 0 && std::count(held.begin(), held.end(), 0) > 0;
          EXPECT_EQ(holds_nothing_somewhere({spec}), expected) << spec;
          if (rows > 0) EXPECT_GT(held[0], 0) << spec;
          in_the_middle += expected && held.back() > 0;
        }
      }
    }
  }
  EXPECT_GT(in_the_middle, 0);  // where the last rank is no measure
}

TEST(Refusal, LooksAtADivisorOnlyWhereRanksSeeDifferentOnes) {
  const DeviceMesh mesh = fake_mesh({2}, {}, /*rank=*/1);
  const auto tensor = [&](const Placement& placement, int64_t rows, at::ScalarType dtype = at::kLong) {
    return tensor_of(Spec(mesh, placement, {rows, 3}, std::nullopt, dtype));
  };
  const auto check = [&](Stack arguments, bool looks, bool together) {
    for (const char* op : {"aten::floor_divide", "aten::remainder.Tensor", "aten::fmod.Tensor"}) {
      const OpPlan plan = PreparedCall(op, arguments).plan();
      EXPECT_TRUE(plan.by_rule);
      EXPECT_EQ(plan.looks_at_divisor, looks) << op;
      EXPECT_EQ(plan.refuses_together, together) << op;
    }
  };
  const Placement R = Replicate(), S = Shard(0);
  check({tensor(S, 4), tensor(S, 4)}, false, true);
  check({tensor(S, 4), tensor(R, 4)}, true, false);   // each rank gets a slice of it
  check({tensor(R, 4), tensor(R, 4)}, false, false);  // each computes with all of it
  check({tensor(S, 4), at::zeros({}, at::kLong)}, false, false);
  check({tensor(S, 1), at::zeros({}, at::kLong)}, true, false);  // the second rank computes nothing
  check({tensor(S, 0), at::zeros({}, at::kLong)}, false, false);
  check({tensor(S, 4, at::kFloat), tensor(S, 4, at::kFloat)}, false, false);
  check({tensor(S, 4), tensor(S, 4, at::kFloat)}, false, false);
}

}  // namespace
}  // namespace tessera
