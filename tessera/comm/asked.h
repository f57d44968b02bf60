#pragma once

#include <tessera/comm/shared_error.h>

#include <cstdint>
#include <span>
#include <string>

namespace tessera::comm {

/// What a rank asks for in a call that all ranks of a group must make alike (agreement.h).
struct Asked {
  std::string call;                  // "gather([4, 6] to rank 0)"; empty outside of such calls
  std::string refusal;               // why this rank refuses its arguments; empty if it does not
  ErrorKind kind = ErrorKind::none;  // of the refusal
};

/// Throws unless all ranks asked for the same and none refuses, naming rank i by its world rank members[i]. A refusal
/// is thrown as the kind of error that it was.
void check_asked_alike(std::span<const Asked> asked, std::span<const int64_t> members);

}  // namespace tessera::comm
