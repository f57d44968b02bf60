#include <tessera/mesh/axis.h>

#include <algorithm>
#include <functional>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {

namespace {

bool overlap(const Digit& a, const Digit& b) {
  return a.stride % (b.size * b.stride) != 0 && b.stride % (a.size * a.stride) != 0;
}

}  // namespace

void Axis::append(Digit digit) {
  if (digit.size == 1) return;
  if (!digits.empty() && digits.back().stride == digit.size * digit.stride) {
    digits.back() = {digits.back().size * digit.size, digit.stride};
  } else {
    digits.push_back(digit);
  }
}

int64_t Axis::size() const {
  int64_t size = 1;
  for (const Digit& digit : digits) size *= digit.size;
  return size;
}

int64_t Axis::coordinate(int64_t index) const {
  int64_t coordinate = 0;
  for (const Digit& digit : digits) coordinate = coordinate * digit.size + index / digit.stride % digit.size;
  return coordinate;
}

int64_t Axis::offset(int64_t coordinate) const {
  int64_t offset = 0;
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    offset += coordinate % digit->size * digit->stride;
    coordinate /= digit->size;
  }
  return offset;
}

bool overlap(const Axis& a, const Axis& b) {
  return std::ranges::any_of(a.digits, [&](const Digit& x) {
    return std::ranges::any_of(b.digits, [&](const Digit& y) { return overlap(x, y); });
  });
}

Axis join(std::span<const Axis> axes) {
  Axis joined;
  for (const Axis& axis : axes) {
    for (const Digit& digit : axis.digits) joined.append(digit);
  }
  for (const Axis& axis : axes) {
    if (axis.group && axis.digits == joined.digits) joined.group = axis.group;
  }
  return joined;
}

std::optional<std::vector<Axis>> split(const Axis& axis, c10::IntArrayRef sizes) {
  std::vector<Axis> result(sizes.size());
  std::vector<Digit> rest = axis.digits;
  for (size_t i = sizes.size(); i-- > 0;) {
    std::vector<Digit> taken;
    for (int64_t wanted = sizes[i]; wanted > 1;) {
      Digit& last = rest.back();
      if (wanted % last.size == 0) {
        wanted /= last.size;
        taken.push_back(last);
        rest.pop_back();
      } else if (last.size % wanted == 0) {
        taken.push_back({wanted, last.stride});
        last = {last.size / wanted, last.stride * wanted};
        wanted = 1;
      } else {
        return std::nullopt;
      }
    }
    for (auto digit = taken.rbegin(); digit != taken.rend(); ++digit) result[i].append(*digit);
    if (result[i].digits == axis.digits) result[i].group = axis.group;
  }
  return result;
}

bool covers(std::span<const Axis> axes, const Axis& axis) {
  std::vector<Digit> digits = join(axes).digits;
  std::ranges::sort(digits, std::greater{}, &Digit::stride);
  Axis sorted;
  for (const Digit& digit : digits) sorted.append(digit);
  return std::ranges::all_of(axis.digits, [&](const Digit& x) {
    return std::ranges::any_of(sorted.digits, [&](const Digit& y) {
      return x.stride % y.stride == 0 && y.size * y.stride % (x.size * x.stride) == 0;
    });
  });
}

int64_t first_index(std::span<const Axis> axes, int64_t index) {
  for (const Axis& axis : axes) index -= axis.offset(axis.coordinate(index));
  return index;
}

std::vector<int64_t> indices_along(std::span<const Axis> axes, int64_t start) {
  std::vector<int64_t> result{start};
  for (const Digit& digit : join(axes).digits) {
    std::vector<int64_t> next;
    next.reserve(result.size() * digit.size);
    for (int64_t index : result) {
      for (int64_t i = 0; i < digit.size; ++i) next.push_back(index + i * digit.stride);
    }
    result = std::move(next);
  }
  return result;
}

}  // namespace tessera
