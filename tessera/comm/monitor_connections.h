#pragma once

#include <tessera/comm/monitor.h>
#include <tessera/comm/processes.h>
#include <tessera/comm/sockets.h>

#include <atomic>

namespace tessera {

/// What that rank has left in the store for the others to find it by; none if it has not come.
std::optional<Presence> find_presence(c10d::Store& store, int64_t rank);

/// What the monitor's thread has: the sockets, who is at their other ends, and who of the others is yet to be found.
class Monitor::Connections {
 public:
  explicit Connections(Monitor& monitor);

  /// Those who never were connected with this rank learn from the store that it has left.
  void leave_word() const;
  void stop();
  /// Until `stop`, and all that was to be sent is, or it takes too long.
  void run();

  /// Called by any thread, with the monitor's lock.
  void enqueue(const News& news);

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Connection {
    Socket socket;
    bool is_connecting = false;
    std::optional<int64_t> rank;  // known when it has said hello
    std::optional<int64_t> expected;
    std::optional<ProcessWatch> watch;
    std::string in, out;
    bool is_over = false;
    std::optional<TimePoint> over_at;  // then it is, whatever comes
  };

  /// A look into the store, on a thread of its own: who keeps the store may be stopped.
  struct Look {
    std::set<int64_t> ranks;
    std::set<int64_t> ended;            // of these, those that had ended before
    std::map<int64_t, Presence> found;  // once it is over
    std::atomic<bool> is_over = false;
  };
  /// A rank that this one never was connected with, whose process has ended: it died, unless the store says that it left.
  struct Ended {
    ProcessWatch watch;
    TimePoint until;  // the store may not answer
  };
  struct Death {
    ProcessWatch watch;
    TimePoint known_by;  // how the process ended
    std::string text = {};
    TimePoint declare_at = {};
  };

  void wake() const;
  std::string hello() const;
  /// Closes the connections so that what was sent on them arrives: a socket that is closed while there is something to read
  /// takes back what it has sent. The others close theirs in turn.
  void part();
  bool has_unsent() const;
  void flush_outbox();
  void let_in();
  void wait_for_events(const std::optional<TimePoint>& deadline);
  /// Milliseconds until something has to be done by itself; -1: never.
  int timeout_until(const std::optional<TimePoint>& deadline) const;
  Connection& add(Socket socket, std::optional<int64_t> expected);
  void write_to(Connection& to);
  void read_from(Connection& from);
  void take_messages(Connection& from);
  void take_news(Connection& from, const std::string& bytes);
  void take_hello(Connection& from, const std::string& bytes);
  /// What is begun while the world fails may not have been there to be interrupted.
  void interrupt_again();
  /// Whether somebody is to be looked for in the store.
  bool is_looking() const;
  void look_for_neighbours();
  void begin_look();
  void take_look(const Look& look);
  void connect_with(int64_t rank, const Presence& presence);
  /// A rank that this one never was connected with has said goodbye.
  void note_left(int64_t rank, const Presence& presence);
  /// Whose process has ended, though nothing says so on the connection: its children may have it open.
  static void notice_ended_process(Connection& connection);
  void end_those_over();
  /// Whether this rank has heard that it left or died.
  bool is_known_gone(int64_t rank) const;
  /// The connection with a rank has ended, and it has not said goodbye.
  void notice_end(int64_t rank, Connection& connection);
  void add_death(int64_t rank, ProcessWatch watch);
  /// Says how it came about, once that is known, or nobody will know.
  void describe_death(int64_t rank, Death& death) const;
  /// Whoever knows the call that a death came in says it at once, and the others hear it from there.
  void declare_deaths();

  Monitor& monitor_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Socket listener_;
  const std::shared_ptr<const Socket> wake_;  // an eventfd; who looks into the store may have it longer
  std::atomic<bool> is_stopping_ = false;
  std::vector<std::unique_ptr<Connection>> all_;
  std::vector<std::string> outbox_;  // guarded by the monitor
  std::set<int64_t> to_find_;        // this rank connects with them
  std::map<int64_t, std::optional<ProcessWatch>>
      to_come_;  // they connect with this one, and may have died before
  std::map<int64_t, Ended> ended_;
  std::shared_ptr<Look> look_;  // that is under way
  std::chrono::milliseconds look_pause_{1};
  TimePoint next_look_ = std::chrono::steady_clock::now();
  std::map<int64_t, Death> deaths_;
  TimePoint next_accept_{};
  bool has_failed_ = false;
  TimePoint next_interrupt_;
};

}  // namespace tessera
