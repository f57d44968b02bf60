#pragma once

#include <tessera/comm/world.h>

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

/// What `post` returns: it posts a message on a transport. gloo throws there, not in the wait, if the other end is gone:
/// then this throws what happened to it.
c10::intrusive_ptr<c10d::Work> post_message(const Group& group,
                                            c10::function_ref<c10::intrusive_ptr<c10d::Work>()> post);

}  // namespace tessera::comm
