#include <tessera/error.h>
#include <tessera/placement/chunk.h>

#include <algorithm>
#include <ostream>

namespace tessera {

namespace {

// Translates ranges of positions among what `pieces` hold, given in ascending order, in one pass over them.
class PieceReader {
 public:
  explicit PieceReader(const Pieces& pieces) : piece_(pieces.begin()) {}

  void copy(Range range, Pieces& out) {
    while (range.size > 0) {
      while (passed_ + piece_->size <= range.offset) passed_ += piece_++->size;
      const int64_t skip = range.offset - passed_;
      const int64_t size = std::min(range.size, piece_->size - skip);
      append(out, {piece_->offset + skip, size});
      range = {range.offset + size, range.size - size};
    }
  }

 private:
  Pieces::const_iterator piece_;
  int64_t passed_ = 0;  // elements of the pieces before piece_
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Range& range) {
  return out << range.offset << '+' << range.size;
}

Range chunk(int64_t size, int64_t count, int64_t index) {
  TESSERA_CHECK_VALUE(size >= 0, "cannot split a dim of size ", size, " into chunks: sizes are not negative");
  TESSERA_CHECK_VALUE(count >= 1, "cannot split a dim into ", count, " chunks: there must be at least one");
  TESSERA_CHECK_INDEX(index >= 0 && index < count, "there is no chunk ", index, " of ", count,
                      ": chunks are counted from 0 to ", count - 1);
  const int64_t full = size / count + (size % count != 0);
  if (full == 0 || index > size / full) return {size, 0};
  return {full * index, std::min(full, size - full * index)};
}

Pieces unsharded(int64_t size) {
  TESSERA_CHECK_VALUE(size >= 0, "a dim cannot have size ", size, ": sizes are not negative");
  Pieces pieces;
  append(pieces, {0, size});
  return pieces;
}

void append(Pieces& pieces, Range range) {
  if (range.size == 0) return;
  if (!pieces.empty() && pieces.back().end() == range.offset) {
    pieces.back().size += range.size;
  } else {
    pieces.push_back(range);
  }
}

int64_t length(const Pieces& pieces) {
  int64_t sum = 0;
  for (const Range& piece : pieces) sum += piece.size;
  return sum;
}

Pieces shard(const Pieces& pieces, int64_t count, int64_t index) {
  Pieces out;
  PieceReader(pieces).copy(chunk(length(pieces), count, index), out);
  return out;
}

void check_split(int64_t size, int64_t split) {
  TESSERA_CHECK_VALUE(std::min(size, split) <= kMaxSplit, "a strided shard of split ", split,
                      " would split a dim of size ", size, " into more than ", kMaxSplit,
                      " chunks: expected a split of at most that");
}

Pieces strided_shard(const Pieces& pieces, int64_t split, int64_t count, int64_t index) {
  TESSERA_CHECK_VALUE(split >= 1, "a strided shard cannot have split ", split, ": it must be at least one");
  const int64_t size = length(pieces);
  check_split(size, split);
  Pieces out;
  PieceReader reader(pieces);
  for (int64_t i = 0; i < split; ++i) {
    const Range outer = chunk(size, split, i);
    if (outer.size == 0 && i > 0) break;
    const Range inner = chunk(outer.size, count, index);
    reader.copy({outer.offset + inner.offset, inner.size}, out);
  }
  return out;
}

}  // namespace tessera
