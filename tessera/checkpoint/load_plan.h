#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/save_plan.h>

#include <cstdint>
#include <string>
#include <vector>

/// Who reads what, and sends it to whom: a pure function of what a checkpoint holds and what the ranks want. No
/// files and no communication here.
namespace tessera::checkpoint {

/// A range of a chunk's bytes that one rank reads.
struct Read {
  std::string key;
  size_t chunk = 0;
  int64_t begin = 0;  // in bytes of the chunk's elements, at bounds of its blocks
  int64_t end = 0;
  int64_t reader = 0;
  std::vector<int64_t> needed_by;  // ranks, ascending; the reader is one of them
  bool is_shared() const { return needed_by.size() > 1; }
  int64_t bytes() const { return end - begin; }
  bool operator==(const Read&) const = default;
};

struct LoadPlan {
  std::vector<Read> reads;          // by key, chunk and position
  std::vector<int64_t> bytes_read;  // by rank
};

/// The block size of checksums for a chunk of that many bytes: small enough that loading a part of a chunk
/// reads little more than it needs, large enough that checksums take little room (at most 1 in 8,000).
int64_t checksum_block(int64_t length);

/// Each block that some rank needs is read by one of those that need it, chosen so that ranks read equal bytes.
/// Tensors that no rank wants are not read. The wanted tensors must be in the catalog, with the same shapes.
LoadPlan plan_load(const Catalog& catalog, const std::vector<Description>& ranks);

}  // namespace tessera::checkpoint
