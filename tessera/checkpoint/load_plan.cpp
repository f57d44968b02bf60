#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/runs.h>
#include <tessera/error.h>
#include <tessera/sharded/boxes.h>

#include <algorithm>
#include <set>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

/// What is read for several ranks is divided among them in ranges of this size.
constexpr int64_t kSharedReadBytes = 8 << 20;

/// Blocks [begin, end) of a chunk that a rank needs.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t rank = 0;
};

/// The blocks that hold the runs, as intervals that do not touch.
void add_intervals(const Runs& runs, int64_t element_size, int64_t block, int64_t rank,
                   std::vector<Interval>& out) {
  const size_t first = out.size();
  for (const int64_t i : c10::irange(runs.count())) {
    const Runs::Run run = runs.at(i);
    const int64_t begin = run.in_a * element_size / block;
    const int64_t end = ((run.in_a + run.length) * element_size - 1) / block + 1;
    if (out.size() > first && begin <= out.back().end) {
      out.back().end = std::max(out.back().end, end);
    } else {
      out.push_back({begin, end, rank});
    }
  }
}

/// Adds a read for each range of blocks that the same ranks need; its reader is yet to be chosen.
void add_reads(const std::string& key, size_t index, int64_t bytes, int64_t block,
               const std::vector<Interval>& intervals, std::vector<Read>& reads) {
  std::vector<std::tuple<int64_t, bool, int64_t>> events;  // position, begins, rank
  for (const Interval& interval : intervals) {
    events.emplace_back(interval.begin, true, interval.rank);
    events.emplace_back(interval.end, false, interval.rank);
  }
  std::sort(events.begin(), events.end());
  std::multiset<int64_t> active;
  for (size_t i = 0; i < events.size();) {
    const int64_t position = std::get<0>(events[i]);
    for (; i < events.size() && std::get<0>(events[i]) == position; ++i) {
      const auto& [at, begins, rank] = events[i];
      if (begins) {
        active.insert(rank);
      } else {
        active.erase(active.find(rank));
      }
    }
    if (active.empty() || i == events.size()) continue;
    Read read;
    read.key = key;
    read.chunk = index;
    read.needed_by.assign(active.begin(), active.end());
    read.needed_by.erase(std::unique(read.needed_by.begin(), read.needed_by.end()), read.needed_by.end());
    const int64_t end = std::min(std::get<0>(events[i]) * block, bytes);
    const int64_t step = read.is_shared() ? std::max(kSharedReadBytes / block, int64_t{1}) * block : end;
    for (int64_t begin = position * block; begin < end; begin += step) {
      read.begin = begin;
      read.end = std::min(begin + step, end);
      reads.push_back(read);
    }
  }
}

void add_tensor(const std::string& key, const TensorEntry& tensor, const std::vector<Description>& ranks,
                std::vector<Read>& reads) {
  std::vector<sharded::Box> chunks, wanted;
  std::vector<int64_t> wanted_by;
  for (const Chunk& chunk : tensor.chunks) chunks.push_back({chunk.offsets, chunk.sizes});
  for (const auto rank : c10::irange(ranks.size())) {
    const auto leaf = ranks[rank].find(key);
    if (leaf == ranks[rank].end()) continue;
    for (const ChunkBox& box : leaf->second.boxes) {
      wanted.push_back({box.offsets, box.sizes});
      wanted_by.push_back(static_cast<int64_t>(rank));
    }
  }
  std::vector<std::vector<size_t>> of_chunk(chunks.size());
  sharded::for_each_overlap(chunks, wanted, [&](size_t i, size_t j) {
    of_chunk[i].push_back(j);
    return false;
  });
  const int64_t element_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const auto i : c10::irange(chunks.size())) {
    const Chunk& chunk = tensor.chunks[i];
    const int64_t bytes = byte_count(chunk.sizes, tensor.dtype, key);
    const int64_t block = chunk.checksums ? chunk.checksums->block : checksum_block(bytes);
    std::vector<Interval> intervals;
    std::sort(of_chunk[i].begin(), of_chunk[i].end());
    for (const size_t j : of_chunk[i])
      add_intervals(Runs(chunks[i].offsets, chunks[i].sizes, wanted[j].offsets, wanted[j].sizes),
                    element_size, block, wanted_by[j], intervals);
    add_reads(key, i, bytes, block, intervals, reads);
  }
}

}  // namespace

int64_t checksum_block(int64_t length) {
  constexpr int64_t kSmallest = 64 << 10, kLargest = 1 << 20;
  const int64_t wanted = (length / 256 + kSmallest - 1) / kSmallest * kSmallest;
  return std::clamp(wanted, kSmallest, kLargest);
}

LoadPlan plan_load(const Catalog& catalog, const std::vector<Description>& ranks) {
  LoadPlan plan;
  plan.bytes_read.assign(ranks.size(), 0);
  std::set<std::string> keys;
  for (const Description& description : ranks) {
    for (const auto& [key, leaf] : description) {
      if (leaf.is_tensor) keys.insert(key);
    }
  }
  for (const std::string& key : keys)
    add_tensor(key, std::get<TensorEntry>(catalog.leaves.at(key).content), ranks, plan.reads);
  for (const bool shared : {false, true}) {
    for (Read& read : plan.reads) {
      if (read.is_shared() != shared) continue;
      read.reader =
          *std::min_element(read.needed_by.begin(), read.needed_by.end(), [&](int64_t a, int64_t b) {
            return std::pair(plan.bytes_read[a], a) < std::pair(plan.bytes_read[b], b);
          });
      plan.bytes_read[read.reader] += read.bytes();
    }
  }
  return plan;
}

}  // namespace tessera::checkpoint
