// Groups over several hosts, each a network namespace: the collective suite, what crosses the network, and what happens when a
// rank dies.

#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <signal.h>
#include <sys/wait.h>

#include <ATen/ATen.h>

#include "tests/comm/collective_suite.h"
#include "tests/comm/two_hosts.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kNoHosts;
using testing::run_on;
using testing::TwoHosts;

using Hosts = std::vector<int>;
/// Host by host, in turns, unlike many, and one alone.
const std::vector<Hosts> kHosts = {{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 1, 0}, {0, 1, 1}};

std::vector<int> zeros(size_t count) { return std::vector<int>(count, 0); }

RANK_BODY(hierarchical_suite) {
  launch(1, [] {
    EXPECT_EQ(current_world()->group()->getDefaultBackend()->getBackendName(), "hierarchical");
    testing::run_collective_suite_on_all_groups();
  });
}

TEST(Hierarchical, CollectiveSuite) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  for (const Hosts& host_of : kHosts) {
    SCOPED_TRACE(c10::Join(" ", host_of));
    EXPECT_EQ(run_on(hosts, "hierarchical_suite", host_of), zeros(host_of.size()));
  }
}

RANK_BODY(hierarchical_backends) {
  launch(1, [] {
    const auto world = current_world();
    const auto name = [&](std::vector<int64_t> ranks) {
      return world->group(ranks, at::kCPU)->getDefaultBackend()->getBackendName();
    };
    EXPECT_EQ(world->backend(at::kCPU), "hierarchical");
    EXPECT_EQ(name({0, 1, 2, 3}), "hierarchical");
    if (get_rank() != 3) EXPECT_EQ(name({2, 0, 1}), "hierarchical");
    const bool second = get_rank() >= 2;
    EXPECT_EQ(name(second ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{0, 1}), "shm");
    EXPECT_EQ(name(get_rank() % 2 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{0, 2}), "gloo");
    EXPECT_EQ(world->group({0, 1, 2, 3}, at::kCPU, "gloo")->getDefaultBackend()->getBackendName(), "gloo");
    comm::barrier(world->group()).wait();
  });
}

TEST(Hierarchical, IsTakenWhereRanksShareSomeHosts) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "hierarchical_backends", {0, 0, 1, 1}), zeros(4));
}

/// Many under way, waited for in another order; all ranks get the same bits.
RANK_BODY(hierarchical_under_way) {
  launch(1, [] {
    const auto group = current_world()->group();
    constexpr int kCount = 200;
    std::vector<at::Tensor> tensors;
    std::vector<comm::Pending> pending;
    for (int i = 0; i < kCount; ++i) {
      tensors.push_back(at::full({i % 7 * 100 + 1}, static_cast<double>(get_rank() + i), at::kDouble));
      pending.push_back(i % 3 == 0 ? comm::broadcast(tensors.back(), i % get_world_size(), group)
                                   : comm::all_reduce(tensors.back(), ReduceOp::SUM, group));
    }
    for (int i = kCount; i-- > 0;) {
      pending[i].wait();
      const double expected = i % 3 == 0 ? i % get_world_size() + i : 4 * i + 6;
      EXPECT_TRUE(tensors[i].eq(expected).all().item<bool>()) << i;
    }
    const at::Tensor mine = at::rand({1000});
    at::Tensor sum = mine.clone();
    comm::all_reduce(sum, ReduceOp::SUM, group).wait();
    std::vector<at::Tensor> sums;
    for (int i = 0; i < 4; ++i) sums.push_back(at::empty_like(sum));
    comm::all_gather(sums, sum, group).wait();
    for (const at::Tensor& other : sums) EXPECT_TRUE(at::equal(other, sum));
  });
}

TEST(Hierarchical, ManyUnderWay) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "hierarchical_under_way", {0, 1, 0, 1}), zeros(4));
}

/// What has left this host by now.
int64_t sent() {
  int64_t bytes = 0;
  std::ifstream("/sys/class/net/" + std::string(std::getenv("GLOO_SOCKET_IFNAME")) +
                "/statistics/tx_bytes") >>
      bytes;
  return bytes;
}

RANK_BODY(hierarchical_bytes) {
  launch(1, [] {
    const auto world = current_world();
    const std::vector<int64_t> all{0, 1, 2, 3};
    constexpr int64_t kSize = 1 << 22;  // bytes
    const auto bytes_of = [&](const Group& group, const std::function<void()>& call) {
      comm::barrier(group).wait();
      const int64_t before = sent();
      call();
      comm::barrier(group).wait();
      return static_cast<double>(sent() - before) / kSize;
    };
    struct Row {
      const char* name;
      double bound;  // what a host has to send, in units of kSize
      std::function<void(const Group&)> call;
    };
    const at::Tensor tensor = at::ones({kSize}, at::kByte), parts = at::ones({4 * kSize}, at::kByte);
    const std::vector<Row> rows = {
        {"all_reduce", 1, [&](const Group& group) { comm::all_reduce(tensor, ReduceOp::MAX, group).wait(); }},
        {"broadcast", get_rank() < 2 ? 1.0 : 0.0,
         [&](const Group& group) { comm::broadcast(tensor, 1, group).wait(); }},
        {"all_gather", 2, [&](const Group& group) { comm::all_gather_into(parts, tensor, group).wait(); }},
        {"reduce_scatter", 2,
         [&](const Group& group) { comm::reduce_scatter_from(tensor, parts, ReduceOp::MAX, group).wait(); }},
    };
    const Group steps = world->group(all, at::kCPU), flat = world->group(all, at::kCPU, "gloo");
    for (const Row& row : rows) {
      const double in_steps = bytes_of(steps, [&] { row.call(steps); });
      const double at_once = bytes_of(flat, [&] { row.call(flat); });
      if (get_rank() % 2 == 0)
        std::printf("%s: host %d sends %.2f times the tensor in steps, %.2f at once\n", row.name,
                    static_cast<int>(get_rank() / 2), in_steps, at_once);
      // Headers and acknowledgements are a few percent.
      EXPECT_LE(in_steps, row.bound * 1.05 + 0.05) << row.name;
      EXPECT_GE(in_steps, row.bound) << row.name;
      EXPECT_LE(in_steps, at_once * 1.02 + 0.02) << row.name;
    }
  });
}

TEST(Hierarchical, SendsWhatHasToCrossTheNetwork) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "hierarchical_bytes", {0, 0, 1, 1}), zeros(4));
}

/// Rank TESSERA_TEST_DIES is killed while the others reduce.
RANK_BODY(hierarchical_killed) {
  init_process_group("", std::chrono::seconds(120));
  const auto group = current_world()->group();
  comm::barrier(group).wait();
  const at::Tensor tensor = at::ones({1 << 16});
  comm::all_reduce(tensor, ReduceOp::MAX, group).wait();
  const int dies = std::atoi(std::getenv("TESSERA_TEST_DIES"));
  if (get_rank() == dies) raise(SIGKILL);
  const std::string error = error_of([&] {
    for (int i = 0; i < 1000; ++i) comm::all_reduce(tensor, ReduceOp::MAX, group).wait();
  });
  EXPECT_THAT(error, AllOf(HasSubstr(c10::str("rank ", dies, " (process ")), HasSubstr("all_reduce")));
}

TEST(Hierarchical, AKilledRankIsNamedOnAllHosts) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  for (const int dies : {1, 2, 3}) {  // on the host of the store, one that leads, one that does not
    SCOPED_TRACE(dies);
    ASSERT_EQ(setenv("TESSERA_TEST_DIES", std::to_string(dies).c_str(), 1), 0);
    const std::vector<int> codes = run_on(hosts, "hierarchical_killed", {0, 0, 1, 1});
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(codes[rank] == 0, rank != dies) << rank;
  }
}

}  // namespace
}  // namespace tessera
