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

}  // namespace tessera
