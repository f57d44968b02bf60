#pragma once

#include <tessera/thread_scope.h>

#include <string>

namespace tessera::comm {

/// While alive, says what the collectives of the calling thread are made for, in errors: "aten::mm". The name outlives
/// it, and the collectives.
using Within = ThreadScope<const std::string*, struct WithinTag>;

}  // namespace tessera::comm
