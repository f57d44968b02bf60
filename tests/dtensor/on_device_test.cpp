// What only shows where tensors are not on the CPU. Run on the test device (TESSERA_TEST_DEVICE=tile).

#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/random/generator.h>

#include <chrono>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/device/streams.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using namespace testing;

/// Four ranks with a mesh of one dim, each on a device of its own.
void on_mesh(const std::function<void(const DeviceMesh&)>& function) {
  if (test_device() == at::kCPU) GTEST_SKIP() << "TESSERA_TEST_DEVICE names no device";
  run(4, [&] { function(init_device_mesh(test_device(), {4})); });
}

TEST(OnDevice, EachRankHasADeviceOfItsOwn) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)});
    EXPECT_EQ(x.device(), at::Device(test_device(), static_cast<at::DeviceIndex>(mesh.get_rank())));
    EXPECT_EQ(x.to_local().device(), x.device());
    EXPECT_TRUE(at::equal(x.full_tensor().cpu(), numbers({8, 3})));
  });
}

TEST(OnDevice, LocalTensorsMoveToTheDeviceOfTheMesh) {
  on_mesh([](const DeviceMesh& mesh) {
    const at::Tensor local = numbers({2, 3}).requires_grad_();
    const DTensor x = DTensor::from_local(local, mesh, {Shard(0)});
    EXPECT_EQ(x.device().type(), test_device());
    DTensor(x.mul(3)).to_local().sum().backward();
    EXPECT_TRUE(local.grad().is_cpu());
    EXPECT_TRUE(at::equal(local.grad(), at::full({2, 3}, 3.)));
  });
}

TEST(OnDevice, FactoriesAndRandomNumbersEqualThoseOfTheCpu) {
  on_mesh([](const DeviceMesh& mesh) {
    const DeviceMesh on_cpu = init_device_mesh(at::kCPU, {4});
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      const auto same = [&](const auto& make) {
        const DTensor here = make(mesh), there = make(on_cpu);
        EXPECT_EQ(here.device().type(), test_device());
        EXPECT_TRUE(same_bits(here.to_local(), there.to_local()));
      };
      same([&](const DeviceMesh& on) { return full({5, 6}, 2.5, on, {placement}); });
      same([&](const DeviceMesh& on) {
        random::manual_seed(7);
        return randn({5, 6}, on, {placement});
      });
      same([&](const DeviceMesh& on) {
        random::manual_seed(7);
        return DTensor(at::dropout(distribute_tensor(numbers({5, 6}), on, {placement}), 0.5, true));
      });
      same([&](const DeviceMesh& on) {
        random::manual_seed(7);
        return DTensor(at::rand_like(distribute_tensor(numbers({5, 6}), on, {placement})));
      });
      same([&](const DeviceMesh& on) {
        random::manual_seed(7);
        const at::Tensor weights = numbers({5, 6}).abs().add(1);
        return DTensor(at::multinomial(distribute_tensor(weights, on, {placement}), 4));
      });
    }
  });
}

TEST(OnDevice, BackwardSeesTheObserverOfItsCaller) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor x(distribute_tensor(numbers({8, 3}), mesh, {Shard(0)}).requires_grad_());
    const at::Tensor loss = x.full_tensor(Placements{Partial()}).sum();
    const CommDebugMode counts;
    loss.backward();  // reduces the gradient
    EXPECT_EQ(counts.get_total_counts(), 1);
  });
}

TEST(OnDevice, BackwardSeesTheGuardsOfItsCaller) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)}).requires_grad_();
    const DTensor w = distribute_tensor(numbers({3, 4}, 1), mesh, {Shard(1)});
    const at::Tensor y = at::mm(x, w);
    const at::Tensor plain = at::ones({8, 4}, y.options());
    y.register_hook([&](const at::Tensor& gradient) { return gradient * plain; });
    const ImplicitReplicationGuard same_everywhere;
    y.sum().backward();
    EXPECT_TRUE(x.grad().defined());
  });
}

TEST(OnDevice, BackwardKnowsItsWorld) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)}).requires_grad_();
    int64_t seen = -1;
    x.register_hook([&](const at::Tensor&) { seen = has_current_world() ? get_rank() : -1; });
    x.sum().backward();
    EXPECT_EQ(seen, mesh.get_rank());
  });
}

/// As on one device.
TEST(OnDevice, IndicesMayBeOfTheHost) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)});
    const at::Tensor rows = at::tensor({0, 5, 5});
    const ImplicitReplicationGuard same_everywhere;
    EXPECT_TRUE(at::equal(DTensor(x.index({rows})).full_tensor().cpu(), numbers({8, 3}).index({rows})));
  });
}

TEST(OnDevice, Autocast) {
  on_mesh([](const DeviceMesh& mesh) {
    at::autocast::set_autocast_enabled(test_device(), true);
    at::autocast::set_autocast_dtype(test_device(), at::kBFloat16);
    const DTensor x = distribute_tensor(numbers({8, 4}), mesh, {Shard(0)});
    const DTensor w = distribute_tensor(numbers({4, 4}, 1), mesh, {Replicate()});
    EXPECT_EQ(at::mm(x, w).scalar_type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(test_device(), false);
  });
}

TEST(OnDevice, IndicesOutOfRangeAreRefused) {
  on_mesh([](const DeviceMesh& mesh) {
    const DTensor weight = distribute_tensor(numbers({8, 3}), mesh, {Shard(0)});
    const DTensor indices = distribute_tensor(at::tensor({1, 8}), mesh, {Replicate()});
    EXPECT_THROW(at::embedding(weight, indices), std::exception);
    const DTensor logits = distribute_tensor(numbers({2, 8}), mesh, {Shard(1)});
    const LossParallel of_local_classes;
    EXPECT_THROW(at::cross_entropy_loss(logits, indices), std::exception);
  });
}

/// Each collective of device tensors against the same of the host's.
void check_collectives() {
  const Group group = current_world()->group(test_device());
  const int64_t ranks = group->getSize(), rank = group->getRank();
  const auto on_device = [](const at::Tensor& tensor) { return tensor.to(test_device()); };
  const at::Tensor mine = numbers({4}) + rank;
  at::Tensor sum = numbers({4}) * ranks + ranks * (ranks - 1) / 2;
  at::Tensor all = at::stack(std::vector<at::Tensor>(ranks, numbers({4})));
  all += at::arange(ranks).unsqueeze(1);

  const at::Tensor reduced = on_device(mine);
  comm::all_reduce(reduced, c10d::ReduceOp::SUM, group).wait();
  EXPECT_TRUE(at::equal(reduced.cpu(), sum));
  const at::Tensor strided = on_device(at::stack({mine, mine}, 1)).select(1, 0);
  comm::all_reduce(strided, c10d::ReduceOp::SUM, group).wait();
  EXPECT_TRUE(at::equal(strided.cpu(), sum));
  // What no transport reduces by itself.
  const at::Tensor any = on_device(at::tensor({rank == 0 ? 1 : 0, 0}).to(at::kBool));
  comm::all_reduce(any, c10d::ReduceOp::BOR, group).wait();
  EXPECT_TRUE(at::equal(any.cpu(), at::tensor({1, 0}).to(at::kBool)));

  const at::Tensor gathered = at::empty({ranks, 4}, reduced.options());
  comm::all_gather_into(gathered, on_device(mine), group).wait();
  EXPECT_TRUE(at::equal(gathered.cpu(), all));
  const at::Tensor scattered = at::empty({4}, reduced.options());
  comm::reduce_scatter_from(scattered, on_device(all), c10d::ReduceOp::SUM, group).wait();
  EXPECT_TRUE(at::equal(scattered.cpu(), all[rank] * ranks));

  comm::Tensors sent, got;
  for (int64_t i = 0; i < ranks; ++i) {
    sent.push_back(on_device(at::full({i + 1}, rank, at::kLong)));
    got.push_back(at::empty({rank + 1}, sent[0].options()));
  }
  comm::all_to_all(got, sent, group).wait();
  for (int64_t i = 0; i < ranks; ++i)
    EXPECT_TRUE(at::equal(got[i].cpu(), at::full({rank + 1}, i, at::kLong)));

  const at::Tensor told = on_device(mine);
  comm::broadcast(told, 1, group).wait();
  EXPECT_TRUE(at::equal(told.cpu(), numbers({4}) + 1));
  if (rank == 0) comm::send(told, 1, group).wait();
  if (rank == 1) {
    comm::recv(told.zero_(), 0, group).wait();
    EXPECT_TRUE(at::equal(told.cpu(), numbers({4}) + 1));
  }
  if (comm::moves_lists(group)) {
    const comm::Tensors outs{at::empty({ranks, 4}, told.options()), at::empty({ranks}, told.options())};
    comm::all_gather_into(outs, {on_device(mine), on_device(mine).slice(0, 0, 1)}, group).wait();
    EXPECT_TRUE(at::equal(outs[0].cpu(), all));
    EXPECT_TRUE(at::equal(outs[1].cpu(), all.select(1, 0)));
  }
  comm::barrier(group).wait();
}

TEST(OnDevice, Collectives) {
  on_mesh([](const DeviceMesh&) { check_collectives(); });
}

TEST(OnDevice, CollectivesWaitForTheirStream) {
  const device::LagScope lag(std::chrono::hours(1));  // who does not synchronize sees what was there before
  on_mesh([](const DeviceMesh&) {
    check_collectives();
    const auto* device = c10::impl::getDeviceGuardImpl(test_device());
    const c10::StreamGuard other(device->getNewStream(device->getDevice()));
    check_collectives();
  });
}

RANK_BODY(on_device_processes) {
  launch(1, [] {
    check_collectives();
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const Placements& from : all_placements(1, 2, true)) {
      compare([](const Tensors& x) { return at::relu(at::mm(x[0], x[1])); },
              {numbers({5, 3}), numbers({3, 4}, 1)}, mesh, {from, from});
    }
  });
}

TEST(OnDevice, Processes) {
  if (test_device() == at::kCPU) GTEST_SKIP() << "TESSERA_TEST_DEVICE names no device";
  expect_ok_over_processes("on_device_processes", 2);
}

}  // namespace
}  // namespace tessera
