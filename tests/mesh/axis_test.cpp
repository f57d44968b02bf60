// The algebra of mesh dims against its contract, for all axes of small roots.

#include <tessera/mesh/axis.h>

#include <algorithm>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using Digits = std::vector<Digit>;

Axis axis(const Digits& digits) {
  Axis result;
  for (const Digit& digit : digits) result.append(digit);
  return result;
}

/// The dims of a row-major mesh.
std::vector<Axis> dims_of(c10::IntArrayRef shape) {
  std::vector<Axis> axes(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    axes[i].append({shape[i], stride});
    stride *= shape[i];
  }
  return axes;
}

const std::vector<std::vector<int64_t>> kShapes = {{1},       {5},       {2, 3},    {3, 1, 2},
                                                   {2, 2, 2}, {4, 2, 3}, {1, 2, 1}, {2, 3, 2, 2}};

/// Calls fn with every list of different dims of a mesh, in every order.
template <class Fn>
void for_each_choice(const std::vector<Axis>& dims, Fn fn) {
  for (size_t mask = 1; mask < size_t{1} << dims.size(); ++mask) {
    std::vector<size_t> chosen;
    for (size_t i = 0; i < dims.size(); ++i) {
      if (mask >> i & 1) chosen.push_back(i);
    }
    do {
      std::vector<Axis> axes;
      for (const size_t i : chosen) axes.push_back(dims[i]);
      fn(axes);
    } while (std::next_permutation(chosen.begin(), chosen.end()));
  }
}

int64_t size_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

TEST(Axis, NormalForm) {
  EXPECT_EQ(axis({{2, 4}, {2, 2}}).digits, (Digits{{4, 2}}));
  EXPECT_EQ(axis({{2, 4}, {1, 4}, {2, 1}}).digits, (Digits{{2, 4}, {2, 1}}));
  EXPECT_EQ(axis({{1, 1}}).digits, Digits{});
  EXPECT_EQ(axis({{2, 1}, {2, 2}}).digits, (Digits{{2, 1}, {2, 2}}));
}

TEST(Axis, ContractExamples) {
  EXPECT_EQ(axis({}).size(), 1);
  EXPECT_EQ(axis({{2, 6}, {3, 1}}).coordinate(7), 4);
  EXPECT_EQ(axis({{2, 6}, {3, 1}}).offset(4), 7);
  EXPECT_TRUE(overlap(axis({{4, 2}}), axis({{2, 4}})));
  EXPECT_FALSE(overlap(axis({{2, 4}}), axis({{4, 1}})));
  const std::vector<Axis> outer_and_inner{axis({{2, 4}}), axis({{2, 1}})};
  EXPECT_THAT(indices_along(outer_and_inner, 2), ElementsAre(2, 3, 6, 7));
  const auto halves = split(axis({{8, 1}}), {2, 4});
  ASSERT_TRUE(halves);
  EXPECT_EQ((*halves)[0].digits, (Digits{{2, 4}}));
  EXPECT_EQ((*halves)[1].digits, (Digits{{4, 1}}));
  EXPECT_FALSE(split(axis({{2, 6}, {3, 1}}), {3, 2}));
}

TEST(Axis, CoordinateAndOffsetAreInverse) {
  for (const auto& shape : kShapes) {
    for_each_choice(dims_of(shape), [](const std::vector<Axis>& axes) {
      const Axis joined = join(axes);
      for (int64_t c = 0; c < joined.size(); ++c) EXPECT_EQ(joined.coordinate(joined.offset(c)), c);
    });
  }
}

TEST(Axis, JoinIsRowMajor) {
  for (const auto& shape : kShapes) {
    for_each_choice(dims_of(shape), [&](const std::vector<Axis>& axes) {
      const Axis joined = join(axes);
      for (int64_t index = 0; index < size_of(shape); ++index) {
        int64_t expected = 0;
        for (const Axis& each : axes) expected = expected * each.size() + each.coordinate(index);
        EXPECT_EQ(joined.coordinate(index), expected);
      }
    });
  }
}

TEST(Axis, SplitUndoesJoin) {
  for (const auto& shape : kShapes) {
    for_each_choice(dims_of(shape), [](const std::vector<Axis>& axes) {
      std::vector<int64_t> sizes;
      for (const Axis& each : axes) sizes.push_back(each.size());
      const auto parts = split(join(axes), sizes);
      ASSERT_TRUE(parts);
      for (size_t i = 0; i < axes.size(); ++i) EXPECT_EQ((*parts)[i].digits, axes[i].digits);
    });
  }
}

/// Two axes do not overlap exactly if their coordinates are independent.
TEST(Axis, OverlapMeansDependentCoordinates) {
  const std::vector<Axis> all{axis({{2, 1}}), axis({{4, 1}}), axis({{2, 2}}),         axis({{4, 2}}),
                              axis({{2, 4}}), axis({{8, 1}}), axis({{2, 4}, {2, 1}}), axis({})};
  for (const Axis& a : all) {
    for (const Axis& b : all) {
      std::set<std::pair<int64_t, int64_t>> met;
      for (int64_t index = 0; index < 8; ++index) met.emplace(a.coordinate(index), b.coordinate(index));
      const bool independent = static_cast<int64_t>(met.size()) == a.size() * b.size();
      EXPECT_EQ(overlap(a, b), !independent);
    }
  }
}

TEST(Axis, CoversItsDigitsAndParts) {
  const std::vector<Axis> dims = dims_of({2, 3, 2, 2});
  for_each_choice(dims, [&](const std::vector<Axis>& axes) {
    for (const Axis& dim : dims) {
      const bool among = std::ranges::any_of(axes, [&](const Axis& a) { return a.digits == dim.digits; });
      EXPECT_EQ(covers(axes, dim), among);
    }
    EXPECT_TRUE(covers(axes, join(axes)));
  });
  EXPECT_TRUE(covers(std::vector<Axis>{axis({{8, 1}})}, axis({{2, 2}})));
  EXPECT_FALSE(covers(std::vector<Axis>{axis({{2, 4}}), axis({{2, 1}})}, axis({{4, 1}})));
}

TEST(Axis, IndicesAlongAreThoseThatDifferThereOnly) {
  for (const auto& shape : kShapes) {
    const std::vector<Axis> dims = dims_of(shape);
    for_each_choice(dims, [&](const std::vector<Axis>& axes) {
      for (int64_t index = 0; index < size_of(shape); ++index) {
        const int64_t first = first_index(axes, index);
        const std::vector<int64_t> found = indices_along(axes, first);
        EXPECT_EQ(first, *std::ranges::min_element(found));
        std::set<int64_t> expected;
        for (int64_t other = 0; other < size_of(shape); ++other) {
          const bool same_elsewhere = std::ranges::all_of(dims, [&](const Axis& dim) {
            const bool chosen =
                std::ranges::any_of(axes, [&](const Axis& a) { return a.digits == dim.digits; });
            return chosen || dim.coordinate(other) == dim.coordinate(index);
          });
          if (same_elsewhere) expected.insert(other);
        }
        EXPECT_EQ(std::set<int64_t>(found.begin(), found.end()), expected);
        const Axis joined = join(axes);
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_EQ(joined.coordinate(found[i]), static_cast<int64_t>(i));
      }
    });
  }
}

}  // namespace
}  // namespace tessera
