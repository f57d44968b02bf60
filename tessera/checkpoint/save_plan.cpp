#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/save_plan.h>
#include <tessera/error.h>

#include <algorithm>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

/// Boxes below this are not worth splitting.
constexpr int64_t kSmallestSplit = 1 << 20;

/// A box, and where it is.
struct Candidate {
  std::string key;
  ChunkBox box;
  int64_t bytes = 0;
  std::vector<std::pair<int64_t, size_t>> owners;  // rank, and which of its boxes it lies in
};

int64_t divided_up(int64_t number, int64_t by) { return number / by + (number % by != 0); }

/// In up to `count` parts of nearly equal size, along the first dim that has more than one element.
std::vector<ChunkBox> split(const ChunkBox& box, int64_t count) {
  const auto dim = std::find_if(box.sizes.begin(), box.sizes.end(), [](int64_t size) { return size > 1; });
  if (dim == box.sizes.end()) return {box};
  const size_t d = dim - box.sizes.begin();
  const int64_t each = divided_up(*dim, count);
  std::vector<ChunkBox> result;
  for (int64_t begin = 0; begin < *dim;) {
    ChunkBox part = box;
    part.offsets[d] += begin;
    part.sizes[d] = std::min(each, *dim - begin);
    begin += part.sizes[d];
    result.push_back(std::move(part));
  }
  return result;
}

std::string summary(const LeafDescription& leaf) {
  if (!leaf.is_tensor) return leaf.value;
  return c10::str("a tensor ", leaf.dtype, " [", c10::Join(", ", leaf.shape), "]");
}

/// The leaves of all ranks, and their boxes, each once.
struct Merged {
  Catalog catalog;
  std::vector<Candidate> boxes;
};

Merged merge(const std::vector<Description>& ranks) {
  Merged result;
  std::map<std::string, std::pair<int64_t, const LeafDescription*>> first;  // and the rank that has it
  std::map<std::pair<std::string, ChunkBox>, Candidate> boxes;
  std::string errors;
  for (const auto rank : c10::irange(ranks.size())) {
    for (const auto& [key, leaf] : ranks[rank]) {
      const auto [known, is_new] = first.try_emplace(key, static_cast<int64_t>(rank), &leaf);
      const LeafDescription& other = *known->second.second;
      if (leaf.path != other.path || leaf.is_tensor != other.is_tensor || leaf.shape != other.shape ||
          leaf.dtype != other.dtype || leaf.value != other.value) {
        errors += c10::str("\n  '", key, "' is ", summary(other), " on rank ", known->second.first, ", but ",
                           summary(leaf), " on rank ", rank);
        continue;
      }
      if (is_new) {
        Leaf& entry = result.catalog.leaves[key];
        entry.path = leaf.path;
        if (leaf.is_tensor) {
          entry.content = TensorEntry{leaf.shape, leaf.dtype, {}};
        } else {
          entry.content = value_from_json(leaf.value, "'" + key + "'");
        }
      }
      for (const auto source : c10::irange(leaf.boxes.size())) {
        const ChunkBox& box = leaf.boxes[source];
        Candidate& candidate = boxes[{key, box}];
        if (candidate.owners.empty()) {
          candidate.key = key;
          candidate.box = box;
          candidate.bytes = byte_count(box.sizes, leaf.dtype, "'" + key + "'");
        }
        candidate.owners.emplace_back(rank, source);
      }
    }
  }
  TESSERA_CHECK(errors.empty(), "The ranks do not agree on what is to be saved:", errors,
                "\nWhat differs from rank to rank needs keys of its own.");
  for (auto& [key, candidate] : boxes) result.boxes.push_back(std::move(candidate));
  return result;
}

/// Throws unless the boxes of each tensor are together all of it.
void check_tilings(const Merged& merged) {
  Catalog catalog = merged.catalog;
  for (const Candidate& candidate : merged.boxes) {
    auto& tensor = std::get<TensorEntry>(catalog.leaves.at(candidate.key).content);
    Chunk chunk;
    chunk.offsets = candidate.box.offsets;
    chunk.sizes = candidate.box.sizes;
    chunk.length = candidate.bytes;
    chunk.file = c10::str("rank ", candidate.owners.front().first);
    tensor.chunks.push_back(std::move(chunk));
  }
  check(catalog);
}

}  // namespace

std::string to_bytes(const Description& description) {
  ByteWriter out;
  out.put(static_cast<int64_t>(description.size()));
  for (const auto& [key, leaf] : description) {
    out.put(std::string_view(key));
    put_path(out, leaf.path);
    out.put(static_cast<uint8_t>(leaf.is_tensor));
    if (leaf.is_tensor) {
      out.put_list(leaf.shape);
      out.put(static_cast<int8_t>(leaf.dtype));
      out.put(static_cast<int64_t>(leaf.boxes.size()));
      for (const ChunkBox& box : leaf.boxes) {
        out.put_list(box.offsets);
        out.put_list(box.sizes);
      }
    } else {
      out.put(std::string_view(leaf.value));
    }
  }
  return out.take();
}

Description description_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "the description of a rank's state dict");
  Description description;
  for (int64_t count = in.get_count(1); count > 0; --count) {
    LeafDescription& leaf = description[std::string(in.get_text())];
    leaf.path = get_path(in);
    leaf.is_tensor = in.get<uint8_t>() != 0;
    if (leaf.is_tensor) {
      leaf.shape = in.get_list();
      leaf.dtype = get_dtype(in);
      for (int64_t boxes = in.get_count(1); boxes > 0; --boxes) {
        auto offsets = in.get_list();
        leaf.boxes.push_back({std::move(offsets), in.get_list()});
      }
    } else {
      leaf.value = in.get_text();
    }
  }
  in.check(in.done());
  return description;
}

SavePlan plan_save(const std::vector<Description>& ranks) {
  Merged merged = merge(ranks);
  check_tilings(merged);
  SavePlan plan;
  plan.writes.resize(ranks.size());
  std::vector<int64_t> load(ranks.size(), 0);
  const auto assign = [&](const Candidate& candidate, const ChunkBox& box, int64_t bytes) {
    const auto& owner = *std::min_element(
        candidate.owners.begin(), candidate.owners.end(), [&](const auto& a, const auto& b) {
          return std::pair(load[a.first], a.first) < std::pair(load[b.first], b.first);
        });
    plan.writes[owner.first].push_back({candidate.key, box, owner.second});
    load[owner.first] += bytes;
  };

  int64_t total = 0;
  for (const Candidate& candidate : merged.boxes) {
    TESSERA_CHECK_VALUE(!__builtin_add_overflow(total, candidate.bytes, &total),
                        "The tensors have more bytes together than 64 bits can count.");
  }
  const int64_t share = std::max(total / static_cast<int64_t>(4 * ranks.size()), kSmallestSplit);
  // What only one rank has cannot be balanced; then the largest first.
  std::stable_sort(merged.boxes.begin(), merged.boxes.end(), [](const Candidate& a, const Candidate& b) {
    const bool a_is_shared = a.owners.size() > 1, b_is_shared = b.owners.size() > 1;
    return a_is_shared != b_is_shared ? b_is_shared : a.bytes > b.bytes;
  });
  for (const Candidate& candidate : merged.boxes) {
    const int64_t parts = candidate.owners.size() == 1 ? 1 : divided_up(candidate.bytes, share);
    const c10::ScalarType dtype =
        std::get<TensorEntry>(merged.catalog.leaves.at(candidate.key).content).dtype;
    for (const ChunkBox& box : split(candidate.box, parts))
      assign(candidate, box, byte_count(box.sizes, dtype, candidate.key));
  }
  plan.catalog = std::move(merged.catalog);
  return plan;
}

}  // namespace tessera::checkpoint
