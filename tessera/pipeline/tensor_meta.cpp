#include <tessera/bytes.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/pipeline/tensor_meta.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>

namespace tessera {

namespace {

/// The part of the root that stages other than this rank's have, too.
DeviceMesh mesh_of_stage(const DeviceMesh& pipeline, const std::vector<std::string>& names) {
  return pipeline.root()[names];
}

void check_mesh(const Spec& spec, const DeviceMesh& pipeline, int64_t stage) {
  const auto names = spec.mesh().mesh_dim_names();
  const auto own = pipeline.mesh_dim_names();
  auto is_own = [&](const std::string& name) { return std::find(own.begin(), own.end(), name) != own.end(); };
  TESSERA_CHECK_VALUE(
      !names.empty() && !own.empty() && std::none_of(names.begin(), names.end(), is_own) &&
          mesh_of_stage(pipeline, names) == spec.mesh(),
      "Stage ", stage, " passes on a tensor that is ", spec,
      ". The ranks of the next stage have no such mesh: make one mesh with named dims, give the "
      "pipeline one of them (mesh[\"pp\"]), and distribute tensors on others (mesh[\"dp\"]).");
}

}  // namespace

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  TensorMeta meta;
  meta.dtype = tensor.scalar_type();
  meta.requires_grad = tensor.requires_grad();
  if (DTensor::is_dtensor(tensor))
    meta.spec = DTensor(tensor).spec();
  else
    meta.sizes = tensor.sizes();
  return meta;
}

TensorMeta TensorMeta::of_gradient() const {
  TensorMeta meta = *this;
  meta.requires_grad = false;
  if (!spec) return meta;
  Placements placements = spec.placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  meta.spec = Spec(spec.mesh(), placements, spec.shape(), std::nullopt, dtype, spec.order());
  return meta;
}

at::Tensor TensorMeta::empty_local(at::DeviceType device) const {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  return spec ? new_memory(spec, options) : new_memory(sizes, options);
}

at::Tensor TensorMeta::wrap(const at::Tensor& local) const {
  return spec ? at::Tensor(DTensor::unflatten(local, {.spec = spec})) : local;
}

std::string TensorMeta::str() const {
  return c10::str(spec ? spec.str() : c10::str(to_text(dtype), c10::IntArrayRef(sizes)),
                  requires_grad ? " requires_grad" : "");
}

at::Tensor local_of(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).flatten().first : tensor;
}

std::string to_bytes(const TensorMetas& metas, const DeviceMesh& pipeline, int64_t stage) {
  ByteWriter out;
  out.put(static_cast<int64_t>(metas.size()));
  for (const TensorMeta& meta : metas) {
    if (meta.spec) check_mesh(meta.spec, pipeline, stage);
    out.put(static_cast<int64_t>(meta.requires_grad));
    out.put(to_text(meta.dtype));
    out.put_list(meta.sizes);
    out.put(std::string_view(meta.spec ? meta.spec.str() : ""));
  }
  return out.take();
}

TensorMetas from_bytes(std::string_view bytes, const DeviceMesh& pipeline) {
  ByteReader in(bytes, "description of tensors of a stage");
  TensorMetas metas(in.get_count(4 * sizeof(int64_t)));
  for (TensorMeta& meta : metas) {
    meta.requires_grad = in.get<int64_t>() != 0;
    const auto dtype = parse_dtype(in.get_text());
    in.check(dtype.has_value());
    meta.dtype = *dtype;
    const auto sizes = in.get_list();
    meta.sizes.assign(sizes.begin(), sizes.end());
    const std::string_view spec = in.get_text();
    if (spec.empty()) continue;
    meta.spec = parse_spec(spec, mesh_of_stage(pipeline, parse_layout(spec).mesh_dim_names));
    in.check(meta.spec.dtype() == meta.dtype);
  }
  return metas;
}

}  // namespace tessera
