#pragma once

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/format.h>
#include <tessera/checkpoint/value.h>
#include <tessera/export.h>

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

/// What is in a checkpoint, and whether it is whole. No ranks are needed: what `tessera-checkpoint` calls.
namespace tessera::checkpoint {

/// "tessera", "huggingface", "dcp"; and back, with an error that lists them.
TESSERA_API const char* format_name(Format format);
TESSERA_API Format parse_format(const std::string& name);

struct ChunkInfo {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;
};
struct TensorInfo {
  std::string key;
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t bytes = 0;
  std::vector<ChunkInfo> chunks;
};
struct CheckpointInfo {
  Format format = Format::Tessera;
  std::vector<TensorInfo> tensors;   // by key
  std::vector<Value::Entry> values;  // what is no tensor, by key
  int64_t bytes = 0;                 // of all tensors
};
/// Reads the index alone. Throws if it is damaged.
TESSERA_API CheckpointInfo inspect(const std::string& path);

struct VerifyReport {
  std::vector<std::string> errors;  // all that is wrong; each names the file and the tensor
  int64_t bytes = 0;                // that were read
  int64_t unchecked = 0;            // of these, without a checksum to compare with
};
/// Reads everything and compares all checksums.
TESSERA_API VerifyReport verify(const std::string& path, const ProgressCallback& progress = {});

/// Writes the checkpoint `from` as `to`, in another format. Takes the memory of all its tensors.
TESSERA_API void convert(const std::string& from, const std::string& to, const SaveOptions& options);

}  // namespace tessera::checkpoint
