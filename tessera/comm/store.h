#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class TCPStore;
}

namespace tessera {

/// A store that this process keeps for others, which reach it on that address of this host alone; port 0: any.
c10::intrusive_ptr<c10d::TCPStore> listen_for_store(const std::string& address, uint16_t port,
                                                    std::chrono::milliseconds timeout);

}  // namespace tessera
