#pragma once

#include <string>

namespace tessera::checkpoint {

/// The calling process, in a form that other processes understand: its host, its number there, and when it started.
std::string this_process();

/// "process 4242 on node7".
std::string describe_process(const std::string& process);

/// Whether that process has ended. False if it runs on another host, or in a container that cannot be looked into from here:
/// then nothing is known.
bool has_ended(const std::string& process);

}  // namespace tessera::checkpoint
