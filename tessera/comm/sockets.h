#pragma once

#include <cstdint>
#include <set>
#include <string>

/// TCP as the library itself needs it, beside what libtorch's transports do.
namespace tessera {

/// An open socket. Moves, closes when it goes.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int descriptor() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  /// The socket is the caller's now.
  int release();

 private:
  int descriptor_ = -1;
};

/// Listens on that address of this host (a number, as in "127.0.0.1"); port 0: any. Throws if it cannot.
Socket listen_on(const std::string& address, uint16_t port = 0);
/// The port that it is bound to.
uint16_t port_of(const Socket& socket);
/// Begins to connect, without waiting; a failure shows when the socket is used. Throws on an address that makes no sense.
Socket begin_connecting(const std::string& address, uint16_t port);
/// The next one that wants to connect; none if there is none.
Socket accept_from(const Socket& listener);

/// The address of this host (a number) from which `host` is reached, which is that on which others reach this host: of
/// "localhost", 127.0.0.1. Throws if there is no such host.
std::string address_towards(const std::string& host);
/// The address of an interface such as "eth0"; empty if it has none.
std::string address_of_interface(const std::string& name);

/// The ports at which this process listens.
std::set<uint16_t> listening_ports();

/// Ends both directions of all TCP connections of this process whose port here is `port`, so that whoever waits on them,
/// on either side, gets an error.
void end_connections_at(uint16_t port);
/// Ends only the direction away from this process: the others read what was sent, and then that nothing follows.
void finish_sending_at(uint16_t port);

}  // namespace tessera
