#include <tessera/redistribute/overlap.h>

#include <algorithm>

namespace tessera {

namespace {

// Calls found(offset in a, offset in b, size) for each range that both hold, in ascending order.
template <typename Found>
void for_each_shared(const Pieces& a, const Pieces& b, Found found) {
  int64_t before_a = 0;
  int64_t before_b = 0;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const int64_t begin = std::max(x->offset, y->offset);
    const int64_t end = std::min(x->end(), y->end());
    if (begin < end) found(before_a + begin - x->offset, before_b + begin - y->offset, end - begin);
    if (x->end() <= y->end()) {
      before_a += x++->size;
    } else {
      before_b += y++->size;
    }
  }
}

}  // namespace

Overlap overlap(const Pieces& a, const Pieces& b) {
  Overlap out;
  for_each_shared(a, b, [&](int64_t in_a, int64_t in_b, int64_t size) {
    append(out.in_a, {in_a, size});
    append(out.in_b, {in_b, size});
  });
  return out;
}

int64_t shared_length(const Pieces& a, const Pieces& b) {
  int64_t sum = 0;
  for_each_shared(a, b, [&](int64_t, int64_t, int64_t size) { sum += size; });
  return sum;
}

}  // namespace tessera
