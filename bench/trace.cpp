// What a Trace costs: an operator call on a distributed tensor with one alive, against the same call without, on a mesh of
// the fake backend, so that nothing is waited for; and a block of a model, where operators compute something.

#include <tessera/debug/trace.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace {

using namespace tessera;

/// Of this thread, so that other programs that want the cores disturb little.
double cpu_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double microseconds(const std::function<void()>& call, int count) {
  const double start = cpu_microseconds();
  for (int i = 0; i < count; ++i) call();
  return (cpu_microseconds() - start) / count;
}

/// What a call takes without a Trace, and with one: the least of batches that take turns, as disturbances only add.
std::pair<double, double> without_and_with(const std::function<void()>& call, int count) {
  double without = 1e30, with = 1e30;
  for (int batch = 0; batch < 15; ++batch) {
    without = std::min(without, microseconds(call, count));
    const Trace trace;
    with = std::min(with, microseconds(call, count));
  }
  return {without, with};
}

DeviceMesh fake_mesh() {
  WorldOptions options;
  options.size = 4;
  options.backend = "fake";
  return DeviceMesh(at::kCPU, {4}, {0, 1, 2, 3}, {}, std::make_shared<World>(std::move(options)));
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const DeviceMesh mesh = fake_mesh();
  const auto tensor = [&](int64_t rows, int64_t columns, const Placement& placement) -> at::Tensor {
    const Spec spec(mesh, {placement}, {rows, columns});
    return DTensor::from_local(at::ones(spec.local_shape()), mesh, {placement});
  };
  const at::Tensor x = tensor(32, 8, Shard(0)), w = tensor(8, 8, Replicate());
  const at::Tensor wide = tensor(512, 256, Shard(0)), up = tensor(256, 1024, Replicate()),
                   down = tensor(1024, 256, Replicate());
  struct Case {
    std::string name;
    std::function<void()> call;
    int count;
  };
  const std::vector<Case> cases{
      {"add of 8 x 8", [&] { at::add(x, x); }, 2000},
      {"mm of 8 x 8", [&] { at::mm(x, w); }, 2000},
      {"redistribute to replicas", [&] { DTensor(x).redistribute({Replicate()}); }, 500},
      {"two layers of 128 x 256 x 1024", [&] { at::mm(at::relu(at::mm(wide, up)), down); }, 10},
  };
  std::printf("%-32s %12s %12s %12s %8s\n", "", "without, us", "with, us", "more, us", "ratio");
  for (const Case& each : cases) {
    const auto [without, with] = without_and_with(each.call, each.count);
    std::printf("%-32s %12.2f %12.2f %12.2f %8.3f\n", each.name.c_str(), without, with, with - without,
                with / without);
  }
}
