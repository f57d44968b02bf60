// A step of training the GPT of examples/train_gpt, tensor parallel, data parallel and fully sharded: Tessera, the same
// model written by hand with collectives on the same backend, one device, and PyTorch's DTensor or FSDP2 if their
// speed is given.

#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/nn.h>
#include <torch/optim.h>

#include "bench/zero3.h"
#include "examples/train_gpt/gpt.h"
#include "examples/train_gpt/parallel.h"

namespace {

using namespace tessera;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- the model by hand: each rank has its part of the weights, and says what is communicated where

void all_reduce(at::Tensor& tensor, c10d::ProcessGroup& group, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  if (group.getSize() == 1) return;
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group.allreduce(tensors, options)->wait();
}

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(Group given) : group(std::move(given)) {}
  Group group;
};
using GroupRef = c10::intrusive_ptr<GroupHolder>;

Group& saved_group(AutogradContext* context) {
  return static_cast<GroupHolder*>(context->saved_data["group"].toCapsule().get())->group;
}

/// Where the work of a layer begins: its gradients are sums over the ranks.
struct Enter : torch::autograd::Function<Enter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const GroupRef& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    at::Tensor gradient = gradients[0].contiguous();
    all_reduce(gradient, *saved_group(context));
    return {gradient, at::Tensor()};
  }
};

/// Where it ends: what the ranks have are summands.
struct Leave : torch::autograd::Function<Leave> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const GroupRef& group) {
    at::Tensor sum = x.detach().contiguous();  // in place, as nobody else needs the summands
    all_reduce(sum, *group->group);
    return sum;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// The mean of cross entropies over classes of which each rank has a part.
struct CutCrossEntropy : torch::autograd::Function<CutCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& target,
                            int64_t first, const GroupRef& group) {
    at::Tensor highest = logits.amax(1, true);
    all_reduce(highest, *group->group, c10d::ReduceOp::MAX);
    const at::Tensor shifted = logits - highest;
    at::Tensor softmax = shifted.exp();
    at::Tensor sum = softmax.sum(1, true);
    const at::Tensor own = target - first;
    const at::Tensor elsewhere = own.lt(0).logical_or(own.ge(logits.size(1)));
    const at::Tensor index = own.masked_fill(elsewhere, 0).unsqueeze(1);
    at::Tensor chosen = shifted.gather(1, index).masked_fill(elsewhere.unsqueeze(1), 0);
    at::Tensor both = at::cat({sum, chosen}, 1);
    all_reduce(both, *group->group);
    softmax.div_(both.narrow(1, 0, 1));
    context->save_for_backward({softmax, index, elsewhere});
    return (both.narrow(1, 0, 1).log() - both.narrow(1, 1, 1)).mean();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    at::Tensor gradient = saved[0].clone();
    gradient.scatter_add_(1, saved[1],
                          at::where(saved[2], 0.0F, -1.0F).to(gradient.scalar_type()).unsqueeze(1));
    return {gradient.mul_(gradients[0] / gradient.size(0)), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct HandBlockImpl : torch::nn::Module {
  HandBlockImpl(const gpt::Config& config, GroupRef tp) : tp(std::move(tp)) {
    const int64_t width = config.width, ranks = this->tp->group->getSize();
    heads = config.heads / ranks;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width / ranks));
    projection = register_module(
        "projection", torch::nn::Linear(torch::nn::LinearOptions(width / ranks, width).bias(false)));
    up = register_module("up", torch::nn::Linear(width, 4 * width / ranks));
    down = register_module("down",
                           torch::nn::Linear(torch::nn::LinearOptions(4 * width / ranks, width).bias(false)));
    projection_bias = register_parameter("projection_bias", torch::zeros({width}));
    down_bias = register_parameter("down_bias", torch::zeros({width}));
  }

  at::Tensor forward(at::Tensor x) {
    const at::Tensor entered = Enter::apply(norm1(x), tp);
    const auto parts = qkv(entered).view({x.size(0), x.size(1), heads, 3, -1}).unbind(3);
    const at::Tensor seen = at::scaled_dot_product_attention(
        parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {}, 0.0, true);
    x = x + (Leave::apply(projection(seen.transpose(1, 2).flatten(2)), tp) + projection_bias);
    return x + (Leave::apply(down(torch::gelu(up(Enter::apply(norm2(x), tp)))), tp) + down_bias);
  }

  GroupRef tp;
  int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
  at::Tensor projection_bias, down_bias;
};
TORCH_MODULE(HandBlock);

struct HandGptImpl : torch::nn::Module {
  HandGptImpl(const gpt::Config& config, const Group& group) : tp(c10::make_intrusive<GroupHolder>(group)) {
    const int64_t ranks = group->getSize();
    held = (config.vocabulary + ranks - 1) / ranks;
    first = group->getRank() * held;
    tokens = register_module("tokens", torch::nn::Embedding(held, config.width));
    positions = register_parameter("positions", torch::randn({config.context, config.width}));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(HandBlock(config, tp));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    head =
        register_module("head", torch::nn::Linear(torch::nn::LinearOptions(config.width, held).bias(false)));
  }

  at::Tensor loss(const at::Tensor& text, const at::Tensor& target) {
    const at::Tensor own = text - first;
    const at::Tensor elsewhere = own.lt(0).logical_or(own.ge(held));
    const at::Tensor rows = tokens(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(2), 0);
    at::Tensor x = Leave::apply(rows, tp) + positions.slice(0, 0, text.size(1));
    for (const auto& block : *blocks) x = block->as<HandBlock>()->forward(x);
    const at::Tensor logits = head(Enter::apply(norm(x), tp));
    return CutCrossEntropy::apply(logits.flatten(0, 1), target.flatten(), first, tp);
  }

  GroupRef tp;
  int64_t held, first;
  torch::nn::Embedding tokens{nullptr};
  at::Tensor positions;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(HandGpt);

/// The mean over the ranks, all in one.
void reduce_gradients(const std::vector<at::Tensor>& parameters, c10d::ProcessGroup& group) {
  if (group.getSize() == 1) return;
  std::vector<at::Tensor> rows;
  for (const at::Tensor& parameter : parameters) rows.push_back(parameter.grad().view({-1}));
  at::Tensor flat = at::cat(rows);
  all_reduce(flat, group);
  flat.div_(group.getSize());
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    parameter.grad().copy_(flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

// --- measuring

struct Setup {
  std::string name;
  gpt::Config model;
  int64_t batch;
  int64_t steps;  // in one measurement
};

using Step = std::function<void()>;

template <class Model>
std::shared_ptr<torch::optim::Optimizer> optimizer_of(Model& model) {
  return std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
}

at::Tensor text_of(const Setup& setup) {
  return at::randint(setup.model.vocabulary, {setup.batch, setup.model.context + 1}, at::kLong);
}

/// Of a model whose forward gives logits.
Step step_of(gpt::GPT model, const at::Tensor& text) {
  auto optimizer = optimizer_of(model);
  return [=]() mutable {
    const int64_t context = text.size(1) - 1;
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        model->forward(text.slice(1, 0, context)).flatten(0, 1), text.slice(1, 1).flatten());
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
  };
}

Step tessera_step(const Setup& setup, const DeviceMesh& mesh) {
  gpt::GPT model(setup.model);
  gpt::parallelize(model, mesh, {});
  return step_of(model, distribute_tensor(text_of(setup), mesh, {Shard(0), Replicate()}));
}

Step hand_step(const Setup& setup, const DeviceMesh& mesh) {
  HandGpt model(setup.model, mesh.get_group("tp"));
  const Group dp = mesh.get_group("dp");
  const at::Tensor text = text_of(setup).chunk(mesh.size(0))[mesh.get_local_rank("dp")].contiguous();
  auto optimizer = optimizer_of(model);
  return [=]() mutable {
    const int64_t context = text.size(1) - 1;
    const at::Tensor loss = model->loss(text.slice(1, 0, context), text.slice(1, 1));
    optimizer->zero_grad();
    loss.backward();
    reduce_gradients(model->parameters(), *dp);
    optimizer->step();
  };
}

Step sharded_step(const Setup& setup, const DeviceMesh& mesh) {
  gpt::GPT model(setup.model);
  gpt::parallelize(model, mesh, {.tensor = false, .shard = true});
  return step_of(model, distribute_tensor(text_of(setup), mesh, {Shard(0), Replicate()}));
}

Step sharded_by_hand_step(const Setup& setup, const DeviceMesh& mesh) {
  const auto model = std::make_shared<zero3::Model>(setup.model, mesh.get_group("dp"));
  const at::Tensor text = text_of(setup).chunk(mesh.size(0))[mesh.get_local_rank("dp")].contiguous();
  const auto optimizer =
      std::make_shared<torch::optim::AdamW>(model->shards(), torch::optim::AdamWOptions(1e-3));
  return [=] {
    const int64_t context = text.size(1) - 1;
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        model->forward(text.slice(1, 0, context)).flatten(0, 1), text.slice(1, 1).flatten());
    optimizer->zero_grad();
    loss.backward();
    model->finish();
    optimizer->step();
  };
}

/// What is parallel, and how it is trained, by Tessera and by hand.
struct Case {
  std::string name;
  int64_t dp, tp;
  Step (*ours)(const Setup&, const DeviceMesh&);
  Step (*by_hand)(const Setup&, const DeviceMesh&);
};

struct Seconds {
  double wall, cpu;  // of the calling thread, which waits for others besides
};

double cpu_now() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Seconds seconds(const Step& step, int64_t count) {
  const auto start = std::chrono::steady_clock::now();
  const double cpu = cpu_now();
  for (int64_t i = 0; i < count; ++i) step();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), cpu_now() - cpu};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Speeds {
  std::vector<double> tessera, by_hand;  // tokens a second, in turns
  std::vector<double> cpu;               // how much less CPU time it takes by hand
};

Speeds on_ranks(const Setup& setup, const Case& parallel, const std::string& backend, int rounds) {
  Speeds speeds;
  const auto tokens = static_cast<double>(setup.steps * setup.batch * setup.model.context);
  run(parallel.dp * parallel.tp,
      [&] {
        const DeviceMesh mesh = init_device_mesh(at::kCPU, {parallel.dp, parallel.tp}, {"dp", "tp"});
        const Step ours = parallel.ours(setup, mesh), by_hand = parallel.by_hand(setup, mesh);
        seconds(ours, 2);
        seconds(by_hand, 2);
        for (int round = 0; round < rounds; ++round) {
          const Seconds mine = seconds(ours, setup.steps), hand = seconds(by_hand, setup.steps);
          if (mesh.get_rank() != 0) continue;
          speeds.tessera.push_back(tokens / mine.wall);
          speeds.by_hand.push_back(tokens / hand.wall);
          speeds.cpu.push_back(hand.cpu / mine.cpu);
        }
      },
      {.backend = backend, .threads_per_rank = 1});
  return speeds;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "A step of training a GPT: tokens a second of Tessera, of the same model by hand, and of one device");
  std::string torch_file;
  int rounds = 5;
  app.add_option(
         "--torch", torch_file,
         "PyTorch's DTensor and FSDP2 on gloo: lines of \"small dp=1,tp=2\", a tab, and tokens a second")
      ->check(CLI::ExistingFile);
  app.add_option("--rounds", rounds, "Measurements, in turns; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  std::string only;
  app.add_option("--only", only, "Rows whose name and backend begin so, as \"small fsdp=2 threads\"");
  CLI11_PARSE(app, argc, argv);
  std::map<std::string, double> torch;
  std::ifstream lines(torch_file);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) torch[line.substr(0, tab)] = std::stod(line.substr(tab + 1));
  }

  std::printf("Training a GPT: tokens a second, and ratios of the same run; ranks have one core each\n");
  std::printf("%-20s%-10s%10s%10s%10s%10s%12s%14s%10s\n", "", "backend", "tessera", "by hand", "ratio",
              "CPU time", "one device", "torch, gloo", "ratio");
  const std::vector<Setup> setups{
      {"small", {.vocabulary = 96, .context = 64, .width = 128, .heads = 4, .layers = 2}, 8, 20},
      {"medium", {.vocabulary = 512, .context = 128, .width = 512, .heads = 8, .layers = 4}, 4, 2}};
  for (const Setup& setup : setups) {
    double alone = 0;
    run(1,
        [&] {
          const Step step = step_of(gpt::GPT(setup.model), text_of(setup));
          seconds(step, 2);
          std::vector<double> speeds;
          for (int round = 0; round < rounds; ++round)
            speeds.push_back(static_cast<double>(setup.steps * setup.batch * setup.model.context) /
                             seconds(step, setup.steps).wall);
          alone = median(speeds);
        },
        {.threads_per_rank = 1});
    for (const Case& parallel :
         {Case{"dp=1,tp=2", 1, 2, tessera_step, hand_step}, Case{"dp=2,tp=1", 2, 1, tessera_step, hand_step},
          Case{"fsdp=2", 2, 1, sharded_step, sharded_by_hand_step}}) {
      const std::string name = setup.name + " " + parallel.name;
      for (const std::string backend : {"threads", "gloo"}) {
        if (!(name + " " + backend).starts_with(only)) continue;
        const Speeds speeds = on_ranks(setup, parallel, backend, rounds);
        std::vector<double> ratios;
        for (size_t i = 0; i < speeds.tessera.size(); ++i)
          ratios.push_back(speeds.tessera[i] / speeds.by_hand[i]);
        const double mine = median(speeds.tessera);
        std::printf("%-20s%-10s%10.0f%10.0f%10.2f%10.2f%12.0f", name.c_str(), backend.c_str(), mine,
                    median(speeds.by_hand), median(ratios), median(speeds.cpu), alone);
        if (const auto found = torch.find(name); found != torch.end())
          std::printf("%14.0f%9.1fx", found->second, mine / found->second);
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
