// Collectives from 4 B to 64 MB: ranks as threads against gloo processes and against memcpy of the same
// bytes, measured in one run.

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

void gloo_rank(const std::vector<int64_t>& sizes) {
  launch(1, [&] {
    const auto world = current_world();
    for (const auto& operation : kOperations) {
      for (const int64_t bytes : sizes) {
        const double t =
            measure(operation, bytes, batch_for(bytes, 2e-4 * world->size(), 1e-9 * world->size()), 5,
                    world->group());
        if (world->rank() == 0) std::cout << operation << ' ' << bytes << ' ' << t << '\n';
      }
    }
  });
}

Times measure_gloo(int64_t ranks, const std::vector<std::string>& arguments, bool checked) {
  std::vector<std::string> command{support::this_program(), "--gloo-rank"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  support::SpawnOptions options;
  options.environment = {{"TESSERA_CHECK_COLLECTIVES", checked ? "1" : "0"}};
  const auto results = support::spawn(ranks, command, options);
  for (const auto& result : results) {
    if (!result.ok()) throw std::runtime_error("a gloo process failed:\n" + result.output);
  }
  Times times;
  std::istringstream lines(results[0].output);
  std::string operation;
  int64_t bytes = 0;
  double t = 0;
  while (lines >> operation >> bytes >> t) times[{operation, bytes}] = t;
  return times;
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
  CLI::App app("Collectives: ranks as threads, gloo processes and memcpy, in one run");
  std::vector<int64_t> rank_counts{2, 4, 8};
  std::vector<int64_t> sizes = kSizes;
  bool gloo_child = false, no_gloo = false;
  app.add_option("--ranks", rank_counts, "How many ranks")->delimiter(',')->check(CLI::Range(1, 64));
  app.add_option("--sizes", sizes, "Bytes of the larger of input and output")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{4}, int64_t{1} << 32));
  app.add_flag("--no-gloo", no_gloo, "Leave the gloo processes out");
  app.add_flag("--gloo-rank", gloo_child, "Be one of the gloo processes")->group("");
  CLI11_PARSE(app, argc, argv);
  std::string sizes_text;
  for (const int64_t size : sizes) sizes_text += (sizes_text.empty() ? "" : ",") + std::to_string(size);
  if (gloo_child) {
    gloo_rank(sizes);
    return 0;
  }

  std::map<int64_t, double> copies;
  for (const int64_t bytes : sizes) copies[bytes] = measure_memcpy(bytes);
  for (const int64_t ranks : rank_counts) {
    std::cerr << "measuring " << ranks << " ranks..." << std::endl;
    const Times threads = measure_threads(ranks, sizes);
    const std::vector<std::string> arguments{"--sizes", sizes_text};
    const Times gloo = no_gloo ? Times{} : measure_gloo(ranks, arguments, false);
    const Times checked = no_gloo ? Times{} : measure_gloo(ranks, arguments, true);
    std::printf("\n%lld ranks on %ld cores%18s%12s%12s%16s%16s%16s\n", static_cast<long long>(ranks),
                sysconf(_SC_NPROCESSORS_ONLN), "threads", "gloo", "memcpy", "threads/memcpy", "gloo/threads",
                "checked/gloo");
    for (const auto& operation : kOperations) {
      for (const int64_t bytes : sizes) {
        const double t = threads.at({operation, bytes}), copy = copies.at(bytes);
        std::printf("  %-16s%8s%9.2f us", operation.c_str(), human(bytes).c_str(), t * 1e6);
        if (no_gloo) {
          std::printf("%12s", "-");
        } else {
          std::printf("%9.1f us", gloo.at({operation, bytes}) * 1e6);
        }
        std::printf("%9.2f us%15.2fx", copy * 1e6, t / copy);
        if (!no_gloo)
          std::printf("%15.1fx%15.2fx", gloo.at({operation, bytes}) / t,
                      checked.at({operation, bytes}) / gloo.at({operation, bytes}));
        std::printf("\n");
      }
    }
    std::fflush(stdout);
  }
  return 0;
}
