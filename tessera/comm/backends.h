#pragma once

#include <tessera/export.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

class GlooTransport;
namespace threads {
class Hub;
}

/// What the factory of a group's backend gets.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // this group's own; null if the world has none
  std::vector<int64_t> ranks;             // the members, as ranks of the world
  std::vector<int64_t> hosts;  // of each of them, numbered as they first appear; for "hierarchical"
  int64_t member = 0;          // which of them this rank is
  std::string name;            // of the group; the same on all members
  c10::DeviceType device = c10::DeviceType::CPU;
  std::chrono::milliseconds timeout{};
  std::shared_ptr<threads::Hub> hub;    // null where ranks are processes
  std::shared_ptr<GlooTransport> gloo;  // null where they are threads
};

using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)>;

/// Makes a backend known by name, for WorldOptions::backend and RunOptions::backend. The built-in ones are
/// "threads", "shm", "gloo", "hierarchical", "fake" and, where libtorch has CUDA, "nccl". A known name is replaced.
TESSERA_API void register_backend(const std::string& name, BackendFactory factory);

/// Makes one by name, for instance to wrap it. Throws, listing the known names, if `name` is none of them.
TESSERA_API c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& name,
                                                           const BackendRequest& request);

}  // namespace tessera
