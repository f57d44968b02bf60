#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/file.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// The format of torch.distributed.checkpoint (2.13): `.metadata`, a pickle, and `__<rank>_<n>.distcp` files, in
/// which each tensor or object is a zip archive as torch.save writes it.
namespace tessera::checkpoint {

inline constexpr const char* kDCPMetadataFile = ".metadata";

/// Of a directory. Objects that are no tensors are read too, if they are made of None, bool, int, float, str,
/// bytes, list, tuple and dict; of others an error says what Python type they are of. Nothing is executed.
Catalog read_dcp(const std::string& directory);

/// Where the elements of a tensor that torch.save wrote into a zip archive lie: `offset` and `length` are those of
/// the archive in the file. Throws unless it holds one contiguous tensor of that dtype and shape.
struct ByteRange {
  int64_t offset = 0;
  int64_t length = 0;
};
ByteRange find_torch_payload(const File& file, int64_t offset, int64_t length, c10::ScalarType dtype,
                             c10::ArrayRef<int64_t> sizes, const std::string& what);

/// The bytes before and after the elements in an archive of one contiguous tensor, which torch.load accepts.
struct TorchArchive {
  std::string before;
  std::string after;
};
/// `crc32` is the zip's (not Castagnoli's) checksum of the elements.
TorchArchive make_torch_archive(c10::ScalarType dtype, c10::ArrayRef<int64_t> sizes, int64_t length,
                                uint32_t crc32);
/// An archive of a value without tensors.
std::string make_torch_archive(const Value& value);

/// The bytes of `.metadata`. Chunks say file, offset and length of their archives (Container::TorchZip); `values`
/// says the same for each leaf that is no tensor.
struct ArchiveLocation {
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;
};
std::string write_dcp_metadata(const Catalog& catalog, const std::map<std::string, ArchiveLocation>& values);

}  // namespace tessera::checkpoint
