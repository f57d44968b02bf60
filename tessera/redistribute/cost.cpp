#include <tessera/error.h>
#include <tessera/redistribute/cost.h>

#include <algorithm>
#include <cmath>

namespace tessera {

LinkCost LinkCost::of_backend(std::string_view name) {
  // Orders of magnitude: plans depend on their ratios only. Those of threads and gloo are measured with two
  // ranks on one machine (bench/collectives: an all-reduce of one float takes 0.5 us and 200 us, of 16 MiB
  // 0.65 ms and 15 ms). Those of NCCL are usual for NVLink, where a kernel starts in about 20 us and 100 GB/s
  // are moved; not measured by us. "fake" moves nothing and stands for a network in between.
  if (name == "threads") return {1e-6, 4e-11};
  if (name == "shm") return {2e-6, 6e-11};
  if (name == "nccl") return {2e-5, 1e-11};
  if (name == "fake") return {1e-5, 1e-10};
  return {2e-4, 1e-9};
}

c10::SmallVector<LinkCost, 4> CostModel::of(const DeviceMesh& mesh) const {
  const auto ndim = static_cast<size_t>(mesh.ndim());
  if (links.empty()) {
    const LinkCost usual = LinkCost::of_backend(mesh.world()->backend(mesh.device_type()));
    return c10::SmallVector<LinkCost, 4>(ndim, usual);
  }
  TESSERA_CHECK_VALUE(links.size() == ndim, "the cost model has ", links.size(), " links for ", mesh,
                      ": expected one for each of its ", ndim, " dims, or none for the default");
  for (size_t i = 0; i < ndim; ++i) {
    const auto [latency, per_byte] = links[i];
    TESSERA_CHECK_VALUE(latency >= 0 && per_byte >= 0 && std::isfinite(latency + per_byte),
                        "the cost of mesh dim ", i, " of ", mesh, " is ", latency, " s + ", per_byte,
                        " s/byte: expected finite values that are not negative");
  }
  return links;
}

LinkCost joint(c10::ArrayRef<LinkCost> links, c10::IntArrayRef mesh_dims) {
  LinkCost out;
  for (const int64_t i : mesh_dims) {
    out.latency = std::max(out.latency, links[i].latency);
    out.per_byte = std::max(out.per_byte, links[i].per_byte);
  }
  return out;
}

double transition_cost(const Placement& from, const Placement& to, int64_t ranks, double bytes,
                       const LinkCost& link) {
  constexpr double kLocal = 0.01;
  if (from == to) return 0;
  const auto n = static_cast<double>(ranks);
  const double local = kLocal * link.per_byte * bytes;
  // On one rank nothing moves, but there is no reason for a change either.
  if (ranks == 1) return local / 10;
  const auto collective = [&](double received) { return link.latency + link.per_byte * received; };
  const double others = (n - 1) / n * bytes;
  if (from.is_replicate()) return to.is_partial() ? 2 * local : local;
  if (from.is_partial()) {
    const bool rescales = to.is_partial() && is_linear(from.op()) && is_linear(to.op());
    if (rescales) return local;
    return to.is_shard_like() ? collective(others) : collective(2 * others);
  }
  return to.is_shard_like() ? collective(others / n) : collective(others);
}

double collective_cost(std::string_view name, int64_t bytes, int64_t ranks, const LinkCost& link) {
  if (ranks == 1) return 0;
  const auto n = static_cast<double>(ranks);
  const double others = (n - 1) / n * static_cast<double>(bytes);
  double received = static_cast<double>(bytes);
  if (name == "all_reduce") received = 2 * others;
  if (name == "all_gather" || name == "reduce_scatter") received = others;
  return link.latency + link.per_byte * received;
}

}  // namespace tessera
