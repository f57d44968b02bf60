#include <tessera/nn/packing.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <c10/util/irange.h>

namespace tessera {

namespace {

int64_t size_of(const Packing::Item& item) { return static_cast<int64_t>(c10::elementSize(item.dtype)); }

/// The dense tensor as [outer, size, inner].
at::Tensor in_order(const at::Tensor& tensor, const Packing::Item& item) {
  return tensor.as_strided({item.outer, item.size, item.inner}, {item.size * item.inner, item.inner, 1});
}

}  // namespace

Packing::Packing(std::vector<Item> items, int64_t ranks)
    : items_(std::move(items)), ranks_(ranks), offsets_(items_.size() * ranks) {
  // Larger elements first: so each lies where its dtype may, without gaps.
  std::vector<size_t> order(items_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size_of(items_[a]) > size_of(items_[b]); });
  int64_t alignment = 1;
  for (const int64_t rank : c10::irange(ranks)) {
    int64_t end = 0;
    for (const size_t i : order) {
      offsets_[i * ranks + rank] = end;
      end += items_[i].outer * range(i, rank).size * items_[i].inner * size_of(items_[i]);
      alignment = std::max(alignment, size_of(items_[i]));
    }
    bytes_ = std::max(bytes_, end);
  }
  bytes_ = (bytes_ + alignment - 1) / alignment * alignment;
}

Range Packing::range(size_t item, int64_t rank) const { return chunk(items_[item].size, ranks_, rank); }

at::Tensor Packing::shard(const at::Tensor& message, size_t item, int64_t rank) const {
  const Item& it = items_[item];
  const int64_t size = it.outer * range(item, rank).size * it.inner * size_of(it);
  return message.narrow(0, offset(item, rank), size).view(it.dtype);
}

void Packing::pack(const at::Tensor& messages, size_t item, const at::Tensor& tensor) const {
  if (tensor.is_meta()) return;
  const Item& it = items_[item];
  const bool as_bytes =
      tensor.scalar_type() == it.dtype && tensor.is_cpu() && !tensor.is_conj() && !tensor.is_neg();
  const auto* from = as_bytes ? static_cast<const std::byte*>(tensor.const_data_ptr()) : nullptr;
  auto* to = as_bytes ? static_cast<std::byte*>(messages.mutable_data_ptr()) : nullptr;
  const int64_t row = it.inner * size_of(it);
  for (const int64_t rank : c10::irange(ranks_)) {
    const Range part = range(item, rank);
    if (part.size == 0 || row == 0) continue;
    if (!as_bytes) {
      shard(messages.narrow(0, rank * bytes_, bytes_), item, rank)
          .view({it.outer, part.size, it.inner})
          .copy_(in_order(tensor, it).narrow(1, part.offset, part.size));
      continue;
    }
    for (const int64_t i : c10::irange(it.outer))
      std::memcpy(to + rank * bytes_ + offset(item, rank) + i * part.size * row,
                  from + (i * it.size + part.offset) * row, part.size * row);
  }
}

void Packing::unpack(const at::Tensor& messages, size_t item, const at::Tensor& tensor) const {
  if (tensor.is_meta()) return;
  const Item& it = items_[item];
  const auto* from = tensor.is_cpu() ? static_cast<const std::byte*>(messages.const_data_ptr()) : nullptr;
  auto* to = tensor.is_cpu() ? static_cast<std::byte*>(tensor.mutable_data_ptr()) : nullptr;
  const int64_t row = it.inner * size_of(it);
  for (const int64_t rank : c10::irange(ranks_)) {
    const Range part = range(item, rank);
    if (part.size == 0 || row == 0) continue;
    if (!to) {
      in_order(tensor, it)
          .narrow(1, part.offset, part.size)
          .copy_(shard(messages.narrow(0, rank * bytes_, bytes_), item, rank)
                     .view({it.outer, part.size, it.inner}));
      continue;
    }
    for (const int64_t i : c10::irange(it.outer))
      std::memcpy(to + (i * it.size + part.offset) * row,
                  from + rank * bytes_ + offset(item, rank) + i * part.size * row, part.size * row);
  }
}

}  // namespace tessera
