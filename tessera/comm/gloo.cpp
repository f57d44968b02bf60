#include <tessera/comm/builtin_backends.h>
#include <tessera/comm/gloo_transport.h>
#include <tessera/comm/sockets.h>
#include <tessera/error.h>

#include <csignal>
#include <cstdlib>
#include <mutex>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera {

namespace {

/// gloo writes to sockets on several threads, and the system ends a process that writes to a peer that is gone, unless it
/// ignores the signal: then gloo throws. As Python does; a program that has a handler of its own keeps it.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

GlooTransport::GlooTransport(const std::string& address) {
  // gloo does not say where a device listens, but it does so from its making on.
  static std::mutex making;
  const std::lock_guard lock(making);
  const std::set<uint16_t> before = listening_ports();
  if (address.empty() || std::getenv("GLOO_SOCKET_IFNAME"))
    devices_ = c10d::ProcessGroupGloo::Options::create_default()->devices;
  else
    devices_ = {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  for (const uint16_t port : listening_ports()) {
    if (!before.count(port)) ports_.insert(port);
  }
}

void GlooTransport::interrupt() const {
  for (const uint16_t port : ports_) end_connections_at(port);
}

void GlooTransport::finish_sending() const {
  for (const uint16_t port : ports_) finish_sending_at(port);
}

bool is_gloo_collective(const c10d::Work& work) {
  return dynamic_cast<const c10d::ProcessGroupGloo::AsyncWork*>(&work) != nullptr;
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  TESSERA_CHECK(request.store,
                "The \"gloo\" backend needs a store through which the processes find one another; set "
                "WorldOptions::store.");
  ignore_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->devices =
      (request.gloo ? request.gloo : std::make_shared<GlooTransport>(std::string()))->devices();
  options->group_name = request.name;
  options->global_ranks_in_group.assign(request.ranks.begin(), request.ranks.end());
  const auto size = static_cast<int64_t>(request.ranks.size());
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, static_cast<int>(request.member),
                                                             static_cast<int>(size), std::move(options));
  // Who is connected to all may end, and its connections with it, while others still connect: so all wait for the last.
  constexpr const char* kConnected = "connected";
  if (request.store->add("connecting", 1) == size) request.store->set(kConnected, std::vector<uint8_t>{1});
  request.store->wait({kConnected}, request.timeout);
  return backend;
}

}  // namespace tessera
