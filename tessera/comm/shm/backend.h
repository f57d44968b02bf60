#pragma once

#include <tessera/comm/backends.h>

namespace tessera::shm {

inline constexpr const char* kBackendName = "shm";

/// The backend of ranks that are processes on one host, through memory that they share: see Collectives and Messages.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendRequest& request);

}  // namespace tessera::shm
