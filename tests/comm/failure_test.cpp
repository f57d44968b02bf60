// What goes wrong on one rank reaches the others, says who and why, and never hangs.

#include <tessera/comm/backends.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/forward_ad.h>
#include <tessera/comm/run.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

/// Runs `body` on `ranks` ranks and returns what each threw ("" for nothing).
std::vector<std::string> errors_of(int64_t ranks, const std::function<void(const Group&)>& body,
                                   RunOptions options = {}) {
  std::vector<std::string> errors(ranks);
  run(
      ranks,
      [&] {
        const auto group = current_world()->group();
        try {
          body(group);
        } catch (const c10::Error& error) {
          errors[get_rank()] = error.what_without_backtrace();
        } catch (const std::exception& error) {
          errors[get_rank()] = error.what();
        }
      },
      options);
  return errors;
}

TEST(Failure, RunRethrowsTheFirstCauseAndPeersHearOfIt) {
  std::vector<std::string> heard(4);
  auto body = [&] {
    if (get_rank() == 2) throw std::invalid_argument("the disk is full");
    try {
      comm::all_reduce(at::ones({3}), ReduceOp::SUM, current_world()->group()).wait();
    } catch (const c10::Error& error) {
      heard[get_rank()] = error.what_without_backtrace();
      throw;
    }
  };
  try {
    run(4, body);
    FAIL() << "expected an exception";
  } catch (const std::invalid_argument& error) {  // the type is kept too
    EXPECT_STREQ(error.what(), "the disk is full");
  }
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(heard[rank], AllOf(HasSubstr("rank 2 failed: the disk is full"),
                                   HasSubstr("all_reduce(sum, Float[3])"), HasSubstr("[0, 1, 2, 3]")));
  }
}

TEST(Failure, ReachesRanksInOtherGroupsAndMessages) {
  std::vector<std::string> heard(4);
  EXPECT_THROW(
      run(4,
          [&] {
            const auto world = current_world();
            if (get_rank() == 0) throw std::runtime_error("boom");
            try {
              if (get_rank() == 1) comm::recv(at::ones({1}), 3, world->group()).wait();
              if (get_rank() == 2)
                comm::all_reduce(at::ones({1}), ReduceOp::SUM, world->group({2, 3}, at::kCPU)).wait();
              if (get_rank() == 3) comm::barrier(world->group({3, 1}, at::kCPU)).wait();
            } catch (const std::exception& error) {
              heard[get_rank()] = error.what();
            }
          }),
      std::runtime_error);
  for (const int rank : {1, 2, 3}) EXPECT_THAT(heard[rank], HasSubstr("rank 0 failed: boom"));
}

TEST(Failure, ARankThatNeverComesIsNamed) {
  RunOptions options;
  options.timeout = std::chrono::milliseconds(100);
  std::atomic<int> given_up{0};
  const auto errors = errors_of(
      3,
      [&](const Group& group) {
        comm::barrier(group).wait();
        if (get_rank() == 1) {
          while (given_up < 2) std::this_thread::yield();
          return;
        }
        try {
          comm::all_reduce(at::ones({2}), ReduceOp::MAX, group).wait();
        } catch (...) {
          ++given_up;
          throw;
        }
      },
      options);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr("gave up after 100 ms"), HasSubstr("rank 1 (1 collectives so far)"),
                      HasSubstr("all_reduce(max, Float[2])")));
  }
  EXPECT_EQ(errors[1], "");
}

TEST(Failure, WhoComesTooLateHearsThatTheOthersGaveUp) {
  RunOptions options;
  options.timeout = std::chrono::milliseconds(50);
  std::atomic<bool> given_up{false};
  const auto errors = errors_of(
      2,
      [&](const Group& group) {
        if (get_rank() == 1) {
          while (!given_up) std::this_thread::yield();
        }
        try {
          comm::barrier(group).wait();
        } catch (...) {
          given_up = true;
          throw;
        }
      },
      options);
  EXPECT_THAT(errors[0], HasSubstr("rank 0 gave up after 50 ms of waiting for rank 1"));
  EXPECT_THAT(errors[1], HasSubstr("rank 0 gave up after 50 ms"));
}

TEST(Failure, ARankThatEndedIsNotWaitedFor) {
  const auto errors = errors_of(3, [](const Group& group) {
    if (get_rank() == 1) return;
    comm::barrier(group).wait();
  });
  for (const int rank : {0, 2}) EXPECT_THAT(errors[rank], HasSubstr("rank 1 has ended after 0 collectives"));
  const auto messages = errors_of(2, [](const Group& group) {
    if (get_rank() == 0) comm::recv(at::ones({1}), 1, group).wait();
  });
  EXPECT_THAT(messages[0], HasSubstr("rank 1 has ended"));
}

// --- Circles ---------------------------------------------------------------------------------------------

Group group_of(std::vector<int64_t> ranks) { return current_world()->group(ranks, at::kCPU); }
void reduce_in(const Group& group) { comm::all_reduce(at::ones({2}), ReduceOp::SUM, group).wait(); }

TEST(Circle, OfGroupsIsAnErrorAtOnceThatNamesIt) {
  const auto errors = errors_of(4, [](const Group& world) {
    const Group left = get_rank() < 2 ? group_of({0, 1}) : nullptr;
    if (get_rank() == 0) reduce_in(left);
    if (get_rank() == 1) reduce_in(group_of({1, 2}));
    if (get_rank() == 2) comm::recv(at::ones({3}), 0, world).wait();
    if (get_rank() == 3) comm::barrier(world).wait();  // waits for the circle without being of it
  });
  for (const auto& error : errors) {
    EXPECT_THAT(
        error,
        AllOf(HasSubstr("wait for each other"),
              HasSubstr("rank 0 in all_reduce(sum, Float[2]), collective 1 of group [0, 1], for rank 1"),
              HasSubstr("rank 1 in all_reduce(sum, Float[2]), collective 1 of group [1, 2], for rank 2"),
              HasSubstr("rank 2 in recv(Float[3], tag 0) from rank 0, for rank 0")));
  }
}

TEST(Circle, OfMessages) {
  const auto receives =
      errors_of(2, [](const Group& group) { comm::recv(at::ones({1}), 1 - get_rank(), group).wait(); });
  for (const auto& error : receives) EXPECT_THAT(error, HasSubstr("wait for each other"));
  const auto sends = errors_of(2, [](const Group& group) {
    comm::send(at::ones({1}), 1 - get_rank(), group, /*tag=*/static_cast<int>(get_rank())).wait();
  });
  for (const auto& error : sends) EXPECT_THAT(error, HasSubstr("wait for each other"));
  const auto crossed = errors_of(2, [](const Group& group) {
    if (get_rank() == 0) comm::send(at::ones({1}), 1, group).wait();
    if (get_rank() == 1) comm::barrier(group).wait();
  });
  for (const auto& error : crossed)
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 in send(Float[1], tag 0) to rank 1, for rank 1"),
                             HasSubstr("rank 1 in barrier()")));
}

void receive_from_anyone(const Group& group) {
  comm::Tensors tensors{at::ones({1})};
  group->recvAnysource(tensors, 0)->wait();
}

TEST(Circle, OfThoseWhoWouldTakeAnyMessage) {
  const auto all = errors_of(3, receive_from_anyone);
  for (const auto& error : all)
    EXPECT_THAT(error,
                AllOf(HasSubstr("wait for each other"), HasSubstr("from any rank, for rank 1 or rank 2")));
  // One who can still send holds them up, and nobody has an error.
  const auto none = errors_of(3, [](const Group& group) {
    if (get_rank() > 0) return receive_from_anyone(group);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    for (const int64_t to : {1, 2}) comm::send(at::ones({1}), to, group).wait();
  });
  for (const auto& error : none) EXPECT_EQ(error, "");
  // Nobody is left who could.
  const auto alone = errors_of(3, [](const Group& group) {
    if (get_rank() == 0) receive_from_anyone(group);
  });
  EXPECT_THAT(alone[0], HasSubstr("wait for each other, and would for ever:\n  rank 0 in recv"));
}

TEST(Circle, IsNoneWhereSomethingIsUnderWayOrHasATimeout) {
  const auto errors = errors_of(2, [](const Group& world) {
    const Group other = group_of({1, 0});
    // Both wait in another group than their peer, but all has been posted.
    at::Tensor a = at::ones({2}), b = at::ones({2});
    auto first = comm::all_reduce(a, ReduceOp::SUM, world);
    auto second = comm::all_reduce(b, ReduceOp::SUM, other);
    if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(120));
    (get_rank() == 0 ? first : second).wait();
    (get_rank() == 0 ? second : first).wait();
    // A receive that is given up in time is no circle.
    comm::Tensors tensors{at::ones({1})};
    auto wanted = world->recv(tensors, static_cast<int>(1 - get_rank()), 7);
    EXPECT_THAT(error_of([&] { wanted->wait(std::chrono::milliseconds(120)); }),
                HasSubstr("gave up after 120 ms"));
    comm::barrier(world).wait();
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST(Circle, IsNoneWhereAnotherThreadActsForARank) {
  const auto errors = errors_of(2, [](const Group& world) {
    const Group other = group_of({1, 0});
    std::thread helper;
    if (get_rank() == 0) {
      std::promise<void> acted;
      helper = std::thread([&, other] {
        comm::barrier(other).wait();
        acted.set_value();
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        comm::barrier(other).wait();
      });
      acted.get_future().wait();
    } else {
      comm::barrier(other).wait();
      comm::barrier(other).wait();  // for the helper of rank 0, which itself waits below
    }
    comm::barrier(world).wait();
    if (helper.joinable()) helper.join();
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

/// Programs that end: all ranks go through one list of calls among random ranks in the same order. Whatever
/// they wait for, however long, and whatever they leave under way, none is notified of a circle.
TEST(Circle, IsNeverSeenInProgramsThatEnd) {
  constexpr int kRanks = 5;
  for (const uint64_t seed : c10::irange(4)) {
    const auto errors = errors_of(kRanks, [&](const Group& world) {
      std::mt19937_64 common(seed), own(seed * 100 + get_rank());
      auto draw = [](std::mt19937_64& random, int64_t count) {
        return static_cast<int64_t>(random() % count);
      };
      std::vector<comm::Pending> under_way;
      for (int step = 0; step < 40; ++step) {
        if (draw(own, 6) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(draw(own, 90)));
        std::vector<int64_t> ranks(kRanks);
        std::iota(ranks.begin(), ranks.end(), 0);
        std::shuffle(ranks.begin(), ranks.end(), common);
        ranks.resize(2 + draw(common, kRanks - 1));
        const int64_t kind = draw(common, 4), from = ranks[0], to = ranks[1];
        const int64_t elements = draw(common, 8) == 0 ? 100000 : 3;
        if (std::find(ranks.begin(), ranks.end(), get_rank()) == ranks.end()) continue;
        if (kind == 0) {
          if (get_rank() == from) under_way.push_back(comm::send(at::ones({elements}), to, world, step));
          if (get_rank() == to) under_way.push_back(comm::recv(at::ones({elements}), from, world, step));
        } else if (kind == 1) {
          comm::Tensors tensors{at::ones({elements})};
          if (get_rank() == from) comm::send(tensors[0], to, world, step).wait();
          if (get_rank() == to) world->recvAnysource(tensors, step)->wait();
        } else {
          under_way.push_back(comm::all_reduce(at::ones({elements}), ReduceOp::SUM, group_of(ranks)));
        }
        // A send ends when it is received: what is waited for must have been posted by all in the steps so
        // far.
        while (!under_way.empty() && (kind == 3 || draw(own, 3) == 0)) {
          under_way.front().wait();
          under_way.erase(under_way.begin());
        }
      }
      for (auto& pending : under_way) pending.wait();
      comm::barrier(world).wait();
    });
    for (const auto& error : errors) EXPECT_EQ(error, "") << "seed " << seed;
  }
}

// --- What is one for the process
// ----------------------------------------------------------------------------

TEST(Meet, WaitsForAllRanksAndComparesWhatTheySay) {
  std::atomic<int> here{0};
  run(3, [&] {
    for (int i = 1; i <= 50; ++i) {
      ++here;
      current_world()->meet(c10::str("setting ", i));
      EXPECT_GE(here, 3 * i);
    }
  });
  const auto errors =
      errors_of(2, [](const Group&) { current_world()->meet(get_rank() ? "x = 1" : "x = 2"); });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("Rank 0 calls x = 2, but rank 1 calls x = 1"),
                               HasSubstr("one for the process")));
  EXPECT_THAT(errors[1], HasSubstr("Rank 1 calls x = 1, but rank 0 calls x = 2"));
  const auto alone = errors_of(2, [](const Group& group) {
    if (get_rank() == 0) current_world()->meet("x = 2");
    comm::barrier(group).wait();
  });
  for (const auto& error : alone)
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 in x = 2, which all ranks of a process do together"),
                             HasSubstr("barrier()")));
  run(2, [] {
    run(2, [] { EXPECT_THAT(error_of([] { current_world()->meet("x = 2"); }), HasSubstr("runs of ranks")); });
  });
}

at::Tensor tangent_of(const at::Tensor& dual) { return std::get<1>(at::_unpack_dual(dual, 0)); }

TEST(ForwardAD, RanksShareTheLevelAndLeaveItTogether) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    run(4, [] {
      const Group group = current_world()->group();
      for (int i = 0; i < 5; ++i) {
        at::Tensor kept;
        {
          const DualLevel level;
          EXPECT_TRUE(is_in_dual_level());
          const auto scale = static_cast<float>(get_rank() + 1);
          const at::Tensor dual = at::_make_dual(at::ones({2}), at::full({2}, scale), 0);
          if (get_rank() % 2 == i % 2)
            comm::barrier(group_of(get_rank() % 2 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{0, 2}))
                .wait();
          kept = dual * dual;
          comm::barrier(group).wait();
          EXPECT_TRUE(at::equal(tangent_of(kept), at::full({2}, 2 * scale)));
        }
        // As on one device: it is gone.
        EXPECT_FALSE(kept._fw_grad(0).defined());
      }
    });
  }
  EXPECT_THAT(error_of([] {
                const DualLevel level;
                const DualLevel nested;
              }),
              HasSubstr("inside already"));
}

TEST(ForwardAD, AFailureInsideIsToldAndLeavesNoLevelBehind) {
  const auto errors = errors_of(2, [](const Group& group) {
    const DualLevel level;
    if (get_rank() == 1) throw std::runtime_error("the disk is full");
    comm::barrier(group).wait();
  });
  EXPECT_EQ(errors[1], "the disk is full");
  EXPECT_THAT(errors[0], HasSubstr("rank 1"));
  const auto circle = errors_of(2, [](const Group& group) {
    {
      const DualLevel level;
      comm::barrier(group).wait();
      if (get_rank() == 1) comm::barrier(group).wait();
    }
    if (get_rank() == 0) comm::barrier(group).wait();
  });
  for (const auto& error : circle)
    EXPECT_THAT(error,
                AllOf(HasSubstr("rank 0 at the end of forward-mode AD"), HasSubstr("rank 1 in barrier()")));
  run(2, [] {
    const DualLevel level;  // there is none from before
  });
}

// --- Waits that last
// -----------------------------------------------------------------------------------------

/// Where processes of these tests write what they report, and what was written there.
std::string reports_path() { return std::getenv("TESSERA_TEST_REPORTS"); }
std::string reports(const std::string& path = reports_path()) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
/// Comes late: not before it was reported that others wait.
void wait_for_report(const std::string& text) {
  while (reports().find(text) == std::string::npos) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

RANK_BODY(slow_thread) {
  ASSERT_TRUE(std::freopen(reports_path().c_str(), "w", stderr));
  run(3, [] {
    const Group group = current_world()->group();
    comm::barrier(group).wait();
    if (get_rank() == 1) {
      wait_for_report("rank 0 has waited");
      wait_for_report("rank 2 has waited");
      comm::send(at::ones({1}), 2, group).wait();
    }
    if (get_rank() == 2) comm::recv(at::ones({1}), 1, group).wait();
    reduce_in(group);
  });
}

RANK_BODY(slow_process) {
  launch(1, [] {
    const Group group = current_world()->group();
    if (get_rank() == 0) ASSERT_TRUE(std::freopen(reports_path().c_str(), "w", stderr));
    comm::barrier(group).wait();
    if (get_rank() == 1) wait_for_report("rank 0 has waited");
    reduce_in(group);
  });
}

RANK_BODY(silent_thread) {
  ASSERT_TRUE(std::freopen(reports_path().c_str(), "w", stderr));
  run(2, [] {
    if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    reduce_in(current_world()->group());
  });
}

/// What `ranks` processes reported that do `body`.
std::string reports_of(const std::string& body, int64_t ranks, const std::string& seconds,
                       const std::string& backend = "") {
  const std::string path = ::testing::TempDir() + "tessera_reports_" + std::to_string(::getpid());
  support::SpawnOptions options;
  options.environment = {
      {"TESSERA_WAIT_REPORT_SECONDS", seconds}, {"TESSERA_TEST_REPORTS", path}, {"TESSERA_BACKEND", backend}};
  testing::expect_ok(testing::spawn_ranks(body, ranks, options));
  std::string text = reports(path);
  std::remove(path.c_str());
  return text;
}

int64_t count(const std::string& text, const std::string& part) {
  int64_t result = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++result;
  return result;
}

TEST(Wait, ThatLastsIsReportedInOneLineForTheProcess) {
  const std::string text = reports_of("slow_thread", 1, "0.2");
  EXPECT_THAT(
      text,
      AllOf(HasSubstr("in all_reduce(sum, Float[2]), collective 2 of group [0, 1, 2], for rank 1"),
            HasSubstr("in recv(Float[1], tag 0) from rank 1, for rank 1"),
            HasSubstr("rank 1 does not wait, its last was barrier after 1 collectives of group [0, 1, 2]")));
  EXPECT_EQ(count(text, "rank 1 does not wait"), count(text, "\n"));
  EXPECT_EQ(reports_of("silent_thread", 1, "0"), "");
}

TEST(Wait, ThatLastsIsReportedByProcesses) {
  for (const char* backend : {"gloo", "shm"}) {
    EXPECT_THAT(reports_of("slow_process", 2, "0.2", backend),
                AllOf(HasSubstr("rank 0 has waited for "),
                      HasSubstr(" s in all_reduce(Float[2]), call 2 of group [0, 1]"),
                      HasSubstr("\n  rank 1 is in no collective; its last one, ")));
  }
}

/// The same mistake on rank 1: both get an error with both sides; then the group still works.
void expect_mismatch(const std::function<void(const Group&)>& right,
                     const std::function<void(const Group&)>& wrong, const std::string& what,
                     const std::string& right_words, const std::string& wrong_words) {
  std::atomic<int> survivors{0};
  const auto errors = errors_of(2, [&](const Group& group) {
    std::string message;
    try {
      (get_rank() == 1 ? wrong : right)(group);
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
    at::Tensor tensor = at::ones({1});
    comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
    if (tensor.item<float>() == 2) ++survivors;
    TORCH_CHECK(message.empty(), message);
  });
  EXPECT_EQ(survivors, 2);
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr(what), HasSubstr("rank 0 called " + right_words),
                             HasSubstr("rank 1 called " + wrong_words)));
  }
}

TEST(Mismatch, OfEveryKind) {
  auto all_reduce = [](at::Tensor tensor, ReduceOp::RedOpType op) {
    return [=](const Group& group) { comm::all_reduce(tensor.clone(), op, group).wait(); };
  };
  expect_mismatch(
      all_reduce(at::ones({2}), ReduceOp::SUM), [](const Group& group) { comm::barrier(group).wait(); },
      "different collectives", "all_reduce(sum, Float[2])", "barrier()");
  expect_mismatch(all_reduce(at::ones({2}), ReduceOp::SUM), all_reduce(at::ones({2}), ReduceOp::MAX),
                  "different reductions", "all_reduce(sum", "all_reduce(max");
  expect_mismatch(all_reduce(at::ones({6}), ReduceOp::SUM), all_reduce(at::ones({2, 3}), ReduceOp::SUM),
                  "different shapes", "all_reduce(sum, Float[6])", "all_reduce(sum, Float[2, 3])");
  expect_mismatch(all_reduce(at::ones({2}), ReduceOp::SUM),
                  all_reduce(at::ones({2}, at::kDouble), ReduceOp::SUM), "different dtypes",
                  "all_reduce(sum, Float[2])", "all_reduce(sum, Double[2])");
  auto broadcast = [](int64_t root) {
    return [=](const Group& group) { comm::broadcast(at::ones({2}), root, group).wait(); };
  };
  expect_mismatch(broadcast(0), broadcast(1), "different roots", "broadcast(root 0", "broadcast(root 1");
  auto all_to_all = [](int64_t give, int64_t take) {
    return [=](const Group& group) {
      comm::all_to_all({at::ones({take}), at::ones({take})}, {at::ones({give}), at::ones({give})}, group)
          .wait();
    };
  };
  expect_mismatch(all_to_all(2, 2), all_to_all(2, 3), "rank 0 gives 2 elements where rank 1 expects 3",
                  "all_to_all(", "all_to_all(");
}

TEST(Mismatch, IsNotReportedAgainByLaterCalls) {
  const auto errors = errors_of(2, [](const Group& group) {
    EXPECT_THAT(error_of([&] { comm::all_reduce(at::ones({2 + get_rank()}), ReduceOp::SUM, group).wait(); }),
                HasSubstr("different shapes"));
    // More than can be under way at once: who posts waits for those long before.
    for (int i = 0; i < 200; ++i) comm::all_reduce(at::ones({1}), ReduceOp::SUM, group).wait();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Mismatch, OfMessages) {
  const auto errors = errors_of(2, [](const Group& group) {
    if (get_rank() == 0) comm::send(at::ones({3}), 1, group).wait();
    if (get_rank() == 1) comm::recv(at::ones({2}), 0, group).wait();
  });
  for (const auto& error : errors)
    EXPECT_THAT(error, AllOf(HasSubstr("send(Float[3]"), HasSubstr("recv(Float[2]")));
}

TEST(BadArguments, AreRefusedBeforeAnythingIsSent) {
  run(2, [] {
    const auto group = current_world()->group();
    EXPECT_THAT(error_of([&] { comm::all_reduce(at::ones({2}), ReduceOp::BAND, group).wait(); }),
                HasSubstr("no reduction band of Float"));
    EXPECT_THAT(
        error_of([&] { comm::all_reduce(at::ones({2}, at::kComplexFloat), ReduceOp::MAX, group).wait(); }),
        HasSubstr("no reduction max of ComplexFloat"));
    EXPECT_THAT(error_of([&] { comm::broadcast(at::ones({2}), 5, group).wait(); }),
                HasSubstr("root 5 is not a rank of this group of 2"));
    EXPECT_THAT(error_of([&] { comm::all_gather({at::ones({2})}, at::ones({2}), group).wait(); }),
                HasSubstr("each of the 2 ranks"));
    EXPECT_THAT(error_of([&] { comm::all_reduce(at::Tensor(), ReduceOp::SUM, group).wait(); }),
                HasSubstr("undefined"));
    EXPECT_THAT(error_of([&] { comm::send(at::ones({2}), get_rank(), group).wait(); }),
                HasSubstr("with itself"));
    EXPECT_THAT(error_of([&] { comm::barrier(Group()).wait(); }), HasSubstr("no group"));
    at::Tensor input = at::ones({5}), output = at::ones({4});
    std::vector<int64_t> none, splits{2, 2};
    EXPECT_THAT(error_of([&] { group->all_to_all_single(output, input, none, none); }),
                HasSubstr("cannot be split evenly"));
    EXPECT_THAT(error_of([&] { group->all_to_all_single(output, input, none, splits); }),
                HasSubstr("make 4"));
    comm::barrier(group).wait();
  });
}

TEST(World, RefusesGroupsThatMakeNoSense) {
  run(2, [] {
    const auto world = current_world();
    EXPECT_THAT(error_of([&] { world->group({1 - get_rank()}, at::kCPU); }),
                HasSubstr("is not in the group"));
    EXPECT_THAT(error_of([&] { world->group({0, 1, 0, 1}, at::kCPU); }), HasSubstr("more than once"));
    EXPECT_THAT(error_of([&] {
                  world->group({0, 1, 7}, at::kCPU);
                }),
                HasSubstr("outside the world of 2 ranks"));
    EXPECT_THAT(error_of([&] {
                  world->group({0, 1}, at::kCPU, "carrier-pigeon");
                }),
                AllOf(HasSubstr("no backend \"carrier-pigeon\""), HasSubstr("gloo")));
    EXPECT_EQ(world->group({0, 1}, at::kCPU), world->group());
    EXPECT_EQ(world->ranks_of(world->group({1, 0}, at::kCPU)), (std::vector<int64_t>{1, 0}));
    EXPECT_EQ(world->ranks_of(Group()), std::nullopt);
  });
  EXPECT_THAT(error_of([] { current_world(); }),
              AllOf(HasSubstr("tessera::run"), HasSubstr("init_process_group")));
  EXPECT_THAT(error_of([] { World(WorldOptions{.rank = 3, .size = 2}); }),
              HasSubstr("Rank 3 is not in a world of 2"));
  EXPECT_THAT(error_of([] { World(WorldOptions{.size = INT64_MAX}); }),
              HasSubstr("at most 2147483647 ranks"));
  EXPECT_THAT(error_of([] { World(WorldOptions{.backend = "cpu:"}); }), HasSubstr("cpu:gloo,cuda:nccl"));
  EXPECT_THAT(error_of([] { World(WorldOptions{.backend = "cuba:nccl"}); }), HasSubstr("cpu:gloo,cuda:nccl"));
  EXPECT_THAT(error_of([] { run(0, [] {}); }), HasSubstr("at least one rank"));
  EXPECT_THAT(error_of([] { World(WorldOptions{.backend = "threads"}).group(); }), HasSubstr("tessera::run"));
}

TEST(World, TakesAnyTimeoutForLong) {
  RunOptions options;
  options.timeout = std::chrono::milliseconds::max();
  const auto errors = errors_of(
      2,
      [](const Group& group) {
        if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        comm::barrier(group).wait();
      },
      options);
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(World, ChoosesBackendsByDevice) {
  const World both(WorldOptions{.backend = "cpu:fake,cuda:nccl"});
  EXPECT_EQ(both.backend(at::kCPU), "fake");
  EXPECT_EQ(both.backend(at::kCUDA), "nccl");
  const World plain(WorldOptions{});
  EXPECT_EQ(plain.backend(at::kCPU), "gloo");
  EXPECT_EQ(plain.backend(at::kCUDA), "nccl");
}

TEST(World, CanBeAskedWhileItMakesAGroup) {
  World* asked = nullptr;
  std::future<std::string> name;
  WorldOptions options{.rank = 0, .size = 2, .backend = "fake"};
  // As Python's, which needs the GIL: who asks may hold it.
  options.existing_group = [&](c10::IntArrayRef, c10::DeviceType) {
    name = std::async(std::launch::async, [&] { return asked->name_of(Group()); });
    EXPECT_EQ(name.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    return Group();
  };
  World world(std::move(options));
  asked = &world;
  EXPECT_EQ(world.group()->getSize(), 2);
}

TEST(World, TakesBackendsOfUsers) {
  std::atomic<int> made{0};
  register_backend("mine", [&](const BackendRequest& request) {
    ++made;
    EXPECT_EQ(request.ranks, (std::vector<int64_t>{0, 1}));
    EXPECT_TRUE(request.store);
    return make_backend("threads", request);
  });
  RunOptions options;
  options.backend = "mine";
  run(
      2,
      [] {
        at::Tensor tensor = at::ones({1});
        comm::all_reduce(tensor, ReduceOp::SUM, current_world()->group()).wait();
        EXPECT_EQ(tensor.item<float>(), 2);
      },
      options);
  EXPECT_EQ(made, 2);
  EXPECT_THAT(error_of([] { register_backend("a:b", [](const BackendRequest&) { return nullptr; }); }),
              HasSubstr("cannot name a backend"));
}

TEST(World, FakeMovesNothingAtAnySize) {
  const WorldScope scope(std::make_shared<World>(WorldOptions{.rank = 7, .size = 100000, .backend = "fake"}));
  const auto group = current_world()->group();
  EXPECT_EQ(group->getSize(), 100000);
  at::Tensor tensor = at::full({2}, 5.0f);
  comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
  EXPECT_TRUE(at::equal(tensor, at::full({2}, 5.0f)));
  comm::barrier(group).wait();
}

TEST(Run, GivesRanksTheCallersGradModeAndTheirOwnWorld) {
  const at::NoGradGuard no_grad;
  std::mutex mutex;
  std::vector<int64_t> seen;
  run(3, [&] {
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_EQ(get_world_size(), 3);
    std::lock_guard lock(mutex);
    seen.push_back(get_rank());
  });
  EXPECT_THAT(seen, ::testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_FALSE(has_current_world());
}

TEST(Run, CanBeNestedAndFollowAnother) {
  run(2, [] {
    const int64_t outer = get_rank();
    run(2, [] {
      at::Tensor tensor = at::ones({1});
      comm::all_reduce(tensor, ReduceOp::SUM, current_world()->group()).wait();
      EXPECT_EQ(tensor.item<float>(), 2);
    });
    EXPECT_EQ(get_rank(), outer);
    comm::barrier(current_world()->group()).wait();
  });
}

}  // namespace
}  // namespace tessera
