// What an operator call costs on a distributed tensor beyond the same call on its local tensor, on meshes of
// the fake backend, so that nothing but dispatch is measured. `--torch FILE` adds the costs of PyTorch's own
// DTensor, as dispatch.py wrote them. `--only add --calls 1000 --on 1-d` makes these calls and nothing else, for a
// profiler (instructions.py).

#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

namespace {

std::atomic<int64_t> allocations{0};

}  // namespace

/// Counted, to show what a call allocates.
void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace tessera;
using Tensors = std::vector<at::Tensor>;

struct Operation {
  std::string name;
  std::function<void(const Tensors&)> call;
};

/// On x, y and w, all 8 x 8 on each rank; x and y sharded along dim 0, w replicated.
std::vector<Operation> operations() {
  return {
      {"add", [](const Tensors& t) { at::add(t[0], t[1]); }},
      {"mul scalar", [](const Tensors& t) { at::mul(t[0], 2); }},
      {"relu", [](const Tensors& t) { at::relu(t[0]); }},
      {"mm", [](const Tensors& t) { at::mm(t[0], t[2]); }},
      {"addmm", [](const Tensors& t) { at::addmm(t[1], t[0], t[2]); }},
      {"t", [](const Tensors& t) { t[0].t(); }},
      {"view", [](const Tensors& t) { t[0].view(t[0].sizes()); }},
      {"sum", [](const Tensors& t) { t[0].sum(); }},
      {"sum dim", [](const Tensors& t) { t[0].sum(1); }},
      {"detach", [](const Tensors& t) { t[0].detach(); }},
      {"clone", [](const Tensors& t) { t[0].clone(); }},
      {"copy_", [](const Tensors& t) { const_cast<at::Tensor&>(t[1]).copy_(t[0]); }},
      {"add_", [](const Tensors& t) { const_cast<at::Tensor&>(t[1]).add_(t[0]); }},
      {"empty_like", [](const Tensors& t) { at::empty_like(t[0]); }},
  };
}

/// Microseconds that each of the calls takes: the least of several batches, as disturbances only add. They take turns, so that a
/// machine that changes its speed does so for all of them.
std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, int count = 2000) {
  std::vector<double> least(calls.size(), 1e30);
  for (const auto& call : calls) {
    for (int i = 0; i < 200; ++i) call();
  }
  for (int batch = 0; batch < 15; ++batch) {
    for (size_t each = 0; each < calls.size(); ++each) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) calls[each]();
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
      least[each] = std::min(least[each], took.count() / count);
    }
  }
  return least;
}

double allocations_of(const std::function<void()>& call) {
  constexpr int kCalls = 100;
  const int64_t before = allocations;
  for (int i = 0; i < kCalls; ++i) call();
  return static_cast<double>(allocations - before) / kCalls;
}

void linear_relu(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  at::relu(at::linear(x, w, b)).sum().backward();
}

Tensors plain_tensors() { return {at::ones({8, 8}), at::ones({8, 8}), at::ones({8, 8})}; }

struct Distributed {
  explicit Distributed(std::vector<int64_t> shape)
      : world(std::make_shared<World>(
            WorldOptions{.rank = 0, .size = c10::multiply_integers(shape), .backend = "fake"})),
        mesh(init_device_mesh(at::kCPU, shape, {}, world)),
        sharded(shape.size(), Shard(0)),
        same(shape.size(), Replicate()) {}

  Tensors tensors() const {
    return {DTensor::from_local(at::ones({8, 8}), mesh, sharded),
            DTensor::from_local(at::ones({8, 8}), mesh, sharded),
            DTensor::from_local(at::ones({8, 8}), mesh, same)};
  }
  std::shared_ptr<World> world;
  DeviceMesh mesh;
  Placements sharded, same;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Returns whether there is such an operator.
bool make_calls(const std::string& name, int count, bool plain) {
  const at::NoGradGuard no_grad;
  const Distributed distributed({2});
  const Tensors tensors = plain ? plain_tensors() : distributed.tensors();
  for (const Operation& operation : operations()) {
    if (operation.name != name) continue;
    for (int i = 0; i < count; ++i) operation.call(tensors);
    return true;
  }
  std::fprintf(stderr, "There is no operator \"%s\".\n", name.c_str());
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What dispatch costs: plain libtorch, Tessera, and PyTorch's DTensor if its costs are given");
  std::string torch_file;
  app.add_option("--torch", torch_file, "What dispatch.py wrote")->check(CLI::ExistingFile);
  std::string only, on = "1-d";
  int calls = 1000;
  app.add_option("--only", only, "Measure nothing: just make calls of this operator");
  app.add_option("--calls", calls, "How many, with --only")->needs("--only");
  app.add_option("--on", on, "On what, with --only")->needs("--only")->check(CLI::IsMember({"plain", "1-d"}));
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  if (!only.empty()) return make_calls(only, calls, on == "plain") ? 0 : 1;
  std::map<std::string, double> torch;  // overheads
  std::ifstream lines(torch_file);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) torch[line.substr(0, tab)] = std::stod(line.substr(tab + 1));
  }

  const std::vector<Distributed> meshes{Distributed({2}), Distributed({2, 2}), Distributed({2, 2, 2})};
  std::printf(
      "Dispatch: overhead in us over the plain operator (8 x 8 on each rank), and allocations: of a new "
      "tensor its impl and\n"
      "version counter, of any call the stack into which libtorch boxes the arguments\n");
  std::printf("%-20s%10s%10s%10s%10s%16s%10s%14s\n", "", "plain", "1-d", "2-d", "3-d", "torch DTensor",
              "ratio", "allocations");
  std::vector<double> overheads, ratios;
  auto row = [&](const std::string& name, double plain, const std::vector<double>& costs, double allocated) {
    std::printf("%-20s%10.2f", name.c_str(), plain);
    for (const double cost : costs) std::printf("%10.2f", cost - plain);
    if (const auto found = torch.find(name); found != torch.end()) {
      std::printf("%16.1f%9.0fx", found->second, found->second / (costs[0] - plain));
    }
    std::printf("%+14.0f\n", allocated);
  };
  {
    const at::NoGradGuard no_grad;
    for (const Operation& operation : operations()) {
      std::vector<std::function<void()>> calls;
      const auto add = [&](const Tensors& tensors) {
        calls.emplace_back([&operation, tensors] { operation.call(tensors); });
      };
      add(plain_tensors());
      for (const Distributed& distributed : meshes) add(distributed.tensors());
      std::vector<double> costs = microseconds(calls);
      const double base = costs[0];
      costs.erase(costs.begin());
      for (const double cost : costs) overheads.push_back(cost - base);
      row(operation.name, base, costs, allocations_of(calls.back()) - allocations_of(calls.front()));
    }
  }
  std::printf("%-20s%10s%10.2f us, largest %.2f us\n", "median overhead", "", median(overheads),
              *std::max_element(overheads.begin(), overheads.end()));

  std::vector<std::function<void()>> steps;
  const auto add = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
    w.requires_grad_();
    b.requires_grad_();
    steps.emplace_back([x, w, b] { linear_relu(x, w, b); });
  };
  add(at::ones({8, 8}), at::ones({8, 8}), at::ones({8}));
  for (const Distributed& distributed : meshes) {
    // Sharded along the features of the result, so that nothing has to be moved.
    const Placements columns(distributed.mesh.ndim(), Shard(0));
    add(DTensor::from_local(at::ones({8, 8}), distributed.mesh, distributed.same),
        DTensor::from_local(at::ones({8, 8}), distributed.mesh, columns).detach(),
        DTensor::from_local(at::ones({8}), distributed.mesh, columns).detach());
  }
  std::vector<double> costs = microseconds(steps, 300);
  const double base = costs[0];
  costs.erase(costs.begin());
  row("linear+relu fw+bw", base, costs, 0);
  return 0;
}
