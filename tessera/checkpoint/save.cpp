#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/flatten.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/inspect.h>
#include <tessera/checkpoint/local_boxes.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/peers.h>
#include <tessera/checkpoint/save_plan.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/checkpoint/write.h>
#include <tessera/comm/blocking.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/sharded/bytes.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <future>
#include <iostream>
#include <mutex>
#include <optional>
#include <random>

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

/// Collective.
std::shared_ptr<const SavePlan> make_plan(const Description& description, const Peers& peers) {
  LastPlan& last = last_plan();
  // Another world may have ranks with the same descriptions, in another order.
  const std::string mine = to_bytes(description);
  const std::string known_as = c10::str(peers.rank(), " of ", peers.size(), ": ", mine);
  sharded::ByteWriter id;
  id.put(known_as == last.description ? last.id : uint64_t{0});
  const auto ids = peers.all_gather(id.take());
  const bool is_known =
      last.plan && known_as == last.description &&
      std::all_of(ids.begin(), ids.end(), [&](const std::string& other) { return other == ids[0]; });
  if (is_known) {
    ++last.info.hits;
    return last.plan;
  }
  ++last.info.misses;
  const auto all = peers.all_gather(mine);
  std::vector<Description> descriptions;
  uint64_t hash = 0;
  for (const std::string& bytes : all) {
    descriptions.push_back(description_from_bytes(bytes));
    hash = c10::hash_combine(hash, std::hash<std::string>()(bytes));
  }
  last.plan = std::make_shared<SavePlan>(plan_save(descriptions));
  last.description = known_as;
  last.id = hash | 1;
  return last.plan;
}

/// What the ranks have that is no tensor. It changes from save to save, and is small. Collective.
Catalog gather_values(const Description& mine, const Peers& peers) {
  std::vector<Description> all;
  for (const std::string& bytes : peers.all_gather(to_bytes(mine)))
    all.push_back(description_from_bytes(bytes));
  return plan_save(all).catalog;
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
  peers.agree("save a checkpoint", {{"path", path},
                                    {"format", format_name(options.format)},
                                    {"keep_last", std::to_string(options.keep_last)},
                                    {"file_limit", std::to_string(options.file_limit)}});
  TESSERA_CHECK_VALUE(!path.empty(), "The path of a checkpoint must not be empty.");
  TESSERA_CHECK_VALUE(options.keep_last >= 0 && options.file_limit > 0,
                      "keep_last must not be negative, and file_limit must be positive.");
  const std::string what = "Saving to " + path;
  SaveJob job{path, options, nullptr, {}, {}};
  Value values;
  std::map<std::string, StateLeaf> leaves;
  std::map<std::string, LocalTensor> local;
  Description mine;
  peers.together(what, [&] {
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
  job.plan = make_plan(mine, peers);
  job.catalog = gather_values(values_of_mine, peers);
  for (const auto& [key, leaf] : job.plan->catalog.leaves)
    TESSERA_CHECK(job.catalog.leaves.emplace(key, leaf).second, "'", key,
                  "' is a tensor on some ranks, but none on others. What differs from rank to rank needs "
                  "keys of its own.");
  peers.together(what, [&] {
    for (const Write& write : job.plan->writes[peers.rank()])
      job.elements.push_back({write, part_of(local.at(write.key).boxes[write.source], write.box)});
    if (take_elements) take_elements(job);
  });
  return job;
}

/// Directories that checkpoints are written into before they are published, and those that are on their way out:
/// ".<name>.saving.<16 digits>". Each has other digits, so that a process that is left over from a save that was given
/// up cannot write into the next one.
constexpr std::string_view kFreshMiddle = ".saving.";
constexpr size_t kFreshDigits = 16;

std::string name_in_path(const std::string& path) {
  const std::string trimmed = path.substr(0, path.find_last_not_of('/') + 1);
  return trimmed.substr(trimmed.rfind('/') + 1);
}

std::string fresh_name(const std::string& path) {
  std::random_device random;
  char digits[kFreshDigits + 1];
  std::snprintf(digits, sizeof digits, "%08x%08x", random(), random());
  return beside(path, c10::str(kFreshMiddle, digits));
}

/// The name of the checkpoint that such a directory was made for; nothing of others.
std::optional<std::string> name_of_fresh(const std::string& name) {
  const size_t tail = kFreshMiddle.size() + kFreshDigits;
  if (name.size() <= tail + 1 || name.front() != '.') return std::nullopt;
  const std::string_view end = std::string_view(name).substr(name.size() - tail);
  if (!end.starts_with(kFreshMiddle) ||
      end.find_first_not_of("0123456789abcdef", kFreshMiddle.size()) != std::string_view::npos)
    return std::nullopt;
  return name.substr(1, name.size() - tail - 1);
}

/// "step-100" and "step-7" are of one series, and have the numbers 100 and 7.
std::pair<std::string, std::string> series_and_number(const std::string& name) {
  const size_t end = name.find_last_of("0123456789");
  if (end == std::string::npos) return {name, ""};
  const size_t before = name.find_last_not_of("0123456789", end);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  std::string number = name.substr(begin, end + 1 - begin);
  number.erase(0, std::min(number.find_first_not_of('0'), number.size() - 1));
  return {name.substr(0, begin) + "#" + name.substr(end + 1), number};
}

/// Removes what saves that were killed left, of this checkpoint, whose lock the caller holds, and of others of its
/// series that nobody is saving.
void remove_left_over(const std::string& path) {
  const std::string directory = parent_of(path), mine = name_in_path(path);
  for (const std::string& name : list_directory(directory)) {
    const auto made_for = name_of_fresh(name);
    if (!made_for || series_and_number(*made_for).first != series_and_number(mine).first) continue;
    std::optional<DirectoryLock> lock;
    if (*made_for != mine) lock = DirectoryLock::try_take(directory + "/" + *made_for);
    if (*made_for == mine || lock) remove_all(directory + "/" + name);
  }
}

/// Whether a checkpoint of that format has files of that name.
bool is_file_of(Format format, const std::string& name) {
  switch (format) {
    case Format::Tessera:
      return name == kIndexFile || name.ends_with(".safetensors");
    case Format::HuggingFace:
      return name == kHuggingFaceIndexFile || name.ends_with(".safetensors");
    case Format::DCP:
      return name == kDCPMetadataFile || name.ends_with(".distcp");
  }
  return false;
}

/// Throws if something is at `path` that is not ours to remove.
void check_replaceable(const std::string& path) {
  if (!exists(path)) return;
  TESSERA_CHECK(is_directory(path), path, " is a file. A checkpoint is a directory: choose another path.");
  const auto names = list_directory(path);
  const auto format = find_format(path);
  TESSERA_CHECK(
      names.empty() || format, path,
      " is a directory that holds something else than a checkpoint. Choose another path, or remove it.");
  for (const std::string& name : names)
    TESSERA_CHECK(is_file_of(*format, name) && !is_directory(path + "/" + name), path,
                  " is a checkpoint, but also holds ", name,
                  ", which would be lost. Choose another path, or move that away.");
}

/// What only rank 0 does: it holds the lock, makes the directory, and publishes it.
class Publisher {
 public:
  explicit Publisher(std::string path) : path_(std::move(path)) {}
  /// What was not published goes.
  ~Publisher() {
    try {
      if (lock_ && !fresh_.empty()) remove_all(fresh_);
    } catch (const std::exception& error) {
      std::cerr << "tessera: " << error.what() << "\n";
    }
  }

  void begin() {
    make_directories(parent_of(path_));
    lock_ = DirectoryLock::try_take(path_);
    TESSERA_CHECK(lock_, "Another save into ", path_, " is under way. Wait for it, or choose another path.");
    check_replaceable(path_);
    remove_left_over(path_);
    fresh_ = fresh_name(path_);
    make_directory(fresh_);
  }

  /// The directory to write into.
  const std::string& fresh() const { return fresh_; }

  void publish_now() {
    sync_directory(fresh_);
    publish(fresh_, path_);
  }

  /// Of what `publish_now` has left: what was there before, and older checkpoints.
  void clean_up(int64_t keep_last);

 private:
  const std::string path_;
  std::string fresh_;
  std::optional<DirectoryLock> lock_;
};

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

bool less_number(const std::string& a, const std::string& b) {
  return a.size() != b.size() ? a.size() < b.size() : a < b;
}

void remove_older(const std::string& path, int64_t keep_last) {
  if (keep_last == 0) return;
  const std::string directory = parent_of(path);
  const auto [series, number] = series_and_number(name_in_path(path));
  if (number.empty()) return;
  std::vector<std::pair<std::string, std::string>> others;  // number, path
  for (const std::string& name : list_directory(directory)) {
    const auto [other_series, other_number] = series_and_number(name);
    const std::string other = directory + "/" + name;
    if (other_series == series && name != name_in_path(path) && is_directory(other) && find_format(other))
      others.emplace_back(other_number, other);
  }
  std::sort(others.begin(), others.end(),
            [](const auto& a, const auto& b) { return less_number(b.first, a.first); });
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < others.size(); ++i) {
    const auto lock = DirectoryLock::try_take(others[i].second);
    if (!lock) continue;  // somebody saves there
    // Out of sight first, so that nobody finds it half removed.
    const std::string gone = fresh_name(others[i].second);
    publish(others[i].second, gone);
    remove_all(gone);
  }
}

void Publisher::clean_up(int64_t keep_last) {
  try {
    remove_all(fresh_);
    lock_.reset();
    remove_older(path_, keep_last);
  } catch (const c10::Error& error) {
    TESSERA_CHECK(false, "The checkpoint is saved, but older ones could not be removed: ",
                  error.what_without_backtrace());
  }
}

/// Writes and publishes. Collective.
void execute(const SaveJob& job, const Peers& peers) {
  const bool is_first = peers.rank() == 0;
  const std::string what = "Saving to " + job.path;
  Publisher publisher(job.path);
  peers.together(what, [&] {
    if (is_first) publisher.begin();
  });
  const std::string fresh = peers.broadcast(publisher.fresh());
  std::optional<HuggingFaceFiles> files;
  peers.together(what, [&] {
    if (job.options.format == Format::HuggingFace) {
      files.emplace(fresh, job.catalog, job.options.file_limit);
      if (is_first) files->create();
    }
  });

  std::vector<WrittenChunk> written;
  std::map<std::string, ArchiveLocation> values;
  peers.together(what, [&] {
    ProgressMeter meter("saving", job.bytes(), job.options.progress, is_first);
    switch (job.options.format) {
      case Format::Tessera:
        written = write_native_files(fresh, peers.rank(), job.elements, meter);
        break;
      case Format::HuggingFace:
        files->write(job.elements, meter);
        break;
      case Format::DCP:
        written = write_dcp_file(fresh, peers.rank(), job.catalog, job.elements, values, meter);
        break;
    }
    meter.finish();
  });

  const auto all_written = peers.all_gather(to_bytes(written));
  peers.together(what, [&] {
    if (!is_first) return;
    if (job.options.format == Format::HuggingFace) {
      files->finish();
    } else {
      const Catalog catalog = complete(job.catalog, all_written);
      const bool is_dcp = job.options.format == Format::DCP;
      write_text(fresh + "/" + (is_dcp ? kDCPMetadataFile : kIndexFile),
                 is_dcp ? write_dcp_metadata(catalog, values) : write_index(catalog));
    }
    publisher.publish_now();
    publisher.clean_up(job.options.keep_last);
  });
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

std::string latest(const std::string& directory) {
  std::string best, best_number;
  if (!is_directory(directory)) return best;
  for (const std::string& name : list_directory(directory)) {
    const std::string number = series_and_number(name).second;
    const std::string path = directory + "/" + name;
    if (number.empty() || name.front() == '.' || !is_directory(path) || !find_format(path)) continue;
    if (best.empty() || less_number(best_number, number)) {
      best = path;
      best_number = number;
    }
  }
  return best;
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
  background.know(peers);
  std::shared_ptr<World> world = has_current_world() ? current_world() : nullptr;
  last = std::async(std::launch::async, [job = std::move(job), memory, world,
                                         background = std::move(background)]() mutable {
           // What the job holds goes with it, not only when the next one replaces it in `last`.
           const SaveJob mine = std::move(job);
           const Peers mates = std::move(background);
           const std::shared_ptr<World> here = std::move(world);
           std::optional<WorldScope> scope;
           if (here) scope.emplace(here);
           execute(mine, mates);
           SnapshotMemory::instance().give_back(std::move(memory));
         }).share();
  auto pending = std::make_shared<PendingSave::State>();
  pending->result = last;
  return PendingSave(std::move(pending));
}

}  // namespace tessera::checkpoint
