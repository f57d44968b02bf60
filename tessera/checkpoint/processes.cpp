#include <tessera/checkpoint/processes.h>

#include <array>
#include <climits>
#include <fstream>
#include <sstream>
#include <unistd.h>

namespace tessera::checkpoint {

namespace {

/// Where a process number means the same process: this boot of this machine, and this namespace of numbers.
std::string place_of_processes() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", name.data(), name.size() - 1);
  return boot + "/" + std::string(name.data(), static_cast<size_t>(length > 0 ? length : 0));
}

/// When it started, in ticks since the boot; empty if it has ended, or if nobody can say.
std::string start_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The second field is the program's name in parentheses, which may have any characters.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return "";
  std::istringstream fields(text.substr(name_end + 1));
  std::string state, field;
  fields >> state;
  if (state == "Z" || state == "X") return "";
  constexpr int kStart = 22, kState = 3;
  for (int i = kState; i < kStart; ++i) fields >> field;
  return field;
}

struct Process {
  std::string place, pid, start, host;
};

Process parse_process(const std::string& text) {
  Process process;
  std::istringstream(text) >> process.place >> process.pid >> process.start >> process.host;
  return process;
}

}  // namespace

std::string this_process() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string pid = std::to_string(::getpid());
  return place_of_processes() + " " + pid + " " + start_of(pid) + " " + host.data();
}

std::string describe_process(const std::string& text) {
  const Process process = parse_process(text);
  return "process " + process.pid + " on " + process.host;
}

bool has_ended(const std::string& text) {
  const Process process = parse_process(text);
  return !process.start.empty() && process.place == place_of_processes() &&
         start_of(process.pid) != process.start;
}

}  // namespace tessera::checkpoint
