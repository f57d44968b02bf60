#include <tessera/comm/sockets.h>
#include <tessera/error.h>

#include <arpa/inet.h>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

namespace tessera {

namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// Throws if there is none.
AddressList resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  TESSERA_CHECK(code == 0, "The address of host '", host, "' is not known: ", ::gai_strerror(code), ".");
  return {found, ::freeaddrinfo};
}

std::string number_of(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int code = ::getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return code == 0 ? text : "";
}

uint16_t port_in(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

/// That of this end; zero if it is none of TCP.
uint16_t port_here(int descriptor) {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) return 0;
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return port_in(address);
}

/// Calls `use` with each TCP socket of this process: its descriptor, its port here, and whether it listens.
template <class Use>
void for_each_socket(const Use& use) {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* entry = all ? ::readdir(all.get()) : nullptr) {
    if (entry->d_name[0] == '.') continue;
    const int descriptor = std::atoi(entry->d_name);
    const uint16_t port = port_here(descriptor);
    if (port == 0) continue;
    int is_listening = 0;
    socklen_t size = sizeof is_listening;
    ::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size);
    use(descriptor, port, is_listening != 0);
  }
}

void shut_down(uint16_t wanted, int how) {
  for_each_socket([&](int descriptor, uint16_t port, bool is_listening) {
    if (port == wanted && !is_listening) ::shutdown(descriptor, how);
  });
}

void set_option(int descriptor, int level, int name, int value) {
  ::setsockopt(descriptor, level, name, &value, sizeof value);
}

/// Messages go at once, and a host that is gone shows within seconds.
void prepare_connection(int descriptor) {
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 5);
  set_option(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, 7000);
}

}  // namespace

Socket::Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}
Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}
int Socket::release() { return std::exchange(descriptor_, -1); }

Socket listen_on(const std::string& address, uint16_t port) {
  const AddressList where = resolve(address, port, AI_PASSIVE);
  Socket socket(::socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket) set_option(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, 1);
  TESSERA_CHECK(socket && ::bind(socket.descriptor(), where->ai_addr, where->ai_addrlen) == 0 &&
                    ::listen(socket.descriptor(), SOMAXCONN) == 0,
                "Cannot listen on ", address, ", port ", port, ": ", std::strerror(errno),
                port ? ". Another program may use that port: choose another one (MASTER_PORT)." : ".");
  return socket;
}

uint16_t port_of(const Socket& socket) { return port_here(socket.descriptor()); }

Socket begin_connecting(const std::string& address, uint16_t port) {
  const AddressList where = resolve(address, port, AI_NUMERICHOST);
  Socket socket(::socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  TESSERA_CHECK(socket, "Cannot make a socket: ", std::strerror(errno), ".");
  prepare_connection(socket.descriptor());
  // What is wrong at once is wrong again, as an error, when the socket is used.
  (void)::connect(socket.descriptor(), where->ai_addr, where->ai_addrlen);
  return socket;
}

Socket accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) prepare_connection(socket.descriptor());
  return socket;
}

std::string address_towards(const std::string& host) {
  const AddressList there = resolve(host, 9, 0);
  for (const addrinfo* each = there.get(); each; each = each->ai_next) {
    // Nothing is sent: the system only chooses the way.
    const Socket probe(::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage here{};
    socklen_t length = sizeof here;
    if (probe && ::connect(probe.descriptor(), each->ai_addr, each->ai_addrlen) == 0 &&
        ::getsockname(probe.descriptor(), reinterpret_cast<sockaddr*>(&here), &length) == 0)
      return number_of(reinterpret_cast<const sockaddr*>(&here), length);
  }
  TESSERA_CHECK(false, "There is no way from this host to host '", host, "'.");
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, ::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = all; each; each = each->ifa_next) {
      if (name != each->ifa_name || !each->ifa_addr || each->ifa_addr->sa_family != family) continue;
      return number_of(each->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  return "";
}

std::set<uint16_t> listening_ports() {
  std::set<uint16_t> ports;
  for_each_socket([&](int, uint16_t port, bool is_listening) {
    if (is_listening) ports.insert(port);
  });
  return ports;
}

void end_connections_at(uint16_t port) { shut_down(port, SHUT_RDWR); }
void finish_sending_at(uint16_t port) { shut_down(port, SHUT_WR); }

}  // namespace tessera
