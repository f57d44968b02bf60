#pragma once

#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}

namespace tessera {

/// A backend that, before each collective, exchanges what the ranks are about to call, and throws the same
/// error on all of them if the calls do not match; else it does what `backend` does.
/// `ranks`: the members, for messages. `device`: where the tensors that `backend` carries are.
c10::intrusive_ptr<c10d::Backend> make_checked(c10::intrusive_ptr<c10d::Backend> backend,
                                               std::vector<int64_t> ranks, c10::DeviceType device);

}  // namespace tessera
