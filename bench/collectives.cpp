// Collectives from 4 B to 64 MB: ranks as threads, and as processes that share memory, against gloo processes and
// against memcpy of the same bytes, measured in one run.

#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>

#include "support/spawn.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

/// The last one is an all_to_all of ranks that compare what they were asked for: what gather and reshard of sharded tensors
/// do.
const std::vector<std::string> kOperations{"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                           "compared"};
const std::vector<int64_t> kSizes{4, 64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20, 64 << 20};

/// Seconds a call takes: the median of several batches.
template <class F>
double seconds(F&& call, int64_t batch, int batches) {
  call();
  std::vector<double> times;
  for (int i = 0; i < batches; ++i) {
    const auto start = Clock::now();
    for (int64_t j = 0; j < batch; ++j) call();
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(batch));
  }
  std::nth_element(times.begin(), times.begin() + batches / 2, times.end());
  return times[batches / 2];
}

/// `bytes` is the size of the larger of input and output. Every rank must use the same batch.
double measure(const std::string& operation, int64_t bytes, int64_t batch, int batches, const Group& group) {
  const int64_t n = group->getSize();
  const int64_t part = std::max<int64_t>(1, bytes / 4 / n);
  at::Tensor global = at::ones({operation == "all_reduce" ? bytes / 4 : part * n});
  at::Tensor piece = at::ones({part});
  at::Tensor other = at::ones_like(global);
  auto pieces = [&](at::Tensor tensor) { return tensor.split(part); };
  const auto in = pieces(global), out = pieces(other);
  comm::barrier(group).wait();
  return seconds(
      [&] {
        if (operation == "all_reduce") comm::all_reduce(global, c10d::ReduceOp::MAX, group).wait();
        if (operation == "all_gather") comm::all_gather_into(global, piece, group).wait();
        if (operation == "reduce_scatter")
          comm::reduce_scatter_from(piece, global, c10d::ReduceOp::MAX, group).wait();
        if (operation == "all_to_all") comm::all_to_all(out, in, group).wait();
        if (operation == "compared") {
          const comm::Agreement agreement("reshard", group, [&] {
            return c10::str(global.scalar_type(), global.sizes(), " to rank ", 0);
          });
          comm::all_to_all(out, in, group).wait();
        }
      },
      batch, batches);
}

using Times = std::map<std::pair<std::string, int64_t>, double>;

int64_t batch_for(int64_t bytes, double fixed, double per_byte) {
  const double estimate = fixed + per_byte * static_cast<double>(bytes);
  return std::clamp<int64_t>(static_cast<int64_t>(0.02 / estimate), 1, 5000);
}

Times measure_threads(int64_t ranks, const std::vector<int64_t>& sizes) {
  Times times;
  run(ranks, [&] {
    const auto world = current_world();
    for (const auto& operation : kOperations) {
      for (const int64_t bytes : sizes) {
        const double t =
            measure(operation, bytes, batch_for(bytes, 2e-6 * ranks, 1e-10 * ranks), 7, world->group());
        if (world->rank() == 0) times[{operation, bytes}] = t;
      }
    }
  });
  return times;
}

/// How long a call takes on each backend of processes, about, in seconds: to begin, and for each byte.
struct Expected {
  double fixed, per_byte;
};
const std::map<std::string, Expected> kProcesses{{"shm", {3e-6, 2e-10}}, {"gloo", {2e-4, 1e-9}}};

void process_rank(const std::string& backend, const std::vector<int64_t>& sizes) {
  const Expected expected = kProcesses.at(backend);
  RunOptions options;
  options.backend = backend;
  launch(
      1,
      [&] {
        const auto world = current_world();
        const auto n = static_cast<double>(world->size());
        for (const auto& operation : kOperations) {
          for (const int64_t bytes : sizes) {
            const double t =
                measure(operation, bytes, batch_for(bytes, expected.fixed * n, expected.per_byte * n), 7,
                        world->group());
            if (world->rank() == 0) std::cout << operation << ' ' << bytes << ' ' << t << '\n';
          }
        }
      },
      options);
}

Times measure_processes(const std::string& backend, int64_t ranks, const std::vector<std::string>& arguments,
                        bool checked = false) {
  std::vector<std::string> command{support::this_program(), "--process-rank", backend};
  command.insert(command.end(), arguments.begin(), arguments.end());
  support::SpawnOptions options;
  options.environment = {{"TESSERA_CHECK_COLLECTIVES", checked ? "1" : "0"}};
  const auto results = support::spawn(ranks, command, options);
  for (const auto& result : results) {
    if (!result.ok()) throw std::runtime_error("a process failed on " + backend + ":\n" + result.output);
  }
  Times times;
  std::istringstream lines(results[0].output);
  std::string operation;
  int64_t bytes = 0;
  double t = 0;
  while (lines >> operation >> bytes >> t) times[{operation, bytes}] = t;
  return times;
}

double median_of(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double measure_memcpy(int64_t bytes) {
  std::vector<char> from(bytes, 1), to(bytes, 2);
  return seconds(
      [&] {
        std::memcpy(to.data(), from.data(), bytes);
        asm volatile("" : : "r"(to.data()) : "memory");
      },
      batch_for(bytes, 1e-8, 1e-10), 7);
}

std::string human(int64_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Collectives: ranks as threads, as processes on shm and gloo, and memcpy, in one run");
  std::vector<int64_t> rank_counts{2, 4, 8};
  std::vector<int64_t> sizes = kSizes;
  bool no_gloo = false;
  std::string process_backend;
  app.add_option("--ranks", rank_counts, "How many ranks")->delimiter(',')->check(CLI::Range(1, 64));
  app.add_option("--sizes", sizes, "Bytes of the larger of input and output")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{4}, int64_t{1} << 32));
  app.add_flag("--no-gloo", no_gloo, "Leave the gloo processes out");
  app.add_option("--process-rank", process_backend, "Be one of the processes of this backend")->group("");
  CLI11_PARSE(app, argc, argv);
  std::string sizes_text;
  for (const int64_t size : sizes) sizes_text += (sizes_text.empty() ? "" : ",") + std::to_string(size);
  if (!process_backend.empty()) {
    process_rank(process_backend, sizes);
    return 0;
  }

  std::map<int64_t, double> copies;
  for (const int64_t bytes : sizes) copies[bytes] = measure_memcpy(bytes);
  for (const int64_t ranks : rank_counts) {
    std::cerr << "measuring " << ranks << " ranks..." << std::endl;
    const Times threads = measure_threads(ranks, sizes);
    const std::vector<std::string> arguments{"--sizes", sizes_text};
    const Times shm = measure_processes("shm", ranks, arguments);
    const Times gloo = no_gloo ? Times{} : measure_processes("gloo", ranks, arguments);
    const Times checked = no_gloo ? Times{} : measure_processes("gloo", ranks, arguments, true);
    std::printf("\n%lld ranks on %ld cores%18s%12s%12s%12s%16s%14s%14s%14s%14s\n",
                static_cast<long long>(ranks), sysconf(_SC_NPROCESSORS_ONLN), "threads", "shm", "gloo",
                "memcpy", "threads/memcpy", "shm/memcpy", "gloo/threads", "gloo/shm", "checked/gloo");
    std::vector<double> ahead;  // of gloo
    for (const auto& operation : kOperations) {
      for (const int64_t bytes : sizes) {
        const std::pair key{operation, bytes};
        const double t = threads.at(key), s = shm.at(key), copy = copies.at(bytes);
        std::printf("  %-16s%8s%9.2f us%9.2f us", operation.c_str(), human(bytes).c_str(), t * 1e6, s * 1e6);
        if (no_gloo) {
          std::printf("%12s", "-");
        } else {
          std::printf("%9.1f us", gloo.at(key) * 1e6);
        }
        std::printf("%9.2f us%15.2fx%13.2fx", copy * 1e6, t / copy, s / copy);
        if (!no_gloo) {
          ahead.push_back(gloo.at(key) / s);
          std::printf("%13.1fx%13.1fx%13.2fx", gloo.at(key) / t, ahead.back(),
                      checked.at(key) / gloo.at(key));
        }
        std::printf("\n");
      }
    }
    if (!ahead.empty()) std::printf("  shm is %.1fx ahead of gloo at the median\n", median_of(ahead));
    std::fflush(stdout);
  }
  return 0;
}
