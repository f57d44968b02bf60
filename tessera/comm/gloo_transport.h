#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace c10d {
class Work;
}
namespace gloo::transport {
class Device;
}

namespace tessera {

/// What the groups of one world over gloo have in common: the devices that make their connections, those of the interfaces
/// in GLOO_SOCKET_IFNAME, else one at an address of this host.
class GlooTransport {
 public:
  explicit GlooTransport(const std::string& address);

  const std::vector<std::shared_ptr<gloo::transport::Device>>& devices() const { return devices_; }

  /// Ends all connections, so that whoever waits on one of them, on either side, gets an error. gloo itself has no way to
  /// end a wait. Safe to call while others wait.
  void interrupt() const;
  /// This rank sends nothing more. Who waits for it gets an error, but what it has sent arrives: a connection that is closed
  /// while there is something to read loses that.
  void finish_sending() const;

 private:
  std::vector<std::shared_ptr<gloo::transport::Device>> devices_;
  std::set<uint16_t> ports_;  // where the devices listen
};

/// Whether it is a collective of gloo. If a connection ends while gloo answers on it, gloo loses the collective: nobody
/// wakes who waits for it until its timeout, and who destroys its backend waits with it.
bool is_gloo_collective(const c10d::Work& work);

}  // namespace tessera
