#pragma once

#include <tessera/comm/backends.h>
#include <tessera/comm/call_record.h>
#include <tessera/comm/gloo_transport.h>
#include <tessera/comm/monitor.h>
#include <tessera/comm/world.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace tessera {

/// What a rank that is a process has to do with faults: it watches the others, keeps a record of its own calls, and turns
/// the errors of transports into what really happened.
class ProcessRank : public std::enable_shared_from_this<ProcessRank> {
 public:
  /// Joins the world of these options, without waiting for the others.
  explicit ProcessRank(const WorldOptions& options);
  ~ProcessRank();

  /// Who made a group, and its members.
  struct Maker {
    std::shared_ptr<ProcessRank> rank;  // null if it was none of ours, or its world has gone
    std::vector<int64_t> members;
    std::string label;  // of the group, in messages
  };
  static Maker maker_of(const Group& group);

  int64_t rank() const { return rank_; }
  /// Of this host, as the other ranks reach it.
  const std::string& address() const { return address_; }
  CallRecord& record() { return record_; }
  /// Null after `leave`.
  std::shared_ptr<Monitor> monitor() const;
  /// Says goodbye to the others. False if it had been said.
  bool leave();

  /// Waits until the members of a group that is being made are there. Throws, on all of them, if they do not come.
  void expect_members(const std::string& group, const std::vector<int64_t>& ranks);
  /// The hosts that these ranks are on, numbered as they first appear: ranks of one host can share memory, see memory_host().
  /// Waits until they have come.
  std::vector<int64_t> hosts_of(c10::IntArrayRef ranks);
  /// As the function of that name, but ends when the world fails: a transport may wait for a member that has died.
  c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name, const BackendRequest& request);
  /// What groups of gloo have in common; made at the first call.
  std::shared_ptr<GlooTransport> gloo();
  /// Whether this rank made the group: the world was given the others.
  static bool made(const Group& group);
  /// A store for the members of a group to find each other by, whose waits end if the world fails.
  c10::intrusive_ptr<c10d::Store> store_for(const std::string& group, std::vector<int64_t> ranks,
                                            const std::string& purpose);
  void name_group(const Group& group, const std::vector<int64_t>& ranks, const std::string& name);
  /// A group over gloo that the world was given has made these ports to listen on: connections there end if the world fails.
  void add_ports(const std::set<uint16_t>& ports);
  /// The backend's waits can be ended by its `abort`.
  void add_abortable(c10::intrusive_ptr<c10d::Backend> backend);

  using BackendOf = c10::function_ref<c10::intrusive_ptr<c10d::Backend>()>;
  /// Waits for what a transport does; throws if it fails, or the world does. `backend`: that of the transport.
  void wait_for(const c10::intrusive_ptr<c10d::Work>& work, BackendOf backend);

  /// Throws what really happened, instead of what a transport threw in a call of the record on a group of these ranks, and
  /// sees to it that all ranks hear of it.
  [[noreturn]] void rethrow(const std::exception_ptr& error, uint64_t call,
                            const std::vector<int64_t>& ranks);
  /// The same of a wait that is no call: `doing` completes "rank 2 was ".
  [[noreturn]] void give_up(const std::string& doing, const std::string& how,
                            const std::vector<int64_t>& ranks);

 private:
  void interrupt();
  static void wait_for_collective(const Monitor& monitor, const c10::intrusive_ptr<c10d::Work>& work,
                                  BackendOf backend);

  const int64_t rank_;
  const std::chrono::milliseconds timeout_;
  const std::string address_;
  CallRecord record_;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<GlooTransport> gloo_;
  std::set<uint16_t> ports_;                // of groups over gloo that the world was given
  const std::set<uint16_t> earlier_ports_;  // of the first such group, if there is one
  std::map<int64_t, std::string> hosts_;    // by rank, as far as they were asked for; see memory_host()
  std::vector<c10::intrusive_ptr<c10d::Backend>> abortable_;
  std::vector<c10d::Work*> waited_for_;  // those that can be aborted
  std::shared_ptr<Monitor> monitor_;
};

}  // namespace tessera
