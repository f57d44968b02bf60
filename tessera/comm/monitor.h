#pragma once

#include <tessera/comm/call_record.h>
#include <tessera/comm/monitor_messages.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// Watches the processes of a world, so that every rank hears at once of one that died, failed or left, whatever it is
/// doing and whichever groups they share.
///
/// Each process has a thread that sleeps in `poll`, and a connection to the ranks at distances 1, 2, 4, ... (all of them
/// in a small world). A connection that ends without a word means that its process died. News is passed on from rank to
/// rank, so that it arrives as long as the ranks that are left are connected; it needs no store, whose host may be the
/// one that died. Collectives cost nothing here.
class Monitor {
 public:
  struct Options {
    int64_t rank = 0;
    int64_t size = 1;
    c10::intrusive_ptr<c10d::Store>
        store;            // that ranks find each other by; of this world and this monitor alone
    std::string address;  // of this host, to listen on
    std::string token;    // who has another one is not let in
  };
  /// What the rank can say and do, called on the monitor's thread.
  struct Rank {
    std::function<RankState()> state;
    std::function<std::string(int64_t rank)> call_with;  // as CallRecord has it
    std::function<void()> interrupt;  // ends what this rank waits for: the world has failed
  };

  /// Returns at once; connections are made as the others come.
  Monitor(Options options, Rank rank);
  /// Says goodbye, if that has not been said.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Waits until this rank is connected with those of `ranks` that it is to watch, so that it hears of their end. False if
  /// that takes longer than `patience`, or the world fails.
  bool connect(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience) const;

  /// Says goodbye: whoever waits for this rank from now on gets an error, others do not. Then waits so long for the others
  /// to do so too, unless the world has failed: what this rank sent last may still be on its way to them.
  void leave(std::chrono::milliseconds patience);

  /// This rank has failed: all ranks hear of it, and their waits end. The first failure of the world counts.
  void fail(const std::string& text);

  /// What failed first, as "rank 2 (process 4242 on node7) was killed by signal 9 (Killed), during ...". Empty if nothing did.
  std::string failure() const;
  /// The same; waits so long for it, or until one of `ranks` has left.
  std::string wait_for_failure(std::chrono::milliseconds patience,
                               const std::vector<int64_t>& ranks = {}) const;

  /// Ranks that have died or left.
  std::vector<int64_t> lost() const;
  /// Those of `ranks` that have left.
  std::vector<int64_t> left(const std::vector<int64_t>& ranks) const;

  /// Which of these ranks have come to this world so far, and from where: "rank 0 (process 4242 on node7)". Asks the store
  /// for those that this rank is not connected with; it may be gone or stopped, and then nothing is known of them.
  std::string came(const std::vector<int64_t>& ranks) const;
  /// Which of them have not.
  std::vector<int64_t> missing(const std::vector<int64_t>& ranks) const;

  /// What these ranks are doing, one a line, and where those of one group first differ. Waits so long for answers.
  std::string ask(const std::vector<int64_t>& ranks, std::chrono::milliseconds patience);

  /// Where the ranks that are left go on: those that have neither died nor left, once all of them have called this. The
  /// lowest of them is asked for the text, by `invite`, and all get it. Throws if it takes longer than `patience`.
  Survivors gather_survivors(const std::function<std::string()>& invite, std::chrono::milliseconds patience);

  /// Until all other ranks have left, or so long. Throws if the world fails before.
  void wait_until_alone(std::chrono::milliseconds patience) const;

 private:
  class Connections;
  friend class Connections;

  uint64_t new_number();
  void send(News news);
  /// What the rank makes of news, its own too, which it sends. False if it has been seen.
  bool take(const News& news, bool is_own = false);
  /// By rank: its process, "" if it has not come. Without those of which nothing is known.
  std::map<int64_t, std::string> processes_of(const std::vector<int64_t>& ranks) const;
  /// With the lock.
  std::vector<int64_t> alive() const;

  const Options options_;
  const Rank rank_;
  std::unique_ptr<Connections> connections_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool has_left_ = false;
  uint64_t numbers_ = 0;
  std::set<std::pair<int64_t, uint64_t>> seen_;
  std::vector<News> known_;  // who comes late hears it
  std::string failure_;
  std::map<int64_t, std::string> connected_;  // and their processes; this rank too
  std::set<int64_t> dead_, left_, ready_;
  std::optional<Survivors> survivors_;
  std::map<uint64_t, std::map<int64_t, RankState>> answers_;  // by question, by rank
  std::thread thread_;
};

/// How long a store may take to answer.
inline constexpr std::chrono::milliseconds kStorePatience{500};

/// The first call of a group that its ranks, by number, made differently; empty if there is none among those recorded.
std::string first_difference(const std::map<int64_t, RankState>& states);

/// Whom a rank is connected with: those at distances 1, 2, 4, ... in both directions.
std::set<int64_t> monitored_neighbours(int64_t rank, int64_t size);

}  // namespace tessera
