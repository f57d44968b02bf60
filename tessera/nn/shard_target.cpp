#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/shard_target.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

bool has_name(const DeviceMesh::Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The names of the dims that fully_shard works on; none if the mesh has no names.
DeviceMesh::Names names_of(const ShardDims& dims) {
  DeviceMesh::Names names;
  const auto& all = dims.mesh.mesh_dim_names();
  if (all.empty()) return names;
  for (const int64_t dim : dims.replicate) names.push_back(all[dim]);
  names.push_back(all[dims.shard]);
  return names;
}

/// The mesh of all dims of both, in the order of their root.
DeviceMesh joined_mesh(const DeviceMesh& theirs, const ShardDims& dims) {
  const DeviceMesh root = theirs.root();
  const DeviceMesh::Names ours = names_of(dims);
  TESSERA_CHECK_VALUE(root == dims.mesh.root() && !ours.empty() && !theirs.mesh_dim_names().empty(),
                      "fully_shard: a parameter is distributed on ", theirs,
                      ", which has no dim in common with ", dims.mesh,
                      ". Make both slices of one mesh with names, such as mesh[\"tp\"] and mesh[\"dp\"].");
  DeviceMesh::Names names;
  for (const std::string& name : root.mesh_dim_names()) {
    if (has_name(ours, name) || has_name(theirs.mesh_dim_names(), name)) names.push_back(name);
  }
  TESSERA_CHECK_VALUE(names.size() == ours.size() + theirs.mesh_dim_names().size(),
                      "fully_shard: a parameter is distributed on ", theirs, " and cannot be sharded on ",
                      dims.mesh, ": these have some dims in common, and some are of another mesh than ", root,
                      ".");
  return names.size() == root.mesh_dim_names().size() ? root : root[names];
}

}  // namespace

ShardDims ShardDims::of(const DeviceMesh& mesh, const std::vector<MeshDim>& dims) {
  ShardDims result{mesh};
  std::vector<int64_t> positions;
  for (const MeshDim& dim : dims) positions.push_back(mesh.dim_index(dim));
  if (dims.empty()) {
    TESSERA_CHECK_VALUE(
        mesh.ndim() <= 2, "fully_shard: ", mesh, " has ", mesh.ndim(),
        " dims. Say which of them share parameters: one that shards, or one that replicates and one "
        "that shards.");
    for (const int64_t dim : c10::irange(mesh.ndim())) positions.push_back(dim);
  }
  result.shard = positions.back();
  positions.pop_back();
  TESSERA_CHECK_VALUE(std::find(positions.begin(), positions.end(), result.shard) == positions.end(),
                      "fully_shard: mesh dim ", result.shard, " is named twice.");
  result.replicate = std::move(positions);
  return result;
}

bool ShardDims::is_on(const DeviceMesh& other) const {
  if (other == mesh) return true;
  const DeviceMesh::Names names = names_of(*this);
  return !names.empty() && mesh.root() == other.root() &&
         std::all_of(names.begin(), names.end(),
                     [&](const std::string& name) { return has_name(other.mesh_dim_names(), name); });
}

ShardDims ShardDims::on(const DeviceMesh& other) const {
  if (other == mesh) return *this;
  ShardDims result{other};
  for (const std::string& name : names_of(*this)) result.replicate.push_back(other.dim_index(name));
  result.shard = result.replicate.back();
  result.replicate.pop_back();
  return result;
}

bool ShardDims::has(int64_t mesh_dim) const {
  return mesh_dim == shard || std::find(replicate.begin(), replicate.end(), mesh_dim) != replicate.end();
}

int64_t ShardDims::ranks() const {
  int64_t count = shards();
  for (const int64_t dim : replicate) count *= mesh.size(MeshDim(dim));
  return count;
}

Spec shard_target(const at::Tensor& parameter, const ShardDims& dims, int64_t dim) {
  const DTensorImpl* known = DTensorImpl::of(parameter);
  const int64_t ndim = parameter.dim();
  TESSERA_CHECK_INDEX(ndim == 0 || (dim >= -ndim && dim < ndim), "fully_shard: a parameter of shape ",
                      parameter.sizes(), " has no dim ", dim, " to shard.");
  DeviceMesh mesh = dims.mesh;
  if (known)
    mesh = dims.is_on(known->spec().mesh()) ? known->spec().mesh() : joined_mesh(known->spec().mesh(), dims);
  const ShardDims here = dims.on(mesh);
  Placements placements(mesh.ndim(), Replicate());
  if (known) {
    const Spec& spec = known->spec();
    for (const int64_t i : c10::irange(spec.mesh().ndim())) {
      const int64_t at = spec.mesh() == mesh ? i : mesh.dim_index(spec.mesh().mesh_dim_names()[i]);
      placements[at] = spec.placement(i);
      TESSERA_CHECK_VALUE(!here.has(at) || placements[at].is_replicate(), "fully_shard: a parameter is ",
                          spec, ", which is sharded along mesh dim ", at, " already.");
    }
  }
  if (ndim > 0) placements[here.shard] = Shard(dim);
  std::vector<int64_t> order;
  for (const int64_t i : c10::irange(mesh.ndim())) {
    if (i != here.shard) order.push_back(i);
  }
  order.push_back(here.shard);
  c10::OptionalIntArrayRef strides;
  if (known && known->spec().is_dense()) strides = known->spec().strides();
  return Spec(mesh, placements, parameter.sizes(), strides, parameter.scalar_type(), order);
}

at::Tensor sharded_as(const at::Tensor& parameter, const Spec& target) {
  const at::NoGradGuard no_grad;
  DTensor known(parameter.detach());
  if (known.device_mesh() != target.mesh()) {
    // On more ranks, which all have the same.
    Placements placements = target.placements();
    const auto& names = known.device_mesh().mesh_dim_names();
    for (const int64_t i : c10::irange(target.mesh().ndim())) {
      if (!has_name(names, target.mesh().mesh_dim_names()[i])) placements[i] = Replicate();
    }
    known = DTensor(make_dtensor(known.to_local(), Spec(target.mesh(), placements, known.sizes(),
                                                        known.spec().strides(), known.scalar_type())));
  }
  return known.redistribute(target.placements(), {.order = {target.order().begin(), target.order().end()}});
}

}  // namespace tessera
