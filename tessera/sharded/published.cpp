#include <tessera/error.h>
#include <tessera/sharded/published.h>

#include <iterator>
#include <mutex>
#include <unordered_map>

#include <torch/csrc/distributed/rpc/rref_impl.h>
#include <torch/library.h>

namespace tessera::sharded {

namespace {

const std::string kOperator = "aten::_tessera_published";
const std::string kGiveBack = "aten::_tessera_give_back";

struct Entry {
  std::vector<at::Tensor> tensors;
  bool over_rpc = false;
  bool is_published = true;
  int64_t borrowers = 0;

  bool is_over() const { return !is_published && (borrowers <= 0 || (over_rpc && !rpc::is_initialized())); }
};

struct Registry {
  std::mutex mutex;
  int64_t next = 0;
  std::unordered_map<int64_t, Entry> entries;
};

Registry& registry() {
  static auto& instance = *new Registry;  // RPC's threads may outlive main
  return instance;
}

/// Changes an entry, if there is one, and frees what nobody may read any more.
template <class Change>
void update(int64_t id, const Change& change) {
  std::vector<Entry> released;  // outside of the lock: freeing may take long
  const std::lock_guard lock(registry().mutex);
  auto& entries = registry().entries;
  if (const auto found = entries.find(id); found != entries.end()) change(found->second);
  for (auto each = entries.begin(); each != entries.end();) {
    if (each->second.is_over()) released.push_back(std::move(each->second));
    each = each->second.is_over() ? entries.erase(each) : std::next(each);
  }
}

void give_back(int64_t id) {
  update(id, [](Entry& entry) { --entry.borrowers; });
}

/// The tensor itself, for those who may read but not write it.
at::Tensor published(int64_t id, int64_t index) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(id);
  TESSERA_CHECK(found != registry().entries.end(),
                "The tensor is gone; its owner has to keep it as long as others read it.");
  const std::vector<at::Tensor>& tensors = found->second.tensors;
  TESSERA_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(tensors.size()), "There is no shard ", index,
                      ", only ", tensors.size(), ".");
  return tensors[index].detach();
}

}  // namespace

// RPC without Python finds operators in aten only.
TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def("_tessera_published(int id, int index) -> Tensor",
              [](int64_t id, int64_t index) { return published(id, index).cpu(); });
  library.def("_tessera_give_back(int id) -> int", [](int64_t id) {
    give_back(id);
    return id;
  });
}

Published::Published(std::vector<at::Tensor> tensors, bool over_rpc) {
  const std::lock_guard lock(registry().mutex);
  id_ = registry().next++;
  registry().entries.emplace(id_, Entry{std::move(tensors), over_rpc});
}

Published::~Published() {
  update(id_, [](Entry& entry) { entry.is_published = false; });
}

void Published::lend(int64_t borrowers) const {
  update(id_, [&](Entry& entry) { entry.borrowers += borrowers; });
}

Borrowed::~Borrowed() {
  if (is_here_) {
    give_back(id_);
  } else {
    rpc::notify(owner_, kGiveBack, {id_});
  }
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
