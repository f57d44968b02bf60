// Trains a small GPT on the project's own documents, data parallel or fully sharded, and tensor parallel, and
// shows that it learns what it learns on one device. `make demo` runs it with four ranks, threads of one process;
//   torchrun --no-python --nproc-per-node 4 build/examples/train_gpt/train_gpt
// or mpirun -n 4 ... runs the same program with four processes.

#include <tessera/error.h>
#include <tessera/tessera.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <torch/nn.h>
#include <torch/optim.h>

#include "gpt.h"
#include "parallel.h"
#include "text.h"

namespace {

using namespace tessera;

struct Options {
  gpt::Config model;
  int64_t dp = 2, tp = 2;
  int64_t steps = 300;
  int64_t batch = 8;
  double learning_rate = 1e-3;
  uint64_t seed = 1;
  gpt::Parallel parallel;
  double tolerance = 1e-3;
  std::string save = {};    // the directory of checkpoints to write
  std::string resume = {};  // the directory of checkpoints to go on from
  std::string trace = {};   // the file of what the ranks spent their time with
  int64_t save_every = 50;
  int64_t stop_after = 0;  // 0: not before all steps are done
};

/// "dp=2,tp=2"
void read_mesh(const std::string& text, Options& options) {
  std::map<std::string, int64_t> sizes{{"dp", 1}, {"tp", 1}};
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const std::string size = equals == std::string::npos ? "" : part.substr(equals + 1);
    const bool is_number =
        !size.empty() && size.size() < 4 && size.find_first_not_of("0123456789") == std::string::npos;
    if (!sizes.count(name) || !is_number || std::stol(size) < 1)
      throw CLI::ValidationError("--mesh", "\"" + part + "\" is no dim; expected as in dp=2,tp=2");
    sizes[name] = std::stol(size);
  }
  options.dp = sizes["dp"];
  options.tp = sizes["tp"];
}

/// "fsdp+tp"; the mesh that goes with it, if none was given.
std::string read_parallel(const std::string& text, Options& options) {
  const auto parallel = gpt::parallel_named(text);
  if (!parallel)
    throw CLI::ValidationError("--parallel", "\"" + text + "\" is none of dp, tp, tp+dp, fsdp and fsdp+tp");
  options.parallel.tensor = parallel->tensor;
  options.parallel.shard = parallel->shard;
  return text == "tp" ? "tp=4" : parallel->tensor ? "dp=2,tp=2" : "dp=4";
}

void check(const Options& options) {
  const gpt::Config& model = options.model;
  auto fail = [](const std::string& name, const std::string& reason) {
    throw CLI::ValidationError(name, reason);
  };
  if (model.width % model.heads != 0)
    fail("--width", c10::str(model.width, " cannot be divided among ", model.heads, " heads"));
  if (options.tp > 1 && !options.parallel.tensor)
    fail("--mesh", c10::str("tp=", options.tp, " needs tensor parallel: --parallel tp+dp or fsdp+tp"));
  if (options.parallel.sequence && !options.parallel.tensor)
    fail("--sequence-parallel", "needs tensor parallel: --parallel tp, tp+dp or fsdp+tp");
  if (model.heads % options.tp != 0)
    fail("--heads", c10::str(model.heads, " heads cannot be dealt to tp=", options.tp, " ranks"));
}

/// Characters as indices.
class Text {
 public:
  Text() {
    std::map<char, int64_t> indices;
    for (const char letter : gpt::kText) indices.emplace(letter, 0);
    for (auto& [letter, index] : indices) index = count_++;
    for (const char letter : gpt::kText) letters_.push_back(indices[letter]);
  }

  int64_t vocabulary() const { return count_; }
  int64_t size() const { return static_cast<int64_t>(letters_.size()); }

  /// Pieces from positions that depend on the seed and the step only.
  at::Tensor batch(int64_t size, int64_t length, uint64_t seed, int64_t step) const {
    std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(step));
    const at::Tensor result = at::empty({size, length}, at::kLong);
    for (int64_t i = 0; i < size; ++i) {
      const auto start = static_cast<std::ptrdiff_t>(random() % (letters_.size() - length));
      std::copy_n(letters_.begin() + start, length, result[i].mutable_data_ptr<int64_t>());
    }
    return result;
  }

 private:
  std::vector<int64_t> letters_;
  int64_t count_ = 0;
};

/// What is shown while training, and where it is a terminal, in one line.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step, bool shown)
      : steps_(steps), tokens_(tokens_per_step), shown_(shown), start_(Clock::now()) {}

  void step(int64_t done, double loss) {
    const bool live = isatty(STDOUT_FILENO) != 0;
    if (!shown_ || (!live && done % std::max<int64_t>(steps_ / 10, 1) != 0 && done != steps_)) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    constexpr int64_t kWidth = 30;
    const int64_t filled = kWidth * done / steps_;
    std::printf("%s  [%s%s] %4ld/%ld   loss %.4f   %6.0f tokens/s%s", live ? "\r" : "",
                std::string(filled, '#').c_str(), std::string(kWidth - filled, '.').c_str(), done, steps_,
                loss, static_cast<double>(done * tokens_) / seconds, live && done < steps_ ? "" : "\n");
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  const int64_t steps_, tokens_;
  const bool shown_;
  const Clock::time_point start_;
};

/// The losses of the steps that were made.
struct Losses {
  int64_t first = 0;  // the step of the first one
  std::vector<double> values;
};

/// Loads the last checkpoint; how many steps had been made then.
int64_t resume(gpt::GPT& model, torch::optim::Optimizer& optimizer, const std::string& directory,
               bool shown) {
  const std::string path = checkpoint::latest(directory);
  TESSERA_CHECK(!path.empty(), "There is no checkpoint in ", directory, ".");
  auto state = checkpoint::StateDict::of(*model, optimizer);
  state["step"] = 0;
  checkpoint::load(state, path);
  if (shown) std::cout << "  resumed from " << path << "\n\n";
  return state.at("step").integer();
}

/// Saves while training goes on.
checkpoint::PendingSave save(gpt::GPT& model, torch::optim::Optimizer& optimizer,
                             const std::string& directory, int64_t step) {
  auto state = checkpoint::StateDict::of(*model, optimizer);
  state["step"] = step;
  checkpoint::SaveOptions options;
  options.keep_last = 3;
  return checkpoint::async_save(state, c10::str(directory, "/step-", step), options);
}

/// Trains the model as it is, on batches that `distribute` has distributed.
template <class Distribute>
Losses train(gpt::GPT& model, const Text& text, const Options& options, bool shown,
             const Distribute& distribute) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.learning_rate));
  const int64_t context = options.model.context;
  Progress progress(options.steps, options.batch * context, shown);
  Losses losses;
  if (!options.resume.empty()) losses.first = resume(model, optimizer, options.resume, shown);
  const int64_t end = options.stop_after > 0 ? std::min(options.stop_after, options.steps) : options.steps;
  std::optional<checkpoint::PendingSave> pending;
  for (int64_t step = losses.first; step < end; ++step) {
    const at::Tensor pieces = distribute(text.batch(options.batch, context + 1, options.seed, step));
    const at::Tensor loss = gpt::loss_of(model, pieces);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.values.push_back(loss.item<double>());
    progress.step(step + 1, losses.values.back());
    if (!options.save.empty() && ((step + 1) % options.save_every == 0 || step + 1 == end)) {
      if (pending) pending->wait();
      pending = save(model, optimizer, options.save, step + 1);
    }
  }
  if (pending) pending->wait();
  return losses;
}

void heading(const std::string& text) {
  const bool colours = isatty(STDOUT_FILENO) != 0;
  std::cout << '\n' << (colours ? "\033[1m" : "") << text << (colours ? "\033[0m" : "") << "\n\n";
}

void show_mesh(const DeviceMesh& mesh) {
  for (int64_t row = 0; row < mesh.size(0); ++row) {
    std::cout << "  dp " << row << "  |";
    for (int64_t column = 0; column < mesh.size(1); ++column)
      std::cout << "  rank " << mesh.rank_at({row, column});
    std::cout << '\n';
  }
}

/// Where the parameters are; those of all blocks have the same placements.
void show_parameters(const torch::nn::Module& model) {
  int64_t local = 0, all = 0;
  for (const auto& parameter : model.named_parameters()) {
    const DTensor tensor(parameter.value());
    local += tensor.to_local().numel();
    all += tensor.numel();
    if (parameter.key().starts_with("blocks.") && !parameter.key().starts_with("blocks.0.")) continue;
    std::cout << "  " << std::left << std::setw(28) << parameter.key() << std::setw(12)
              << c10::str(c10::ArrayRef<Placement>(tensor.placements())) << tensor.sizes() << '\n';
  }
  std::cout << "\n  " << all << " parameters, of which this rank has " << local << '\n';
}

/// What one step communicates.
void show_collectives(gpt::GPT& model, const at::Tensor& pieces, bool shown) {
  CommDebugMode counts;
  gpt::loss_of(model, pieces).backward();
  model->zero_grad();
  if (!shown) return;
  heading("Collectives in one forward and backward pass");
  std::cout << "  " << counts << '\n';
}

/// Whether all steps agree. One device made all steps from the first on.
bool show_agreement(const Losses& losses, const std::vector<double>& theirs, double tolerance) {
  const std::vector<double>& ours = losses.values;
  heading("The same on one device");
  std::printf("  %6s  %12s  %12s  %12s\n", "step", "on the mesh", "one device", "difference");
  double largest = 0;
  const auto count = static_cast<int64_t>(ours.size());
  for (int64_t step = 0; step < count; ++step) {
    const double expected = theirs[losses.first + step];
    const double difference = std::abs(ours[step] - expected);
    largest = std::max(largest, difference);
    if (step < 3 || step + 1 == count || step % std::max<int64_t>(count / 8, 1) == 0)
      std::printf("  %6ld  %12.6f  %12.6f  %12.1e\n", losses.first + step + 1, ours[step], expected,
                  difference);
  }
  const bool agree = largest <= tolerance;
  std::printf("\n  All %ld losses %s: the largest difference is %.1e, the tolerance %.0e.\n", count,
              agree ? "agree" : "DO NOT agree", largest, tolerance);
  return agree;
}

/// Whether what the ranks learnt is what one device learns.
bool run_demo(Options options) {
  const Text text;
  options.model.vocabulary = text.vocabulary();
  torch::manual_seed(options.seed);
  gpt::GPT initial(options.model);
  auto fresh = [&] {
    gpt::GPT model(options.model);
    const torch::NoGradGuard no_grad;
    const auto values = initial->parameters();
    auto parameters = model->parameters();
    for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
    return model;
  };

  Losses losses;
  bool is_first = false;
  launch(options.dp * options.tp, [&] {
    const auto world = current_world();
    TESSERA_CHECK_VALUE(world->size() == options.dp * options.tp, "The launcher started ", world->size(),
                        " ranks, but --mesh dp=", options.dp, ",tp=", options.tp, " has ",
                        options.dp * options.tp, ".");
    const bool first = world->rank() == 0;
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {options.dp, options.tp}, {"dp", "tp"});
    gpt::GPT model = fresh();
    gpt::parallelize(model, mesh, options.parallel);
    auto distribute = [&](const at::Tensor& pieces) {
      return distribute_tensor(pieces, mesh, {Shard(0), Replicate()}, std::nullopt);
    };
    if (first) {
      heading(c10::str(world->size(), " ranks over \"", world->backend(at::kCPU), "\" as ", mesh));
      show_mesh(mesh);
      heading("Parameters");
      show_parameters(*model);
    }
    show_collectives(model, distribute(text.batch(options.batch, options.model.context + 1, options.seed, 0)),
                     first);
    if (first) {
      heading(c10::str("Training on ", text.size(), " characters, ", options.batch, " pieces of ",
                       options.model.context, " a step"));
    }
    std::optional<Trace> trace;
    if (!options.trace.empty()) trace.emplace();
    const auto mine = train(model, text, options, first, distribute);
    if (trace) {
      trace->write(options.trace);
      const std::string summary = trace->summary();
      if (first) {
        heading("Where the time went; " + options.trace + " has more, for Perfetto or chrome://tracing");
        std::cout << summary;
      }
    }
    if (first) {
      is_first = true;
      losses = mine;
    }
  });
  if (!is_first) return true;  // the process of another rank
  std::vector<double> expected;
  Options undisturbed = options;
  undisturbed.save = undisturbed.resume = "";
  auto alone = [&] {
    gpt::GPT model = fresh();
    expected = train(model, text, undisturbed, false, [](const at::Tensor& pieces) { return pieces; }).values;
  };
  run(1, alone, {.threads_per_rank = 1});
  return show_agreement(losses, expected, options.tolerance);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Trains a small GPT on a mesh of ranks (data parallel or fully sharded, x tensor parallel), on "
      "the project's own documents, and compares\nevery step with the same model on one device.");
  Options options;
  std::string mesh, parallel = "tp+dp";
  app.get_formatter()->column_width(36);
  app.add_option("--parallel", parallel, "What ranks share: dp, tp, tp+dp, fsdp or fsdp+tp")
      ->capture_default_str();
  app.add_option("--mesh", mesh, "Ranks that share the batch (dp) and each layer (tp), as in dp=2,tp=2");
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 20);
  auto number = [&](const char* name, int64_t& value, const char* words) {
    app.add_option(name, value, words)->capture_default_str()->check(positive);
  };
  number("--steps", options.steps, "Steps of training");
  number("--batch", options.batch, "Pieces of text in each step, on all ranks together");
  number("--context", options.model.context, "Characters in a piece");
  number("--layers", options.model.layers, "Blocks of the model");
  number("--width", options.model.width, "Its width");
  number("--heads", options.model.heads, "Its attention heads");
  app.add_option("--learning-rate", options.learning_rate, "Of AdamW")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed, "Of the first weights and of the order of the text")
      ->capture_default_str();
  app.add_flag("--sequence-parallel", options.parallel.sequence,
               "Shard what flows between the blocks along the sequence");
  app.add_option("--save", options.save, "Write checkpoints into this directory, and keep the last three");
  number("--save-every", options.save_every, "Steps between them");
  app.add_option("--resume", options.resume, "Go on from the last checkpoint in this directory, on any mesh");
  app.add_option("--trace", options.trace, "Write what all ranks spend their time with into this file");
  app.add_option("--stop-after", options.stop_after, "Stop after so many steps of all, as if interrupted");
  app.add_option("--tolerance", options.tolerance, "How much the losses may differ from one device")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  try {
    app.parse(argc, argv);
    const std::string usual = read_parallel(parallel, options);
    read_mesh(mesh.empty() ? usual : mesh, options);
    check(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  try {
    return run_demo(options) ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
