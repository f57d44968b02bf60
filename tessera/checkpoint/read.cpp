#include <tessera/checkpoint/read.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/checkpoint/zip_archive.h>
#include <tessera/error.h>
#include <tessera/sharded/boxes.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include <ATen/Functions.h>
#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

/// What is read at once: it stays in the processor's cache between the system's copy, the checksum and ours.
constexpr int64_t kWindow = 1 << 20;
/// What a rank reads for others before they exchange it.
constexpr int64_t kRound = 32 << 20;

int64_t block_of(const ChunkFiles::Located& located) {
  return located.chunk->checksums ? located.chunk->checksums->block : int64_t{1} << 16;
}

/// Calls `use(begin, end)` with windows of a read, at bounds of blocks.
template <class Use>
void for_each_window(const Read& read, int64_t block, const Use& use) {
  const int64_t step = std::max(kWindow / block, int64_t{1}) * block;
  for (int64_t begin = read.begin; begin < read.end; begin += step)
    use(begin, std::min(begin + step, read.end));
}

/// The runs of a chunk's elements in boxes that share some with it.
struct BoxRuns {
  size_t box = 0;
  Runs runs;
};

std::vector<BoxRuns> runs_of(const Chunk& chunk, c10::ArrayRef<const ChunkBox*> boxes) {
  std::vector<BoxRuns> result;
  for (const auto i : c10::irange(boxes.size())) {
    const ChunkBox& box = *boxes[i];
    if (sharded::intersect({chunk.offsets, chunk.sizes}, {box.offsets, box.sizes}))
      result.push_back({i, Runs(chunk.offsets, chunk.sizes, box.offsets, box.sizes)});
  }
  return result;
}

/// The runs of one rank's boxes in the chunk that was asked for last.
class RunsOfRank {
 public:
  const std::vector<BoxRuns>& of(const std::string& key, size_t index, const Chunk& chunk,
                                 const std::vector<const ChunkBox*>& boxes) {
    if (key != key_ || index != index_) {
      runs_ = runs_of(chunk, boxes);
      key_ = key;
      index_ = index;
    }
    return runs_;
  }

 private:
  std::string key_;
  size_t index_ = static_cast<size_t>(-1);
  std::vector<BoxRuns> runs_;
};

std::vector<const ChunkBox*> boxes_of(const std::vector<Destination>& destinations) {
  std::vector<const ChunkBox*> boxes;
  for (const Destination& destination : destinations) boxes.push_back(&destination.box);
  return boxes;
}

std::vector<const ChunkBox*> boxes_of(const Description& description, const std::string& key) {
  std::vector<const ChunkBox*> boxes;
  for (const ChunkBox& box : description.at(key).boxes) boxes.push_back(&box);
  return boxes;
}

char* memory_of(const Destination& destination) {
  return static_cast<char*>(destination.memory.mutable_data_ptr());
}

/// Copies what lies in [begin, end) of the chunk into the boxes.
void unpack(const char* data, int64_t begin, int64_t end, int64_t element_size,
            const std::vector<BoxRuns>& runs, const std::vector<Destination>& destinations) {
  for (const BoxRuns& box : runs) {
    char* memory = memory_of(destinations[box.box]);
    box.runs.for_each_in(begin / element_size, end / element_size, [&](const Runs::Run& run) {
      std::memcpy(memory + run.in_b * element_size, data + (run.in_a * element_size - begin),
                  static_cast<size_t>(run.length * element_size));
    });
  }
}

/// How many bytes of [begin, end) of the chunk lie in the boxes.
int64_t shared_bytes(int64_t begin, int64_t end, int64_t element_size, const std::vector<BoxRuns>& runs) {
  int64_t elements = 0;
  for (const BoxRuns& box : runs)
    box.runs.for_each_in(begin / element_size, end / element_size,
                         [&](const Runs::Run& run) { elements += run.length; });
  return elements * element_size;
}

/// If all of [begin, end) of the chunk lies in one box, in one run: where it belongs.
char* direct_memory(int64_t begin, int64_t end, int64_t element_size, const std::vector<BoxRuns>& runs,
                    const std::vector<Destination>& destinations) {
  if (runs.size() != 1) return nullptr;
  char* memory = nullptr;
  runs[0].runs.for_each_in(begin / element_size, end / element_size, [&](const Runs::Run& run) {
    if (run.length * element_size == end - begin)
      memory = memory_of(destinations[runs[0].box]) + run.in_b * element_size;
  });
  return memory;
}

}  // namespace

const ChunkFiles::Located& ChunkFiles::locate(const std::string& key, size_t index) {
  const auto [known, is_new] = located_.try_emplace({key, index});
  Located& located = known->second;
  if (!is_new && located.file) return located;
  const TensorEntry& tensor = this->tensor(key);
  const Chunk& chunk = tensor.chunks[index];
  auto open = files_.find(chunk.file);
  if (open == files_.end()) {
    const std::string path = path_in(checkpoint_.directory, chunk.file, "the chunk of tensor '" + key + "'");
    open = files_.emplace(chunk.file, File::open(path)).first;
  }
  const File& file = open->second;
  const int64_t size = file.size();
  TESSERA_CHECK(chunk.offset + chunk.length <= size, file.path(), " has ", size, " bytes, but tensor '", key,
                "' lies in it at bytes ", chunk.offset, " to ", chunk.offset + chunk.length,
                ". The file was cut short or replaced.");
  located.offset = chunk.offset;
  if (chunk.container == Container::TorchZip) {
    const ByteRange elements = find_torch_payload(file, chunk.offset, chunk.length, tensor.dtype, chunk.sizes,
                                                  "tensor '" + key + "' in " + file.path());
    located.offset = elements.offset;
    located.crc32 = elements.crc32;
    located.strides = elements.strides;
    if (!located.strides.empty()) {
      if (!in_order_) in_order_ = std::make_shared<RowMajor>();
      located.in_order = in_order_;
    }
  }
  located.tensor = &tensor;
  located.chunk = &chunk;
  located.key = key;
  located.file = &file;
  return located;
}

struct ChunkFiles::RowMajor {
  const Located* chunk = nullptr;
  at::Tensor elements;
};

namespace {

[[noreturn]] void fail_checksum_of_archive(const ChunkFiles::Located& chunk) {
  TESSERA_CHECK(false, chunk.file->path(), " is damaged: the elements of tensor '", chunk.key, "' at byte ",
                chunk.offset, " do not have the checksum that their archive says. Load another checkpoint.");
}

/// The elements of a chunk that lie in another order in its file.
at::Tensor read_in_order(const ChunkFiles::Located& chunk) {
  const at::TensorOptions options(chunk.tensor->dtype);
  const at::Tensor stored = at::empty_strided(chunk.chunk->sizes, chunk.strides, options);
  chunk.file->read(chunk.offset, stored.mutable_data_ptr(), stored.nbytes());
  if (chunk.crc32 && zip_crc32(stored.const_data_ptr(), stored.nbytes()) != *chunk.crc32)
    fail_checksum_of_archive(chunk);
  return stored.contiguous();
}

}  // namespace

void ChunkFiles::read(const Located& located, int64_t begin, int64_t end, char* data, bool verify) {
  if (located.in_order) {
    if (located.in_order->chunk != &located) {
      located.in_order->elements = read_in_order(located);
      located.in_order->chunk = &located;
    }
    std::memcpy(data, static_cast<const char*>(located.in_order->elements.const_data_ptr()) + begin,
                static_cast<size_t>(end - begin));
    return;
  }
  located.file->read(located.offset + begin, data, static_cast<size_t>(end - begin));
  if (!verify || !located.chunk->checksums) return;
  const auto& [block, expected] = *located.chunk->checksums;
  for (int64_t at = begin; at < end; at += block) {
    const int64_t size = std::min(block, end - at);
    const uint32_t found = crc32c(data + (at - begin), static_cast<size_t>(size));
    TESSERA_CHECK(found == expected[at / block], located.file->path(), " is damaged: bytes ",
                  located.offset + at, " to ", located.offset + at + size, ", which belong to tensor '",
                  located.key, "', do not have the checksum that the index says. Load another checkpoint.");
  }
}

ArchiveCheck::ArchiveCheck(const ChunkFiles::Located& chunk, const Read& read, bool verify)
    : chunk_(chunk),
      is_needed_(verify && chunk.crc32 && !chunk.in_order && read.begin == 0 &&
                 read.end == byte_count(chunk.chunk->sizes, chunk.tensor->dtype, chunk.key)) {}

void ArchiveCheck::add(const char* data, int64_t size) {
  if (is_needed_) crc32_ = zip_crc32(data, static_cast<size_t>(size), crc32_);
}

void ArchiveCheck::finish() const {
  if (is_needed_ && crc32_ != *chunk_.crc32) fail_checksum_of_archive(chunk_);
}

bool verify_chunk(const ChunkFiles::Located& chunk, ProgressMeter& meter) {
  Read all;
  all.end = byte_count(chunk.chunk->sizes, chunk.tensor->dtype, chunk.key);
  ArchiveCheck archive(chunk, all, /*verify=*/true);
  std::vector<char> buffer;
  for_each_window(all, block_of(chunk), [&](int64_t begin, int64_t end) {
    buffer.resize(std::max(buffer.size(), static_cast<size_t>(end - begin)));
    ChunkFiles::read(chunk, begin, end, buffer.data(), /*verify=*/true);
    archive.add(buffer.data(), end - begin);
    meter.add(end - begin);
  });
  archive.finish();
  return chunk.crc32 || chunk.chunk->checksums;
}

void verify_reads(const LoadPlan& plan, int64_t rank, ChunkFiles& files, ProgressMeter& meter) {
  std::vector<char> buffer;
  for (size_t first = 0, end = 0; first < plan.reads.size(); first = end) {
    const std::string& key = plan.reads[first].key;
    const size_t index = plan.reads[first].chunk;
    int64_t bytes = 0;
    for (end = first; end < plan.reads.size() && plan.reads[end].key == key && plan.reads[end].chunk == index;
         ++end)
      bytes += plan.reads[end].bytes();
    const TensorEntry& tensor = files.tensor(key);
    const Chunk& chunk = tensor.chunks[index];
    if (!chunk.checksums) {
      // What has one checksum is read by one rank, whoever loads it, unless that would be more than all of them need.
      const bool is_mine =
          plan.reads[first].reader == rank && bytes == byte_count(chunk.sizes, tensor.dtype, key);
      if (is_mine && files.locate(key, index).crc32) verify_chunk(files.locate(key, index), meter);
      continue;
    }
    for (size_t i = first; i < end; ++i) {
      if (plan.reads[i].reader != rank) continue;
      const ChunkFiles::Located& located = files.locate(key, index);
      for_each_window(plan.reads[i], block_of(located), [&](int64_t from, int64_t to) {
        buffer.resize(std::max(buffer.size(), static_cast<size_t>(to - from)));
        ChunkFiles::read(located, from, to, buffer.data(), /*verify=*/true);
        meter.add(to - from);
      });
    }
  }
}

void read_own(const LoadPlan& plan, int64_t rank, ChunkFiles& files, const Destinations& destinations,
              bool verify, ProgressMeter& meter) {
  std::vector<char> buffer;
  RunsOfRank runs_of_rank;
  for (const Read& read : plan.reads) {
    if (read.reader != rank || read.is_shared()) continue;
    const ChunkFiles::Located& located = files.locate(read.key, read.chunk);
    const auto element_size = static_cast<int64_t>(c10::elementSize(located.tensor->dtype));
    const auto& mine = destinations.at(read.key);
    const auto& runs = runs_of_rank.of(read.key, read.chunk, *located.chunk, boxes_of(mine));
    ArchiveCheck archive(located, read, verify);
    for_each_window(read, block_of(located), [&](int64_t begin, int64_t end) {
      if (char* memory = direct_memory(begin, end, element_size, runs, mine)) {
        ChunkFiles::read(located, begin, end, memory, verify);
        archive.add(memory, end - begin);
      } else {
        buffer.resize(std::max(buffer.size(), static_cast<size_t>(end - begin)));
        ChunkFiles::read(located, begin, end, buffer.data(), verify);
        archive.add(buffer.data(), end - begin);
        unpack(buffer.data(), begin, end, element_size, runs, mine);
      }
      meter.add(end - begin);
    });
    archive.finish();
  }
}

namespace {

/// Reads for several ranks, and what they send each other, in rounds that bound the memory for messages.
///
/// Both sides go through the reads of a round in the same order, and through the runs of a read in the same order, so
/// they agree on what lies where in a message.
class SharedReads {
 public:
  SharedReads(const std::vector<Description>& ranks, const Peers& peers, ChunkFiles& files,
              const Destinations& destinations, bool verify, ProgressMeter& meter)
      : ranks_(ranks),
        peers_(peers),
        files_(files),
        destinations_(destinations),
        verify_(verify),
        meter_(meter),
        to_(ranks.size()),
        from_(ranks.size()) {}

  using Round = std::vector<const Read*>;

  void run(const Round& round) {
    std::vector<at::Tensor> sent = messages(round, /*outgoing=*/true);
    const std::vector<at::Tensor> received = messages(round, /*outgoing=*/false);
    try {
      if (!error_) read_and_pack(round, sent);
    } catch (...) {
      error_ = std::current_exception();
    }
    peers_.exchange(received, sent);
    unpack_received(round, received);
  }

  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  bool is_mine(const Read& read) const { return read.reader == peers_.rank(); }
  bool is_needed(const Read& read) const {
    return std::binary_search(read.needed_by.begin(), read.needed_by.end(), peers_.rank());
  }
  const Chunk& chunk_of(const Read& read) const { return files_.tensor(read.key).chunks[read.chunk]; }
  int64_t element_size(const Read& read) const {
    return static_cast<int64_t>(c10::elementSize(files_.tensor(read.key).dtype));
  }
  /// What another rank needs of a read.
  const std::vector<BoxRuns>& runs_to(int64_t rank, const Read& read) {
    return to_[rank].of(read.key, read.chunk, chunk_of(read), boxes_of(ranks_[rank], read.key));
  }
  /// What this rank needs of it.
  const std::vector<BoxRuns>& own_runs(const Read& read) {
    return from_[read.reader].of(read.key, read.chunk, chunk_of(read), boxes_of(destinations_.at(read.key)));
  }

  /// New memory for what this rank sends to, or receives from, each rank.
  std::vector<at::Tensor> messages(const Round& round, bool outgoing) {
    std::vector<int64_t> bytes(ranks_.size(), 0);
    for (const Read* read : round) {
      const auto size_of = [&](const std::vector<BoxRuns>& runs) {
        return shared_bytes(read->begin, read->end, element_size(*read), runs);
      };
      if (outgoing && is_mine(*read)) {
        for (const int64_t other : read->needed_by) {
          if (other != peers_.rank()) bytes[other] += size_of(runs_to(other, *read));
        }
      } else if (!outgoing && !is_mine(*read) && is_needed(*read)) {
        bytes[read->reader] += size_of(own_runs(*read));
      }
    }
    std::vector<at::Tensor> result;
    for (const int64_t size : bytes) result.push_back(at::empty({size}, at::kByte));
    return result;
  }

  void read_and_pack(const Round& round, std::vector<at::Tensor>& sent) {
    std::vector<char*> next;
    for (const at::Tensor& message : sent) next.push_back(static_cast<char*>(message.mutable_data_ptr()));
    for (const Read* read : round) {
      if (!is_mine(*read)) continue;
      const ChunkFiles::Located& located = files_.locate(read->key, read->chunk);
      buffer_.resize(std::max(buffer_.size(), static_cast<size_t>(read->bytes())));
      ChunkFiles::read(located, read->begin, read->end, buffer_.data(), verify_);
      ArchiveCheck archive(located, *read, verify_);
      archive.add(buffer_.data(), read->bytes());
      archive.finish();
      for (const int64_t other : read->needed_by) {
        if (other == peers_.rank()) {
          unpack(buffer_.data(), read->begin, read->end, element_size(*read), own_runs(*read),
                 destinations_.at(read->key));
        } else {
          pack(*read, runs_to(other, *read), next[other]);
        }
      }
      meter_.add(read->bytes());
    }
  }

  void pack(const Read& read, const std::vector<BoxRuns>& runs, char*& message) const {
    const int64_t size = element_size(read);
    for (const BoxRuns& box : runs) {
      box.runs.for_each_in(read.begin / size, read.end / size, [&](const Runs::Run& run) {
        std::memcpy(message, buffer_.data() + (run.in_a * size - read.begin),
                    static_cast<size_t>(run.length * size));
        message += run.length * size;
      });
    }
  }

  void unpack_received(const Round& round, const std::vector<at::Tensor>& received) {
    std::vector<const char*> next;
    for (const at::Tensor& message : received)
      next.push_back(static_cast<const char*>(message.const_data_ptr()));
    for (const Read* read : round) {
      if (is_mine(*read) || !is_needed(*read)) continue;
      const int64_t size = element_size(*read);
      const char*& message = next[read->reader];
      for (const BoxRuns& box : own_runs(*read)) {
        char* memory = memory_of(destinations_.at(read->key)[box.box]);
        box.runs.for_each_in(read->begin / size, read->end / size, [&](const Runs::Run& run) {
          std::memcpy(memory + run.in_b * size, message, static_cast<size_t>(run.length * size));
          message += run.length * size;
        });
      }
    }
  }

  const std::vector<Description>& ranks_;
  const Peers& peers_;
  ChunkFiles& files_;
  const Destinations& destinations_;
  const bool verify_;
  ProgressMeter& meter_;
  std::vector<RunsOfRank> to_;    // by rank that needs
  std::vector<RunsOfRank> from_;  // by rank that reads
  std::vector<char> buffer_;
  std::exception_ptr error_;
};

}  // namespace

void read_shared(const LoadPlan& plan, const std::vector<Description>& ranks, const Peers& peers,
                 ChunkFiles& files, const Destinations& destinations, bool verify, ProgressMeter& meter) {
  std::vector<SharedReads::Round> rounds;
  std::vector<int64_t> bytes_of_reader(ranks.size(), 0);
  for (const Read& read : plan.reads) {
    if (!read.is_shared()) continue;
    const size_t round = static_cast<size_t>(bytes_of_reader[read.reader] / kRound);
    bytes_of_reader[read.reader] += read.bytes();
    if (rounds.size() <= round) rounds.resize(round + 1);
    rounds[round].push_back(&read);
  }
  SharedReads reads(ranks, peers, files, destinations, verify, meter);
  for (const SharedReads::Round& round : rounds) reads.run(round);
  reads.finish();
}

}  // namespace tessera::checkpoint
