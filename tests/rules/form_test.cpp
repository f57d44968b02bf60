// The forms of rules, as pure metadata: no ranks run, and the operators need not exist.

#include <tessera/rules/form.h>
#include <tessera/rules/rule.h>

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include "tests/placement/fake_mesh.h"

namespace tessera::rules {
namespace {

using ::testing::ElementsAre;

const Placement R = Replicate(), P = Partial();
Placement S(int64_t dim) { return Shard(dim); }

/// A call whose arguments are specs, or values.
class Call {
 public:
  using Argument = std::variant<Spec, c10::IValue>;

  Call(const std::string& schema, const std::vector<Argument>& arguments)
      : schema_(torch::jit::parseSchema(schema)) {
    for (const Argument& argument : arguments) {
      if (const Spec* spec = std::get_if<Spec>(&argument)) {
        call_.tensors.push_back(*spec);
        call_.positions.push_back(static_cast<uint32_t>(values_.size()));
        call_.written.push_back(false);
        values_.emplace_back();
      } else {
        values_.push_back(std::get<c10::IValue>(argument));
      }
    }
    call_.schema = &schema_;
    call_.arguments = values_;
  }

  std::optional<Strategies> propose(const Rule& rule) {
    call_.readable = &rule.reads;
    return rule.propose(call_);
  }

 private:
  c10::FunctionSchema schema_;
  std::vector<c10::IValue> values_;
  OpCall call_;
};

bool has(const std::optional<Strategies>& strategies, const Placements& inputs, const Placements& outputs) {
  return std::any_of(strategies->options.begin(), strategies->options.end(), [&](const Strategy& option) {
    return option.inputs == inputs && option.outputs == outputs;
  });
}

class Forms : public ::testing::Test {
 protected:
  Spec spec(std::vector<int64_t> shape, at::ScalarType dtype = at::kFloat) {
    return Spec(mesh_, {R}, shape, std::nullopt, dtype);
  }
  const DeviceMesh mesh_ = fake_mesh({2});
};

TEST_F(Forms, MatricesOfABatch) {
  const Rule rule = Pattern{.letters = {"B..,B..->B..", "Bm.,Bm->B.."},
                            .contracted = std::nullopt,
                            .inner = 2,
                            .broadcasts = false};
  const char* schema = "t::solve(Tensor A, Tensor B) -> Tensor";
  const auto matrices = Call(schema, {spec({4, 3, 3}), spec({4, 3, 2})}).propose(rule);
  ASSERT_TRUE(matrices);
  ASSERT_EQ(matrices->options.size(), 1U);
  EXPECT_TRUE(has(matrices, {S(0), S(0)}, {S(0)}));
  EXPECT_THAT(matrices->results[0].shape, ElementsAre(4));
  EXPECT_TRUE(has(Call(schema, {spec({4, 3, 3}), spec({4, 3})}).propose(rule), {S(0), S(0)}, {S(0)}));
  // A matrix for all of the batch, even if its height is that of the batch, is not of the batch.
  EXPECT_FALSE(Call(schema, {spec({1, 3, 3}), spec({3, 3})}).propose(rule));
  EXPECT_FALSE(Call(schema, {spec({3, 3, 3}), spec({3, 2})}).propose(rule));
}

TEST_F(Forms, DimsOfTheInputInAResult) {
  const Rule rule = Pattern{.letters = {"B..,..?->B*,B..,*"}, .inner = "inner"};
  EXPECT_THAT(rule.reads, ElementsAre("inner"));
  const auto found = Call("t::norm(Tensor x, Tensor? w, int[] inner) -> (Tensor, Tensor, Tensor)",
                          {spec({4, 5, 6}), c10::IValue(), c10::IValue(std::vector<int64_t>{5, 6})})
                         .propose(rule);
  ASSERT_TRUE(found);
  EXPECT_TRUE(has(found, {S(0)}, {S(0), S(0), P}));
  EXPECT_THAT(found->results[0].shape, ElementsAre(4, 5, 6));
  EXPECT_THAT(found->results[1].shape, ElementsAre(4));
  EXPECT_THAT(found->results[2].shape, ElementsAre(5, 6));
}

TEST_F(Forms, ResultsThatAreTheSameOnAllRanksOrEmpty) {
  const Rule rule = Pattern{.letters = {"xy,.->.y,=.,.y"},
                            .linear = {{"w"}},
                            .contiguous = "x",
                            .empty_results = {{"wanted", false, {2}}}};
  const char* schema = "t::bag(Tensor w, Tensor i, bool wanted) -> (Tensor, Tensor, Tensor)";
  const auto all = Call(schema, {spec({8, 4}), spec({3}, at::kLong), true}).propose(rule);
  ASSERT_TRUE(all);
  EXPECT_TRUE(has(all, {S(0), R}, {P, R, P}));
  EXPECT_TRUE(has(all, {S(1), R}, {S(1), R, S(1)}));
  EXPECT_TRUE(has(all, {P, R}, {P, R, P}));
  for (const Strategy& option : all->options) EXPECT_EQ(option.contiguous, option.inputs[0] == S(0));
  const auto some = Call(schema, {spec({8, 4}), spec({3}, at::kLong), false}).propose(rule);
  ASSERT_TRUE(some);
  EXPECT_TRUE(has(some, {S(1), R}, {S(1), R, R}));
  EXPECT_THAT(some->results[2].shape, ElementsAre(0));
}

TEST_F(Forms, CasesByTheValueOfAnArgument) {
  const Rule rule =
      Cases{"reduction", {{"none", int64_t{0}, Pointwise{}}, {"sum", int64_t{2}, Pattern{{"B,B->"}}}}};
  EXPECT_EQ(rule.text(), "`reduction` none: pointwise; `reduction` sum: B,B->");
  const char* schema = "t::loss(Tensor a, Tensor b, int reduction) -> Tensor";
  const Spec x = spec({4});
  EXPECT_TRUE(has(Call(schema, {x, x, 0}).propose(rule), {S(0), S(0)}, {S(0)}));
  EXPECT_TRUE(has(Call(schema, {x, x, 2}).propose(rule), {S(0), S(0)}, {P}));
  EXPECT_FALSE(Call(schema, {x, x, 1}).propose(rule));
}

TEST_F(Forms, AnIndexedDim) {
  using Access = IndexedDim::Access;
  const Spec x = spec({8, 4}), index = spec({8, 3}, at::kLong), vector = spec({3}, at::kLong);
  const char* gather = "t::gather(Tensor self, int dim, Tensor index) -> Tensor";
  const auto read = Call(gather, {x, 1, index}).propose(IndexedDim{Access::read, true});
  ASSERT_TRUE(read);
  EXPECT_TRUE(has(read, {S(0), S(0)}, {S(0)}));
  EXPECT_TRUE(has(read, {S(1), R}, {P}));
  EXPECT_TRUE(has(read, {R, S(1)}, {S(1)}));
  EXPECT_THAT(read->results[0].shape, ElementsAre(8, 3));
  const auto of_bool =
      Call(gather, {spec({8, 4}, at::kBool), 1, index}).propose(IndexedDim{Access::read, true});
  EXPECT_TRUE(has(of_bool, {S(1), R}, {Partial(ReduceOp::any)}));

  const char* write = "t::index_add(Tensor self, int dim, Tensor index, Tensor source) -> Tensor";
  const std::vector<Call::Argument> arguments{x, 1, vector, spec({8, 3})};
  const auto added = Call(write, arguments).propose(IndexedDim{Access::add, false});
  ASSERT_TRUE(added);
  EXPECT_TRUE(has(added, {S(1), R, R}, {S(1)}));
  EXPECT_TRUE(has(added, {P, S(0), S(1)}, {P}));
  EXPECT_TRUE(has(added, {S(0), R, S(0)}, {S(0)}));
  // The later one of two values for one element would depend on the rank.
  const auto written = Call(write, arguments).propose(IndexedDim{Access::write, false});
  EXPECT_FALSE(has(written, {P, S(0), S(1)}, {P}));
}

TEST_F(Forms, AllDimsButOneUnsharded) {
  const Rule rule = UnshardedDims{.dims = {"dim"}, .all_but = true, .same_size = false, .never_empty = true};
  const auto found = Call("t::norm(Tensor self, int dim) -> Tensor", {spec({8, 4, 2}), 1}).propose(rule);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->options.size(), 1U);
  EXPECT_TRUE(has(found, {S(1)}, {S(1)}));
  EXPECT_EQ(found->options[0].divisor, 4);
  EXPECT_EQ(rule.text(), "all dims but `dim` unsharded, others alike, no empty shards");
}

TEST_F(Forms, WhatRanksComputeTogether) {
  const Rule rule = UnshardedDims{
      .dims = {"dim"},
      .collective = Collective{.text = "together",
                               .of = [](const OpCall& call, const std::vector<int64_t>& dims) -> Localize {
                                 if (call.tensors[0].shape()[dims[0]] < 5) return {};
                                 return [](const ChosenSpecs&) { return LocalCall(); };
                               },
                               .shards_results = true}};
  const char* schema = "t::scan(Tensor self, int dim) -> Tensor";
  EXPECT_TRUE(has(Call(schema, {spec({8, 4}), 0}).propose(rule), {S(0)}, {S(0)}));
  EXPECT_FALSE(has(Call(schema, {spec({8, 4}), 1}).propose(rule), {S(1)}, {S(1)}));
}

}  // namespace
}  // namespace tessera::rules
