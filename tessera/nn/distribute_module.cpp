#include <tessera/comm/agreement.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/nn/tree.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

namespace tessera {

namespace {

/// "parameter 'weight' of 'blocks.0.fc' (torch::nn::LinearImpl)"
std::string words(const char* kind, const std::string& name, const torch::nn::Module& module,
                  const Tree& tree) {
  const std::string path = tree.name_of(module);
  return c10::str(kind, " '", name, "' of ", path.empty() ? "the module" : "'" + path + "'", " (",
                  module.name(), ")");
}

void check_mesh(const DTensor& known, const DeviceMesh& mesh, const std::string& what) {
  TESSERA_CHECK_VALUE(known.device_mesh() == mesh, "distribute_parameter: ", what,
                      " is distributed already, on ", known.device_mesh(), " of ranks ",
                      c10::IntArrayRef(known.device_mesh().ranks()), ", and cannot be distributed on ", mesh,
                      " of ranks ", c10::IntArrayRef(mesh.ranks()), ".");
}

void distribute(at::Tensor& handle, const DeviceMesh& mesh, const Placements& placements,
                std::optional<int64_t> source, Tree& tree, bool is_parameter, const std::string& what) {
  if (DTensor::is_dtensor(handle)) {
    const DTensor known(handle.detach());
    check_mesh(known, mesh, what);
    // Into the same tensor: handles need not be found.
    const DTensor moved = known.redistribute(placements);
    if (moved.spec() != known.spec()) handle.set_data(moved);
    return;
  }
  const DTensor now = distribute_tensor(handle, mesh, placements, source);
  if (handle.grad().defined())
    now.mutable_grad() = distribute_tensor(handle.grad(), mesh, placements, source);
  const bool all = tree.replace(handle, now, /*only_if_all=*/is_parameter);
  TESSERA_CHECK(
      all || !is_parameter, "distribute_parameter: ", what,
      " is also kept elsewhere, where it would stay as it was: by a module outside of this one (call this "
      "for a module that has both), by a member of a module (register it once: "
      "tessera::register_members<M>(&M::member)), by an optimiser or a list of parameters (make them "
      "afterwards), or by a graph that is still alive.");
}

/// The tree around the module, or one of its own.
struct InTree {
  explicit InTree(torch::nn::Module& module) : tree(Tree::around(module)) {
    if (!tree) tree = &own.emplace(module);
  }
  std::optional<Tree> own;
  Tree* tree;
};

}  // namespace

void distribute_parameter(torch::nn::Module& module, const std::string& name, const DeviceMesh& mesh,
                          Placements placements, std::optional<int64_t> source) {
  const InTree in(module);
  at::Tensor* parameter = parameters_of(module).find(name);
  at::Tensor* buffer = buffers_of(module).find(name);
  at::Tensor* const handle = parameter ? parameter : buffer;
  const std::string what = words(parameter ? "parameter" : "buffer", name, module, *in.tree);
  const bool is_distributed = handle && DTensor::is_dtensor(*handle);
  // Without a source, nothing is exchanged, and so nothing compared.
  const comm::Agreement agreement("distribute_parameter", source ? mesh.joint_group_or_null() : Group(), [&] {
    TESSERA_CHECK_VALUE(handle, "distribute_parameter: ", module.name(), " has no parameter and no buffer '",
                        name, "'; it has ", parameters_of(module).keys(), " and ", buffers_of(module).keys(),
                        ".");
    if (!handle->defined()) return "undefined " + what;
    if (!is_distributed) return what + (handle->grad().defined() ? " with its gradient" : "");
    check_mesh(DTensor(handle->detach()), mesh, what);
    return c10::str(what, ", distributed already, as ", c10::ArrayRef<Placement>(placements));
  });
  if (!handle->defined() || is_distributed) agreement.settle();
  if (handle->defined()) distribute(*handle, mesh, placements, source, *in.tree, parameter != nullptr, what);
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition,
                       const PrepareFn& prepare_inputs, const PrepareFn& prepare_outputs) {
  const InTree in(module);
  const Placements on_all_ranks = replicated(mesh);
  const auto distribute_all = [&] {
    module.apply([&](const std::string& name, torch::nn::Module& each) {
      if (partition) partition(name, each, mesh);
      auto rest = [&](NamedTensors& tensors, const char* kind) {
        for (auto& item : tensors) {
          if (!item.value().defined() || DTensor::is_dtensor(item.value())) continue;
          distribute(item.value(), mesh, on_all_ranks, 0, *in.tree, &tensors == &parameters_of(each),
                     words(kind, item.key(), each, *in.tree));
        }
      };
      rest(parameters_of(each), "parameter");
      rest(buffers_of(each), "buffer");
    });
  };
  comm::together(
      "distribute_module", mesh.joint_group_or_null(),
      [&] { return c10::str(module.name(), ", ", mesh, ", ", tensors_text(module)); }, distribute_all);
  auto bound = [&](const PrepareFn& prepare) -> TensorsHook {
    if (!prepare) return {};
    return [prepare, mesh](std::vector<at::Tensor>& tensors) { prepare(tensors, mesh); };
  };
  if (prepare_inputs || prepare_outputs) add_hooks(module, bound(prepare_inputs), bound(prepare_outputs));
}

void to_empty(torch::nn::Module& module, at::Device device) {
  const at::NoGradGuard no_grad;
  const auto allocate = [&](const std::string& name, const at::Tensor& tensor) {
    DTensorImpl* impl = DTensorImpl::of(tensor);
    TESSERA_CHECK_VALUE(
        impl, "to_empty: '", name, "' is a plain tensor, which cannot change its device. ",
        "Distribute the module first, by fully_shard, parallelize_module or distribute_module.");
    impl->take(*DTensorImpl::of(at::empty_like(tensor.detach(), device)));
  };
  for (const auto& each : module.named_parameters()) allocate(each.key(), each.value());
  for (const auto& each : module.named_buffers()) allocate(each.key(), each.value());
}

}  // namespace tessera
