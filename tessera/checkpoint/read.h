#pragma once

#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/peers.h>
#include <tessera/checkpoint/progress.h>
#include <tessera/checkpoint/runs.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

/// The files of a checkpoint, opened as they are needed.
class ChunkFiles {
 public:
  explicit ChunkFiles(const OpenCheckpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// The elements of one chunk, in row-major order.
  struct RowMajor;

  /// A chunk whose elements were found in its file.
  struct Located {
    const File* file = nullptr;
    int64_t offset = 0;  // of the first element
    const TensorEntry* tensor = nullptr;
    const Chunk* chunk = nullptr;
    std::string key;
    std::optional<uint32_t> crc32;  // of all elements, where the container has one
    /// How the elements lie in the file, if not in row-major order. They are then put in order when they are first
    /// read, and kept until another such chunk is.
    std::vector<int64_t> strides;
    std::shared_ptr<RowMajor> in_order;
  };
  /// Throws if the file ends before the chunk does.
  const Located& locate(const std::string& key, size_t chunk);

  const TensorEntry& tensor(const std::string& key) const {
    return std::get<TensorEntry>(checkpoint_.catalog.leaves.at(key).content);
  }

  /// Reads bytes [begin, end) of the elements. If `verify` is set, both must lie at bounds of blocks, and the
  /// checksums are compared, if there are any; the error names the file, the tensor and the bytes.
  static void read(const Located& chunk, int64_t begin, int64_t end, char* data, bool verify);

 private:
  const OpenCheckpoint& checkpoint_;
  std::map<std::string, File> files_;
  std::map<std::pair<std::string, size_t>, Located> located_;
  std::shared_ptr<RowMajor> in_order_;
};

/// Compares the checksum that an archive has of all of a chunk's elements, if they are read from the first to the last.
class ArchiveCheck {
 public:
  ArchiveCheck(const ChunkFiles::Located& chunk, const Read& read, bool verify);
  /// What was read next.
  void add(const char* data, int64_t size);
  /// Throws if it is not what was written.
  void finish() const;

 private:
  const ChunkFiles::Located& chunk_;
  bool is_needed_;
  uint32_t crc32_ = 0;
};

/// Reads all of a chunk and compares its checksums; throws as `ChunkFiles::read`. Whether it has any.
bool verify_chunk(const ChunkFiles::Located& chunk, ProgressMeter& meter);

/// Where a box that this rank wants is read into.
struct Destination {
  ChunkBox box;
  at::Tensor memory;  // of the box's sizes, row-major, on the CPU
};
using Destinations = std::map<std::string, std::vector<Destination>>;  // by key

/// Compares the checksums of all that this rank is to read. A chunk that has but one, in an archive, is read by the first
/// of its readers, if all of it is needed.
void verify_reads(const LoadPlan& plan, int64_t rank, ChunkFiles& files, ProgressMeter& meter);

/// Reads what only this rank needs.
void read_own(const LoadPlan& plan, int64_t rank, ChunkFiles& files, const Destinations& destinations,
              bool verify, ProgressMeter& meter);

/// Reads what several ranks need, and sends it to them. Collective: a rank that cannot read goes on with the others, and
/// then throws.
void read_shared(const LoadPlan& plan, const std::vector<Description>& ranks, const Peers& peers,
                 ChunkFiles& files, const Destinations& destinations, bool verify, ProgressMeter& meter);

}  // namespace tessera::checkpoint
