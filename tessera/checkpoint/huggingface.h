#pragma once

#include <tessera/checkpoint/catalog.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// Safetensors as Hugging Face's libraries write them: one file, or a directory of files of global tensors with
/// model.safetensors.index.json. Also sharded files that say with DCP_SHARDING_INFO where their chunks belong.
namespace tessera::checkpoint {

inline constexpr const char* kHuggingFaceIndexFile = "model.safetensors.index.json";

/// Of a directory, or of one .safetensors file (then file names are relative to its directory). In a directory,
/// model.safetensors.index.json says which files to read; without one it is model.safetensors, or else all
/// .safetensors files. A tensor has one step in its path: its name. DCP_SHARDING_INFO does not say how large a
/// tensor is, so that its shape is what its chunks cover: a missing last chunk cannot be noticed.
Catalog read_huggingface(const std::string& path);

/// Which tensors go into which file, for files of at most `file_limit` bytes (a larger tensor has a file of its
/// own), in the order given: model-00001-of-00003.safetensors, or model.safetensors if one is enough.
struct HuggingFaceFile {
  std::string name;
  std::vector<std::string> keys;
};
std::vector<HuggingFaceFile> plan_huggingface_files(const std::vector<std::pair<std::string, int64_t>>& sizes,
                                                    int64_t file_limit);
/// The text of model.safetensors.index.json.
std::string write_huggingface_index(const std::vector<HuggingFaceFile>& files, int64_t total_size);

}  // namespace tessera::checkpoint
