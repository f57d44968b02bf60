// How operators are carried out, as pure metadata: no ranks run.

#include <tessera/dispatch/guards.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/rules/rule.h>

#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dispatch/support.h"
#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using testing::PreparedCall;
using testing::tensor_of;

const Placement R = Replicate(), P = Partial();
Placement S(int64_t dim) { return Shard(dim); }

/// On two ranks, of which this is the second.
class OpPlans : public ::testing::Test {
 protected:
  Spec spec(const Placement& placement, c10::IntArrayRef shape, at::ScalarType dtype = at::kFloat) const {
    return Spec(mesh_, placement, shape, std::nullopt, dtype);
  }
  at::Tensor tensor(const Placement& placement, c10::IntArrayRef shape,
                    at::ScalarType dtype = at::kFloat) const {
    return tensor_of(spec(placement, shape, dtype));
  }

  const DeviceMesh mesh_ = fake_mesh({2}, {}, /*rank=*/1);
};

std::vector<StepKind> kinds(const Plan& plan) {
  std::vector<StepKind> result;
  for (const Step& step : plan.steps) result.push_back(step.kind);
  return result;
}

TEST_F(OpPlans, TakeInputsThatFitAsTheyAre) {
  const OpPlan plan = PreparedCall("aten::mm", {tensor(S(0), {8, 4}), tensor(R, {4, 6})}).plan();
  EXPECT_TRUE(plan.by_rule);
  EXPECT_FALSE(plan.is_special);
  EXPECT_FALSE(plan.in_doubt);
  EXPECT_THAT(plan.inputs, ElementsAre(spec(S(0), {8, 4}), spec(R, {4, 6})));
  ASSERT_EQ(plan.routes.size(), 2u);
  for (const InputRoute& route : plan.routes) {
    EXPECT_TRUE(route.plan.steps.empty());
    EXPECT_FALSE(route.slice);
    EXPECT_FALSE(route.back);
  }
  EXPECT_EQ(plan.strategy.outputs[0].placements, Placements{S(0)});
}

TEST_F(OpPlans, RedistributeInputsThatDoNot) {
  const OpPlan plan = PreparedCall("aten::relu", {tensor(P, {8, 4})}).plan();
  EXPECT_TRUE(plan.by_rule);
  ASSERT_EQ(plan.routes.size(), 1u);
  EXPECT_EQ(plan.routes[0].plan.from, spec(P, {8, 4}));
  EXPECT_EQ(plan.routes[0].plan.to, plan.strategy.inputs[0]);
  EXPECT_TRUE(plan.routes[0].plan.communicates());
}

TEST_F(OpPlans, SliceReplicasWithoutACopyWhereKernelsTakeAnyStrides) {
  const OpPlan sum = PreparedCall("aten::add.Tensor", {tensor(S(1), {3, 8}), tensor(R, {3, 8}), 1}).plan();
  EXPECT_THAT(kinds(sum.routes[1].plan), ElementsAre(StepKind::slice));
  ASSERT_TRUE(sum.routes[1].slice);
  EXPECT_THAT(*sum.routes[1].slice, ElementsAre(0, 4));  // the second rank's columns

  const auto loss = PreparedCall("aten::nll_loss_forward", {tensor(S(0), {8, 4}), tensor(R, {8}, at::kLong),
                                                            at::Tensor(), at::Reduction::Sum, -100})
                        .plan();
  EXPECT_THAT(kinds(loss.routes[1].plan), ElementsAre(StepKind::slice));
  EXPECT_FALSE(loss.routes[1].slice);
}

TEST_F(OpPlans, AStridedShardIsNotOneSlice) {
  const Placement strided = StridedShard(0, 2);
  ASSERT_EQ(spec(strided, {8}).local_pieces()[0].size(), 2u);
  const OpPlan plan = PreparedCall("aten::add.Tensor", {tensor(strided, {8}), tensor(R, {8}), 1}).plan();
  EXPECT_EQ(plan.strategy.inputs[1], spec(strided, {8}));
  EXPECT_THAT(kinds(plan.routes[1].plan), ElementsAre(StepKind::slice));
  EXPECT_FALSE(plan.routes[1].slice);
}

TEST_F(OpPlans, WriteBackWhatWasComputedElsewhere) {
  const OpPlan plan = PreparedCall("aten::relu_", {tensor(P, {8})}).plan();
  ASSERT_TRUE(plan.by_rule);
  EXPECT_FALSE(plan.strategy.written[0].has_partial());
  ASSERT_TRUE(plan.routes[0].back);
  EXPECT_EQ(plan.routes[0].back->from, plan.strategy.written[0]);
  EXPECT_EQ(plan.routes[0].back->to, spec(P, {8}));

  const OpPlan alike = PreparedCall("aten::add_.Tensor", {tensor(S(0), {8}), tensor(R, {8}), 1}).plan();
  EXPECT_FALSE(alike.routes[0].back);  // is written where it lies
  EXPECT_FALSE(alike.routes[1].back);  // is only read
}

TEST_F(OpPlans, WithoutARuleInputsAreReplicated) {
  const OpPlan plan = PreparedCall("aten::_pdist_forward", {tensor(S(0), {8, 4}), 2.0}).plan();
  EXPECT_FALSE(plan.by_rule);
  EXPECT_FALSE(plan.in_doubt);
  EXPECT_EQ(plan.routes[0].plan.to, spec(R, {8, 4}));
  EXPECT_THAT(kinds(plan.routes[0].plan), ElementsAre(StepKind::all_gather));
}

TEST_F(OpPlans, APlainTensorThatIsWrittenTakesTheReplicatedFallback) {
  const ImplicitReplicationGuard guard;
  const OpPlan plan = PreparedCall("aten::add_.Tensor", {at::zeros({8}), tensor(S(0), {8}), 1}).plan();
  EXPECT_FALSE(plan.by_rule);
  ASSERT_EQ(plan.routes.size(), 1u);  // of the distributed one
  EXPECT_EQ(plan.routes[0].plan.to, spec(R, {8}));
}

TEST_F(OpPlans, PlainTensorsThatAreReadCountAsReplicated) {
  const ImplicitReplicationGuard guard;
  const OpPlan plan = PreparedCall("aten::add.Tensor", {tensor(S(0), {8}), at::zeros({8}), 1}).plan();
  EXPECT_TRUE(plan.by_rule);
  EXPECT_THAT(plan.inputs, ElementsAre(spec(S(0), {8}), spec(R, {8})));
  // A scalar tensor is no input: every rank has it.
  const OpPlan scaled = PreparedCall("aten::mul.Tensor", {tensor(S(0), {8}), at::zeros({})}).plan();
  EXPECT_EQ(scaled.inputs.size(), 1u);
}

TEST_F(OpPlans, ViewsBeginWhereTheyDoOnOneDevice) {
  const OpPlan row = PreparedCall("aten::select.int", {tensor(S(1), {6, 8}), 0, 2}).plan();
  EXPECT_TRUE(row.by_rule);
  EXPECT_THAT(row.offsets, ElementsAre(16));
  const OpPlan views = PreparedCall("aten::split.Tensor", {tensor(S(0), {4, 6}), 2, 1}).plan();
  EXPECT_THAT(views.offsets, ElementsAre(0, 2, 4));
  const OpPlan sum = PreparedCall("aten::neg", {tensor(S(0), {4, 6})}).plan();
  EXPECT_TRUE(sum.offsets.empty());
}

TEST_F(OpPlans, TheOperatorIsAskedItselfWhereItMayRefuse) {
  auto softmax = [&](int64_t dim, at::ScalarType dtype) {
    return PreparedCall("aten::_softmax", {tensor(S(1), {4, 8}, dtype), dim, false}).plan();
  };
  // Along the sharded dim others compute it, which take integers: the operator itself does not.
  EXPECT_TRUE(softmax(1, at::kLong).in_doubt);
  EXPECT_FALSE(softmax(1, at::kLong).by_rule);
  EXPECT_EQ(softmax(1, at::kLong).routes[0].plan.to, spec(R, {4, 8}, at::kLong));
  EXPECT_TRUE(softmax(1, at::kFloat).by_rule);
  EXPECT_TRUE(softmax(1, at::kFloat).strategy.decompose);
  // Along the other dim every rank calls the operator, and is refused by it.
  EXPECT_FALSE(softmax(0, at::kLong).in_doubt);
  EXPECT_TRUE(softmax(0, at::kLong).by_rule);
}

TEST_F(OpPlans, WhatIsComputedOtherwiseIsWrittenByAnOperatorThatReturnsIt) {
  rules::Rule rule = rules::explicit_strategies({{{S(0), S(0)}, {S(0)}}});
  rule.local.of = [](const rules::OpCall&) {
    return [](const rules::ChosenSpecs&) { return rules::LocalCall{}; };
  };
  rules::add_rule({"aten::lerp_.Scalar"}, rule);
  const OpPlan in_place =
      PreparedCall("aten::lerp_.Scalar", {tensor(S(0), {8}), tensor(S(0), {8}), 0.5}).plan();
  EXPECT_TRUE(in_place.by_rule);
  // An out= operator gets here only if its result has to be converted, which it must decide itself.
  rules::add_rule({"aten::neg.out"}, rule);
  const OpPlan out =
      PreparedCall("aten::neg.out", {tensor(S(0), {8}), tensor(S(0), {8}, at::kDouble)}).plan();
  EXPECT_FALSE(out.by_rule);
}

TEST_F(OpPlans, RefuseTensorsOnTwoMeshes) {
  const DeviceMesh other = fake_mesh({2}, {}, /*rank=*/3, /*first_rank=*/2);
  const PreparedCall call("aten::add.Tensor", {tensor(S(0), {8}), tensor_of(Spec(other, {S(0)}, {8})), 1});
  expect_error<c10::ValueError>([&] { call.plan(); },
                                {"aten::add.Tensor", "'other'", "'self'", "[2, 3]", "same mesh"});
}

TEST_F(OpPlans, RefuseRanksOutsideTheMesh) {
  const Spec elsewhere(fake_mesh({2}, {}, /*rank=*/0, /*first_rank=*/1), {R}, {8});
  const PreparedCall call("aten::neg", {make_dtensor(at::zeros({0}), elsewhere)});
  expect_error<c10::Error>([&] { call.plan(); }, {"aten::neg", "rank 0", "[1, 2]", "is_member"});
}

TEST_F(OpPlans, RefuseToChangeShapesInPlace) {
  const PreparedCall call("aten::resize_", {tensor(S(0), {8}), std::vector<int64_t>{4}});
  expect_error<c10::Error>([&] { call.plan(); }, {"aten::resize_", "in place"});
}

}  // namespace
}  // namespace tessera
