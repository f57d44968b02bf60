#pragma once

#include <string>

namespace tessera {

/// Where this process is, as far as sharing memory goes: two processes can share memory if it is the same for both. The
/// kernel says so: the boot of the machine, the network namespace (by whose sockets they find each other) and the user.
/// Never the same for two processes if the kernel does not tell.
std::string memory_host();

}  // namespace tessera
