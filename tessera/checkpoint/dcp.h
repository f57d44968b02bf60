#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/torch_archive.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

/// The format of torch.distributed.checkpoint (2.13): `.metadata`, a pickle, and `__<rank>_<n>.distcp` files, in
/// which each tensor or object is a zip archive as torch.save writes it.
namespace tessera::checkpoint {

inline constexpr const char* kDCPMetadataFile = ".metadata";

/// Of a directory. Objects that are no tensors are read too, if they are made of None, bool, int, float, str,
/// bytes, list, tuple and dict; others are unreadable, with
/// the Python type as the reason. Nothing is executed.
Catalog read_dcp(const std::string& directory);

/// The bytes of `.metadata`. Chunks say file, offset and length of their archives (Container::TorchZip); `values`
/// says the same for each leaf that is no tensor.
struct ArchiveLocation {
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;
};
std::string write_dcp_metadata(const Catalog& catalog, const std::map<std::string, ArchiveLocation>& values);

/// Back again, checked, without a look at other files: the values of the catalog are None. `path` is for errors.
/// Attributes that Metadata, StorageMeta, MetadataIndex, _StorageInfo and the classes of tensors have in later
/// versions of torch are ignored, if they are made of plain values; so is the data of another planner.
struct DCPMetadata {
  Catalog catalog;
  std::map<std::string, ArchiveLocation> values;
};
DCPMetadata parse_dcp_metadata(std::string_view bytes, const std::string& path);

}  // namespace tessera::checkpoint
