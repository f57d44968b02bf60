// What is said, and by whom it is heard, of communication that nobody asked for.

#include <tessera/comm/log.h>
#include <tessera/comm/run.h>
#include <tessera/debug/assert_placements.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/strict.h>
#include <tessera/dtensor/dtensor.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_error;
using ::testing::HasSubstr;

/// Counts what this thread is warned of.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

/// One process with a variable in its environment, which does a body.
std::vector<support::ProcessResult> spawn_with(const std::string& body, const std::string& name,
                                               const std::string& value) {
  support::SpawnOptions options;
  options.environment = {{name, value}};
  return testing::spawn_ranks(body, 1, options);
}

/// On a mesh dp=2, tp=2.
struct Tensors {
  DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  at::Tensor x = distribute_tensor(at::ones({64, 32}), mesh, {Shard(0), Replicate()});
  at::Tensor w = distribute_tensor(at::ones({32, 16}), mesh, {Shard(0), Replicate()});
};

TEST(Strict, ShowsTheCallWhatMovesAndTheLineThatSaysSo) {
  run(4, [] {
    const Tensors t;
    const Strict strict;
    const std::string message = error_of<c10::Error>([&] { at::mm(t.x, t.w); });
    EXPECT_THAT(message, HasSubstr("aten::mm(f32[64,32] [S(0),R], f32[32,16] [S(0),R]) on mesh(dp=2, tp=2)"));
    EXPECT_THAT(message, HasSubstr("argument 'mat2' has to be redistributed"));
    EXPECT_THAT(message, HasSubstr("all_gather  dp  dim 0  1.0 KiB/rank"));
    EXPECT_THAT(message, HasSubstr("mat2 = DTensor(mat2).redistribute({Replicate(), Replicate()});"));
    // The line that it shows helps.
    const at::Tensor mat2 = DTensor(t.w).redistribute({Replicate(), Replicate()});
    EXPECT_TRUE(DTensor(at::mm(t.x, mat2)).full_tensor().eq(32).all().item<bool>());
  });
}

TEST(Strict, LooksAtMeshDimsAndSizes) {
  run(4, [] {
    const Tensors t;
    {
      const Strict on_tp({.mesh_dims = {"tp"}});
      at::mm(t.x, t.w);  // along dp
      const at::Tensor other = DTensor(t.w).redistribute({Replicate(), Shard(0)});
      const at::Tensor x = DTensor(t.x).redistribute({Shard(0), Shard(0)});
      expect_error<c10::Error>([&] { at::mm(x, other); }, {"aten::mm"});
    }
    {
      const Strict large({.above = 1024});
      at::mm(t.x, t.w);  // 1 KiB is not more
    }
    {
      const Strict smaller({.mesh_dims = {"0"}, .above = 1023});
      expect_error<c10::Error>([&] { at::mm(t.x, t.w); }, {"1.0 KiB/rank"});
    }
    expect_error<c10::ValueError>([] { const Strict wrong({.above = -1}); }, {"-1 bytes"});
  });
}

TEST(Strict, Counts) {
  run(4, [] {
    const Tensors t;
    const Strict count({.level = ImplicitCommunication::allowed});
    at::mm(t.x, t.w);
    at::mm(t.x, t.w);
    at::mm(t.x.to(at::kDouble), t.w.to(at::kDouble));
    EXPECT_EQ(count.calls(), 3);
    EXPECT_EQ(count.bytes(), 2 * 1024 + 2048);
    const auto moves = count.moves();
    ASSERT_EQ(moves.size(), 2u);
    EXPECT_EQ(moves[0].calls, 2);
    EXPECT_EQ(moves[0].bytes, 2048);
    EXPECT_THAT(moves[0].call, HasSubstr("aten::mm(f32[64,32] [S(0),R]"));
    {
      const Strict inner({.level = ImplicitCommunication::allowed});
      at::mm(t.x, t.w);
      EXPECT_EQ(inner.calls(), 1);
    }
    EXPECT_EQ(count.calls(), 3);
    const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden);
    expect_error<c10::Error>([&] { at::mm(t.x, t.w); }, {"aten::mm"});
  });
}

TEST(Strict, WarnsOnceOfEachPlace) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const at::Tensor y = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    {
      const Strict warn({.level = ImplicitCommunication::warned});
      for (int i = 0; i < 3; ++i) x.add(y);
      EXPECT_EQ(warn.calls(), 3);
    }
    EXPECT_THAT(warnings.messages, ElementsAre(HasSubstr("aten::add.Tensor")));
    x.add(y);
    EXPECT_EQ(warnings.messages.size(), 1u);
  });
}

/// What is local is looked at only if that is said.
TEST(Strict, AllowsWhatMovesNothing) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const at::Tensor whole = distribute_tensor(at::ones({4, 4}), mesh, {Replicate()});
    {
      const Strict strict;
      x.add(whole);
    }
    const Strict all({.local = true});
    expect_error<c10::Error>([&] { x.add(whole); }, {"'other'", "slice"});
    x.add(x);
  });
}

TEST(Strict, HoldsInBackward) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)}).requires_grad_();
    const at::Tensor y = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    const at::Tensor product = x.mul(y);
    const at::Tensor gradient = distribute_tensor(at::ones({4, 4}), mesh, {Partial()});
    const Strict strict;
    EXPECT_THAT(error_of<c10::Error>([&] { product.backward(gradient); }),
                HasSubstr("gradient of an operator"));
  });
}

RANK_BODY(strict_by_environment) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const at::Tensor y = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    expect_error<c10::Error>([&] { x.add(y); },
                             {"aten::add.Tensor(f32[4,4] [S(0)], f32[4,4] [S(1)]) on mesh(2)"});
    const Strict allow({.level = ImplicitCommunication::allowed});
    x.add(y);
  });
}

RANK_BODY(wrong_strict_in_environment) {
  run(1, [] {
    expect_error<c10::ValueError>([] { implicit_communication(); },
                                  {"TESSERA_STRICT", "\"yes\"", "1 or \"forbid\""});
  });
}

TEST(Strict, IsReadFromTheEnvironment) {
  testing::expect_ok(spawn_with("strict_by_environment", "TESSERA_STRICT", "1"));
  testing::expect_ok(spawn_with("wrong_strict_in_environment", "TESSERA_STRICT", "yes"));
}

RANK_BODY(logged) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    x.relu();
    at::_pdist_forward(x);
    DTensor(x).redistribute({Replicate()});
  });
}

TEST(Log, SaysWhatIsDoneWithTheRank) {
  const auto lines = [](const std::string& setting) {
    const auto results = spawn_with("logged", "TESSERA_LOG", setting);
    testing::expect_ok(results);
    return results[0].output;
  };
  EXPECT_THAT(lines("0"), ::testing::Not(HasSubstr("[tessera")));
  const std::string info = lines("info");
  EXPECT_THAT(
      info,
      ContainsRegex("\\[tessera rank 1/2 comm \\+[0-9.]+ s\\] world of 2 threads, CPU tensors by threads"));
  EXPECT_THAT(info,
              HasSubstr("aten::_pdist_forward(f32[4,4] [S(0)]) on mesh(2) takes the replicated fallback"));
  EXPECT_THAT(info, ::testing::Not(HasSubstr("aten::relu")));
  const std::string dispatch = lines("debug:dispatch");
  EXPECT_THAT(dispatch, HasSubstr("planned aten::relu(f32[4,4] [S(0)]) on mesh(2)"));
  EXPECT_THAT(dispatch, ::testing::Not(HasSubstr("world of")));
  EXPECT_THAT(lines("debug"), HasSubstr("redistribute +"));
  EXPECT_EQ(parse_log_setting("debug:comm"), (LogSetting{LogLevel::debug, "comm"}));
  for (const std::string wrong : {"loud", "debug:", "debug:nowhere", ":comm"})
    expect_error<c10::ValueError>([&] { parse_log_setting(wrong); }, {"TESSERA_LOG", "debug:dispatch"});
}

TEST(AssertPlacements, ComparesAndSaysHowToGetThere) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    const CommDebugMode counts;
    assert_placements(x, {Shard(-1)});
    expect_error<c10::ValueError>([&] { assert_placements(x, {Replicate()}); },
                                  {"expected [R]", "[S(1)] on mesh(2)", "redistribute({Replicate()})"});
    expect_error<c10::ValueError>([&] { assert_placements(at::ones({4}), {Replicate()}); }, {"plain tensor"});
    EXPECT_EQ(counts.get_total_counts(), 0);
  });
}

}  // namespace
}  // namespace tessera
