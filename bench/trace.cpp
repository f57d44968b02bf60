// What a Trace costs: an operator call on a distributed tensor with one alive, against the same call without, on a mesh of
// the fake backend, so that nothing is waited for; and a block of a model, where operators compute something.

#include <tessera/debug/trace.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

namespace {

using namespace tessera;

/// Microseconds a call takes: the least of several batches, as disturbances only add.
double microseconds(const std::function<void()>& call, int count) {
  for (int i = 0; i < count / 10 + 1; ++i) call();
  double least = 1e30;
  for (int batch = 0; batch < 9; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) call();
    const auto spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, std::chrono::duration<double, std::micro>(spent).count() / count);
  }
  return least;
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
    const double without = microseconds(each.call, each.count);
    double with = 0;
    {
      const Trace trace;
      with = microseconds(each.call, each.count);
    }
    std::printf("%-32s %12.2f %12.2f %12.2f %8.3f\n", each.name.c_str(), without, with, with - without,
                with / without);
  }
}
