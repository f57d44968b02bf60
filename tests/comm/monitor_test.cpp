// How processes hear of each other's end: the parts, with several monitors in one process.

#include <tessera/comm/call_record.h>
#include <tessera/comm/monitor.h>
#include <tessera/comm/processes.h>
#include <tessera/comm/sockets.h>

#include <chrono>
#include <numeric>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr milliseconds kPatience(5000);

// --- The net of connections --------------------------------------------------------------------------------

/// How many ranks news from the lowest rank that is left reaches.
size_t reached(int64_t size, const std::set<int64_t>& dead) {
  std::set<int64_t> known;
  std::vector<int64_t> next;
  for (int64_t rank = 0; rank < size && next.empty(); ++rank) {
    if (!dead.count(rank)) next.push_back(rank);
  }
  while (!next.empty()) {
    const int64_t rank = next.back();
    next.pop_back();
    if (!known.insert(rank).second) continue;
    for (const int64_t other : monitored_neighbours(rank, size)) {
      if (!dead.count(other)) next.push_back(other);
    }
  }
  return known.size();
}

TEST(Neighbours, AreMutualAndFew) {
  for (int64_t size = 1; size <= 200; ++size) {
    for (int64_t rank = 0; rank < size; ++rank) {
      const auto neighbours = monitored_neighbours(rank, size);
      EXPECT_FALSE(neighbours.count(rank));
      EXPECT_LE(neighbours.size(), 16u);
      for (const int64_t other : neighbours) EXPECT_TRUE(monitored_neighbours(other, size).count(rank));
    }
  }
  EXPECT_EQ(monitored_neighbours(0, 4).size(), 3u);
  EXPECT_EQ(monitored_neighbours(3, 5).size(), 4u);
}

TEST(Neighbours, CarryNewsAroundAnyTwoDead) {
  for (int64_t size = 3; size <= 40; ++size) {
    for (int64_t a = 0; a < size; ++a) {
      for (int64_t b = a; b < size; ++b) {
        const std::set<int64_t> dead{a, b};
        EXPECT_EQ(reached(size, dead), static_cast<size_t>(size) - dead.size())
            << size << " without " << a << ", " << b;
      }
    }
  }
}

// --- Records -----------------------------------------------------------------------------------------------

Group a_group() {
  return c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 2);
}

TEST(Record, SaysWhatTheRankIsDoing) {
  CallRecord record;
  EXPECT_EQ(record.state().text, "in no collective, and has been in none");
  const Group group = a_group();
  const at::Tensor tensor = at::ones({3, 4});
  const uint64_t id = record.begin("all_reduce", &tensor, group, {0, 2}, "[0, 2]");
  EXPECT_EQ(record.describe(id), "all_reduce(Float[3, 4]), call 1 of group [0, 2]");
  EXPECT_THAT(record.state().text, HasSubstr("in all_reduce(Float[3, 4]), call 1 of group [0, 2], for 0."));
  EXPECT_EQ(record.call_with(2), record.describe(id));
  EXPECT_EQ(record.call_with(1), "");
  record.end(id);
  EXPECT_EQ(record.call_with(2), "");
  EXPECT_THAT(record.state().text,
              AllOf(HasSubstr("in no collective; its last one, all_reduce"), HasSubstr(" ago")));
  // Messages do not count among collectives, which are the same on all ranks of a group.
  record.end(record.begin("send", &tensor, group, {0, 2}, "[0, 2]"));
  EXPECT_EQ(record.describe(record.begin("barrier", nullptr, group, {0, 2}, "[0, 2]")),
            "barrier(), call 2 of group [0, 2]");
}

TEST(Record, IsBoundedAndGoesToOthersAsBytes) {
  CallRecord record;
  const Group group = a_group();
  for (int i = 0; i < 1000; ++i) record.end(record.begin("barrier", nullptr, group, {0, 1}, "[0, 1]"));
  const RankState state = record.state();
  EXPECT_EQ(state.calls.size(), 32u);
  EXPECT_EQ(state.calls.back().number, 1000u);
  const RankState other = state_from_bytes(to_bytes(state));
  EXPECT_EQ(other.text, state.text);
  ASSERT_EQ(other.calls.size(), state.calls.size());
  EXPECT_EQ(other.calls[5].text, state.calls[5].text);
  const std::string bytes = to_bytes(state);
  for (size_t size = 0; size < bytes.size(); size += 7)
    EXPECT_THROW(state_from_bytes(bytes.substr(0, size)), c10::Error);
}

RankState calls_of(std::vector<std::pair<std::string, std::string>> calls) {
  RankState state;
  std::map<std::string, uint64_t> numbers;
  for (auto& [group, text] : calls) state.calls.push_back({group, ++numbers[group], text, text});
  return state;
}

TEST(Record, FindsTheFirstDifference) {
  const auto same = calls_of({{"[0, 1]", "a"}, {"[0, 1]", "b"}, {"[0, 1]", "c"}});
  const auto behind = calls_of({{"[0, 1]", "a"}, {"[0, 1]", "b"}});
  const auto other = calls_of({{"[0, 1]", "a"}, {"[1, 2]", "x"}, {"[0, 1]", "d"}, {"[0, 1]", "e"}});
  EXPECT_EQ(first_difference({{0, same}, {1, behind}}), "");
  EXPECT_THAT(first_difference({{0, same}, {1, other}}),
              HasSubstr("first in call 2 of group [0, 1]: rank 0 called b, rank 1 called d"));
}

// --- Processes ---------------------------------------------------------------------------------------------

/// A child that has said which process it is, and ends when the pipe is closed.
struct Child {
  template <class End>
  explicit Child(const End& end) {
    int to_child[2], to_parent[2];
    if (::pipe(to_child) != 0 || ::pipe(to_parent) != 0) std::abort();
    pid = ::fork();
    if (pid == 0) {
      ::close(to_child[1]);
      const std::string name = this_process();
      (void)!::write(to_parent[1], name.data(), name.size());
      ::close(to_parent[1]);
      char byte = 0;
      (void)!::read(to_child[0], &byte, 1);
      end();
      ::_exit(0);
    }
    ::close(to_child[0]);
    ::close(to_parent[1]);
    char buffer[512];
    const ssize_t size = ::read(to_parent[0], buffer, sizeof buffer);
    process.assign(buffer, static_cast<size_t>(std::max<ssize_t>(size, 0)));
    ::close(to_parent[0]);
    pipe = to_child[1];
  }
  void end_now() const { ::close(pipe); }
  void wait_for_end(const ProcessWatch& watch) const {
    for (int i = 0; i < 500 && !watch.end(); ++i) std::this_thread::sleep_for(milliseconds(10));
  }
  pid_t pid = 0;
  int pipe = -1;
  std::string process;
};

TEST(Process, HowItEndedIsKnown) {
  const Child killed([] { ::raise(SIGKILL); }), exited([] { ::_exit(3); });
  const ProcessWatch first(killed.process), second(exited.process);
  EXPECT_EQ(first.end(), std::nullopt);
  EXPECT_FALSE(has_ended(killed.process));
  EXPECT_THAT(describe_process(killed.process), HasSubstr("process " + std::to_string(killed.pid) + " on "));
  killed.end_now();
  exited.end_now();
  killed.wait_for_end(first);
  exited.wait_for_end(second);
  EXPECT_EQ(first.end(), "was killed by signal 9 (Killed)");
  EXPECT_EQ(second.end(), "exited with code 3");
  ::waitpid(killed.pid, nullptr, 0);
  ::waitpid(exited.pid, nullptr, 0);
  // Where the kernel does not keep it, that it has ended is all there is to say.
  EXPECT_THAT(*first.end(), ::testing::AnyOf("was killed by signal 9 (Killed)", "has ended"));
  EXPECT_THAT(*second.end(), ::testing::AnyOf("exited with code 3", "has ended"));
}

TEST(Process, ThatCannotBeSeenHasNotEnded) {
  EXPECT_FALSE(has_ended("another-boot/pid:[1] 4242 17 node7"));
  EXPECT_FALSE(has_ended(""));
  EXPECT_FALSE(has_ended("no sense"));
  EXPECT_EQ(ProcessWatch("another-boot/pid:[1] 4242 17 node7").end(), std::nullopt);
}

// --- Monitors ----------------------------------------------------------------------------------------------

struct Ranks {
  /// `present`: those that there are at first; else all. `call`: what they are in.
  explicit Ranks(int64_t size, std::vector<std::string> tokens = {}, std::vector<int64_t> present = {},
                 std::string call = "all_reduce(), call 7 of group [0, 1]")
      : tokens(std::move(tokens)), call(std::move(call)) {
    interrupted.resize(static_cast<size_t>(size));
    all.resize(static_cast<size_t>(size));
    if (present.empty()) present = everyone();
    for (const int64_t rank : present) add(rank);
  }
  void add(int64_t rank) {
    Monitor::Options options;
    options.rank = rank;
    options.size = static_cast<int64_t>(all.size());
    options.store = store;
    options.address = "127.0.0.1";
    options.token = tokens.empty() ? "" : tokens[rank];
    Monitor::Rank own;
    own.state = [rank] { return RankState{c10::str("at work ", rank), {}}; };
    own.call_with = [this](int64_t) { return call; };
    own.interrupt = [this, rank] { interrupted[rank] = std::make_unique<bool>(true); };
    all[rank] = std::make_unique<Monitor>(std::move(options), std::move(own));
  }
  void leave_in_store(int64_t rank, const Presence& presence) const {
    const std::string bytes = to_bytes(presence);
    store->set(c10::str("rank/", rank), std::vector<uint8_t>(bytes.begin(), bytes.end()));
  }
  std::vector<int64_t> everyone() const {
    std::vector<int64_t> ranks(all.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  void connect() const {
    for (const auto& each : all) ASSERT_TRUE(each->connect(everyone(), kPatience));
  }

  const std::vector<std::string> tokens;
  const std::string call;
  std::vector<std::unique_ptr<bool>> interrupted;
  c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Monitor>> all;
};

TEST(MonitorNews, OfAFailureReachesAllAndTheFirstCounts) {
  for (const int64_t size : {2, 5, 12}) {
    Ranks ranks(size);
    ranks.connect();
    ranks.all[1]->fail("rank 1 failed: the disk is full");
    for (const auto& each : ranks.all)
      EXPECT_EQ(each->wait_for_failure(kPatience), "rank 1 failed: the disk is full");
    ranks.all[0]->fail("rank 0 failed: because of rank 1");
    EXPECT_EQ(ranks.all[0]->failure(), "rank 1 failed: the disk is full");
    EXPECT_FALSE(ranks.all[0]->connect(ranks.everyone(), kPatience));
    EXPECT_THROW(ranks.all[0]->wait_until_alone(kPatience), c10::Error);
  }
}

TEST(MonitorNews, OfAFailureReachesWhoComesLate) {
  Ranks ranks(3);
  ranks.all[2]->fail("rank 2 failed");  // before there are connections
  for (const auto& each : ranks.all) EXPECT_EQ(each->wait_for_failure(kPatience), "rank 2 failed");
}

TEST(MonitorNews, ThatARankLeftIsNoFailure) {
  Ranks ranks(3);
  ranks.connect();
  ranks.all[1].reset();
  EXPECT_EQ(ranks.all[0]->wait_for_failure(kPatience, {1}), "");
  EXPECT_EQ(ranks.all[0]->left({0, 1, 2}), std::vector<int64_t>{1});
  ranks.all[2].reset();
  ranks.all[0]->wait_until_alone(kPatience);
  EXPECT_EQ(ranks.all[0]->failure(), "");
  EXPECT_EQ(ranks.all[0]->lost(), (std::vector<int64_t>{1, 2}));
}

TEST(MonitorNews, IsAskedFor) {
  Ranks ranks(4);
  ranks.connect();
  const std::string text = ranks.all[2]->ask({0, 1, 2, 3}, kPatience);
  for (int64_t rank = 0; rank < 4; ++rank)
    EXPECT_THAT(text, HasSubstr(c10::str("rank ", rank, " is at work ", rank, ".")));
}

TEST(MonitorNews, SurvivorsAgreeWhereToGoOn) {
  Ranks ranks(5);
  ranks.connect();
  ranks.all[0].reset();
  ranks.all[3].reset();
  std::vector<std::thread> callers;
  std::vector<Survivors> survivors(5);
  for (const int64_t rank : {1, 2, 4}) {
    callers.emplace_back([&, rank] {
      ranks.all[rank]->wait_for_failure(kPatience, {0});
      ranks.all[rank]->wait_for_failure(kPatience, {3});
      survivors[rank] =
          ranks.all[rank]->gather_survivors([&] { return c10::str("at rank ", rank); }, kPatience);
    });
  }
  for (auto& caller : callers) caller.join();
  for (const int64_t rank : {1, 2, 4}) {
    EXPECT_EQ(survivors[rank].ranks, (std::vector<int64_t>{1, 2, 4}));
    EXPECT_EQ(survivors[rank].invitation, "at rank 1");
  }
  EXPECT_THAT(
      [&] {
        Ranks alone(2);
        alone.connect();
        alone.all[0]->gather_survivors([] { return ""; }, milliseconds(50));
      },
      ::testing::Throws<c10::Error>(
          ::testing::Property(&c10::Error::msg, HasSubstr("ranks [1] have not come"))));
}

TEST(MonitorNews, ThatSurvivorsAreReadyReachesWhoComesLate) {
  Ranks ranks(3, {}, {0, 1});
  std::vector<std::thread> callers;
  std::vector<Survivors> survivors(3);
  const auto call = [&](int64_t rank) {
    callers.emplace_back(
        [&, rank] { survivors[rank] = ranks.all[rank]->gather_survivors([] { return "here"; }, kPatience); });
  };
  call(0);
  call(1);
  std::this_thread::sleep_for(milliseconds(50));
  ranks.add(2);
  call(2);
  for (auto& caller : callers) caller.join();
  for (const auto& each : survivors) EXPECT_EQ(each.ranks, (std::vector<int64_t>{0, 1, 2}));
}

TEST(MonitorNews, ThatARankLeftBeforeItConnectedIsInTheStore) {
  Ranks ranks(3, {}, {1});
  // Below and above: one that it connects with, and one that connects with it. Their process lives.
  for (const int64_t rank : {0, 2}) ranks.leave_in_store(rank, {this_process(), "", 0, ""});
  EXPECT_TRUE(ranks.all[1]->connect({0, 1, 2}, kPatience));
  EXPECT_EQ(ranks.all[1]->left({0, 1, 2}), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(ranks.all[1]->failure(), "");
}

TEST(MonitorNews, ThatARankDiedBeforeItConnectedIsNoticed) {
  for (const int64_t dead : {0, 2}) {
    const Child child([] { ::_exit(3); });
    Ranks ranks(3, {}, {1});
    // Nobody listens there.
    const uint16_t port = port_of(listen_on("127.0.0.1"));
    ranks.leave_in_store(dead, {child.process, "127.0.0.1", port, ""});
    EXPECT_EQ(ranks.all[1]->wait_for_failure(milliseconds(100)), "");
    child.end_now();
    EXPECT_THAT(ranks.all[1]->wait_for_failure(kPatience),
                AllOf(HasSubstr(c10::str("rank ", dead, " (process ")), HasSubstr("exited with code 3")));
    ::waitpid(child.pid, nullptr, 0);
  }
}

TEST(MonitorDoor, IsClosedToWhoHasAnotherToken) {
  Ranks ranks(2, {"secret", "guess!"});
  EXPECT_FALSE(ranks.all[0]->connect({0, 1}, milliseconds(300)));
  EXPECT_FALSE(ranks.all[1]->connect({0, 1}, milliseconds(10)));
  ranks.all[1]->fail("rank 1 failed: let me in");
  EXPECT_EQ(ranks.all[0]->wait_for_failure(milliseconds(200)), "");
}

/// The port of rank 0, as it is in the store.
uint16_t port_of_first(Ranks& ranks) {
  const auto bytes = ranks.store->get("rank/0");
  uint16_t port = 0;
  std::memcpy(&port, bytes.data() + bytes.size() - sizeof port, sizeof port);
  return port;
}

/// What the monitor of rank 0 says to one who says `bytes` (nothing, if empty), until it closes or so long.
std::string answer_to(Ranks& ranks, const std::string& bytes, milliseconds patience) {
  const Socket socket = begin_connecting("127.0.0.1", port_of_first(ranks));
  pollfd look{socket.descriptor(), POLLOUT, 0};
  EXPECT_EQ(::poll(&look, 1, 5000), 1);
  EXPECT_EQ(::send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  std::string answer;
  char buffer[4096];
  look.events = POLLIN;
  while (::poll(&look, 1, static_cast<int>(patience.count())) == 1) {
    const ssize_t size = ::recv(socket.descriptor(), buffer, sizeof buffer, 0);
    if (size <= 0) break;
    answer.append(buffer, static_cast<size_t>(size));
  }
  return answer;
}

TEST(MonitorDoor, SaysNothingToWhoDoesNotKnowTheToken) {
  Ranks ranks(2, {"secret", "secret"});
  ranks.connect();
  const std::string process = this_process();
  EXPECT_EQ(answer_to(ranks, "", milliseconds(300)), "");
  EXPECT_EQ(answer_to(ranks, "GET / HTTP/1.1\r\n\r\n", milliseconds(300)), "");
  EXPECT_EQ(answer_to(ranks, framed(to_bytes(Hello{"guess!", 1, process})), kPatience), "");
  EXPECT_THAT(answer_to(ranks, framed(to_bytes(Hello{"secret", 1, process})), milliseconds(300)),
              HasSubstr("secret"));
}

TEST(MonitorDoor, IsNotBlockedByWhoSaysNothing) {
  Ranks ranks(2, {}, {0});
  std::vector<Socket> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(begin_connecting("127.0.0.1", port_of_first(ranks)));
  // The first ones make room.
  pollfd look{silent[0].descriptor(), POLLIN, 0};
  ASSERT_EQ(::poll(&look, 1, static_cast<int>(kPatience.count())), 1);
  char byte = 0;
  EXPECT_LE(::recv(silent[0].descriptor(), &byte, 1, 0), 0);
  ranks.add(1);
  ranks.connect();
}

TEST(MonitorDoor, SurvivesWhateverComesThrough) {
  Ranks ranks(3);
  ranks.connect();
  const uint16_t port = port_of_first(ranks);
  std::mt19937_64 random(7);
  for (int i = 0; i < 300; ++i) {
    const Socket socket = begin_connecting("127.0.0.1", port);
    std::string bytes(random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 3 == 0 && bytes.size() > 5) {
      const auto length = static_cast<uint32_t>(bytes.size() - 4);
      std::memcpy(bytes.data(), &length, sizeof length);
      bytes[4] = 0;  // says hello
    }
    for (int tries = 0; tries < 50; ++tries) {
      if (::send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  ranks.all[2]->fail("rank 2 failed: for all to hear");
  for (const auto& each : ranks.all)
    EXPECT_EQ(each->wait_for_failure(kPatience), "rank 2 failed: for all to hear");
}

/// Plays the part of another rank towards the monitor of rank 0.
struct Player {
  Player(Ranks& ranks, int64_t rank, const std::string& process)
      : socket(begin_connecting("127.0.0.1", port_of_first(ranks))) {
    say(to_bytes(Hello{"", rank, process}));
  }
  void say(const std::string& message) const {
    const std::string bytes = framed(message);
    pollfd look{socket.descriptor(), POLLOUT, 0};
    EXPECT_EQ(::poll(&look, 1, 5000), 1);
    EXPECT_EQ(::send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  Socket socket;
};

TEST(MonitorNews, OfOtherThingsDoesNotHideADeath) {
  const Child child([] { ::_exit(3); });
  Ranks ranks(3, {}, {0}, "");
  std::optional<Player> dying(std::in_place, ranks, 1, child.process);
  const Player other(ranks, 2, this_process());
  ASSERT_TRUE(ranks.all[0]->connect({0, 1, 2}, kPatience));
  child.end_now();
  child.wait_for_end(ProcessWatch(child.process));
  dying.reset();
  // What the dead rank had asked comes on the long way, while its death waits for who knows more of it.
  for (uint64_t number = 1; number < 20; ++number) {
    News question;
    question.kind = NewsKind::Ask;
    question.by = question.of = 1;
    question.number = number;
    other.say(to_bytes(question));
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_THAT(ranks.all[0]->wait_for_failure(kPatience), HasSubstr("exited with code 3"));
  ::waitpid(child.pid, nullptr, 0);
}

TEST(Sockets, ListenWhereTheyAreToldTo) {
  const Socket listener = listen_on("127.0.0.1");
  EXPECT_NE(port_of(listener), 0);
  EXPECT_TRUE(listening_ports().count(port_of(listener)));
  EXPECT_THAT(
      [&] { listen_on("127.0.0.1", port_of(listener)); },
      ::testing::Throws<c10::Error>(::testing::Property(&c10::Error::msg, HasSubstr("choose another one"))));
  EXPECT_EQ(address_towards("localhost").substr(0, 4), "127.");
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_EQ(address_of_interface("none"), "");
}

TEST(Sockets, EndConnectionsOfOnePortAlone) {
  const Socket listener = listen_on("127.0.0.1"), other = listen_on("127.0.0.1");
  const Socket a = begin_connecting("127.0.0.1", port_of(listener)),
               b = begin_connecting("127.0.0.1", port_of(other));
  const auto accept = [](const Socket& from) {
    Socket socket;
    while (!(socket = accept_from(from))) std::this_thread::sleep_for(milliseconds(1));
    return socket;
  };
  const Socket a2 = accept(listener), b2 = accept(other);
  end_connections_at(port_of(listener));
  char byte = 0;
  EXPECT_EQ(::recv(a2.descriptor(), &byte, 1, 0), 0);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(::recv(a.descriptor(), &byte, 1, 0), 0);
  EXPECT_EQ(::recv(b.descriptor(), &byte, 1, 0), -1);  // there is nothing to read
}

}  // namespace
}  // namespace tessera
