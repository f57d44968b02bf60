#include <tessera/comm/host.h>
#include <tessera/comm/processes.h>

#include <array>
#include <fstream>
#include <unistd.h>

namespace tessera {

std::string memory_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> network{};
  const ssize_t length = ::readlink("/proc/self/ns/net", network.data(), network.size() - 1);
  if (boot.empty() || length <= 0) return "unknown/" + this_process();
  return boot + "/" + network.data() + "/user " + std::to_string(::geteuid());
}

}  // namespace tessera
