#include <tessera/placement/layout.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;

using c10::DimVector;
using c10::IntArrayRef;
using Elements = std::vector<int64_t>;

const std::vector<Placement> kPlacements = {Replicate(),        Shard(0),           Shard(1),
                                            StridedShard(0, 2), StridedShard(1, 3), Partial()};
const std::vector<DimVector> kMeshes = {{1}, {2}, {3}, {4}, {2, 2}, {2, 3}, {2, 2, 2}};
const std::vector<DimVector> kShapes = {{8, 12}, {6, 6}, {5, 7}, {7, 1},    {1, 3},
                                        {2, 3},  {0, 5}, {0, 0}, {13, 4, 1}};

// All lists of `length` items of `items`.
template <typename Item>
std::vector<std::vector<Item>> lists(const std::vector<Item>& items, size_t length) {
  std::vector<std::vector<Item>> out = {{}};
  for (size_t i = 0; i < length; ++i) {
    std::vector<std::vector<Item>> longer;
    for (const auto& list : out) {
      for (const Item& item : items) {
        longer.push_back(list);
        longer.back().push_back(item);
      }
    }
    out = std::move(longer);
  }
  return out;
}

std::vector<DimVector> coordinates(IntArrayRef mesh_shape) {
  std::vector<DimVector> out = {{}};
  for (const int64_t size : mesh_shape) {
    std::vector<DimVector> longer;
    for (const DimVector& start : out) {
      for (int64_t i = 0; i < size; ++i) {
        longer.push_back(start);
        longer.back().push_back(i);
      }
    }
    out = std::move(longer);
  }
  return out;
}

std::vector<ShardOrder> orders(size_t mesh_ndim) {
  ShardOrder order;
  for (size_t i = 0; i < mesh_ndim; ++i) order.push_back(static_cast<int64_t>(i));
  std::vector<ShardOrder> out = {{}};
  do {
    out.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return out;
}

Elements expand(const Pieces& pieces) {
  Elements out;
  for (const Range& piece : pieces) {
    for (int64_t i = piece.offset; i < piece.end(); ++i) out.push_back(i);
  }
  return out;
}

// The same element by element: deals blocks of ceil(size / count) out in turn.
Elements chunk_of(const Elements& local, int64_t count, int64_t index) {
  const auto size = static_cast<int64_t>(local.size());
  const int64_t block = std::max<int64_t>((size + count - 1) / count, 1);
  Elements out;
  for (int64_t i = 0; i < size; ++i) {
    if (i / block == index) out.push_back(local[i]);
  }
  return out;
}

Elements local_elements(int64_t size, int64_t dim, IntArrayRef mesh_shape,
                        const std::vector<Placement>& placements, IntArrayRef order, IntArrayRef coordinate) {
  Elements local(size);
  std::iota(local.begin(), local.end(), 0);
  for (size_t i = 0; i < mesh_shape.size(); ++i) {
    const size_t mesh_dim = order.empty() ? i : order[i];
    const Placement& placement = placements[mesh_dim];
    if (!placement.is_shard_like() || placement.dim() != dim) continue;
    Elements kept;
    for (int64_t part = 0; part < placement.split(); ++part) {
      const Elements mine =
          chunk_of(chunk_of(local, placement.split(), part), mesh_shape[mesh_dim], coordinate[mesh_dim]);
      kept.insert(kept.end(), mine.begin(), mine.end());
    }
    local = kept;
  }
  return local;
}

TEST(Layout, ContractExamples) {
  EXPECT_EQ(local_pieces({8}, {2, 2}, {StridedShard(0, 2), Replicate()}, {}, {1, 0}),
            (std::vector<Pieces>{{{2, 2}, {6, 2}}}));
  EXPECT_EQ(local_shape({10, 3}, {4}, {Shard(0)}, {}, {3}), (DimVector{1, 3}));
  EXPECT_EQ(local_shape_and_global_offset({10, 3}, {4}, {Shard(0)}, {}, {3}).offset, (DimVector{9, 0}));
  EXPECT_EQ(local_shape({2, 3}, {4}, {Shard(0)}, {}, {3}), (DimVector{0, 3}));
  EXPECT_EQ(local_shape_and_global_offset({2, 3}, {4}, {Shard(0)}, {}, {3}).offset, (DimVector{2, 0}));
  EXPECT_EQ(local_shape({2, 3}, {4}, {Shard(-1)}, {}, {0}), (DimVector{2, 1}));
  EXPECT_EQ(local_shape({}, {2}, {Partial()}, {}, {1}), DimVector{});
}

// [SS(0, 2), S(0)] and [S(0), S(0)] with the second mesh dim first are two ways to write one layout.
TEST(Layout, StridedShardWritesDownTheReverseOrder) {
  const std::vector<Elements> rows = {{0, 1}, {4, 5}, {2, 3}, {6, 7}};
  const auto all = coordinates({2, 2});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    EXPECT_EQ(expand(local_pieces({8}, {2, 2}, {StridedShard(0, 2), Shard(0)}, {}, all[rank])[0]),
              rows[rank]);
    EXPECT_EQ(expand(local_pieces({8}, {2, 2}, {Shard(0), Shard(0)}, {1, 0}, all[rank])[0]), rows[rank]);
  }
}

// Every case: what each rank holds, and that the ranks together hold each element exactly once for each way
// to choose the mesh coordinates that do not shard the tensor.
TEST(Layout, ShardsTileTheTensor) {
  int64_t cases = 0;
  for (const DimVector& mesh : kMeshes) {
    const auto all = coordinates(mesh);
    for (const auto& placements : lists(kPlacements, mesh.size())) {
      int64_t copies = 1;
      for (size_t i = 0; i < mesh.size(); ++i) copies *= placements[i].is_shard_like() ? 1 : mesh[i];
      for (const ShardOrder& order : orders(mesh.size())) {
        for (const DimVector& shape : kShapes) {
          std::map<Elements, int64_t> holders;
          std::vector<DimVector> locals;
          for (const DimVector& coordinate : all) {
            const auto pieces = local_pieces(shape, mesh, placements, order, coordinate);
            const LocalBox box = local_shape_and_global_offset(shape, mesh, placements, order, coordinate);
            ASSERT_EQ(pieces.size(), shape.size());
            std::vector<Elements> local;
            for (size_t dim = 0; dim < shape.size(); ++dim) {
              local.push_back(expand(pieces[dim]));
              ASSERT_EQ(local[dim], local_elements(shape[dim], static_cast<int64_t>(dim), mesh, placements,
                                                   order, coordinate));
              ASSERT_EQ(box.shape[dim], static_cast<int64_t>(local[dim].size()));
              ASSERT_EQ(box.offset[dim], local[dim].empty() ? shape[dim] : local[dim].front());
            }
            ASSERT_EQ(local_shape(shape, mesh, placements, order, coordinate), box.shape);
            locals.push_back(box.shape);
            for (const int64_t row : local[0]) {
              for (const int64_t column : local[1]) ++holders[{row, column}];
            }
            ++cases;
          }
          ASSERT_EQ(static_cast<int64_t>(holders.size()), shape[0] * shape[1]);
          for (const auto& [element, count] : holders) ASSERT_EQ(count, copies);
          ASSERT_EQ(global_shape_from_locals(locals, mesh, placements, order), shape);
        }
      }
    }
  }
  EXPECT_EQ(cases, 9 * (6 * 2 * (1 + 2 + 3 + 4) + 36 * 3 * (4 + 6) + 216 * 7 * 8));
}

TEST(GlobalShape, IfEvenIsTheInverseOfEvenShards) {
  EXPECT_EQ(global_shape_if_even({2, 3}, {2, 4}, {Shard(0), Shard(0)}), (DimVector{16, 3}));
  const DimVector shape = {24, 36};
  int64_t cases = 0;
  for (const DimVector& mesh : kMeshes) {
    for (const auto& placements : lists(kPlacements, mesh.size())) {
      const auto all = coordinates(mesh);
      const DimVector first = local_shape(shape, mesh, placements, {}, all.front());
      const bool even = std::all_of(all.begin(), all.end(), [&](const DimVector& coordinate) {
        return local_shape(shape, mesh, placements, {}, coordinate) == first;
      });
      if (!even) continue;
      EXPECT_EQ(global_shape_if_even(first, mesh, placements), shape) << mesh << placements;
      ++cases;
    }
  }
  EXPECT_GT(cases, 200);
}

TEST(GlobalShape, FromUnevenLocals) {
  EXPECT_EQ(global_shape_from_locals({{3}, {3}, {3}, {1}}, {4}, {Shard(0)}), (DimVector{10}));
  EXPECT_EQ(global_shape_from_locals({{1}, {1}, {0}, {0}}, {4}, {Shard(0)}), (DimVector{2}));
  EXPECT_EQ(global_shape_from_locals({{}, {}}, {2}, {Replicate()}), DimVector{});
}

TEST(GlobalShape, NamesTheRankThatDiffers) {
  expect_error<c10::ValueError>(
      [] {
        global_shape_from_locals({{3}, {2}, {3}, {2}}, {4}, {Shard(0)});
      },
      {"rank at [1]", "shape [2]", "should have [3]", "global shape [10]", "[S(0)]"});
  expect_error<c10::ValueError>(
      [] {
        global_shape_from_locals({{2, 4}, {2, 4}, {2, 4}, {2, 5}}, {2, 2}, {Shard(0), Replicate()});
      },
      {"rank at [1, 1]", "shape [2, 5]", "should have [2, 4]"});
  expect_error<c10::ValueError>(
      [] {
        global_shape_from_locals({{2, 4}, {2}}, {2}, {Shard(0)});
      },
      {"rank at [1]", "1 dims", "expected 2"});
  expect_error<c10::ValueError>(
      [] {
        global_shape_from_locals({{2}, {2}, {2}}, {2}, {Shard(0)});
      },
      {"got 3 local shapes", "expected one for each of its 2 ranks"});
}

TEST(Layout, RefusesArgumentsThatDoNotFit) {
  expect_error<c10::ValueError>(
      [] {
        local_shape({4}, {2, 2}, {Shard(0)}, {}, {0, 0});
      },
      {"got 1 placements", "[S(0)]", "[2, 2]", "2 dims"});
  expect_error<c10::IndexError>([] { local_shape({4}, {2}, {Shard(0)}, {}, {2}); }, {"[2]", "shape [2]"});
  EXPECT_THROW(local_shape({4}, {2}, {Shard(0)}, {}, {-1}), c10::IndexError);
  EXPECT_THROW(local_shape({4}, {2}, {Shard(0)}, {}, {0, 0}), c10::IndexError);
  EXPECT_THROW(local_shape({4}, {2}, {Shard(1)}, {}, {0}), c10::IndexError);
  EXPECT_THROW(local_shape({-4}, {2}, {Shard(0)}, {}, {0}), c10::ValueError);
  EXPECT_THROW(local_shape({4}, {0}, {Shard(0)}, {}, {0}), c10::ValueError);
  for (const ShardOrder& order : {ShardOrder{0}, {0, 0}, {1, 2}, {-1, 0}, {0, 1, 2}}) {
    expect_error<c10::ValueError>(
        [&] {
          canonical_order(order, {Shard(0), Shard(0)});
        },
        {c10::str(order), "permutation", "[0, 1]"});
    EXPECT_THROW(local_shape({4}, {2, 2}, {Shard(0), Shard(0)}, order, {0, 0}), c10::ValueError);
  }
}

TEST(Layout, RefusesWhatCannotBeCounted) {
  const int64_t huge = int64_t{1} << 40;
  const auto countless = [](const auto& call) { expect_error<c10::ValueError>(call, {"can be counted"}); };
  countless([&] { global_shape_if_even({huge}, {huge}, {Shard(0)}); });
  countless([&] { global_shape_from_locals({}, {huge, huge}, {Replicate(), Replicate()}); });
  countless([&] {
    global_shape_from_locals(std::vector<DimVector>{{INT64_MAX}, {INT64_MAX}}, {2}, {Shard(0)});
  });
  countless([&] { local_strides({1, 1}, {huge, huge}); });
  // All ranks agree, whatever is left for each of them to split.
  expect_error<c10::ValueError>(
      [&] {
        local_pieces({huge}, {huge, 2}, {Shard(0), StridedShard(0, huge)}, {}, {0, 0});
      },
      {"1048576 chunks"});
}

TEST(CanonicalOrder, ContractExamples) {
  const Placements placements = {Shard(0), Shard(1), Shard(0)};
  EXPECT_EQ(canonical_order({1, 2, 0}, placements), (ShardOrder{2, 1, 0}));
  EXPECT_EQ(canonical_order({2, 1, 0}, placements), (ShardOrder{2, 1, 0}));
  EXPECT_EQ(canonical_order({1, 0, 2}, placements), ShardOrder{});
  EXPECT_EQ(canonical_order({0, 1, 2}, placements), ShardOrder{});
  EXPECT_EQ(canonical_order({}, placements), ShardOrder{});
}

// Two orders have the same canonical form exactly if they are the same layout.
TEST(CanonicalOrder, EqualExactlyForEqualLayouts) {
  const DimVector mesh = {2, 2, 2};
  const DimVector shape = {48, 48};
  for (const auto& placements : lists(kPlacements, mesh.size())) {
    const auto layout = [&](const ShardOrder& order) {
      std::vector<std::vector<Pieces>> all;
      for (const DimVector& at : coordinates(mesh))
        all.push_back(local_pieces(shape, mesh, placements, order, at));
      return all;
    };
    for (const ShardOrder& a : orders(mesh.size())) {
      const ShardOrder canonical = canonical_order(a, placements);
      ASSERT_EQ(canonical_order(canonical, placements), canonical);
      ASSERT_EQ(layout(canonical), layout(a));
      for (const ShardOrder& b : orders(mesh.size())) {
        if (canonical_order(b, placements) == canonical) {
          ASSERT_EQ(layout(a), layout(b));
        } else if (std::none_of(placements.begin(), placements.end(),
                                [](const Placement& p) { return p.is_strided_shard(); })) {
          ASSERT_NE(layout(a), layout(b)) << Placements(placements.begin(), placements.end()) << a << b;
        }
      }
    }
  }
}

TEST(Strides, LocalOnesKeepTheOrderOfMemoryAndAreDense) {
  EXPECT_EQ(local_strides({1, 4}, {2, 3}), (DimVector{1, 2}));
  EXPECT_EQ(local_strides({32, 1, 8}, {4, 8, 2}), (DimVector{16, 1, 8}));
  std::vector<int64_t> permutation = {0, 1, 2};
  do {
    const at::Tensor global = at::empty({4, 6, 8}).permute(permutation);
    for (const auto& local : lists<int64_t>({1, 2, 3, 4}, 3)) {
      const DimVector strides = local_strides(global.strides(), local);
      EXPECT_TRUE(at::empty_strided(local, strides).is_non_overlapping_and_dense());
      for (size_t i = 0; i < 3; ++i) {
        for (size_t j = 0; j < 3; ++j) {
          if (global.stride(static_cast<int64_t>(i)) > global.stride(static_cast<int64_t>(j))) {
            EXPECT_GE(strides[i], strides[j] * local[j]);
          }
        }
      }
    }
  } while (std::next_permutation(permutation.begin(), permutation.end()));
  for (const auto& shape : lists<int64_t>({0, 1, 3}, 3)) {
    EXPECT_EQ(local_strides({20, 5, 1}, shape), at::empty(shape).strides());
  }
  EXPECT_THROW(local_strides({1}, {2, 3}), c10::ValueError);
}

}  // namespace
}  // namespace tessera
