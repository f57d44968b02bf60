#include <tessera/comm/builtin_backends.h>
#include <tessera/error.h>

#include <csignal>

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

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  TESSERA_CHECK(request.store,
                "The \"gloo\" backend needs a store through which the processes find one another; set "
                "WorldOptions::store.");
  ignore_broken_pipes();
  // The interfaces named in GLOO_SOCKET_IFNAME, else the one that the host name resolves to.
  auto options = c10d::ProcessGroupGloo::Options::create_default(request.timeout);
  options->group_name = request.name;
  options->global_ranks_in_group.assign(request.ranks.begin(), request.ranks.end());
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, static_cast<int>(request.member),
                                                     static_cast<int>(request.ranks.size()),
                                                     std::move(options));
}

}  // namespace tessera
