// What the bookkeeping costs: chunk arithmetic, specs, meshes, plans and redistribution without its transport.

#include <tessera/dtensor/dtensor.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/plan_cache.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

namespace {

using namespace tessera;

DeviceMesh mesh_of(at::IntArrayRef shape) {
  const int64_t size = c10::multiply_integers(shape);
  auto world = std::make_shared<World>(WorldOptions{.rank = size / 2, .size = size, .backend = "fake"});
  return init_device_mesh(at::kCPU, shape, {}, std::move(world));
}

void local_shape_of_3d_mesh(benchmark::State& state) {
  const auto placements = {Shard(0), Shard(0), Shard(1)};
  for (auto _ : state)
    benchmark::DoNotOptimize(local_shape({4097, 1023}, {2, 4, 8}, placements, {}, {1, 3, 7}));
}
BENCHMARK(local_shape_of_3d_mesh);

void find_an_existing_spec(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({2, 4});
  const Spec kept(mesh, {Shard(0), Replicate()}, {4096, 1024});
  for (auto _ : state) benchmark::DoNotOptimize(Spec(mesh, {Shard(0), Replicate()}, {4096, 1024}));
}
BENCHMARK(find_an_existing_spec);

void make_and_drop_a_new_spec(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({2, 4});
  int64_t size = 0;
  for (auto _ : state) benchmark::DoNotOptimize(Spec(mesh, {Shard(0), Replicate()}, {++size, 1024}));
}
BENCHMARK(make_and_drop_a_new_spec);

void compare_specs(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({2, 4});
  const Spec a(mesh, {Shard(0), Replicate()}, {4096, 1024}), b(mesh, {Shard(1), Replicate()}, {4096, 1024});
  for (auto _ : state) benchmark::DoNotOptimize(a == b);
}
BENCHMARK(compare_specs);

void make_a_mesh_of_100000_ranks(benchmark::State& state) {
  auto world = std::make_shared<World>(WorldOptions{.rank = 54321, .size = 100000, .backend = "fake"});
  for (auto _ : state)
    benchmark::DoNotOptimize(init_device_mesh(at::kCPU, {100, 50, 20}, {"pp", "dp", "tp"}, world));
}
BENCHMARK(make_a_mesh_of_100000_ranks);

/// A thousand pairs of random layouts in turn. Nothing is remembered between plans: each is a cold one.
void plan_on_a_5d_mesh_of_100000_ranks(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({10, 10, 10, 10, 10});
  const Placements choices{Replicate(), Shard(0), Shard(1), Shard(2), Partial(), StridedShard(0, 2)};
  std::mt19937 random(1);
  std::vector<Spec> specs;
  for (int i = 0; i < 2000; ++i) {
    Placements placements;
    for (int j = 0; j < 5; ++j) placements.push_back(choices[random() % choices.size()]);
    specs.emplace_back(mesh, placements, c10::IntArrayRef({100003, 70000, 512}));
  }
  size_t next = 0;
  double longest = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    benchmark::DoNotOptimize(plan(specs[next], specs[next + 1]));
    longest = std::max(
        longest, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    next = (next + 2) % specs.size();
  }
  state.counters["longest_us"] = longest;
}
BENCHMARK(plan_on_a_5d_mesh_of_100000_ranks)->Iterations(1000);

void plan_on_a_3d_mesh(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({2, 4, 8});
  const Spec from(mesh, {Shard(0), Partial(), Shard(1)}, {4096, 1024});
  const Spec to(mesh, {Replicate(), Shard(0), Shard(0)}, {4096, 1024});
  for (auto _ : state) benchmark::DoNotOptimize(plan(from, to));
}
BENCHMARK(plan_on_a_3d_mesh);

void take_that_plan_from_the_cache(benchmark::State& state) {
  const DeviceMesh mesh = mesh_of({2, 4, 8});
  const Spec from(mesh, {Shard(0), Partial(), Shard(1)}, {4096, 1024});
  const Spec to(mesh, {Replicate(), Shard(0), Shard(0)}, {4096, 1024});
  for (auto _ : state) benchmark::DoNotOptimize(cached_plan(from, to));
}
BENCHMARK(take_that_plan_from_the_cache);

/// DTensor::redistribute of a small tensor, whose collectives move nothing.
void redistribute_on(benchmark::State& state, at::IntArrayRef mesh_shape, const Placements& from,
                     const Placements& to) {
  const DeviceMesh mesh = mesh_of(mesh_shape);
  const Spec spec(mesh, from, {64, 64});
  DTensor::FromLocalOptions options;
  options.shape = {64, 64};
  const DTensor x = DTensor::from_local(at::zeros(spec.local_shape()), mesh, from, options);
  for (auto _ : state) benchmark::DoNotOptimize(x.redistribute(to));
}
BENCHMARK_CAPTURE(redistribute_on, slice_1d, {4}, {Replicate()}, {Shard(0)});
BENCHMARK_CAPTURE(redistribute_on, all_gather_1d, {4}, {Shard(0)}, {Replicate()});
BENCHMARK_CAPTURE(redistribute_on, all_to_all_1d, {4}, {Shard(0)}, {Shard(1)});
BENCHMARK_CAPTURE(redistribute_on, reduce_scatter_2d, {2, 2}, {Shard(0), Partial()}, {Shard(0), Shard(1)});
BENCHMARK_CAPTURE(redistribute_on, mixed_3d, {2, 2, 2}, {Shard(0), Partial(), Shard(1)},
                  {Replicate(), Shard(0), Shard(0)});

}  // namespace

BENCHMARK_MAIN();
