#pragma once

#include <tessera/comm/world.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <c10/util/ArrayRef.h>

/// The mixed-radix algebra behind mesh dims. Pure: no ranks and no communication.
///
/// The ranks of a root mesh have flat indices 0, 1, ..., row-major. Every dim that slicing, flattening and
/// unflattening can give is some digits of that index.
namespace tessera {

/// One digit of a flat index: (index / stride) % size. Written size:stride.
struct Digit {
  int64_t size;
  int64_t stride;
  bool operator==(const Digit&) const = default;
};

/// A mesh dim: some digits of the root's flat index, the most significant first, no two of which overlap.
/// They are kept in normal form, so that equal dims have equal digits: none is of size 1, and a digit that
/// counts on from the next one is merged with it.
///   2:4, 2:2  ->  4:2      2:4, 1:4, 2:1  ->  2:4, 2:1
struct Axis {
  std::vector<Digit> digits;
  Group group;  // given by the user for exactly these digits; null: the world makes it

  /// Adds a least significant digit.
  void append(Digit digit);

  /// How many coordinates the axis has: 1 without digits.
  int64_t size() const;

  /// The coordinate of the flat `index` along this axis, in [0, size()).
  ///   {2:6, 3:1}:  coordinate(7) == 4
  int64_t coordinate(int64_t index) const;

  /// How far the flat index moves from coordinate 0 to `coordinate`: coordinate(offset(c)) == c.
  ///   {2:6, 3:1}:  offset(4) == 7
  int64_t offset(int64_t coordinate) const;
};

/// Whether the two share a digit or a part of one, so that they cannot be dims of one mesh.
///   {4:2}, {2:4} -> true      {2:4}, {4:1} -> false
bool overlap(const Axis& a, const Axis& b);

/// All axes as one, row-major. It has the group of the axis that it equals, if it equals one.
Axis join(std::span<const Axis> axes);

/// One axis as several, row-major: join(*split(axis, sizes)) is `axis`. The product of `sizes` must be its
/// size. Nothing if a boundary would fall inside a digit that it does not divide.
///   {8:1} as 2 x 4 -> {2:4}, {4:1}      {2:6, 3:1} as 3 x 2 -> nothing
std::optional<std::vector<Axis>> split(const Axis& axis, c10::IntArrayRef sizes);

/// Whether the digits of `axis` are all among those of `axes`.
bool covers(std::span<const Axis> axes, const Axis& axis);

/// The smallest of the flat indices that differ from `index` in `axes` only.
int64_t first_index(std::span<const Axis> axes, int64_t index);

/// All flat indices from `start`, which has coordinate 0 along `axes`, that differ from it in `axes` only,
/// row-major.
///   {2:4}, {2:1} from 2 -> 2, 3, 6, 7
std::vector<int64_t> indices_along(std::span<const Axis> axes, int64_t start);

}  // namespace tessera
