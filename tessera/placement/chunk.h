#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <iosfwd>

#include <c10/util/SmallVector.h>

namespace tessera {

/// The part [offset, offset + size) of one tensor dim.
struct Range {
  int64_t offset = 0;
  int64_t size = 0;

  int64_t end() const { return offset + size; }
  bool operator==(const Range&) const = default;
  /// "4+2" for {4, 2}.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Range& range);
};

/// The part of [0, size) that chunk `index` of `count` holds, as torch.chunk cuts it.
/// Chunks are in order, disjoint, and together all of [0, size); the last ones may be short or empty.
/// An empty chunk lies at the end: its offset is `size`.
///   chunk(10, 4, 3) == {9, 1}      chunk(2, 4, 3) == {2, 0}
/// Throws on a negative size, a count below one and an index outside [0, count).
TESSERA_API Range chunk(int64_t size, int64_t count, int64_t index);

/// What a rank holds of one tensor dim: ranges that are not empty, in ascending order, with a gap between any
/// two. They lie one after the other in the local tensor. No range at all: the rank holds nothing of the dim.
using Pieces = c10::SmallVector<Range, 4>;

/// All of a dim.
///   whole(8) == {{0, 8}}      whole(0) == {}
TESSERA_API Pieces whole(int64_t size);

/// How many elements the pieces hold together.
///   length({{0, 2}, {4, 1}}) == 3
TESSERA_API int64_t length(const Pieces& pieces);

/// Chunk `index` of `count` of what the pieces hold. Linear in the number of pieces.
///   shard({{0, 2}, {4, 2}}, 2, 1) == {{4, 2}}      shard({{0, 2}, {4, 2}}, 4, 2) == {{4, 1}}
TESSERA_API Pieces shard(const Pieces& pieces, int64_t count, int64_t index);

/// What the pieces hold, cut into `split` chunks, each of these into `count`, and of each the `index`-th
/// kept.
///   strided_shard({{0, 8}}, 2, 2, 0) == {{0, 2}, {4, 2}}      strided_shard(p, 1, n, i) == shard(p, n, i)
/// For one `split` and `count`, all indices together are all of the pieces and share nothing.
/// Linear in the number of pieces and in `split`, never in the number of elements.
TESSERA_API Pieces strided_shard(const Pieces& pieces, int64_t split, int64_t count, int64_t index);

}  // namespace tessera
