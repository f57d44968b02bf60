#pragma once

#include <tessera/checkpoint/format.h>
#include <tessera/checkpoint/value.h>
#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
class LRScheduler;
}  // namespace torch::optim

/// Saving and loading what a program has on all of its ranks, or on none: docs/checkpoint.md.
///
///   checkpoint::save(StateDict::of(model, optimizer), "run/step-100");
///   checkpoint::load(StateDict::of(model, optimizer), "run/step-100");     // on any mesh
///
/// All ranks of the current world call them together; without a world, one process. Where one rank fails, all get the
/// error, which names it.
namespace tessera::checkpoint {

/// What is saved, or loaded into. Tensors are handles: loading writes into their memory. Other values are replaced.
class TESSERA_API StateDict {
 public:
  StateDict();
  /// Throws unless it is a dict.
  StateDict(Value values);

  /// The parameters and buffers of a module by their dotted names below "model"; of an optimizer, below "optimizer",
  /// the state of each parameter by the parameter's name and the options of each group; of a scheduler, below
  /// "scheduler", where it stands; and, below "random", the states of the calling rank's generator of distributed tensors and
  /// of libtorch's CPU generator.
  ///
  /// An optimizer that has made no step yet has no state to load into: if it is loaded, `load` makes it as the
  /// checkpoint has it.
  static StateDict of(torch::nn::Module& module);
  static StateDict of(torch::nn::Module& module, torch::optim::Optimizer& optimizer);
  static StateDict of(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                      torch::optim::LRScheduler& scheduler);

  Value& operator[](std::string_view key) { return values_[key]; }
  const Value& at(std::string_view key) const { return values_.at(key); }
  Value& values() { return values_; }
  const Value& values() const { return values_; }

  /// `save` calls it first, with what is to be saved, to change that: what it throws, on any rank, is an error on all.
  void before_save(std::function<void(Value& values)> function);
  /// `load` calls it on every rank when all values are loaded: for values that have to be put somewhere.
  void on_load(std::function<void(const Value& values)> function);
  /// `load` calls it first, with the keys that the checkpoint has, to add what is missing here.
  void before_load(std::function<void(Value& values, const std::vector<std::string>& keys)> function);

 private:
  friend struct StateDictHooks;
  Value values_;
  std::vector<std::function<void(Value&)>> before_save_;
  std::vector<std::function<void(const Value&)>> on_load_;
  std::vector<std::function<void(Value&, const std::vector<std::string>&)>> before_load_;
};

/// How far this rank is. `total` is 0 while it is not yet known.
struct Progress {
  std::string_view phase;  // "saving", "verifying", "loading"
  int64_t bytes = 0;
  int64_t total = 0;
};
using ProgressCallback = std::function<void(const Progress&)>;

struct SaveOptions {
  Format format = Format::Tessera;
  /// Of checkpoints beside the new one whose names differ from its only in digits ("step-100", "step-200"), keep so
  /// many, itself among them: those with the largest numbers. 0: all.
  int64_t keep_last = 0;
  /// The largest file, for Format::HuggingFace.
  int64_t file_limit = int64_t{5} << 30;
  /// Called now and then on each rank. By default, rank 0 shows a bar if stderr is a terminal and it takes long.
  ProgressCallback progress = {};
};

/// Writes a directory. What was there before, which must be a checkpoint or empty, stays whole until the new one is, and
/// is then removed. When it returns, on any rank, the checkpoint is on the disk.
TESSERA_API void save(const StateDict& state, const std::string& path, const SaveOptions& options = {});

/// How often a save found the plan of the last one (who writes what), which holds as long as no rank's state dict has
/// other keys, shapes or placements; of the calling rank.
struct SavePlanCacheInfo {
  int64_t hits = 0;
  int64_t misses = 0;
};
TESSERA_API SavePlanCacheInfo save_plan_cache_info();

/// A save under way.
class TESSERA_API PendingSave {
 public:
  PendingSave(PendingSave&&) noexcept;
  PendingSave& operator=(PendingSave&&) noexcept;
  /// Waits. An error that nobody asked for is printed.
  ~PendingSave();

  /// Returns when the checkpoint is on the disk; throws if it failed, on any rank.
  void wait();
  /// Whether `wait` would return at once.
  bool is_done() const;

 private:
  friend PendingSave async_save(const StateDict& state, const std::string& path, const SaveOptions& options);
  struct State;
  explicit PendingSave(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// Returns when what is to be saved has been copied, so that it may be changed at once; the rest happens on another
/// thread. Each rank copies only what it writes, about 1/n of the state on n ranks, into memory that is kept for the next
/// time. One such save is under way at a time: the next one waits for it.
[[nodiscard]] TESSERA_API PendingSave async_save(const StateDict& state, const std::string& path,
                                                 const SaveOptions& options = {});

/// When checksums are compared. Costs: docs/checkpoint.md.
enum class Verify {
  First,         // before anything is changed: an error leaves the state as it was. Reads twice.
  WhileLoading,  // reads once; after an error the state may be partly loaded
  Never,
};

struct LoadOptions {
  /// The state and the checkpoint must have the same keys.
  bool strict = true;
  Verify verify = Verify::First;
  ProgressCallback progress = {};
};

/// Where the state and the checkpoint differ, by key.
struct LoadReport {
  std::vector<std::string> missing;     // in the state, not in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint, not in the state
};

/// Loads a checkpoint of any format, saved on any ranks, into the state. Each rank reads only what it needs;
/// what several need is read by one of them and sent to the others. Throws before anything is changed, listing
/// everything, if a tensor has another shape or dtype, or, if strict, if keys are missing or unexpected.
TESSERA_API LoadReport load(StateDict& state, const std::string& path, const LoadOptions& options = {});
TESSERA_API LoadReport load(StateDict&& state, const std::string& path, const LoadOptions& options = {});

/// All of a checkpoint, as plain tensors on the CPU, the full ones on every rank.
TESSERA_API Value load(const std::string& path, const LoadOptions& options = {});

/// The checkpoint in `directory` whose name has the largest number, by the last digits in it: "" if there is none.
/// Directories that are no complete checkpoints do not count.
TESSERA_API std::string latest(const std::string& directory);

}  // namespace tessera::checkpoint
