// Why operators are carried out as they are.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/debug/explain.h>
#include <tessera/dispatch/strict.h>
#include <tessera/dtensor/dtensor.h>

#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using testing::error_of;
using testing::expect_error;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Explain, WhatIsFree) {
  const std::string text =
      explain("mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)])", parse_mesh("dp=8,tp=8"));
  EXPECT_THAT(text,
              HasSubstr("aten::mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)]) on mesh(dp=8, tp=8)\n"));
  EXPECT_THAT(text, HasSubstr("dp (8 ranks), inputs are S(0), R:\n"));
  EXPECT_THAT(text, ContainsRegex("\\* S\\(0\\), R -> S\\(0\\) +free +chosen: nothing has to change"));
  EXPECT_THAT(text, HasSubstr("nothing moves between ranks"));
  EXPECT_THAT(text, HasSubstr("result: f32[4096,4096] [S(0),S(1)]   1.0 MiB/rank"));
}

TEST(Explain, WhatMovesAndWhatWouldAvoidIt) {
  const std::string text = explain("mm(f32[64,32] [S(0)], f32[32,8] [S(0)]) on mesh(dp=4)");
  EXPECT_THAT(text, HasSubstr("'mat2' is redistributed, 768 B/rank, "));
  EXPECT_THAT(text, HasSubstr("all_gather"));
  EXPECT_THAT(text, HasSubstr("mat2 = DTensor(mat2).redistribute({Replicate()});"));
  EXPECT_THAT(text, HasSubstr("free if 'mat2' were R on dp from the start; the result is then S(0)"));
  EXPECT_THAT(text, HasSubstr("free if 'self' were S(1) on dp from the start; the result is then P(sum)"));
}

TEST(Explain, WhatIsComposedOfOthers) {
  const std::string text = explain("softmax.int(f32[8,16] [S(1)], 1) on mesh(4)");
  EXPECT_THAT(text, HasSubstr("aten::_softmax"));
  const std::string fallback = explain("_pdist_forward(f32[8,4] [S(0)]) on mesh(2)");
  EXPECT_THAT(fallback, HasSubstr("no rule, so the operator takes the replicated fallback"));
}

/// What a message says of a call can be read again.
TEST(Explain, ReadsWhatStrictWrites) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    const at::Tensor y = distribute_tensor(at::ones({6, 4}), mesh, {Shard(0)}).t();
    const Strict count({.level = ImplicitCommunication::allowed});
    at::add(x, y, 2);
    at::cat({x, y}, 0);
    const auto moves = count.moves();
    ASSERT_GE(moves.size(), 2u);
    EXPECT_THAT(moves[0].call, HasSubstr("f32[4,6] [S(1)] strides [1,4], alpha=2)"));
    for (const ImplicitMove& move : moves) EXPECT_THAT(explain(move.call), HasSubstr(move.call));
  });
}

TEST(Explain, ABlockOfCode) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)}).requires_grad_();
    CommDebugMode counts;
    std::string text;
    {
      const Explain explanation;
      for (int i = 0; i < 3; ++i) x.relu();
      DTensor(x.sum()).redistribute({Replicate()});
      text = explanation.str();
    }
    EXPECT_EQ(counts.get_total_counts(), 1);  // the one that was asked for
    EXPECT_THAT(text, HasSubstr("aten::relu(f32[4,6] [S(0)]) on mesh(dp=2)   (3 times)"));
    EXPECT_THAT(text, HasSubstr("result: f32[] [P(sum)]"));
    EXPECT_THAT(text, HasSubstr("redistribute, asked for"));
    EXPECT_THAT(text, HasSubstr("all_reduce"));
    x.relu();
  });
}

TEST(Explain, PointsAtTheCharacter) {
  const auto mark = [](const std::string& call, const std::string& mesh) {
    const std::string message =
        error_of<c10::ValueError>([&] { mesh.empty() ? explain(call) : explain(call, parse_mesh(mesh)); });
    const size_t last = message.rfind('\n');
    return message.size() - last - 4;  // column of ^ in the call
  };
  EXPECT_EQ(mark("mm(f32[4,4] [S(0)], f32[4,4] [X])", "4"), 30u);
  EXPECT_EQ(mark("mm(f32[4,4] [S(0)], f32[4,4] [R,R])", "4"), 29u);
  EXPECT_EQ(mark("mm(f32[4,4] [S(0)], 3)", "4"), 20u);
  EXPECT_EQ(mark("nonsense(f32[4] [R])", "4"), 0u);
  EXPECT_EQ(mark("mm(f32[4,4] [S(0)]", "4"), 18u);
  EXPECT_EQ(mark("mm(f32[4,4] [R], f32[4,4] [R])", ""), 30u);
  EXPECT_EQ(mark("mm(" + std::string(100'000, '['), "4"), 4u);
  expect_error<c10::ValueError>([] { explain("mm(f32[4,4] [R], f32[4,4] [R]) on mesh(2)", parse_mesh("4")); },
                                {"mesh(4)", "is given"});
  expect_error<c10::ValueError>([] { parse_mesh("dp=0"); }, {"at least 1"});
  expect_error<c10::ValueError>([] { explain("relu(f32[4] [R])", parse_mesh("1000000,1000000")); },
                                {"more than"});
  // One device would refuse it too.
  EXPECT_THAT(explain("mm(f32[4,4] [R], f32[5,4] [R])", parse_mesh("4")), HasSubstr("it fails: "));
}

/// Whatever is cut off or changed, the answer is an explanation or an error of ours.
TEST(Explain, SurvivesAnyText) {
  const std::string good =
      "add.Tensor(f32[8,4] [S(0),R] order (1,0) strides [4,1], f32[4] [R,R], alpha=0.5) on mesh(2, 2)";
  std::mt19937 random(7);
  const std::string letters = "()[],=.:'SRP0123 -fon";
  for (int i = 0; i < 600; ++i) {
    std::string text = good;
    for (unsigned k = random() % 3 + 1; k > 0; --k) {
      const size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text.erase(at, random() % 4);
          break;
        case 1:
          text[at] = letters[random() % letters.size()];
          break;
        default:
          text.insert(at, 1, letters[random() % letters.size()]);
      }
      if (text.empty()) text = "x";
    }
    try {
      explain(text);
    } catch (const c10::Error&) {
    } catch (const std::exception& error) {
      ADD_FAILURE() << text << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera
