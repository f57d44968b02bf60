// Ranks as processes: the collective suite over gloo, which backend they get, and what happens when one of them fails or
// dies.

#include <tessera/comm/collectives.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/run.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <signal.h>
#include <sstream>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/util/Logging.h>

#include "tests/comm/collective_suite.h"
#include "tests/comm/two_hosts.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::error_of;
using testing::expect_ok;
using ::testing::HasSubstr;
using testing::kNoHosts;
using testing::run_on;
using testing::spawn_ranks;
using testing::TwoHosts;
using testing::without_agent;

RunOptions on_gloo() {
  RunOptions options;
  options.backend = "gloo";
  return options;
}

RANK_BODY(suite) { launch(1, testing::run_collective_suite_on_all_groups, on_gloo()); }

class Processes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Processes, ::testing::Values(2, 4));

TEST_P(Processes, CollectiveSuite) { expect_ok(spawn_ranks("suite", GetParam())); }

RANK_BODY(world) {
  const auto world = init_process_group();
  EXPECT_EQ(world->backend(at::kCPU), "shm");
  EXPECT_EQ(get_rank(), std::atoi(std::getenv("RANK")));
  EXPECT_EQ(get_world_size(), 2);
  std::thread([&] { EXPECT_EQ(current_world(), world); }).join();  // all threads of the process are this rank
  if (get_rank() == 0) {
    EXPECT_THAT(error_of([] { init_process_group(); }), HasSubstr("already is rank"));
    EXPECT_THAT(error_of([&] { init_process_group(world->options()); }), HasSubstr("already is rank"));
  }
  at::Tensor tensor = at::ones({1});
  comm::all_reduce(tensor, ReduceOp::SUM, world->group()).wait();
  EXPECT_EQ(tensor.item<float>(), 2);
  destroy_process_group();
  EXPECT_FALSE(has_current_world());
  // That rank 0 tried to be one of two worlds does not put it out of step with the others.
  comm::barrier(init_process_group("", std::chrono::seconds(20))->group()).wait();
  destroy_process_group();
}

TEST(ProcessWorld, ComesFromTheEnvironment) { expect_ok(spawn_ranks("world", 2)); }

RANK_BODY(one_throws) {
  const std::string error = error_of([] {
    launch(1, [] {
      const auto group = current_world()->group();
      comm::barrier(group).wait();
      if (get_rank() == 1) throw std::runtime_error("the disk is full");
      comm::all_reduce(at::ones({1000}), ReduceOp::SUM, group).wait();
    });
  });
  const bool culprit = std::string(std::getenv("RANK")) == "1";
  EXPECT_THAT(error, HasSubstr(culprit ? "the disk is full" : "rank 1 failed: the disk is full"));
}

RANK_BODY(comes_while_another_looks) {
  // A wait for gloo looks every 100 ms whether the world has failed, and gets an error of the pause then. The others come
  // while that error is made, which takes long here.
  c10::SetStackTraceFetcher(std::function<std::string()>([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return std::string();
  }));
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        const at::Tensor tensor = at::ones({1});
        for (int turn = 0; turn < 5; ++turn) {
          if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(130));
          comm::all_reduce(tensor, ReduceOp::MAX, group).wait();
        }
      },
      on_gloo());
}

TEST(ProcessWorld, WhatComesWhileAnotherLooksIsNotLate) {
  expect_ok(spawn_ranks("comes_while_another_looks", 2));
}

TEST(ProcessWorld, AnErrorOnOneRankReachesTheOthers) { expect_ok(spawn_ranks("one_throws", 3)); }

RANK_BODY(one_dies) {
  RunOptions options;
  options.timeout = std::chrono::seconds(20);
  const std::string error = error_of([&] {
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
          // Long enough that the kill falls into the midst of it.
          const at::Tensor big = at::ones({4 << 20});
          for (int i = 0; i < 10000; ++i) comm::all_reduce(big, ReduceOp::MAX, group).wait();
          if (killer.joinable()) killer.join();
        },
        options);
  });
  std::cout << "ended with: " << error << std::endl;
  EXPECT_FALSE(error.empty());
}

TEST(ProcessWorld, WhenOneIsKilledTheOthersEndWithAnError) {
  const auto start = std::chrono::steady_clock::now();
  const auto results = spawn_ranks("one_dies", 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(results[rank].ok()) << results[rank].output;
    EXPECT_THAT(results[rank].output, HasSubstr("ended with: "));
  }
}

bool is_rank(int rank) { return std::getenv("RANK") == std::to_string(rank); }

RANK_BODY(keeper_of_the_store_dies) {
  std::atomic<bool> has_returned = false;
  const std::string error = error_of([&] {
    launch(1, [&] {
      const auto group = current_world()->group();
      comm::barrier(group).wait();
      if (get_rank() == 0) raise(SIGKILL);
      if (get_rank() == 1) {
        // An exception of one's own is never replaced.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        throw std::logic_error("a fault of my own");
      }
      comm::all_reduce(at::ones({1000}), ReduceOp::SUM, group).wait();
    });
    has_returned = true;
  });
  EXPECT_FALSE(has_returned);
  if (is_rank(1)) {
    EXPECT_EQ(error, "a fault of my own");
  } else {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 (process "), HasSubstr("was killed by signal 9"),
                             HasSubstr("all_reduce(Float[1000])")));
  }
}

TEST(ProcessWorld, OutlivesTheOneThatKeepsTheStore) {
  const auto results = spawn_ranks("keeper_of_the_store_dies", 3, without_agent());
  EXPECT_EQ(results[0].signal, SIGKILL);
  for (const int rank : {1, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

/// Rank 1 has a child that has all of its connections open too, as workers that load data do, and is killed.
RANK_BODY(killed_with_a_child) {
  RunOptions options;
  options.timeout = std::chrono::seconds(30);
  options.backend = std::getenv("TESSERA_TEST_BACKEND");
  const at::Tensor child = at::zeros({1}, at::kLong);
  const std::string error = error_of([&] {
    launch(
        1,
        [&] {
          const auto group = current_world()->group();
          if (get_rank() == 1) {
            const pid_t pid = ::fork();
            if (pid == 0) {
              // The test waits until nobody can write to the output of rank 1.
              ::close(STDOUT_FILENO);
              ::close(STDERR_FILENO);
              ::sleep(120);
              ::_exit(0);
            }
            child.fill_(static_cast<int64_t>(pid));
          }
          comm::broadcast(child, 1, group).wait();
          if (get_rank() == 1) raise(SIGKILL);
          comm::all_reduce(at::ones({1000}), ReduceOp::SUM, group).wait();
        },
        options);
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1 (process "), HasSubstr("was killed by signal 9")));
  const auto pid = static_cast<pid_t>(child.item<int64_t>());
  ASSERT_GT(pid, 0);
  if (is_rank(0)) EXPECT_EQ(::kill(pid, SIGKILL), 0) << "the child was to be alive, and hold the connections";
}

TEST(ProcessWorld, NoticesTheDeathOfOneWhoseChildrenLive) {
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    support::SpawnOptions options;
    options.environment = {{"TESSERA_TEST_BACKEND", backend}};
    const auto results = spawn_ranks("killed_with_a_child", 3, options);
    EXPECT_EQ(results[1].signal, SIGKILL);
    for (const int rank : {0, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
  }
}

/// Rank 0, which keeps the store, is stopped: libtorch waits for a store's answer without a limit.
RANK_BODY(keeper_of_the_store_stops) {
  const std::string where = std::getenv("TESSERA_TEST_WHERE"), path = std::getenv("TESSERA_TEST_FILE");
  const auto meet = [&](const std::string& what) {
    std::ofstream(path + what + std::getenv("RANK")) << "is here" << std::endl;
    for (const char* rank : {"0", "1", "2"})
      while (!std::ifstream(path + what + rank).good())
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  const auto stop_first = [&](const std::string& here) {
    if (where != here) return;
    if (here != "start") meet("again");
    if (is_rank(0)) {
      std::ofstream(path) << ::getpid() << std::endl;
      raise(SIGSTOP);
    }
    // Until it is stopped.
    for (std::string state; state != "T"; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      std::string pid, name;
      std::ifstream(path) >> pid;
      std::ifstream("/proc/" + pid + "/stat") >> pid >> name >> state;
    }
  };
  meet("first");  // on a busy machine they may start far apart
  const std::string error = error_of([&] {
    if (is_rank(0) || where != "start") init_process_group("", std::chrono::seconds(5));
    stop_first("start");
    if (where == "start") init_process_group("", std::chrono::seconds(5));
    stop_first("first group");
    const auto group = current_world()->group();
    comm::barrier(group).wait();
    stop_first("next group");
    const auto turned = current_world()->group({2, 1, 0}, at::kCPU);
    comm::barrier(turned).wait();
    stop_first("collective");
    comm::all_reduce(at::ones({1000}), ReduceOp::SUM, turned).wait();
  });
  if (where == "start")
    EXPECT_THAT(error,
                AllOf(HasSubstr("does not reach the store"), HasSubstr("did not answer within 5000 ms")));
  else
    EXPECT_THAT(error,
                AllOf(HasSubstr("gave up after 5000 ms"), HasSubstr("rank 0"), HasSubstr("does not answer")));
  destroy_process_group();
}

TEST(ProcessWorld, DoesNotHangWhenTheOneThatKeepsTheStoreIsStopped) {
  const std::string path = ::testing::TempDir() + "tessera_stopped_" + std::to_string(::getpid());
  for (const auto& [where, backend] :
       std::vector<std::pair<std::string, std::string>>{{"start", "gloo"},
                                                        {"first group", "shm"},
                                                        {"next group", "gloo"},
                                                        {"next group", "shm"},
                                                        {"collective", "gloo"},
                                                        {"collective", "shm"}}) {
    SCOPED_TRACE(where + " on " + backend);
    auto options = without_agent();
    options.environment.insert(options.environment.end(), {{"TESSERA_TEST_WHERE", where},
                                                           {"TESSERA_TEST_FILE", path},
                                                           {"TESSERA_BACKEND", backend},
                                                           {"TESSERA_WAIT_REPORT_SECONDS", "1"}});
    std::thread waiter;
    options.after_start = [&](const std::vector<pid_t>& pids) {
      waiter = std::thread([pids] {
        siginfo_t info{};
        for (const int rank : {1, 2})
          ::waitid(P_PID, static_cast<id_t>(pids[rank]), &info, WEXITED | WNOWAIT);
        ::kill(pids[0], SIGKILL);
      });
    };
    const auto results = spawn_ranks("keeper_of_the_store_stops", 3, options);
    waiter.join();
    for (const char* what : {"", "first0", "first1", "first2", "again0", "again1", "again2"})
      std::remove((path + what).c_str());
    for (const int rank : {1, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
  }
}

RANK_BODY(killed_at_its_end) {
  const auto start = std::chrono::steady_clock::now();
  std::string error;
  try {
    launch(1, [] {
      comm::barrier(current_world()->group()).wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (get_rank() == 1) raise(SIGKILL);
    });
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  }
  if (is_rank(0)) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1 (process "), HasSubstr("was killed by signal 9")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));  // not the timeout
  }
}

TEST(ProcessWorld, OneThatIsKilledAfterItsLastCollectiveIsMissed) {
  const auto results = spawn_ranks("killed_at_its_end", 3, without_agent());
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const int rank : {0, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

RANK_BODY(made_again) {
  // Worlds one after the other, in the same processes, by the same store.
  for (int turn = 0; turn < 3; ++turn) {
    const auto world = init_process_group();
    at::Tensor tensor = at::ones({1});
    const Group group = world->group();
    comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
    EXPECT_EQ(tensor.item<float>(), 3);
    destroy_process_group();
    EXPECT_THAT(error_of([&] { comm::all_reduce(tensor, ReduceOp::SUM, group).wait(); }),
                HasSubstr("has ended with its world"));
  }
}

TEST(ProcessWorld, CanBeMadeAgain) { expect_ok(spawn_ranks("made_again", 3)); }

RANK_BODY(token) {
  RunOptions options;
  options.timeout = std::chrono::seconds(3);
  const std::string error = error_of([&] {
    launch(
        1, [] { current_world()->group(); }, options);
  });
  EXPECT_THAT(error, AllOf(HasSubstr("has never come"), HasSubstr("TESSERA_JOB_TOKEN")));
}

TEST(ProcessWorld, LetsNobodyInWithoutTheToken) {
  support::SpawnOptions options;
  options.prefix = [](int64_t rank) {
    return std::vector<std::string>{"env", "TESSERA_JOB_TOKEN=" + std::string(rank == 0 ? "ours" : "theirs")};
  };
  expect_ok(spawn_ranks("token", 2, options));
}

RANK_BODY(mismatch) {
  const auto mismatch = [] {
    const auto group = current_world()->group();
    const bool odd = get_rank() == 1;
    auto expect = [&](const std::function<void()>& call, const std::string& what, const std::string& mine,
                      const std::string& other) {
      EXPECT_THAT(error_of(call),
                  AllOf(HasSubstr(what), HasSubstr(c10::str("rank 0 called ", odd ? other : mine)),
                        HasSubstr(c10::str("rank 1 called ", odd ? mine : other))));
    };
    expect(
        [&] {
          odd ? comm::barrier(group).wait() : comm::all_reduce(at::ones({2}), ReduceOp::SUM, group).wait();
        },
        "different collectives", odd ? "barrier()" : "all_reduce(sum, Float[2])",
        odd ? "all_reduce(sum, Float[2])" : "barrier()");
    expect([&] { comm::all_reduce(at::ones({odd ? 3 : 2}), ReduceOp::SUM, group).wait(); },
           "different shapes", odd ? "all_reduce(sum, Float[3])" : "all_reduce(sum, Float[2])",
           odd ? "all_reduce(sum, Float[2])" : "all_reduce(sum, Float[3])");
    expect(
        [&] { comm::all_reduce(at::ones({2}, odd ? at::kDouble : at::kFloat), ReduceOp::SUM, group).wait(); },
        "different dtypes", "all_reduce(sum, ", "all_reduce(sum, ");
    expect([&] { comm::broadcast(at::ones({2}), get_rank(), group).wait(); }, "different roots",
           c10::str("broadcast(root ", get_rank()), c10::str("broadcast(root ", 1 - get_rank()));
    at::Tensor tensor = at::ones({1});  // the group still works
    comm::all_reduce(tensor, ReduceOp::SUM, group).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  };
  launch(1, mismatch, on_gloo());
}

TEST(ProcessWorld, MismatchedCallsAreReportedWhenAskedFor) {
  support::SpawnOptions options;
  options.environment = {{"TESSERA_CHECK_COLLECTIVES", "1"}};
  expect_ok(spawn_ranks("mismatch", 2, options));
}

TEST(ProcessWorld, TheSuitePassesWithChecksOn) {
  support::SpawnOptions options;
  options.environment = {{"TESSERA_CHECK_COLLECTIVES", "1"}};
  expect_ok(spawn_ranks("suite", 2, options));
}

/// Both drop a collective; then rank 1 does not come.
RANK_BODY(dropped) {
  // On a busy machine they may start far apart.
  const auto store = connect_store(*launch_info(), std::chrono::minutes(2));
  store->set("here/" + std::string(std::getenv("RANK")), "");
  store->wait({"here/0", "here/1"}, std::chrono::minutes(2));
  RunOptions options = on_gloo();
  options.timeout = std::chrono::seconds(4);
  const std::string error = error_of([&] {
    launch(
        1,
        [] {
          const auto group = current_world()->group();
          const at::Tensor tensor = at::ones({7});
          { const auto dropped = comm::all_reduce(tensor, ReduceOp::SUM, group); }
          comm::barrier(group).wait();
          if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(10));
          comm::barrier(group).wait();
        },
        options);
  });
  EXPECT_THAT(error, HasSubstr("rank 1 is in no collective; its last one, barrier(), call 2 of group"));
}

TEST(ProcessWorld, DoesNotWaitInACollectiveThatWasDropped) { expect_ok(spawn_ranks("dropped", 2)); }

RANK_BODY(killed_while_others_compare) {
  const std::string error = error_of([] {
    launch(
        1,
        [] {
          const auto group = current_world()->group();
          comm::barrier(group).wait();
          if (get_rank() == 1) raise(SIGKILL);
          comm::all_reduce(at::ones({1000}), ReduceOp::SUM, group).wait();
        },
        on_gloo());
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1 (process "), HasSubstr("was killed by signal 9"),
                           HasSubstr("all_reduce(Float[1000]), call 2 of group [0, 1, 2]")));
}

TEST(ProcessWorld, AKilledRankIsNamedWithChecksOn) {
  support::SpawnOptions options;
  options.environment = {{"TESSERA_CHECK_COLLECTIVES", "1"}};
  const auto results = spawn_ranks("killed_while_others_compare", 3, options);
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const int rank : {0, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

/// As mpirun or srun starts them: with none of torchrun's variables, and rank 0 keeps the store.
support::SpawnOptions started_by(const std::string& launcher) {
  support::SpawnOptions options;
  const auto port = without_agent().environment.back();
  options.prefix = [=](int64_t rank) {
    std::vector<std::string> command{"env"};
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
                             "TORCHELASTIC_USE_AGENT_STORE"}) {
      command.insert(command.end(), {"-u", name});
    }
    command.push_back(port.first + "=" + port.second);
    const std::string number = std::to_string(rank);
    if (launcher == "mpirun") {
      command.insert(command.end(), {"OMPI_COMM_WORLD_RANK=" + number, "OMPI_COMM_WORLD_SIZE=3",
                                     "OMPI_COMM_WORLD_LOCAL_RANK=" + number, "OMPI_COMM_WORLD_LOCAL_SIZE=3"});
    } else {
      command.insert(command.end(), {"SLURM_PROCID=" + number, "SLURM_NTASKS=3", "SLURM_LOCALID=" + number,
                                     "SLURM_JOB_NODELIST=localhost", "SLURM_JOB_ID=7"});
    }
    return command;
  };
  return options;
}

/// One is killed, by whichever launcher they were started.
RANK_BODY(one_is_killed) {
  const int64_t victim = std::atoi(std::getenv("TESSERA_TEST_VICTIM"));
  const std::string error = error_of([&] {
    launch(1, [&] {
      EXPECT_EQ(get_world_size(), 3);
      const auto group = current_world()->group();
      comm::barrier(group).wait();
      if (get_rank() == victim) raise(SIGKILL);
      comm::all_reduce(at::ones({1000}), ReduceOp::SUM, group).wait();
    });
  });
  EXPECT_THAT(error, AllOf(HasSubstr(c10::str("rank ", victim, " (process ")),
                           HasSubstr("was killed by signal 9"), HasSubstr("all_reduce(Float[1000])")));
}

TEST(ProcessWorld, NoticesADeathUnderEveryLauncher) {
  for (const std::string launcher : {"mpirun", "slurm"}) {
    for (const int victim : {0, 2}) {
      SCOPED_TRACE(c10::str(launcher, ", rank ", victim));
      auto options = started_by(launcher);
      options.environment = {{"TESSERA_TEST_VICTIM", std::to_string(victim)},
                             {"TESSERA_BACKEND", launcher == "mpirun" ? "gloo" : "shm"}};
      const auto results = spawn_ranks("one_is_killed", 3, options);
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim)
          EXPECT_EQ(results[rank].signal, SIGKILL);
        else
          EXPECT_TRUE(results[rank].ok()) << results[rank].output;
      }
    }
  }
}

/// The addresses, as the kernel writes them, at which this process listens for TCP.
std::set<std::string> listening_addresses() {
  std::set<std::string> sockets, addresses;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    sockets.insert(std::filesystem::read_symlink(entry.path(), none).string());
  }
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmissions, user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmissions >> user >> timeout >>
          inode;
      if (state == "0A" && sockets.count("socket:[" + inode + "]"))
        addresses.insert(local.substr(0, local.find(':')));
    }
  }
  return addresses;
}

RANK_BODY(listens) {
  RunOptions options;
  options.backend = std::getenv("TESSERA_TEST_BACKEND");
  launch(
      1,
      [] {
        const auto group = current_world()->group();
        comm::barrier(group).wait();
        EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"});  // 127.0.0.1
        comm::barrier(group).wait();
      },
      options);
}

TEST(ProcessWorld, ListensOnThisMachineAloneIfItIsAllThereIs) {
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    auto options = started_by("mpirun");
    options.environment = {{"TESSERA_TEST_BACKEND", backend}};
    expect_ok(spawn_ranks("listens", 3, options));
  }
}

TEST(ProcessWorld, CrossesNetworkNamespaces) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "suite", {0, 1}), (std::vector<int>{0, 0}));
}

RANK_BODY(two_hosts) {
  launch(1, [] {
    const auto world = current_world();
    EXPECT_EQ(world->backend(at::kCPU), "gloo");
    EXPECT_EQ(world->group()->getDefaultBackend()->getBackendName(), "gloo");
    EXPECT_EQ(world->group({get_rank()}, at::kCPU)->getDefaultBackend()->getBackendName(), "shm");
    EXPECT_THAT(error_of([&] {
                  world->group({1, 0}, at::kCPU, "shm");
                }),
                AllOf(HasSubstr("can share memory"), HasSubstr("Use \"gloo\" between them")));
    comm::barrier(world->group()).wait();
  });
}

TEST(ProcessWorld, SharesNoMemoryBetweenHosts) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "two_hosts", {0, 1}), (std::vector<int>{0, 0}));
}

RANK_BODY(host_is_lost) {
  init_process_group("gloo", std::chrono::seconds(120));
  const auto group = current_world()->group();
  comm::barrier(group).wait();
  if (get_rank() == 1) {
    const std::string pull = "ip link set " + std::string(std::getenv("GLOO_SOCKET_IFNAME")) + " down";
    ASSERT_EQ(std::system(pull.c_str()), 0);
  }
  EXPECT_THAT(error_of([&] { comm::barrier(group).wait(); }),
              AllOf(HasSubstr(c10::str("rank ", 1 - get_rank(), " (process ")),
                    HasSubstr("is not reachable any more")));
}

TEST(ProcessWorld, NoticesThatAHostIsGone) {
  const TwoHosts hosts;
  if (!hosts.ok()) GTEST_SKIP() << kNoHosts;
  EXPECT_EQ(run_on(hosts, "host_is_lost", {0, 1}), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace tessera
