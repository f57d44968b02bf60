#pragma once

#include <array>
#include <cstdlib>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "support/spawn.h"

namespace tessera::testing {

/// Two hosts on one machine: a network namespace each, joined by a virtual cable.
class TwoHosts {
 public:
  TwoHosts() {
    const std::string id = std::to_string(getpid());
    names_ = {"tessera-a-" + id, "tessera-b-" + id};
    for (const auto& name : names_) ok_ = ok_ && shell("ip netns add " + name);
    const std::string left = "va" + id, right = "vb" + id;
    ok_ = ok_ &&
          shell("ip link add " + left + " netns " + names_[0] + " type veth peer name " + right + " netns " +
                names_[1]) &&
          shell("ip netns exec " + names_[0] + " ip addr add 10.203.77.1/24 dev " + left) &&
          shell("ip netns exec " + names_[1] + " ip addr add 10.203.77.2/24 dev " + right) &&
          shell("ip netns exec " + names_[0] + " ip link set " + left + " up") &&
          shell("ip netns exec " + names_[1] + " ip link set " + right + " up") &&
          shell("ip netns exec " + names_[0] + " ip link set lo up") &&
          shell("ip netns exec " + names_[1] + " ip link set lo up");
    interfaces_ = {left, right};
  }
  ~TwoHosts() {
    for (const auto& name : names_) shell("ip netns del " + name);
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  bool ok() const { return ok_; }
  /// Runs `body` of this program as a rank on a host; rank 0, on the first, keeps the store.
  std::string command(const std::string& body, int rank, int size, int host, int local_rank) const {
    return "ip netns exec " + names_[host] + " env RANK=" + std::to_string(rank) +
           " LOCAL_RANK=" + std::to_string(local_rank) + " WORLD_SIZE=" + std::to_string(size) +
           " MASTER_ADDR=10.203.77.1 MASTER_PORT=29511 GLOO_SOCKET_IFNAME=" + interfaces_[host] +
           " OMP_NUM_THREADS=1 " + support::this_program() + " --rank-body=" + body;
  }

 private:
  static bool shell(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }
  bool ok_ = true;
  std::array<std::string, 2> names_, interfaces_;
};

/// The exit codes of processes that run the body; rank i is on host `host_of[i]`.
inline std::vector<int> run_on(const TwoHosts& hosts, const std::string& body,
                               const std::vector<int>& host_of) {
  const int size = static_cast<int>(host_of.size());
  std::vector<int> codes(size, -1), on_host(2, 0);
  std::vector<std::thread> runners;
  for (int rank = 0; rank < size; ++rank) {
    const std::string command = hosts.command(body, rank, size, host_of[rank], on_host[host_of[rank]]++);
    runners.emplace_back([&codes, rank, command] { codes[rank] = std::system(command.c_str()); });
  }
  for (auto& runner : runners) runner.join();
  return codes;
}

constexpr const char* kNoHosts =
    "this machine does not allow making network namespaces (it takes root and iproute2)";

}  // namespace tessera::testing
