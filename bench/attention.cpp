// Causal attention, forward and backward, over sequences that are sharded: the three methods beside one device,
// in time, in bytes that a rank sends, and in memory that a rank needs.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/context_parallel.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "support/peak_memory.h"

namespace {

using namespace tessera;

constexpr int64_t kRanks = 4, kHeads = 8, kSize = 64;

struct Measured {
  double milliseconds = 0;
  double sent = 0;  // MiB
  double peak = 0;  // MiB, beyond queries, keys and values
};

std::vector<at::Tensor> inputs(int64_t length) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < 4; ++i) result.push_back(at::randn({1, kHeads, length, kSize}));
  return result;
}

/// The least of some runs; on ranks, all of them run it together.
Measured measure(const std::vector<at::Tensor>& x) {
  Measured best{1e9};
  for (int i = 0; i < 3; ++i) {
    for (size_t t = 0; t < 3; ++t) x[t].mutable_grad().reset();
    const support::PeakMemory memory;
    const CommDebugMode counts;
    const auto begin = std::chrono::steady_clock::now();
    at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, /*is_causal=*/true).backward(x[3]);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    double sent = 0;
    for (const auto& [name, count] : counts.get_comm_counts()) {
      if (name != "recv") sent += static_cast<double>(count.bytes);
    }
    best = {std::min(best.milliseconds, took.count()), sent / (1 << 20),
            static_cast<double>(memory.peak()) / (1 << 20)};
  }
  return best;
}

Measured on_one_device(int64_t length) {
  auto x = inputs(length);
  for (size_t t = 0; t < 3; ++t) x[t].requires_grad_();
  return measure(x);
}

Measured on_ranks(int64_t length, const ContextParallelOptions& options) {
  Measured result;
  run(kRanks, [&] {
    const auto mesh = init_device_mesh(at::kCPU, {kRanks});
    std::vector<at::Tensor> x;
    for (int i = 0; i < 4; ++i) x.push_back(randn({1, kHeads, length, kSize}, mesh, {Shard(2)}));
    for (size_t t = 0; t < 3; ++t) x[t].requires_grad_();
    const ContextParallelGuard guard(options);
    const Measured mine = measure(x);
    if (mesh.get_rank() == kRanks - 1) result = mine;
  });
  return result;
}

}  // namespace

int main() {
  std::printf(
      "causal attention, forward and backward, %d heads of %d, on %d ranks that are threads\n"
      "%8s  %-18s %10s %14s %12s %12s\n",
      int(kHeads), int(kSize), int(kRanks), "length", "method", "ms", "of one device", "sent, MiB",
      "peak, MiB");
  const auto print = [](int64_t length, const std::string& name, const Measured& measured, double of) {
    std::printf("%8d  %-18s %10.1f %14.2f %12.1f %12.1f\n", int(length), name.c_str(), measured.milliseconds,
                measured.milliseconds / of, measured.sent, measured.peak);
    std::fflush(stdout);
  };
  for (const int64_t length : {1024, 2048, 4096}) {
    const Measured alone = on_one_device(length);
    print(length, "one device", alone, alone.milliseconds);
    for (const bool zigzag : {false, true}) {
      for (const ContextMethod method :
           {ContextMethod::allgather, ContextMethod::ulysses, ContextMethod::ring})
        print(length, std::string(name_of(method)) + (zigzag ? ", zig-zag" : ""),
              on_ranks(length, {method, zigzag}), alone.milliseconds);
    }
  }
}
