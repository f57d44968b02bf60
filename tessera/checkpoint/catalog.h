#pragma once

#include <tessera/checkpoint/format.h>
#include <tessera/checkpoint/value.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <c10/core/ScalarType.h>

/// What a checkpoint holds, whatever its format: each format is read into this, and written from it.
namespace tessera::checkpoint {

/// How a chunk's elements lie in its file.
enum class Container {
  Raw,       // `length` bytes at `offset` are the elements, in row-major order
  TorchZip,  // `length` bytes at `offset` are a zip archive as torch.save writes it, of one tensor
};

/// Checksums of a chunk: one CRC32C for each block of `block` bytes (the last may be shorter), so that a part
/// of a chunk can be read and verified.
struct Checksums {
  int64_t block = 0;
  std::vector<uint32_t> crc32c;
  bool operator==(const Checksums&) const = default;
};

/// A box of a global tensor, and where its elements are.
struct Chunk {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  std::string file;  // its name in the checkpoint's directory
  int64_t offset = 0;
  int64_t length = 0;
  Container container = Container::Raw;
  std::optional<Checksums> checksums;
  bool operator==(const Chunk&) const = default;
};

struct TensorEntry {
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  /// They do not overlap and leave no gap. Empty ones are left out: a tensor without elements has none.
  std::vector<Chunk> chunks;
  bool operator==(const TensorEntry&) const = default;
};

/// The way from the root of the state dict to a leaf: keys of dicts and indices of lists.
using PathStep = std::variant<std::string, int64_t>;
using Path = std::vector<PathStep>;

/// What is in the checkpoint, but cannot be read: an object of Python, say. It is an error to load it, and none to leave
/// it out.
struct Unreadable {
  std::string reason;
  bool operator==(const Unreadable&) const = default;
};

/// What is at the end of a path: a tensor, or a value without tensors.
struct Leaf {
  Path path;
  std::variant<TensorEntry, Value, Unreadable> content;

  const TensorEntry* tensor() const { return std::get_if<TensorEntry>(&content); }
  const Value* value() const { return std::get_if<Value>(&content); }
  const Unreadable* unreadable() const { return std::get_if<Unreadable>(&content); }
};

struct Catalog {
  Format format = Format::Tessera;
  /// By key: the steps of the path, joined by dots, unless two paths would have the same key.
  std::map<std::string, Leaf> leaves;
};

/// The key of a path: "model.layers.0.weight".
std::string key_of(const Path& path);

/// Bytes of the elements of a box, checked: throws, naming `what`, if sizes are negative or 64 bits cannot
/// count them.
int64_t byte_count(c10::ArrayRef<int64_t> sizes, c10::ScalarType dtype, const std::string& what);

/// Throws, naming the tensor and the file, unless each tensor's chunks lie in it, do not overlap and leave no gap,
/// and their lengths fit their sizes. Every reader calls it: nothing that a file says is believed unchecked.
/// If it was read from `source`, the error names that too.
void check(const Catalog& catalog, const std::string& source = "");

}  // namespace tessera::checkpoint
