// Calls of the API that all ranks make together: where they ask for different things, or one of them refuses its
// arguments, every rank throws, and the group can be used again. On threads, on processes, and on gloo processes
// whose collectives are compared too.

#include <tessera/comm/agreement.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>
#include <tessera/random/generator.h>
#include <tessera/sharded/module.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor.h>

#include <map>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_ok;
using ::testing::HasSubstr;
using testing::spawn_ranks;

constexpr int64_t kRanks = 3;
constexpr int64_t kOdd = 1;  // the rank that asks for something else

bool is_odd() { return get_rank() == kOdd; }

void expect_usable() {
  const auto group = current_world()->group();
  const at::Tensor one = at::ones({1});
  comm::all_reduce(one, c10d::ReduceOp::SUM, group).wait();
  EXPECT_EQ(one.item<float>(), kRanks);
  const auto mesh = init_device_mesh(at::kCPU, {kRanks});
  const at::Tensor values = at::arange(7.);
  EXPECT_TRUE(at::equal(distribute_tensor(values, mesh, {Shard(0)}).full_tensor(), values));
}

/// Every rank throws an error with all parts.
void expect_error_everywhere(const std::function<void()>& call, const std::vector<std::string>& parts) {
  const std::string message = error_of(call);
  for (const std::string& part : parts) EXPECT_THAT(message, HasSubstr(part));
  expect_usable();
}

/// The ranks ask for different things: the error shows both sides, on every rank.
void expect_disagreement(const std::function<void()>& call, const std::string& common,
                         const std::string& odd) {
  expect_error_everywhere(call,
                          {"with the same arguments", "ranks 0, 2 called ", common, "rank 1 called ", odd});
}

/// One rank refuses its arguments: it throws its own error, and the others one that repeats it.
void expect_refusal(const std::function<void()>& call, const std::string& reason) {
  if (is_odd()) {
    expect_error_everywhere(call, {reason});
  } else {
    expect_error_everywhere(call, {"Rank 1 refuses ", reason});
  }
}

sharded::ChunkShardingSpec chunks(int64_t dim, std::vector<sharded::RemoteDevice> placements = {
                                                   "rank:0/cpu", "rank:1/cpu", "rank:2/cpu"}) {
  return {dim, std::move(placements)};
}

DeviceMesh mesh_of_all(DeviceMesh::Names names = {}) {
  return DeviceMesh(at::kCPU, {kRanks}, {0, 1, 2}, std::move(names));
}

struct Model : torch::nn::Module {
  explicit Model(int64_t width = 6)
      : up(register_module("up", torch::nn::Linear(6, width))),
        down(register_module("down", torch::nn::Linear(width, 6))) {}
  torch::nn::Linear up, down;
};

using Bodies = std::map<std::string, std::function<void()>>;

const Bodies& bodies() {
  static const Bodies all{
      {"init_device_mesh",
       [] {
         expect_disagreement([] { init_device_mesh(at::kCPU, {kRanks}, {is_odd() ? "tp" : "dp"}); },
                             "init_device_mesh(cpu, [3], 'dp')", "init_device_mesh(cpu, [3], 'tp')");
         expect_disagreement([] { init_device_mesh(at::kCPU, {is_odd() ? 2 : 3}); },
                             "init_device_mesh(cpu, [3])", "init_device_mesh(cpu, [2])");
         expect_refusal([] { init_device_mesh(at::kCPU, {is_odd() ? 4 : 3}); }, "needs 4 ranks");
       }},
      {"distribute_tensor",
       [] {
         const auto mesh = mesh_of_all();
         const at::Tensor square = at::rand({6, 6});
         expect_disagreement([&] { distribute_tensor(square, mesh, {is_odd() ? Shard(1) : Shard(0)}); },
                             "distribute_tensor(", "S(1)");
         expect_disagreement([&] { distribute_tensor(square, mesh, {is_odd() ? Replicate() : Shard(0)}); },
                             "S(0)", "[R]");
         expect_disagreement(
             [&] {
               distribute_tensor(at::rand({is_odd() ? 4 : 6, 6}), mesh, {Shard(0)});
             },
             "[6, 6]", "[4, 6]");
         expect_disagreement(
             [&] {
               distribute_tensor(at::rand({is_odd() ? 9 : 6, 6}), mesh, {Shard(0)});
             },
             "[6, 6]", "[9, 6]");
         for (const int64_t source : {0, 1}) {
           expect_disagreement(
               [&] {
                 distribute_tensor(square.to(is_odd() ? at::kDouble : at::kFloat), mesh, {Shard(0)}, source);
               },
               "f32", "f64");
         }
         expect_disagreement([&] { distribute_tensor(square, mesh, {Shard(0)}, is_odd() ? 1 : 2); },
                             "source 2", "source 1");
         expect_disagreement(
             [&] { distribute_tensor(square, mesh_of_all({is_odd() ? "tp" : "dp"}), {Shard(0)}); }, "dp=3",
             "tp=3");
         expect_disagreement(
             [&] { distribute_tensor(at::rand({6}).requires_grad_(is_odd()), mesh, {Shard(0)}); }, "source 0",
             "requires_grad");
         expect_refusal([&] { distribute_tensor(square, mesh, {Shard(0)}, is_odd() ? 7 : 0); },
                        "there is no rank 7");
         expect_refusal([&] { distribute_tensor(square, mesh, {Shard(is_odd() ? 5 : 0)}); }, "5");
         expect_refusal([&] { distribute_tensor(is_odd() ? at::Tensor() : square, mesh, {Shard(0)}); },
                        "undefined");
       }},
      {"from_local",
       [] {
         const auto mesh = mesh_of_all();
         DTensor::FromLocalOptions options;
         options.run_check = true;
         const auto make = [&](const at::Tensor& local, Placements placements) {
           return DTensor::from_local(local, mesh, std::move(placements), options);
         };
         expect_disagreement(
             [&] {
               make(at::ones({2, 2}, is_odd() ? at::kDouble : at::kFloat), {Shard(0)});
             },
             "from_local(Float of 2 dims", "from_local(Double of 2 dims");
         expect_disagreement(
             [&] {
               make(at::ones({2, 2}), {is_odd() ? Replicate() : Shard(0)});
             },
             "S(0)", "[R]");
         expect_disagreement(
             [&] {
               make(is_odd() ? at::ones({2}) : at::ones({2, 2}), {Shard(0)});
             },
             "of 2 dims", "of 1 dims");
         expect_refusal(
             [&] {
               make(at::ones({2}), is_odd() ? Placements{Shard(0), Shard(0)} : Placements{Shard(0)});
             },
             "got 2 placements");
         options.shape = {6};
         expect_refusal([&] { make(at::ones({is_odd() ? 1 : 2}), {Shard(0)}); }, "from_local");
         options.shape = {is_odd() ? 7 : 6};
         expect_disagreement([&] { make(at::ones({is_odd() ? 3 : 2}), {Shard(0)}); }, "shape [6]",
                             "shape [7]");
       }},
      {"gather",
       [] {
         const ShardedTensor tensor = sharded::shard_tensor(at::rand({6, 6}), chunks(0));
         expect_disagreement([&] { tensor.gather(is_odd() ? 1 : 0); }, "to rank 0 as Float",
                             "to rank 1 as Float");
         ShardedTensor::GatherOptions options;
         if (is_odd()) options.dtype = at::kDouble;
         expect_disagreement([&] { tensor.gather(0, options); }, "as Float", "as Double");
         options = {};
         if (is_odd()) options.out = at::empty({6, 6});
         expect_refusal([&] { tensor.gather(0, options); }, "give it there alone");
         expect_refusal([&] { tensor.gather(is_odd() ? 3 : 0); }, "there is no rank 3");
       }},
      {"reshard",
       [] {
         const at::Tensor values = at::rand({6, 6});
         const ShardedTensor tensor = sharded::shard_tensor(values, chunks(0));
         const auto turned = chunks(0, {"rank:1/cpu", "rank:2/cpu", "rank:0/cpu"});
         expect_disagreement(
             [&] {
               tensor.reshard(chunks(
                   1, is_odd()
                          ? std::vector<sharded::RemoteDevice>{"rank:1/cpu", "rank:0/cpu", "rank:2/cpu"}
                          : std::vector<sharded::RemoteDevice>{"rank:0/cpu", "rank:1/cpu", "rank:2/cpu"}));
             },
             "reshard(Float[6, 6] from ", "rank:1/cpu, rank:0/cpu");
         // One of them has the tensor as it wants it.
         expect_disagreement([&] { is_odd() ? tensor.reshard(chunks(0)) : tensor.reshard(turned); },
                             "reshard(Float[6, 6] from ", "reshard(Float[6, 6] from ");
         expect_refusal([&] { tensor.reshard(chunks(is_odd() ? 4 : 1)); }, "4");
         expect_disagreement(
             [&] {
               is_odd() ? static_cast<void>(tensor.gather(0)) : static_cast<void>(tensor.reshard(turned));
             },
             "reshard(", "gather(");
         const at::Tensor same = tensor.reshard(chunks(1)).gather(0);
         if (get_rank() == 0) EXPECT_TRUE(at::equal(same, values));
       }},
      {"shard_tensor",
       [] {
         const at::Tensor values = at::rand({6, 6});
         expect_disagreement([&] { sharded::shard_tensor(values, chunks(0), is_odd() ? 1 : 0); },
                             "shard_tensor(src_rank 0", "shard_tensor(src_rank 1");
         expect_disagreement([&] { chunks(is_odd() ? 1 : 0).shard(values); }, "ShardingSpec::shard(",
                             "ShardingSpec::shard(");
         expect_disagreement(
             [&] {
               sharded::shard_tensor(at::rand({6, is_odd() ? 5 : 6}), chunks(0));
             },
             "Float[6, 6]", "Float[6, 5]");
         expect_refusal([&] { sharded::shard_tensor(is_odd() ? values.t() : values, chunks(0)); },
                        "not contiguous");
         expect_refusal([&] { sharded::shard_tensor(values, chunks(0), is_odd() ? 3 : 0); },
                        "there is no rank 3");
         torch::nn::Linear layer(6, 6);
         expect_disagreement(
             [&] { sharded::shard_parameter(*layer, is_odd() ? "bias" : "weight", chunks(0)); },
             "shard_parameter(weight)", "shard_parameter(bias)");
         expect_refusal([&] { sharded::shard_parameter(*layer, is_odd() ? "wait" : "weight", chunks(0)); },
                        "has no parameter \"wait\"");
       }},
      {"equal",
       [] {
         const ShardedTensor tensor = sharded::shard_tensor(at::rand({6, 6}), chunks(0));
         const ShardedTensor other = sharded::shard_tensor(at::rand({3, 6}), chunks(0));
         expect_disagreement([&] { at::equal(tensor, is_odd() ? other : tensor); },
                             "equal(Float[6, 6], Float[6, 6])", "equal(Float[6, 6], Float[3, 6])");
         expect_refusal(
             [&] {
               at::equal(tensor, is_odd() ? at::rand({6, 6}) : at::Tensor(tensor));
             },
             "both arguments must be sharded tensors");
       }},
      {"modules",
       [] {
         const auto mesh = mesh_of_all();
         Model model(is_odd() ? 9 : 6);
         expect_disagreement([&] { distribute_module(model, mesh); }, "up.weight Float[6, 6]",
                             "up.weight Float[9, 6]");
         expect_disagreement([&] { replicate(model, mesh); }, "replicate(", "up.weight Float[9, 6]");
         Model same;
         expect_disagreement(
             [&] {
               parallelize_module(same, mesh, {{is_odd() ? "up" : "down", ColwiseParallel()}});
             },
             "\"down\"", "\"up\"");
         expect_disagreement(
             [&] { distribute_parameter(*same.up, is_odd() ? "bias" : "weight", mesh, {Replicate()}); },
             "parameter 'weight'", "parameter 'bias'");
         expect_refusal([&] { distribute_parameter(*same.up, is_odd() ? "b" : "bias", mesh, {Replicate()}); },
                        "no parameter and no buffer 'b'");
         // In the midst of a module.
         const auto partition = [](const std::string& name, torch::nn::Module& module,
                                   const DeviceMesh& where) {
           if (name != "down") return;
           TESSERA_CHECK(!is_odd(), "this rank has no memory for ", name);
           distribute_parameter(module, "weight", where, {Shard(0)});
         };
         expect_refusal([&] { distribute_module(same, mesh, partition); },
                        "this rank has no memory for down");
         // When the others are done.
         Model third;
         const auto late = [](const std::string& name, torch::nn::Module& module, const DeviceMesh& where) {
           for (const char* each : {"weight", "bias"}) {
             if (name == "down") distribute_parameter(module, each, where, {Replicate()});
           }
           TESSERA_CHECK(name != "down" || !is_odd(), "this rank cannot go on");
         };
         expect_refusal([&] { distribute_module(third, mesh, late); }, "this rank cannot go on");
         const ParallelizeOptions options{.dim = is_odd() ? MeshDim("tp") : MeshDim(0)};
         expect_refusal(
             [&] {
               parallelize_module(third, mesh, {{"up", ColwiseParallel()}}, options);
             },
             "There is no dim 'tp'");
       }},
      {"manual_seed",
       [] {
         expect_disagreement([] { random::manual_seed(is_odd() ? 6 : 5, mesh_of_all()); }, "manual_seed(5",
                             "manual_seed(6");
       }},
      {"different_calls",
       [] {
         const auto mesh = mesh_of_all();
         const ShardedTensor tensor = sharded::shard_tensor(at::rand({6, 6}), chunks(0));
         expect_disagreement(
             [&] {
               is_odd() ? static_cast<void>(tensor.gather(0))
                        : static_cast<void>(distribute_tensor(at::rand({4}), mesh, {Shard(0)}));
             },
             "distribute_tensor(", "gather(");
       }},
  };
  return all;
}

RANK_BODY(agreement) {
  launch(1, [] {
    for (const auto& [name, body] : bodies()) {
      SCOPED_TRACE(name);
      body();
    }
  });
}

class Agreement : public ::testing::TestWithParam<std::string> {};

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const auto& [name, body] : bodies()) result.push_back(name);
  return result;
}

TEST_P(Agreement, OnThreads) { run(kRanks, bodies().at(GetParam())); }

INSTANTIATE_TEST_SUITE_P(Calls, Agreement, ::testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

TEST(Agreements, OnProcesses) { testing::expect_ok_over_processes("agreement", kRanks); }

TEST(Agreements, OnProcessesThatCompareCollectivesToo) {
  support::SpawnOptions options = testing::over("gloo");
  options.environment.emplace_back("TESSERA_CHECK_COLLECTIVES", "1");
  expect_ok(spawn_ranks("agreement", kRanks, options));
}

/// Collectives that do not match are shown as they were called, and what for.
void expect_mismatches() {
  const auto group = current_world()->group();
  const at::Tensor piece = at::ones({2});
  const comm::Tensors pieces{at::ones({2}), at::ones({3}), at::ones({2})};
  expect_error_everywhere(
      [&] {
        is_odd() ? comm::scatter(at::empty({3}), {}, 0, group).wait()
                 : comm::all_gather(pieces, piece, group).wait();
      },
      {"rank 0 called all_gather(Float[2], Float[2], Float[3], Float[2])",
       "rank 1 called scatter(root 0, Float[3])"});
  const auto mesh = mesh_of_all();
  const DTensor tensor = ones({6, 6}, mesh, {Shard(0)});
  expect_error_everywhere(
      [&] { is_odd() ? tensor.redistribute({Shard(1)}) : tensor.redistribute({Replicate()}); },
      {"rank 0 called all_gather(", "rank 1 called all_to_all(", ") in redistribute"});
  expect_error_everywhere(
      [&] { is_odd() ? at::softmax(tensor, 0) : at::Tensor(tensor.redistribute({Replicate()})); },
      {"rank 0 called all_gather(", ") in redistribute", "rank 1 called ", ") in aten::_softmax"});
}

RANK_BODY(mismatches) { launch(1, expect_mismatches); }

TEST(Agreements, MismatchedCollectivesNameTheirOperators) {
  run(kRanks, expect_mismatches);
  expect_ok(spawn_ranks("mismatches", kRanks, testing::over("shm")));
  support::SpawnOptions options = testing::over("gloo");
  options.environment.emplace_back("TESSERA_CHECK_COLLECTIVES", "1");
  expect_ok(spawn_ranks("mismatches", kRanks, options));
}

/// A large payload that nobody wants, and one that is shorter than expected: nothing stays under way.
RANK_BODY(sizes) {
  launch(1, [] {
    const auto mesh = mesh_of_all();
    for (const int64_t rows : {3, 3000}) {
      const at::Tensor tensor = at::ones({is_odd() ? rows : 3003 - rows, 1000});
      for (const int64_t source : {0, 1, 2})
        expect_disagreement([&] { distribute_tensor(tensor, mesh, {Shard(0)}, source); },
                            c10::str("[", 3003 - rows, ", 1000]"), c10::str("[", rows, ", 1000]"));
    }
  });
}

TEST(Agreements, WhatNobodyWantsIsReceivedAnyway) { testing::expect_ok_over_processes("sizes", kRanks); }

TEST(Agreements, ShowWhereLongTextsDiffer) {
  run(2, [] {
    const std::string common(5000, 'x');
    const auto group = current_world()->group();
    const std::string message =
        error_of([&] { comm::agree("call", group, [&] { return common + std::to_string(get_rank()); }); });
    EXPECT_THAT(message, HasSubstr("rank 0 called call(xxx"));
    EXPECT_THAT(message, HasSubstr("xxx0)"));
    EXPECT_THAT(message, HasSubstr("xxx1)"));
    EXPECT_LT(message.size(), 2000u);
  });
}

}  // namespace
}  // namespace tessera
