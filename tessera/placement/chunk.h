#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <iosfwd>

#include <c10/util/SmallVector.h>

namespace tessera {

/// The elements [offset, offset + size) of one tensor dim.
struct Range {
  int64_t offset = 0;
  int64_t size = 0;

  int64_t end() const { return offset + size; }
  bool operator==(const Range&) const = default;
  /// "4+2" for {4, 2}.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Range& range);
};

/// Chunk `index` of [0, size) split into `count` chunks, as by torch.chunk.
/// Chunks are in order, disjoint, and together all of [0, size); the last ones may be short or empty.
/// An empty chunk lies at the end: its offset is `size`.
///   chunk(10, 4, 3) == {9, 1}      chunk(2, 4, 3) == {2, 0}
/// Throws on a negative size, a count below one and an index outside [0, count).
TESSERA_API Range chunk(int64_t size, int64_t count, int64_t index);

/// The elements of one tensor dim that are local to a rank: ranges that are not empty, in ascending order,
/// with a gap between any two. They lie one after the other in the local tensor. No range: the rank has none
/// of them.
using Pieces = c10::SmallVector<Range, 4>;

/// The pieces of a dim that is not sharded: all of it.
///   unsharded(8) == {{0, 8}}      unsharded(0) == {}
TESSERA_API Pieces unsharded(int64_t size);

/// Adds a range that begins at or behind the end of the last piece, and keeps the form of `Pieces`: a range
/// that touches the last piece extends it, and an empty one adds nothing.
///   {{0, 2}}, {2, 3} -> {{0, 5}}      {{0, 2}}, {4, 3} -> {{0, 2}, {4, 3}}
TESSERA_API void append(Pieces& pieces, Range range);

/// The total size of the pieces.
///   length({{0, 2}, {4, 1}}) == 3
TESSERA_API int64_t length(const Pieces& pieces);

/// Chunk `index` of `count` of the elements of the pieces. Linear in the number of pieces.
///   shard({{0, 2}, {4, 2}}, 2, 1) == {{4, 2}}      shard({{0, 2}, {4, 2}}, 4, 2) == {{4, 1}}
TESSERA_API Pieces shard(const Pieces& pieces, int64_t count, int64_t index);

/// The most chunks that a strided shard may split a dim into: more than meshes have ranks, and little enough to list.
inline constexpr int64_t kMaxSplit = int64_t{1} << 20;
/// Throws if a dim of that size would be split into more.
TESSERA_API void check_split(int64_t size, int64_t split);

/// The elements of the pieces, split into `split` chunks and each of these into `count`: chunk `index` of
/// each.
///   strided_shard({{0, 8}}, 2, 2, 0) == {{0, 2}, {4, 2}}      strided_shard(p, 1, n, i) == shard(p, n, i)
/// For one `split` and `count`, all indices together are all of the pieces and share nothing.
/// Linear in the number of pieces and in `split`, never in the number of elements. Throws unless `split` is at least
/// one, and where `check_split` does.
TESSERA_API Pieces strided_shard(const Pieces& pieces, int64_t split, int64_t count, int64_t index);

}  // namespace tessera
