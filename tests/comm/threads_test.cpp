// Ranks as threads: the collective suite, the c10d interface of their backend, and that results do not depend
// on chance.

#include <tessera/comm/run.h>

#include <atomic>
#include <random>
#include <thread>

#include <ATen/ATen.h>

#include "tests/comm/collective_suite.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using comm::Tensors;

class Threads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Threads, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(Threads, CollectiveSuite) { run(GetParam(), testing::run_collective_suite_on_all_groups); }

TEST(GlooThreads, CollectiveSuite) {
  RunOptions options;
  options.backend = "gloo";
  run(2, testing::run_collective_suite_on_all_groups, options);
}

/// What code written for c10d calls, through c10d::ProcessGroup.
TEST_P(Threads, ProcessGroupInterface) {
  run(GetParam(), [] {
    const Group group = current_world()->group();
    const int n = group->getSize(), me = group->getRank();
    const auto sum = static_cast<float>(n * (n - 1) / 2);
    auto mine = [&](float offset = 0) { return at::full({2}, static_cast<float>(me) + offset); };
    auto expect_all = [](const at::Tensor& tensor, float value) {
      EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, value))) << tensor << " is not all " << value;
    };
    EXPECT_EQ(group->getBackend(at::kCPU)->getBackendName(), "threads");

    Tensors tensors{mine()};
    auto work = group->allreduce(tensors);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_TRUE(work->result()[0].is_same(tensors[0]));
    expect_all(tensors[0], sum);

    tensors = {mine(), mine(1)};
    group->allreduce_coalesced(tensors)->wait();
    expect_all(tensors[0], sum);
    expect_all(tensors[1], sum + static_cast<float>(n));

    tensors = {mine()};
    const auto future = group->allreduce(tensors)->getFuture();
    future->wait();
    expect_all(future->value().toTensorList().vec()[0], sum);

    std::vector<Tensors> lists(1);
    for (int r = 0; r < n; ++r) lists[0].push_back(at::empty({2}));
    tensors = {mine()};
    group->allgather(lists, tensors)->wait();
    for (int r = 0; r < n; ++r) expect_all(lists[0][r], static_cast<float>(r));

    at::Tensor global = at::empty({2 * n}), part = mine();
    group->all_gather_single(global, part)->wait();
    for (int r = 0; r < n; ++r) expect_all(global.narrow(0, 2 * r, 2), static_cast<float>(r));

    // Uneven parts into one tensor, which no transport of c10d can do.
    part = at::full({me + 1}, static_cast<float>(me));
    global = at::empty({n * (n + 1) / 2});
    group->all_gather_single(global, part)->wait();
    for (int r = 0; r < n; ++r) expect_all(global.narrow(0, r * (r + 1) / 2, r + 1), static_cast<float>(r));

    lists.assign(n, {});
    for (auto& list : lists) list = {at::empty({2}), at::empty({2})};
    tensors = {mine(), mine(10)};
    group->allgather_coalesced(lists, tensors)->wait();
    for (int r = 0; r < n; ++r) {
      expect_all(lists[r][0], static_cast<float>(r));
      expect_all(lists[r][1], static_cast<float>(r) + 10);
    }

    Tensors globals{at::empty({2 * n}), at::empty({2 * n})};
    tensors = {mine(), mine(10)};
    group->all_gather_single_coalesced(globals, tensors)->wait();
    for (int r = 0; r < n; ++r) expect_all(globals[1].narrow(0, 2 * r, 2), static_cast<float>(r) + 10);

    // In place: the input is this rank's place in the output.
    global = at::zeros({2 * n});
    part = global.narrow(0, 2 * me, 2);
    part.fill_(static_cast<float>(me));
    group->all_gather_single(global, part)->wait();
    for (int r = 0; r < n; ++r) expect_all(global.narrow(0, 2 * r, 2), static_cast<float>(r));

    lists.assign(1, {});
    for (int r = 0; r < n; ++r) lists[0].push_back(mine(static_cast<float>(r)));
    tensors = {at::empty({2})};
    group->reduce_scatter(tensors, lists)->wait();
    expect_all(tensors[0], sum + static_cast<float>(n * me));

    global = at::cat(lists[0]);
    part = at::empty({2});
    group->reduce_scatter_single(part, global)->wait();
    expect_all(part, sum + static_cast<float>(n * me));

    part = global.narrow(0, 2 * me, 2);  // in place
    group->reduce_scatter_single(part, global)->wait();
    expect_all(part, sum + static_cast<float>(n * me));

    tensors = {at::empty({2}), at::empty({2})};
    globals = {at::cat(lists[0]), at::cat(lists[0]) + 1};
    group->reduce_scatter_single_coalesced(tensors, globals)->wait();
    expect_all(tensors[0], sum + static_cast<float>(n * me));
    expect_all(tensors[1], sum + static_cast<float>(n * me + n));

    std::vector<int64_t> none;
    at::Tensor output = at::empty({2 * n});
    global = at::cat(lists[0]);
    group->all_to_all_single(output, global, none, none)->wait();
    for (int r = 0; r < n; ++r) expect_all(output.narrow(0, 2 * r, 2), static_cast<float>(r + me));

    std::vector<int64_t> in_splits, out_splits;
    for (int r = 0; r < n; ++r) {
      in_splits.push_back(r);
      out_splits.push_back(me);
    }
    global = at::full({n * (n - 1) / 2, 3}, static_cast<float>(me));
    output = at::empty({n * me, 3});
    group->all_to_all_single(output, global, out_splits, in_splits)->wait();
    for (int r = 0; r < n; ++r) expect_all(output.narrow(0, r * me, me), static_cast<float>(r));

    Tensors outputs, inputs;
    for (int r = 0; r < n; ++r) {
      outputs.push_back(at::empty({2}));
      inputs.push_back(mine(static_cast<float>(10 * r)));
    }
    group->alltoall(outputs, inputs)->wait();
    for (int r = 0; r < n; ++r) expect_all(outputs[r], static_cast<float>(r + 10 * me));

    for (int root = 0; root < n; ++root) {
      tensors = {mine()};
      c10d::BroadcastOptions broadcast;
      broadcast.rootRank = root;
      group->broadcast(tensors, broadcast)->wait();
      expect_all(tensors[0], static_cast<float>(root));

      tensors = {mine()};
      c10d::ReduceOptions reduce;
      reduce.rootRank = root;
      group->reduce(tensors, reduce)->wait();
      expect_all(tensors[0], me == root ? sum : static_cast<float>(me));

      c10d::GatherOptions gather;
      gather.rootRank = root;
      lists.clear();
      if (me == root) lists.push_back(outputs);
      tensors = {mine()};
      group->gather(lists, tensors, gather)->wait();
      for (int r = 0; r < n && me == root; ++r) expect_all(outputs[r], static_cast<float>(r));

      c10d::ScatterOptions scatter;
      scatter.rootRank = root;
      lists.clear();
      if (me == root) lists.push_back(inputs);
      tensors = {at::empty({2})};
      group->scatter(tensors, lists, scatter)->wait();
      expect_all(tensors[0], static_cast<float>(root + 10 * me));
    }

    if (n > 1) {
      const int next = (me + 1) % n, previous = (me + n - 1) % n;
      Tensors sent{mine()}, received{at::empty({2})};
      auto sending = group->send(sent, next, 3);
      auto receiving = group->recv(received, previous, 3);
      receiving->wait();
      sending->wait();
      expect_all(received[0], static_cast<float>(previous));
      EXPECT_EQ(receiving->sourceRank(), previous);

      sending = group->send(sent, next, 4);
      receiving = group->recvAnysource(received, 4);
      receiving->wait();
      sending->wait();
      EXPECT_EQ(receiving->sourceRank(), previous);
    }

    group->startCoalescing(at::kCPU);
    tensors = {mine()};
    Tensors more{mine(5)};
    group->allreduce(tensors);
    group->allreduce(more);
    group->endCoalescing(at::kCPU)->wait();
    expect_all(tensors[0], sum);
    expect_all(more[0], sum + static_cast<float>(5 * n));

    // Polling completes it too.
    tensors = {at::ones({100000})};
    work = group->allreduce(tensors);
    while (!work->isCompleted()) std::this_thread::yield();
    work->wait();
    expect_all(tensors[0], static_cast<float>(n));

    group->barrier()->wait();
  });
}

/// A rank that posts and goes away holds nobody up: the others carry out its part.
TEST(ThreadsBackend, APostedCollectiveNeedsNoHelpFromWhoPostedIt) {
  std::atomic<bool> others_are_done{false};
  at::Tensor first = at::ones({1 << 20});
  run(2, [&] {
    const auto group = current_world()->group();
    if (get_rank() == 0) {
      auto pending = comm::all_reduce(first, ReduceOp::SUM, group);
      while (!others_are_done) std::this_thread::yield();
      EXPECT_EQ(first[12345].item<float>(), 2);  // before waiting for it
      pending.wait();
    } else {
      comm::all_reduce(at::ones({1 << 20}), ReduceOp::SUM, group).wait();
      others_are_done = true;
    }
  });
}

/// More collectives under way than there are slots for.
TEST(ThreadsBackend, ManyCollectivesUnderWay) {
  run(3, [] {
    const auto group = current_world()->group();
    std::vector<comm::Pending> pending;
    Tensors tensors;
    for (int i = 0; i < 500; ++i) {
      tensors.push_back(at::full({i % 7 == 0 ? 20000 : 3}, static_cast<float>(i)));
      pending.push_back(comm::all_reduce(tensors.back(), ReduceOp::SUM, group));
    }
    for (auto& p : pending) p.wait();
    for (int i = 0; i < 500; ++i) EXPECT_EQ(tensors[i][0].item<float>(), static_cast<float>(3 * i));
  });
}

/// Sums of numbers whose rounding depends on the order: the same bits on all ranks and in every run.
TEST(ThreadsBackend, ResultsAreBitwiseRepeatable) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    at::Tensor reference;
    for (int round = 0; round < 5; ++round) {
      std::vector<at::Tensor> results(8);
      run(8, [&] {
        std::mt19937 numbers(static_cast<unsigned>(get_rank()));
        std::normal_distribution<double> normal;
        at::Tensor tensor = at::empty({50021}, at::kDouble);
        double* data = tensor.mutable_data_ptr<double>();
        for (int64_t i = 0; i < tensor.numel(); ++i)
          data[i] = normal(numbers) * std::pow(10.0, static_cast<double>(i % 9));
        tensor = tensor.to(dtype);
        comm::all_reduce(tensor, ReduceOp::SUM, current_world()->group()).wait();
        results[get_rank()] = tensor;
      });
      if (!reference.defined()) reference = results[0];
      for (const auto& result : results) EXPECT_TRUE(at::equal(result, reference));
    }
  }
}

TEST(ThreadsBackend, NaNWinsInMinAndMax) {
  run(2, [] {
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
      for (const int64_t who : {0, 1}) {
        at::Tensor tensor = at::full({1}, get_rank() == who ? nan : 1.0f);
        comm::all_reduce(tensor, op, current_world()->group()).wait();
        EXPECT_TRUE(tensor.isnan().item<bool>());
      }
    }
  });
}

TEST(ThreadsBackend, PremultipliedSum) {
  run(3, [] {
    at::Tensor tensor = at::full({4}, 2.0f);
    comm::all_reduce(tensor, c10d::makePreMulSum(0.5), current_world()->group()).wait();
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 3.0f)));
  });
}

/// Random collectives of random sizes on overlapping groups, some waited for late, on more ranks than cores.
TEST(ThreadsBackend, Stress) {
  constexpr int kRanks = 6, kSteps = 400;
  run(kRanks, [] {
    const auto world = current_world();
    std::vector<std::vector<int64_t>> member_lists{
        {0, 1, 2, 3, 4, 5}, {0, 1, 2}, {3, 4, 5}, {5, 0}, {1, 4, 2}};
    std::mt19937 numbers(17);  // the same on all ranks
    struct Waiting {
      comm::Pending pending;
      at::Tensor tensor;
      float expected;
    };
    std::vector<Waiting> waiting;
    for (int step = 0; step < kSteps; ++step) {
      const auto& members = member_lists[numbers() % member_lists.size()];
      const int64_t size = std::array<int64_t, 4>{1, 100, 5000, 200000}[numbers() % 4];
      const bool late = numbers() % 3 == 0;
      if (std::find(members.begin(), members.end(), world->rank()) == members.end()) continue;
      at::Tensor tensor = at::full({size}, static_cast<float>(step % 10));
      auto pending = comm::all_reduce(tensor, ReduceOp::SUM, world->group(members, at::kCPU));
      const auto expected = static_cast<float>(step % 10) * static_cast<float>(members.size());
      waiting.push_back({std::move(pending), tensor, expected});
      if (late) continue;
      for (auto& w : waiting) {
        w.pending.wait();
        EXPECT_EQ(w.tensor.min().item<float>(), w.expected);
        EXPECT_EQ(w.tensor.max().item<float>(), w.expected);
      }
      waiting.clear();
    }
    for (auto& w : waiting) w.pending.wait();
  });
}

}  // namespace
}  // namespace tessera
