#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/flatten.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/local_boxes.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/peers.h>
#include <tessera/checkpoint/read.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <set>

#include <ATen/Functions.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace tessera::checkpoint {

namespace {

/// How often a load begins anew as the checkpoint was replaced meanwhile.
constexpr int kMaxAttempts = 100;

/// A checkpoint of which rank 0 knows whether it is still the one at its path.
struct Opened {
  OpenCheckpoint checkpoint;
  std::optional<Identity> identity;  // on rank 0

  bool is_current(const std::string& path) const {
    try {
      return identity && Identity::of(resolve_checkpoint(path)) == *identity;
    } catch (const c10::Error&) {
      return false;  // it is being replaced
    }
  }
};

/// Rank 0 reads what the checkpoint holds, and sends it to the others.
Opened open_together(const std::string& path, const Peers& peers) {
  Opened opened;
  std::string bytes;
  peers.together("Loading " + path, [&] {
    if (peers.rank() != 0) return;
    for (int attempt = 1;; ++attempt) {
      try {
        const std::string resolved = resolve_checkpoint(path);
        if (exists(resolved)) opened.identity = Identity::of(resolved);
        opened.checkpoint = open_checkpoint(path);
        if (opened.is_current(path)) break;
        TESSERA_CHECK(attempt < kMaxAttempts, path, " is replaced again and again while it is read.");
      } catch (const std::exception&) {
        if (attempt == kMaxAttempts || !opened.identity || opened.is_current(path)) throw;
      }
    }
    if (peers.size() == 1) return;
    ByteWriter out;
    out.put(std::string_view(opened.checkpoint.directory));
    out.put(std::string_view(to_bytes(opened.checkpoint.catalog)));
    bytes = out.take();
  });
  bytes = peers.broadcast(bytes);
  if (peers.rank() != 0) {
    ByteReader in(bytes, "the catalog of a checkpoint");
    opened.checkpoint.directory = in.get_text();
    opened.checkpoint.catalog = catalog_from_bytes(in.get_text());
  }
  return opened;
}

std::string text_of(const TensorEntry& tensor) {
  return c10::str(tensor.dtype, " [", c10::Join(", ", tensor.shape), "]");
}

/// The leaves of this rank's state dict that are in the checkpoint, and where tensors are to be loaded into.
struct Wanted {
  std::map<std::string, StateLeaf> leaves;
  Description description;
  Destinations destinations;
  /// Tensors whose memory is not row-major on the CPU are loaded into other memory first.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
};

Wanted find_wanted(Value& values, const Catalog& catalog) {
  Wanted wanted;
  wanted.leaves = flatten(values);
  // An empty dict has nothing to load: PyTorch's checkpoints do not even name it.
  std::erase_if(wanted.leaves, [&](const auto& entry) {
    const auto& [key, leaf] = entry;
    return leaf.value->is_dict() && !catalog.leaves.count(key);
  });
  for (const auto& [key, leaf] : wanted.leaves) {
    LeafDescription& description = wanted.description[key];
    description.path = leaf.path;
    description.is_tensor = leaf.value->is_tensor();
    if (!description.is_tensor) continue;
    const LocalTensor tensor = local_boxes(key, leaf.value->tensor());
    description.shape = tensor.shape;
    description.dtype = tensor.dtype;
    for (const LocalBoxView& box : tensor.boxes)
      description.boxes.push_back({box.offsets, box.elements.sizes().vec()});
  }
  return wanted;
}

/// What is not as the state dicts of all ranks say: the same on every rank.
struct Differences {
  LoadReport report;
  std::vector<std::string> mismatches;

  std::string text(bool strict) const {
    std::string text;
    const auto add = [&](const char* what, const std::vector<std::string>& items) {
      if (items.empty()) return;
      text += c10::str("\n  ", what, ":");
      for (const std::string& item : items) text += "\n    " + item;
    };
    add("of another shape, dtype or kind", mismatches);
    if (strict) {
      add("missing in the checkpoint", report.missing);
      add("only in the checkpoint", report.unexpected);
    }
    return text;
  }
};

Differences compare(const Catalog& catalog, const std::vector<Description>& ranks) {
  Differences result;
  std::set<std::string> missing, mismatches, known;
  for (const auto rank : c10::irange(ranks.size())) {
    for (const auto& [key, leaf] : ranks[rank]) {
      known.insert(key);
      const auto found = catalog.leaves.find(key);
      if (found == catalog.leaves.end()) {
        missing.insert(key);
        continue;
      }
      const TensorEntry* tensor = found->second.tensor();
      const TensorEntry mine{leaf.shape, leaf.dtype, {}};
      if (const Unreadable* unreadable = found->second.unreadable()) {
        mismatches.insert(c10::str(key, ": ", unreadable->reason));
      } else if ((tensor != nullptr) != leaf.is_tensor) {
        mismatches.insert(c10::str(key, ": ", tensor ? "a tensor" : "no tensor", " in the checkpoint, but ",
                                   leaf.is_tensor ? "a tensor" : "none", " in the state dict"));
      } else if (tensor && (tensor->shape != leaf.shape || tensor->dtype != leaf.dtype)) {
        mismatches.insert(c10::str(key, ": ", text_of(*tensor), " in the checkpoint, but ", text_of(mine),
                                   " in the state dict"));
      }
    }
  }
  result.report.missing.assign(missing.begin(), missing.end());
  result.mismatches.assign(mismatches.begin(), mismatches.end());
  for (const auto& [key, leaf] : catalog.leaves) {
    if (!known.count(key)) result.report.unexpected.push_back(key);
  }
  return result;
}

/// Finds memory for all tensors that are to be loaded.
void make_destinations(Wanted& wanted) {
  for (const auto& [key, description] : wanted.description) {
    if (!description.is_tensor) continue;
    auto& destinations = wanted.destinations[key];
    for (const LocalBoxView& box : local_boxes(key, wanted.leaves.at(key).value->tensor()).boxes) {
      at::Tensor memory = box.elements;
      if (!memory.device().is_cpu() || !memory.is_contiguous() || memory.is_conj() || memory.is_neg()) {
        memory = at::empty(box.elements.sizes(), box.elements.options().device(at::kCPU));
        wanted.copies.emplace_back(box.elements, memory);
      }
      destinations.push_back({{box.offsets, box.elements.sizes().vec()}, memory});
    }
  }
}

/// Says that tensors were written into: to autograd, which may have saved them, and to views of distributed tensors
/// that are copies. Collective.
void count_writes(const Wanted& wanted) {
  for (const auto& [key, description] : wanted.description) {
    if (!description.is_tensor) continue;
    const at::Tensor& tensor = wanted.leaves.at(key).value->tensor();
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    if (const DTensorImpl* distributed = DTensorImpl::of(tensor)) distributed->wrote();
  }
}

/// Loads from what was opened, unless it was replaced before all ranks had opened their files: then nothing has been
/// changed, and there is no report. Collective.
std::optional<LoadReport> load_into(StateDict& state, const std::string& path, const Opened& opened,
                                    const LoadOptions& options, const Peers& peers) {
  const at::NoGradGuard no_grad;
  const OpenCheckpoint& checkpoint = opened.checkpoint;
  const std::string what = "Loading " + path;
  Wanted wanted;
  peers.together(what, [&] {
    StateDictHooks::before_load(state, checkpoint.catalog);
    wanted = find_wanted(state.values(), checkpoint.catalog);
  });
  std::vector<Description> ranks;
  for (const std::string& bytes : peers.all_gather(to_bytes(wanted.description)))
    ranks.push_back(description_from_bytes(bytes));
  const Differences differences = compare(checkpoint.catalog, ranks);
  const std::string errors = differences.text(options.strict);
  TESSERA_CHECK(errors.empty(), "The checkpoint ", path, " does not fit the state dict:", errors,
                differences.mismatches.empty() ? "\nWith strict = false, what both have is loaded." : "");
  for (const std::string& key : differences.report.missing) {
    for (Description& description : ranks) description.erase(key);
    wanted.description.erase(key);
  }

  const LoadPlan plan = plan_load(checkpoint.catalog, ranks);
  ChunkFiles files(checkpoint);
  const bool is_first = peers.rank() == 0;
  const int64_t bytes = plan.bytes_read[peers.rank()];
  std::exception_ptr error;
  try {
    make_destinations(wanted);
    for (const Read& read : plan.reads) {
      if (read.reader == peers.rank()) files.locate(read.key, read.chunk);
    }
  } catch (...) {
    error = std::current_exception();
  }
  // Files that are open stay what they are. If the checkpoint is now what it was at first, all are of that one.
  peers.all_gather("");
  std::string state_of_path;
  if (is_first) state_of_path = opened.is_current(path) ? "current" : "replaced";
  if (peers.broadcast(state_of_path) == "replaced") return std::nullopt;
  peers.together(what, [&] {
    if (error) std::rethrow_exception(error);
    if (options.verify != Verify::First) return;
    ProgressMeter meter("verifying", bytes, options.progress, is_first);
    verify_reads(plan, peers.rank(), files, meter);
    meter.finish();
  });
  const bool verify = options.verify == Verify::WhileLoading;
  peers.together(what + " (the state may be partly loaded)", [&] {
    ProgressMeter meter("loading", bytes, options.progress, is_first);
    try {
      read_own(plan, peers.rank(), files, wanted.destinations, verify, meter);
    } catch (...) {
      error = std::current_exception();
    }
    read_shared(plan, ranks, peers, files, wanted.destinations, verify, meter);
    if (error) std::rethrow_exception(error);
    for (const auto& [to, from] : wanted.copies) to.copy_(from);
    meter.finish();
  });
  count_writes(wanted);
  peers.together(what, [&] {
    for (const auto& [key, description] : wanted.description) {
      if (const Value* value = checkpoint.catalog.leaves.at(key).value())
        *wanted.leaves.at(key).value = *value;
    }
    StateDictHooks::on_load(state);
  });
  return differences.report;
}

/// `state_for` makes, or finds, the state to load into. Collective.
LoadReport load_together(const std::string& path, const LoadOptions& options, Peers& peers,
                         const std::function<StateDict&(const Catalog&)>& state_for) {
  peers.agree("load a checkpoint", {{"path", path},
                                    {"strict", options.strict ? "true" : "false"},
                                    {"verify", std::to_string(static_cast<int>(options.verify))}});
  for (int attempt = 1; attempt <= kMaxAttempts; ++attempt) {
    const Opened opened = open_together(path, peers);
    StateDict* state = nullptr;
    peers.together("Loading " + path, [&] { state = &state_for(opened.checkpoint.catalog); });
    if (auto report = load_into(*state, path, opened, options, peers)) return *report;
  }
  TESSERA_CHECK(false, path, " is replaced again and again while it is read.");
}

}  // namespace

LoadReport load(StateDict& state, const std::string& path, const LoadOptions& options) {
  Peers peers("checkpoint");
  return load_together(path, options, peers, [&](const Catalog&) -> StateDict& { return state; });
}

LoadReport load(StateDict&& state, const std::string& path, const LoadOptions& options) {
  return load(state, path, options);
}

Value load(const std::string& path, const LoadOptions& options) {
  Peers peers("checkpoint");
  StateDict state;
  load_together(path, options, peers, [&](const Catalog& catalog) -> StateDict& {
    state = StateDict();
    // Items of lists have to be put in the order of their indices: keys sort "10" before "2".
    std::vector<const Leaf*> leaves;
    for (const auto& [key, leaf] : catalog.leaves) leaves.push_back(&leaf);
    std::sort(leaves.begin(), leaves.end(), [](const Leaf* a, const Leaf* b) { return a->path < b->path; });
    for (const Leaf* leaf : leaves) {
      if (const Unreadable* unreadable = leaf->unreadable()) {
        TESSERA_CHECK(!options.strict, unreadable->reason, "\nWith strict = false, it is left out.");
        continue;
      }
      const TensorEntry* tensor = leaf->tensor();
      insert(state.values(), leaf->path,
             tensor ? Value(at::empty(tensor->shape, tensor->dtype)) : *leaf->value());
    }
    return state;
  });
  return std::move(state.values());
}

}  // namespace tessera::checkpoint
