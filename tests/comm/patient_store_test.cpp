// A store whose keeper is stopped keeps nobody waiting.

#include <tessera/comm/patient_store.h>

#include <cstdlib>
#include <signal.h>
#include <thread>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using comm::PatientStore;
using testing::expect_error;
using testing::expect_ok;
using testing::spawn_ranks;
using namespace std::chrono_literals;

std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// Rank 0 keeps the store, rank 1 stops it.
RANK_BODY(stopped_keeper) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  options.isServer = std::string(std::getenv("RANK")) == "0";
  options.timeout = 30s;
  const c10::intrusive_ptr<c10d::Store> common =
      c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
  if (options.isServer) {
    common->set("keeper", std::to_string(getpid()));
    common->wait({"done"});
    return;
  }
  PatientStore store(common, [] {});
  const auto keeper = static_cast<pid_t>(std::stoi(text(store.get("keeper"))));

  // It answers: as the store itself does.
  store.set("key", "1");
  EXPECT_TRUE(store.check({"key"}));
  EXPECT_EQ(store.add("key", 2), 3);
  EXPECT_EQ(store.compareSet("key", "3", "4"), "4");
  EXPECT_EQ(store.clone()->get_to_str("key"), "4");
  EXPECT_GE(store.getNumKeys(), 2);
  store.wait({"key"});
  EXPECT_TRUE(store.deleteKey("key"));
  EXPECT_FALSE(store.check({"key"}));
  expect_error<c10::DistStoreError>([&] { store.wait({"nothing"}, 50ms); }, {"nothing"});

  // It is stopped.
  store.setTimeout(300ms);
  ASSERT_EQ(kill(keeper, SIGSTOP), 0);
  expect_error<c10::DistStoreError>(
      [&] {
        while (true) store.check({"key"});  // until the signal has arrived
      },
      {"did not answer within 300 ms", "stopped"});
  const std::vector<std::function<void()>> calls = {
      [&] { store.set("key", "6"); },
      [&] { store.get("key"); },
      [&] { store.check({"key"}); },
      [&] { store.add("key", 1); },
      [&] { store.deleteKey("key"); },
      [&] { store.getNumKeys(); },
      [&] { store.wait({"key"}); },
      [&] { store.clone(); },
      [&] { store.compareSet("key", "5", "6"); },
  };
  for (const auto& call : calls)
    expect_error<c10::DistStoreError>(call, {"has not answered an earlier call"});

  // Who would answer is known to have failed.
  ASSERT_EQ(kill(keeper, SIGCONT), 0);
  PatientStore other(common->clone(), [] { TORCH_CHECK(false, "rank 0 has failed"); });
  ASSERT_EQ(kill(keeper, SIGSTOP), 0);
  expect_error<c10::Error>(
      [&] {
        while (true) other.check({"key"});
      },
      {"rank 0 has failed"});

  // It goes on, and so do calls, when the one that was given up has its answer.
  ASSERT_EQ(kill(keeper, SIGCONT), 0);
  while (true) {
    try {
      store.set("key", "8");
      break;
    } catch (const c10::DistStoreError&) {
      std::this_thread::sleep_for(5ms);
    }
  }
  EXPECT_EQ(text(store.get("key")), "8");
  store.set("done", "");
}

TEST(PatientStore, KeepsNobodyWaiting) {
  expect_ok(spawn_ranks("stopped_keeper", 2, testing::without_agent()));
}

}  // namespace
}  // namespace tessera
