#pragma once

#include <tessera/checkpoint/catalog.h>

#include <optional>
#include <string>

namespace tessera::checkpoint {

/// The format of the complete checkpoint at `path`, a directory or a .safetensors file; nothing if there is none.
std::optional<Format> find_format(const std::string& path);

/// A checkpoint that can be read.
struct OpenCheckpoint {
  /// What the files of chunks lie in.
  std::string directory;
  Catalog catalog;
};
/// Of whatever format, checked. Throws, saying what is there, if `path` is no checkpoint.
OpenCheckpoint open_checkpoint(const std::string& path);

}  // namespace tessera::checkpoint
