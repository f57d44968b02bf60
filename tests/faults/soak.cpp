// Hours of mixed work in one process: training, redistribution, meshes made and dropped, errors thrown and caught, ranks killed
// and worlds made again. Memory, files, threads and caches must stay as they were.
//
// This process is rank 0 of worlds of three processes, one after the other: rank 1 lives as long as it does, rank 2 is new in
// each world, and comes to grief in most. Between worlds, ranks that are threads do the same work.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/nn/replicate.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "support/spawn.h"

extern char** environ;

namespace {

using namespace tessera;
using c10d::ReduceOp;
using Clock = std::chrono::steady_clock;

struct Options {
  double minutes = 2;
  uint64_t seed = 0;
  int rank = 0;
  int64_t world = -1;  // rank 2: the one that it is of
  int port = 0;
  std::string directory;
};

// --- The work ----------------------------------------------------------------------------------------------

void train(const DeviceMesh& mesh, int steps) {
  torch::nn::Linear model(6, 4);
  replicate(*model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < steps; ++step) {
    const at::Tensor inputs = randn({10, 6}, mesh, {Shard(0)});
    optimizer.zero_grad();
    torch::nn::functional::mse_loss(model->forward(inputs), at::zeros_like(model->forward(inputs)))
        .backward();
    optimizer.step();
  }
}

void redistribute(const DeviceMesh& mesh, std::mt19937_64& common) {
  const std::vector<Placements> all{{Shard(0)}, {Shard(1)}, {Replicate()}};
  DTensor x = randn({static_cast<int64_t>(5 + common() % 7), 6}, mesh, {Shard(0)});
  for (int i = 0; i < 5; ++i) x = x.redistribute(all[common() % all.size()]);
  x.softmax(1).matmul(x.t()).sum().item<float>();
}

/// What one device refuses, every rank refuses.
void make_error(const DeviceMesh& mesh) {
  const at::Tensor x = randn({6, 6}, mesh, {Shard(0)});
  try {
    x.matmul(randn({5, 5}, mesh, {Replicate()}));
    throw std::logic_error("matrices that do not fit were multiplied");
  } catch (const c10::Error&) {
  }
}

void save_and_load(const DeviceMesh& mesh, const std::string& directory) {
  checkpoint::StateDict state;
  state["w"] = randn({12, 6}, mesh, {Shard(0)});
  checkpoint::save(state, directory + "/soak");
  checkpoint::load(state, directory + "/soak");
}

/// All ranks of the current world do the same.
void work(std::mt19937_64& common, const std::string& directory) {
  const int64_t size = get_world_size();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {size});
  switch (common() % 4) {
    case 0:
      train(mesh, 3);
      break;
    case 1:
      redistribute(mesh, common);
      break;
    case 2:
      make_error(mesh);
      break;
    default:
      save_and_load(mesh, directory);
  }
}

// --- Worlds ------------------------------------------------------------------------------------------------

using Store = c10::intrusive_ptr<c10d::TCPStore>;

/// Kept by this process.
Store new_store() {
  c10d::TCPStoreOptions how;
  how.port = 0;
  how.isServer = true;
  how.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", how);
}

Store store_at(int port) {
  c10d::TCPStoreOptions how;
  how.port = static_cast<uint16_t>(port);
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", how);
}

void join(const Options& options, const Store& store) {
  WorldOptions join;
  join.rank = options.rank;
  join.size = 3;
  join.store = store;
  join.timeout = std::chrono::seconds(20);
  init_process_group(std::move(join));
}

/// What happens to rank 2, and when: the same on all ranks.
struct Fate {
  explicit Fate(uint64_t seed)
      : common(seed), turns(static_cast<int>(common() % 6)), how(static_cast<int>(common() % 4)) {}
  std::mt19937_64 common;
  int turns;
  int how;
};

/// True if the world, which has that store, ended as it should have.
bool live(const Options& options, const Store& store, int64_t world) {
  Fate fate(options.seed * 1000003 + static_cast<uint64_t>(world));
  join(options, store);
  bool has_failed = false;
  try {
    for (int turn = 0; turn < 6; ++turn) {
      if (options.rank == 2 && turn == fate.turns) {
        if (fate.how == 0) ::raise(SIGKILL);
        if (fate.how == 1) std::_Exit(1);
        if (fate.how == 2) {
          current_world()->report_failure("it was its fate");
          break;
        }
      }
      work(fate.common, options.directory);
      comm::barrier(current_world()->group()).wait();
    }
  } catch (const c10::Error& error) {
    has_failed = true;
    if (options.rank == 2) throw;
    if (fate.how == 3)
      std::cerr << "Nothing was to happen in world " << world << ": " << error.what_without_backtrace()
                << "\n";
  }
  if (options.rank < 2 && has_failed) {
    shrink_process_group();
    std::mt19937_64 common(
        static_cast<uint64_t>(world));  // they may have come differently far with the other one
    work(common, options.directory);
  }
  destroy_process_group();
  return has_failed == (fate.how != 3);
}

/// Rank 1 is given the port of a store by which it hears of worlds, rank 2 that of its world.
pid_t start(const Options& options, int rank, int64_t world, int port) {
  std::vector<std::string> words{support::this_program(),      "--rank",      std::to_string(rank), "--seed",
                                 std::to_string(options.seed), "--port",      std::to_string(port), "--world",
                                 std::to_string(world),        "--directory", options.directory};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  if (::posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ) != 0)
    throw std::runtime_error("cannot start " + words[0]);
  return pid;
}

// --- What must stay ----------------------------------------------------------------------------------------

struct Use {
  int64_t memory = 0;  // bytes, resident
  int64_t files = 0;
  int64_t threads = 0;
};

int64_t entries_of(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory), {});
}

Use use_now() {
  Use use;
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  use.memory = resident * ::sysconf(_SC_PAGESIZE);
  use.files = entries_of("/proc/self/fd");
  use.threads = entries_of("/proc/self/task");
  return use;
}

// --- What rank 1 hears ---------------------------------------------------------------------------------------

std::string begin_key(int64_t world) { return c10::str("begin/", world); }
std::string left_key(int64_t world) { return c10::str("left/", world); }

/// That a world begins, whose store has this port; 0: there are no more.
void announce(c10d::Store& news, int64_t world, int port) {
  const std::string text = std::to_string(port);
  news.set(begin_key(world), std::vector<uint8_t>(text.begin(), text.end()));
}

int await_port(c10d::Store& news, int64_t world) {
  const auto text = news.get(begin_key(world));
  return std::stoi(std::string(text.begin(), text.end()));
}

int soak(const Options& options) {
  const Store news = new_store();
  const pid_t second = start(options, 1, -1, news->getPort());
  const auto begin = Clock::now();
  const auto minutes = [&] { return std::chrono::duration<double>(Clock::now() - begin).count() / 60; };
  std::printf("minutes  worlds  memory MiB  files  threads\n");
  std::vector<Use> uses;
  int64_t world = 0, wrong = 0;
  double shown = 0;
  for (; minutes() < options.minutes; ++world) {
    {
      const Store store =
          new_store();  // each world has its own, which ends with it: what it holds is not kept
      announce(*news, world, store->getPort());
      const pid_t third = start(options, 2, world, store->getPort());
      wrong += live(options, store, world) ? 0 : 1;
      int status = 0;
      ::waitpid(third, &status, 0);
      news->get(left_key(world));
    }
    news->deleteKey(begin_key(world));
    news->deleteKey(left_key(world));
    run(3, [&] {
      std::mt19937_64 common(static_cast<uint64_t>(world));
      work(common, options.directory + "/threads");
    });
    if (world > 0 && minutes() < shown) continue;
    shown = minutes() + options.minutes / 20;
    uses.push_back(use_now());
    std::printf("%7.1f  %6ld  %10.1f  %5ld  %7ld\n", minutes(), static_cast<long>(world + 1),
                static_cast<double>(uses.back().memory) / (1 << 20), static_cast<long>(uses.back().files),
                static_cast<long>(uses.back().threads));
    std::fflush(stdout);
  }
  announce(*news, world, 0);
  int status = 0;
  ::waitpid(second, &status, 0);
  // What is made once has been made in the first third.
  const Use& first = uses[uses.size() / 3];
  const Use& last = uses.back();
  const bool is_flat = last.memory < first.memory + (int64_t{16} << 20) && last.files <= first.files + 1 &&
                       last.threads <= first.threads + 1;
  std::printf("%ld worlds, %ld of which did not end as they should have; rank 1 ended with %d; %s.\n",
              static_cast<long>(world), static_cast<long>(wrong), status,
              is_flat ? "memory, files and threads are flat" : "something grows");
  return wrong == 0 && status == 0 && is_flat ? 0 : 1;
}

int be_rank(const Options& options) {
  if (options.rank == 2) return live(options, store_at(options.port), options.world) ? 0 : 1;
  const Store news = store_at(options.port);
  for (int64_t world = 0;; ++world) {
    const int port = await_port(*news, world);
    if (port == 0) return 0;
    if (!live(options, store_at(port), world)) return 1;
    news->set(left_key(world), std::vector<uint8_t>{1});
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Mixed work for minutes or hours; memory, files and threads must stay as they were.");
  Options options;
  app.add_option("--minutes", options.minutes, "How long")->capture_default_str();
  app.add_option("--seed", options.seed, "Of what happens")->capture_default_str();
  app.add_option("--rank", options.rank, "This process is that rank")->group("");
  app.add_option("--world", options.world, "Of that world")->group("");
  app.add_option("--port", options.port, "Of a store")->group("");
  app.add_option("--directory", options.directory, "Of checkpoints")->group("");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  if (options.rank > 0) {
    try {
      return be_rank(options);
    } catch (const std::exception&) {
      return 1;
    }
  }
  std::string directory = "/tmp/tessera_soak_XXXXXX";
  options.directory = ::mkdtemp(directory.data());
  const int result = soak(options);
  std::filesystem::remove_all(options.directory);
  return result;
}
