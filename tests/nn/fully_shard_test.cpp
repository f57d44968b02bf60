// Fully sharded training against one device.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/nn/fully_shard.h>
#include <tessera/nn/hooks.h>
#include <tessera/nn/members.h>
#include <tessera/nn/style.h>
#include <tessera/random/random.h>

#include <atomic>
#include <numeric>
#include <random>

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "examples/train_gpt/gpt.h"
#include "tests/checkpoint/scratch.h"
#include "tests/nn/support.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::small;
using testing::test_device;
using torch::nn::Module;

const gpt::Config kConfig{.vocabulary = 19, .context = 10, .width = 16, .heads = 4, .layers = 3};

gpt::GPT make_gpt() {
  gpt::GPT model(kConfig);
  testing::fill(*model);
  return model;
}

at::Tensor text_of(int64_t step, int64_t batch = 8) {
  std::mt19937_64 random(static_cast<uint64_t>(step) + 1);
  const at::Tensor text = at::empty({batch, kConfig.context + 1}, at::kLong);
  for (int64_t i = 0; i < text.numel(); ++i)
    text.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(random() % kConfig.vocabulary);
  return text;
}

/// Each block is a unit, and the rest.
void shard_gpt(gpt::GPT& model, const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  for (const auto& block : *model->blocks) fully_shard(*block, mesh, options);
  fully_shard(*model, mesh, options);
}

/// Its eps is large, or it would blow up gradients that are noise: attention does not depend on the bias of keys.
torch::optim::AdamW optimizer_of(const gpt::GPT& model) {
  return torch::optim::AdamW(model->parameters(),
                             torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-4));
}

template <class Place>
std::vector<double> train(gpt::GPT& model, int64_t steps, const Place& place) {
  torch::optim::AdamW optimizer = optimizer_of(model);
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model, place(text_of(step)));
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct Expected {
  std::vector<double> losses;
  gpt::GPT model = make_gpt();
  explicit Expected(int64_t steps) {
    losses = train(model, steps, [](const at::Tensor& text) { return text; });
  }
};

template <class M>
void expect_same_parameters(M& model, M& reference, const std::string& what) {
  const auto expected = reference->named_parameters();
  for (const auto& each : model->named_parameters())
    expect_close(testing::unsharded(each.value()), expected[each.key()], each.key() + what);
}

template <class M>
void expect_same_gradients(M& model, M& reference, const std::string& what) {
  const auto expected = reference->named_parameters();
  for (const auto& each : model->named_parameters()) {
    const at::Tensor& gradient = each->grad();
    ASSERT_EQ(gradient.defined(), expected[each.key()].grad().defined()) << each.key() << what;
    if (!gradient.defined()) continue;
    EXPECT_EQ(DTensor(gradient).spec(), DTensor(each.value()).spec()) << each.key() << what;
    expect_close(DTensor(gradient).full_tensor(), expected[each.key()].grad(), each.key() + what);
  }
}

at::Tensor batch_on(const at::Tensor& batch, const DeviceMesh& mesh, int64_t dims) {
  Placements placements(mesh.ndim(), Replicate());
  for (int64_t i = 0; i < dims; ++i) placements[i] = Shard(0);
  return distribute_tensor(batch, mesh, placements, std::nullopt);
}

// --- the demo's GPT

struct Case {
  std::string what;
  std::vector<int64_t> shape;
  bool tensor_parallel = false;
  FullyShardOptions options = {};
};

void train_as(const Case& each, const Expected& expected) {
  const auto size = std::accumulate(each.shape.begin(), each.shape.end(), int64_t{1}, std::multiplies<>());
  const auto body = [&] {
    const bool flat = each.shape.size() == 1;
    const DeviceMesh mesh = init_device_mesh(
        test_device(), each.shape,
        flat ? DeviceMesh::Names{"dp"} : DeviceMesh::Names{"dp", each.tensor_parallel ? "tp" : "shard"});
    gpt::GPT model = make_gpt();
    if (each.tensor_parallel) {
      parallelize_module(*model, mesh,
                         {{"tokens", RowwiseParallel()},
                          {"blocks.*.qkv", ColwiseParallel()},
                          {"blocks.*.projection", RowwiseParallel()},
                          {"blocks.*.up", ColwiseParallel()},
                          {"blocks.*.down", RowwiseParallel()},
                          {"head", ColwiseParallel()}},
                         {.dim = "tp"});
    }
    shard_gpt(model, mesh, each.options);
    const int64_t batch_dims = each.tensor_parallel ? 1 : mesh.ndim();
    const auto losses =
        train(model, 10, [&](const at::Tensor& text) { return batch_on(text, mesh, batch_dims); });
    for (size_t i = 0; i < losses.size(); ++i)
      EXPECT_NEAR(losses[i], expected.losses[i], 1e-4) << each.what << i;
    gpt::GPT reference = expected.model;
    expect_same_parameters(model, reference, each.what);
  };
  run(size, body);
}

TEST(FullyShard, TrainsAsOneDevice) {
  const Expected expected(10);
  train_as({"(2) ", {2}}, expected);
  train_as({"(4) ", {4}}, expected);
  train_as({"HSDP (2, 2) ", {2, 2}}, expected);
  train_as({"with TP (2, 2) ", {2, 2}, true, {.dims = {"dp"}}}, expected);
  train_as({"least memory ", {2}, false, {.reshard_after_forward = true}}, expected);
  train_as({"most memory ", {2}, false, {.reshard_after_forward = false}}, expected);
  train_as({"gathered by pairs ", {4}, false, {.reshard_after_forward = true, .post_forward_ranks = 2}},
           expected);
  train_as({"gathered by pairs, all but the outermost ", {4}, false, {.post_forward_ranks = 2}}, expected);
  train_as({"last dim ", {3}, false, {.shard_dim = [](const auto&, const auto&) { return -1; }}}, expected);
}

/// The formulae of docs/parallel.md. One all-gather for each unit in forward; one in backward, but for the outermost and the
/// last one, which are still there; one reduce-scatter. The least bytes that there are, as widths divide.
TEST(FullyShard, CommunicatesOncePerUnit) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    gpt::Config config = kConfig;
    config.vocabulary = 20;
    config.context = 12;
    gpt::GPT model(config);
    int64_t block_bytes = 0, bytes = 0;
    for (const at::Tensor& each : model->parameters()) bytes += static_cast<int64_t>(each.nbytes());
    for (const at::Tensor& each : model->blocks[0]->parameters())
      block_bytes += static_cast<int64_t>(each.nbytes());
    shard_gpt(model, mesh);
    const at::Tensor x = batch_on(text_of(0), mesh, 1);
    const at::Tensor text = x.slice(1, 0, kConfig.context);
    for (int64_t pass = 0; pass < 2; ++pass) {
      CommDebugMode counts;
      const at::Tensor output = model->forward(text);
      const int64_t layers = config.layers;
      EXPECT_EQ(counts.calls("all_gather"), layers + 1) << counts;
      EXPECT_EQ(counts.get_comm_counts().at("all_gather").bytes, bytes) << counts;
      EXPECT_EQ(counts.get_total_counts(), layers + 1) << counts;
      const at::Tensor loss = output.sum();
      counts.reset();
      loss.backward();
      EXPECT_EQ(counts.calls("all_gather"), layers - 1) << counts;
      EXPECT_EQ(counts.get_comm_counts().at("all_gather").bytes, (layers - 1) * block_bytes) << counts;
      EXPECT_EQ(counts.calls("reduce_scatter"), layers + 1) << counts;
      EXPECT_EQ(counts.get_comm_counts().at("reduce_scatter").bytes, bytes) << counts;
      EXPECT_EQ(counts.get_total_counts(), 2 * layers) << counts;
    }
  });
}

/// Of how many ranks the all-gathers were, and what they moved to this one.
class GatherObserver final : public comm::Observer {
 public:
  void called(const comm::Event& event) override {
    if (event.name != std::string("all_gather")) return;
    ranks.push_back(event.group->getSize());
    bytes += event.bytes;
  }
  std::vector<int64_t> ranks;
  int64_t bytes = 0;
};

/// After forward, parameters stay sharded over neighbours, who gather them for backward.
TEST(FullyShard, NeighboursGatherForBackward) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    const FullyShardOptions options{.reshard_after_forward = true, .post_forward_ranks = 2, .overlap = false};
    for (size_t i = 0; i < net->size(); ++i) fully_shard(*net->ptr(i), mesh, options);
    fully_shard(*net, mesh, options);  // which has no parameters of its own
    const at::Tensor x = batch_on(small({4, 8}), mesh, 1);
    const int64_t unit = (8 * 8 + 8) * 4;
    for (int64_t pass = 0; pass < 2; ++pass) {
      GatherObserver forward;
      const at::Tensor output = net->forward(x);
      EXPECT_EQ(forward.ranks, (std::vector<int64_t>{4, 4, 4}));
      EXPECT_EQ(forward.bytes, 3 * unit);
      GatherObserver backward;
      output.sum().backward();
      // The last one was still there, and the gradient of x, for which the first one is needed, is not asked for.
      EXPECT_EQ(backward.ranks, std::vector<int64_t>{2});
      EXPECT_EQ(backward.bytes, unit);
    }
    // Without a backward to come, nothing is kept; what is kept is not used for other values.
    {
      const at::NoGradGuard no_grad;
      net->forward(x);
      GatherObserver again;
      net->forward(x);
      EXPECT_EQ(again.ranks, (std::vector<int64_t>{4, 4, 4}));
    }
    net->forward(x);
    torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)).step();
    for (const at::Tensor& each : net->parameters()) {
      const at::NoGradGuard no_grad;
      at::Tensor(each).fill_(0.5);
    }
    GatherObserver written;
    const at::Tensor output = net->forward(x);
    EXPECT_EQ(written.ranks, (std::vector<int64_t>{4, 4, 4}));
    at::Tensor expected = small({4, 8});
    for (int64_t i = 0; i < 3; ++i) expected = expected.sum(1, true).expand({4, 8}) * 0.5 + 0.5;
    expect_close(DTensor(output).full_tensor(), expected, "of written parameters");
  });
}

/// Of the calling rank, when each layer has used its weight.
struct SeenGathers {
  CommDebugMode counts;
  std::vector<int64_t> calls;
};
thread_local SeenGathers* seen_gathers = nullptr;

struct SeeingImpl : Module {
  SeeingImpl() { linear = register_module("linear", torch::nn::Linear(8, 8)); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = linear(x);
    if (seen_gathers) seen_gathers->calls.push_back(seen_gathers->counts.calls("all_gather"));
    return y;
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Seeing);

/// From the second pass on the next unit is on its way while one computes.
TEST(FullyShard, GathersAhead) {
  for (const bool overlap : {true, false}) {
    run(2, [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), {2});
      torch::nn::Sequential net{Seeing(), Seeing(), Seeing(), Seeing()};
      for (size_t i = 0; i < net->size(); ++i) fully_shard(*net->ptr(i), mesh, {.overlap = overlap});
      fully_shard(*net, mesh, {.overlap = overlap});
      for (int64_t pass = 0; pass < 3; ++pass) {
        SeenGathers seen;
        seen_gathers = &seen;
        const at::Tensor loss = net->forward(batch_on(small({4, 8}), mesh, 1)).sum();
        seen_gathers = nullptr;
        const std::vector<int64_t> ahead{2, 3, 4, 4}, in_time{1, 2, 3, 4};
        EXPECT_EQ(seen.calls, overlap && pass > 0 ? ahead : in_time) << pass;
        loss.backward();
      }
    });
  }
}

/// Of HSDP: replicas reduce their shards alone.
TEST(FullyShard, ReplicasReduceShards) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"});
    torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Linear(16, 8));
    fully_shard(*net, mesh);
    const at::Tensor loss = net->forward(batch_on(small({8, 8}), mesh, 2)).pow(2).sum();
    CommDebugMode counts;
    loss.backward();
    const int64_t bytes = (16 * 8 + 16 + 8 * 16 + 8) * 4;
    EXPECT_EQ(counts.calls("reduce_scatter"), 1) << counts;
    EXPECT_EQ(counts.get_comm_counts().at("reduce_scatter").bytes, bytes) << counts;
    EXPECT_EQ(counts.calls("all_reduce"), 1) << counts;
    EXPECT_EQ(counts.get_comm_counts().at("all_reduce").bytes, bytes / 2) << counts;
  });
}

// --- memory

/// Counts the bytes of tensors of each rank, a thread.
class CountingAllocator final : public c10::Allocator {
 public:
  struct Bytes {
    std::atomic<int64_t> now{0}, peak{0};
  };
  static thread_local Bytes* mine;

  at::DataPtr allocate(size_t size) override {
    at::DataPtr memory = inner_->allocate(size);
    if (!mine || size == 0) return memory;
    const int64_t now = mine->now += static_cast<int64_t>(size);
    mine->peak = std::max(mine->peak.load(), now);
    void* const data = memory.get();
    return {data, new Block{std::move(memory), mine, static_cast<int64_t>(size)}, &release, at::kCPU};
  }
  /// Where nothing is counted, memory is as the inner one gives it.
  at::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  struct Block {
    at::DataPtr memory;
    Bytes* owner;
    int64_t size;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner->now -= block->size;
  }
  c10::Allocator* const inner_ = c10::GetCPUAllocator();
};
thread_local CountingAllocator::Bytes* CountingAllocator::mine = nullptr;

/// Installs it for the tests of this file; never undone, as memory that it gave may live on.
void count_memory() {
  static auto* const allocator = [] {
    auto* const made = new CountingAllocator;
    c10::SetCPUAllocator(made, /*priority=*/1);
    return made;
  }();
  static_cast<void>(allocator);
}

/// The formulae of docs/parallel.md. Batches are so small that activations hardly count.
TEST(FullyShard, NeedsNoMoreMemoryThanSaid) {
  count_memory();
  static constexpr int64_t kWidth = 192, kLayers = 6, kActivations = 100'000;
  struct Way {
    int64_t ranks;
    std::optional<bool> reshard;  // after forward
    bool overlap;
  };
  const auto train = [](const Way& way, CountingAllocator::Bytes& mine) {
    const DeviceMesh mesh = init_device_mesh(test_device(), {way.ranks});
    torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth / 2));
    for (int64_t i = 0; i < kLayers; ++i)
      net->push_back(torch::nn::Linear(i == 0 ? kWidth / 2 : kWidth, kWidth));
    const int64_t unit = kWidth * (kWidth + 1) * 4, outer = kWidth / 2 * (kWidth + 1) * 4;
    CountingAllocator::mine = &mine;
    const FullyShardOptions options{.reshard_after_forward = way.reshard, .overlap = way.overlap};
    for (int64_t i = 1; i <= kLayers; ++i) fully_shard(*net->ptr(i), mesh, options);
    fully_shard(*net, mesh, options);
    int64_t all = 0;
    for (const at::Tensor& each : net->parameters()) all += each.numel() * 4;
    const int64_t ahead = way.overlap ? unit / way.ranks : 0;  // the shard that is sent
    int64_t forward = outer + 2 * unit + ahead, backward = 2 * outer + (way.overlap ? 4 : 2) * unit + ahead;
    if (way.reshard == true) forward -= outer, backward -= outer;
    if (way.reshard == false)
      forward = all + unit + ahead, backward = all + outer + (way.overlap ? 3 : 2) * unit + ahead;
    const std::string what =
        c10::str(way.ranks, " ranks, reshard: ", way.reshard ? (*way.reshard ? "yes" : "no") : "-",
                 ", overlap: ", way.overlap);
    const at::Tensor x = batch_on(small({way.ranks, kWidth}), mesh, 1);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    for (int64_t step = 0; step < 3; ++step) {
      const int64_t before = mine.now;
      mine.peak = before;
      const at::Tensor output = net->forward(x);
      EXPECT_LE(mine.peak - before, forward + kActivations) << what;
      EXPECT_GE(mine.peak - before, unit) << what;
      mine.peak = before;
      output.sum().backward();
      EXPECT_LE(mine.peak - before, all / way.ranks + backward + kActivations) << what;
      EXPECT_LE(mine.now - before, all / way.ranks + kActivations) << what;
      optimizer.step();
      optimizer.zero_grad();
    }
    net = nullptr;
    CountingAllocator::mine = nullptr;
  };
  for (const std::optional<bool> reshard :
       {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    for (const bool overlap : {false, true}) {
      for (const int64_t ranks : {2, 4}) {
        // Never freed: some memory may live on.
        static auto& kept = *new std::vector<std::unique_ptr<std::vector<CountingAllocator::Bytes>>>;
        kept.push_back(std::make_unique<std::vector<CountingAllocator::Bytes>>(ranks));
        auto& bytes = *kept.back();
        run(ranks, [&] { train({ranks, reshard, overlap}, bytes[get_rank()]); });
      }
    }
  }
}

// --- what a unit may be

struct NetImpl : Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    second = register_module("second", torch::nn::Linear(7, 5));
    tied = register_module("tied", torch::nn::Linear(5, 7));
    tied->weight = first->weight;
    frozen = register_module("frozen", torch::nn::Linear(7, 3));
    frozen->weight.set_requires_grad(false);
    unused = register_module("unused", torch::nn::Linear(3, 3));
    scale = register_parameter("scale", torch::ones({}));
    wide = register_parameter("wide", torch::ones({3}, at::kDouble));
    testing::fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = second(torch::relu(norm(first(x))));
    return frozen(torch::tanh(tied(hidden)) * scale).to(at::kDouble) * wide;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, tied{nullptr}, frozen{nullptr}, unused{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor scale, wide;
};
TORCH_MODULE(Net);

[[maybe_unused]] const bool registered_net =
    (register_members<NetImpl>(&NetImpl::scale, &NetImpl::wide), true);

at::Tensor loss_of(Net& net, const at::Tensor& x) { return net->forward(x).pow(2).mean(); }

/// Uneven shards, some of them empty, two dtypes, a scalar, tied, frozen and unused parameters, and a buffer, in one unit or two.
TEST(FullyShard, TakesAnyParameters) {
  for (const int64_t batch : {8, 7}) {
    Net reference;
    loss_of(reference, small({batch, 5}, 9)).backward();
    for (const bool nested : {false, true}) {
      run(4, [&] {
        const DeviceMesh mesh = init_device_mesh(test_device(), {4});
        Net net;
        if (nested) fully_shard(*net->second, mesh);
        fully_shard(*net, mesh, {.reshard_after_forward = true});
        EXPECT_TRUE(net->first->weight.is_same(net->tied->weight));
        loss_of(net, batch_on(small({batch, 5}, 9), mesh, 1)).backward();
        expect_same_gradients(net, reference, nested ? " nested" : "");
        expect_close(testing::unsharded(net->norm->running_mean), reference->norm->running_mean, "buffer");
      });
    }
  }
}

/// What was distributed otherwise before stays so, with gradients of its own.
TEST(FullyShard, LeavesIgnoredParametersAlone) {
  Net reference;
  loss_of(reference, small({8, 5}, 9)).backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    Net net;
    distribute_parameter(*net->second, "weight", mesh, {Replicate()});
    fully_shard(*net, mesh, {.ignored_params = {net->second->weight}});
    EXPECT_EQ(DTensor(net->second->weight).placements(), Placements{Replicate()});
    EXPECT_EQ(DTensor(net->second->bias).placements(), Placements{Shard(0)});
    loss_of(net, batch_on(small({8, 5}, 9), mesh, 1)).backward();
    const auto expected = reference->named_parameters();
    for (const auto& each : net->named_parameters()) {
      if (!each->grad().defined()) continue;
      expect_close(testing::unsharded(each->grad()), expected[each.key()].grad(), each.key());
    }
    EXPECT_TRUE(net->second->weight.grad().defined());
  });
}

/// Parameters of random shapes and dtypes, which `forward` uses by their names.
struct AnyImpl : Module {
  explicit AnyImpl(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto count = static_cast<int64_t>(1 + random() % 5);
    for (int64_t i = 0; i < count; ++i) {
      std::vector<int64_t> shape(random() % 4);
      for (int64_t& size : shape) size = static_cast<int64_t>(random() % 7);
      const at::ScalarType dtype = std::array{at::kFloat, at::kDouble, at::kComplexFloat}[random() % 3];
      register_parameter(c10::str("p", i), small(shape, i).to(dtype),
                         /*requires_grad=*/i == 0 || random() % 5 != 0);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor result = x.sum(1);
    for (const auto& each : named_parameters()) {
      const at::Tensor p = each->is_complex() ? at::real(each.value()) : each.value();
      // Of partial values and of replicas.
      result = result + x.select(1, 0) * (p * p).sum().to(at::kFloat) + p.sum().to(at::kFloat);
      if (p.dim() == 2 && p.scalar_type() == at::kFloat && p.size(0) > 0)
        result = result + x.slice(1, 0, p.size(0)).matmul(p).sum(1);
    }
    return result;
  }
};
TORCH_MODULE(Any);

TEST(FullyShard, TakesAnyShapes) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const std::vector<int64_t> shape = seed % 3 == 0 ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{3};
    Any reference(seed);
    reference->forward(small({5, 7}, 9)).pow(2).sum().backward();
    run(seed % 3 == 0 ? 4 : 3, [&] {
      const DeviceMesh mesh = init_device_mesh(test_device(), shape);
      Any net(seed);
      std::mt19937_64 random(seed + 100);
      fully_shard(*net, mesh, {.shard_dim = [&](const std::string&, const at::Tensor& parameter) {
        const int64_t dims = std::max<int64_t>(parameter.dim(), 1);
        return static_cast<int64_t>(random() % (2 * dims)) - dims;
      }});
      net->forward(batch_on(small({5, 7}, 9), mesh, mesh.ndim())).pow(2).sum().backward();
      expect_same_gradients(net, reference, c10::str(" of seed ", seed));
    });
  }
}

/// All that libtorch has, on shards.
TEST(FullyShard, TrainsWithEveryOptimizer) {
  using namespace torch::optim;
  using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<at::Tensor>&)>;
  const std::vector<std::pair<std::string, Make>> optimizers{
      {"SGD",
       [](const auto& parameters) {
         return std::make_unique<SGD>(parameters, SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam",
       [](const auto& parameters) {
         return std::make_unique<Adam>(parameters, AdamOptions(0.01).weight_decay(0.01).amsgrad(true));
       }},
      {"AdamW",
       [](const auto& parameters) { return std::make_unique<AdamW>(parameters, AdamWOptions(0.01)); }},
      {"Adagrad",
       [](const auto& parameters) { return std::make_unique<Adagrad>(parameters, AdagradOptions(0.05)); }},
      {"RMSprop",
       [](const auto& parameters) {
         return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.005).momentum(0.5).centered(true));
       }},
      {"LBFGS",
       [](const auto& parameters) {
         return std::make_unique<LBFGS>(parameters,
                                        LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
       }},
  };
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
    testing::fill(*net);
    return net;
  };
  const auto losses_of = [](torch::nn::Sequential& net, const Make& make_optimizer, const at::Tensor& x) {
    const auto optimizer = make_optimizer(net->parameters());
    std::vector<double> losses;
    for (int64_t step = 0; step < 6; ++step) {
      const at::Tensor loss = optimizer->step([&] {
        optimizer->zero_grad();
        at::Tensor value = net->forward(x).pow(2).mean();
        value.backward();
        return value;
      });
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  for (const auto& [name, make_optimizer] : optimizers) {
    auto reference = make();
    const auto expected = losses_of(reference, make_optimizer, small({6, 5}, 9));
    run(4, [&, &name = name, &make_optimizer = make_optimizer] {
      const DeviceMesh mesh = init_device_mesh(test_device(), {4});
      auto net = make();
      fully_shard(*net->ptr(0), mesh);
      fully_shard(*net, mesh);
      const auto losses = losses_of(net, make_optimizer, batch_on(small({6, 5}, 9), mesh, 1));
      for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4) << name << i;
    });
  }
}

TEST(FullyShard, WorksWithoutGradients) {
  Net reference;
  reference->eval();
  const at::Tensor expected = reference->forward(small({8, 5}, 9));
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    Net net;
    fully_shard(*net, mesh);
    net->eval();
    const at::Tensor x = batch_on(small({8, 5}, 9), mesh, 1);
    {
      const torch::NoGradGuard no_grad;
      expect_close(testing::unsharded(net->forward(x)), expected, "no_grad");
      net->second->weight.mul_(2);
      net->second->weight.div_(2);  // gathered again, as it was written
      expect_close(testing::unsharded(net->forward(x)), expected, "written");
    }
    const c10::InferenceMode inference;
    const at::Tensor y = distribute_tensor(small({8, 5}, 9), mesh, {Shard(0)}, std::nullopt);
    expect_close(testing::unsharded(net->forward(y)), expected, "inference");
  });
}

/// Reduced in each pass, or kept and reduced once.
TEST(FullyShard, AccumulatesGradients) {
  gpt::GPT reference = make_gpt();
  for (int64_t step = 0; step < 3; ++step) loss_of(reference, text_of(step)).backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    gpt::GPT model = make_gpt();
    shard_gpt(model, mesh);
    CommDebugMode counts;
    const auto pass = [&](int64_t step) { loss_of(model, batch_on(text_of(step), mesh, 1)).backward(); };
    for (int64_t step = 0; step < 3; ++step) pass(step);
    EXPECT_EQ(counts.calls("reduce_scatter"), 3 * (kConfig.layers + 1)) << counts;
    expect_same_gradients(model, reference, " reduced each time");
    model->zero_grad();
    set_requires_gradient_sync(*model, false);
    counts.reset();
    for (int64_t step = 0; step < 2; ++step) pass(step);
    EXPECT_EQ(counts.calls("reduce_scatter"), 0) << counts;
    const int64_t gathered = counts.get_comm_counts().at("all_gather").bytes;
    EXPECT_LT(counts.total_bytes() - gathered, 100) << counts;  // numbers of the loss
    EXPECT_FALSE(model->head->weight.grad().defined());
    set_requires_gradient_sync(*model, true);
    pass(2);
    expect_same_gradients(model, reference, " reduced once");
  });
}

/// A unit that the pass that reduces does not use has gradients from those before it.
TEST(FullyShard, ReducesWhatWasKeptOfUnitsThatAreNotUsedAgain) {
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(5, 5), torch::nn::Linear(5, 5), torch::nn::Linear(5, 5));
    testing::fill(*net);
    return net;
  };
  const auto pass = [](torch::nn::Sequential& net, const at::Tensor& x, size_t unit) {
    net->ptr<torch::nn::LinearImpl>(2)
        ->forward(net->ptr<torch::nn::LinearImpl>(unit)->forward(x))
        .pow(2)
        .sum()
        .backward();
  };
  auto reference = make();
  pass(reference, small({4, 5}, 1), 0);
  pass(reference, small({4, 5}, 2), 1);
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    auto net = make();
    for (size_t i = 0; i < 2; ++i) fully_shard(*net->ptr(i), mesh);
    fully_shard(*net, mesh);
    for (int64_t step = 0; step < 2; ++step) {
      net->zero_grad();
      set_requires_gradient_sync(*net, false);
      pass(net, batch_on(small({4, 5}, 1), mesh, 1), 0);
      set_requires_gradient_sync(*net, true);
      CommDebugMode counts;
      pass(net, batch_on(small({4, 5}, 2), mesh, 1), 1);
      EXPECT_EQ(counts.calls("reduce_scatter"), 3) << counts;
      expect_same_gradients(net, reference, c10::str(" in step ", step));
    }
  });
}

struct Warnings final : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

TEST(FullyShard, SaysThatKeptGradientsAreDropped) {
  run(2, [] {
    torch::nn::Linear net(4, 4);
    fully_shard(*net, init_device_mesh(test_device(), {2}));
    const at::Tensor x = batch_on(small({4, 4}), DTensor(net->weight).device_mesh(), 1);
    set_requires_gradient_sync(*net, false);
    net->forward(x).sum().backward();
    net->weight.set_data(DTensor(net->weight.detach()).redistribute({Shard(1)}));
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    net->forward(x);
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_NE(warnings.texts[0].find("kept, not reduced"), std::string::npos) << warnings.texts[0];
  });
}

/// Two losses before the first backward; a graph that is kept; a second derivative.
TEST(FullyShard, TakesAnyGraph) {
  const auto grads = [](Net& net, const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor a = loss_of(net, x), b = loss_of(net, y);
    b.backward({}, /*retain_graph=*/true);
    a.backward();
    b.backward();
    const at::Tensor loss = net->second(x.matmul(net->first->weight.t())).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {net->second->weight}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true);
    first[0].pow(2).sum().backward();
  };
  Net reference;
  reference->eval();
  grads(reference, small({8, 5}, 1), small({8, 5}, 2));
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    Net net;
    net->eval();
    fully_shard(*net->second, mesh);
    fully_shard(*net, mesh, {.reshard_after_forward = true});
    grads(net, batch_on(small({8, 5}, 1), mesh, 1), batch_on(small({8, 5}, 2), mesh, 1));
    expect_same_gradients(net, reference, "");
  });
}

TEST(FullyShard, ComputesInOtherDtypes) {
  gpt::GPT reference = make_gpt();
  loss_of(reference, text_of(0)).backward();
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    gpt::GPT model = make_gpt();
    shard_gpt(model, mesh, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const at::Tensor logits = model->forward(batch_on(text_of(0), mesh, 1).slice(1, 0, kConfig.context));
    EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
    loss_of(model, batch_on(text_of(0), mesh, 1)).backward();
    const auto expected = reference->named_parameters();
    for (const auto& each : model->named_parameters()) {
      EXPECT_EQ(each.value().scalar_type(), at::kFloat);
      EXPECT_EQ(each.value().grad().scalar_type(), at::kFloat);
      const at::Tensor difference =
          testing::unsharded(each.value().grad()).cpu() - expected[each.key()].grad();
      EXPECT_LT(difference.norm().item<double>(),
                0.05 * expected[each.key()].grad().norm().item<double>() + 1e-2)
          << each.key();
    }
  });
}

/// Inputs of all kinds of layers are cast, however they are called; complex parameters and integers are left alone.
TEST(FullyShard, CastsInputs) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    torch::nn::Linear linear(6, 4);
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
    torch::nn::Sequential net(norm, linear);
    net->register_parameter("phase", at::ones({3}, at::kComplexFloat));
    testing::fill(*net);
    const at::Tensor flat = batch_on(small({4, 6}), mesh, 1), deep = batch_on(small({4, 5, 6}), mesh, 1);
    const at::Tensor expected = torch::linear(small({4, 5, 6}), linear->weight, linear->bias).detach();
    fully_shard(*net, mesh, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    for (const at::Tensor& x : {flat, deep}) EXPECT_EQ(net->forward(x).scalar_type(), at::kBFloat16);
    EXPECT_EQ(norm(deep).scalar_type(), at::kBFloat16);
    EXPECT_EQ(torch::linear(deep, linear->weight, linear->bias).scalar_type(), at::kBFloat16);
    const at::Tensor y = linear(deep);
    EXPECT_TRUE(at::allclose(testing::unsharded(y).to(at::kFloat), expected, 0.02, 0.02));
    (y.sum() + (net->named_parameters()["phase"] * net->named_parameters()["phase"]).sum().abs()).backward();
    EXPECT_EQ(net->named_parameters()["phase"].grad().scalar_type(), at::kComplexFloat);
    // An optimizer computes with the parameters themselves, also while they are gathered.
    const at::NoGradGuard no_grad;
    linear(deep);
    EXPECT_EQ((linear->weight * 2).scalar_type(), at::kFloat);
  });
}

/// `call` says where forward of a unit ends.
TEST(FullyShard, FreesAfterCalls) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    fully_shard(*net, mesh, {.reshard_after_forward = true, .mp_policy = {.output_dtype = at::kDouble}});
    const at::Tensor x = batch_on(small({4, 4}), mesh, 1);
    CommDebugMode counts;
    const at::Tensor y = call(net, x);
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    EXPECT_EQ(counts.calls("all_gather"), 1);
    y.sum().backward();
    EXPECT_EQ(counts.calls("all_gather"), 2) << counts;
    unshard(*net);
    EXPECT_EQ(counts.calls("all_gather"), 3);
    net->forward(x);
    EXPECT_EQ(counts.calls("all_gather"), 3);
    reshard(*net);
    net->forward(x);
    EXPECT_EQ(counts.calls("all_gather"), 4);
  });
}

// --- initialisation, checkpoints

/// Two layers, which may be made on meta.
struct LayersImpl : Module {
  explicit LayersImpl(at::Device device) {
    for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"first", {7, 5}}, {"bias", {7}}, {"second", {3, 7}}})
      register_parameter(name, at::empty(shape, device));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parameters = named_parameters();
    return torch::linear(torch::linear(x, parameters["first"], parameters["bias"]), parameters["second"]);
  }
};
TORCH_MODULE(Layers);

/// Each rank allocates and fills its shard alone.
TEST(FullyShard, IsInitialisedFromMeta) {
  const auto initialise = [](Module& module) {
    random::manual_seed(5);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& each : module.parameters()) each.normal_(0, 0.5);
  };
  std::vector<at::Tensor> expected;
  run(1, [&] {
    Layers net(at::kCPU);
    fully_shard(*net, init_device_mesh(test_device(), {1}));
    initialise(*net);
    for (const at::Tensor& each : net->parameters())
      expected.push_back(testing::unsharded(each).clone().cpu());
  });
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    Layers net(at::kMeta);
    expect_error<c10::ValueError>([&] { to_empty(*net, test_device()); }, {"first", "plain"});
    fully_shard(*net, mesh);
    const at::Tensor x = batch_on(small({4, 5}), mesh, 1);
    expect_error<c10::Error>([&] { net->forward(x); }, {"first", "meta"});
    to_empty(*net, test_device());
    initialise(*net);
    const auto values = net->parameters();
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_LE(DTensor(values[i]).to_local().size(0), (values[i].size(0) + 3) / 4);
      expect_close(testing::unsharded(values[i]), expected[i], c10::str("parameter ", i));
    }
    net->forward(x).sum().backward();
  });
}

/// Saved by four ranks, loaded by two that have tensor parallel too, and by three.
TEST(FullyShard, GoesOnFromACheckpoint) {
  const checkpoint::Scratch scratch;
  const Expected expected(6);
  const auto train_from = [&](const DeviceMesh& mesh, gpt::GPT& model, int64_t first, int64_t end) {
    torch::optim::AdamW optimizer = optimizer_of(model);
    if (first > 0) {
      auto state = checkpoint::StateDict::of(*model, optimizer);
      checkpoint::load(state, scratch / "state");
    }
    for (int64_t step = first; step < end; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(model, batch_on(text_of(step), mesh, 1));
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      EXPECT_NEAR(loss.item<double>(), expected.losses[step], 1e-4) << step;
    }
    if (first == 0) checkpoint::save(checkpoint::StateDict::of(*model, optimizer), scratch / "state");
  };
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    gpt::GPT model = make_gpt();
    shard_gpt(model, mesh);
    train_from(mesh, model, 0, 3);
  });
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    gpt::GPT model = make_gpt();
    parallelize_module(*model, mesh,
                       {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}},
                       {.dim = "tp"});
    shard_gpt(model, mesh, {.dims = {"dp"}});
    train_from(mesh, model, 3, 6);
  });
  run(3, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {3});
    gpt::GPT model = make_gpt();
    shard_gpt(model, mesh);
    train_from(mesh, model, 3, 6);
  });
}

/// Has a parameter that others may have too.
struct Sharing : Module {
  explicit Sharing(const at::Tensor& weight) { register_parameter("weight", weight); }
};

TEST(FullyShard, SaysWhatIsWrong) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    Net net;
    expect_error<c10::ValueError>([&] { unshard(*net); }, {"NetImpl", "fully_shard first"});
    expect_error<c10::ValueError>([&] { set_requires_gradient_sync(*net, false); },
                                  {"NetImpl", "fully_shard first"});
    Sharing one(at::ones({4}));
    const Sharing other(one.parameters()[0]);
    expect_error<c10::Error>([&] { fully_shard(one, mesh); },
                             {"'weight'", "a module outside of this one", "a module that has both"});
    // Nothing has changed then, and it can be tried again.
    const auto bad_for_one = [](const std::string& name, const at::Tensor&) {
      return name == "wide" ? 1 : 0;
    };
    expect_error<c10::IndexError>([&] { fully_shard(*net, mesh, {.shard_dim = bad_for_one}); },
                                  {"no dim 1 to shard"});
    for (const at::Tensor& each : net->parameters()) EXPECT_FALSE(DTensor::is_dtensor(each));
    const DeviceMesh deep = init_device_mesh(test_device(), {1, 1, 2});
    expect_error<c10::ValueError>([&] { fully_shard(*net, deep); }, {"3 dims"});
    expect_error<c10::ValueError>([&] { fully_shard(*net, mesh, {.post_forward_ranks = 3}); },
                                  {"post_forward_ranks is 3", "the 2 ranks"});
    fully_shard(*net, mesh);
    expect_error<c10::Error>([&] { fully_shard(*net, mesh); }, {"NetImpl", "a unit already"});
    const at::Tensor x = batch_on(small({8, 5}, 9), mesh, 1);
    const at::Tensor loss = loss_of(net, x);
    {
      const torch::NoGradGuard no_grad;
      net->second->weight.mul_(2);
    }
    reshard(*net);
    expect_error<c10::Error>([&] { loss.backward(); }, {"changed after a forward"});
    expect_error<c10::ValueError>([&] { net->forward(small({8, 5}, 9)); }, {"plain"});
  });
}

// --- processes

RANK_BODY(fully_shard_on_processes) {
  init_process_group();
  const Expected expected(4);
  const DeviceMesh mesh = init_device_mesh(test_device(), {get_world_size()});
  for (const bool overlap : {true, false}) {
    gpt::GPT model = make_gpt();
    shard_gpt(model, mesh, {.overlap = overlap});
    const auto losses = train(model, 4, [&](const at::Tensor& text) { return batch_on(text, mesh, 1); });
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected.losses[i], 1e-4) << i;
  }
  destroy_process_group();
}

TEST(FullyShard, OnProcesses) { testing::expect_ok_over_processes("fully_shard_on_processes", 2); }

}  // namespace
}  // namespace tessera
