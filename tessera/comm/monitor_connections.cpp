#include <tessera/comm/left_alone.h>
#include <tessera/comm/monitor_connections.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <thread>
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
/// How often it is looked for its end then.
constexpr milliseconds kEndPause{5};
/// How long after the end of a process what it said last may still be on its way.
constexpr milliseconds kLastWordsPatience{100};
/// How long the goodbye may take.
constexpr milliseconds kGoodbyePatience{1000};

/// How long the others may take to close their ends. One that is stopped does not.
constexpr milliseconds kPartingPatience{300};

/// How long who has connected may take to say hello, and how many may be about to: others cannot use up the descriptors.
constexpr milliseconds kHelloPatience{10000};
constexpr int64_t kStrangers = 64;
/// How long nobody is let in when no more can be, for want of descriptors; and nobody looked for, for want of threads.
constexpr milliseconds kDoorPause{100};

/// Between interruptions of what a failed world still waits for.
constexpr milliseconds kInterruptPause{100};

std::string key_of(int64_t rank) { return c10::str("rank/", rank); }

void ring(const Socket& bell) {
  const uint64_t one = 1;
  (void)!::write(bell.descriptor(), &one, sizeof one);
}

/// Takes as long for all tokens of one length, so that nobody finds it letter by letter.
bool is_same_token(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (const auto i : c10::irange(a.size())) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

std::optional<Presence> find_presence(c10d::Store& store, int64_t rank) {
  if (!store.check({key_of(rank)})) return std::nullopt;
  const auto bytes = store.get(key_of(rank));
  return presence_from_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

Monitor::Connections::Connections(Monitor& monitor)
    : monitor_(monitor),
      store_(monitor.options_.store),
      listener_(listen_on(monitor.options_.address)),
      wake_(std::make_shared<Socket>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  TESSERA_CHECK(*wake_, "The monitor of a rank cannot be made: eventfd fails: ", std::strerror(errno), ".");
  const Options& options = monitor.options_;
  // The one with the higher rank connects.
  for (const int64_t rank : monitored_neighbours(options.rank, options.size)) {
    if (rank < options.rank) to_find_.insert(rank);
    if (rank > options.rank) to_come_.emplace(rank, std::nullopt);
  }
  const Presence mine{this_process(), options.address, port_of(listener_), ""};
  store_->set(key_of(options.rank), to_bytes(mine));
}

void Monitor::Connections::leave_word() const {
  const Presence word{this_process(), "", 0, monitor_.failure().substr(0, kMaxText)};
  do_for_at_most(kStorePatience, [store = store_, key = key_of(monitor_.options_.rank), word] {
    try {
      store->set(key, to_bytes(word));
    } catch (const std::exception&) {  // the store is gone
    }
  });
}

void Monitor::Connections::wake() const { ring(*wake_); }

void Monitor::Connections::stop() {
  is_stopping_ = true;
  wake();
}

void Monitor::Connections::run() {
  std::optional<Clock::time_point> deadline;
  while (true) {
    // Read before, so that what was to be said before the stop is in the outbox by now.
    const bool is_stopping = is_stopping_;
    flush_outbox();
    if (is_stopping && !deadline) deadline = Clock::now() + kGoodbyePatience;
    if (deadline && (!has_unsent() || Clock::now() >= *deadline)) return part();
    wait_for_events(deadline);
    look_for_neighbours();
    declare_deaths();
    interrupt_again();
  }
}

void Monitor::Connections::enqueue(const News& news) {
  outbox_.push_back(framed(to_bytes(news)));
  wake();
}

std::string Monitor::Connections::hello() const {
  return framed(to_bytes(Hello{monitor_.options_.token, monitor_.options_.rank, this_process()}));
}

void Monitor::Connections::part() {
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

bool Monitor::Connections::has_unsent() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const auto& each) { return !each->out.empty() && each->rank; });
}

void Monitor::Connections::flush_outbox() {
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

void Monitor::Connections::wait_for_events(const std::optional<TimePoint>& deadline) {
  const bool is_open = Clock::now() >= next_accept_;
  std::vector<pollfd> events{{wake_->descriptor(), POLLIN, 0},
                             {is_open ? listener_.descriptor() : -1, POLLIN, 0}};
  for (const auto& each : all_) {
    const bool wants_out = each->is_connecting || !each->out.empty();
    events.push_back({each->socket.descriptor(), static_cast<short>(POLLIN | (wants_out ? POLLOUT : 0)), 0});
  }
  const size_t connected = all_.size();
  for (const auto& each : all_) {
    const bool is_watched = each->watch && !each->over_at;
    events.push_back({is_watched ? each->watch->descriptor() : -1, POLLIN, 0});
  }
  ::poll(events.data(), events.size(), timeout_until(deadline));
  uint64_t count = 0;
  while (::read(wake_->descriptor(), &count, sizeof count) > 0) {
  }
  if (events[1].revents) let_in();
  for (const auto i : c10::irange(connected)) {
    const short what = events[i + 2].revents;
    Connection& each = *all_[i];
    if (what & POLLOUT) {
      each.is_connecting = false;
      write_to(each);
    }
    if (what & (POLLIN | POLLHUP | POLLERR)) read_from(each);
    if (events[i + 2 + connected].revents) notice_ended_process(each);
  }
  end_those_over();
}

void Monitor::Connections::let_in() {
  while (Socket socket = accept_from(listener_))
    add(std::move(socket), std::nullopt).over_at = Clock::now() + kHelloPatience;
  if (errno != EAGAIN && errno != EWOULDBLOCK) next_accept_ = Clock::now() + kDoorPause;
  const auto is_stranger = [](const auto& each) { return !each->rank && !each->expected && !each->is_over; };
  auto left = std::count_if(all_.begin(), all_.end(), is_stranger);
  // The oldest go first.
  for (const auto& each : all_) {
    if (left > kStrangers && is_stranger(each)) each->is_over = true, --left;
  }
}

int Monitor::Connections::timeout_until(const std::optional<TimePoint>& deadline) const {
  std::optional<Clock::time_point> next = deadline;
  const auto consider = [&](Clock::time_point time) { next = next ? std::min(*next, time) : time; };
  if (is_looking() && !look_) consider(next_look_);
  for (const auto& [rank, ended] : ended_) consider(ended.until);
  for (const auto& [rank, death] : deaths_)
    consider(death.text.empty() ? Clock::now() + kEndPause : death.declare_at);
  for (const auto& each : all_) {
    if (each->over_at) consider(*each->over_at);
  }
  if (has_failed_) consider(next_interrupt_);
  if (next_accept_ > Clock::now()) consider(next_accept_);
  if (!next) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

Monitor::Connections::Connection& Monitor::Connections::add(Socket socket, std::optional<int64_t> expected) {
  auto connection = std::make_unique<Connection>();
  connection->socket = std::move(socket);
  connection->is_connecting = expected.has_value();
  connection->expected = expected;
  // Who is let in says hello first: the token is not given to whoever connects.
  if (expected) connection->out = hello();
  all_.push_back(std::move(connection));
  return *all_.back();
}

void Monitor::Connections::write_to(Connection& to) {
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

void Monitor::Connections::read_from(Connection& from) {
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

void Monitor::Connections::take_messages(Connection& from) {
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

void Monitor::Connections::take_news(Connection& from, const std::string& bytes) {
  const News news = news_from_bytes(bytes, monitor_.options_.size);
  if (!monitor_.take(news)) return;
  const std::string message = framed(bytes);
  for (const auto& each : all_) {
    if (each->rank && each.get() != &from) each->out += message;
  }
  // Of other kinds, `of` may be the dead rank too: it had asked something.
  if (news.kind == NewsKind::Died || news.kind == NewsKind::Left) deaths_.erase(news.of);
}

void Monitor::Connections::take_hello(Connection& from, const std::string& bytes) {
  const Hello hello = hello_from_bytes(bytes);
  const Options& options = monitor_.options_;
  const bool is_expected = hello.rank >= 0 && hello.rank < options.size && hello.rank != options.rank &&
                           (!from.expected || *from.expected == hello.rank);
  if (!is_same_token(hello.token, options.token) || !is_expected) {
    from.is_over = true;
    return;
  }
  from.over_at.reset();
  from.watch.emplace(hello.process);
  from.rank = hello.rank;
  to_come_.erase(hello.rank);
  if (!from.expected) from.out += this->hello();
  const std::lock_guard lock(monitor_.mutex_);
  for (const News& news : monitor_.known_) from.out += framed(to_bytes(news));
  monitor_.connected_[hello.rank] = hello.process;
  monitor_.changed_.notify_all();
}

void Monitor::Connections::interrupt_again() {
  if (!has_failed_) {
    has_failed_ = !monitor_.failure().empty();
    if (has_failed_) next_interrupt_ = Clock::now() + kInterruptPause;
    return;
  }
  if (is_stopping_ || Clock::now() < next_interrupt_) return;
  monitor_.rank_.interrupt();
  next_interrupt_ = Clock::now() + kInterruptPause;
}

bool Monitor::Connections::is_looking() const {
  return !to_find_.empty() || !to_come_.empty() || !ended_.empty();
}

void Monitor::Connections::look_for_neighbours() {
  if (look_ && look_->is_over) {
    take_look(*std::exchange(look_, nullptr));
    look_pause_ = std::min(look_pause_ * 5 / 4 + milliseconds(1), milliseconds(200));
    next_look_ = Clock::now() + look_pause_;
  }
  if (is_looking() && !look_ && Clock::now() >= next_look_) begin_look();
  for (auto each = ended_.begin(); each != ended_.end();) {
    const bool is_late = Clock::now() >= each->second.until;
    if (is_late) add_death(each->first, std::move(each->second.watch));
    each = is_late ? ended_.erase(each) : std::next(each);
  }
}

void Monitor::Connections::begin_look() {
  for (auto each = to_come_.begin(); each != to_come_.end();) {
    const bool has_ended = each->second && each->second->end();
    if (has_ended)
      ended_.emplace(each->first, Ended{std::move(*each->second), Clock::now() + kStorePatience});
    each = has_ended ? to_come_.erase(each) : std::next(each);
  }
  look_ = std::make_shared<Look>();
  look_->ranks = to_find_;
  for (const auto& [rank, watch] : to_come_) look_->ranks.insert(rank);
  for (const auto& [rank, ended] : ended_) look_->ended.insert(rank);
  look_->ranks.insert(look_->ended.begin(), look_->ended.end());
  try {
    do_for_at_most(milliseconds(0), [look = look_, store = store_, wake = wake_] {
      for (const int64_t rank : look->ranks) {
        try {
          if (auto presence = find_presence(*store, rank)) look->found[rank] = std::move(*presence);
        } catch (const std::exception&) {  // the store is gone, or not reachable now
        }
      }
      look->is_over = true;
      ring(*wake);
    });
  } catch (const std::exception&) {  // there are no threads left now
    look_ = nullptr;
    next_look_ = Clock::now() + kDoorPause;
  }
}

void Monitor::Connections::take_look(const Look& look) {
  for (const auto& [rank, presence] : look.found) {
    if (presence.port == 0) {
      note_left(rank, presence);
    } else if (to_find_.count(rank)) {
      connect_with(rank, presence);
    } else if (const auto each = to_come_.find(rank); each != to_come_.end() && !each->second) {
      each->second.emplace(presence.process);
    }
  }
  for (const int64_t rank : look.ended) {
    if (auto ended = ended_.extract(rank)) add_death(rank, std::move(ended.mapped().watch));
  }
}

void Monitor::Connections::connect_with(int64_t rank, const Presence& presence) {
  try {
    add(begin_connecting(presence.address, presence.port), rank).watch.emplace(presence.process);
    to_find_.erase(rank);
  } catch (const std::exception&) {  // the next look may find it elsewhere
  }
}

void Monitor::Connections::note_left(int64_t rank, const Presence& presence) {
  to_find_.erase(rank);
  to_come_.erase(rank);
  ended_.erase(rank);
  if (!presence.failure.empty()) monitor_.fail(presence.failure);
  const std::lock_guard lock(monitor_.mutex_);
  monitor_.left_.insert(rank);
  monitor_.changed_.notify_all();
}

void Monitor::Connections::notice_ended_process(Connection& connection) {
  connection.over_at = Clock::now() + kLastWordsPatience;
}

void Monitor::Connections::end_those_over() {
  for (const auto& each : all_) {
    if (each->over_at && Clock::now() >= *each->over_at) {
      read_from(*each);
      each->is_over = true;
    }
    if (!each->is_over) continue;
    const auto rank = each->rank ? each->rank : each->expected;
    if (!rank) continue;  // it never said who it was
    if (!is_known_gone(*rank) && !is_stopping_) notice_end(*rank, *each);
  }
  std::erase_if(all_, [](const auto& each) { return each->is_over; });
}

bool Monitor::Connections::is_known_gone(int64_t rank) const {
  const std::lock_guard lock(monitor_.mutex_);
  return monitor_.left_.count(rank) > 0 || monitor_.dead_.count(rank) > 0;
}

void Monitor::Connections::notice_end(int64_t rank, Connection& connection) {
  if (connection.rank) {
    add_death(rank, std::move(*connection.watch));
  } else if (connection.watch && connection.watch->end()) {
    ended_.emplace(rank, Ended{std::move(*connection.watch), Clock::now() + kStorePatience});
  } else {
    to_find_.insert(rank);
  }
}

void Monitor::Connections::add_death(int64_t rank, ProcessWatch watch) {
  // Nobody here will know how a process ended that cannot be seen.
  const auto known_by = Clock::now() + (watch.is_here() ? kEndPatience : milliseconds(0));
  deaths_.emplace(rank, Death{std::move(watch), known_by});
}

void Monitor::Connections::describe_death(int64_t rank, Death& death) const {
  const auto end = death.watch.end();
  if (!end && Clock::now() < death.known_by) return;
  death.text = c10::str("rank ", rank, " (", describe_process(death.watch.process()), ") ",
                        end.value_or("is not reachable any more, or has closed its connections"));
  const std::string call = monitor_.rank_.call_with(rank);
  death.declare_at = Clock::now() + (call.empty() ? kCallPatience : milliseconds(0));
  if (!call.empty()) death.text += ", during " + call;
}

void Monitor::Connections::declare_deaths() {
  for (auto death = deaths_.begin(); death != deaths_.end();) {
    if (death->second.text.empty()) describe_death(death->first, death->second);
    if (death->second.text.empty() || Clock::now() < death->second.declare_at) {
      ++death;
      continue;
    }
    News news;
    news.kind = NewsKind::Died;
    news.of = death->first;
    news.text = death->second.text;
    death = deaths_.erase(death);
    if (!is_known_gone(news.of)) monitor_.send(std::move(news));
  }
}

}  // namespace tessera
