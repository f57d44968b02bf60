#include <tessera/error.h>
#include <tessera/sharded/published.h>

#include <mutex>
#include <unordered_map>

#include <torch/csrc/distributed/rpc/rref_impl.h>
#include <torch/library.h>

namespace tessera::sharded {

namespace {

const std::string kOperator = "aten::_tessera_published";

struct Registry {
  std::mutex mutex;
  int64_t next = 0;
  std::unordered_map<int64_t, std::vector<at::Tensor>> tensors;
};

Registry& registry() {
  static auto& instance = *new Registry;  // RPC's threads may outlive main
  return instance;
}

/// The tensor itself, for those who may read but not write it.
at::Tensor published(int64_t id, int64_t index) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().tensors.find(id);
  TESSERA_CHECK(found != registry().tensors.end(),
                "The tensor is gone; its owner has to keep it as long as others read it.");
  TESSERA_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(found->second.size()), "There is no shard ",
                      index, ", only ", found->second.size(), ".");
  return found->second[index].detach();
}

}  // namespace

// RPC without Python finds operators in aten only.
TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def("_tessera_published(int id, int index) -> Tensor",
              [](int64_t id, int64_t index) { return published(id, index).cpu(); });
}

Published::Published(std::vector<at::Tensor> tensors) {
  const std::lock_guard lock(registry().mutex);
  id_ = registry().next++;
  registry().tensors.emplace(id_, std::move(tensors));
}

Published::~Published() {
  std::vector<at::Tensor> released;  // outside of the lock: freeing may take long
  const std::lock_guard lock(registry().mutex);
  released.swap(registry().tensors[id_]);
  registry().tensors.erase(id_);
}

at::Tensor PublishedTensor::fetch(std::optional<std::chrono::milliseconds> timeout) const {
  try {
    if (!is_here) return rpc::rpc_sync(owner, kOperator, {id, index}, timeout).toTensor();
    return published(id, index).to(at::TensorOptions(at::kCPU), /*non_blocking=*/false, /*copy=*/true);
  } catch (const c10::Error& error) {
    TESSERA_CHECK(false, "Cannot read shard ", index, " of rank ", owner, ". ",
                  error.what_without_backtrace());
  }
}

rpc::RRef PublishedTensor::rref() const {
  TESSERA_CHECK(!is_here, "rref: rank ", owner,
                " is a thread of this process, and an RRef refers to another process. Use to_here().");
  return rpc::remote(owner, kOperator, {id, index});
}

}  // namespace tessera::sharded
