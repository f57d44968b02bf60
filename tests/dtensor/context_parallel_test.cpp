// Attention over a sharded sequence against one device: values, gradients, bytes and memory.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/context_parallel.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/random/generator.h>

#include <array>
#include <random>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "support/peak_memory.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using namespace testing;
using enum ContextMethod;

constexpr std::array kMethods{allgather, ulysses, ring};

struct Sizes {
  int64_t batch = 2, heads = 4, groups = 4, queries = 8, keys = 8, size = 8, value_size = 8;
};

struct Case {
  Sizes sizes = {};
  std::vector<int64_t> mesh = {2};
  Placements placements = {Shard(2)};
  bool causal = false;
  std::optional<double> scale = {};
  at::ScalarType dtype = at::kFloat;
  std::optional<ContextParallelOptions> options = {};

  std::string str() const {
    return c10::str(options ? name_of(options->method) : "cheapest",
                    options && options->zigzag ? " zigzag" : "", " ", dtype, causal ? " causal" : "", " (",
                    sizes.batch, ", ", sizes.heads, "/", sizes.groups, ", ", sizes.queries, "x", sizes.keys,
                    ", ", sizes.size, "/", sizes.value_size, ") on ", c10::IntArrayRef(mesh), " ",
                    c10::ArrayRef<Placement>(placements));
  }
};

at::Tensor drawn(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kDouble).to(dtype);
}

/// Queries, keys, values and the gradient of the output; the same on every rank.
Tensors inputs_of(const Sizes& s, at::ScalarType dtype, uint64_t seed = 1) {
  return {drawn({s.batch, s.heads, s.queries, s.size}, seed, dtype),
          drawn({s.batch, s.groups, s.keys, s.size}, seed + 1, dtype),
          drawn({s.batch, s.groups, s.keys, s.value_size}, seed + 2, dtype),
          drawn({s.batch, s.heads, s.queries, s.value_size}, seed + 3, dtype)};
}

struct Guarded {
  std::optional<ContextParallelGuard> guard;
  explicit Guarded(const std::optional<ContextParallelOptions>& options) {
    if (options) guard.emplace(*options);
  }
};

void expect_near(const at::Tensor& actual, const at::Tensor& expected, at::ScalarType dtype,
                 const std::string& what) {
  const double tolerance = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 2e-5 : 5e-2;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const at::Tensor a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  EXPECT_TRUE(at::allclose(a, e, tolerance, tolerance))
      << what << ": largest difference " << (a - e).abs().max().item<double>();
}

/// On each rank: values and gradients are those of one device, and the output is placed as the queries are.
void expect_equal(const Case& test) {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, test.mesh);
  const Tensors plain = inputs_of(test.sizes, test.dtype);
  const bool gqa = test.sizes.heads != test.sizes.groups;
  Tensors leaves(3);
  for (size_t i = 0; i < 3; ++i) leaves[i] = plain[i].clone().requires_grad_();
  const at::Tensor expected = at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {}, 0.0,
                                                               test.causal, test.scale, gqa);
  expected.backward(plain[3]);

  int64_t shards = 1;
  for (size_t m = 0; m < test.mesh.size(); ++m) {
    if (test.placements[m].is_shard_like(2)) shards *= test.mesh[m];
  }
  const bool zigzag = test.options && test.options->zigzag;
  const auto ordered = [&](const at::Tensor& x) { return zigzag ? to_zigzag(x, 2, shards) : x; };
  Tensors distributed;
  for (const at::Tensor& each : plain)
    distributed.push_back(distribute_tensor(ordered(each), mesh, test.placements, std::nullopt));
  for (size_t i = 0; i < 3; ++i) distributed[i].requires_grad_();
  at::Tensor actual;
  {
    const Guarded guarded(test.options);
    actual = at::scaled_dot_product_attention(distributed[0], distributed[1], distributed[2], {}, 0.0,
                                              test.causal, test.scale, gqa);
  }
  for (size_t m = 0; m < test.mesh.size(); ++m) {
    if (test.placements[m].is_shard_like(2))
      EXPECT_EQ(DTensor(actual).placements()[m], test.placements[m]) << test.str();
  }
  actual.backward(distributed[3]);
  const auto whole = [&](const at::Tensor& x) {
    const at::Tensor full = DTensor(x).full_tensor();
    return zigzag ? from_zigzag(full, 2, shards) : full;
  };
  expect_near(whole(actual.detach()), expected.detach(), test.dtype, test.str());
  for (size_t i = 0; i < 3; ++i)
    expect_near(whole(distributed[i].grad()), leaves[i].grad(), test.dtype,
                c10::str("gradient ", i, " of ", test.str()));
}

int64_t ranks_of(const std::vector<int64_t>& mesh) { return c10::multiply_integers(mesh); }

TEST(ContextParallel, IsThatOfOneDevice) {
  for (const int64_t ranks : {2, 4}) {
    run(ranks, [&] {
      for (const ContextMethod method : kMethods) {
        for (const bool causal : {false, true}) {
          for (const bool zigzag : {false, true}) {
            for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
              expect_equal(
                  {.mesh = {ranks}, .causal = causal, .dtype = dtype, .options = {{method, zigzag}}});
          }
        }
      }
    });
  }
}

TEST(ContextParallel, TakesUnevenLengthsAndEmptyShards) {
  for (const int64_t ranks : {2, 3, 4}) {
    run(ranks, [&] {
      for (const ContextMethod method : kMethods) {
        for (const bool zigzag : {false, true}) {
          for (const int64_t length : {1, 2, 5, 7, 9, 13}) {
            expect_equal({.sizes = {.queries = length, .keys = length},
                          .mesh = {ranks},
                          .causal = true,
                          .options = {{method, zigzag}}});
            expect_equal({.sizes = {.queries = length, .keys = 14 - length},
                          .mesh = {ranks},
                          .causal = length % 2 == 1,
                          .options = {{method, zigzag}}});
          }
        }
      }
    });
  }
}

TEST(ContextParallel, SharesKeysAmongHeads) {
  run(4, [] {
    for (const ContextMethod method : kMethods) {
      for (const bool causal : {false, true})
        expect_equal({.sizes = {.heads = 8, .groups = 4, .queries = 10, .keys = 10},
                      .mesh = {4},
                      .causal = causal,
                      .scale = 0.3,
                      .options = {{method, causal}}});
    }
    expect_equal({.sizes = {.heads = 6, .groups = 2}, .mesh = {4}, .causal = true, .options = {{ring}}});
    expect_equal({.sizes = {.heads = 6, .groups = 1}, .mesh = {4}, .causal = true, .options = {{allgather}}});
  });
}

TEST(ContextParallel, GoesWithHeadsShardedOnAnotherMeshDim) {
  run(4, [] {
    for (const ContextMethod method : kMethods) {
      for (const bool zigzag : {false, true}) {
        for (const Placements& placements : std::vector<Placements>{{Shard(2), Shard(1)},
                                                                    {Shard(1), Shard(2)},
                                                                    {Shard(0), Shard(2)},
                                                                    {Shard(2), Replicate()},
                                                                    {Shard(2), Shard(2)}})
          expect_equal({.sizes = {.heads = 8, .groups = 4, .queries = 11, .keys = 11},
                        .mesh = {2, 2},
                        .placements = placements,
                        .causal = true,
                        .options = {{method, zigzag}}});
      }
    }
  });
}

TEST(ContextParallel, TakesValuesOfAnotherSize) {
  run(2, [] {
    for (const ContextMethod method : kMethods)
      expect_equal(
          {.sizes = {.queries = 7, .keys = 7, .value_size = 5}, .causal = true, .options = {{method}}});
  });
}

TEST(ContextParallel, RandomCases) {
  std::mt19937 draw(20);
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(draw() % limit); };
  const std::vector<std::pair<std::vector<int64_t>, std::vector<Placements>>> meshes{
      {{2}, {{Shard(2)}, {StridedShard(2, 2)}}},
      {{3}, {{Shard(2)}}},
      {{4}, {{Shard(2)}, {StridedShard(2, 2)}}},
      {{2, 2},
       {{Shard(2), Shard(1)},
        {Shard(1), Shard(2)},
        {Shard(0), Shard(2)},
        {Shard(2), Shard(2)},
        {Shard(2), Shard(3)}}}};
  for (int i = 0; i < 60; ++i) {
    const auto& [mesh, placements] = meshes[below(4)];
    Case test{.mesh = mesh, .placements = placements[below(static_cast<int64_t>(placements.size()))]};
    const int64_t groups = 1 + below(6);
    test.sizes = {.batch = 1 + below(3),
                  .heads = groups * (1 + below(3)),
                  .groups = groups,
                  .queries = 1 + below(20),
                  .size = 4 + 4 * below(3)};
    test.sizes.keys = below(2) ? test.sizes.queries : 1 + below(20);
    test.sizes.value_size = below(5) ? test.sizes.size : 3;
    test.causal = below(2);
    if (below(2)) test.scale = 0.1 + 0.1 * static_cast<double>(below(9));
    test.dtype = below(2) ? at::kFloat : at::kDouble;
    const int64_t kind = below(3);
    const bool strided = test.placements[0].is_strided_shard();
    if (kind > 0) test.options = {{kind == 1 ? ring : allgather, below(2) == 1 && !strided}};
    run(ranks_of(mesh), [&] { expect_equal(test); });
  }
}

RANK_BODY(attention_on_processes) {
  launch(1, [] {
    const auto ranks = current_world()->size();
    for (const ContextMethod method : kMethods) {
      for (const bool causal : {false, true})
        expect_equal({.sizes = {.queries = 13, .keys = 13},
                      .mesh = {ranks},
                      .causal = causal,
                      .options = {{method, causal}}});
    }
  });
}
TEST(ContextParallel, OnProcesses) {
  for (const int64_t ranks : {2, 3}) testing::expect_ok_over_processes("attention_on_processes", ranks);
}

// ---- other options of attention

TEST(ContextParallel, TakesMasksAndDropout) {
  for (const ContextMethod method : {allgather, ulysses}) {
    run(2, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
      const Tensors plain = inputs_of({.queries = 6, .keys = 6}, at::kFloat);
      const at::Tensor mask = drawn({6, 6}, 9, at::kFloat);
      const auto attend = [&](const Tensors& x, double p) {
        return at::scaled_dot_product_attention(x[0], x[1], x[2], p == 0 ? std::optional(x[3]) : std::nullopt,
                                                p, p != 0);
      };
      const auto distributed = [&](const Placement& placement, const Placement& of_mask) {
        Tensors result;
        for (size_t i = 0; i < 3; ++i)
          result.push_back(distribute_tensor(plain[i], mesh, {placement}, std::nullopt).requires_grad_());
        result.push_back(distribute_tensor(mask, mesh, {of_mask}, std::nullopt));
        return result;
      };
      const at::Tensor expected = attend({plain[0], plain[1], plain[2], mask}, 0);
      for (const Placement& of_mask : {Placement(Replicate()), Shard(0)}) {
        const ContextParallelGuard guard({method});
        const Tensors x = distributed(Shard(2), of_mask);
        expect_close(DTensor(attend(x, 0)).full_tensor().detach(), expected, "mask");
      }
      // The same numbers are dropped as where nothing is sharded.
      random::manual_seed(5);
      const Tensors whole = distributed(Replicate(), Replicate());
      const at::Tensor dropped = attend(whole, 0.4);
      dropped.sum().backward();
      random::manual_seed(5);
      const ContextParallelGuard guard({method});
      const Tensors x = distributed(Shard(2), Replicate());
      const at::Tensor actual = attend(x, 0.4);
      actual.sum().backward();
      expect_close(DTensor(actual).full_tensor().detach(), DTensor(dropped).full_tensor().detach(),
                   "dropout");
      for (size_t i = 0; i < 3; ++i)
        expect_close(DTensor(x[i].grad()).full_tensor(), DTensor(whole[i].grad()).full_tensor(),
                     "gradient with dropout");
    });
  }
}

/// Of numbers and of bools, for all or for each sample, replicated or sharded with the queries; uneven lengths.
TEST(ContextParallel, MasksAreThoseOfOneDevice) {
  const auto attend = [](const Tensors& x, const at::Tensor& mask) {
    return at::scaled_dot_product_attention(x[0], x[1], x[2], mask);
  };
  for (const int64_t ranks : {2, 3}) {
    run(ranks, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks});
      for (const int64_t length : {6, 7}) {
        const Tensors plain = inputs_of({.queries = length, .keys = length}, at::kFloat);
        const at::Tensor seen =
            (drawn({2, 1, length, length}, 9, at::kFloat) > 0).logical_or(at::eye(length, at::kBool));
        const at::Tensor numbers = drawn({2, 1, length, length}, 8, at::kFloat);
        for (const at::Tensor& mask : {numbers[0][0], numbers, seen[0][0], seen, seen.slice(2, length - 1)}) {
          Tensors leaves(3);
          for (size_t i = 0; i < 3; ++i) leaves[i] = plain[i].clone().requires_grad_();
          const at::Tensor expected = attend(leaves, mask);
          expected.backward(plain[3]);
          std::vector<Placement> of_masks{Replicate()};
          if (mask.size(-2) == length) of_masks.emplace_back(Shard(mask.dim() - 2));
          for (const Placement& of_mask : of_masks) {
            for (const std::optional<ContextMethod> method :
                 {std::optional<ContextMethod>(), std::optional(allgather), std::optional(ulysses)}) {
              const std::string what =
                  c10::str(method ? name_of(*method) : "cheapest", " ", mask.scalar_type(), " ", mask.sizes(),
                           " ", of_mask, " on ", ranks);
              Tensors x;
              for (const at::Tensor& each : plain)
                x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt));
              for (size_t i = 0; i < 3; ++i) x[i].requires_grad_();
              at::Tensor actual;
              {
                const Guarded guarded(method ? std::optional(ContextParallelOptions{*method}) : std::nullopt);
                actual = attend(x, distribute_tensor(mask, mesh, {of_mask}, std::nullopt));
              }
              actual.backward(x[3]);
              expect_near(DTensor(actual.detach()).full_tensor(), expected.detach(), at::kFloat, what);
              for (size_t i = 0; i < 3; ++i)
                expect_near(DTensor(x[i].grad()).full_tensor(), leaves[i].grad(), at::kFloat,
                            c10::str("gradient ", i, " of ", what));
            }
          }
        }
      }
    });
  }
}

TEST(ContextParallel, SaysWhichMethodCanDoIt) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const auto inputs = [&](const Sizes& sizes) {
      Tensors result;
      for (const at::Tensor& each : inputs_of(sizes, at::kFloat))
        result.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt));
      return result;
    };
    const Tensors x = inputs({});
    {
      const ContextParallelGuard guard({ring});
      const at::Tensor mask = distribute_tensor(at::ones({8, 8}), mesh, {Replicate()}, std::nullopt);
      expect_error<c10::NotImplementedError>(
          [&] { at::scaled_dot_product_attention(x[0], x[1], x[2], mask); },
          {"attn_mask", "allgather", "ulysses"});
      expect_error<c10::NotImplementedError>(
          [&] { at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.1); },
          {"dropout_p is 0.1", "allgather", "ulysses"});
    }
    const ContextParallelGuard guard({ulysses, true});
    const Tensors few = inputs({.heads = 4, .groups = 2});
    expect_error<c10::ValueError>(
        [&] { at::scaled_dot_product_attention(few[0], few[1], few[2], {}, 0, false, {}, true); },
        {"4 heads of queries and 2", "4 ranks", "ring", "allgather"});
    expect_error<c10::NotImplementedError>(
        [&] { at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.1, true); },
        {"zig-zag", "dropout_p is 0.1"});
  });
  expect_error<c10::ValueError>([] { context_method("spiral"); }, {"\"spiral\"", "\"ring\""});
}

/// Where `is_causal` would go by the order of elements, in silence.
TEST(ContextParallel, RefusesCausalCallsThatDoNotKnowZigZag) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}), both = init_device_mesh(at::kCPU, {2, 1});
    const auto placed = [](const DeviceMesh& where, const Placements& placements, bool deep = true) {
      Tensors result;
      for (const at::Tensor& each : inputs_of({}, at::kFloat))
        result.push_back(distribute_tensor(deep ? each : each[0], where, placements, std::nullopt));
      return result;
    };
    const Tensors whole = placed(mesh, {Replicate()}), flat = placed(mesh, {Shard(1)}, /*deep=*/false),
                  sharded = placed(mesh, {Shard(2)}), one = placed(both, {Shard(1), Shard(2)});
    const auto attend = [](const Tensors& q, const Tensors& kv, bool causal) {
      return at::scaled_dot_product_attention(q[0], kv[1], kv[2], {}, 0, causal);
    };
    const ContextParallelGuard guard({allgather, true});
    const std::vector<std::pair<Tensors, Tensors>> refused{{whole, sharded}, {whole, whole}, {flat, flat}};
    for (const auto& [q, kv] : refused) {
      expect_error<c10::NotImplementedError>([&, &q = q, &kv = kv] { attend(q, kv, true); },
                                             {"zig-zag", "(batch, heads, length, size)"});
      EXPECT_NO_THROW(attend(q, kv, false));
    }
    EXPECT_NO_THROW(attend(sharded, whole, true));
    // Along one rank, zig-zag order is the order.
    const Tensors plain = inputs_of({}, at::kFloat);
    expect_close(DTensor(attend(one, one, true)).full_tensor(), attend(plain, plain, true), "on one rank");
  });
}

TEST(ContextParallel, HasNoSecondDerivative) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Tensors x;
    for (const at::Tensor& each : inputs_of({}, at::kFloat))
      x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt).requires_grad_());
    const ContextParallelGuard guard({ring});
    const at::Tensor y = at::scaled_dot_product_attention(x[0], x[1], x[2]).sum();
    expect_error<c10::NotImplementedError>([&] { y.backward({}, true, /*create_graph=*/true); },
                                           {"no second derivative"});
  });
}

// ---- what it costs

TEST(ContextParallel, CheapestByItself) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const auto counts = [&](const Sizes& sizes) {
      Tensors x;
      for (const at::Tensor& each : inputs_of(sizes, at::kFloat))
        x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt).requires_grad_());
      const CommDebugMode mode;
      const at::Tensor y =
          at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, true, {}, sizes.heads != sizes.groups);
      EXPECT_EQ(DTensor(y).placements(), Placements{Shard(2)});
      y.backward(x[3]);
      return mode.get_comm_counts();
    };
    using Names = std::vector<std::string>;
    const auto names = [](const auto& counts) {
      Names result;
      for (const auto& [name, count] : counts) result.push_back(name);
      return result;
    };
    const Sizes many{
        .batch = 1, .heads = 8, .groups = 8, .queries = 256, .keys = 256, .size = 16, .value_size = 16};
    const auto exchanged = counts(many);
    EXPECT_EQ(names(exchanged), Names{"all_to_all"});
    EXPECT_EQ(exchanged.at("all_to_all").calls, 8);  // queries, keys, values and output, and back
    const Sizes few{
        .batch = 1, .heads = 16, .groups = 1, .queries = 256, .keys = 256, .size = 16, .value_size = 16};
    EXPECT_EQ(names(counts(few)), (Names{"all_gather", "reduce_scatter"}));
  });
}

TEST(ContextParallel, IsForbiddenWhereImplicitCommunicationIs) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    Tensors x;
    for (const at::Tensor& each : inputs_of({}, at::kFloat))
      x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt));
    const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden);
    EXPECT_ANY_THROW(at::scaled_dot_product_attention(x[0], x[1], x[2]));
    const ContextParallelGuard guard({ring});
    EXPECT_NO_THROW(at::scaled_dot_product_attention(x[0], x[1], x[2]));
  });
}

/// Bytes that a rank sends in forward, and in both: as docs/parallel.md says.
TEST(ContextParallel, SendsWhatTheFormulaSays) {
  for (const int64_t n : {2, 4}) {
    run(n, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {n});
      const Sizes sizes{
          .batch = 2, .heads = 8, .groups = 4, .queries = 64, .keys = 64, .size = 16, .value_size = 16};
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const int64_t element = c10::elementSize(dtype), wide = 4;
        const int64_t q = 2 * 8 * 64 * 16 / n,
                      kv = 2 * 2 * 4 * 64 * 16 / n;  // elements of a shard; of keys and values
        const auto bytes = [&](ContextMethod method, const char* name, bool backward) {
          Tensors x;
          for (const at::Tensor& each : inputs_of(sizes, dtype))
            x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt).requires_grad_());
          const ContextParallelGuard guard({method});
          const CommDebugMode mode;
          const at::Tensor y = at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, true, {}, true);
          if (backward) y.backward(x[3]);
          return mode.get_comm_counts().count(name) ? mode.get_comm_counts().at(name).bytes : 0;
        };
        EXPECT_EQ(bytes(ring, "send", false), (n - 1) * kv * element);
        EXPECT_EQ(bytes(ring, "send", true), (n - 1) * kv * (2 * element + wide));
        EXPECT_EQ(bytes(ulysses, "all_to_all", false), (n - 1) * (2 * q + kv) * element / n);
        EXPECT_EQ(bytes(ulysses, "all_to_all", true), 2 * (n - 1) * (2 * q + kv) * element / n);
        // Of what is gathered, the observer counts a rank's own part too.
        EXPECT_EQ(bytes(allgather, "all_gather", false), n * kv * element);
        EXPECT_EQ(bytes(allgather, "reduce_scatter", true), n * kv * element);
      }
    });
  }
}

/// What a rank needs beyond its inputs, in forward and backward.
int64_t peak_of(ContextMethod method, int64_t ranks, int64_t length) {
  int64_t peak = 0;
  run(ranks, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks});
    const Sizes sizes{
        .batch = 1, .heads = 4, .groups = 4, .queries = length, .keys = length, .size = 64, .value_size = 64};
    Tensors x;
    for (const at::Tensor& each : inputs_of(sizes, at::kFloat))
      x.push_back(distribute_tensor(each, mesh, {Shard(2)}, std::nullopt).requires_grad_());
    const ContextParallelGuard guard({method});
    const support::PeakMemory memory;
    at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, true).backward(x[3]);
    if (mesh.get_rank() == ranks - 1) peak = memory.peak();
  });
  return peak;
}

TEST(ContextParallel, RingNeedsMemoryOfShardsOnly) {
  constexpr int64_t kLength = 4096, kQueries = 4 * kLength * 64 * 4;  // bytes
  constexpr int64_t kWorkspace = 2 << 20;                             // of libtorch's kernel
  for (const int64_t ranks : {2, 4, 8}) {
    const int64_t peak = peak_of(ContextMethod::ring, ranks, kLength);
    EXPECT_LE(peak, (4 + 2 * 7) * kQueries / ranks + kWorkspace) << ranks;
    EXPECT_GE(peak, 3 * kQueries / ranks) << ranks;  // or it was not counted
    // Half the sequence needs half of it.
    EXPECT_NEAR(double(peak_of(ContextMethod::ring, ranks, kLength / 2)), double(peak) / 2, kWorkspace)
        << ranks;
  }
  const int64_t gathered = peak_of(ContextMethod::allgather, 8, kLength);
  EXPECT_GE(gathered, 2 * 2 * kQueries);  // all keys and values, and their gradients
}

// ---- zig-zag

TEST(ContextParallel, ZigZagOrder) {
  EXPECT_TRUE(at::equal(zigzag_order(8, 2), at::tensor({0, 1, 6, 7, 2, 3, 4, 5}, at::kLong)));
  for (int64_t length = 0; length < 20; ++length) {
    for (int64_t ranks = 1; ranks < 6; ++ranks) {
      const at::Tensor order = zigzag_order(length, ranks);
      EXPECT_TRUE(at::equal(std::get<0>(order.sort()), at::arange(length)));
      EXPECT_TRUE(at::equal(from_zigzag(to_zigzag(order, 0, ranks), 0, ranks), order));
    }
  }
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor plain = numbers({3, 7});
    const DTensor x = distribute_tensor(plain, mesh, {Shard(1)}, std::nullopt);
    EXPECT_TRUE(at::equal(DTensor(to_zigzag(x, 1, 2)).full_tensor(), to_zigzag(plain, 1, 2)));
    EXPECT_TRUE(at::equal(DTensor(from_zigzag(to_zigzag(x, -1, 2), -1, 2)).full_tensor(), plain));
  });
  expect_error<c10::ValueError>([] { zigzag_order(4, 0); }, {"0 ranks"});
}

}  // namespace
}  // namespace tessera
