#include "support/spawn.h"

#include <array>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

extern char** environ;

namespace tessera::support {

namespace {

class Child {
 public:
  Child(std::vector<std::string> command, const std::vector<std::string>& environment) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    output_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<char*> argv, env;
    for (std::string& word : command) argv.push_back(word.data());
    for (const std::string& entry : environment) env.push_back(const_cast<char*>(entry.c_str()));
    argv.push_back(nullptr);
    env.push_back(nullptr);
    const int error = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), env.data());
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error != 0) throw std::runtime_error("cannot start " + command[0] + ": " + std::strerror(error));
  }

  pid_t pid() const { return pid_; }
  int output() const { return output_; }
  void append(const char* data, size_t size) { result_.output.append(data, size); }
  void close_output() {
    close(output_);
    output_ = -1;
  }

  ProcessResult reap() {
    int status = 0;
    waitpid(pid_, &status, 0);
    if (WIFEXITED(status)) result_.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result_.signal = WTERMSIG(status);
    return std::move(result_);
  }

 private:
  pid_t pid_ = 0;
  int output_ = -1;
  ProcessResult result_;
};

std::vector<std::string> child_environment(int64_t rank, int64_t count, uint16_t port,
                                           const SpawnOptions& options) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) result.emplace_back(*entry);
  auto set = [&](const std::string& name, const std::string& value) {
    std::erase_if(result, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    result.push_back(name + "=" + value);
  };
  set("RANK", std::to_string(rank));
  set("LOCAL_RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(count));
  set("MASTER_ADDR", options.master_address);
  set("MASTER_PORT", std::to_string(port));
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  set("GLOO_SOCKET_IFNAME", "lo");
  set("OMP_NUM_THREADS", "1");
  for (const auto& [name, value] : options.environment) set(name, value);
  return result;
}

}  // namespace

std::vector<ProcessResult> spawn(int64_t count, const std::vector<std::string>& command,
                                 const SpawnOptions& options) {
  c10d::TCPStoreOptions store_options;
  store_options.port = 0;
  store_options.isServer = true;
  store_options.waitWorkers = false;
  c10d::TCPStore store(options.master_address, store_options);

  std::vector<Child> children;
  std::vector<pid_t> pids;
  for (int64_t rank = 0; rank < count; ++rank) {
    std::vector<std::string> words = options.prefix ? options.prefix(rank) : std::vector<std::string>();
    words.insert(words.end(), command.begin(), command.end());
    children.emplace_back(std::move(words), child_environment(rank, count, store.getPort(), options));
    pids.push_back(children.back().pid());
  }
  if (options.after_start) options.after_start(pids);

  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  size_t open = children.size();
  bool killed = false;
  while (open > 0) {
    std::vector<pollfd> fds;
    for (const Child& child : children) fds.push_back({child.output(), POLLIN, 0});
    poll(fds.data(), fds.size(), 100);
    for (size_t i = 0; i < children.size(); ++i) {
      if (children[i].output() < 0 || !(fds[i].revents & (POLLIN | POLLHUP))) continue;
      std::array<char, 4096> buffer{};
      const ssize_t size = read(children[i].output(), buffer.data(), buffer.size());
      if (size > 0) {
        children[i].append(buffer.data(), static_cast<size_t>(size));
      } else {
        children[i].close_output();
        --open;
      }
    }
    if (!killed && std::chrono::steady_clock::now() > deadline) {
      for (const Child& child : children) kill(child.pid(), SIGKILL);
      killed = true;
    }
  }
  std::vector<ProcessResult> results;
  results.reserve(children.size());
  for (Child& child : children) results.push_back(child.reap());
  return results;
}

std::string this_program() {
  std::array<char, 4096> path{};
  const ssize_t size = readlink("/proc/self/exe", path.data(), path.size());
  if (size < 0) throw std::runtime_error("cannot read /proc/self/exe");
  return {path.data(), static_cast<size_t>(size)};
}

}  // namespace tessera::support
