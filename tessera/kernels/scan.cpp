#include <tessera/kernels/scan.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

Stack scan(const Stack& local, const ShardGroup& ranks, int64_t dim, const Follow& follow) {
  // The last of each rank, where there is one.
  std::vector<int64_t> sizes;
  for (const int64_t size : ranks.shard_sizes()) sizes.push_back(size > 0);
  const int64_t own = sizes[ranks.self()];
  std::vector<at::Tensor> lasts;
  for (const c10::IValue& result : local) {
    const at::Tensor& all = result.toTensor();
    lasts.push_back(ranks.join(all.narrow(dim, all.size(dim) - own, own), dim, sizes));
  }
  const auto last = [&](int64_t i) {
    Stack result;
    for (const at::Tensor& each : lasts) result.emplace_back(each.narrow(dim, i, 1));
    return result;
  };
  const int64_t count = ranks.before(sizes);
  if (count == 0 || own == 0) return local;
  Stack before = last(0);
  for (const int64_t i : c10::irange<int64_t>(1, count)) before = follow(before, last(i));
  return follow(before, local);
}

}  // namespace tessera::kernels
