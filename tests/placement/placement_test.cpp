#include <tessera/placement/placement.h>
#include <tessera/placement/reduce_op.h>

#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_error;

std::vector<Placement> samples() {
  std::vector<Placement> out = {Replicate(), NormPartial(2), NormPartial(2.5), NormPartial(-1)};
  for (const int64_t dim : {-2, -1, 0, 1, 7}) {
    out.push_back(Shard(dim));
    for (const int64_t split : {1, 2, 3}) out.push_back(StridedShard(dim, split));
  }
  for (const ReduceOp op : kReduceOps) {
    if (op != ReduceOp::norm) out.push_back(Partial(op));
  }
  return out;
}

TEST(Placement, KindsAndTheirParts) {
  EXPECT_TRUE(Placement().is_replicate());
  EXPECT_EQ(Placement(), Replicate());

  EXPECT_TRUE(Shard(1).is_shard());
  EXPECT_TRUE(Shard(1).is_shard(1));
  EXPECT_FALSE(Shard(1).is_shard(0));
  EXPECT_TRUE(Shard(1).is_shard_like(1));
  EXPECT_FALSE(Shard(1).is_strided_shard());
  EXPECT_EQ(Shard(-1).dim(), -1);
  EXPECT_EQ(Shard(3).split(), 1);

  EXPECT_TRUE(StridedShard(1, 2).is_strided_shard());
  EXPECT_FALSE(StridedShard(1, 2).is_shard());
  EXPECT_TRUE(StridedShard(1, 2).is_shard_like());
  EXPECT_FALSE(StridedShard(1, 2).is_shard_like(0));
  EXPECT_EQ(StridedShard(1, 2).dim(), 1);
  EXPECT_EQ(StridedShard(1, 2).split(), 2);

  EXPECT_EQ(Partial().op(), ReduceOp::sum);
  EXPECT_TRUE(Partial(ReduceOp::max).is_partial());
  EXPECT_TRUE(Partial(ReduceOp::max).is_partial(ReduceOp::max));
  EXPECT_FALSE(Partial(ReduceOp::max).is_partial(ReduceOp::sum));
  EXPECT_EQ(NormPartial(2.5).op(), ReduceOp::norm);
  EXPECT_EQ(NormPartial(2.5).norm(), 2.5);
  EXPECT_FALSE(Replicate().is_partial(ReduceOp::sum));
  EXPECT_FALSE(Replicate().is_shard(0));
}

TEST(Placement, EachSampleIsOfExactlyOneKindAndEqualToItselfOnly) {
  const auto all = samples();
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].is_replicate() + all[i].is_shard() + all[i].is_strided_shard() + all[i].is_partial(), 1);
    for (size_t j = 0; j < all.size(); ++j) {
      EXPECT_EQ(all[i] == all[j], i == j) << all[i] << ' ' << all[j];
      EXPECT_EQ(all[i].str() == all[j].str(), i == j) << all[i] << ' ' << all[j];
    }
  }
  EXPECT_EQ(std::unordered_set<Placement>(all.begin(), all.end()).size(), all.size());
}

TEST(Placement, Text) {
  EXPECT_EQ(Replicate().str(), "R");
  EXPECT_EQ(Shard(0).str(), "S(0)");
  EXPECT_EQ(Shard(-1).str(), "S(-1)");
  EXPECT_EQ(StridedShard(0, 2).str(), "SS(0, 2)");
  EXPECT_EQ(Partial().str(), "P(sum)");
  EXPECT_EQ(NormPartial(2).str(), "P(norm 2)");
  EXPECT_EQ(NormPartial(0.1).str(), "P(norm 0.1)");
  EXPECT_EQ(c10::str(Placements{Shard(0), Replicate(), Partial(ReduceOp::avg)}), "[S(0), R, P(avg)]");
}

TEST(Placement, RefusesWhatMakesNoSense) {
  EXPECT_THROW(StridedShard(0, 0), c10::ValueError);
  EXPECT_THROW(Shard(int64_t{1} << 40), c10::IndexError);
  expect_error<c10::ValueError>([] { Partial(ReduceOp::norm); }, {"NormPartial(p)"});
  expect_error<c10::ValueError>([] { NormPartial(0); }, {"Partial(sum)"});
  EXPECT_THROW(NormPartial(INFINITY), c10::ValueError);
  EXPECT_THROW(NormPartial(NAN), c10::ValueError);
  EXPECT_EQ(error_of<c10::ValueError>([] { (void)Replicate().dim(); }), "R has no tensor dim");
  EXPECT_EQ(error_of<c10::ValueError>([] { (void)Partial().split(); }), "P(sum) has no split");
  EXPECT_EQ(error_of<c10::ValueError>([] { (void)Shard(1).op(); }), "S(1) has no reduce op");
  EXPECT_EQ(error_of<c10::ValueError>([] { (void)Partial().norm(); }), "P(sum) has no norm");
}

TEST(Normalize, CountsDimsFromTheStart) {
  EXPECT_EQ(normalize({Shard(-1), Replicate()}, 2), (Placements{Shard(1), Replicate()}));
  for (int64_t ndim = 0; ndim <= 3; ++ndim) {
    for (int64_t dim = -5; dim <= 5; ++dim) {
      if (dim >= -ndim && dim < ndim) {
        const int64_t positive = dim < 0 ? dim + ndim : dim;
        EXPECT_EQ(normalize({Shard(dim), StridedShard(dim, 2), Partial()}, ndim),
                  (Placements{Shard(positive), StridedShard(positive, 2), Partial()}));
      } else {
        EXPECT_THROW(normalize({Shard(dim)}, ndim), c10::IndexError) << dim << ' ' << ndim;
        EXPECT_THROW(normalize({StridedShard(dim, 2)}, ndim), c10::IndexError) << dim << ' ' << ndim;
      }
    }
  }
}

TEST(Normalize, StridedShardWithSplitOneIsShard) {
  EXPECT_EQ(normalize({StridedShard(-1, 1), StridedShard(0, 2)}, 2),
            (Placements{Shard(1), StridedShard(0, 2)}));
}

TEST(Normalize, ErrorNamesMeshDimPlacementAndRank) {
  expect_error<c10::IndexError>(
      [] {
        normalize({Replicate(), Shard(2)}, 2);
      },
      {"S(2)", "mesh dim 1", "[R, S(2)]", "2 dims", "-2 to 1"});
  expect_error<c10::IndexError>([] { normalize({Shard(0)}, 0); }, {"only be replicated"});
}

TEST(CheckPartialsAgree, OneOpOrSumWithAvg) {
  std::vector<Placement> partials = {NormPartial(2), NormPartial(3)};
  for (const ReduceOp op : kReduceOps) {
    if (op != ReduceOp::norm) partials.push_back(Partial(op));
  }
  for (const Placement& a : partials) {
    EXPECT_NO_THROW(check_partials_agree({a, Replicate(), Shard(0)}));
    for (const Placement& b : partials) {
      const bool linear = (a.is_partial(ReduceOp::sum) || a.is_partial(ReduceOp::avg)) &&
                          (b.is_partial(ReduceOp::sum) || b.is_partial(ReduceOp::avg));
      if (a == b || linear) {
        EXPECT_NO_THROW(check_partials_agree({a, Shard(0), b}));
      } else {
        expect_error<c10::ValueError>([&] { check_partials_agree({a, Shard(0), b}); }, {a.str(), b.str()});
      }
    }
  }
}

TEST(ReduceOp, NamesReadBack) {
  std::unordered_set<std::string_view> names;
  for (const ReduceOp op : kReduceOps) {
    EXPECT_EQ(reduce_op(name(op)), op);
    names.insert(name(op));
  }
  EXPECT_EQ(names.size(), std::size(kReduceOps));
  EXPECT_EQ(name(ReduceOp::product), "product");
  EXPECT_EQ(reduce_op("prod"), std::nullopt);
}

TEST(ReduceOp, Properties) {
  for (const ReduceOp op : kReduceOps) {
    EXPECT_EQ(is_linear(op), op == ReduceOp::sum || op == ReduceOp::avg) << op;
    EXPECT_EQ(is_idempotent(op), op != ReduceOp::sum && op != ReduceOp::product && op != ReduceOp::norm)
        << op;
  }
}

double neutral_value(ReduceOp op, c10::ScalarType dtype) { return neutral(op, dtype).value().toDouble(); }

TEST(ReduceOp, NeutralElementsDoNothing) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte,
                           at::kBool, at::kFloat8_e4m3fn, at::kUInt64}) {
    EXPECT_EQ(neutral_value(ReduceOp::sum, dtype), 0);
    EXPECT_EQ(neutral_value(ReduceOp::norm, dtype), 0);
    EXPECT_EQ(neutral_value(ReduceOp::product, dtype), 1);
    EXPECT_EQ(neutral_value(ReduceOp::any, dtype), 0);
    EXPECT_EQ(neutral_value(ReduceOp::all, dtype), 1);
    EXPECT_EQ(neutral(ReduceOp::avg, dtype), std::nullopt);
  }
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e5m2}) {
    EXPECT_EQ(neutral_value(ReduceOp::min, dtype), INFINITY) << dtype;
    EXPECT_EQ(neutral_value(ReduceOp::max, dtype), -INFINITY) << dtype;
  }
  EXPECT_EQ(neutral_value(ReduceOp::min, at::kFloat8_e4m3fn), 448);
  EXPECT_EQ(neutral_value(ReduceOp::max, at::kFloat8_e4m3fn), -448);
  EXPECT_EQ(neutral(ReduceOp::min, at::kLong)->toLong(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(neutral(ReduceOp::max, at::kLong)->toLong(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(neutral(ReduceOp::min, at::kUInt64)->toUInt64(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(neutral(ReduceOp::max, at::kByte)->toLong(), 0);
  EXPECT_TRUE(neutral(ReduceOp::min, at::kBool)->toBool());
  EXPECT_FALSE(neutral(ReduceOp::max, at::kBool)->toBool());
  EXPECT_EQ(neutral_value(ReduceOp::sum, at::kComplexFloat), 0);
  expect_error<c10::Error>([] { neutral(ReduceOp::min, at::kComplexFloat); }, {"ComplexFloat", "no order"});
}

}  // namespace
}  // namespace tessera
