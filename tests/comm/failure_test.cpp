// What goes wrong on one rank reaches the others, says who and why, and never hangs.

#include <tessera/comm/backends.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>

#include <mutex>
#include <stdexcept>

#include <ATen/ATen.h>

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

/// The same mistake on rank 1, told to both with both sides; then the group still works.
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
  EXPECT_THAT(error_of([] { World(WorldOptions{.backend = "cpu:"}); }), HasSubstr("cpu:gloo,cuda:nccl"));
  EXPECT_THAT(error_of([] { run(0, [] {}); }), HasSubstr("at least one rank"));
  EXPECT_THAT(error_of([] { World(WorldOptions{.backend = "threads"}).group(); }), HasSubstr("tessera::run"));
}

TEST(World, ChoosesBackendsByDevice) {
  const World both(WorldOptions{.backend = "cpu:fake,cuda:nccl"});
  EXPECT_EQ(both.backend(at::kCPU), "fake");
  EXPECT_EQ(both.backend(at::kCUDA), "nccl");
  const World plain(WorldOptions{});
  EXPECT_EQ(plain.backend(at::kCPU), "gloo");
  EXPECT_EQ(plain.backend(at::kCUDA), "nccl");
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
