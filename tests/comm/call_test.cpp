// Calls of collectives as values: which ones match, what the errors say, and what the plan moves.

#include <tessera/comm/call.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using testing::expect_error;
using Calls = std::vector<CollectiveCall>;

CallBuilder call(Collective kind) { return CallBuilder(kind, CallBuilder::Content::data); }

CollectiveCall all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op = c10d::ReduceOp::SUM) {
  return call(Collective::all_reduce).reduction(op).in_out(tensor).build();
}

CollectivePlan plan_of(const Calls& calls) {
  std::vector<int64_t> members;
  for (size_t i = 0; i < calls.size(); ++i) members.push_back(static_cast<int64_t>(10 + i));
  CollectivePlan plan;
  make_plan(calls, members, plan);
  return plan;
}

/// Carries out a plan whose tasks all copy.
void copy_all(const CollectivePlan& plan) {
  for (const Task& task : plan.tasks) {
    ASSERT_EQ(task.sources, 1u);
    for (uint32_t t = 0; t < task.targets; ++t) {
      std::memcpy(plan.pointers[task.first_target + t], plan.pointers[task.first_source],
                  task.elements * c10::elementSize(task.dtype));
    }
  }
}

void expect_mismatch(const Calls& calls, std::initializer_list<std::string_view> parts) {
  expect_error<c10::Error>([&] { plan_of(calls); }, {"do not fit together", "same calls in the same order"});
  expect_error<c10::Error>([&] { plan_of(calls); }, parts);
}

TEST(Calls, DescribeThemselves) {
  EXPECT_EQ(describe(all_reduce(at::ones({3, 4}))), "all_reduce(sum, Float[3, 4])");
  EXPECT_EQ(describe(call(Collective::broadcast).root(1).in_out(at::ones({2}, at::kLong)).build()),
            "broadcast(root 1, Long[2])");
  EXPECT_EQ(describe(call(Collective::barrier).build()), "barrier()");
  const std::vector<at::Tensor> many(6, at::ones({1}));
  EXPECT_THAT(describe(call(Collective::all_reduce).reduction(c10d::ReduceOp::MAX).in_out(many).build()),
              ::testing::HasSubstr("2 more"));
}

TEST(Calls, MismatchesNameBothSides) {
  const at::Tensor x = at::ones({3, 4});
  expect_mismatch(
      {all_reduce(x), call(Collective::barrier).build()},
      {"different collectives", "rank 10 called all_reduce(sum, Float[3, 4])", "rank 11 called barrier()"});
  expect_mismatch(
      {all_reduce(x), all_reduce(x, c10d::ReduceOp::MAX)},
      {"different reductions", "rank 10 called all_reduce(sum,", "rank 11 called all_reduce(max,"});
  expect_mismatch({all_reduce(x), all_reduce(at::ones({4, 3}))},
                  {"different shapes", "Float[3, 4]", "Float[4, 3]"});
  expect_mismatch({all_reduce(x), all_reduce(at::ones({3, 4}, at::kDouble))},
                  {"different dtypes", "Float[3, 4]", "Double[3, 4]"});
  auto broadcast = [](int64_t root) {
    return call(Collective::broadcast).root(root).in_out(at::ones({2})).build();
  };
  expect_mismatch({broadcast(0), broadcast(1)}, {"different roots", "root 0", "root 1"});
  auto coalesced = [](size_t count) {
    const std::vector<at::Tensor> tensors(count, at::ones({1}));
    return call(Collective::all_reduce).reduction(c10d::ReduceOp::SUM).in_out(tensors).build();
  };
  expect_mismatch({coalesced(1), coalesced(2)}, {"different numbers of tensors"});
}

TEST(Calls, ThirdRankThatDiffersIsNamed) {
  const at::Tensor x = at::ones({2});
  expect_mismatch({all_reduce(x), all_reduce(x), all_reduce(at::ones({3}))}, {"rank 10", "rank 12"});
}

TEST(Calls, SenderAndReceiverMustAgreeOnSizes) {
  auto all_to_all = [](c10::IntArrayRef given, c10::IntArrayRef taken) {
    CallBuilder builder = call(Collective::all_to_all);
    for (const int64_t size : given) builder.in(at::ones({size}));
    for (const int64_t size : taken) builder.out(at::ones({size}));
    return builder.build();
  };
  plan_of({all_to_all({1, 2}, {1, 3}), all_to_all({3, 4}, {2, 4})});
  expect_mismatch({all_to_all({1, 2}, {1, 3}), all_to_all({3, 4}, {5, 4})},
                  {"rank 10 gives 2 elements where rank 11 expects 5"});
}

TEST(Calls, JoinedOutputMustHaveTheSizeOfAllParts) {
  auto all_gather = [](int64_t elements) {
    return call(Collective::all_gather).joined().in(at::ones({2})).out(at::ones({elements})).build();
  };
  plan_of({all_gather(4), all_gather(4)});
  expect_error<c10::Error>(
      [&] {
        plan_of({all_gather(4), all_gather(5)});
      },
      {"rank 11", "has 5 elements", "have 4 together"});
}

TEST(Calls, AllToAllCopiesEachPart) {
  const std::vector<at::Tensor> in{at::arange(6, at::kFloat), at::arange(6, 12, at::kFloat)};
  const std::vector<at::Tensor> out{at::zeros({5}), at::zeros({7})};
  const std::vector<std::vector<int64_t>> given{{2, 4}, {3, 3}}, taken{{2, 3}, {4, 3}};
  Calls calls;
  for (size_t i = 0; i < 2; ++i) {
    calls.push_back(
        call(Collective::all_to_all).in_parts(in[i], given[i], 2).out_parts(out[i], taken[i], 2).build());
  }
  copy_all(plan_of(calls));
  EXPECT_TRUE(at::equal(out[0], at::tensor({0.f, 1.f, 6.f, 7.f, 8.f})));
  EXPECT_TRUE(at::equal(out[1], at::tensor({2.f, 3.f, 4.f, 5.f, 9.f, 10.f, 11.f})));
}

TEST(Calls, SplitSizesMustMakeTheFirstDim) {
  const at::Tensor x = at::ones({5, 2});
  expect_error<c10::ValueError>(
      [&] {
        call(Collective::all_to_all).in_parts(x, {2, 2}, 2);
      },
      {"input split sizes [2, 2] make 4", "[5, 2]"});
  // Their sum is no int64.
  expect_error<c10::ValueError>(
      [&] {
        call(Collective::all_to_all).in_parts(x, {INT64_MAX, INT64_MAX, 7}, 3);
      },
      {"make more than the 5 rows of the input", "[5, 2]"});
  expect_error<c10::ValueError>([&] { call(Collective::all_to_all).in_parts(x, {5}, 2); },
                                {"1 input split sizes for a group of 2"});
  expect_error<c10::ValueError>([&] { call(Collective::all_to_all).out_parts(x, {}, 2); },
                                {"output", "cannot be split evenly among 2 ranks"});
  expect_error<c10::ValueError>(
      [&] {
        call(Collective::all_to_all).in_parts(x, {6, -1}, 2);
      },
      {"[6, -1] contain a negative one"});
}

TEST(Calls, UndefinedTensorsAreRefused) {
  expect_error<c10::ValueError>([] { call(Collective::all_gather).in(at::Tensor()); },
                                {"all_gather", "undefined"});
}

TEST(Calls, OutputsThatAreNotPlainAreCopiedBack) {
  const at::Tensor given = at::zeros({3, 2}).t();
  CallBuilder builder = call(Collective::scatter);
  const CollectiveCall made = builder.root(0).out(given).build();
  EXPECT_NE(made.out[0].data, given.data_ptr());
  const auto back = builder.take_copy_back();
  ASSERT_EQ(back.size(), 1u);
  EXPECT_TRUE(back[0].first.is_same(given));
  EXPECT_TRUE(is_plain(back[0].second));
}

TEST(Calls, InputAndOutputThatShareMemoryAreSeparated) {
  const at::Tensor buffer = at::arange(4, at::kFloat);
  auto all_gather = [](const at::Tensor& in, const at::Tensor& out) {
    return call(Collective::all_gather).joined().in(in).out(out).build();
  };
  const at::Tensor other = at::full({2}, 7.f), all = at::zeros({4});
  copy_all(plan_of({all_gather(buffer.narrow(0, 2, 2), buffer), all_gather(other, all)}));
  EXPECT_TRUE(at::equal(buffer, at::tensor({2.f, 3.f, 7.f, 7.f})));
  EXPECT_TRUE(at::equal(all, buffer));
}

TEST(Calls, EmptyPartsMakeNoTasks) {
  EXPECT_TRUE(plan_of({all_reduce(at::ones({0})), all_reduce(at::ones({0}))}).tasks.empty());
}

TEST(Calls, PlainIsContiguousAndItsOwnValues) {
  const at::Tensor x = at::ones({2, 3});
  EXPECT_TRUE(is_plain(x));
  EXPECT_FALSE(is_plain(x.t()));
  const at::Tensor conjugate = at::ones({2}, at::kComplexFloat).mul(c10::complex<float>(1, 2)).conj();
  EXPECT_FALSE(is_plain(conjugate));
  EXPECT_TRUE(is_plain(plain(conjugate)));
  EXPECT_TRUE(at::equal(plain(conjugate), conjugate));
}

}  // namespace
}  // namespace tessera::comm
