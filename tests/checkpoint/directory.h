#pragma once

#include <tessera/checkpoint/file.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>

namespace tessera::checkpoint {

/// A new directory, removed with all that is in it at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera_checkpoint_XXXXXX").string();
    TORCH_CHECK(::mkdtemp(pattern.data()), "Could not make a temporary directory.");
    path_ = pattern;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    set_file_fault({});
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  File file = File::create(path);
  file.write(0, text.data(), text.size());
  file.close();
}

}  // namespace tessera::checkpoint
