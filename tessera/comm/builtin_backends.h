#pragma once

#include <tessera/comm/backends.h>

namespace tessera {

// The makers of the built-in backends, each where its transport is.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request);
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request);
c10::intrusive_ptr<c10d::Backend> make_fake_backend(const BackendRequest& request);

}  // namespace tessera
