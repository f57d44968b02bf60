#pragma once

#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/value.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

/// The zip archives that torch.save writes and torch.load reads: stored, not compressed, entries; `data.pkl` is a
/// pickle, `data/0` the elements of a tensor.
namespace tessera::checkpoint {

/// Where the elements of a tensor lie in a file.
struct ByteRange {
  int64_t offset = 0;
  int64_t length = 0;
  /// The zip's checksum of them, if it says one: not for a part of a storage, nor if the writer computed none.
  std::optional<uint32_t> crc32;
  /// How the elements lie there, if not in row-major order: dense, with the dims in another order.
  std::vector<int64_t> strides = {};
};
/// Of the archive that `offset` and `length` say. Reads the first and the last bytes of it, not the elements.
/// Throws unless it holds one dense tensor of that dtype and shape; `what` names it in errors.
ByteRange find_torch_payload(const File& file, int64_t offset, int64_t length, c10::ScalarType dtype,
                             c10::ArrayRef<int64_t> sizes, const std::string& what);
/// The same of an archive in memory; the offset is in it.
ByteRange find_torch_payload(std::string_view archive, c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes,
                             const std::string& what);

/// The value in an archive: no tensors. Throws, with the type of Python, for what is no Value.
Value read_torch_value(std::string_view archive, const std::string& what);

/// The bytes before and after the elements in an archive of one contiguous tensor, which torch.load accepts.
struct TorchArchive {
  std::string before;
  std::string after;
};
/// `crc32` is the zip's (not Castagnoli's) checksum of the elements. `before` does not depend on it.
TorchArchive make_torch_archive(c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes, int64_t length,
                                uint32_t crc32);
/// An archive of a value without tensors.
std::string make_torch_archive(const Value& value);

/// "torch.float32" for c10::ScalarType::Float, and back. Throws for a dtype that no checkpoint of torch holds;
/// nothing for an unknown name.
std::string_view torch_dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> torch_dtype_named(std::string_view name);
/// All of them.
const std::vector<std::string_view>& torch_dtype_names();

}  // namespace tessera::checkpoint
