// What a dry run says of a step of training, against the same step on ranks that are threads.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/debug/dry_run.h>
#include <tessera/debug/explain.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/nn/on_meta.h>

#include <map>
#include <sstream>

#include <torch/nn.h>
#include <torch/optim.h>

#include "examples/train_gpt/dry_run.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;

constexpr int64_t kBatch = 8;
const gpt::Config kModel{.vocabulary = 40, .context = 16, .width = 32, .heads = 4, .layers = 3};

/// By name and mesh dims.
using Counts = std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>>;

struct Measured {
  Counts counts;
  int64_t parameters = 0;
  int64_t gradients = 0;
};

int64_t local_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(DTensor(tensor).to_local().nbytes());
}

/// The second step of training, on each rank.
std::vector<Measured> measured(const gpt::Parallel& parallel, int64_t dp, int64_t tp) {
  std::vector<Measured> results(dp * tp);
  run(dp * tp, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {dp, tp}, {"dp", "tp"});
    gpt::GPT model(kModel);
    gpt::parallelize(model, mesh, parallel);
    torch::optim::AdamW optimizer(model->parameters());
    const at::Tensor pieces = at::zeros({kBatch, kModel.context + 1}, at::kLong);
    const auto step = [&] {
      optimizer.zero_grad();
      gpt::loss_of(model, distribute_tensor(pieces, mesh, {Shard(0), Replicate()}, std::nullopt)).backward();
      optimizer.step();
    };
    step();
    Measured& result = results[mesh.get_rank()];
    const CommDebugMode mode;
    step();
    for (const auto& [name, by_dim] : mode.counts_by_mesh_dim()) {
      for (const auto& [dim, count] : by_dim) result.counts[{name, dim}] = {count.calls, count.bytes};
    }
    for (const at::Tensor& parameter : model->parameters()) {
      result.parameters += local_bytes(parameter);
      result.gradients += local_bytes(parameter.grad());
    }
  });
  return results;
}

StepCost planned(const gpt::Parallel& parallel, const std::string& mesh, int64_t rank) {
  const gpt::Training training{.model = kModel, .parallel = parallel, .batch = kBatch};
  return plan_model(parse_mesh(mesh),
                    [&](const DeviceMesh& on) { return gpt::training_on_meta(training, on); },
                    {.rank = rank});
}

TEST(PlanModel, CollectivesAndMemoryAreThoseOfARun) {
  struct Case {
    const char* parallel;
    int64_t dp, tp;
    bool sequence = false;
  };
  for (const Case& each : std::vector<Case>{{"dp", 4, 1},
                                            {"tp", 1, 4},
                                            {"tp+dp", 2, 2},
                                            {"fsdp", 4, 1},
                                            {"fsdp", 3, 1},  // uneven
                                            {"fsdp+tp", 2, 2},
                                            {"tp", 1, 2, true},
                                            {"fsdp+tp", 2, 2, true}}) {
    gpt::Parallel parallel = *gpt::parallel_named(each.parallel);
    parallel.sequence = each.sequence;
    const std::string mesh = c10::str("dp=", each.dp, ",tp=", each.tp);
    const auto real = measured(parallel, each.dp, each.tp);
    for (int64_t rank = 0; rank < each.dp * each.tp; ++rank) {
      SCOPED_TRACE(c10::str(each.parallel, " on ", mesh, " rank ", rank, each.sequence ? " sequence" : ""));
      const StepCost cost = planned(parallel, mesh, rank);
      Counts counts;
      for (const CollectivesOfStep& collectives : cost.collectives) {
        auto& [calls, bytes] = counts[{collectives.name, collectives.mesh_dims}];
        calls += collectives.calls;
        bytes += collectives.bytes;
      }
      EXPECT_EQ(counts, real[rank].counts);
      EXPECT_FALSE(counts.empty());
      EXPECT_EQ(cost.memory.parameters, real[rank].parameters);
      EXPECT_EQ(cost.memory.optimizer, 2 * real[rank].parameters);
      EXPECT_GE(cost.memory.gradients, real[rank].gradients);
      EXPECT_GE(cost.memory.peak, 3 * real[rank].parameters + cost.memory.activations / 2);
    }
  }
}

/// Costs of a step that is known by heart: one Linear(64, 32), f32, batch 16.
TEST(PlanModel, CountsWhatAStepTakes) {
  const auto linear = [](const DeviceMesh& mesh) {
    torch::nn::Linear model{nullptr};
    {
      const OnMeta on_meta;
      model = torch::nn::Linear(torch::nn::LinearOptions(64, 32).bias(false));
    }
    fully_shard(*model, mesh);
    return TrainingStep{.parameters = model->parameters(), .loss = [=]() mutable {
                          const auto meta = at::TensorOptions().device(at::kMeta);
                          return model(empty({16, 64}, mesh, {Shard(0)}, meta)).sum();
                        }};
  };
  CostModel cost_model;
  cost_model.links.push_back({.latency = 1e-3, .per_byte = 1e-6});
  const StepCost cost = plan_model(parse_mesh("dp=8"), linear, {.rank = 3, .cost = cost_model});
  const int64_t weight = 64 * 32 * 4;
  EXPECT_EQ(cost.mesh, "mesh(dp=8)");
  EXPECT_EQ(cost.rank, 3);
  EXPECT_EQ(cost.memory.parameters, weight / 8);
  EXPECT_EQ(cost.memory.gradients, weight / 8);
  EXPECT_EQ(cost.memory.optimizer, 0);
  EXPECT_GE(cost.memory.in_flight, weight);
  ASSERT_EQ(cost.collectives.size(), 2u);  // the outermost unit stays gathered for backward
  for (const CollectivesOfStep& each : cost.collectives) {
    EXPECT_THAT(each.name, ::testing::AnyOf("all_gather", "reduce_scatter"));
    EXPECT_EQ(each.mesh_dims, "dp");
    EXPECT_EQ(each.ranks, 8);
    EXPECT_EQ(each.calls, 1);
    EXPECT_EQ(each.bytes, weight);
    EXPECT_DOUBLE_EQ(each.seconds, 1e-3 + 1e-6 * weight * 7 / 8);
  }
  // 2 rows x 64 x 32, forward and the gradient of the weight; the input has none.
  EXPECT_EQ(cost.flops, 2 * (2.0 * 2 * 64 * 32));
  std::ostringstream text;
  text << cost;
  EXPECT_THAT(text.str(), ::testing::AllOf(HasSubstr("rank 3 of mesh(dp=8)"), HasSubstr("in flight"),
                                           HasSubstr("reduce_scatter")));
}

/// The sizes of Llama 2 70B's blocks, on 4,096 ranks, and many ranks.
TEST(PlanModel, LooksAtLargeModelsAndMeshes) {
  const gpt::Training large{
      .model = {.vocabulary = 32000, .context = 4096, .width = 8192, .heads = 64, .layers = 80},
      .parallel = {.tensor = true, .shard = true},
      .batch = 512,
      .dtype = at::kBFloat16};
  const auto cost = plan_model(parse_mesh("dp=512,tp=8"),
                               [&](const DeviceMesh& mesh) { return gpt::training_on_meta(large, mesh); });
  const double parameters = 80.0 * 12 * 8192 * 8192 + 32000.0 * 8192 * 2;
  EXPECT_NEAR(static_cast<double>(cost.memory.parameters) * 4096 / 2 / parameters, 1, 0.02);
  EXPECT_NEAR(static_cast<double>(cost.memory.optimizer) / static_cast<double>(cost.memory.parameters), 2,
              0.01);
  // Each parameter is multiplied three times; attention is some more.
  EXPECT_NEAR(cost.flops * 4096 / (6 * parameters * 512 * 4096), 1.09, 0.03);
  const gpt::Training small{.model = kModel, .parallel = {.tensor = true, .shard = true}, .batch = 25000};
  const auto wide =
      plan_model(parse_mesh("dp=25000,tp=4"),
                 [&](const DeviceMesh& mesh) { return gpt::training_on_meta(small, mesh); }, {.rank = 99999});
  EXPECT_EQ(wide.mesh, "mesh(dp=25000, tp=4)");
  EXPECT_GT(wide.bytes(), 0);
}

TEST(PlanModel, OnMetaAModelHasNoMemory) {
  const auto made = [] {
    const OnMeta on_meta(at::kBFloat16);
    EXPECT_TRUE(at::ones({2}).is_meta());
    EXPECT_TRUE(torch::randn({2, 3}).is_meta());
    EXPECT_FALSE(at::empty({2}, at::kCPU).is_meta());
    EXPECT_EQ(at::empty({2}, at::kLong).scalar_type(), at::kLong);
    return gpt::GPT(kModel);
  }();
  for (const at::Tensor& parameter : made->parameters()) {
    EXPECT_TRUE(parameter.is_meta());
    EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
  }
  EXPECT_FALSE(at::ones({2}).is_meta());
}

TEST(PlanModel, SaysWhatIsWrong) {
  const auto on_cpu = [](const DeviceMesh& mesh) {
    torch::nn::Linear model(4, 4);
    fully_shard(*model, mesh);
    return TrainingStep{.parameters = model->parameters(), .loss = [=]() mutable {
                          return model(ones({4, 4}, mesh, {Replicate()})).sum();
                        }};
  };
  expect_error<c10::ValueError>([&] { plan_model(parse_mesh("dp=2"), on_cpu); }, {"no values", "OnMeta"});
  expect_error<c10::ValueError>([&] { plan_model(parse_mesh("dp=2"), on_cpu, {.rank = 2}); }, {"Rank 2"});
  CostModel two;
  two.links.resize(2);
  expect_error<c10::ValueError>([&] { plan_model(parse_mesh("dp=2"), on_cpu, {.cost = two}); }, {"2 links"});
  WorldOptions options;
  options.dry_run = true;
  expect_error<c10::ValueError>([&] { World world(options); }, {"dry run", "fake"});
  // Afterwards the thread is as it was.
  EXPECT_FALSE(has_current_world());
}

}  // namespace
}  // namespace tessera
