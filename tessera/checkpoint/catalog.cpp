#include <tessera/checkpoint/catalog.h>
#include <tessera/error.h>
#include <tessera/sharded/boxes.h>

#include <optional>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

using sharded::Box;

Box box_of(const Chunk& chunk) { return {chunk.offsets, chunk.sizes}; }

std::string box_text(const Chunk& chunk) {
  return c10::str("[", c10::Join(", ", chunk.offsets), "]+[", c10::Join(", ", chunk.sizes), "]");
}

/// Nothing if a size is negative, or if 64 bits cannot count the bytes.
std::optional<int64_t> count_bytes(c10::ArrayRef<int64_t> sizes, c10::ScalarType dtype) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false, overflows = false;
  for (const int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    overflows = overflows || __builtin_mul_overflow(bytes, size, &bytes);
  }
  if (is_empty) return 0;
  return overflows ? std::nullopt : std::optional(bytes);
}

/// What is wrong with a chunk; empty if nothing is.
std::string fault_of(const TensorEntry& tensor, const Chunk& chunk) {
  if (chunk.offsets.size() != tensor.shape.size() || chunk.sizes.size() != tensor.shape.size())
    return c10::str("has another number of dims than the tensor's shape [", c10::Join(", ", tensor.shape),
                    "]");
  for (const auto dim : c10::irange(tensor.shape.size())) {
    const int64_t offset = chunk.offsets[dim];
    const int64_t size = chunk.sizes[dim];
    if (offset < 0 || size <= 0 || offset > tensor.shape[dim] - size)
      return c10::str("does not lie in the tensor's shape [", c10::Join(", ", tensor.shape), "]");
  }
  // It lies in the tensor, whose bytes could be counted.
  const int64_t bytes = *count_bytes(chunk.sizes, tensor.dtype);
  int64_t end = 0;
  if (chunk.offset < 0 || chunk.length < 0) return "has a negative position or length";
  if (__builtin_add_overflow(chunk.offset, chunk.length, &end)) return "ends beyond 64 bits";
  if (chunk.container == Container::Raw ? chunk.length != bytes : chunk.length < bytes)
    return c10::str("has ", chunk.length, " bytes, but its elements take ", bytes);
  if (!chunk.checksums) return "";
  const int64_t block = chunk.checksums->block;
  if (block <= 0 || block % 16 != 0)
    return c10::str("has checksums of blocks of ", block, " bytes, which is no multiple of 16");
  const size_t blocks = static_cast<size_t>((chunk.length - 1) / block + 1);
  if (chunk.checksums->crc32c.size() != blocks)
    return c10::str("has ", chunk.checksums->crc32c.size(), " checksums, but ", blocks, " blocks");
  return "";
}

void check_tensor(const std::string& key, const TensorEntry& tensor) {
  const int64_t bytes = byte_count(tensor.shape, tensor.dtype, c10::str("Tensor '", key, "'"));
  if (bytes == 0) {
    TESSERA_CHECK(tensor.chunks.empty(), "Tensor '", key, "' has no elements, but ", tensor.chunks.size(),
                  " chunks.");
    return;
  }
  std::vector<Box> boxes;
  int64_t total = 0;
  for (const Chunk& chunk : tensor.chunks) {
    const std::string fault = fault_of(tensor, chunk);
    TESSERA_CHECK(fault.empty(), "The chunk ", box_text(chunk), " of tensor '", key, "' in ", chunk.file, " ",
                  fault, ".");
    boxes.push_back(box_of(chunk));
    // None is larger than the tensor, so that the sum would have to pass `bytes` before it could overflow.
    total += *count_bytes(chunk.sizes, tensor.dtype);
    TESSERA_CHECK(total <= bytes, "The chunks of tensor '", key, "' hold more elements than its shape [",
                  c10::Join(", ", tensor.shape), "] has.");
  }
  sharded::for_each_overlap(boxes, boxes, [&](size_t i, size_t j) {
    TESSERA_CHECK(i == j, "The chunks ", box_text(tensor.chunks[i]), " in ", tensor.chunks[i].file, " and ",
                  box_text(tensor.chunks[j]), " in ", tensor.chunks[j].file, " of tensor '", key,
                  "' overlap.");
    return false;
  });
  if (total == bytes) return;
  const auto gap = sharded::find_gap(boxes, tensor.shape);
  TESSERA_CHECK(false, "No chunk of tensor '", key, "' of shape [", c10::Join(", ", tensor.shape),
                "] holds the element [", c10::Join(", ", gap.value_or(std::vector<int64_t>())), "].");
}

}  // namespace

std::string key_of(const Path& path) {
  std::string key;
  for (size_t i = 0; i < path.size(); ++i) {
    if (i > 0) key += '.';
    if (const auto* name = std::get_if<std::string>(&path[i])) {
      key += *name;
    } else {
      key += std::to_string(std::get<int64_t>(path[i]));
    }
  }
  return key;
}

int64_t byte_count(c10::ArrayRef<int64_t> sizes, c10::ScalarType dtype, const std::string& what) {
  const auto bytes = count_bytes(sizes, dtype);
  TESSERA_CHECK(bytes, what, " has a negative size, or more bytes than 64 bits can count: [",
                c10::Join(", ", sizes), "].");
  return *bytes;
}

void check(const Catalog& catalog, const std::string& source) {
  try {
    for (const auto& [key, leaf] : catalog.leaves) {
      if (const TensorEntry* tensor = leaf.tensor()) check_tensor(key, *tensor);
    }
  } catch (const c10::Error& error) {
    TESSERA_CHECK(!source.empty(), error.what_without_backtrace());
    TESSERA_CHECK(false, source, ": ", error.what_without_backtrace());
  }
}

}  // namespace tessera::checkpoint
