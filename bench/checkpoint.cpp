// Saving and loading 1 GiB on four ranks, threads and gloo processes, beside sequential files of the same bytes with the
// same durability (fsync), beside torch's DCP where --torch names its figures (bench/checkpoint.py), and the stall of
// an asynchronous save beside memcpy. On a disk and in memory (tmpfs). Files were just written, so they are
// read from the page cache.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>

#include "support/spawn.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

constexpr int64_t kRanks = 4;
constexpr int64_t kTensors = 64;
constexpr int kRepeats = 3;

struct Options {
  int64_t mebibytes = 1024;
  std::string directory;
  std::string torch;
  bool is_rank = false;
  int64_t bytes() const { return mebibytes << 20; }
};

/// The best of several: other work on the machine only ever makes it longer.
double best(const std::function<double()>& measure) {
  double result = measure();
  for (int i = 1; i < kRepeats; ++i) result = std::min(result, measure());
  return result;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

checkpoint::StateDict make_state(const Options& options, const DeviceMesh& mesh, double value) {
  checkpoint::StateDict state;
  const int64_t rows = options.bytes() / kTensors / 4 / 1024;
  for (int64_t i = 0; i < kTensors; ++i)
    state[c10::str("w", i)] = full({rows, 1024}, value, mesh, {Shard(0)});
  return state;
}

/// Of all ranks: where they share processors, one may be done before the others have begun.
double slowest(double seconds, const DeviceMesh& mesh) {
  return DTensor::from_local(at::scalar_tensor(seconds, at::kDouble), mesh, {Partial(ReduceOp::max)})
      .item()
      .toDouble();
}

/// Seconds by name.
std::map<std::string, double> measure_ranks(const Options& options, const std::string& directory) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {kRanks});
  const std::string path = directory + "/checkpoint";
  auto state = make_state(options, mesh, 1.5);
  std::map<std::string, double> result;
  const auto timed = [&](const std::function<void()>& body) {
    return best([&] {
      DTensor(state.at("w0").tensor()).sum().item<float>();  // all begin together
      const auto start = Clock::now();
      body();
      return slowest(seconds_since(start), mesh);
    });
  };
  result["save"] = timed([&] { checkpoint::save(state, path); });
  result["load"] = timed([&] { checkpoint::load(state, path); });
  result["load, verified on the way"] =
      timed([&] { checkpoint::load(state, path, {.verify = checkpoint::Verify::WhileLoading}); });
  result["load, not verified"] =
      timed([&] { checkpoint::load(state, path, {.verify = checkpoint::Verify::Never}); });
  checkpoint::async_save(state, path).wait();
  result["stall of async_save"] = best([&] {
    DTensor(state.at("w0").tensor()).sum().item<float>();
    const auto start = Clock::now();
    auto pending = checkpoint::async_save(state, path);
    const double stall = seconds_since(start);
    pending.wait();
    return slowest(stall, mesh);
  });
  std::vector<at::Tensor> copies;
  for (const auto& entry : state.values().entries())
    copies.push_back(DTensor(entry.value.tensor()).to_local().clone());
  result["memcpy"] = timed([&] {
    for (int64_t i = 0; i < kTensors; ++i)
      copies[i].copy_(DTensor(state.at(c10::str("w", i)).tensor()).to_local());
  });
  return result;
}

double sequential_write(const std::string& path, int64_t bytes) {
  std::filesystem::remove(path);
  const std::vector<char> buffer(1 << 20, 7);
  const auto start = Clock::now();
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (int64_t done = 0; done < bytes; done += static_cast<int64_t>(buffer.size())) {
    if (::write(file, buffer.data(), buffer.size()) != static_cast<ssize_t>(buffer.size()))
      throw std::runtime_error("could not write " + path);
  }
  ::fsync(file);
  ::close(file);
  return seconds_since(start);
}

double sequential_read(const std::string& path) {
  std::vector<char> buffer(1 << 20);
  const auto start = Clock::now();
  const int file = ::open(path.c_str(), O_RDONLY);
  while (::read(file, buffer.data(), buffer.size()) > 0) {
  }
  ::close(file);
  return seconds_since(start);
}

/// What the machine can do at best: seconds that as many threads as there are ranks take for their shares.
double in_parallel(const std::function<void(int64_t rank)>& work) {
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& each : threads) each.join();
  return seconds_since(start);
}

void print_row(const std::string& name, double bytes, double seconds, double reference, const char* of) {
  std::printf("  %-36s %7.3f s  %6.2f GB/s", name.c_str(), seconds, bytes / seconds / 1e9);
  if (reference > 0) std::printf("   %5.2fx %s", reference / seconds, of);
  std::printf("\n");
}

/// Lines of "memory save", a tab, and seconds.
std::map<std::string, double> read_torch(const std::string& path) {
  std::map<std::string, double> result;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) result[line.substr(0, tab)] = std::stod(line.substr(tab + 1));
  }
  return result;
}

std::map<std::string, double> measure_processes(const Options& options, const std::string& directory) {
  const auto results = support::spawn(kRanks, {support::this_program(), "--rank", "--directory", directory,
                                               "--mebibytes", std::to_string(options.mebibytes)});
  std::map<std::string, double> result;
  std::istringstream lines(results[0].output);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) result[line.substr(0, tab)] = std::stod(line.substr(tab + 1));
  }
  if (result.empty()) std::cerr << results[0].output;
  return result;
}

void measure_place(const Options& options, const std::string& place, const std::string& directory) {
  const std::map<std::string, double> torch = read_torch(options.torch);
  const auto bytes = static_cast<double>(options.bytes());
  const auto torch_of = [&](const std::string& what) {
    const auto found = torch.find(place + " " + what);
    return found == torch.end() ? 0.0 : found->second;
  };
  std::printf("\n%s (%s), %ld MiB on %ld ranks, best of %d\n", place.c_str(), directory.c_str(),
              options.mebibytes, kRanks, kRepeats);
  const std::string file = directory + "/sequential";
  const double write = best([&] { return sequential_write(file, options.bytes()); });
  const double read = best([&] { return sequential_read(file); });
  std::filesystem::remove(file);
  const auto share = [&](int64_t rank) { return c10::str(file, rank); };
  const double parallel_write = best([&] {
    return in_parallel([&](int64_t rank) { sequential_write(share(rank), options.bytes() / kRanks); });
  });
  const double parallel_read =
      best([&] { return in_parallel([&](int64_t rank) { sequential_read(share(rank)); }); });
  for (int64_t rank = 0; rank < kRanks; ++rank) std::filesystem::remove(share(rank));
  print_row("sequential write + fsync", bytes, write, 0, "");
  print_row("sequential read", bytes, read, 0, "");
  print_row("write + fsync by threads, replacing", bytes, parallel_write, write, "sequential");
  print_row("read by threads", bytes, parallel_read, read, "sequential");
  if (torch_of("save") > 0) {
    print_row("torch DCP save, processes", bytes, torch_of("save"), write, "sequential");
    print_row("torch DCP load, processes", bytes, torch_of("load"), read, "sequential");
  }
  std::map<std::string, double> threads;
  run(kRanks, [&] {
    const auto mine = measure_ranks(options, directory);
    if (get_rank() == 0) threads = mine;
  });
  for (const auto& [ranks, seconds] : std::vector<std::pair<std::string, std::map<std::string, double>>>{
           {"threads", threads}, {"processes", measure_processes(options, directory)}}) {
    for (const char* what : {"save", "load", "load, verified on the way", "load, not verified"}) {
      const auto found = seconds.find(what);
      if (found == seconds.end()) continue;
      const bool is_save = std::string(what) == "save";
      print_row(c10::str(what, ", ", ranks), bytes, found->second, is_save ? write : read, "sequential");
      const double theirs = torch_of(is_save ? "save" : "load");
      if (theirs > 0) std::printf("  %-36s %33.2fx DCP\n", "", theirs / found->second);
    }
    if (seconds.count("memcpy"))
      std::printf("  %-36s %7.3f s  %5.2fx memcpy of the state\n",
                  c10::str("stall of async_save, ", ranks).c_str(), seconds.at("stall of async_save"),
                  seconds.at("stall of async_save") / seconds.at("memcpy"));
  }
  std::filesystem::remove_all(directory + "/checkpoint");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Saves and loads checkpoints, beside sequential files and torch's DCP.");
  Options options;
  app.add_option("--mebibytes", options.mebibytes, "Size of the state")->capture_default_str();
  app.add_option("--directory", options.directory, "On the disk to measure")->required();
  app.add_option("--torch", options.torch, "Figures of torch's DCP, by bench/checkpoint.py");
  app.add_flag("--rank", options.is_rank, "This process is one rank");
  CLI11_PARSE(app, argc, argv);
  if (options.is_rank) {
    launch(1, [&] {
      const auto seconds = measure_ranks(options, options.directory);
      if (get_rank() != 0) return;
      for (const auto& [name, value] : seconds) std::printf("%s\t%.6f\n", name.c_str(), value);
    });
    return 0;
  }
  std::filesystem::create_directories(options.directory);
  measure_place(options, "disk", options.directory);
  std::string memory = "/dev/shm/tessera_bench_XXXXXX";
  if (::mkdtemp(memory.data()) != nullptr) {
    measure_place(options, "memory", memory);
    std::filesystem::remove_all(memory);
  }
  return 0;
}
