#include <tessera/comm/processes.h>

#include <array>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

namespace tessera {

namespace {

/// Where a process number means the same process: this boot of this machine, and this namespace of numbers.
std::string place_of_processes() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", name.data(), name.size() - 1);
  return boot + "/" + std::string(name.data(), static_cast<size_t>(length > 0 ? length : 0));
}

/// What /proc says of a process.
struct Stat {
  bool is_alive = false;
  std::string start;          // in ticks since the boot; empty if nobody can say
  std::optional<int> status;  // as wait() gives it, of one that has ended and was not waited for
};

Stat stat_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The second field is the program's name in parentheses, which may have any characters.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  std::string state, field;
  fields >> state;
  Stat result;
  result.is_alive = state != "Z" && state != "X";
  constexpr int kState = 3, kStart = 22, kExitCode = 52;
  for (int i = kState + 1; i <= kExitCode && fields >> field; ++i) {
    if (i == kStart) result.start = field;
    if (i == kExitCode && !result.is_alive) result.status = std::atoi(field.c_str());
  }
  return result;
}

/// The exit status that the system keeps of a process somebody holds open and its parent has waited for (Linux 6.15).
std::optional<int> kept_status(int descriptor) {
  struct {
    uint64_t mask;
    uint64_t cgroup;
    uint32_t numbers[11];
    int32_t exit_code;
  } info{};
  static_assert(sizeof info == 64);
  constexpr uint64_t kExit = 1 << 3;
  info.mask = kExit;
  const auto request = _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, sizeof info);
  if (descriptor < 0 || ::ioctl(descriptor, request, &info) != 0 || (info.mask & kExit) == 0) return {};
  return info.exit_code;
}

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return "was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  }
  return "exited with code " + std::to_string(WEXITSTATUS(status));
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
  return place_of_processes() + " " + pid + " " + stat_of(pid).start + " " + host.data();
}

std::string describe_process(const std::string& text) {
  const Process process = parse_process(text);
  return "process " + process.pid + " on " + process.host;
}

bool has_ended(const std::string& text) {
  const Process process = parse_process(text);
  if (process.start.empty() || process.place != place_of_processes()) return false;
  const Stat now = stat_of(process.pid);
  return !now.is_alive || now.start != process.start;
}

ProcessWatch::ProcessWatch(std::string process)
    : process_(std::move(process)), is_here_(parse_process(process_).place == place_of_processes()) {
  if (!is_here_ || has_ended(process_)) return;
#ifdef SYS_pidfd_open
  descriptor_ =
      static_cast<int>(::syscall(SYS_pidfd_open, std::atoi(parse_process(process_).pid.c_str()), 0));
#endif
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : process_(std::move(other.process_)),
      is_here_(other.is_here_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(process_, other.process_);
  std::swap(is_here_, other.is_here_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

std::optional<std::string> ProcessWatch::end() const {
  if (!has_ended(process_)) return std::nullopt;
  const Process process = parse_process(process_);
  const Stat now = stat_of(process.pid);
  if (now.start == process.start && now.status) return describe_status(*now.status);
  if (const auto status = kept_status(descriptor_)) return describe_status(*status);
  return "has ended";
}

}  // namespace tessera
