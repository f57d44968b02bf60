#pragma once

#include <tessera/comm/backends.h>

namespace tessera::threads {

inline constexpr const char* kBackendName = "threads";

/// The backend of ranks that are threads of one process, one object for each member of a group. See GroupCollectives.
c10::intrusive_ptr<c10d::Backend> make_threads_backend(const BackendRequest& request);

}  // namespace tessera::threads
