// What is known of operators before they are called.

#include <tessera/dispatch/operator_info.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dispatch/support.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::info_of;

TEST(OperatorInfo, WhatIsWrittenAndReturned) {
  const OperatorInfo& add = info_of("aten::add.Tensor");
  EXPECT_EQ(add.name, "aten::add.Tensor");
  EXPECT_TRUE(add.is_pointwise);
  EXPECT_THAT(add.written, ElementsAre(false, false, false));
  EXPECT_THAT(add.returned_argument, ElementsAre(-1));
  const OperatorInfo& in_place = info_of("aten::add_.Tensor");
  EXPECT_THAT(in_place.written, ElementsAre(true, false, false));
  EXPECT_THAT(in_place.returned_argument, ElementsAre(0));
  EXPECT_FALSE(in_place.has_out);
  const OperatorInfo& out = info_of("aten::max.dim_max");
  EXPECT_TRUE(out.has_out);
  EXPECT_THAT(out.returned_argument, ElementsAre(3, 4));
}

TEST(OperatorInfo, Views) {
  EXPECT_THAT(info_of("aten::select.int").is_view, ElementsAre(true));
  EXPECT_THAT(info_of("aten::split.Tensor").is_view, ElementsAre(true));
  EXPECT_FALSE(info_of("aten::add_.Tensor").has_views);
  EXPECT_TRUE(info_of("aten::t_").reshapes_in_place);
  EXPECT_FALSE(info_of("aten::detach_").reshapes_in_place);
}

TEST(OperatorInfo, Lists) {
  EXPECT_THAT(info_of("aten::cat").is_list, ElementsAre(true, false));
  EXPECT_THAT(info_of("aten::cat").has_holes, ElementsAre(false, false));
  EXPECT_THAT(info_of("aten::index.Tensor").has_holes, ElementsAre(false, true));
}

TEST(OperatorInfo, TheOperatorThatReturnsNewTensors) {
  auto functional = [](const char* op) {
    const c10::OperatorHandle* found = info_of(op).functional();
    return found ? c10::toString(found->operator_name()) : "none";
  };
  EXPECT_EQ(functional("aten::add_.Tensor"), "aten::add.Tensor");
  EXPECT_EQ(functional("aten::add.out"), "aten::add.Tensor");
  EXPECT_EQ(functional("aten::max.dim_max"), "aten::max.dim");
  EXPECT_EQ(functional("aten::t_"), "aten::t");
  EXPECT_EQ(functional("aten::add.Tensor"), "none");
}

TEST(OperatorInfo, TheRuleIsThatOfNow) {
  const OperatorInfo& info = info_of("aten::_pdist_backward");
  EXPECT_EQ(info.resolved().rule, nullptr);
  const ResolvedRule& before = info.resolved();
  rules::Rule rule = rules::explicit_strategies({});
  rule.reads = {"p"};
  rules::add_rule({"aten::_pdist_backward"}, rule);
  EXPECT_NE(info.resolved().rule, nullptr);
  EXPECT_THAT(info.resolved().reads, ElementsAre(false, false, true, false));
  EXPECT_EQ(before.rule, nullptr);  // calls under way still use it
}

TEST(OperatorInfo, OperatorsThatDrawRandomNumbersNeedARuleForThat) {
  EXPECT_TRUE(info_of("aten::native_dropout").is_random);
  const rules::Rule* rule = info_of("aten::native_dropout").resolved().rule;
  EXPECT_TRUE(!rule || rule->for_random);
  EXPECT_EQ(info_of("aten::bernoulli_.float").generator, 2u);
}

}  // namespace
}  // namespace tessera
