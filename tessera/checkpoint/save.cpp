#include <tessera/bytes.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/flatten.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/inspect.h>
#include <tessera/checkpoint/local_boxes.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/peers.h>
#include <tessera/checkpoint/publisher.h>
#include <tessera/checkpoint/save_plan.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/checkpoint/write.h>
#include <tessera/comm/blocking.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <future>
#include <iostream>
#include <mutex>
#include <optional>
#include <sys/resource.h>
#include <unistd.h>

#include <ATen/Functions.h>
#include <c10/util/hash.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace tessera::checkpoint {

namespace {

/// What this rank has to do for one save.
struct SaveJob {
  std::string path;
  SaveOptions options;
  std::shared_ptr<const SavePlan> plan;  // of the tensors
  Catalog catalog;                       // all leaves; the chunks are yet to be written
  std::vector<ElementsToWrite> elements;
  std::exception_ptr error;  // why this rank has them not; the others hear of it in `execute`

  int64_t bytes() const {
    int64_t sum = 0;
    for (const ElementsToWrite& each : elements) sum += static_cast<int64_t>(each.elements.nbytes());
    return sum;
  }
};

/// The distributed tensor with its partial values reduced. Collective on its mesh.
at::Tensor reduced(const at::Tensor& tensor) {
  const DTensor distributed(tensor);
  Placements placements = distributed.placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return distributed.redistribute(placements);
}

/// This rank's last plan, which holds as long as no rank's description changes.
struct LastPlan {
  std::string description;  // with the rank, and how many there are
  uint64_t id = 0;          // of the descriptions of all ranks
  std::shared_ptr<const SavePlan> plan;
  SavePlanCacheInfo info;
};

LastPlan& last_plan() {
  thread_local LastPlan last;
  return last;
}

/// What all ranks save.
struct Agreed {
  std::shared_ptr<const SavePlan> plan;  // of the tensors
  Catalog values;                        // what is no tensor: it changes from save to save, and is small
};

/// From what this rank has. Collective.
Agreed make_plan(const Description& tensors, const Description& values, const Peers& peers) {
  LastPlan& last = last_plan();
  // Another world may have ranks with the same descriptions, in another order.
  const std::string mine = to_bytes(tensors);
  const std::string known_as = c10::str(peers.rank(), " of ", peers.size(), ": ", mine);
  ByteWriter out;
  out.put(known_as == last.description ? last.id : uint64_t{0});
  out.put(std::string_view(to_bytes(values)));
  std::vector<uint64_t> ids;
  std::vector<Description> all_values;
  for (const std::string& bytes : peers.all_gather(out.take())) {
    ByteReader in(bytes, "what a rank saves");
    ids.push_back(in.get<uint64_t>());
    all_values.push_back(description_from_bytes(in.get_text()));
  }
  Agreed agreed{last.plan, plan_save(all_values).catalog};
  const bool is_known = last.plan && known_as == last.description &&
                        std::all_of(ids.begin(), ids.end(), [&](uint64_t id) { return id == ids[0]; });
  ++(is_known ? last.info.hits : last.info.misses);
  if (is_known) return agreed;
  std::vector<Description> descriptions;
  uint64_t hash = 0;
  for (const std::string& bytes : peers.all_gather(mine)) {
    descriptions.push_back(description_from_bytes(bytes));
    hash = c10::hash_combine(hash, std::hash<std::string>()(bytes));
  }
  last.plan = agreed.plan = std::make_shared<SavePlan>(plan_save(descriptions));
  last.description = known_as;
  last.id = hash | 1;
  return agreed;
}

/// The part of a box that is to be written, as a view.
at::Tensor part_of(const LocalBoxView& box, const ChunkBox& wanted) {
  at::Tensor result = box.elements;
  for (const auto dim : c10::irange(wanted.offsets.size()))
    result =
        result.narrow(static_cast<int64_t>(dim), wanted.offsets[dim] - box.offsets[dim], wanted.sizes[dim]);
  return result;
}

/// Whether its values have to be reduced before they are saved, with the other ranks of its mesh.
bool has_partial(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) && DTensor(tensor).spec().has_partial();
}

/// Collective. `take_elements` is called with the job when it is complete but for what it may do to the elements.
SaveJob prepare(const StateDict& state, const std::string& path, const SaveOptions& options, Peers& peers,
                const std::function<void(SaveJob&)>& take_elements = {}) {
  const at::NoGradGuard no_grad;
  SaveJob job{path, options, nullptr, {}, {}, {}};
  Value values;
  std::map<std::string, StateLeaf> leaves;
  std::map<std::string, LocalTensor> local;
  Description mine;
  const Peers::Options agreed_on{{"path", path},
                                 {"format", format_name(options.format)},
                                 {"keep_last", std::to_string(options.keep_last)},
                                 {"file_limit", std::to_string(options.file_limit)}};
  peers.agree("save a checkpoint", agreed_on, "Saving to " + path, [&] {
    values = StateDictHooks::before_save(state);
    leaves = flatten(values);
    for (const auto& [key, leaf] : leaves) {
      LeafDescription& description = mine[key];
      description.path = leaf.path;
      description.is_tensor = leaf.value->is_tensor();
      if (!description.is_tensor) {
        description.value = value_to_json(*leaf.value);
      } else if (!has_partial(leaf.value->tensor())) {
        local[key] = local_boxes(key, leaf.value->tensor());
      }
    }
  });
  TESSERA_CHECK_VALUE(!path.empty(), "The path of a checkpoint must not be empty.");
  TESSERA_CHECK_VALUE(options.keep_last >= 0 && options.file_limit > 0,
                      "keep_last must not be negative, and file_limit must be positive.");
  // Only when all ranks have looked at all that they have: a rank that failed would not come to reduce.
  for (const auto& [key, leaf] : leaves) {
    if (leaf.value->is_tensor() && has_partial(leaf.value->tensor()))
      local[key] = local_boxes(key, reduced(leaf.value->tensor()));
  }
  for (const auto& [key, tensor] : local) {
    LeafDescription& description = mine[key];
    description.shape = tensor.shape;
    description.dtype = tensor.dtype;
    for (const LocalBoxView& box : tensor.boxes)
      description.boxes.push_back({box.offsets, box.elements.sizes().vec()});
  }
  Description values_of_mine;
  for (auto leaf = mine.begin(); leaf != mine.end();) {
    const auto next = std::next(leaf);
    if (!leaf->second.is_tensor) values_of_mine.insert(mine.extract(leaf));
    leaf = next;
  }
  Agreed agreed = make_plan(mine, values_of_mine, peers);
  job.plan = agreed.plan;
  job.catalog = std::move(agreed.values);
  for (const auto& [key, leaf] : job.plan->catalog.leaves)
    TESSERA_CHECK(job.catalog.leaves.emplace(key, leaf).second, "'", key,
                  "' is a tensor on some ranks, but none on others. What differs from rank to rank needs "
                  "keys of its own.");
  try {
    for (const Write& write : job.plan->writes[peers.rank()])
      job.elements.push_back({write, part_of(local.at(write.key).boxes[write.source], write.box)});
    if (take_elements) take_elements(job);
  } catch (...) {
    job.error = std::current_exception();
  }
  return job;
}

void write_text(const std::string& path, const std::string& text) {
  File file = File::create(path);
  file.write(0, text.data(), text.size());
  file.sync();
  file.close();
}

/// The catalog with what all ranks have written.
Catalog complete(Catalog catalog, const std::vector<std::string>& written) {
  for (const std::string& bytes : written) {
    for (WrittenChunk& each : written_from_bytes(bytes))
      std::get<TensorEntry>(catalog.leaves.at(each.key).content).chunks.push_back(std::move(each.chunk));
  }
  check(catalog);
  return catalog;
}

/// Calls `remove`, which comes when the checkpoint is saved.
template <class Remove>
auto saved_but(const Remove& remove) {
  try {
    return remove();
  } catch (const c10::Error& error) {
    TESSERA_CHECK(false, "The checkpoint is saved, but older ones could not be removed: ",
                  error.what_without_backtrace());
  }
}

/// Removes what the publisher, on rank 0, has replaced. To give a file's memory back takes time, so each rank removes
/// its share of the files. Collective.
void remove_together(Publisher& publisher, const SaveJob& job, const Peers& peers) {
  const bool is_first = peers.rank() == 0;
  const std::string what = "Saving to " + job.path;
  const std::string retired = peers.gather_together(what, [&] {
    ByteWriter out;
    if (is_first) {
      for (const std::string& file : saved_but([&] { return publisher.retire(job.options.keep_last); }))
        out.put(std::string_view(file));
    }
    return out.take();
  })[0];
  if (!retired.empty()) {
    peers.together(what, [&] {
      ByteReader in(retired, "the names of files to remove");
      for (int64_t i = 0; !in.done(); ++i) {
        const std::string file(in.get_text());
        if (i % peers.size() == peers.rank()) saved_but([&] { remove_all(file); });
      }
    });
  }
  peers.together(what, [&] {
    if (is_first) saved_but([&] { publisher.clean_up(); });
  });
}

/// Writes and publishes. Collective.
void execute(const SaveJob& job, const Peers& peers) {
  const bool is_first = peers.rank() == 0;
  const std::string what = "Saving to " + job.path;
  Publisher publisher(job.path);
  const std::string fresh = peers.gather_together(what, [&] {
    if (job.error) std::rethrow_exception(job.error);
    if (is_first) publisher.begin();
    return publisher.fresh();
  })[0];
  std::optional<HuggingFaceFiles> files;
  if (job.options.format == Format::HuggingFace) {
    peers.together(what, [&] {
      files.emplace(fresh, job.catalog, job.options.file_limit);
      if (is_first) files->create();
    });
  }

  std::map<std::string, ArchiveLocation> values;
  const auto written = peers.gather_together(what, [&] {
    ProgressMeter meter("saving", job.bytes(), job.options.progress, is_first);
    std::vector<WrittenChunk> chunks;
    switch (job.options.format) {
      case Format::Tessera:
        chunks = write_native_files(fresh, peers.rank(), job.elements, meter);
        break;
      case Format::HuggingFace:
        files->write(job.elements, meter);
        break;
      case Format::DCP:
        chunks = write_dcp_file(fresh, peers.rank(), job.catalog, job.elements, values, meter);
        break;
    }
    meter.finish();
    return to_bytes(chunks);
  });

  peers.together(what, [&] {
    if (!is_first) return;
    if (files) {
      files->finish();
    } else {
      const Catalog catalog = complete(job.catalog, written);
      const bool is_dcp = job.options.format == Format::DCP;
      write_text(fresh + "/" + (is_dcp ? kDCPMetadataFile : kIndexFile),
                 is_dcp ? write_dcp_metadata(catalog, values) : write_index(catalog));
    }
    publisher.publish_now();
  });
  remove_together(publisher, job, peers);
}

/// Memory for copies of what is to be saved: kept from one save to the next, as new memory costs more than the copy.
class SnapshotMemory {
 public:
  static SnapshotMemory& instance() {
    static SnapshotMemory memory;
    return memory;
  }

  at::Tensor take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto free = free_.begin(); free != free_.end(); ++free) {
      if (free->numel() < bytes) continue;
      at::Tensor found = *free;
      free_.erase(free);
      return found;
    }
    free_.clear();  // all too small
    return at::empty({bytes}, at::kByte);
  }

  void give_back(at::Tensor memory) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

/// This thread gets what the others leave it of the processors: training goes on.
void yield_to_others() {
  constexpr int kNice = 10;
  (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
}

constexpr int64_t kSnapshotAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kSnapshotAlignment - 1) / kSnapshotAlignment * kSnapshotAlignment;
}

/// Makes the job's elements copies, in `memory`.
void take_snapshot(SaveJob& job, at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  int64_t total = 0;
  for (const ElementsToWrite& each : job.elements)
    total += aligned(static_cast<int64_t>(each.elements.nbytes()));
  memory = SnapshotMemory::instance().take(total);
  int64_t position = 0;
  for (ElementsToWrite& each : job.elements) {
    const auto bytes = static_cast<int64_t>(each.elements.nbytes());
    at::Tensor copy = at::empty({0}, each.elements.options().device(at::kCPU));
    copy.set_(memory.storage(), position / static_cast<int64_t>(each.elements.element_size()),
              each.elements.sizes());
    copy.copy_(each.elements);
    each.elements = copy;
    position += aligned(bytes);
  }
}

}  // namespace

void save(const StateDict& state, const std::string& path, const SaveOptions& options) {
  Peers peers("checkpoint");
  const SaveJob job = prepare(state, path, options, peers);
  execute(job, peers);
}

SavePlanCacheInfo save_plan_cache_info() { return last_plan().info; }

struct PendingSave::State {
  std::shared_future<void> result;
  bool is_asked = false;
};

PendingSave::PendingSave(std::shared_ptr<State> state) : state_(std::move(state)) {}
PendingSave::PendingSave(PendingSave&&) noexcept = default;
PendingSave& PendingSave::operator=(PendingSave&&) noexcept = default;

PendingSave::~PendingSave() {
  if (!state_ || state_->is_asked) return;
  try {
    wait();
  } catch (const std::exception& error) {
    std::cerr << "tessera: a checkpoint that was saved in the background is lost: " << error.what() << "\n";
  }
}

void PendingSave::wait() {
  TESSERA_CHECK(state_, "This save was moved from.");
  state_->is_asked = true;
  const Blocking blocking;
  state_->result.get();
}

bool PendingSave::is_done() const {
  return !state_ || state_->result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

PendingSave async_save(const StateDict& state, const std::string& path, const SaveOptions& options) {
  thread_local std::shared_future<void> last;
  if (last.valid()) {
    const Blocking blocking;
    last.wait();
  }
  at::Tensor memory;
  Peers peers("checkpoint"), background("checkpoint in the background");
  SaveJob job =
      prepare(state, path, options, peers, [&](SaveJob& complete) { take_snapshot(complete, memory); });
  std::shared_ptr<World> world = has_current_world() ? current_world() : nullptr;
  last = std::async(std::launch::async, [job = std::move(job), memory, world,
                                         background = std::move(background)]() mutable {
           // What the job holds goes with it, not only when the next one replaces it in `last`.
           const SaveJob mine = std::move(job);
           const Peers mates = std::move(background);
           const std::shared_ptr<World> here = std::move(world);
           std::optional<WorldScope> scope;
           if (here) scope.emplace(here);
           yield_to_others();
           execute(mine, mates);
           SnapshotMemory::instance().give_back(std::move(memory));
         }).share();
  auto pending = std::make_shared<PendingSave::State>();
  pending->result = last;
  return PendingSave(std::move(pending));
}

}  // namespace tessera::checkpoint
