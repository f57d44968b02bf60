#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::comm {

inline constexpr int64_t kAnySource = -1;

/// One side of a message under way between two members of a group. The tensor is contiguous and stays alive until the
/// message is delivered.
struct Parcel {
  Parcel(int64_t from, int64_t to, int tag, at::Tensor tensor);

  const int64_t from;  // or kAnySource
  const int64_t to;
  const int tag;
  at::Tensor tensor;
  int64_t source = kAnySource;  // who sent it, once done
  std::string error;            // once failed
  enum State { waiting, done, failed };
  std::atomic<State> state{waiting};

  std::string str(const std::vector<int64_t>& members, bool sending) const;
};

/// The error of both sides if they do not fit together; the texts are Parcel::str of each.
std::string misfit_of_messages(int64_t from, const std::string& sent, int64_t to, const std::string& wanted);

}  // namespace tessera::comm
