// Operators on lists: one plan for all items, no communication where each item's tensors agree.

#include <tessera/comm/run.h>
#include <tessera/dispatch/cache.h>

#include <cstdlib>
#include <limits>
#include <new>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"

namespace {
/// By this thread.
thread_local size_t allocations = 0;
}  // namespace

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace tessera {
namespace {

using namespace testing;

/// Tensors of several shapes, placed differently, also on another mesh.
struct Mixed {
  Tensors plain, distributed;

  void add(at::IntArrayRef shape, const DeviceMesh& mesh, const Placements& placements, int64_t seed) {
    plain.push_back(numbers(shape, seed) * 0.1 + 1);
    distributed.push_back(distribute_tensor(plain.back(), mesh, placements, std::nullopt));
  }
  explicit Mixed(int64_t seed) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}), flat = init_device_mesh(at::kCPU, {4});
    add({5, 4}, mesh, {Shard(0), Replicate()}, seed);
    add({3}, mesh, {Replicate(), Replicate()}, seed + 1);
    add({2, 6}, flat, {Shard(0)}, seed + 2);
    add({4, 4}, mesh, {Shard(1), Shard(0)}, seed + 3);
    add({7}, flat, {Shard(0)}, seed + 4);
  }
  void expect_equal(const char* what) const {
    for (size_t i = 0; i < plain.size(); ++i)
      expect_close(DTensor(distributed[i]).full_tensor(), plain[i], what + std::to_string(i));
  }
};

TEST(Lists, ItemByItem) {
  run(4, [] {
    const Mixed a(0), b(3);
    const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
    auto both = [&](const auto& call, const char* what) {
      Mixed result(0);
      {
        const ImplicitCommunicationGuard silent(ImplicitCommunication::forbidden);
        result.plain = call(a.plain, b.plain);
        result.distributed = call(a.distributed, b.distributed);
      }
      const ImplicitCommunicationGuard gathering(ImplicitCommunication::allowed);
      result.expect_equal(what);
      for (size_t i = 0; i < a.plain.size(); ++i)
        EXPECT_EQ(DTensor(result.distributed[i]).placements(), DTensor(a.distributed[i]).placements())
            << what;
    };
    both([](const Tensors& x, const Tensors& y) { return at::_foreach_add(x, y, 2); }, "add");
    both([](const Tensors& x, const Tensors&) { return at::_foreach_mul(x, 3); }, "mul");
    both([](const Tensors& x, const Tensors&) { return at::_foreach_sqrt(x); }, "sqrt");
    both([](const Tensors& x, const Tensors& y) { return at::_foreach_addcdiv(x, y, x, 0.5); }, "addcdiv");
    both([](const Tensors& x, const Tensors& y) { return at::_foreach_lerp(x, y, 0.5); }, "lerp");
    both(
        [](const Tensors& x, const Tensors& y) {
          Tensors copy = at::_foreach_mul(x, 1);
          at::_foreach_add_(copy, y);
          at::_foreach_div_(copy, 2);
          at::_foreach_copy_(copy, at::_foreach_add(copy, 1));
          at::_foreach_mul_(copy, at::scalar_tensor(3));
          return copy;
        },
        "in place");
  });
}

TEST(Lists, PartialItems) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor a = numbers({5, 4}), b = numbers({3}, 1);
    auto place = [&](const Placement& p, const Placement& q) {
      return Tensors{distribute_tensor(a, mesh, {p}, std::nullopt),
                     distribute_tensor(b, mesh, {q}, std::nullopt)};
    };
    Tensors x = place(Shard(0), Replicate());
    at::_foreach_add_(x, place(Partial(), Partial()));
    at::_foreach_sqrt_(at::_foreach_abs(x));
    EXPECT_EQ(DTensor(x[0]).placements(), Placements{Shard(0)});
    expect_close(DTensor(x[0]).full_tensor(), a * 2, "a");
    expect_close(DTensor(x[1]).full_tensor(), b * 2, "b");
  });
}

TEST(Lists, FusedOptimisers) {
  run(4, [] {
    Mixed parameters(0), gradients(5), first(1), second(2);
    auto step = [&](Tensors& p, Tensors& g, Tensors& m, Tensors& v) {
      Tensors steps;
      for (size_t i = 0; i < p.size(); ++i) steps.push_back(at::scalar_tensor(1.0f));
      at::_fused_adamw_(p, g, m, v, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
      at::_fused_sgd_(p, g, m, 0.01, 0.9, 0.1, 0, false, false, false);
    };
    step(parameters.plain, gradients.plain, first.plain, second.plain);
    {
      const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
      step(parameters.distributed, gradients.distributed, first.distributed, second.distributed);
    }
    parameters.expect_equal("parameters");
    first.expect_equal("first");
    second.expect_equal("second");
  });
}

/// As torch's clip_grad_norm_ does: norms, their norm, a factor for all.
TEST(Lists, ClipGradientNorms) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    Tensors plain, distributed;
    const std::vector<Placements> all = all_placements(2, 2, true);
    for (size_t i = 0; i < all.size(); ++i) {
      plain.push_back(numbers({5, 3}, static_cast<int64_t>(i)));
      distributed.push_back(distribute_tensor(plain.back(), mesh, all[i], std::nullopt));
    }
    auto clip = [](Tensors& gradients) {
      const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
      at::_foreach_mul_(gradients, at::clamp_max(2.0 / (norm + 1e-6), 1.0));
      return norm;
    };
    const at::Tensor expected = clip(plain);
    expect_close(DTensor(clip(distributed)).full_tensor(), expected, "norm");
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(DTensor(distributed[i]).placements(), all[i]);
      expect_close(DTensor(distributed[i]).full_tensor(), plain[i], DTensor(distributed[i]).spec().str());
    }
  });
}

TEST(Lists, NormsOfAnyOrder) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}), flat = init_device_mesh(at::kCPU, {4});
    Mixed items(0);
    items.add({2, 3}, flat, {Shard(0)}, 3);  // two ranks have none
    items.add({3, 3}, mesh, {Shard(0), Partial()}, 4);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    for (const double p : {2.0, 1.0, 0.0, kInfinity, -kInfinity}) {
      const Tensors norms = at::_foreach_norm(items.distributed, p),
                    expected = at::_foreach_norm(items.plain, p);
      for (size_t i = 0; i < norms.size(); ++i)
        expect_close(DTensor(norms[i]).full_tensor(), expected[i],
                     std::to_string(p) + " of " + std::to_string(i));
    }
  });
}

/// Ranks that hold nothing infinite learn of it, by one reduction; nothing else is moved.
TEST(Lists, GradientsAreUnscaled) {
  run(4, [] {
    for (const bool is_plain : {true, false}) {
      for (const int64_t infinite : {-1, 0, 2, 4}) {
        Mixed gradients(0);
        const DeviceMesh mesh = DTensor(gradients.distributed[0]).device_mesh();
        auto number = [&](double value) {
          const at::Tensor plain = at::scalar_tensor(value);
          return is_plain ? plain : distribute_tensor(plain, mesh, {Replicate(), Replicate()}, std::nullopt);
        };
        if (infinite >= 0) {
          gradients.plain[infinite].flatten()[0].fill_(std::numeric_limits<float>::infinity());
          const DTensor before(gradients.distributed[infinite]);
          gradients.distributed[infinite] = distribute_tensor(gradients.plain[infinite], before.device_mesh(),
                                                              before.placements(), std::nullopt);
        }
        at::Tensor found = number(0), expected = at::scalar_tensor(0.0);
        at::_amp_foreach_non_finite_check_and_unscale_(gradients.plain, expected, at::scalar_tensor(0.5));
        at::_amp_foreach_non_finite_check_and_unscale_(gradients.distributed, found, number(0.5));
        EXPECT_FALSE(fallback_counts().contains("aten::_amp_foreach_non_finite_check_and_unscale_"));
        EXPECT_EQ(found.item<float>(), expected.item<float>());
        gradients.expect_equal("unscaled");
      }
    }
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    auto number = [&](const at::Tensor& value) { return distribute_tensor(value, mesh, {Replicate()}); };
    at::Tensor scale = number(at::scalar_tensor(8.0f)), tracker = number(at::scalar_tensor(1, at::kInt));
    at::_amp_update_scale_(scale, tracker, number(at::scalar_tensor(1.0f)), 2.0, 0.5, 2);
    EXPECT_EQ(scale.item<float>(), 4);
    EXPECT_EQ(tracker.item<int>(), 0);
  });
}

/// Twice the tensors take about twice the memory that is asked for, and one plan.
TEST(Lists, AreLinearInTheirLength) {
  run(1, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {1});
    auto work = [&](size_t count) {
      const Tensors items(count, zeros({2}, mesh, {Shard(0)}));
      const auto misses = dispatch_cache_statistics().misses;
      const size_t before = allocations;
      EXPECT_EQ(at::stack(items).size(0), static_cast<int64_t>(count));
      EXPECT_EQ(at::_foreach_add(items, items).size(), count);
      const size_t made = allocations - before;
      EXPECT_EQ(dispatch_cache_statistics().misses, misses + 2);
      return made;
    };
    work(300);
    const size_t once = work(1000), twice = work(2000);
    EXPECT_GT(once, 1000u);
    EXPECT_LT(twice, once * 5 / 2);
  });
}

}  // namespace
}  // namespace tessera
