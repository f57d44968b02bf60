#include <tessera/comm/collectives.h>
#include <tessera/kernels/order.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>

namespace tessera::kernels {

ValuesAndIndices first_of_all(const at::Tensor& local, const ShardGroup& ranks, int64_t dim, int64_t offset,
                              int64_t each, const First& first) {
  std::vector<int64_t> sizes;
  for (const int64_t size : ranks.shard_sizes()) sizes.push_back(std::min(each, size));
  at::Tensor values = local, indices = new_memory(local.sizes(), local.options().dtype(at::kLong));
  if (local.size(dim) > 0) std::tie(values, indices) = first(local);
  const at::Tensor candidates = ranks.join(values, dim, sizes);
  const at::Tensor candidate_indices = ranks.join(at::add(indices, offset), dim, sizes);
  const auto [found, which] = first(candidates);
  return {found, at::gather(candidate_indices, dim, which)};
}

namespace {

/// The index of a local element in the global tensor, both counted row by row.
int64_t global_index(int64_t index, const Spec& spec) {
  int64_t result = 0, weight = 1;
  for (int64_t dim = spec.ndim(); dim-- > 0;) {
    const int64_t local_size = spec.local_shape()[dim];
    result += (index % local_size + spec.global_offset()[dim]) * weight;
    weight *= spec.shape()[dim];
    index /= local_size;
  }
  return result;
}

}  // namespace

at::Tensor index_of_extreme(const at::Tensor& local, const Spec& spec, const ShardGroup& ranks,
                            Extreme extreme) {
  const auto first = [&](const at::Tensor& values) {
    return extreme == Extreme::largest ? at::argmax(values) : at::argmin(values);
  };
  at::Tensor value = local.flatten();
  at::Tensor index = at::empty({0}, value.options().dtype(at::kLong));
  if (value.numel() > 0) {
    const auto here = first(value).item<int64_t>();
    value = value.narrow(0, here, 1);
    index = at::full({1}, global_index(here, spec), index.options());
  }
  const std::vector<int64_t> sizes = ranks.sizes(value, 0);
  // Of equal ones the first.
  const auto [indices, order] = at::sort(ranks.join(index, 0, sizes));
  const at::Tensor values = at::index_select(ranks.join(value, 0, sizes), 0, order);
  return at::index_select(indices, 0, first(values).view({1}));
}

namespace {

/// Integers that are in the same order as the values, of as many bits. NaN has none.
struct Keys {
  at::ScalarType dtype;  // of the values
  bool floats, wide;

  explicit Keys(at::ScalarType of)
      : dtype(of), floats(at::isFloatingType(of)), wide(of == at::kDouble || of == at::kLong) {}

  int bits() const { return wide ? 64 : 32; }
  at::ScalarType as_float() const { return wide ? at::kDouble : at::kFloat; }
  at::ScalarType as_int() const { return wide ? at::kLong : at::kInt; }

  /// Where a float is negative, all bits but the sign are the other way round. Its own converse.
  at::Tensor turned(const at::Tensor& key) const {
    const int64_t magnitude =
        wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    return at::where(at::lt(key, 0), at::bitwise_xor(key, magnitude), key);
  }
  at::Tensor of(const at::Tensor& values) const {
    return floats ? turned(values.to(as_float()).view(as_int())) : values.to(as_int());
  }
  at::Tensor value(int64_t key, const at::TensorOptions& options) const {
    const at::Tensor integer = at::full({}, key, options.dtype(as_int()));
    return (floats ? turned(integer).view(as_float()) : integer).to(dtype);
  }
};

/// The element with `rank` others before it: some bits at a time, from the highest on, by counting how often
/// each value of them occurs. Collective.
at::Tensor ranked(const at::Tensor& values, int64_t rank, const Group& group) {
  constexpr int kBits = 11;
  const Keys kind(values.scalar_type());
  at::Tensor keys = kind.of(values).flatten();
  int64_t found = 0;
  for (int shift = kind.bits(); shift > 0;) {
    const int bits = std::min(kBits, shift);
    const bool first = shift == kind.bits();
    shift -= bits;
    const int64_t mask = (int64_t{1} << bits) - 1, sign = first ? int64_t{1} << (bits - 1) : 0;
    const at::Tensor digits =
        at::bitwise_xor(at::bitwise_and(at::bitwise_right_shift(keys, shift), mask), sign);
    const at::Tensor counts = at::bincount(digits, {}, mask + 1);
    comm::all_reduce(counts, c10d::ReduceOp::SUM, group).wait();
    const at::Tensor through = at::cumsum(counts, 0).cpu();
    const auto* sums = through.const_data_ptr<int64_t>();
    const int64_t digit = std::upper_bound(sums, sums + mask + 1, rank) - sums;
    if (digit > 0) rank -= sums[digit - 1];
    found = found << bits | (digit ^ sign);
    keys = at::masked_select(keys, at::eq(digits, digit));
  }
  return kind.value(kind.wide ? found : static_cast<int32_t>(found), values.options());
}

}  // namespace

at::Tensor median(const at::Tensor& local, int64_t count, Nan nan, const Group& group) {
  at::Tensor values = local;
  int64_t valid = count;
  if (at::isFloatingType(values.scalar_type())) {
    const at::Tensor is_valid = at::logical_not(at::isnan(values));
    const at::Tensor sum = at::sum(is_valid);
    comm::all_reduce(sum, c10d::ReduceOp::SUM, group).wait();
    valid = sum.item<int64_t>();
    if (valid == 0 || (nan == Nan::propagates && valid < count))
      return at::full({}, std::numeric_limits<double>::quiet_NaN(), values.options());
    if (valid < count) values = at::masked_select(values, is_valid);
  }
  return ranked(values, (valid - 1) / 2, group);
}

int64_t largest_of_all(const at::Tensor& local, const Group& group) {
  const at::Tensor largest = at::zeros({1}, local.options().dtype(at::kLong));
  if (local.numel() > 0) largest.copy_(local.max());
  comm::all_reduce(largest, c10d::ReduceOp::MAX, group).wait();
  return largest.item<int64_t>();
}

}  // namespace tessera::kernels
