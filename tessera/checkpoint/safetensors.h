#pragma once

#include <tessera/checkpoint/file.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

/// The safetensors format: 8 bytes with the length of a JSON header, the header, then the elements of all
/// tensors without gaps. What is accepted is what the `safetensors` package (0.8) accepts, except that a name
/// twice in a header is an error here.
namespace tessera::checkpoint {

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // in the file
  int64_t length = 0;
};

inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // in the order of their offsets
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // where the elements begin in the file
};

/// Reads the header of an open file. Throws, naming the file and the tensor, unless it is as the format says:
/// known dtypes, lengths that fit the shapes, no overlap, no gap, nothing beyond the end of the file.
SafetensorsHeader read_safetensors_header(const File& file);
/// The same of the bytes of a header (without its length) of a file of that size.
SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_size,
                                           const std::string& path);

/// The first bytes of a file with these tensors, one after the other in this order; sets their offsets and lengths.
/// The elements begin at a multiple of 64 bytes. Throws if a dtype has no name in the format, if a name occurs twice
/// or is not UTF-8.
std::string make_safetensors_header(std::vector<SafetensorsEntry>& tensors,
                                    const std::map<std::string, std::string>& metadata);

/// "F32", "BF16", ...; throws for what the format does not know.
std::string safetensors_dtype(c10::ScalarType dtype);

/// The dtype and shape under which any tensor's elements lie in a file that the `safetensors` package opens, with the
/// same bytes in the same order: its own where the format knows the dtype, else
///   complex128, complex32         float64, float16 with one more dim of size 2 at the end: (re, im)
///   any other of 1, 2 or 4 bytes  uint8, uint16, int32 (packed, quantised and bit dtypes)
/// What the true dtype is must be said elsewhere; Tessera's own format says it in index.json.
struct StoredType {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
};
StoredType safetensors_stored_type(c10::ScalarType dtype, c10::ArrayRef<int64_t> shape);

}  // namespace tessera::checkpoint
