#pragma once

#include <tessera/checkpoint/catalog.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// Who writes what: a pure function of what the ranks have. No files and no communication here.
namespace tessera::checkpoint {

/// A box of a global tensor.
struct ChunkBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  auto operator<=>(const ChunkBox&) const = default;
};

/// One leaf of a rank's state dict, without its data.
struct LeafDescription {
  Path path;
  bool is_tensor = false;
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<ChunkBox> boxes;  // what the rank has of the tensor
  std::string value;            // the JSON of a leaf that is no tensor
  bool operator==(const LeafDescription&) const = default;
};
/// By key.
using Description = std::map<std::string, LeafDescription>;

std::string to_bytes(const Description& description);
Description description_from_bytes(std::string_view bytes);

/// A box that a rank writes: a part of what it has.
struct Write {
  std::string key;
  ChunkBox box;
  size_t source = 0;  // which of the rank's boxes of that tensor it lies in
  bool operator==(const Write&) const = default;
};

struct SavePlan {
  /// All leaves; of the tensors shape and dtype, the chunks are yet to be written.
  Catalog catalog;
  std::vector<std::vector<Write>> writes;  // by rank
};

/// Each element is written by one rank. Of boxes that several ranks have, large ones are split, and each is written
/// by the rank that has the fewest bytes to write so far. Throws, listing all that is wrong, if ranks differ in
/// the shape, dtype or value of a leaf, or if their boxes overlap without being the same or leave a gap.
SavePlan plan_save(const std::vector<Description>& ranks);

}  // namespace tessera::checkpoint
