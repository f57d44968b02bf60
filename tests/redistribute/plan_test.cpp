// Plans as pure functions of specs: no rank but the one that asks exists.

#include <tessera/placement/text.h>
#include <tessera/redistribute/overlap.h>
#include <tessera/redistribute/plan.h>

#include <array>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"
#include "tests/redistribute/cases.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::all_placements;
using testing::expect_error;
using enum StepKind;
using Kinds = std::vector<StepKind>;

Kinds kinds(const Plan& plan) {
  Kinds out;
  for (const Step& step : plan.steps) out.push_back(step.kind);
  return out;
}

/// Plans on one mesh, from text.
struct On {
  DeviceMesh mesh;
  c10::DimVector shape = {4096, 4096};
  CostModel costs = {};

  Spec spec(const char* text) const { return Spec(mesh, parse_placements(text), shape); }
  Plan operator()(const char* from, const char* to) const { return plan(spec(from), spec(to), costs); }
};

TEST(Overlap, OfPieces) {
  const auto check = [](const Pieces& a, const Pieces& b, const Pieces& in_a, const Pieces& in_b) {
    const Overlap found = overlap(a, b);
    EXPECT_EQ(found.in_a, in_a);
    EXPECT_EQ(found.in_b, in_b);
    EXPECT_EQ(shared_length(a, b), length(in_a));
    EXPECT_EQ(length(in_a), length(in_b));
  };
  check({{0, 4}}, {{2, 4}}, {{2, 2}}, {{0, 2}});
  check({{0, 2}, {4, 2}}, {{1, 4}}, {{1, 2}}, {{0, 1}, {3, 1}});
  check({}, {{0, 4}}, {}, {});
  check({{0, 2}}, {{2, 2}}, {}, {});
  check({{3, 5}}, {{3, 5}}, {{0, 5}}, {{0, 5}});
  check({{0, 1}, {2, 1}, {4, 1}}, {{0, 5}}, {{0, 3}}, {{0, 1}, {2, 1}, {4, 1}});
}

TEST(Plan, Prints) {
  const On on{fake_mesh({2, 4}, {"dp", "tp"})};
  EXPECT_EQ(on("[S(0), P(sum)]", "[R, S(1)]").str(),
            "[S(0), P(sum)] -> [R, S(1)]   f32[4096, 4096] on mesh(dp=2, tp=4)\n"
            "  1. reduce_scatter  tp  dim 1  24.0 MiB/rank    2.5 ms\n"
            "  2. all_gather      dp  dim 0   8.0 MiB/rank  848.9 us");
  EXPECT_EQ(on("[P(sum), P(sum)]", "[P(avg), R]").str(),
            "[P(sum), P(sum)] -> [P(avg), R]   f32[4096, 4096] on mesh(dp=2, tp=4)\n"
            "  1. all_reduce  tp  96.0 MiB/rank  10.1 ms\n"
            "  2. rescale     dp          local");
  EXPECT_EQ(on("[S(0), S(1)]", "[S(1), S(0)]").str(),
            "[S(0), S(1)] -> [S(1), S(0)]   f32[4096, 4096] on mesh(dp=2, tp=4)\n"
            "  1. all_to_all  dp,tp  dim 0,1  8.0 MiB/rank  848.9 us");
  EXPECT_EQ(on("[R, R]", "[R, R]").str(),
            "[R, R] -> [R, R]   f32[4096, 4096] on mesh(dp=2, tp=4)\n  nothing to do");
  const DeviceMesh unnamed = fake_mesh({2, 2});
  const Spec from(unnamed, {Shard(0), Shard(0)}, {8}),
      to(unnamed, {Shard(0), Shard(0)}, {8}, std::nullopt, at::kFloat, {1, 0});
  std::ostringstream out;
  out << plan(from, to);
  EXPECT_EQ(out.str(),
            "[S(0), S(0)] -> [S(0), S(0)] order (1, 0)   f32[8] on mesh(2, 2)\n"
            "  1. all_to_all  0,1  dim 0  8 B/rank  10.0 us");
}

TEST(Plan, OneStepWhereOneWillDo) {
  const On on{fake_mesh({4})};
  EXPECT_EQ(kinds(on("[S(0)]", "[R]")), Kinds{all_gather});
  EXPECT_EQ(kinds(on("[S(1)]", "[R]")), Kinds{all_gather});
  EXPECT_EQ(kinds(on("[SS(0, 2)]", "[R]")), Kinds{all_gather});
  EXPECT_EQ(kinds(on("[S(0)]", "[S(1)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[S(0)]", "[SS(0, 2)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[SS(0, 2)]", "[SS(0, 8)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[P(sum)]", "[R]")), Kinds{all_reduce});
  EXPECT_EQ(kinds(on("[P(max)]", "[R]")), Kinds{all_reduce});
  EXPECT_EQ(kinds(on("[P(norm 2)]", "[R]")), Kinds{all_reduce});
  EXPECT_EQ(kinds(on("[P(sum)]", "[S(0)]")), Kinds{reduce_scatter});
  EXPECT_EQ(kinds(on("[P(avg)]", "[S(1)]")), Kinds{reduce_scatter});
  EXPECT_EQ(kinds(on("[P(any)]", "[SS(1, 2)]")), Kinds{reduce_scatter});
  EXPECT_EQ(kinds(on("[R]", "[S(0)]")), Kinds{slice});
  EXPECT_EQ(kinds(on("[R]", "[SS(1, 2)]")), Kinds{slice});
  EXPECT_EQ(kinds(on("[R]", "[P(sum)]")), Kinds{to_partial});
  EXPECT_EQ(kinds(on("[S(0)]", "[P(sum)]")), Kinds{to_partial});
  EXPECT_EQ(kinds(on("[P(sum)]", "[P(avg)]")), Kinds{rescale});
  EXPECT_EQ(kinds(on("[P(avg)]", "[P(sum)]")), Kinds{rescale});
  EXPECT_EQ(kinds(on("[P(sum)]", "[P(max)]")), (Kinds{reduce_scatter, to_partial}));
  EXPECT_EQ(on("[P(sum)]", "[R]").steps[0].op, ReduceOp::sum);
  EXPECT_EQ(on("[P(avg)]", "[S(1)]").steps[0].op, ReduceOp::avg);
  EXPECT_EQ(on("[S(0)]", "[R]").steps[0].op, std::nullopt);
}

TEST(Plan, BytesAreThoseOfTheBusiestRank) {
  const On even{fake_mesh({4}), {8, 12}}, uneven{fake_mesh({4}), {5, 7}};
  EXPECT_EQ(even("[S(0)]", "[R]").bytes(), 4 * 72);
  EXPECT_EQ(even("[S(0)]", "[S(1)]").bytes(), 4 * 18);
  EXPECT_EQ(even("[P(sum)]", "[R]").bytes(), 4 * 2 * 72);
  EXPECT_EQ(even("[P(sum)]", "[S(0)]").bytes(), 4 * 72);
  EXPECT_EQ(even("[R]", "[S(0)]").bytes(), 0);
  EXPECT_EQ(uneven("[S(0)]", "[R]").bytes(), 4 * 35);    // the last rank holds nothing
  EXPECT_EQ(uneven("[S(0)]", "[S(1)]").bytes(), 4 * 8);  // rank 2: 5 rows of 2 columns, of which it has 2
  EXPECT_EQ(uneven("[P(sum)]", "[S(0)]").bytes(), 4 * 42);
  const LinkCost fake = LinkCost::of_backend("fake");
  EXPECT_DOUBLE_EQ(even("[S(0)]", "[R]").seconds(), fake.latency + 288 * fake.per_byte);
}

TEST(Plan, NeverThroughReplicateWhereSomethingIsCheaper) {
  const On on{fake_mesh({2, 4}, {"dp", "tp"})};
  EXPECT_EQ(kinds(on("[S(0), S(1)]", "[S(1), S(0)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[P(sum), R]", "[R, S(0)]")), (Kinds{slice, all_reduce}));
  EXPECT_EQ(kinds(on("[S(0), R]", "[R, S(0)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[S(0), R]", "[R, S(1)]")), (Kinds{slice, all_gather}));
  EXPECT_EQ(kinds(on("[S(0), P(sum)]", "[R, S(1)]")), (Kinds{reduce_scatter, all_gather}));
  EXPECT_EQ(kinds(on("[S(0), S(0)]", "[R, S(0)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[S(0), S(0)]", "[S(0), R]")), Kinds{all_gather});
  EXPECT_EQ(kinds(on("[S(0), S(0)]", "[S(0), S(1)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[SS(0, 4), S(0)]", "[S(0), S(0)]")), Kinds{all_to_all});
  EXPECT_EQ(kinds(on("[S(0), R]", "[P(sum), S(0)]")), Kinds{to_partial});
  for (const auto& from : all_placements(2)) {
    for (const auto& to : all_placements(2)) {
      const Plan found = plan(Spec(on.mesh, from, on.shape), Spec(on.mesh, to, on.shape));
      const bool asked = found.to.is_replicated() || found.from.is_replicated();
      for (const Step& step : found.steps) EXPECT_TRUE(asked || !step.after.is_replicated()) << found;
    }
  }
}

TEST(Plan, MergesMeshDimsIntoOneCollective) {
  const On on{fake_mesh({2, 4, 2}, {"pp", "dp", "tp"})};
  const auto one = [&](const char* from, const char* to, StepKind kind, std::vector<int64_t> dims) {
    const Plan found = on(from, to);
    ASSERT_EQ(kinds(found), Kinds{kind}) << found;
    EXPECT_EQ(std::vector<int64_t>(found.steps[0].mesh_dims.begin(), found.steps[0].mesh_dims.end()), dims);
  };
  one("[P(sum), P(sum), P(sum)]", "[R, R, R]", all_reduce, {0, 1, 2});
  one("[P(sum), S(0), P(sum)]", "[R, S(0), R]", all_reduce, {0, 2});
  one("[P(sum), P(avg), S(0)]", "[R, R, S(0)]", all_reduce, {0, 1});
  one("[S(0), S(0), S(0)]", "[R, R, R]", all_gather, {0, 1, 2});
  one("[S(0), S(0), S(0)]", "[S(0), R, R]", all_gather, {1, 2});
  one("[S(0), S(1), R]", "[R, R, R]", all_gather, {0, 1});
  one("[P(sum), P(sum), R]", "[S(0), S(0), R]", reduce_scatter, {0, 1});
  one("[P(max), R, P(max)]", "[S(0), R, S(1)]", reduce_scatter, {0, 2});
  one("[S(0), S(0), S(0)]", "[S(1), S(1), S(1)]", all_to_all, {0, 1, 2});
  const Spec reversed(on.mesh, {Shard(0), Shard(0), Replicate()}, on.shape, std::nullopt, at::kFloat,
                      {1, 0, 2});
  const Plan gathered = plan(reversed, on.spec("[R, R, R]"));
  ASSERT_EQ(kinds(gathered), Kinds{all_gather});
  EXPECT_EQ(gathered.steps[0].mesh_dims, (c10::SmallVector<int64_t, 4>{1, 0}));  // the outermost shard first
}

TEST(Plan, OnlyTheInnermostShardIsUndoneAlone) {
  const On on{fake_mesh({2, 2}), {8}};
  const auto ordered = [&](ShardOrder order) {
    return Spec(on.mesh, {Shard(0), Shard(0)}, {8}, std::nullopt, at::kFloat, order);
  };
  EXPECT_EQ(kinds(plan(ordered({}), on.spec("[S(0), R]"))), Kinds{all_gather});
  EXPECT_EQ(kinds(plan(ordered({1, 0}), on.spec("[S(0), R]"))), Kinds{all_to_all});
  EXPECT_EQ(kinds(plan(ordered({1, 0}), on.spec("[R, S(0)]"))), Kinds{all_gather});
  EXPECT_EQ(kinds(plan(ordered({}), ordered({1, 0}))), Kinds{all_to_all});
  EXPECT_EQ(kinds(plan(on.spec("[R, S(0)]"), ordered({1, 0}))), Kinds{slice});
  EXPECT_EQ(kinds(plan(on.spec("[R, S(0)]"), ordered({}))), Kinds{all_to_all});
  EXPECT_EQ(kinds(plan(on.spec("[P(sum), S(0)]"), ordered({1, 0}))), Kinds{reduce_scatter});
  EXPECT_EQ(kinds(plan(on.spec("[P(sum), S(0)]"), ordered({}))), (Kinds{reduce_scatter, all_to_all}));
  // The same layout in other words.
  EXPECT_FALSE(plan(ordered({1, 0}), on.spec("[SS(0, 2), S(0)]")).communicates());
}

TEST(Plan, MeshDimsOfSizeOneCostNothing) {
  const On on{fake_mesh({1, 4})};
  for (const auto& from : all_placements(2)) {
    for (const auto& to : all_placements(2)) {
      const Plan found = plan(Spec(on.mesh, from, on.shape), Spec(on.mesh, to, on.shape));
      if (from[1] == to[1]) {
        EXPECT_TRUE(found.steps.empty()) << found;
      }
      for (const Step& step : found.steps) {
        EXPECT_EQ(step.mesh_dims, (c10::SmallVector<int64_t, 4>{1})) << found;
      }
    }
  }
}

TEST(Plan, EqualSpecsNeedNothing) {
  const On on{fake_mesh({2, 2})};
  for (const auto& list : all_placements(2)) {
    EXPECT_TRUE(plan(Spec(on.mesh, list, {5, 7}), Spec(on.mesh, list, {5, 7})).steps.empty());
  }
  EXPECT_TRUE(plan(Spec(on.mesh, {Shard(0), Shard(1)}, {4, 4}),
                   Spec(on.mesh, {Shard(0), Shard(1)}, {4, 4}, c10::IntArrayRef{1, 4}))
                  .steps.empty());
}

TEST(Plan, EmptyTensorsAreNotCommunicated) {
  const On on{fake_mesh({2, 2}), {0, 4}};
  for (const auto& from : all_placements(2)) {
    for (const auto& to : all_placements(2)) {
      EXPECT_FALSE(plan(Spec(on.mesh, from, on.shape), Spec(on.mesh, to, on.shape)).communicates());
    }
  }
}

TEST(Plan, CostsDecide) {
  On on{fake_mesh({4, 4}, {"host", "card"}), {1024, 1024}};
  // Alike, one collective is best; if hosts are far from one another, they send as little as they can.
  EXPECT_EQ(kinds(on("[S(0), S(0)]", "[R, R]")), Kinds{all_gather});
  EXPECT_EQ(kinds(on("[P(sum), P(sum)]", "[R, R]")), Kinds{all_reduce});
  on.costs = {{{1e-5, 1e-8}, {1e-6, 1e-11}}};
  const Plan gather = on("[S(0), S(1)]", "[R, R]");
  ASSERT_EQ(kinds(gather), (Kinds{all_gather, all_gather})) << gather;
  EXPECT_EQ(gather.steps[0].mesh_dims[0], 0);
  EXPECT_EQ(gather.steps[1].mesh_dims[0], 1);
  const Plan reduce = on("[P(sum), P(sum)]", "[S(0), S(1)]");
  ASSERT_EQ(kinds(reduce), (Kinds{reduce_scatter, reduce_scatter})) << reduce;
  EXPECT_EQ(reduce.steps[0].mesh_dims[0], 1);
  // If starting is what costs, as few collectives as possible.
  on.costs = {{{1, 1e-12}, {1, 1e-12}}};
  EXPECT_EQ(kinds(on("[P(sum), S(0)]", "[S(0), S(0)]")).size(), 2u);
  EXPECT_EQ(kinds(on("[S(0), S(1)]", "[R, R]")), Kinds{all_gather});
  for (const char* backend : {"threads", "gloo", "nccl", "fake", "another"}) {
    EXPECT_GT(LinkCost::of_backend(backend).latency, 0) << backend;
    EXPECT_GT(LinkCost::of_backend(backend).per_byte, 0) << backend;
  }
  EXPECT_EQ(CostModel{}.of(on.mesh).size(), 2u);
  EXPECT_EQ(CostModel{}.of(on.mesh)[0], LinkCost::of_backend("fake"));
}

TEST(Plan, ChainsSpecsFromSourceToTarget) {
  const On on{fake_mesh({2, 3}), {5, 7}};
  for (const auto& from : all_placements(2)) {
    for (const auto& to : all_placements(2)) {
      const Plan found = plan(Spec(on.mesh, from, on.shape), Spec(on.mesh, to, on.shape));
      if (!found.steps.empty()) {
        EXPECT_EQ(found.steps.back().after, found.to) << found;
      }
      for (size_t i = 0; i < found.steps.size(); ++i) {
        const Step& step = found.steps[i];
        EXPECT_FALSE(step.mesh_dims.empty()) << found;
        EXPECT_EQ(step.communicates(), step.seconds > 0) << found;
        if (!step.communicates()) {
          EXPECT_EQ(step.bytes, 0) << found;
        }
        const bool merged = i == 0 || step.communicates() || found.steps[i - 1].kind != step.kind;
        EXPECT_TRUE(merged) << found;
      }
    }
  }
}

TEST(Plan, OfRanksOutsideTheMesh) {
  const On inside{fake_mesh({2, 2}, {}, 0, 4)}, outside{fake_mesh({2, 2}, {}, 1, 4)};
  const Plan here = inside("[S(0), P(sum)]", "[S(1), R]"), there = outside("[S(0), P(sum)]", "[S(1), R]");
  EXPECT_FALSE(outside.mesh.is_member());
  EXPECT_EQ(here.str(), there.str());
}

TEST(Plan, NamesWhatDoesNotFit) {
  const DeviceMesh mesh = fake_mesh({2, 2}, {"dp", "tp"});
  const Spec spec(mesh, {Shard(0), Replicate()}, {4, 4});
  expect_error<c10::ValueError>(
      [&] {
        plan(spec, Spec(fake_mesh({4}, {"x"}), {Shard(0)}, {4, 4}));
      },
      {"mesh(dp=2, tp=2)", "mesh(x=4)", "same mesh"});
  expect_error<c10::ValueError>(
      [&] {
        plan(spec, Spec(mesh, {Shard(0), Replicate()}, {4, 5}));
      },
      {"[4, 4]", "[4, 5]", "same global shape"});
  expect_error<c10::ValueError>(
      [&] {
        plan(spec, Spec(mesh, {Shard(0), Replicate()}, {4, 4}, std::nullopt, at::kDouble));
      },
      {"f32", "f64", "same dtype"});
  expect_error<c10::Error>([&] { plan(Spec(), spec); }, {"undefined"});
  const Spec other = spec.with_placements({Replicate(), Shard(0)});
  expect_error<c10::ValueError>([&] { plan(spec, other, {{{1, 1}}}); }, {"1 links", "each of its 2 dims"});
  const double infinity = std::numeric_limits<double>::infinity();
  expect_error<c10::ValueError>(
      [&] {
        plan(spec, other, {{{1, 1}, {1, infinity}}});
      },
      {"mesh dim 1", "finite"});
  expect_error<c10::ValueError>(
      [&] {
        plan(spec, other, {{{1, 1}, {-1, 1}}});
      },
      {"mesh dim 1", "not negative"});
}

/// The least that the busiest rank must receive, in elements, whatever the steps, if values are combined by
/// the ranks and not on the way. Found element by element.
///   - Ranks that differ only in mesh dims along which the target becomes partial receive between them every
///     element that they need and none of them holds; all that they need, if it must be reduced.
///   - To reduce an element over n ranks, n-1 values must be received by someone, and the result by all but
///   one of
///     those that need it; the busiest rank receives at least the average.
int64_t least_received(const Spec& from, const Spec& to) {
  const c10::IntArrayRef mesh = from.mesh().shape();
  int64_t combined = 1, kept_partial = 1, made_partial = 1;
  for (size_t i = 0; i < mesh.size(); ++i) {
    const Placement a = from.placement(i), b = to.placement(i);
    if (a != b && b.is_partial()) made_partial *= mesh[i];
    if (a.is_partial()) (a == b ? kept_partial : combined) *= mesh[i];
  }
  const auto mask = [&](const Spec& spec, c10::IntArrayRef coordinate) {
    std::vector<bool> out(spec.numel(), true);
    const auto pieces = spec.local_pieces(coordinate);
    int64_t inner = 1;
    for (int64_t d = spec.ndim() - 1; d >= 0; inner *= spec.shape()[d--]) {
      std::vector<bool> local(spec.shape()[d], false);
      for (const Range& r : pieces[d]) std::fill_n(local.begin() + r.offset, r.size, true);
      for (size_t e = 0; e < out.size(); ++e) out[e] = out[e] && local[e / inner % spec.shape()[d]];
    }
    return out;
  };
  struct Team {
    std::vector<bool> needed, local;
  };
  std::map<c10::DimVector, Team> teams;
  const int64_t ranks = c10::multiply_integers(mesh);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    c10::DimVector coordinate(mesh.size()), team(mesh.size());
    for (int64_t i = static_cast<int64_t>(mesh.size()) - 1, rest = rank; i >= 0; rest /= mesh[i--]) {
      coordinate[i] = rest % mesh[i];
      const bool made = from.placement(i) != to.placement(i) && to.placement(i).is_partial();
      team[i] = made ? 0 : coordinate[i];
    }
    const std::vector<bool> local = mask(from, coordinate);
    Team& at = teams[team];
    at.needed = mask(to, coordinate);
    at.local.resize(local.size(), false);
    for (size_t e = 0; e < local.size(); ++e) at.local[e] = at.local[e] || (local[e] && combined == 1);
  }
  int64_t least = 0, needed_by_all = 0;
  for (const auto& [coordinate, team] : teams) {
    int64_t missing = 0;
    for (size_t e = 0; e < team.needed.size(); ++e) {
      needed_by_all += team.needed[e];
      missing += team.needed[e] && !team.local[e];
    }
    // A team that reduces only among its own may divide the work.
    if (combined == 1 || made_partial == 1) {
      least = std::max(least, (missing + made_partial - 1) / made_partial);
    }
  }
  if (combined > 1) {
    const int64_t results = from.numel() * kept_partial;
    const int64_t total = results * (combined - 1) + std::max<int64_t>(0, needed_by_all - results);
    least = std::max(least, (total + ranks - 1) / ranks);
  }
  return least;
}

/// Why a plan may be over the bound.
enum Reason : size_t {
  replicas_work_alike,  // replicas reduce the same values, though they could divide them
  reduced_then_moved,   // the new shard cannot be the innermost, or other mesh dims change too
  partial_not_shared,  // one rank receives what several could have partial values of, as the target is partial
  uneven,              // a ring takes as long as its largest chunk
  local_in_other_words,  // what becomes partial lies where it is needed, but the shards do not show it
};
constexpr const char* kReasons[] = {"replicas reduce the same values", "reduced, then moved",
                                    "partial values are not divided among all ranks that may hold them",
                                    "uneven chunks", "local already, but by other shards"};
constexpr double kMost[] = {4.5, 5, 8, 3, std::numeric_limits<double>::infinity()};

Reason reason(const Plan& plan, int64_t bound) {
  bool reduces = false, moves = false, replicates = false, makes_partial = false;
  for (size_t i = 0; i < plan.from.placements().size(); ++i) {
    replicates |= plan.from.placement(i).is_replicate();
    makes_partial |= plan.to.placement(i).is_partial() && plan.to.placement(i) != plan.from.placement(i);
  }
  for (const Step& step : plan.steps) {
    (step.kind == all_reduce || step.kind == reduce_scatter ? reduces : moves) |= step.communicates();
  }
  if (bound == 0) return local_in_other_words;
  if (reduces && replicates) return replicas_work_alike;
  if (reduces && moves) return reduced_then_moved;
  return makes_partial ? partial_not_shared : uneven;
}

/// With TESSERA_LIST_PAIRS in the environment, every pair that moves more than it must is listed with the
/// reason.
TEST(Plan, BytesAgainstTheLowerBound) {
  const bool list = std::getenv("TESSERA_LIST_PAIRS") != nullptr;
  struct Count {
    int64_t pairs = 0;
    double worst = 1;
    std::string example;
  };
  std::array<Count, 5> over;
  int64_t pairs = 0, at_bound = 0;
  for (const c10::DimVector& mesh_shape :
       {c10::DimVector{2}, c10::DimVector{3}, c10::DimVector{4}, c10::DimVector{2, 2}, c10::DimVector{2, 3},
        c10::DimVector{2, 2, 2}}) {
    const DeviceMesh mesh = fake_mesh(mesh_shape);
    // What costs is bytes alone.
    const CostModel costs{c10::SmallVector<LinkCost, 4>(mesh_shape.size(), LinkCost{1e-15, 1e-9})};
    const auto lists = all_placements(mesh_shape.size());
    const c10::DimVector even = mesh_shape.back() == 3 ? c10::DimVector{72, 6} : c10::DimVector{64, 8};
    size_t turn = 0;
    for (const c10::DimVector& shape : {even, c10::DimVector{5, 7}, c10::DimVector{1, 3}}) {
      for (const Placements& from : lists) {
        for (const Placements& to : lists) {
          if (mesh_shape.size() == 3 && ++turn % 7 != 0) continue;
          const Plan found = plan(Spec(mesh, from, shape), Spec(mesh, to, shape), costs);
          const int64_t bound = 4 * least_received(found.from, found.to);
          const int64_t bytes = found.bytes();
          ++pairs;
          ASSERT_GE(bytes, bound) << "the bound is wrong: " << bound << "\n" << found;
          if (bytes == bound) {
            ++at_bound;
            continue;
          }
          EXPECT_TRUE(found.from.has_partial() || found.to.has_partial()) << bound << " bytes for\n" << found;
          if (shape == even) {
            EXPECT_GT(mesh_shape.size(), 1u) << bound << " bytes for\n" << found;
          }
          const double ratio = static_cast<double>(bytes) / static_cast<double>(bound);
          const Reason why = reason(found, bound);
          if (why == local_in_other_words) {
            EXPECT_TRUE(found.steps.back().kind == to_partial) << found;
          }
          if (shape == even) {
            EXPECT_NE(why, uneven) << bound << " bytes for\n" << found;
          }
          ASSERT_LE(ratio, kMost[why]) << found;
          ++over[why].pairs;
          if (list)
            std::cout << bytes << " bytes, at least " << bound << ", " << kReasons[why] << ": " << found
                      << "\n";
          if (ratio > over[why].worst) {
            over[why].worst = ratio;
            over[why].example = found.str();
          }
        }
      }
    }
  }
  std::cout << at_bound << " of " << pairs << " plans move no more than they must\n";
  for (size_t i = 0; i < over.size(); ++i) {
    std::cout << over[i].pairs << " move more: " << kReasons[i] << "; at most " << over[i].worst
              << " times as much, as in\n"
              << over[i].example << "\n";
  }
  EXPECT_GT(at_bound, pairs / 2);
}

TEST(Plan, OnAHundredThousandRanks) {
  const DeviceMesh mesh = fake_mesh({10, 10, 10, 10, 10});
  const Placements choices = {Replicate(), Shard(0), Shard(1), Shard(2), Partial(), StridedShard(0, 2)};
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    Placements from, to;
    for (int j = 0; j < 5; ++j) {
      from.push_back(choices[random() % choices.size()]);
      to.push_back(choices[random() % choices.size()]);
    }
    const Spec a(mesh, from, {100003, 70000, 512}), b(mesh, to, {100003, 70000, 512});
    const Plan found = plan(a, b);
    ASSERT_TRUE(a == b ? found.steps.empty() : found.steps.back().after == b) << found;
  }
}

}  // namespace
}  // namespace tessera
