// Training that outlives some of its processes: when one dies, the others go on from the last checkpoint, without it.
//
// Start it with something that does not end the other processes when one ends: `srun --no-kill`, `mpirun --enable-recovery`.
// torchrun ends and restarts all of them instead; then each finds the last checkpoint when it begins anew.

#include <tessera/tessera.h>

#include <iostream>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <torch/nn.h>
#include <torch/optim.h>

using namespace tessera;

namespace {

struct Options {
  std::string directory;
  int64_t steps = 30;
  int64_t save_every = 5;
  double timeout = 60;
  int64_t pause = 0;  // between steps, so that there is time to kill one
};

/// From the last checkpoint, if there is one, to the last step, on the ranks that there are.
void train(const Options& options) {
  const auto mesh = init_device_mesh(at::kCPU, {get_world_size()});
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  replicate(*model, mesh);
  random::manual_seed(0);  // numbers on a mesh: the same however many ranks there are
  for (const auto& layer : model->modules()) {
    if (auto* linear = layer->as<torch::nn::Linear>()) linear->reset_parameters();
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  auto state = checkpoint::StateDict::of(*model, optimizer);
  state["step"] = 0;
  if (const std::string path = checkpoint::latest(options.directory); !path.empty()) {
    checkpoint::load(state, path);
    if (get_rank() == 0) std::cout << get_world_size() << " ranks go on from " << path << std::endl;
  }

  for (int64_t step = state.at("step").integer(); step < options.steps; ++step) {
    const at::Tensor inputs = randn({24, 8}, mesh, {Shard(0)});
    const at::Tensor loss =
        torch::nn::functional::mse_loss(model->forward(inputs), inputs.pow(2).sum(1, /*keepdim=*/true));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    const auto value = loss.item<double>();
    if (get_rank() == 0) std::cout << "step " << step << " loss " << value << std::endl;
    if ((step + 1) % options.save_every == 0) {
      state["step"] = step + 1;
      checkpoint::save(state, c10::str(options.directory, "/step-", step + 1));
    }
    usleep(static_cast<useconds_t>(options.pause * 1000));
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains on as many ranks as are left.");
  Options options;
  app.add_option("--checkpoints", options.directory, "The directory of checkpoints")->required();
  app.add_option("--steps", options.steps, "Steps to make")->capture_default_str();
  app.add_option("--save-every", options.save_every, "Steps between checkpoints")->capture_default_str();
  app.add_option("--timeout", options.timeout, "The longest that a rank waits, in seconds")
      ->capture_default_str();
  app.add_option("--pause", options.pause, "Milliseconds between steps")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  init_process_group("", std::chrono::milliseconds(static_cast<int64_t>(options.timeout * 1000)));
  while (true) {
    try {
      train(options);
      break;
    } catch (const c10::Error& error) {
      if (current_world()->lost_ranks().empty()) throw;  // it is our own fault
      std::cout << "rank " << get_rank() << ": " << error.what_without_backtrace() << std::endl;
    }
    shrink_process_group();
  }
  destroy_process_group();
}
