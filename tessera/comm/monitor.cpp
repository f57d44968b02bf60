#include <tessera/comm/monitor.h>
#include <tessera/comm/processes.h>
#include <tessera/comm/sockets.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/irange.h>

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// How long a death waits for somebody who can say during which call it came.
constexpr milliseconds kCallPatience{100};
/// How long the system may take to let go of a process whose connections are closed.
constexpr milliseconds kEndPatience{300};
/// How long the goodbye may take.
constexpr milliseconds kGoodbyePatience{1000};

/// How long the others may take to close their ends. One that is stopped does not.
constexpr milliseconds kPartingPatience{300};

/// Between interruptions of what a failed world still waits for.
constexpr milliseconds kInterruptPause{100};

std::string key_of(int64_t rank) { return c10::str("rank/", rank); }

std::optional<Presence> find_presence(c10d::Store& store, int64_t rank) {
  if (!store.check({key_of(rank)})) return std::nullopt;
  const auto bytes = store.get(key_of(rank));
  return presence_from_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

/// Takes as long for all tokens of one length, so that nobody finds it letter by letter.
bool is_same_token(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (const auto i : c10::irange(a.size())) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

std::set<int64_t> monitored_neighbours(int64_t rank, int64_t size) {
  std::set<int64_t> result;
  for (int64_t distance = 1; distance < size; distance *= 2) {
    result.insert((rank + distance) % size);
    result.insert((rank - distance + size) % size);
  }
  result.erase(rank);
  return result;
}

std::string first_difference(const std::map<int64_t, RankState>& states) {
  // By group and number: which rank called what.
  std::map<std::pair<uint64_t, std::string>, std::map<int64_t, const RecordedCall*>> calls;
  for (const auto& [rank, state] : states) {
    for (const RecordedCall& call : state.calls) calls[{call.number, call.group}][rank] = &call;
  }
  for (const auto& [where, by_rank] : calls) {
    const auto& [first_rank, first] = *by_rank.begin();
    for (const auto& [rank, call] : by_rank) {
      if (call->common != first->common)
        return c10::str("\nThey differ first in call ", where.first, " of group ", where.second, ": rank ",
                        first_rank, " called ", first->text, ", rank ", rank, " called ", call->text, ".");
    }
  }
  return "";
}

/// What the monitor's thread has: the sockets.
class Monitor::Connections {
 public:
  explicit Connections(Monitor& monitor)
      : monitor_(monitor),
        store_(monitor.options_.store->clone()),
        listener_(listen_on(monitor.options_.address)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    const Options& options = monitor.options_;
    // The one with the higher rank connects.
    for (const int64_t rank : monitored_neighbours(options.rank, options.size)) {
      if (rank < options.rank) to_find_.insert(rank);
      if (rank > options.rank) to_come_.emplace(rank, std::nullopt);
    }
    const Presence mine{this_process(), options.address, port_of(listener_), ""};
    options.store->set(key_of(options.rank), to_bytes(mine));
  }
  ~Connections() {
    if (wake_ >= 0) ::close(wake_);
  }

  /// Those who never were connected with this rank learn from the store that it has left.
  void leave_word() const {
    try {
      store_->set(key_of(monitor_.options_.rank),
                  to_bytes(Presence{this_process(), "", 0, monitor_.failure().substr(0, kMaxText)}));
    } catch (const std::exception&) {  // the store is gone
    }
  }

  void wake() const {
    const uint64_t one = 1;
    (void)!::write(wake_, &one, sizeof one);
  }

  void stop() {
    is_stopping_ = true;
    wake();
  }

  /// Until `stop`, and all that was to be sent is, or it takes too long.
  void run() {
    std::optional<Clock::time_point> deadline;
    while (true) {
      flush_outbox();
      if (is_stopping_ && !deadline) deadline = Clock::now() + kGoodbyePatience;
      if (deadline && (!has_unsent() || Clock::now() >= *deadline)) return part();
      wait_for_events(deadline);
      look_for_neighbours();
      declare_deaths();
      interrupt_again();
    }
  }

  /// Called by any thread, with the monitor's lock.
  void enqueue(const News& news) {
    outbox_.push_back(framed(to_bytes(news)));
    wake();
  }

 private:
  struct Connection {
    Socket socket;
    bool is_connecting = false;
    std::optional<int64_t> rank;  // known when it has said hello
    std::optional<int64_t> expected;
    std::optional<ProcessWatch> watch;
    std::string in, out;
    bool is_over = false;
  };

  std::string hello() const {
    return framed(to_bytes(Hello{monitor_.options_.token, monitor_.options_.rank, this_process()}));
  }

  /// Closes the connections so that what was sent on them arrives: a socket that is closed while there is something to read
  /// takes back what it has sent. The others close theirs in turn.
  void part() {
    for (const auto& each : all_) ::shutdown(each->socket.descriptor(), SHUT_WR);
    const auto deadline = Clock::now() + kPartingPatience;
    while (!all_.empty() && Clock::now() < deadline) {
      std::vector<pollfd> events;
      for (const auto& each : all_) events.push_back({each->socket.descriptor(), POLLIN, 0});
      ::poll(events.data(), events.size(), 10);
      for (const auto& each : all_) read_from(*each);
      std::erase_if(all_, [](const auto& each) { return each->is_over; });
    }
  }

  bool has_unsent() const {
    return std::any_of(all_.begin(), all_.end(),
                       [](const auto& each) { return !each->out.empty() && each->rank; });
  }

  void flush_outbox() {
    std::vector<std::string> messages;
    {
      const std::lock_guard lock(monitor_.mutex_);
      messages.swap(outbox_);
    }
    for (const std::string& message : messages) {
      for (const auto& each : all_) {
        if (each->rank) each->out += message;
      }
    }
    for (const auto& each : all_) write_to(*each);
    end_those_over();
  }

  void wait_for_events(const std::optional<Clock::time_point>& deadline) {
    std::vector<pollfd> events{{wake_, POLLIN, 0}, {listener_.descriptor(), POLLIN, 0}};
    for (const auto& each : all_) {
      const bool wants_out = each->is_connecting || !each->out.empty();
      events.push_back(
          {each->socket.descriptor(), static_cast<short>(POLLIN | (wants_out ? POLLOUT : 0)), 0});
    }
    ::poll(events.data(), events.size(), timeout_until(deadline));
    uint64_t count = 0;
    while (::read(wake_, &count, sizeof count) > 0) {
    }
    const size_t connected = all_.size();
    if (events[1].revents) {
      while (Socket socket = accept_from(listener_)) add(std::move(socket), std::nullopt);
    }
    for (const auto i : c10::irange(connected)) {
      const short what = events[i + 2].revents;
      Connection& each = *all_[i];
      if (what & POLLOUT) {
        each.is_connecting = false;
        write_to(each);
      }
      if (what & (POLLIN | POLLHUP | POLLERR)) read_from(each);
    }
    end_those_over();
  }

  /// Milliseconds until something has to be done by itself; -1: never.
  int timeout_until(const std::optional<Clock::time_point>& deadline) const {
    std::optional<Clock::time_point> next = deadline;
    const auto consider = [&](Clock::time_point time) { next = next ? std::min(*next, time) : time; };
    if (!to_find_.empty() || !to_come_.empty()) consider(next_look_);
    for (const auto& [rank, death] : deaths_) consider(death.declare_at);
    if (has_failed_) consider(next_interrupt_);
    if (!next) return -1;
    const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::max<int64_t>(left, 0));
  }

  Connection& add(Socket socket, std::optional<int64_t> expected) {
    auto connection = std::make_unique<Connection>();
    connection->socket = std::move(socket);
    connection->is_connecting = expected.has_value();
    connection->expected = expected;
    connection->out = hello();
    all_.push_back(std::move(connection));
    if (!expected) write_to(*all_.back());
    return *all_.back();
  }

  void write_to(Connection& to) {
    while (!to.is_connecting && !to.is_over && !to.out.empty()) {
      const ssize_t size =
          ::send(to.socket.descriptor(), to.out.data(), to.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (size > 0) {
        to.out.erase(0, static_cast<size_t>(size));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      } else if (errno != EINTR) {
        // What it sent before is still to be read.
        read_from(to);
        to.is_over = true;
      }
    }
  }

  void read_from(Connection& from) {
    std::array<char, 4096> buffer{};
    while (!from.is_over) {
      const ssize_t size = ::recv(from.socket.descriptor(), buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (size > 0) {
        from.in.append(buffer.data(), static_cast<size_t>(size));
        take_messages(from);
      } else if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return;
      } else if (size == 0 || errno != EINTR) {
        from.is_over = true;
      }
    }
  }

  void take_messages(Connection& from) {
    try {
      while (!from.is_over) {
        const auto message = take_framed(from.in, from.rank ? kMaxMessage : kMaxHello);
        if (!message) return;
        from.rank ? take_news(from, *message) : take_hello(from, *message);
      }
    } catch (const c10::Error&) {
      from.is_over = true;  // that is none of us
    }
  }

  void take_news(Connection& from, const std::string& bytes) {
    const News news = news_from_bytes(bytes, monitor_.options_.size);
    if (!monitor_.take(news)) return;
    const std::string message = framed(bytes);
    for (const auto& each : all_) {
      if (each->rank && each.get() != &from) each->out += message;
    }
    deaths_.erase(news.of);
  }

  void take_hello(Connection& from, const std::string& bytes) {
    const Hello hello = hello_from_bytes(bytes);
    const Options& options = monitor_.options_;
    const bool is_expected = hello.rank >= 0 && hello.rank < options.size && hello.rank != options.rank &&
                             (!from.expected || *from.expected == hello.rank);
    if (!is_same_token(hello.token, options.token) || !is_expected) {
      from.is_over = true;
      return;
    }
    from.watch.emplace(hello.process);
    from.rank = hello.rank;
    to_come_.erase(hello.rank);
    const std::lock_guard lock(monitor_.mutex_);
    for (const News& news : monitor_.known_) from.out += framed(to_bytes(news));
    monitor_.connected_.insert(hello.rank);
    monitor_.changed_.notify_all();
  }

  /// What is begun while the world fails may not have been there to be interrupted.
  void interrupt_again() {
    if (!has_failed_) {
      has_failed_ = !monitor_.failure().empty();
      if (has_failed_) next_interrupt_ = Clock::now() + kInterruptPause;
      return;
    }
    if (is_stopping_ || Clock::now() < next_interrupt_) return;
    monitor_.rank_.interrupt();
    next_interrupt_ = Clock::now() + kInterruptPause;
  }

  void look_for_neighbours() {
    if ((to_find_.empty() && to_come_.empty()) || Clock::now() < next_look_) return;
    find_neighbours();
    watch_those_to_come();
    look_pause_ = std::min(look_pause_ * 5 / 4 + milliseconds(1), milliseconds(200));
    next_look_ = Clock::now() + look_pause_;
  }

  /// One that was there may have died before it connected.
  void watch_those_to_come() {
    for (auto each = to_come_.begin(); each != to_come_.end();) {
      const int64_t rank = each->first;
      std::optional<ProcessWatch>& watch = each->second;
      try {
        if (!watch) {
          if (const auto presence = find_presence(*store_, rank)) watch.emplace(presence->process);
        }
      } catch (const std::exception&) {  // the store is gone, or not reachable now
      }
      const auto end = watch ? watch->end() : std::nullopt;
      if (!end) {
        ++each;
        continue;
      }
      if (!has_left(rank)) add_death(rank, *watch, *end);
      each = to_come_.erase(each);
    }
  }

  /// Looks in the store for neighbours that have not been found, and connects with them.
  void find_neighbours() {
    for (auto rank = to_find_.begin(); rank != to_find_.end();) {
      try {
        if (const auto presence = find_presence(*store_, *rank)) {
          if (presence->port == 0) {
            has_left(*rank);
            rank = to_find_.erase(rank);
            continue;
          }
          Socket socket = begin_connecting(presence->address, presence->port);
          add(std::move(socket), *rank).watch.emplace(presence->process);
          rank = to_find_.erase(rank);
          continue;
        }
      } catch (const std::exception&) {  // the store is gone, or not reachable now
      }
      ++rank;
    }
  }

  void end_those_over() {
    for (const auto& each : all_) {
      if (!each->is_over) continue;
      const auto rank = each->rank ? each->rank : each->expected;
      if (!rank) continue;  // it never said who it was
      bool is_known = false;
      {
        const std::lock_guard lock(monitor_.mutex_);
        is_known = monitor_.left_.count(*rank) > 0 || monitor_.dead_.count(*rank) > 0;
      }
      if (!is_known && !is_stopping_) notice_end(*rank, *each);
    }
    std::erase_if(all_, [](const auto& each) { return each->is_over; });
  }

  /// The connection with a rank has ended, and it has not said goodbye.
  void notice_end(int64_t rank, Connection& connection) {
    const bool was_connected = connection.rank.has_value();
    std::optional<std::string> end;
    for (const auto begin = Clock::now(); !end && Clock::now() < begin + kEndPatience;) {
      end = connection.watch ? connection.watch->end() : std::nullopt;
      if (!end) std::this_thread::sleep_for(milliseconds(5));
    }
    if (!was_connected && has_left(rank)) return;
    if (!end && !was_connected) {
      to_find_.insert(rank);
      return;
    }
    if (connection.watch)
      add_death(rank, *connection.watch,
                end.value_or("is not reachable any more, or has closed its connections"));
  }

  void add_death(int64_t rank, const ProcessWatch& watch, const std::string& how) {
    Death death;
    death.text = c10::str("rank ", rank, " (", describe_process(watch.process()), ") ", how);
    if (const std::string call = monitor_.rank_.call_with(rank); !call.empty()) {
      death.text += ", during " + call;
      death.declare_at = Clock::now();
    } else {
      death.declare_at = Clock::now() + kCallPatience;
    }
    deaths_.emplace(rank, std::move(death));
  }

  /// Whether a rank that this one never was connected with has said goodbye.
  bool has_left(int64_t rank) const {
    std::optional<Presence> presence;
    try {
      presence = find_presence(*store_, rank);
    } catch (const std::exception&) {
      return false;
    }
    if (!presence || presence->port != 0) return false;
    if (!presence->failure.empty()) monitor_.fail(presence->failure);
    const std::lock_guard lock(monitor_.mutex_);
    monitor_.left_.insert(rank);
    monitor_.changed_.notify_all();
    return true;
  }

  /// Whoever knows the call that a death came in says it at once, and the others hear it from there.
  void declare_deaths() {
    for (auto death = deaths_.begin(); death != deaths_.end();) {
      if (Clock::now() < death->second.declare_at) {
        ++death;
        continue;
      }
      News news;
      news.kind = NewsKind::Died;
      news.of = death->first;
      news.text = death->second.text;
      death = deaths_.erase(death);
      monitor_.send(std::move(news));
    }
  }

  struct Death {
    std::string text;
    Clock::time_point declare_at;
  };

  Monitor& monitor_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Socket listener_;
  const int wake_;
  std::atomic<bool> is_stopping_ = false;
  std::vector<std::unique_ptr<Connection>> all_;
  std::vector<std::string> outbox_;                         // guarded by the monitor
  std::set<int64_t> to_find_;                               // this rank connects with them
  std::map<int64_t, std::optional<ProcessWatch>> to_come_;  // they connect with this one
  milliseconds look_pause_{1};
  Clock::time_point next_look_ = Clock::now();
  std::map<int64_t, Death> deaths_;
  bool has_failed_ = false;
  Clock::time_point next_interrupt_;
};

Monitor::Monitor(Options options, Rank rank)
    : options_(std::move(options)),
      rank_(std::move(rank)),
      connections_(std::make_unique<Connections>(*this)) {
  thread_ = std::thread([this] { connections_->run(); });
}

Monitor::~Monitor() {
  leave(milliseconds(0));
  connections_->stop();
  thread_.join();
}

void Monitor::leave(milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_left_, true)) return;
  }
  News news;
  news.kind = NewsKind::Left;
  news.of = options_.rank;
  send(std::move(news));
  connections_->leave_word();
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience,
                    [&] { return !failure_.empty() || static_cast<int64_t>(left_.size()) >= options_.size; });
}

uint64_t Monitor::new_number() {
  const std::lock_guard lock(mutex_);
  return ++numbers_;
}

void Monitor::send(News news) {
  news.by = options_.rank;
  if (news.number == 0) news.number = new_number();
  take(news);
  const std::lock_guard lock(mutex_);
  connections_->enqueue(news);
}

bool Monitor::take(const News& news) {
  bool has_failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (!seen_.emplace(news.by, news.number).second) return false;
    switch (news.kind) {
      case NewsKind::Hello:
        break;
      case NewsKind::Left:
        left_.insert(news.of);
        break;
      case NewsKind::Died:
        dead_.insert(news.of);
        [[fallthrough]];
      case NewsKind::Failed:
        has_failed = failure_.empty();
        if (has_failed) failure_ = news.text;
        break;
      case NewsKind::Answer:
        if (news.of == options_.rank) {
          const Answer answer = answer_from_bytes(news.text);
          if (const auto asked = answers_.find(answer.question); asked != answers_.end())
            asked->second[news.by] = state_from_bytes(answer.state);
        }
        break;
      case NewsKind::Ask:
        break;
      case NewsKind::Ready:
        ready_.insert(news.of);
        break;
      case NewsKind::Invitation: {
        Survivors survivors = survivors_from_bytes(news.text, options_.size);
        if (!survivors_) survivors_ = std::move(survivors);
        break;
      }
    }
    if (news.kind == NewsKind::Left || news.kind == NewsKind::Died || news.kind == NewsKind::Failed)
      known_.push_back(news);
    changed_.notify_all();
  }
  if (has_failed) rank_.interrupt();
  if (news.kind == NewsKind::Ask && news.by != options_.rank) {
    News answer;
    answer.kind = NewsKind::Answer;
    answer.of = news.by;
    answer.text = to_bytes(Answer{news.number, to_bytes(rank_.state())});
    send(std::move(answer));
  }
  return true;
}

bool Monitor::connect(const std::vector<int64_t>& ranks, milliseconds patience) const {
  const std::set<int64_t> neighbours = monitored_neighbours(options_.rank, options_.size);
  std::unique_lock lock(mutex_);
  const auto is_connected = [&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
      return !neighbours.count(rank) || connected_.count(rank) || left_.count(rank);
    });
  };
  changed_.wait_for(lock, patience, [&] { return !failure_.empty() || is_connected(); });
  return failure_.empty() && is_connected();
}

void Monitor::fail(const std::string& text) {
  News news;
  news.kind = NewsKind::Failed;
  news.of = options_.rank;
  news.text = text.substr(0, kMaxText);
  send(std::move(news));
}

std::string Monitor::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::string Monitor::wait_for_failure(milliseconds patience, const std::vector<int64_t>& ranks) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    return !failure_.empty() ||
           std::any_of(ranks.begin(), ranks.end(), [&](int64_t rank) { return left_.count(rank) > 0; });
  });
  return failure_;
}

std::vector<int64_t> Monitor::lost() const {
  const std::lock_guard lock(mutex_);
  std::set<int64_t> all = dead_;
  all.insert(left_.begin(), left_.end());
  return {all.begin(), all.end()};
}

std::vector<int64_t> Monitor::left(const std::vector<int64_t>& ranks) const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> result;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(result),
               [&](int64_t rank) { return left_.count(rank) > 0; });
  return result;
}

std::string Monitor::name_of(int64_t rank) const {
  try {
    if (const auto presence = find_presence(*options_.store, rank))
      return c10::str("rank ", rank, " (", describe_process(presence->process), ")");
  } catch (const std::exception&) {  // the store went with the rank that kept it
  }
  return c10::str("rank ", rank);
}

std::string Monitor::came(const std::vector<int64_t>& ranks) const {
  const auto absent = missing(ranks);
  std::vector<std::string> texts;
  for (const int64_t rank : ranks) {
    if (std::find(absent.begin(), absent.end(), rank) == absent.end()) texts.push_back(name_of(rank));
  }
  return c10::Join(", ", texts);
}

std::vector<int64_t> Monitor::missing(const std::vector<int64_t>& ranks) const {
  std::vector<int64_t> result;
  for (const int64_t rank : ranks) {
    if (!options_.store->check({key_of(rank)})) result.push_back(rank);
  }
  return result;
}

std::string Monitor::ask(const std::vector<int64_t>& ranks, milliseconds patience) {
  News news;
  news.kind = NewsKind::Ask;
  news.of = options_.rank;
  const uint64_t question = news.number = new_number();
  RankState mine = rank_.state();
  {
    const std::lock_guard lock(mutex_);
    answers_[question].emplace(options_.rank, std::move(mine));
  }
  send(std::move(news));
  std::map<int64_t, RankState> answers;
  std::set<int64_t> dead, left;
  {
    std::unique_lock lock(mutex_);
    const auto has_all = [&] {
      return std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
        return answers_[question].count(rank) || dead_.count(rank) || left_.count(rank);
      });
    };
    changed_.wait_for(lock, patience, has_all);
    answers = std::move(answers_[question]);
    answers_.erase(question);
    dead = dead_;
    left = left_;
  }
  std::vector<std::string> lines;
  std::map<int64_t, RankState> states;
  for (const int64_t rank : ranks) {
    std::string text;
    if (const auto answer = answers.find(rank); answer != answers.end()) {
      states[rank] = answer->second;
      text = "is " + states[rank].text;
    } else if (dead.count(rank)) {
      text = "has died";
    } else if (left.count(rank)) {
      text = "has ended";
    } else {
      text = "does not answer. It may be stopped (a signal, a debugger), or not be reachable";
    }
    lines.push_back(
        c10::str("\n  ", answers.count(rank) ? c10::str("rank ", rank) : name_of(rank), " ", text, "."));
  }
  return c10::Join("", lines) + first_difference(states);
}

std::vector<int64_t> Monitor::alive() const {
  std::vector<int64_t> result;
  for (const int64_t rank : c10::irange(options_.size)) {
    if (!dead_.count(rank) && !left_.count(rank)) result.push_back(rank);
  }
  return result;
}

Survivors Monitor::gather_survivors(const std::function<std::string()>& invite, milliseconds patience) {
  News ready;
  ready.kind = NewsKind::Ready;
  ready.of = options_.rank;
  send(std::move(ready));
  const auto deadline = Clock::now() + patience;
  std::unique_lock lock(mutex_);
  while (!survivors_) {
    const std::vector<int64_t> ranks = alive();
    std::vector<int64_t> awaited;
    for (const int64_t rank : ranks) {
      if (!ready_.count(rank)) awaited.push_back(rank);
    }
    if (awaited.empty() && ranks.front() == options_.rank) {
      lock.unlock();
      News invitation;
      invitation.kind = NewsKind::Invitation;
      invitation.of = options_.rank;
      invitation.text = to_bytes(Survivors{ranks, invite()});
      send(std::move(invitation));
      lock.lock();
      continue;
    }
    const bool is_late = changed_.wait_until(lock, deadline) == std::cv_status::timeout;
    TESSERA_CHECK(!is_late || survivors_, "The ranks that are left cannot go on: ",
                  awaited.empty() ? c10::str("rank ", ranks.front(), " has not said where")
                                  : c10::str("ranks [", c10::Join(", ", awaited), "] have not come within ",
                                             patience.count(), " ms"),
                  ". All of them have to call shrink_process_group().");
  }
  return *survivors_;
}

void Monitor::wait_until_alone(milliseconds patience) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    const auto others = static_cast<int64_t>(left_.size() - left_.count(options_.rank));
    return !failure_.empty() || others >= options_.size - 1;
  });
  TESSERA_CHECK(failure_.empty(), failure_);
}

}  // namespace tessera
