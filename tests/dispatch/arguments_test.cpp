// The pass over the arguments of a call, and the key that its plan is kept by.

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/guards.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dispatch/support.h"
#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;
using testing::info_of;
using testing::PreparedCall;
using testing::tensor_of;

class CallArguments : public ::testing::Test {
 protected:
  at::Tensor tensor(const Placement& placement, c10::IntArrayRef shape = {8, 4}) const {
    return tensor_of(Spec(mesh_, placement, shape));
  }
  static CallKey key(const std::string& op, Stack arguments) {
    return PreparedCall(op, std::move(arguments)).arguments.key();
  }

  const DeviceMesh mesh_ = fake_mesh({2});
};

TEST_F(CallArguments, TheKeyIsThatOfTheSpecsAndOfWhatTheRuleReads) {
  const at::Tensor x = tensor(Shard(0)), y = tensor(Shard(0)), z = tensor(Replicate());
  EXPECT_EQ(key("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, false}),
            key("aten::sum.dim_IntList", {y, std::vector<int64_t>{0}, false}));
  EXPECT_NE(key("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, false}),
            key("aten::sum.dim_IntList", {z, std::vector<int64_t>{0}, false}));
  EXPECT_NE(key("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, false}),
            key("aten::sum.dim_IntList", {x, std::vector<int64_t>{1}, false}));
  EXPECT_NE(key("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, false}),
            key("aten::sum.dim_IntList", {x, std::vector<int64_t>{0}, true}));
  EXPECT_NE(key("aten::neg", {x}), key("aten::exp", {x}));
  // No rule reads the slope.
  EXPECT_EQ(key("aten::leaky_relu", {x, 0.1}), key("aten::leaky_relu", {x, 0.2}));
}

TEST_F(CallArguments, ListsOfOtherLengthsHaveOtherKeys) {
  const at::Tensor x = tensor(Shard(0));
  auto joined = [&](std::vector<at::Tensor> tensors) { return key("aten::cat", {std::move(tensors), 0}); };
  EXPECT_EQ(joined({x, x}), joined({x, x}));
  EXPECT_NE(joined({x, x}), joined({x, x, x}));
}

TEST_F(CallArguments, DistributedTensorsAreTakenAndPutBack) {
  const at::Tensor x = tensor(Shard(0)), y = tensor(Replicate());
  PreparedCall call("aten::add.Tensor", {x, y, 1});
  ASSERT_EQ(call.arguments.distributed().size(), 2u);
  EXPECT_EQ(call.arguments.distributed()[1].position, 1u);
  EXPECT_TRUE(call.stack[0].isNone());
  EXPECT_TRUE(call.arguments.with_tensors()[1].toTensor().is_same(y));
  EXPECT_TRUE(call.stack[1].isNone());
  call.arguments.restore();
  EXPECT_TRUE(call.stack[0].toTensor().is_same(x));
}

TEST_F(CallArguments, LocalTensorsTakeTheirPlaces) {
  const at::Tensor x = tensor(Shard(0)), plain = at::ones({});
  PreparedCall call("aten::cat", {std::vector<at::Tensor>{x, plain, x}, 0});
  call.arguments.substitute_locals();
  const std::vector<at::Tensor> tensors = call.stack[0].toTensorVector();
  EXPECT_TRUE(tensors[0].is_same(DTensorImpl::of(x)->local()));
  EXPECT_TRUE(tensors[1].is_same(plain));
  EXPECT_TRUE(tensors[2].is_same(DTensorImpl::of(x)->local()));
}

TEST_F(CallArguments, ArgumentsBelowOnTheStackAreLeftAlone) {
  const at::Tensor x = tensor(Shard(0));
  const OperatorInfo& info = info_of("aten::neg");
  Stack stack{1, x};
  Arguments arguments(info, info.resolved(), stack);
  arguments.collect();
  EXPECT_EQ(arguments.take().size(), 1u);
  arguments.replace_by({2, 3});
  ASSERT_EQ(stack.size(), 3u);
  EXPECT_EQ(stack[0].toInt(), 1);
  EXPECT_EQ(stack[2].toInt(), 3);
}

TEST_F(CallArguments, APlainTensorWithDimsIsAnErrorUnlessTheUserSaysThatItIsReplicated) {
  const Stack mixed{tensor(Shard(0)), at::zeros({8, 4}), 1};
  expect_error<c10::ValueError>([&] { PreparedCall("aten::add.Tensor", mixed); },
                                {"aten::add.Tensor", "'other'", "[8, 4]", "ImplicitReplicationGuard"});
  const ImplicitReplicationGuard guard;
  const PreparedCall call("aten::add.Tensor", mixed);
  ASSERT_EQ(call.arguments.distributed().size(), 2u);
  EXPECT_TRUE(call.arguments.distributed()[1].spec().is_replicated());
  EXPECT_FALSE(call.arguments.writes_plain());
  EXPECT_TRUE(PreparedCall("aten::add_.Tensor", {mixed[1], mixed[0], 1}).arguments.writes_plain());
}

TEST_F(CallArguments, ScalarTensorsComeToTheMeshOfTheOthers) {
  const DeviceMesh other = fake_mesh({2}, {}, 0);
  const at::Tensor step = tensor_of(Spec(other, {Replicate()}, {}));
  PreparedCall call("aten::mul.Tensor", {tensor(Shard(0)), step});
  EXPECT_NE(call.arguments.distributed()[1].spec().mesh(), mesh_);
  EXPECT_TRUE(call.arguments.unify_meshes());
  EXPECT_EQ(call.arguments.distributed()[1].spec().mesh(), mesh_);
  EXPECT_FALSE(call.arguments.unify_meshes());
}

}  // namespace
}  // namespace tessera
