// Rules and the choice among what they propose, as pure metadata: no ranks run.

#include <tessera/rules/choose.h>
#include <tessera/rules/einsum.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera::rules {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

const Placement R = Replicate(), P = Partial();
Placement S(int64_t dim) { return Shard(dim); }

bool has(const std::vector<Strategy>& rows, Placements inputs, Placements outputs) {
  return std::any_of(rows.begin(), rows.end(), [&](const Strategy& strategy) {
    return strategy.inputs == inputs && strategy.outputs == outputs;
  });
}

TEST(Einsum, RowsOfAMatrixProduct) {
  Einsum product = einsum("mk,kn->mn");
  EXPECT_EQ(strategies_of(product).size(), 3u);
  product.linear = {{0}, {1}};
  const auto all = strategies_of(product);
  EXPECT_TRUE(has(all, {S(0), R}, {S(0)}));
  EXPECT_TRUE(has(all, {R, S(1)}, {S(1)}));
  EXPECT_TRUE(has(all, {S(1), S(0)}, {P}));
  EXPECT_TRUE(has(all, {P, R}, {P}));
  EXPECT_TRUE(has(all, {R, P}, {P}));
  EXPECT_FALSE(has(all, {P, P}, {P}));
  // Those first that keep the result sharded.
  EXPECT_EQ(all[0].outputs[0], S(0));
  EXPECT_EQ(all[1].outputs[0], S(1));
}

TEST(Einsum, ContractionsMayBeForbiddenAndTermsAdded) {
  Einsum product = einsum("n,mk,kn->mn");
  product.added = {0};
  EXPECT_TRUE(has(strategies_of(product), {P, S(1), S(0)}, {P}));
  EXPECT_TRUE(has(strategies_of(product), {S(0), R, S(1)}, {S(1)}));
  product.contracted = std::nullopt;
  EXPECT_FALSE(has(strategies_of(product), {P, S(1), S(0)}, {P}));
  EXPECT_EQ(strategies_of(einsum("a.->a,a")).size(), 1u);
  EXPECT_THAT(testing::error_of([] { einsum("mk,kn"); }), ::testing::HasSubstr("->"));
}

TEST(Einsum, OfEquations) {
  auto read = [](std::string_view equation, const std::vector<int64_t>& ndims) -> std::string {
    const auto einsum = from_equation(equation, ndims);
    if (!einsum) return "nothing";
    std::string text;
    for (const Letters& input : einsum->inputs) text += std::string(input.begin(), input.end()) + ' ';
    return text + "-> " + std::string(einsum->outputs[0].begin(), einsum->outputs[0].end());
  };
  EXPECT_EQ(read("ij, jk -> ik", {2, 2}), "ij jk -> ik");
  EXPECT_EQ(read("kj,ji", {2, 2}), "kj ji -> ik");
  EXPECT_EQ(read("Ba,a", {2, 1}), "Ba a -> B");
  EXPECT_EQ(read("...k,nk", {3, 2}), "abk nk -> abn");
  EXPECT_EQ(read("...i,...i->...", {3, 2}), "abi bi -> ab");
  EXPECT_EQ(read("i,i->", {1, 1}), "i i -> ");
  for (const char* wrong : {"ii,ij->j", "ij,jk->ikl", "ij->ij", "ij,j->i", "i1,jk->ij", "ij,jk->ii"})
    EXPECT_EQ(read(wrong, {2, 2}), "nothing") << wrong;
}

class Choose : public ::testing::Test {
 protected:
  ChosenStrategy decide(const std::string& op, const std::string& overload, const std::vector<Spec>& tensors,
                        std::vector<c10::IValue> arguments = {}) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
    const Rule* rule = find_rule(overload.empty() ? op : op + "." + overload, true);
    EXPECT_NE(rule, nullptr);
    OpCall call;
    call.schema = &handle.schema();
    arguments.resize(handle.schema().arguments().size());
    call.arguments = arguments;
    call.readable = &rule->reads;
    uint32_t position = 0;
    for (const Spec& spec : tensors) {
      call.tensors.push_back(spec);
      call.positions.push_back(position++);
      call.written.push_back(false);
    }
    const std::vector<int64_t> returned(tensors.size(), -1);
    auto decision = choose(*rule, call, returned);
    EXPECT_TRUE(decision.has_value());
    return *decision;
  }
  Spec spec(Placements placements, std::vector<int64_t> shape) { return Spec(mesh_, placements, shape); }

  const DeviceMesh mesh_ = fake_mesh({2, 4});
};

TEST_F(Choose, PerMeshDim) {
  const ChosenStrategy product =
      decide("aten::mm", "", {spec({S(0), S(1)}, {8, 12}), spec({R, S(0)}, {12, 16})});
  EXPECT_EQ(product.inputs[0].placements(), (Placements{S(0), S(1)}));
  EXPECT_EQ(product.inputs[1].placements(), (Placements{R, S(0)}));
  EXPECT_EQ(product.outputs[0].placements, (Placements{S(0), P}));
  EXPECT_THAT(product.outputs[0].result.shape, ElementsAre(8, 16));
}

TEST_F(Choose, TheCheapest) {
  // The small one is moved, not the large one.
  const ChosenStrategy sum =
      decide("aten::add", "Tensor", {spec({R, S(0)}, {64, 64}), spec({R, S(0)}, {64})});
  EXPECT_EQ(sum.inputs[0].placements(), (Placements{R, S(0)}));
  EXPECT_EQ(sum.inputs[1].placements(), (Placements{R, R}));
  // Replicas are sliced rather than shards gathered.
  const ChosenStrategy other =
      decide("aten::mul", "Tensor", {spec({R, R}, {64, 64}), spec({S(1), R}, {64, 64})});
  EXPECT_EQ(other.inputs[0].placements(), (Placements{S(1), R}));
}

/// Where all placements are the same thing, the one that is there stays.
TEST_F(Choose, KeepsPlacementsOnOneRank) {
  const DeviceMesh one = fake_mesh({1, 4});
  for (const Placement& placement : {R, S(0), S(1), P}) {
    const Spec given(one, {placement, S(0)}, {8, 12});
    const ChosenStrategy copied = decide("aten::detach", "", {given});
    EXPECT_EQ(copied.inputs[0], given);
    EXPECT_EQ(copied.outputs[0].placements, given.placements());
  }
}

TEST_F(Choose, KeepsOrdersAndStridedShards) {
  const Placements strided{StridedShard(0, 4), S(0)};
  const ChosenStrategy scaled = decide("aten::relu", "", {Spec(mesh_, strided, {16, 3})});
  EXPECT_EQ(scaled.inputs[0].placements(), strided);
  EXPECT_EQ(scaled.outputs[0].placements, strided);
  const Spec ordered(mesh_, {S(0), S(0)}, {16, 3}, std::nullopt, at::kFloat, {1, 0});
  const ChosenStrategy product = decide("aten::mm", "", {ordered, spec({R, R}, {3, 5})});
  EXPECT_EQ(product.inputs[0], ordered);
  EXPECT_EQ(product.outputs[0].order, ordered.order());
}

TEST_F(Choose, PartialsThatDoNotAgreeAreReduced) {
  const ChosenStrategy highest =
      decide("aten::amax", "", {spec({P, S(0)}, {8, 4})}, {{}, std::vector<int64_t>{0}, false});
  EXPECT_EQ(highest.inputs[0].placements(), (Placements{R, S(0)}));
  EXPECT_EQ(highest.outputs[0].placements, (Placements{R, Partial(ReduceOp::max)}));
}

/// A reduce-scatter would be cheaper, but what to_local() gives then is not what programs expect.
TEST_F(Choose, PartialsBecomeShardsOnlyBesideOthers) {
  const ChosenStrategy alone = decide("aten::relu", "", {spec({P, R}, {8, 4})});
  EXPECT_EQ(alone.outputs[0].placements, (Placements{R, R}));
  const ChosenStrategy beside = decide("aten::maximum", "", {spec({P, R}, {8, 4}), spec({S(1), R}, {8, 4})});
  EXPECT_EQ(beside.inputs[0].placements(), (Placements{S(1), R}));
  EXPECT_EQ(beside.outputs[0].placements, (Placements{S(1), R}));
}

TEST_F(Choose, ViewsNeedEvenShardsOverAllMeshDims) {
  auto viewed = [&](int64_t rows, Placements placements) {
    return decide("aten::view", "", {spec(placements, {rows, 6})}, {{}, std::vector<int64_t>{rows * 6}})
        .outputs[0]
        .placements;
  };
  EXPECT_EQ(viewed(8, {S(0), S(0)}), (Placements{S(0), S(0)}));
  EXPECT_EQ(viewed(6, {S(0), R}), (Placements{S(0), R}));
  EXPECT_EQ(viewed(6, {R, S(0)}), (Placements{R, R}));
  EXPECT_EQ(viewed(4, {S(0), S(0)}), (Placements{S(0), R}));
}

/// The elements that a rank holds, as numbers in the whole tensor, in the order in which it holds them.
std::vector<int64_t> elements(c10::IntArrayRef shape, c10::IntArrayRef mesh, const Placements& placements,
                              c10::IntArrayRef coordinate) {
  std::vector<int64_t> result{0};
  const auto pieces = local_pieces(shape, mesh, placements, {}, coordinate);
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<int64_t> next;
    for (const int64_t before : result) {
      for (const Range& piece : pieces[dim]) {
        for (int64_t i = piece.offset; i < piece.end(); ++i) next.push_back(before * shape[dim] + i);
      }
    }
    result = std::move(next);
  }
  return result;
}

TEST_F(Choose, ViewsKeepWhatRanksHold) {
  const std::vector<std::vector<int64_t>> shapes{{8, 16}, {16, 8}, {128},   {2, 8, 8}, {8, 1, 4, 4},
                                                 {4, 32}, {24, 8}, {8, 24}, {192},     {2, 4, 24}};
  int64_t kept = 0, strided = 0;
  for (const auto& from : shapes) {
    Placements choices{R};
    for (int64_t dim = 0; dim < static_cast<int64_t>(from.size()); ++dim) {
      for (const Placement& shard : {S(dim), StridedShard(dim, 2), StridedShard(dim, 8)})
        choices.push_back(shard);
    }
    for (const auto& to : shapes) {
      if (c10::multiply_integers(from) != c10::multiply_integers(to)) continue;
      for (const Placement& first : choices) {
        for (const Placement& second : choices) {
          const Placements placements{first, second};
          const Spec spec(mesh_, placements, from);
          const ChosenStrategy decision = decide("aten::view", "", {spec}, {{}, to});
          const Placements& moved = decision.inputs[0].placements();
          const Placements& viewed = decision.outputs[0].placements;
          kept += moved == placements;
          strided += viewed[0].is_strided_shard() || viewed[1].is_strided_shard();
          for (int64_t rank = 0; rank < 8; ++rank) {
            const std::vector<int64_t> here{rank / 4, rank % 4};
            ASSERT_EQ(elements(from, {2, 4}, moved, here), elements(to, {2, 4}, viewed, here))
                << spec << " as " << c10::IntArrayRef(to) << ": " << viewed;
          }
        }
      }
    }
  }
  EXPECT_GT(kept, 1000);
  EXPECT_GT(strided, 500);
  auto viewed = [&](const Placements& placements, const std::vector<int64_t>& from,
                    const std::vector<int64_t>& to) {
    return decide("aten::view", "", {Spec(mesh_, placements, from)}, {{}, to}).outputs[0].placements;
  };
  EXPECT_EQ(viewed({R, S(1)}, {2, 8, 6}, {16, 6}), (Placements{R, StridedShard(0, 2)}));
  EXPECT_EQ(viewed({R, StridedShard(0, 2)}, {16, 6}, {2, 8, 6}), (Placements{R, S(1)}));
  EXPECT_EQ(viewed({S(0), S(1)}, {6, 8, 6}, {48, 6}), (Placements{S(0), StridedShard(0, 3)}));
  EXPECT_EQ(viewed({S(2), R}, {3, 5, 12}, {3, 5, 4, 3}), (Placements{S(2), R}));
}

/// Dims are moved, dropped and added as arguments say; the strides are those of libtorch.
TEST_F(Choose, DimsThatArgumentsName) {
  const Spec matrix = spec({S(0), S(1)}, {8, 12});
  auto placements = [](const ChosenStrategy& chosen) { return chosen.outputs[0].placements; };
  const ChosenStrategy swapped = decide("aten::transpose", "int", {matrix}, {{}, 0, -1});
  EXPECT_EQ(placements(swapped), (Placements{S(1), S(0)}));
  EXPECT_THAT(swapped.outputs[0].result.shape, ElementsAre(12, 8));
  EXPECT_THAT(swapped.outputs[0].result.strides, ElementsAre(1, 12));
  EXPECT_EQ(placements(decide("aten::t", "", {matrix})), (Placements{S(1), S(0)}));
  EXPECT_EQ(placements(decide("aten::unsqueeze", "", {matrix}, {{}, -2})), (Placements{S(0), S(2)}));

  const ChosenStrategy diagonal = decide("aten::diagonal", "", {spec({S(0), P}, {8, 4, 4})}, {{}, 1, 1, 2});
  EXPECT_EQ(placements(diagonal), (Placements{S(0), P}));
  EXPECT_THAT(diagonal.outputs[0].result.shape, ElementsAre(8, 3));
  EXPECT_THAT(diagonal.outputs[0].result.strides, ElementsAre(16, 5));
  const ChosenStrategy back = decide("aten::diagonal_backward", "", {spec({S(0), P}, {8, 3})},
                                     {{}, std::vector<int64_t>{8, 4, 4}, 1, 1, 2});
  EXPECT_EQ(placements(back), (Placements{S(0), P}));
  EXPECT_THAT(back.outputs[0].result.shape, ElementsAre(8, 4, 4));

  const ChosenStrategy expanded =
      decide("aten::expand", "", {spec({S(1), R}, {1, 8})}, {{}, std::vector<int64_t>{3, 5, -1}, false});
  EXPECT_EQ(placements(expanded), (Placements{S(2), R}));
  EXPECT_THAT(expanded.outputs[0].result.shape, ElementsAre(3, 5, 8));
  EXPECT_THAT(expanded.outputs[0].result.strides, ElementsAre(0, 0, 1));

  // Several results along a dim: by other operators only where that is sharded.
  EXPECT_FALSE(decide("aten::unbind", "int", {spec({S(0), R}, {8, 2})}, {{}, 1}).decompose);
  EXPECT_TRUE(decide("aten::unbind", "int", {spec({S(0), R}, {8, 2})}, {{}, 0}).decompose);
}

TEST_F(Choose, PlanesByBatchAndChannels) {
  const std::vector<c10::IValue> arguments{{}, std::vector<int64_t>{2, 2}};
  // Three channels on four ranks: some would have none.
  const ChosenStrategy unpooled =
      decide("aten::_adaptive_avg_pool2d", "", {spec({S(0), S(1)}, {4, 3, 6, 6})}, arguments);
  EXPECT_EQ(unpooled.outputs[0].placements[0], S(0));
  EXPECT_NE(unpooled.inputs[0].placements()[1], S(1));
  const ChosenStrategy pooled =
      decide("aten::_adaptive_avg_pool2d", "", {spec({P, S(1)}, {4, 8, 6, 6})}, arguments);
  EXPECT_EQ(pooled.outputs[0].placements, (Placements{P, S(1)}));
  EXPECT_THAT(pooled.outputs[0].result.shape, ElementsAre(4, 8, 2, 2));
}

/// The text follows from the form.
TEST(Rules, HaveTextsOfTheirForms) {
  auto text = [](const std::string& op) { return find_rule(op, false)->text(); };
  EXPECT_EQ(text("aten::transpose.int"), "`dim0` and `dim1` swapped");
  EXPECT_EQ(text("aten::diagonal"), "`dim1` and `dim2` dropped, unsharded, a last dim added");
  EXPECT_EQ(text("aten::unbind.int"), "`dim` dropped, unsharded; if sharded, by select");
  EXPECT_EQ(text("aten::avg_pool2d"),
            "batch and channels sharded, linear in the first tensor; spatial dims with halos");
  EXPECT_EQ(text("aten::trace"),
            "mn->, linear in `self`, no strided shards of mn; the diagonal as it is in the shard");
}

TEST_F(Choose, RulesNameWhatTheyRead) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::sum", "dim_IntList");
  const std::vector<std::string> none;
  const std::vector<c10::IValue> arguments(4);
  OpCall call;
  call.schema = &handle.schema();
  call.arguments = arguments;
  call.readable = &none;
  EXPECT_THAT(testing::error_of([&] { call.value("dim"); }), ::testing::HasSubstr("does not name it"));
}

TEST(Rules, AreDataForFourOfFiveOperatorsAndElseSayWhyNot) {
  size_t functions = 0;
  for (const auto& [op, rule] : all_rules()) {
    EXPECT_FALSE(rule->text().empty()) << op;
    const auto* function = std::get_if<ByFunction>(&rule->form);
    if (!function) continue;
    ++functions;
    EXPECT_FALSE(function->why.empty()) << op;
  }
  EXPECT_GE(all_rules().size(), 570u);
  EXPECT_LE(5 * functions, all_rules().size());
}

/// A rule for an operator that does not exist would never be found out.
TEST(Rules, AreOfOperatorsThatExist) {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    names.insert(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  for (const auto& [op, rule] : all_rules()) {
    if (op.starts_with("prims::")) continue;  // Python defines them: test_validate.py
    EXPECT_THAT(names, Contains(op)) << rule->text();
  }
}

/// The operators by which a rule computes, wherever it names some.
std::vector<std::string> operators_of(const Rule& rule) {
  return std::visit(
      [](const auto& form) -> std::vector<std::string> {
        using T = std::decay_t<decltype(form)>;
        if constexpr (std::is_same_v<T, Decomposition>) {
          return form.by;
        } else if constexpr (std::is_same_v<T, Cases>) {
          std::vector<std::string> all;
          for (const auto& each : form.cases) {
            for (std::string& name : operators_of(*each.rule)) all.push_back(std::move(name));
          }
          return all;
        } else if constexpr (requires { form.if_sharded; }) {
          if (form.if_sharded) return form.if_sharded->by;
        }
        return {};
      },
      rule.form);
}

TEST(Rules, DecomposeIntoOperatorsThatExist) {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) names.insert(name.name);
  size_t count = 0;
  for (const auto& [op, rule] : all_rules()) {
    for (const std::string& name : operators_of(*rule)) {
      EXPECT_TRUE(names.contains("aten::" + name)) << op << " is computed by " << name;
      ++count;
    }
  }
  EXPECT_GT(count, 0u);
}

}  // namespace
}  // namespace tessera::rules
