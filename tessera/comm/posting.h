#pragma once

#include <tessera/comm/world.h>

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

/// What `post` returns: it posts a message on a transport. gloo throws there, not in the wait, if the other end is gone:
/// then this throws what happened to it.
c10::intrusive_ptr<c10d::Work> post_message(const Group& group,
                                            c10::function_ref<c10::intrusive_ptr<c10d::Work>()> post);

/// Waits for what a transport does for the collective that the calling thread is in, before that is posted. As waits for
/// collectives do, it ends if the world fails, and throws what happened.
void wait_in_call(const c10::intrusive_ptr<c10d::Work>& work,
                  const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace tessera::comm
