#pragma once

#include <tessera/checkpoint/file.h>

#include <string>

#include "tests/checkpoint/scratch.h"

namespace tessera::checkpoint {

/// For tests that inject faults: there are none any more when it goes.
class TemporaryDirectory : public Scratch {
 public:
  ~TemporaryDirectory() { set_file_fault({}); }
};

inline void write_text(const std::string& path, const std::string& text) {
  File file = File::create(path);
  file.write(0, text.data(), text.size());
  file.close();
}

}  // namespace tessera::checkpoint
