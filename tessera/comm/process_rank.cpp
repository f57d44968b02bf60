#include <tessera/comm/blocking.h>
#include <tessera/comm/host.h>
#include <tessera/comm/left_alone.h>
#include <tessera/comm/process_rank.h>
#include <tessera/comm/shared_error.h>
#include <tessera/comm/sockets.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <optional>
#include <thread>
#include <tuple>
#include <type_traits>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The longest that a rank waits for the news of why its transport failed, which the transport may notice first.
constexpr milliseconds kNewsPatience{1000};
/// The longest that it waits for the others to say what they are doing.
constexpr milliseconds kAnswerPatience{500};

/// How long one that ends waits for the others to end, before it closes connections on which they may still read.
constexpr milliseconds kLeavingPatience{2000};

/// How often a wait for a collective of gloo looks for a failure of the world.
constexpr milliseconds kLookPause{100};
/// How long gloo may take to notice that its connections were ended.
constexpr milliseconds kInterruptPatience{300};

/// Of a backend, or of work.
template <class Waiting>
void abort(Waiting& waiting) {
  try {
    waiting.abort();
  } catch (const std::exception&) {  // it has no way, or has ended already
  }
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// c10::dynamic_intrusive_pointer_cast leaks what it cannot cast: so with plain pointers.

/// Null if it is of another kind.
const c10d::TCPStore* tcp_store_in(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<c10d::TCPStore*>(prefix ? prefix->getUnderlyingNonPrefixStore().get() : store.get());
}

/// Where the first group over gloo that the world is given listens, which was made before: if this process listens on one port
/// besides that of the store, it is that one. Of several, nobody can say which.
std::set<uint16_t> ports_of_given_group(const WorldOptions& options) {
  if (!options.existing_group) return {};
  std::set<uint16_t> ports = listening_ports();
  if (const auto* tcp = tcp_store_in(options.store)) ports.erase(tcp->getPort());
  return ports.size() == 1 ? ports : std::set<uint16_t>();
}

/// Of this host, as the other ranks reach it.
std::string own_address(const c10::intrusive_ptr<c10d::Store>& store) {
  const std::string interfaces = environment("GLOO_SOCKET_IFNAME");
  if (!interfaces.empty()) {
    const std::string address = address_of_interface(interfaces.substr(0, interfaces.find(',')));
    if (!address.empty()) return address;
  }
  const auto* tcp = tcp_store_in(store);
  const std::string master = tcp ? tcp->getHost() : environment("MASTER_ADDR");
  return address_towards(master.empty() ? "127.0.0.1" : master);
}

/// A part of the store for this world alone: other worlds of the same processes have had others, and who does not know the
/// token does not find it. And the same by another connection, for the monitor: nobody waits for what it asks.
std::pair<c10::intrusive_ptr<c10d::Store>, c10::intrusive_ptr<c10d::Store>> stores_of_world(
    const WorldOptions& options, const std::string& token) {
  const Blocking blocking;
  const auto stores = ask_for_at_most(options.timeout, [store = options.store, rank = options.rank, token] {
    const int64_t number = store->add(c10::str("tessera/worlds/", rank), 1);
    c10::intrusive_ptr<c10d::Store> world = c10::make_intrusive<c10d::PrefixStore>(
        c10::str("tessera/world/", number, "/", std::hash<std::string>()(token)), store);
    auto copy = world->clone();
    return std::pair(std::move(world), std::move(copy));
  });
  TESSERA_CHECK(stores, "Rank ", options.rank, " cannot join its world: the store did not answer within ",
                options.timeout.count(),
                " ms. The process that keeps it (rank 0, or the launcher) may be stopped.");
  return *stores;
}

std::string label_of(const std::vector<int64_t>& ranks, const std::string& purpose) {
  constexpr size_t kShown = 32;
  const std::string members = ranks.size() <= kShown
                                  ? c10::str("[", c10::Join(", ", ranks), "]")
                                  : c10::str("[", ranks[0], ", ", ranks[1], ", ..., ", ranks.back(), "]");
  return purpose.empty() ? members : c10::str(members, " (", purpose, ")");
}

/// The store of a group. It leads to the rank that made it, and its waits end if the world fails.
class GroupStore final : public c10d::PrefixStore {
 public:
  GroupStore(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
             std::weak_ptr<ProcessRank> rank, std::vector<int64_t> ranks, std::string label,
             milliseconds timeout)
      : PrefixStore("group/" + name, store),
        rank_(std::move(rank)),
        ranks_(std::move(ranks)),
        label_(std::move(label)),
        name_(name),
        limit_(timeout) {}

  std::shared_ptr<ProcessRank> rank() const { return rank_.lock(); }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  const std::string& label() const { return label_; }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, limit_);
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys, limit_);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, limit_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = Clock::now() + timeout;
    milliseconds pause(0);
    while (true) {
      const auto rank = rank_.lock();
      const auto monitor = rank ? rank->monitor() : nullptr;
      TESSERA_CHECK(monitor, "The group ", name_, " is made after the process group was destroyed.");
      bool is_there = false;
      try {
        is_there = PrefixStore::check(keys);
      } catch (const std::exception&) {  // the store went with the rank that kept it
        const std::string failure = monitor->wait_for_failure(kNewsPatience);
        TESSERA_CHECK(failure.empty(), failure);
        throw;
      }
      if (is_there) return;
      if (const std::string failure = monitor->failure(); !failure.empty())
        TESSERA_CHECK(false, failure, "\nRank ", rank->rank(), " was making the group ", name_, ".");
      if (Clock::now() >= deadline)
        rank->give_up("making the group " + name_, c10::str("gave up after ", timeout.count(), " ms"),
                      ranks_);
      std::this_thread::sleep_for(pause);
      pause = std::min(pause + milliseconds(1), milliseconds(10));
    }
  }

 private:
  const std::weak_ptr<ProcessRank> rank_;
  const std::vector<int64_t> ranks_;
  const std::string label_;
  const std::string name_;
  const milliseconds limit_;
};

/// Null if it is none of ours.
const GroupStore* group_store_of(const Group& group) {
  return dynamic_cast<const GroupStore*>(group->getStore().get());
}

/// What `make` returns or throws, on a thread of its own: it may wait for what nobody can end, as a member that has died, or a
/// store whose keeper is stopped. Throws if the world fails before, or after the timeout; then the thread is left to itself.
template <class Make>
std::invoke_result_t<Make> make_in_time(ProcessRank& rank, const std::string& group,
                                        const std::vector<int64_t>& ranks, milliseconds timeout, Make make) {
  std::packaged_task<std::invoke_result_t<Make>()> task(std::move(make));
  auto made = task.get_future();
  std::thread(std::move(task)).detach();
  // What it waits for has the same timeout, and knows more.
  const auto deadline = Clock::now() + timeout + kNewsPatience;
  const auto monitor = rank.monitor();
  while (made.wait_for(milliseconds(20)) != std::future_status::ready) {
    const std::string failure = monitor ? monitor->failure() : "";
    TESSERA_CHECK(failure.empty(), failure, "\nRank ", rank.rank(), " was making the group ", group, ".");
    if (Clock::now() >= deadline)
      rank.give_up("making the group " + group, c10::str("gave up after ", timeout.count(), " ms"), ranks);
  }
  return made.get();
}

std::string text_of(const std::vector<int64_t>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

}  // namespace

ProcessRank::ProcessRank(const WorldOptions& options)
    : rank_(options.rank),
      timeout_(options.timeout),
      address_(own_address(options.store)),
      earlier_ports_(ports_of_given_group(options)),
      hosts_{{rank_, memory_host()}} {
  Monitor::Options how;
  how.rank = rank_;
  how.size = options.size;
  how.token = environment("TESSERA_JOB_TOKEN");
  std::tie(store_, how.store) = stores_of_world(options, how.token);
  how.address = address_;
  Monitor::Rank rank;
  rank.state = [this] { return record_.state(); };
  rank.call_with = [this](int64_t other) { return record_.call_with(other); };
  rank.interrupt = [this] { interrupt(); };
  store_->set(c10::str("group/hosts/", rank_), hosts_.at(rank_));
  monitor_ = std::make_shared<Monitor>(std::move(how), std::move(rank));
}

ProcessRank::~ProcessRank() { leave(); }

ProcessRank::Maker ProcessRank::maker_of(const Group& group) {
  if (const GroupStore* store = group_store_of(group)) return {store->rank(), store->ranks(), store->label()};
  // One that the world was given.
  const auto world = has_current_world() ? current_world() : nullptr;
  if (!world || !world->process_rank()) return {};
  auto ranks = world->ranks_of(group);
  if (!ranks) return {};
  std::string label = label_of(*ranks, "");
  return {world->process_rank(), std::move(*ranks), std::move(label)};
}

std::shared_ptr<Monitor> ProcessRank::monitor() const {
  const std::lock_guard lock(mutex_);
  return monitor_;
}

bool ProcessRank::leave() {
  std::shared_ptr<Monitor> monitor = this->monitor();
  if (!monitor) return false;
  if (gloo_) gloo_->finish_sending();
  monitor->leave(kLeavingPatience);
  {
    const std::lock_guard lock(mutex_);
    monitor_.reset();
    gloo_.reset();
    abortable_.clear();
    store_.reset();
  }
  // The monitor ends outside of the lock, as its thread may want to interrupt.
  return true;
}

void ProcessRank::expect_members(const std::string& group, const std::vector<int64_t>& ranks) {
  const auto monitor = this->monitor();
  TESSERA_CHECK(monitor, "The world that the group ", group,
                " is of has ended (destroy_process_group). Make meshes and tensors anew.");
  if (!monitor->connect(ranks, timeout_) || !monitor->left(ranks).empty())
    give_up("making the group " + group, c10::str("gave up after ", timeout_.count(), " ms"), ranks);
}

std::vector<int64_t> ProcessRank::hosts_of(c10::IntArrayRef ranks) {
  std::vector<int64_t> unknown;
  {
    const std::lock_guard lock(mutex_);
    for (const int64_t rank : ranks) {
      if (!hosts_.count(rank)) unknown.push_back(rank);
    }
  }
  std::vector<std::string> answers;
  if (!unknown.empty()) {
    expect_members(label_of(ranks.vec(), ""), ranks.vec());
    answers = make_in_time(*this, label_of(ranks.vec(), ""), ranks.vec(), timeout_,
                           [hosts = store_for("hosts", ranks.vec(), ""), unknown] {
                             std::vector<std::string> names;
                             for (const int64_t rank : unknown)
                               names.push_back(hosts->get_to_str(std::to_string(rank)));
                             return names;
                           });
  }
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < unknown.size(); ++i) hosts_[unknown[i]] = std::move(answers[i]);
  std::map<std::string, int64_t> numbers;
  std::vector<int64_t> result;
  for (const int64_t rank : ranks)
    result.push_back(numbers.emplace(hosts_.at(rank), static_cast<int64_t>(numbers.size())).first->second);
  return result;
}

c10::intrusive_ptr<c10d::Backend> ProcessRank::make_backend(const std::string& name,
                                                            const BackendRequest& request) {
  return make_in_time(*this, request.name, request.ranks, timeout_,
                      [name, request] { return tessera::make_backend(name, request); });
}

std::shared_ptr<GlooTransport> ProcessRank::gloo() {
  const std::lock_guard lock(mutex_);
  if (!gloo_) gloo_ = std::make_shared<GlooTransport>(address_);
  return gloo_;
}

c10::intrusive_ptr<c10d::Store> ProcessRank::store_for(const std::string& group, std::vector<int64_t> ranks,
                                                       const std::string& purpose) {
  const std::lock_guard lock(mutex_);
  std::string label = label_of(ranks, purpose);
  return c10::make_intrusive<GroupStore>(group, store_, weak_from_this(), std::move(ranks), std::move(label),
                                         timeout_);
}

void ProcessRank::name_group(const Group& group, const std::vector<int64_t>& ranks, const std::string& name) {
  record_.set_label(group, name + " " + label_of(ranks, ""));
}

bool ProcessRank::made(const Group& group) { return group_store_of(group) != nullptr; }

void ProcessRank::wait_for(const c10::intrusive_ptr<c10d::Work>& work, BackendOf backend) {
  const auto monitor = this->monitor();
  if (!monitor) {
    work->wait();
  } else if (is_gloo_collective(*work)) {
    wait_for_collective(*monitor, work, backend);
  } else {
    {
      const std::lock_guard lock(mutex_);
      waited_for_.push_back(work.get());
    }
    const auto forget = c10::make_scope_exit([&] {
      const std::lock_guard lock(mutex_);
      std::erase(waited_for_, work.get());
    });
    TESSERA_CHECK(work->wait(), "the wait was ended");
  }
}

void ProcessRank::wait_for_collective(const Monitor& monitor, const c10::intrusive_ptr<c10d::Work>& work,
                                      BackendOf backend) {
  std::optional<Clock::time_point> end;  // from when on gloo is taken to have lost it
  while (true) {
    if (work->isCompleted()) {
      work->wait();
      return;
    }
    try {
      if (work->wait(kLookPause)) return;
    } catch (const std::exception&) {
      // It may have ended in the meantime, well or not: the next look tells which. This error may be of the pause alone.
      if (work->isCompleted()) continue;
    }
    if (monitor.failure().empty()) continue;
    if (!end) end = Clock::now() + kInterruptPatience;
    if (Clock::now() < *end) continue;
    do_for_at_most(milliseconds(0), [work, backend = backend()] {
      try {
        work->wait();
      } catch (const std::exception&) {  // as is known
      }
    });
    TESSERA_CHECK(false, "the world has failed");
  }
}

void ProcessRank::add_ports(const std::set<uint16_t>& ports) {
  const std::lock_guard lock(mutex_);
  ports_.insert(ports.begin(), ports.end());
  ports_.insert(earlier_ports_.begin(), earlier_ports_.end());
}

void ProcessRank::add_abortable(c10::intrusive_ptr<c10d::Backend> backend) {
  const std::lock_guard lock(mutex_);
  abortable_.push_back(std::move(backend));
}

void ProcessRank::interrupt() {
  std::shared_ptr<GlooTransport> gloo;
  std::vector<c10::intrusive_ptr<c10d::Backend>> abortable;
  std::set<uint16_t> ports;
  {
    const std::lock_guard lock(mutex_);
    gloo = gloo_;
    abortable = abortable_;
    ports = ports_;
    for (c10d::Work* work : waited_for_) abort(*work);
  }
  if (gloo) gloo->interrupt();
  for (const uint16_t port : ports) end_connections_at(port);
  for (const auto& backend : abortable) abort(*backend);
}

void ProcessRank::rethrow(const std::exception_ptr& error, uint64_t call, const std::vector<int64_t>& ranks) {
  const std::string message = comm::message_of(error);
  const std::string doing = "in " + record_.describe(call);
  const auto monitor = this->monitor();
  if (!monitor) std::rethrow_exception(error);
  // That of a connection, as of a host that is gone, is none of ours.
  const auto says = [&](const char* words) { return message.find(words) != std::string::npos; };
  const bool is_timeout = !says("Connection timed out") && (says("imed out") || says("imeout"));
  const std::string failure =
      is_timeout ? monitor->failure() : monitor->wait_for_failure(kNewsPatience, ranks);
  if (!failure.empty()) TESSERA_CHECK(false, failure, "\nRank ", rank_, " was ", doing, ".");
  give_up(doing,
          is_timeout ? c10::str("gave up after ", timeout_.count(), " ms")
                     : "lost a connection (" + message + ")",
          ranks);
}

void ProcessRank::give_up(const std::string& doing, const std::string& how,
                          const std::vector<int64_t>& ranks) {
  const auto monitor = this->monitor();
  std::vector<int64_t> absent, ended;
  if (monitor) {
    absent = monitor->missing(ranks);
    ended = monitor->left(ranks);
    // Who failed said so before it left.
    const std::string failure = monitor->failure();
    TESSERA_CHECK(failure.empty(), failure, "\nRank ", rank_, " was ", doing, ".");
  }
  std::string text;
  if (!ended.empty()) {
    text = c10::str(text_of(ended), ended.size() == 1 ? " has" : " have", " ended, while rank ", rank_,
                    " is still ", doing, ".");
  } else if (!absent.empty()) {
    text = c10::str("rank ", rank_, " ", how, " ", doing, ": ", text_of(absent),
                    absent.size() == 1 ? " has" : " have", " never come. These came: ", monitor->came(ranks),
                    ".\nCheck that all processes were started and still run, with the same world size, "
                    "MASTER_ADDR, MASTER_PORT and TESSERA_JOB_TOKEN, and that they reach each other.");
  } else {
    text = c10::str("rank ", rank_, " ", how, " ", doing, ".");
    if (monitor) text += monitor->ask(ranks, kAnswerPatience);
  }
  if (monitor) monitor->fail(text);
  TESSERA_CHECK(false, text);
}

}  // namespace tessera
