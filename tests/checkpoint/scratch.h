#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>

namespace tessera::checkpoint {

/// A new directory, removed with all that is in it at the end.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera_checkpoint_XXXXXX").string();
    TORCH_CHECK(::mkdtemp(pattern.data()), "Could not make a temporary directory.");
    path_ = pattern;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace tessera::checkpoint
