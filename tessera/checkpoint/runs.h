#pragma once

#include <cstdint>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace tessera::checkpoint {

/// The elements that two boxes of one tensor share, as runs that are contiguous in both, where each box lies in memory
/// of its own in row-major order.
///
///   boxes [0, 0]+[4, 4] and [2, 1]+[2, 3]:  (9, 0) x 3, (13, 3) x 3       (position in either) x length
///   boxes [0, 0]+[4, 4] and [2, 0]+[2, 4]:  (8, 0) x 8
///
/// Runs are in ascending order in both.
class Runs {
 public:
  /// The boxes must share elements.
  Runs(c10::ArrayRef<int64_t> a_offsets, c10::ArrayRef<int64_t> a_sizes, c10::ArrayRef<int64_t> b_offsets,
       c10::ArrayRef<int64_t> b_sizes);

  int64_t count() const { return count_; }
  /// Elements of each.
  int64_t length() const { return length_; }

  struct Run {
    int64_t in_a = 0;
    int64_t in_b = 0;
    int64_t length = 0;
  };
  Run at(int64_t index) const;

  /// Calls `visit` with each run, cut to what lies in [begin, end) of `a`.
  template <class Visit>
  void for_each_in(int64_t begin, int64_t end, Visit visit) const {
    for (int64_t i = first_behind(begin); i < count_; ++i) {
      Run run = at(i);
      const int64_t skip = run.in_a < begin ? begin - run.in_a : 0;
      run.in_a += skip;
      if (run.in_a >= end) return;
      run.in_b += skip;
      run.length -= skip;
      if (run.in_a + run.length > end) run.length = end - run.in_a;
      visit(run);
    }
  }

 private:
  /// The first run that ends behind the position `begin` in `a`.
  int64_t first_behind(int64_t begin) const;

  struct Dim {
    int64_t size = 0;
    int64_t a_stride = 0;
    int64_t b_stride = 0;
  };
  std::vector<Dim> outer_;  // from the outermost
  int64_t a_begin_ = 0;
  int64_t b_begin_ = 0;
  int64_t count_ = 1;
  int64_t length_ = 1;
};

}  // namespace tessera::checkpoint
