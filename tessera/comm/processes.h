#pragma once

#include <optional>
#include <string>

namespace tessera {

/// The calling process, in a form that other processes understand: its host, its number there, and when it started.
std::string this_process();

/// "process 4242 on node7".
std::string describe_process(const std::string& process);

/// Whether that process has ended. False if it runs on another host, or in a container that cannot be looked into from here:
/// then nothing is known.
bool has_ended(const std::string& process);

/// Keeps track of another process, so that how it ended can be said even when nothing is left of it.
class ProcessWatch {
 public:
  explicit ProcessWatch(std::string process);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  const std::string& process() const { return process_; }
  /// Whether its end can be seen from here: it runs on this host, and in no container of its own.
  bool is_here() const { return is_here_; }
  /// What `poll` finds readable when the process ends; -1 if the system gives none.
  int descriptor() const { return descriptor_; }

  /// How it ended: "was killed by signal 9 (Killed)", "exited with code 3", or "has ended" where the system does not say
  /// more. Nothing if it has not ended, or if it cannot be seen from here.
  std::optional<std::string> end() const;

 private:
  std::string process_;
  bool is_here_ = false;
  int descriptor_ = -1;
};

}  // namespace tessera
