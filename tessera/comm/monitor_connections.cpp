#include <tessera/comm/monitor_connections.h>
#include <tessera/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
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
/// How long after the end of a process what it said last may still be on its way.
constexpr milliseconds kLastWordsPatience{100};
/// How long the goodbye may take.
constexpr milliseconds kGoodbyePatience{1000};

/// How long the others may take to close their ends. One that is stopped does not.
constexpr milliseconds kPartingPatience{300};

/// Between interruptions of what a failed world still waits for.
constexpr milliseconds kInterruptPause{100};

std::string key_of(int64_t rank) { return c10::str("rank/", rank); }

/// Takes as long for all tokens of one length, so that nobody finds it letter by letter.
bool is_same_token(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (const auto i : c10::irange(a.size())) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

bool has_presence(c10d::Store& store, int64_t rank) { return store.check({key_of(rank)}); }

std::optional<Presence> find_presence(c10d::Store& store, int64_t rank) {
  if (!has_presence(store, rank)) return std::nullopt;
  const auto bytes = store.get(key_of(rank));
  return presence_from_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

Monitor::Connections::Connections(Monitor& monitor)
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

Monitor::Connections::~Connections() {
  if (wake_ >= 0) ::close(wake_);
}

void Monitor::Connections::leave_word() const {
  try {
    store_->set(key_of(monitor_.options_.rank),
                to_bytes(Presence{this_process(), "", 0, monitor_.failure().substr(0, kMaxText)}));
  } catch (const std::exception&) {  // the store is gone
  }
}

void Monitor::Connections::wake() const {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

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
  std::vector<pollfd> events{{wake_, POLLIN, 0}, {listener_.descriptor(), POLLIN, 0}};
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
  while (::read(wake_, &count, sizeof count) > 0) {
  }
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
    if (events[i + 2 + connected].revents) notice_ended_process(each);
  }
  end_those_over();
}

int Monitor::Connections::timeout_until(const std::optional<TimePoint>& deadline) const {
  std::optional<Clock::time_point> next = deadline;
  const auto consider = [&](Clock::time_point time) { next = next ? std::min(*next, time) : time; };
  if (!to_find_.empty() || !to_come_.empty()) consider(next_look_);
  for (const auto& [rank, death] : deaths_) consider(death.declare_at);
  for (const auto& each : all_) {
    if (each->over_at) consider(*each->over_at);
  }
  if (has_failed_) consider(next_interrupt_);
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
  from.watch.emplace(hello.process);
  from.rank = hello.rank;
  to_come_.erase(hello.rank);
  if (!from.expected) from.out += this->hello();
  const std::lock_guard lock(monitor_.mutex_);
  for (const News& news : monitor_.known_) from.out += framed(to_bytes(news));
  monitor_.connected_.insert(hello.rank);
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

void Monitor::Connections::look_for_neighbours() {
  if ((to_find_.empty() && to_come_.empty()) || Clock::now() < next_look_) return;
  find_neighbours();
  watch_those_to_come();
  look_pause_ = std::min(look_pause_ * 5 / 4 + milliseconds(1), milliseconds(200));
  next_look_ = Clock::now() + look_pause_;
}

void Monitor::Connections::watch_those_to_come() {
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

void Monitor::Connections::find_neighbours() {
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
    bool is_known = false;
    {
      const std::lock_guard lock(monitor_.mutex_);
      is_known = monitor_.left_.count(*rank) > 0 || monitor_.dead_.count(*rank) > 0;
    }
    if (!is_known && !is_stopping_) notice_end(*rank, *each);
  }
  std::erase_if(all_, [](const auto& each) { return each->is_over; });
}

void Monitor::Connections::notice_end(int64_t rank, Connection& connection) {
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

void Monitor::Connections::add_death(int64_t rank, const ProcessWatch& watch, const std::string& how) {
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

bool Monitor::Connections::has_left(int64_t rank) const {
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

void Monitor::Connections::declare_deaths() {
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

}  // namespace tessera
