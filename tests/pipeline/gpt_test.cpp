// The demo's GPT as a pipeline against the same model on one device: losses and gradients, plain, data parallel and tensor
// parallel, on threads and processes; and what it costs.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/fully_shard.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>
#include <tessera/pipeline/schedule.h>
#include <tessera/pipeline/simulate.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "examples/pipeline_gpt/stage.h"
#include "tests/nn/support.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::unsharded;

constexpr gpt::Config kConfig{.vocabulary = 11, .context = 6, .width = 8, .heads = 2, .layers = 8};

/// Ranks that are threads share libtorch's generator: so numbers come from a generator of their own.
gpt::GPT make_model(const gpt::Config& config = kConfig) {
  gpt::GPT model(config);
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(7);
  for (at::Tensor& parameter : model->parameters()) parameter.normal_(0, 0.3, generator);
  return model;
}

at::Tensor text_of(int64_t batch, int64_t step = 0, const gpt::Config& config = kConfig) {
  auto generator = at::detail::createCPUGenerator(100 + step);
  return at::randint(config.vocabulary, {batch, config.context + 1}, generator, at::kLong);
}

at::Tensor inputs_of(const at::Tensor& text) { return text.slice(1, 0, text.size(1) - 1); }
at::Tensor targets_of(const at::Tensor& text) { return text.slice(1, 1); }

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

/// What one device computes for a batch.
struct Reference {
  explicit Reference(const at::Tensor& text) : model(make_model()) {
    const at::Tensor result = loss_of(model->forward(inputs_of(text)), targets_of(text));
    result.backward();
    loss = result.item<double>();
  }
  gpt::GPT model;
  double loss;
};

struct How {
  std::string name;
  int64_t stages_per_rank;
};
const std::vector<How> kSchedules{{"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}};

PipelineSchedule make_schedule(const std::string& name, const std::vector<PipelineStage>& stages,
                               int64_t count, PipelineOptions options = {}) {
  if (name == "gpipe") return ScheduleGPipe(stages.at(0), count, loss_of, options);
  if (name == "1f1b") return Schedule1F1B(stages.at(0), count, loss_of, options);
  return ScheduleInterleaved1F1B(stages, count, loss_of, options);
}

/// The stages of a rank, and their modules.
struct Pipeline {
  using Distribute = std::function<void(gpt::Stage&)>;

  Pipeline(const How& how, const DeviceMesh& pp, int64_t microbatches, const Distribute& distribute = {},
           PipelineOptions options = {})
      : schedule(make_schedule(how.name, make(how.stages_per_rank, pp, distribute), microbatches, options)) {}

  std::vector<PipelineStage> make(int64_t per_rank, const DeviceMesh& pp, const Distribute& distribute) {
    std::vector<PipelineStage> stages;
    for (int64_t i = 0; i < per_rank; ++i) {
      const int64_t index = i * pp.size() + pp.get_local_rank(), count = per_rank * pp.size();
      gpt::Stage module(make_model(), index, count);
      if (distribute) distribute(module);
      modules.push_back(module);
      stages.emplace_back(module, index, count, pp);
    }
    return stages;
  }

  void expect_gradients(const Reference& reference, const std::string& what) const {
    const auto expected = reference.model->named_parameters();
    for (const gpt::Stage& module : modules) {
      for (const auto& parameter : module->named_parameters()) {
        ASSERT_TRUE(parameter->grad().defined()) << parameter.key() << what;
        expect_close(unsharded(parameter->grad()), expected[parameter.key()].grad(), parameter.key() + what);
      }
    }
  }

  std::vector<gpt::Stage> modules;
  PipelineSchedule schedule;
};

/// On the rank of the last stage the loss is that of one device; elsewhere there is none.
void expect_loss(const PipelineResult& result, bool is_last, double expected, int64_t microbatches,
                 const std::string& what) {
  ASSERT_EQ(result.loss.defined(), is_last) << what;
  ASSERT_EQ(static_cast<int64_t>(result.losses.size()), is_last ? microbatches : 0) << what;
  if (is_last) EXPECT_NEAR(result.loss.item<double>(), expected, 1e-4) << what;
}

/// All schedules, with batches that cannot be split evenly, and several steps, which add up.
void compare_plain(const DeviceMesh& pp, int64_t batch) {
  const Reference reference(text_of(batch));
  const at::Tensor text = text_of(batch);
  const bool is_last = pp.get_local_rank() + 1 == pp.size();
  for (const How& how : kSchedules) {
    for (const int64_t microbatches : {1, 3, 4}) {
      const std::string what = c10::str(" of ", how.name, " on ", pp.size(), " with ", microbatches);
      Pipeline pipeline(how, pp, microbatches);
      expect_loss(pipeline.schedule.step(inputs_of(text), targets_of(text)), is_last, reference.loss,
                  microbatches, what);
      pipeline.expect_gradients(reference, what);
      expect_loss(pipeline.schedule.step(inputs_of(text), targets_of(text)), is_last, reference.loss,
                  microbatches, what);
      for (const gpt::Stage& module : pipeline.modules) {
        for (at::Tensor& parameter : module->parameters()) parameter.mutable_grad().div_(2);
      }
      pipeline.expect_gradients(reference, what + " twice");
    }
  }
}

TEST(Pipeline, EqualsOneDevice) {
  for (const int64_t ranks : {1, 2, 4})
    run(ranks, [&] { compare_plain(init_device_mesh(at::kCPU, {ranks}, {"pp"}), 10); });
}

/// What cross entropy and its gradient reduce if the batch is sharded.
int64_t reductions_of_a_loss(const DeviceMesh& dp) {
  const at::Tensor logits = testing::small({2, kConfig.context, kConfig.vocabulary}).requires_grad_();
  const at::Tensor sharded = distribute_tensor(logits, dp, {Shard(0)}, std::nullopt);
  const at::Tensor targets = distribute_tensor(targets_of(text_of(2)), dp, {Shard(0)}, std::nullopt);
  const CommDebugMode counts;
  loss_of(sharded, targets).backward();
  return counts.calls("all_reduce");
}

/// Data parallel along "dp": gradients are reduced once, in the last backward of each stage.
void compare_data_parallel(const DeviceMesh& mesh, int64_t batch) {
  const Reference reference(text_of(batch));
  const bool is_last = mesh.get_local_rank("pp") + 1 == mesh.size("pp");
  for (const How& how : kSchedules) {
    const std::string what = c10::str(" of ", how.name, " with a batch of ", batch);
    Pipeline pipeline(how, mesh["pp"], 4, [&](gpt::Stage& stage) { replicate(*stage, mesh["dp"]); });
    const at::Tensor text = distribute_tensor(text_of(batch), mesh["dp"], {Shard(0)}, std::nullopt);
    const int64_t losses = is_last ? 4 * reductions_of_a_loss(mesh["dp"]) : 0;
    CommDebugMode counts;
    const PipelineResult result = pipeline.schedule.step(inputs_of(text), targets_of(text));
    if (!is_last || batch % 8 == 0)
      EXPECT_EQ(counts.calls("all_reduce"), how.stages_per_rank + losses) << counts << what;
    expect_loss(result, is_last, reference.loss, 4, what);
    for (const gpt::Stage& module : pipeline.modules) {
      for (const at::Tensor& parameter : module->parameters())
        EXPECT_EQ(DTensor(parameter.grad()).placements(), Placements{Replicate()});
    }
    pipeline.expect_gradients(reference, what);
  }
}

TEST(Pipeline, WithDataParallel) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
    compare_data_parallel(mesh, 8);
    compare_data_parallel(mesh, 11);
  });
}

/// A table of one's own: stages go forth and back over the ranks, so that two neighbours are on one.
TEST(Pipeline, RunsTablesOfOnesOwn) {
  const Reference reference(text_of(4));
  PipelineTable table;
  table.name = "V";
  table.microbatches = 2;
  table.rank_of_stage = {0, 1, 1, 0};
  table.actions.resize(2);
  for (const char* action : {"0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"})
    table.actions[0].push_back(PipelineAction::parse(action));
  for (const char* action : {"1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"})
    table.actions[1].push_back(PipelineAction::parse(action));
  table = table.with_messages();
  run(2, [&] {
    const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
    std::vector<gpt::Stage> modules;
    std::vector<PipelineStage> stages;
    for (const int64_t index : table.stages_of(pp.get_local_rank())) {
      modules.emplace_back(make_model(), index, 4);
      stages.emplace_back(modules.back(), index, 4, pp);
    }
    PipelineSchedule schedule(stages, table, loss_of);
    const at::Tensor text = text_of(4);
    // Inputs, targets and losses are all on rank 0.
    expect_loss(schedule.step(inputs_of(text), targets_of(text)), pp.get_local_rank() == 0, reference.loss, 2,
                " of V");
    for (const gpt::Stage& module : modules) {
      for (const auto& parameter : module->named_parameters())
        expect_close(parameter->grad(), reference.model->named_parameters()[parameter.key()].grad(),
                     parameter.key());
    }
  });
}

/// Ranks that accumulate over several steps say so as ever.
TEST(Pipeline, LeavesGradientsPartialIfAskedTo) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
    Pipeline pipeline({"1f1b", 1}, mesh["pp"], 2, [&](gpt::Stage& stage) { replicate(*stage, mesh["dp"]); });
    const at::Tensor text = distribute_tensor(text_of(8), mesh["dp"], {Shard(0)}, std::nullopt);
    {
      const NoSync accumulate(*pipeline.modules[0]);
      pipeline.schedule.step(inputs_of(text), targets_of(text));
      for (const at::Tensor& parameter : pipeline.modules[0]->parameters())
        EXPECT_EQ(DTensor(parameter.grad()).placements(), Placements{Partial()});
    }
    pipeline.schedule.step(inputs_of(text), targets_of(text));
    for (const at::Tensor& parameter : pipeline.modules[0]->parameters()) {
      EXPECT_EQ(DTensor(parameter.grad()).placements(), Placements{Replicate()});
      const torch::NoGradGuard no_grad;
      parameter.mutable_grad().div_(2);
    }
    pipeline.expect_gradients(Reference(text_of(8)), " of two steps");
  });
}

/// Tensor parallel along "tp"; what goes from stage to stage is replicated there, or sharded along the sequence.
TEST(Pipeline, WithTensorParallel) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "tp"});
    const Reference reference(text_of(6));
    for (const bool sequence_parallel : {false, true}) {
      for (const How& how : kSchedules) {
        const std::string what = c10::str(" of ", how.name, sequence_parallel ? " along the sequence" : "");
        const Placement stream = sequence_parallel ? Shard(1) : Replicate();
        Pipeline pipeline(how, mesh["pp"], 3, [&](gpt::Stage& stage) {
          parallelize_module(*stage, mesh["tp"],
                             {{"blocks.*.qkv", ColwiseParallel()},
                              {"blocks.*.projection", RowwiseParallel({.output_layouts = stream})},
                              {"blocks.*.up", ColwiseParallel()},
                              {"blocks.*.down", RowwiseParallel({.output_layouts = stream})}});
          distribute_module(*stage, mesh["tp"]);
        });
        const at::Tensor text = distribute_tensor(text_of(6), mesh["tp"], {Replicate()}, std::nullopt);
        const PipelineResult result = pipeline.schedule.step(inputs_of(text), targets_of(text));
        expect_loss(result, mesh.get_local_rank("pp") == 1, reference.loss, 3, what);
        pipeline.expect_gradients(reference, what);
      }
    }
  });
}

/// Trained with an optimiser, over steps whose batches differ in size: stages tell each other the new shapes.
TEST(Pipeline, TrainsAsOneDevice) {
  const std::vector<int64_t> batches{8, 8, 5, 8, 4};
  auto options = [] { return torch::optim::AdamWOptions(1e-2); };
  std::vector<double> expected;
  {
    gpt::GPT model = make_model();
    torch::optim::AdamW optimizer(model->parameters(), options());
    for (size_t i = 0; i < batches.size(); ++i) {
      const at::Tensor text = text_of(batches[i], static_cast<int64_t>(i));
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(model->forward(inputs_of(text)), targets_of(text));
      loss.backward();
      optimizer.step();
      expected.push_back(loss.item<double>());
    }
  }
  for (const How& how : kSchedules) {
    run(2, [&] {
      const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
      Pipeline pipeline(how, pp, 4);
      std::vector<at::Tensor> parameters;
      for (const gpt::Stage& module : pipeline.modules) {
        for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
      }
      torch::optim::AdamW optimizer(parameters, options());
      for (size_t i = 0; i < batches.size(); ++i) {
        // Only those that need it have the batch.
        const at::Tensor text = text_of(batches[i], static_cast<int64_t>(i));
        optimizer.zero_grad();
        const int64_t rank = pp.get_local_rank();
        const PipelineResult result = pipeline.schedule.step(rank == 0 ? inputs_of(text) : at::Tensor(),
                                                             rank == 1 ? targets_of(text) : at::Tensor());
        optimizer.step();
        expect_loss(result, rank == 1, expected[i], 4, c10::str(" of step ", i, " with ", how.name));
      }
    });
  }
}

TEST(Pipeline, SumsLossesThatAreSums) {
  auto sum = [](const at::Tensor& logits, const at::Tensor& targets) {
    return torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), targets.flatten(),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  };
  gpt::GPT model = make_model();
  const at::Tensor text = text_of(6);
  const at::Tensor expected = sum(model->forward(inputs_of(text)), targets_of(text));
  expected.backward();
  run(2, [&] {
    const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
    gpt::Stage module(make_model(), pp.get_local_rank(), 2);
    Schedule1F1B schedule(PipelineStage(module, pp.get_local_rank(), 2, pp), 3, sum, {.scale_grads = false});
    const PipelineResult result = schedule.step(inputs_of(text), targets_of(text));
    if (pp.get_local_rank() == 1) EXPECT_NEAR(result.loss.item<double>(), expected.item<double>(), 1e-3);
    for (const auto& parameter : module->named_parameters())
      expect_close(parameter->grad(), model->named_parameters()[parameter.key()].grad(), parameter.key());
  });
}

TEST(Pipeline, Evaluates) {
  gpt::GPT model = make_model();
  const at::Tensor text = text_of(7);
  const torch::NoGradGuard no_grad;
  const at::Tensor logits = model->forward(inputs_of(text));
  for (const How& how : kSchedules) {
    run(2, [&] {
      const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
      Pipeline pipeline(how, pp, 3, {}, {.return_outputs = true});
      for (int i = 0; i < 2; ++i) {
        const PipelineResult result = pipeline.schedule.eval(inputs_of(text), targets_of(text));
        ASSERT_EQ(result.outputs.size(), pp.get_local_rank() == 1 ? 3 : 0);
        for (const gpt::Stage& module : pipeline.modules) {
          for (const at::Tensor& parameter : module->parameters()) EXPECT_FALSE(parameter.grad().defined());
        }
        if (result.outputs.empty()) continue;
        std::vector<at::Tensor> parts;
        for (const auto& outputs : result.outputs) parts.push_back(outputs.at(0));
        expect_close(at::cat(parts), logits, "outputs of " + how.name);
        EXPECT_NEAR(result.loss.item<double>(), loss_of(logits, targets_of(text)).item<double>(), 1e-4);
        EXPECT_FALSE(result.outputs[0][0].requires_grad());
      }
    });
  }
}

/// What stages exchange: the data of each activation and gradient once, and only in the first step what they are.
TEST(Pipeline, SendsActivationsOnce) {
  run(2, [] {
    const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
    Pipeline pipeline({"1f1b", 1}, pp, 4);
    const at::Tensor text = text_of(8);
    const int64_t activation = 8 / 4 * kConfig.context * kConfig.width * 4;
    for (int64_t step = 0; step < 3; ++step) {
      CommDebugMode counts;
      pipeline.schedule.step(inputs_of(text), targets_of(text));
      const int64_t messages = step == 0 ? 12 : 4;  // with the size and the text of what comes
      EXPECT_EQ(counts.calls("send"), pp.get_local_rank() == 0 ? messages : 4) << counts;
      EXPECT_EQ(counts.calls("recv"), pp.get_local_rank() == 0 ? 4 : messages) << counts;
      EXPECT_EQ(counts.calls("all_to_all"), 1) << counts;
      if (step > 0) {
        EXPECT_EQ(counts.get_comm_counts().at("send").bytes, 4 * activation) << counts;
        EXPECT_EQ(counts.get_comm_counts().at("recv").bytes, 4 * activation) << counts;
      }
    }
  });
}

/// Stages that are fully sharded on another mesh dim: parameters are gathered for each micro-batch, and gradients are sums.
TEST(Pipeline, StagesMayBeFullySharded) {
  const at::Tensor text = text_of(8);
  const Reference reference(text);
  for (const How& how : kSchedules) {
    run(4, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
      const DeviceMesh pp = mesh["pp"], dp = mesh["dp"];
      Pipeline pipeline(how, pp, 2, [&](gpt::Stage& stage) { fully_shard(*stage, dp); });
      const auto placed = [&](const at::Tensor& x) {
        return distribute_tensor(x, dp, {Shard(0)}, std::nullopt);
      };
      for (int64_t step = 0; step < 2; ++step) {
        for (gpt::Stage& module : pipeline.modules) module->zero_grad();
        const PipelineResult result =
            pipeline.schedule.step(placed(inputs_of(text)), placed(targets_of(text)));
        if (pp.get_local_rank() == 1)
          EXPECT_NEAR(unsharded(result.loss).item<double>(), reference.loss, 1e-4) << how.name;
        pipeline.expect_gradients(reference, how.name);
        for (const gpt::Stage& module : pipeline.modules) {
          for (const at::Tensor& each : module->parameters())
            EXPECT_EQ(DTensor(each.grad()).placements(), Placements{Shard(0)}) << how.name;
        }
      }
    });
  }
}

/// Which parameters are trained may change from step to step, on any stage.
TEST(Pipeline, ParametersMayBeFrozenBetweenSteps) {
  const at::Tensor text = text_of(8);
  const Reference reference(text);
  for (const How& how : kSchedules) {
    run(2, [&] {
      const DeviceMesh pp = init_device_mesh(at::kCPU, {2}, {"pp"});
      Pipeline pipeline(how, pp, 4);
      for (const bool frozen : {true, false, true, false}) {
        for (gpt::Stage& module : pipeline.modules) {
          module->zero_grad();
          for (const at::Tensor& parameter : module->parameters())
            parameter.set_requires_grad(!frozen || pp.get_local_rank() == 1);
        }
        const PipelineResult result = pipeline.schedule.step(inputs_of(text), targets_of(text));
        expect_loss(result, pp.get_local_rank() == 1, reference.loss, 4, how.name);
        if (!frozen || pp.get_local_rank() == 1) {
          pipeline.expect_gradients(reference, how.name);
          continue;
        }
        for (const gpt::Stage& module : pipeline.modules) {
          for (const at::Tensor& parameter : module->parameters()) EXPECT_FALSE(parameter.grad().defined());
        }
      }
    });
  }
}

/// Stages with several inputs and outputs: some have no gradient, some are not used, some are empty.
TEST(Pipeline, PassesSeveralTensors) {
  using Tensors = PipelineStage::Tensors;
  struct PairImpl : torch::nn::Module {
    PairImpl() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      testing::fill(*this);
    }
    torch::nn::Linear linear{nullptr};
  };
  auto stage = [](torch::nn::Linear linear, int64_t index) {
    return [linear, index](const Tensors& in, int64_t) mutable -> Tensors {
      if (index == 2) return {linear(in[1]) * in[0].unsqueeze(1)};
      const at::Tensor y = linear(in.back());
      return {index == 0 ? in[0].sum(1) : in[0], y.tanh().t().contiguous().t(), y.narrow(1, 0, 0), y};
    };
  };
  auto reorder = [](const Tensors& in) { return in.size() == 4 ? Tensors{in[0], in[1]} : in; };
  const at::Tensor a = testing::small({6, 2}, 1), b = testing::small({6, 4}, 2),
                   target = testing::small({6, 4}, 3);
  auto mse = [](const at::Tensor& x, const at::Tensor& y) { return torch::mse_loss(x, y); };
  std::vector<std::shared_ptr<PairImpl>> whole;
  Tensors flow{a, b};
  for (int64_t i = 0; i < 3; ++i) {
    whole.push_back(std::make_shared<PairImpl>());
    flow = stage(whole[i]->linear, i)(reorder(flow), 0);
  }
  mse(flow[0], target).backward();
  run(3, [&] {
    const DeviceMesh pp = init_device_mesh(at::kCPU, {3}, {"pp"});
    const int64_t index = pp.get_local_rank();
    auto module = std::make_shared<PairImpl>();
    auto forward = [&, run = stage(module->linear, index)](const Tensors& in, int64_t m) mutable {
      if (index > 0) {
        EXPECT_EQ(in.size(), 4);
        EXPECT_FALSE(in[0].requires_grad());
        EXPECT_EQ(in[2].numel(), 0);
      }
      return run(reorder(in), m);
    };
    Schedule1F1B schedule(PipelineStage(module, forward, index, 3, pp), 3, mse);
    schedule.step({a, b}, target);
    expect_close(module->linear->weight.grad(), whole[index]->linear->weight.grad(),
                 c10::str("stage ", index));
  });
}

// ---- memory

/// Bytes that each rank has allocated, and the most it had. A rank's tensors are its own, whoever frees them.
class Bytes {
 public:
  explicit Bytes(int64_t ranks) : live_(ranks), peak_(ranks) {}

  class OfRank : public c10::MemoryReportingInfoBase {
   public:
    OfRank(Bytes& all, int64_t rank) : all_(all), rank_(rank) {}
    void reportMemoryUsage(void* pointer, int64_t bytes, size_t, size_t, c10::Device) override {
      all_.report(rank_, pointer, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }

   private:
    Bytes& all_;
    const int64_t rank_;
  };

  /// Most bytes at once that `function` adds, on the calling rank.
  int64_t peak_of(int64_t rank, const std::function<void()>& function) {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                    std::make_shared<OfRank>(*this, rank));
    function();
    const std::lock_guard lock(mutex_);
    return peak_[rank];
  }

 private:
  void report(int64_t rank, void* pointer, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      owners_[pointer] = {rank, bytes};
      live_[rank] += bytes;
      peak_[rank] = std::max(peak_[rank], live_[rank]);
    } else if (const auto owner = owners_.find(pointer); owner != owners_.end()) {
      live_[owner->second.first] -= owner->second.second;
      owners_.erase(owner);
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::pair<int64_t, int64_t>> owners_;
  std::vector<int64_t> live_, peak_;
};

/// The activations that ranks keep are those of as many micro-batches as the simulation says: measured in bytes, on all
/// ranks, for GPipe and 1F1B.
TEST(Pipeline, KeepsAsManyActivationsAsTheTableSays) {
  constexpr gpt::Config config{.vocabulary = 11, .context = 32, .width = 32, .heads = 2, .layers = 8};
  constexpr int64_t kRanks = 4, kMicrobatches = 8;
  const at::Tensor text = text_of(2 * kMicrobatches, 0, config);
  std::map<std::string, std::vector<int64_t>> peaks;
  for (const std::string name : {"gpipe", "1f1b"}) {
    Bytes bytes(kRanks);
    peaks[name].resize(kRanks);
    run(kRanks, [&] {
      const DeviceMesh pp = init_device_mesh(at::kCPU, {kRanks}, {"pp"});
      const int64_t rank = pp.get_local_rank();
      gpt::Stage module(make_model(config), rank, kRanks);
      PipelineSchedule schedule =
          make_schedule(name, {PipelineStage(module, rank, kRanks, pp)}, kMicrobatches);
      schedule.step(inputs_of(text), targets_of(text));  // gradients have their memory now
      peaks[name][rank] = bytes.peak_of(rank, [&] { schedule.step(inputs_of(text), targets_of(text)); });
    });
  }
  const auto gpipe = simulate(PipelineTable::gpipe(kRanks, kMicrobatches)).peak_live;
  const auto one = simulate(PipelineTable::one_f_one_b(kRanks, kMicrobatches)).peak_live;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const int64_t more = peaks["gpipe"][rank], less = peaks["1f1b"][rank];
    EXPECT_LT(less, more) << "rank " << rank;
    // peak = (live micro-batches) x (bytes of one) + (what one pass needs): what the bytes of one are, follows from both.
    const double each = static_cast<double>(more - less) / static_cast<double>(gpipe[rank] - one[rank]);
    const double measured = static_cast<double>(more) / each;
    EXPECT_NEAR(measured, static_cast<double>(gpipe[rank]), 0.75)
        << "rank " << rank << ": " << more << ", " << less;
    RecordProperty(c10::str("rank_", rank), c10::str(more, " ", less));
    std::cout << "rank " << rank << ": GPipe " << more << " bytes, 1F1B " << less << " bytes\n";
  }
}

// ---- failure

struct FailsImpl : torch::nn::Module {
  explicit FailsImpl(int64_t rank, int64_t culprit) : is_culprit(rank == culprit) {
    linear = register_module("linear", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_culprit && ++calls == 3) throw std::runtime_error("on purpose");
    return linear(x);
  }
  bool is_culprit;
  int64_t calls = 0;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Fails);

void expect_failure_everywhere(int64_t culprit, const std::string& name) {
  const DeviceMesh pp = init_device_mesh(at::kCPU, {get_world_size()}, {"pp"});
  const int64_t rank = pp.get_local_rank();
  Fails module(rank, culprit);
  auto mse = [](const at::Tensor& x, const at::Tensor& y) { return torch::mse_loss(x, y); };
  const PipelineStage stage(module, rank, pp.size(), pp);
  PipelineSchedule schedule(
      {stage},
      name == "gpipe" ? PipelineTable::gpipe(pp.size(), 4) : PipelineTable::one_f_one_b(pp.size(), 4), mse);
  const at::Tensor batch = at::ones({8, 4});
  const std::string message = testing::error_of([&] { schedule.step(batch, batch); });
  EXPECT_THAT(message, ::testing::HasSubstr("on purpose"));
  if (rank != culprit) EXPECT_THAT(message, ::testing::HasSubstr(c10::str("ank ", culprit, " failed")));
  EXPECT_THAT(testing::error_of([&] { schedule.step(batch, batch); }), ::testing::HasSubstr("on purpose"));
}

TEST(Pipeline, FailureReachesAllStages) {
  for (const std::string name : {"gpipe", "1f1b"}) {
    for (int64_t culprit = 0; culprit < 3; ++culprit)
      run(3, [&] { expect_failure_everywhere(culprit, name); });
  }
}

RANK_BODY(pipeline_failure_on_processes) {
  init_process_group();
  expect_failure_everywhere(1, "1f1b");
}

TEST(Pipeline, FailureReachesAllStagesOnProcesses) {
  testing::expect_ok_over_processes("pipeline_failure_on_processes", 3);
}

/// Wrong arguments on one rank are refused on all of them, and the pipeline still works.
TEST(Pipeline, SaysWhatIsWrong) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"pp"});
    const int64_t rank = mesh.get_local_rank();
    gpt::Stage module(make_model(), rank, 2);
    expect_error<c10::IndexError>([&] { PipelineStage(module, 2, 2, mesh); }, {"no stage 2 of 2"});
    const DeviceMesh plane = init_device_mesh(at::kCPU, {2, 1}, {"pp", "dp"});
    expect_error<c10::ValueError>([&] { PipelineStage(module, rank, 2, plane); },
                                  {"one mesh dim", "mesh[\"pp\"]"});
    const PipelineStage stage(module, rank, 2, mesh);
    expect_error<c10::ValueError>([&] { Schedule1F1B(PipelineStage(module, rank, 4, mesh), 2, loss_of); },
                                  {"one stage on each rank", "ScheduleInterleaved1F1B"});
    expect_error<c10::ValueError>(
        [&] { ScheduleInterleaved1F1B({PipelineStage(module, rank, 4, mesh)}, 2, loss_of); },
        {"has stages ", "but got stages "});
    expect_error<c10::ValueError>(
        [&] { ScheduleInterleaved1F1B({PipelineStage(module, rank, 3, mesh)}, 2, loss_of); },
        {"3 stages cannot be dealt to the 2 ranks"});
    expect_error<c10::ValueError>([&] { Schedule1F1B(PipelineStage(module, 1 - rank, 2, mesh), 2, loss_of); },
                                  {c10::str("has stages ", rank, " on rank ", rank), "but got stages "});
    expect_error<c10::ValueError>([&] { PipelineSchedule({stage}, PipelineTable::gpipe(3, 2), loss_of); },
                                  {"is for 3 ranks", "has 2"});
    PipelineTable broken = PipelineTable::gpipe(2, 2);
    if (rank == 0) broken.actions[0].pop_back();
    expect_error<c10::ValueError>([&] { PipelineSchedule({stage}, broken, loss_of); }, {"never does 0B1"});
    expect_error<c10::ValueError>([&] { Schedule1F1B(stage, 2 + rank, loss_of); },
                                  {"2 micro-batches", "3 micro-batches"});

    Schedule1F1B schedule(stage, 4, loss_of);
    const at::Tensor text = text_of(8);
    const at::Tensor x = inputs_of(text), y = targets_of(text);
    expect_error<c10::ValueError>([&] { schedule.step(inputs_of(text_of(3)), y); },
                                  {"batch of 3", "4 micro-batches"});
    expect_error<c10::ValueError>([&] { schedule.step(x); }, {"loss_fn", "eval()"});
    expect_error<c10::ValueError>([&] { schedule.step(at::Tensor(), y); }, {"needs its inputs"});
    Schedule1F1B without(stage, 4);
    expect_error<c10::ValueError>([&] { without.step(x, y); }, {"loss_fn", "eval()"});
    const PipelineResult result = schedule.step(x, y);
    expect_loss(result, rank == 1, Reference(text).loss, 4, " after refusals");
  });
  // What only the rank of the last stage can see ends the world.
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"pp"});
    Pipeline pipeline({"gpipe", 1}, mesh, 2);
    EXPECT_THAT(
        testing::error_of([&] { pipeline.schedule.step(inputs_of(text_of(8)), targets_of(text_of(6))); }),
        ::testing::HasSubstr("targets (6 rows) are split into micro-batches otherwise"));
  });
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"pp"});
    auto none = std::make_shared<torch::nn::Module>("none");
    int64_t calls = 0;
    auto forward = [&](const PipelineStage::Tensors& in, int64_t) {
      return PipelineStage::Tensors{++calls > 2 && mesh.get_local_rank() == 0 ? in[0].narrow(1, 0, 1)
                                                                              : in[0]};
    };
    PipelineSchedule schedule({PipelineStage(none, forward, mesh.get_local_rank(), 2, mesh)},
                              PipelineTable::gpipe(2, 2));
    schedule.eval(at::ones({4, 3}));
    EXPECT_THAT(testing::error_of([&] {
                  schedule.eval(at::ones({4, 3}));
                }),
                ::testing::AllOf(::testing::HasSubstr("Stage 0 of the pipeline returned f32[2, 1]"),
                                 ::testing::HasSubstr("where it returned f32[2, 3] before")));
  });
  // The next stage has no such mesh.
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"pp"});
    auto none = std::make_shared<torch::nn::Module>("none");
    auto forward = [&](const PipelineStage::Tensors& in, int64_t) {
      return PipelineStage::Tensors{distribute_tensor(in[0], mesh, {Replicate()}, std::nullopt)};
    };
    PipelineSchedule schedule({PipelineStage(none, forward, mesh.get_local_rank(), 2, mesh)},
                              PipelineTable::gpipe(2, 2));
    EXPECT_THAT(testing::error_of([&] {
                  schedule.eval(at::ones({4, 3}));
                }),
                ::testing::HasSubstr("The ranks of the next stage have no such mesh"));
  });
}

// ---- processes

RANK_BODY(pipeline_on_processes) {
  init_process_group();
  compare_plain(init_device_mesh(at::kCPU, {get_world_size()}, {"pp"}), 10);
  destroy_process_group();
}

TEST(Pipeline, OnProcesses) {
  testing::expect_ok_over_processes("pipeline_on_processes", 2);
  testing::expect_ok_over_processes("pipeline_on_processes", 4);
}

RANK_BODY(pipeline_with_data_parallel_on_processes) {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
  compare_data_parallel(mesh, 8);
  compare_data_parallel(mesh, 11);
  destroy_process_group();
}

TEST(Pipeline, WithDataParallelOnProcesses) {
  testing::expect_ok_over_processes("pipeline_with_data_parallel_on_processes", 4);
}

}  // namespace
}  // namespace tessera
