// Ranks as processes that share memory: the collective suite, that results are the same bits as on threads, and what
// happens when ranks disagree, are late, or are gone.

#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include "tests/comm/collective_suite.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using comm::Tensors;
using ::testing::AllOf;
using testing::error_of;
using testing::expect_ok;
using ::testing::HasSubstr;
using testing::spawn_ranks;

RunOptions on_shm(std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  RunOptions options;
  options.backend = "shm";
  options.timeout = timeout;
  return options;
}

RANK_BODY(shm_suite) { launch(1, testing::run_collective_suite_on_all_groups, on_shm()); }

class Shm : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Shm, ::testing::Values(1, 2, 3, 4));

TEST_P(Shm, CollectiveSuite) { expect_ok(spawn_ranks("shm_suite", GetParam())); }

TEST(ShmThreads, CollectiveSuite) { run(3, testing::run_collective_suite_on_all_groups, on_shm()); }

/// Numbers whose sum depends on the order.
at::Tensor numbers_of(int64_t rank, int64_t count, at::ScalarType dtype) {
  std::mt19937 random(static_cast<unsigned>(rank + count));
  std::normal_distribution<double> normal;
  at::Tensor tensor = at::empty({count}, at::kDouble);
  double* data = tensor.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) data[i] = normal(random) * std::pow(10.0, static_cast<double>(i % 9));
  return tensor.to(dtype);
}

constexpr int64_t kCounts[]{3, 1000, 9001, 50021, 700001};

/// Reductions of every size class, one after the other.
Tensors reductions() {
  const Group group = current_world()->group();
  Tensors results;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t count : kCounts) {
      results.push_back(numbers_of(get_rank(), count, dtype));
      comm::all_reduce(results.back(), ReduceOp::SUM, group).wait();
      results.push_back(at::empty({count}, dtype));
      Tensors inputs;
      for (int64_t r = 0; r < get_world_size(); ++r)
        inputs.push_back(numbers_of(get_rank() + 10 * r, count, dtype));
      comm::reduce_scatter(results.back(), inputs, ReduceOp::AVG, group).wait();
    }
  }
  return results;
}

RANK_BODY(shm_same_bits) {
  std::vector<Tensors> expected(3);
  run(3, [&] { expected[get_rank()] = reductions(); });
  launch(
      1,
      [&] {
        const Tensors results = reductions();
        for (size_t i = 0; i < results.size(); ++i)
          EXPECT_TRUE(at::equal(results[i], expected[get_rank()][i])) << "result " << i;
      },
      on_shm());
}

TEST(Shm, SameBitsAsThreads) { expect_ok(spawn_ranks("shm_same_bits", 3)); }

/// Random collectives on overlapping groups, some waited for late, and messages between them.
RANK_BODY(shm_stress) {
  launch(
      1,
      [] {
        const auto world = current_world();
        const int64_t n = world->size();
        std::vector<std::vector<int64_t>> member_lists{{}, {}, {n - 1, 0}};
        for (int64_t r = 0; r < n; ++r) {
          member_lists[0].push_back(r);
          if (r % 2 == 0 || r == 1) member_lists[1].push_back(r);
        }
        std::mt19937 random(17);  // the same on all ranks
        struct Waiting {
          comm::Pending pending;
          at::Tensor tensor;
          float expected;
        };
        std::vector<Waiting> waiting;
        const auto finish = [&] {
          for (auto& w : waiting) {
            w.pending.wait();
            EXPECT_EQ(w.tensor.min().item<float>(), w.expected);
            EXPECT_EQ(w.tensor.max().item<float>(), w.expected);
          }
          waiting.clear();
        };
        for (int step = 0; step < 300; ++step) {
          const auto& members = member_lists[random() % member_lists.size()];
          const int64_t size = std::array<int64_t, 5>{1, 100, 5000, 60000, 400000}[random() % 5];
          const bool late = random() % 3 == 0, message = random() % 4 == 0;
          const auto value = static_cast<float>(step % 10);
          if (message) {
            const int64_t from = static_cast<int64_t>(random()) % n,
                          to = (from + 1 + static_cast<int64_t>(random() % (n - 1))) % n;
            if (world->rank() == from)
              waiting.push_back(
                  {comm::send(at::full({size}, value), to, world->group(), step % 3), at::ones({1}), 1});
            if (world->rank() == to) {
              const at::Tensor tensor = at::empty({size});
              waiting.push_back({comm::recv(tensor, from, world->group(), step % 3), tensor, value});
            }
          } else if (std::find(members.begin(), members.end(), world->rank()) != members.end()) {
            const at::Tensor tensor = at::full({size}, value);
            auto pending = comm::all_reduce(tensor, ReduceOp::SUM, world->group(members, at::kCPU));
            waiting.push_back({std::move(pending), tensor, value * static_cast<float>(members.size())});
          }
          if (!late) finish();
        }
        finish();
        comm::barrier(world->group()).wait();
      },
      on_shm());
}

TEST(Shm, Stress) { expect_ok(spawn_ranks("shm_stress", 4)); }

/// A rank that posts and does something else holds nobody up, however much there is to move.
RANK_BODY(shm_posted) {
  launch(
      1,
      [] {
        const auto world = current_world();
        EXPECT_EQ(world->backend(at::kCPU), "shm");
        const Group all = world->group(), turned = world->group({1, 0}, at::kCPU);
        const at::Tensor large = at::ones({1 << 20}), small = at::ones({3});
        auto pending = comm::all_reduce(large, ReduceOp::SUM, all);
        auto sending = get_rank() == 0 ? comm::send(at::ones({1 << 20}), 1, all)
                                       : comm::recv(at::empty({1 << 20}), 0, all);
        if (get_rank() == 0) {
          comm::all_reduce(small, ReduceOp::SUM, turned).wait();  // rank 1 comes when it has the large one
          pending.wait();
        } else {
          pending.wait();
          sending.wait();
          comm::all_reduce(small, ReduceOp::SUM, turned).wait();
        }
        EXPECT_EQ(large.min().item<float>(), 2);
        sending.wait();
      },
      on_shm());
}

TEST(Shm, APostedCollectiveNeedsNoWaitOfWhoPostedIt) { expect_ok(spawn_ranks("shm_posted", 2)); }

/// More collectives under way than there is room for, and more messages.
RANK_BODY(shm_many) {
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        std::vector<comm::Pending> pending;
        Tensors tensors;
        for (int i = 0; i < 300; ++i) {
          tensors.push_back(at::full({i % 7 == 0 ? 20000 : 3}, static_cast<float>(i)));
          pending.push_back(comm::all_reduce(tensors.back(), ReduceOp::SUM, group));
        }
        for (int i = 0; i < 300; ++i) {
          const int64_t next = (get_rank() + 1) % get_world_size(),
                        previous = (get_rank() + get_world_size() - 1) % get_world_size();
          pending.push_back(
              comm::send(at::full({i % 50 == 0 ? 100000 : 2}, static_cast<float>(i)), next, group, i));
          tensors.push_back(at::empty({i % 50 == 0 ? 100000 : 2}));
          pending.push_back(comm::recv(tensors.back(), previous, group, i));
        }
        for (size_t i = pending.size(); i-- > 0;) pending[i].wait();
        for (int i = 0; i < 300; ++i) {
          EXPECT_EQ(tensors[i][0].item<float>(), static_cast<float>(3 * i));
          EXPECT_EQ(tensors[300 + i][1].item<float>(), static_cast<float>(i));
        }
        // A call with more tensors than can be posted at once.
        Tensors coalesced(2000, at::Tensor());
        for (size_t i = 0; i < coalesced.size(); ++i)
          coalesced[i] = at::full({1 + static_cast<int64_t>(i % 5)}, 1.f);
        group->allreduce_coalesced(coalesced)->wait();
        for (const auto& tensor : coalesced)
          EXPECT_EQ(tensor.sum().item<float>(), 3.f * static_cast<float>(tensor.numel()));
      },
      on_shm());
}

TEST(Shm, ManyUnderWay) { expect_ok(spawn_ranks("shm_many", 3)); }

RANK_BODY(shm_mismatch) {
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        const bool odd = get_rank() == 1;
        const auto expect = [&](const std::function<void()>& call, const std::string& what,
                                const std::string& right, const std::string& wrong) {
          EXPECT_THAT(error_of(call), AllOf(HasSubstr(what), HasSubstr("rank 0 called " + right),
                                            HasSubstr("rank 1 called " + wrong)));
        };
        expect(
            [&] {
              odd ? comm::barrier(group).wait()
                  : comm::all_reduce(at::ones({2}), ReduceOp::SUM, group).wait();
            },
            "different collectives", "all_reduce(sum, Float[2])", "barrier()");
        expect([&] { comm::all_reduce(at::ones({odd ? 3 : 2}), ReduceOp::SUM, group).wait(); },
               "different shapes", "all_reduce(sum, Float[2])", "all_reduce(sum, Float[3])");
        expect(
            [&] {
              comm::all_reduce(at::ones({100000}, odd ? at::kDouble : at::kFloat), ReduceOp::SUM, group)
                  .wait();
            },
            "different dtypes", "all_reduce(sum, Float[100000])", "all_reduce(sum, Double[100000])");
        expect([&] { comm::broadcast(at::ones({2}), get_rank(), group).wait(); }, "different roots",
               "broadcast(root 0", "broadcast(root 1");
        expect(
            [&] {
              if (get_rank() == 0) comm::send(at::ones({3}), 1, group).wait();
              if (get_rank() == 1) comm::recv(at::ones({2}), 0, group).wait();
            },
            "does not fit", "send(Float[3], tag 0) to rank 1", "recv(Float[2], tag 0) from rank 0");
        at::Tensor tensor = at::ones({1});  // the group still works
        for (int i = 0; i < 100; ++i) comm::all_reduce(tensor, ReduceOp::MAX, group).wait();
        comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
        EXPECT_EQ(tensor.item<float>(), 2);
      },
      on_shm());
}

TEST(Shm, MismatchedCallsAreErrorsWithBothSides) { expect_ok(spawn_ranks("shm_mismatch", 2)); }

RANK_BODY(shm_killed) {
  const std::string error = error_of([] {
    launch(
        1,
        [] {
          const auto group = current_world()->group();
          comm::barrier(group).wait();
          std::thread killer;
          if (get_rank() == 1) {
            killer = std::thread([] {
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              raise(SIGKILL);
            });
          }
          const at::Tensor big = at::ones({1 << 20});
          for (int i = 0; i < 1000000; ++i) comm::all_reduce(big, ReduceOp::MAX, group).wait();
          if (killer.joinable()) killer.join();
        },
        on_shm());
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1 (process "), HasSubstr("was killed by signal 9"),
                           HasSubstr("all_reduce(Float[1048576])")));
}

TEST(Shm, AKilledRankIsNamedByAllOthers) {
  const auto results = spawn_ranks("shm_killed", 3);
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const int rank : {0, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

// --- What each rank says of the others when nothing goes on any more ---------------------------------------

/// Rank 1 leaves out the second of three all-reduces, over a group of its own with rank 0, and waits for all where the others still do
/// not come.
RANK_BODY(shm_skips) {
  const std::string error = error_of([] {
    launch(
        1,
        [] {
          const auto world = current_world();
          const auto all = world->group();
          comm::barrier(all).wait();
          if (get_rank() < 2) {
            const auto pair = world->group({0, 1}, at::kCPU);
            for (int i = 0; i < 3; ++i) {
              if (get_rank() != 1 || i != 1) comm::all_reduce(at::ones({8}), ReduceOp::SUM, pair).wait();
            }
          }
          // Later than rank 0, who gives up first.
          if (get_rank() > 0) std::this_thread::sleep_for(std::chrono::seconds(1));
          comm::barrier(all).wait();
        },
        on_shm(std::chrono::seconds(3)));
  });
  // Who is where, and at which call: rank 0 in one more than rank 1 ever makes.
  EXPECT_THAT(error, AllOf(HasSubstr("gave up after 3000 ms"),
                           HasSubstr("rank 0 is in all_reduce(Float[8]), call 3 of group [0, 1]"),
                           HasSubstr("rank 1 is in barrier(), call 2 of group")));
}

TEST(Shm, ARankThatSkipsACollectiveIsFoundByItsRecord) { expect_ok(spawn_ranks("shm_skips", 3)); }

/// Rank 1 calls another collective instead.
RANK_BODY(shm_differs) {
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        comm::all_reduce(at::ones({8}), ReduceOp::SUM, group).wait();
        const std::string error = error_of([&] {
          if (get_rank() != 1) comm::all_reduce(at::ones({4}), ReduceOp::SUM, group).wait();
          comm::all_gather_into(at::empty({6}), at::ones({2}), group).wait();
        });
        EXPECT_THAT(error, AllOf(HasSubstr("rank 0 called all_reduce(sum, Float[4])"),
                                 HasSubstr("rank 1 called all_gather(")));
      },
      on_shm());
}

TEST(Shm, ARankThatGoesOnToTheNextCollectiveIsShownWithBothCalls) {
  expect_ok(spawn_ranks("shm_differs", 3));
}

RANK_BODY(shm_sleeps) {
  const std::string error = error_of([] {
    launch(
        1,
        [] {
          const auto group = current_world()->group();
          comm::all_reduce(at::ones({8}), ReduceOp::SUM, group).wait();
          if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(8));
          comm::barrier(group).wait();
        },
        on_shm(std::chrono::seconds(3)));
  });
  EXPECT_THAT(
      error,
      AllOf(HasSubstr("gave up after 3000 ms"),
            HasSubstr("rank 1 is in no collective; its last one, all_reduce(Float[8]), call 1 of group"),
            HasSubstr("in barrier(), call 2 of group")));
}

TEST(Shm, ARankThatSleepsIsNamedWithItsLastCollective) { expect_ok(spawn_ranks("shm_sleeps", 3)); }

/// Rank 1 has no memory for a message that it does not expect yet.
RANK_BODY(shm_no_memory) {
  constexpr int64_t kBytes = int64_t{4} << 30;
  const std::string error = error_of([] {
    launch(
        1,
        [] {
          const auto group = current_world()->group();
          comm::barrier(group).wait();
          if (get_rank() == 1) {
            int64_t pages = 0;
            std::ifstream("/proc/self/statm") >> pages;
            const auto limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + kBytes / 4);
            const rlimit most{limit, limit};
            ASSERT_EQ(::setrlimit(RLIMIT_AS, &most), 0);
          }
          comm::barrier(group).wait();
          if (get_rank() == 0) {
            // Of zeros that nobody has written, so that they take no memory.
            void* zeros =
                ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            ASSERT_NE(zeros, MAP_FAILED);
            comm::send(at::from_blob(zeros, {kBytes}, at::kByte), 1, group).wait();
          } else {
            comm::recv(at::empty({1}), 0, group, /*tag=*/7).wait();
          }
        },
        on_shm());
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1 failed: it has no memory to keep send(Byte[4294967296]"),
                           HasSubstr("of rank 0")));
}

TEST(Shm, AMessageThatCannotBeKeptIsAnErrorOnBothSides) { expect_ok(spawn_ranks("shm_no_memory", 2)); }

/// All threads get signals all the time, as a profiler sends them, and none of their system calls is restarted. Rank 2 comes late, so
/// that the others wait for it while a group is made.
RANK_BODY(shm_interrupted) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
  launch(
      1,
      [] {
        comm::barrier(current_world()->group()).wait();
        std::atomic<bool> is_over = false;
        std::thread storm([&] {
          const auto self = static_cast<pid_t>(::syscall(SYS_gettid));
          while (!is_over) {
            for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
              const pid_t thread = std::stoi(entry.path().filename());
              if (thread != self) ::syscall(SYS_tgkill, ::getpid(), thread, SIGUSR1);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
        });
        const auto calm = c10::make_scope_exit([&] {
          is_over = true;
          storm.join();
        });
        if (get_rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        const auto group = current_world()->group({1, 0, 2}, at::kCPU);
        at::Tensor tensor = at::ones({1});
        comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
        EXPECT_EQ(tensor.item<float>(), 3);
      },
      on_shm());
}

TEST(Shm, SignalsAreNoTimeout) { expect_ok(spawn_ranks("shm_interrupted", 3)); }

/// The files that this process maps and has open which other processes could see.
int64_t shared_memory() {
  int64_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:tessera") != std::string::npos;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    count +=
        std::filesystem::read_symlink(entry.path(), none).string().find("memfd:tessera") != std::string::npos;
  }
  return count;
}

RANK_BODY(shm_left_behind) {
  for (int turn = 0; turn < 3; ++turn) {
    launch(
        1,
        [] {
          comm::all_reduce(at::ones({1 << 18}), ReduceOp::SUM, current_world()->group()).wait();
          EXPECT_EQ(shared_memory(), 1);  // mapped; the file is closed
        },
        on_shm());
    EXPECT_EQ(shared_memory(), 0);
  }
}

TEST(Shm, NothingIsLeftBehind) { expect_ok(spawn_ranks("shm_left_behind", 2)); }

RANK_BODY(shm_crowd) {
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        for (int i = 0; i < 20; ++i) {
          for (const int64_t size : {1, 30000}) {
            const at::Tensor tensor = at::ones({size});
            comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
            EXPECT_EQ(tensor.min().item<float>(), 24);
          }
        }
      },
      on_shm());
}

TEST(Shm, MoreRanksThanCores) { expect_ok(spawn_ranks("shm_crowd", 24)); }

}  // namespace
}  // namespace tessera
