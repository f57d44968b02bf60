#include <tessera/comm/sockets.h>
#include <tessera/comm/store.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {

c10::intrusive_ptr<c10d::TCPStore> listen_for_store(const std::string& address, uint16_t port,
                                                    std::chrono::milliseconds timeout) {
  Socket listener = listen_on(address, port);
  c10d::TCPStoreOptions options;
  options.port = port_of(listener);
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.masterListenFd = listener.release();
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

}  // namespace tessera
