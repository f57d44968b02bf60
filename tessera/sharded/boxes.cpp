#include <tessera/sharded/boxes.h>

#include <algorithm>
#include <numeric>

#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

bool is_empty(const Box& box) {
  return std::any_of(box.sizes.begin(), box.sizes.end(), [](int64_t size) { return size == 0; });
}

using Ids = std::vector<uint32_t>;

/// The begins and ends of boxes, dim by dim, and the order of their begins in the first.
struct Side {
  std::vector<std::vector<int64_t>> begin, end;
  std::vector<size_t> index;  // of each box in the list given
  Ids all;                    // by begin in dim 0

  Side(c10::ArrayRef<Box> boxes, c10::IntArrayRef dims) {
    for (const size_t i : c10::irange(boxes.size())) {
      if (!is_empty(boxes[i])) index.push_back(i);
    }
    for (const int64_t dim : dims) {
      begin.emplace_back(index.size());
      end.emplace_back(index.size());
      for (const size_t i : c10::irange(index.size())) {
        begin.back()[i] = boxes[index[i]].offsets[dim];
        end.back()[i] = boxes[index[i]].end(dim);
      }
    }
    all.resize(index.size());
    std::iota(all.begin(), all.end(), 0);
    if (!begin.empty())
      std::stable_sort(all.begin(), all.end(),
                       [&](uint32_t x, uint32_t y) { return begin[0][x] < begin[0][y]; });
  }
};

/// Finds pairs by a segment tree that is never built: boxes ("covers") are handed down to halves of the other
/// side's begins until they contain all of a half; there one dim is settled and the next, lower one begins.
/// (Zomorodian and Edelsbrunner, "Fast software for box intersections", 2002.) Two ranges overlap iff one
/// contains the begin of the other; where both begins are equal only the first way counts, so no pair is met
/// twice.
class Search {
 public:
  Search(const Side& a, const Side& b, c10::function_ref<bool(size_t, size_t)> visit)
      : a_(a), b_(b), visit_(visit) {}

  void run() {
    if (a_.begin.empty()) {
      for (const uint32_t i : a_.all) {
        for (const uint32_t j : b_.all) {
          if (report(i, j)) return;
        }
      }
      return;
    }
    search(a_.all, b_.all, a_.begin.size() - 1);
  }

 private:
  static constexpr size_t kFew = 8;

  bool report(uint32_t i, uint32_t j) { return visit_(a_.index[i], b_.index[j]); }

  /// Pairs that overlap in the dims up to `level`. True: stop. All functions here.
  bool search(const Ids& a, const Ids& b, size_t level) {
    if (a.empty() || b.empty()) return false;
    if (std::min(a.size(), b.size()) <= kFew) return try_all(a, b, level);
    if (level == 0) return scan(a, b);
    return contain</*swapped=*/false>(a, b, level) || contain</*swapped=*/true>(b, a, level);
  }

  bool try_all(const Ids& a, const Ids& b, size_t level) {
    for (const uint32_t i : a) {
      for (const uint32_t j : b) {
        bool overlaps = true;
        for (size_t dim = 0; dim <= level && overlaps; ++dim) {
          overlaps = a_.begin[dim][i] < b_.end[dim][j] && b_.begin[dim][j] < a_.end[dim][i];
        }
        if (overlaps && report(i, j)) return true;
      }
    }
    return false;
  }

  bool scan(const Ids& a, const Ids& b) { return scan_from<false>(a, b) || scan_from<true>(b, a); }

  /// In dim 0, where both are sorted: pairs in which the cover contains the other's begin.
  template <bool swapped>
  bool scan_from(const Ids& covers, const Ids& others) {
    const auto& cover = (swapped ? b_ : a_);
    const auto& other_begin = (swapped ? a_ : b_).begin[0];
    size_t first = 0;
    for (const uint32_t i : covers) {
      while (first < others.size() && before<swapped>(other_begin[others[first]], cover.begin[0][i])) ++first;
      for (size_t next = first; next < others.size() && other_begin[others[next]] < cover.end[0][i]; ++next) {
        if (swapped ? report(others[next], i) : report(i, others[next])) return true;
      }
    }
    return false;
  }

  /// Whether a begin lies before a cover that begins there; equal begins are left to the other way round.
  template <bool swapped>
  static bool before(int64_t begin, int64_t cover_begin) {
    return swapped ? begin <= cover_begin : begin < cover_begin;
  }

  template <bool swapped>
  bool contain(const Ids& covers, const Ids& others, size_t level) {
    if (covers.empty() || others.empty()) return false;
    const auto& cover_begin = (swapped ? b_ : a_).begin[level];
    const auto& cover_end = (swapped ? b_ : a_).end[level];
    const auto& begin = (swapped ? a_ : b_).begin[level];
    int64_t low = begin[others[0]], high = low;
    for (const uint32_t i : others) {
      low = std::min(low, begin[i]);
      high = std::max(high, begin[i]);
    }
    Ids spanning, part;
    for (const uint32_t i : covers) {
      if (cover_end[i] <= low || before<swapped>(high, cover_begin[i])) continue;
      const bool contains_all = !before<swapped>(low, cover_begin[i]) && cover_end[i] > high;
      (contains_all ? spanning : part).push_back(i);
    }
    if (swapped ? search(others, spanning, level - 1) : search(spanning, others, level - 1)) return true;
    if (part.empty()) return false;

    // Some begin is not `low`, or each cover would contain all or none.
    std::vector<int64_t> begins;
    begins.reserve(others.size());
    for (const uint32_t i : others) begins.push_back(begin[i]);
    const auto middle = begins.begin() + static_cast<std::ptrdiff_t>(begins.size() / 2);
    std::nth_element(begins.begin(), middle, begins.end());
    int64_t boundary = *middle;
    if (boundary == low) {
      boundary = high;
      for (const int64_t value : begins) {
        if (value > low) boundary = std::min(boundary, value);
      }
    }
    Ids left, right;
    for (const uint32_t i : others) (begin[i] < boundary ? left : right).push_back(i);
    return contain<swapped>(part, left, level) || contain<swapped>(part, right, level);
  }

  const Side& a_;
  const Side& b_;
  c10::function_ref<bool(size_t, size_t)> visit_;
};

/// The dims in which not all boxes are the same.
c10::DimVector differing_dims(c10::ArrayRef<Box> a, c10::ArrayRef<Box> b) {
  c10::DimVector dims;
  const Box& first = a[0];
  for (const size_t dim : c10::irange(first.offsets.size())) {
    auto differs = [&](const Box& box) {
      return box.offsets[dim] != first.offsets[dim] || box.sizes[dim] != first.sizes[dim];
    };
    if (std::any_of(a.begin(), a.end(), differs) || std::any_of(b.begin(), b.end(), differs))
      dims.push_back(static_cast<int64_t>(dim));
  }
  return dims;
}

std::optional<std::vector<int64_t>> find_gap(const std::vector<Box>& boxes, c10::IntArrayRef shape,
                                             std::vector<int64_t> found) {
  const size_t dim = found.size();
  if (dim == shape.size()) {
    return boxes.empty() ? std::optional(std::move(found)) : std::nullopt;
  }
  // What the boxes hold of the slice at each position changes only where one begins or ends.
  auto slice = [&](c10::IntArrayRef sizes) {
    int64_t volume = 1;  // no more than the tensor has
    for (size_t rest = dim + 1; rest < sizes.size(); ++rest) volume *= sizes[rest];
    return volume;
  };
  const int64_t full = slice(shape);
  std::vector<std::pair<int64_t, int64_t>> changes;
  for (const Box& box : boxes) {
    changes.emplace_back(box.offsets[dim], slice(box.sizes));
    changes.emplace_back(box.end(dim), -slice(box.sizes));
  }
  std::sort(changes.begin(), changes.end());
  int64_t covered = 0;
  size_t next = 0;
  for (int64_t position = 0; position < shape[dim];) {
    for (; next < changes.size() && changes[next].first <= position; ++next) covered += changes[next].second;
    if (covered < full) {
      std::vector<Box> here;
      for (const Box& box : boxes) {
        if (box.offsets[dim] <= position && position < box.end(dim)) here.push_back(box);
      }
      found.push_back(position);
      return find_gap(here, shape, std::move(found));
    }
    if (next == changes.size()) break;
    position = changes[next].first;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Intersection> intersect(const Box& a, const Box& b) {
  Intersection result;
  for (const size_t dim : c10::irange(a.offsets.size())) {
    const int64_t begin = std::max(a.offsets[dim], b.offsets[dim]);
    const int64_t end = std::min(a.end(dim), b.end(dim));
    if (end <= begin) return std::nullopt;
    result.offsets.push_back(begin);
    result.sizes.push_back(end - begin);
  }
  return result;
}

void for_each_overlap(c10::ArrayRef<Box> a, c10::ArrayRef<Box> b,
                      c10::function_ref<bool(size_t, size_t)> visit) {
  if (a.empty() || b.empty()) return;
  const c10::DimVector dims = differing_dims(a, b);
  Search(Side(a, dims), Side(b, dims), visit).run();
}

std::optional<std::vector<int64_t>> find_gap(c10::ArrayRef<Box> boxes, c10::IntArrayRef shape) {
  if (is_empty({shape, shape})) return std::nullopt;
  std::vector<Box> nonempty;
  for (const Box& box : boxes) {
    if (!is_empty(box)) nonempty.push_back(box);
  }
  return find_gap(nonempty, shape, {});
}

}  // namespace tessera::sharded
