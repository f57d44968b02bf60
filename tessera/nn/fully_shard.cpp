#include <tessera/comm/agreement.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/attachment.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/fully_shard.h>
#include <tessera/nn/shard_unit.h>
#include <tessera/nn/tree.h>

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

namespace tessera {

namespace {

using torch::nn::Module;

/// The unit that the module itself is.
ShardUnit* unit_of(const Module& module) {
  const Attachment* known = find_attachment(module);
  return known ? known->unit.get() : nullptr;
}

ShardUnit& unit_at(const Module& module, const char* what) {
  ShardUnit* unit = unit_of(module);
  TESSERA_CHECK_VALUE(unit, what, ": this ", module.name(),
                      " is no unit; call tessera::fully_shard first, with the same module.");
  return *unit;
}

bool has_tensor(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& each) { return each.is_same(tensor); });
}

/// A parameter of a module, and how it will be placed.
struct Target {
  Module* module;
  std::string name, path;
  Spec spec;
};

/// Those that become the unit. Throws before anything is changed.
std::vector<Target> targets_of(Module& root, const ShardDims& dims, const FullyShardOptions& options) {
  std::vector<Target> targets;
  std::vector<at::Tensor> seen;
  const auto add = [&](const std::string& path, Module& module) {
    for (const auto& each : parameters_of(module)) {
      const at::Tensor& handle = each.value();
      if (!handle.defined() || has_tensor(options.ignored_params, handle) || ShardUnit::of(handle).first ||
          has_tensor(seen, handle))
        continue;  // the last: several modules have it
      seen.push_back(handle);
      const std::string full = path.empty() ? each.key() : path + "." + each.key();
      TESSERA_CHECK(!DTensor::is_dtensor(handle) || !handle.grad().defined(), "fully_shard: parameter '",
                    full, "' has a gradient; call zero_grad() first.");
      const int64_t dim = options.shard_dim ? options.shard_dim(full, handle) : 0;
      targets.push_back({&module, each.key(), full, shard_target(handle, dims, dim)});
    }
  };
  root.apply([&](const std::string& path, Module& module) { add(path, module); });
  return targets;
}

/// The parameters that become the unit, sharded; buffers are replicated.
std::vector<ShardUnit::Parameter> shard_parameters(Module& root, const ShardDims& dims,
                                                   const FullyShardOptions& options) {
  const Tree tree(root);
  std::vector<ShardUnit::Parameter> result;
  for (const Target& target : targets_of(root, dims, options)) {
    at::Tensor& handle = *parameters_of(*target.module).find(target.name);
    if (DTensor::is_dtensor(handle))
      handle.set_data(sharded_as(handle, target.spec));  // into the same tensor: handles need not be found
    else
      distribute_parameter(*target.module, target.name, target.spec.mesh(), target.spec.placements(),
                           options.source);
    result.push_back({target.path, *parameters_of(*target.module).find(target.name)});
  }
  root.apply([&](const std::string&, Module& module) {
    for (const std::string& name : buffers_of(module).keys()) {
      const at::Tensor* handle = buffers_of(module).find(name);
      if (handle->defined() && !DTensor::is_dtensor(*handle))
        distribute_parameter(module, name, dims.mesh, replicated(dims.mesh), options.source);
    }
  });
  return result;
}

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  const bool casts = dtype && tensor.defined() && at::isFloatingType(tensor.scalar_type());
  return casts ? tensor.to(*dtype) : tensor;
}

/// What `tessera::call` does around the module's forward.
void add_call_hooks(ModuleHooks& hooks, const std::shared_ptr<ShardUnit>& unit) {
  const auto cast_all = [](std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype) {
    for (at::Tensor& tensor : tensors) tensor = cast(tensor, dtype);
  };
  const std::weak_ptr<ShardUnit> weak = unit;
  hooks.inputs.push_back([=](std::vector<at::Tensor>& tensors) {
    const auto unit = weak.lock();
    if (unit && unit->options().mp_policy.cast_forward_inputs)
      cast_all(tensors, unit->options().mp_policy.param_dtype);
  });
  hooks.outputs.push_back([=](std::vector<at::Tensor>& tensors) {
    const auto unit = weak.lock();
    if (!unit) return;
    cast_all(tensors, unit->options().mp_policy.output_dtype);
    unit->end_forward();
  });
}

}  // namespace

void fully_shard(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  Attachment& ours = attachment(module);
  std::vector<ShardUnit::Parameter> parameters;
  std::optional<ShardDims> dims;
  comm::together(
      "fully_shard", mesh.joint_group_or_null(),
      [&] {
        TESSERA_CHECK(!ours.unit, "fully_shard: this ", module.name(), " is a unit already.");
        dims = ShardDims::of(mesh, options.dims);
        const int64_t neighbours = options.post_forward_ranks.value_or(1);
        TESSERA_CHECK_VALUE(neighbours >= 1 && dims->shards() % neighbours == 0,
                            "fully_shard: post_forward_ranks is ", neighbours, ", which does not divide the ",
                            dims->shards(), " ranks that share parameters.");
        return c10::str(module.name(), ", ", mesh, ", ", tensors_text(module));
      },
      [&] { parameters = shard_parameters(module, *dims, options); });
  if (!mesh.is_member()) return;
  // Without parameters of its own, too: it is what the units inside have in common.
  ours.unit = ShardUnit::make(std::move(parameters), *dims,
                              {.reshard_after_forward = options.reshard_after_forward,
                               .post_forward_ranks = options.post_forward_ranks,
                               .mp_policy = options.mp_policy,
                               .overlap = options.overlap});
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (ShardUnit* inner = unit_of(*each)) ours.unit->adopt(*inner);
  }
  add_call_hooks(ours.hooks, ours.unit);
}

void unshard(Module& module) { unit_at(module, "unshard").unshard(); }

void reshard(Module& module) { unit_at(module, "reshard").reshard(); }

void set_requires_gradient_sync(Module& module, bool requires_gradient_sync) {
  bool found = false;
  const auto set = [&](const Module& each) {
    ShardUnit* unit = unit_of(each);
    if (unit) unit->set_syncs_gradients(requires_gradient_sync);
    found |= unit != nullptr;
  };
  set(module);
  for (const auto& each : module.modules(/*include_self=*/false)) set(*each);
  TESSERA_CHECK_VALUE(found, "set_requires_gradient_sync: no module of this ", module.name(),
                      " is a unit; call tessera::fully_shard first.");
}

}  // namespace tessera
