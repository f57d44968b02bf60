// What is known of operators before they are called.

#include <tessera/dispatch/operator_info.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

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

TEST(OperatorInfo, InPlaceOperatorsHaveTheRuleOfTheOneThatReturns) {
  for (const auto& [in_place, returning] : std::map<std::string, std::string>{
           {"aten::add_.Tensor", "aten::add.Tensor"},
           {"aten::floor_divide_.Tensor", "aten::floor_divide"},  // of another overload name
           {"aten::threshold_", "aten::threshold"},               // not tagged as pointwise
           {"aten::gcd_", "aten::gcd"},
           {"aten::xlogy_.Scalar_Other", "aten::xlogy.Scalar_Other"}}) {
    EXPECT_NE(info_of(in_place).resolved().rule, nullptr) << in_place;
    EXPECT_EQ(info_of(in_place).resolved().rule, info_of(returning).resolved().rule) << in_place;
  }
}

/// Operators that write, and take the replicated fallback though one that returns new tensors has a rule.
/// Each by what its name begins with, and why.
const std::map<std::string, std::string> kWritersWithoutRule{
    {"aten::_foreach_", "with out=, which no function of Python or C++ users takes for these"},
    {"aten::_histogramdd_bin_edges.out", "of lists; histogramdd takes no out="},
    {"aten::_native_batch_norm_legit.out", "it writes the statistics too"},
    {"aten::_to_copy.out", "no user calls it"},
    {"aten::new_", "new_empty and the like take no out="},
    {"aten::normal.", "sizes and moments are given by what is written into, or without a tensor"},
    {"aten::rand", "rand_like and the like take no out="},
    {"aten::split_", "a list of tensors is written"},
    {"aten::unbind_copy", "a list of tensors is written"},
    {"aten::unsafe_split", "a list of tensors is written"},
    {"aten::empty_like", "takes no out="},
    {"aten::full_like", "takes no out="},
    {"aten::ones_like", "takes no out="},
    {"aten::zeros_like", "takes no out="},
};

TEST(OperatorInfo, OperatorsThatWriteHaveARuleWhereThoseThatReturnDo) {
  std::map<std::string, std::vector<std::string>> returning;  // those with a rule, by name without overload
  std::vector<const OperatorInfo*> writing;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::") || !c10::Dispatcher::singleton().findSchema(name)) continue;
    const OperatorInfo& info = info_of(c10::toString(name));
    if (info.schema.is_mutable()) {
      if (!info.is_composite) writing.push_back(&info);
    } else if (info.resolved().rule) {
      returning[name.name].push_back(info.name);
    }
  }
  EXPECT_GT(writing.size(), 1000u);
  std::set<std::string> used;
  for (const OperatorInfo* info : writing) {
    std::string base = info->schema.name();
    if (!info->has_out && base.ends_with('_')) base.pop_back();
    // With out=, they compute as the operator that returns.
    const bool has_way =
        info->resolved().rule || ((info->has_out || info->reshapes_in_place) && info->functional());
    if (has_way || !returning.contains(base)) continue;
    const auto excepted = std::find_if(kWritersWithoutRule.begin(), kWritersWithoutRule.end(),
                                       [&](const auto& each) { return info->name.starts_with(each.first); });
    EXPECT_NE(excepted, kWritersWithoutRule.end())
        << info->name << " takes the replicated fallback, but " << returning[base][0] << " has a rule.";
    if (excepted != kWritersWithoutRule.end()) used.insert(excepted->first);
  }
  for (const auto& [name, reason] : kWritersWithoutRule)
    EXPECT_TRUE(used.contains(name)) << name << " needs no exception (" << reason << ").";
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
