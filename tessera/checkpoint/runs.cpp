#include <tessera/checkpoint/runs.h>

#include <algorithm>

namespace tessera::checkpoint {

Runs::Runs(c10::ArrayRef<int64_t> a_offsets, c10::ArrayRef<int64_t> a_sizes, c10::ArrayRef<int64_t> b_offsets,
           c10::ArrayRef<int64_t> b_sizes) {
  int64_t a_stride = 1, b_stride = 1;
  bool contiguous = true;  // so far, from the innermost dim: the runs reach over it
  for (size_t i = a_sizes.size(); i-- > 0;) {
    const int64_t begin = std::max(a_offsets[i], b_offsets[i]);
    const int64_t size = std::min(a_offsets[i] + a_sizes[i], b_offsets[i] + b_sizes[i]) - begin;
    a_begin_ += (begin - a_offsets[i]) * a_stride;
    b_begin_ += (begin - b_offsets[i]) * b_stride;
    if (contiguous) {
      length_ *= size;
    } else if (size > 1) {
      outer_.push_back({size, a_stride, b_stride});
      count_ *= size;
    }
    contiguous = contiguous && size == a_sizes[i] && size == b_sizes[i];
    a_stride *= a_sizes[i];
    b_stride *= b_sizes[i];
  }
  std::reverse(outer_.begin(), outer_.end());
}

Runs::Run Runs::at(int64_t index) const {
  Run run{a_begin_, b_begin_, length_};
  for (size_t i = outer_.size(); i-- > 0;) {
    const int64_t position = index % outer_[i].size;
    index /= outer_[i].size;
    run.in_a += position * outer_[i].a_stride;
    run.in_b += position * outer_[i].b_stride;
  }
  return run;
}

int64_t Runs::first_behind(int64_t begin) const {
  int64_t low = 0, high = count_;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const Run run = at(middle);
    if (run.in_a + run.length > begin) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tessera::checkpoint
