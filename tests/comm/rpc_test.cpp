// Calls between ranks that are processes, over libtorch's RPC.

#include <tessera/comm/collectives.h>
#include <tessera/comm/rpc.h>
#include <tessera/comm/run.h>

#include <signal.h>
#include <thread>
#include <unistd.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_error;
using testing::expect_ok;
using ::testing::HasSubstr;
using testing::spawn_ranks;
using namespace std::chrono_literals;

at::Tensor add_on(int64_t rank, std::optional<std::chrono::milliseconds> timeout = {}) {
  return rpc::rpc_sync(rank, "aten::add.Tensor", {at::ones({3}), at::arange(3), 10 * rank}, timeout)
      .toTensor();
}

at::Tensor sum_on(int64_t rank) { return at::ones({3}) + at::arange(3) * 10 * rank; }

void barrier() { comm::barrier(current_world()->group()).wait(); }

RANK_BODY(calls) {
  launch(1, [] {
    const int64_t size = get_world_size();
    expect_error<c10::Error>([] { add_on(0); }, {"RPC is not initialized", "init_rpc"});
    rpc::shutdown();  // nothing to end
    for (int session = 0; session < 2; ++session) {
      rpc::Options options;
      if (session == 1) options.name = c10::str("trainer:", get_rank());
      rpc::init_rpc(options);
      rpc::init_rpc(options);  // it is already
      rpc::init_rpc();
      options.name = "another";
      expect_error<c10::Error>([&] { rpc::init_rpc(options); }, {"already is worker", "shutdown"});

      for (int64_t rank = 0; rank < size; ++rank) {
        const std::string name = c10::str(session == 0 ? "worker" : "trainer:", rank);
        EXPECT_EQ(rpc::worker_name(rank), name);
        EXPECT_EQ(rpc::worker_rank(name), rank);
        if (rank == get_rank()) continue;
        EXPECT_TRUE(add_on(rank).equal(sum_on(rank)));
        auto remote = [&] {
          return rpc::remote(rank, "aten::add.Tensor", {at::ones({3}), at::arange(3), 10 * rank})->toHere();
        };
        if (session == 0) EXPECT_TRUE(remote().toTensor().equal(sum_on(rank)));
        if (session == 1) expect_error<c10::Error>(remote, {"shut down and initialized again", "rpc_sync"});
        expect_error<c10::Error>(
            [&] {
              rpc::rpc_sync(rank, "aten::mm", {at::ones({3}), at::ones({3})});
            },
            {name, "self must be a matrix"});
      }
      EXPECT_EQ(rpc::worker_rank("nobody"), std::nullopt);
      expect_error<c10::IndexError>([&] { rpc::worker_name(size); }, {"no worker of rank"});
      expect_error<c10::IndexError>([&] { add_on(-1); }, {"no worker of rank -1"});
      expect_error<c10::ValueError>([] { rpc::rpc_sync(0, "aten::nothing", {}); }, {"no operator"});
      expect_error<c10::ValueError>([] { rpc::rpc_sync(0, "prim::device", {}); }, {"no operator", "aten"});
      expect_error<c10::ValueError>([] { add_on(0, 0ms); }, {"timeout must be positive"});

      rpc::shutdown();
      EXPECT_FALSE(rpc::is_initialized());
      rpc::shutdown();
    }
  });
}

TEST(Rpc, CallsOtherProcesses) {
  const auto results = spawn_ranks("calls", 3);
  expect_ok(results);
  for (const auto& result : results)
    EXPECT_EQ(result.output.find("RPC agent for"), std::string::npos) << result.output;
}

RANK_BODY(bad_starts) {
  launch(1, [] {
    rpc::Options options;
    options.timeout = 2s;
    options.name = "same";
    expect_error<c10::ValueError>([&] { rpc::init_rpc(options); }, {"ranks 0 and 1", "both called \"same\""});
    options.name = get_rank() == 1 ? "not a name" : "";
    expect_error<c10::ValueError>([&] { rpc::init_rpc(options); }, {"rank 1 cannot take part", "not a name"});
    options.name = "";
    if (get_rank() == 0)
      expect_error<c10::Error>([&] { rpc::init_rpc(options); }, {"rank 0 waited 2000 ms for ranks [1]"});
    options.threads = 0;
    expect_error<c10::ValueError>([&] { rpc::init_rpc(options); }, {"threads"});
    EXPECT_FALSE(rpc::is_initialized());
    barrier();
  });
}

TEST(Rpc, SaysWhyItCannotStart) { expect_ok(spawn_ranks("bad_starts", 2)); }

RANK_BODY(late) {
  launch(1, [] {
    for (const int64_t early : {0, 1, 0}) {
      rpc::Options options;
      options.timeout = 200ms;
      const std::string others = early == 0 ? "[1, 2]" : "[0]";
      for (int i = 0; i < 2 && get_rank() == early; ++i)
        expect_error<c10::Error>([&] { rpc::init_rpc(options); }, {"waited 200 ms for ranks " + others});
      barrier();
      rpc::init_rpc();
      for (int64_t rank = 0; rank < get_world_size(); ++rank)
        if (rank != get_rank()) EXPECT_TRUE(add_on(rank).equal(sum_on(rank)));
      rpc::shutdown();
    }
  });
}

TEST(Rpc, RanksMeetAlsoIfOneHadGivenUp) { expect_ok(spawn_ranks("late", 3)); }

RANK_BODY(silent) {
  launch(1, [] {
    rpc::init_rpc();
    const at::Tensor mine = at::full({1}, static_cast<int64_t>(getpid()), at::kLong);
    comm::broadcast(mine, 1, current_world()->group()).wait();
    if (get_rank() == 1) {
      raise(SIGSTOP);
    } else {
      const auto pid = static_cast<pid_t>(mine.item<int64_t>());
      expect_error<c10::Error>([] { add_on(1, 500ms); }, {"\"worker1\" did not answer within 500 ms"});
      expect_error<c10::Error>([] { rpc::shutdown(true, 500ms); },
                               {"waited 500 ms for ranks [1]", "has been shut down"});
      EXPECT_FALSE(rpc::is_initialized());
      kill(pid, SIGCONT);
    }
    barrier();
    rpc::shutdown(false);
  });
}

TEST(Rpc, APeerThatDoesNotAnswerIsAnError) { expect_ok(spawn_ranks("silent", 2)); }

RANK_BODY(killed) {
  launch(1, [] {
    rpc::Options options;
    options.timeout = 20s;
    rpc::init_rpc(options);
    EXPECT_TRUE(add_on(1 - get_rank()).equal(sum_on(1 - get_rank())));
    barrier();
    if (get_rank() == 1) raise(SIGKILL);
    std::string error;
    while (error.empty()) {  // until the kill has happened
      try {
        add_on(1);
      } catch (const c10::Error& failure) {
        error = failure.what_without_backtrace();
      }
    }
    EXPECT_THAT(error, HasSubstr("The call of worker \"worker1\" failed"));
    expect_error<c10::Error>([] { add_on(1); }, {"worker1"});  // nor is there one to connect to
    expect_error<c10::Error>([] { rpc::shutdown(true, 1s); }, {"rank 1 (process ", "was killed by signal 9"});
  });
}

TEST(Rpc, AKilledPeerIsAnError) {
  const auto results = spawn_ranks("killed", 2);
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_TRUE(results[0].ok()) << results[0].output;
}

RANK_BODY(killed_before_it_starts) {
  launch(1, [] {
    barrier();
    if (get_rank() == 0) raise(SIGKILL);
    expect_error<c10::Error>([] { rpc::init_rpc(); }, {"rank 0 (process ", "was killed by signal 9"});
  });
}

TEST(Rpc, AKilledPeerIsAnErrorAtTheStart) {
  const auto results = spawn_ranks("killed_before_it_starts", 3);
  EXPECT_EQ(results[0].signal, SIGKILL);
  for (const int rank : {1, 2}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

RANK_BODY(leaves) {
  launch(1, [] {
    rpc::init_rpc();
    EXPECT_TRUE(add_on(1 - get_rank()).equal(sum_on(1 - get_rank())));
    barrier();
  });
}

TEST(Rpc, AProcessMayEndWithoutShutdown) { expect_ok(spawn_ranks("leaves", 2)); }

TEST(Rpc, ThreadsNeedNone) {
  run(2, [] {
    rpc::init_rpc();
    EXPECT_FALSE(rpc::is_initialized());
    rpc::shutdown();
  });
  expect_error<c10::Error>([] { rpc::init_rpc(); }, {"no ranks here"});
}

}  // namespace
}  // namespace tessera
