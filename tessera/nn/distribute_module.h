#pragma once

#include <tessera/dtensor/dtensor.h>
#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/hooks.h>
#include <tessera/nn/members.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Distributes some of the parameters and buffers of one module, whose dotted name is given (that of the root
/// is empty), by `distribute_parameter`.
using PartitionFn =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;
/// Changes the tensors that the module is called with, or that it returns: see hooks.h for when it is called.
using PrepareFn = std::function<void(std::vector<at::Tensor>& tensors, const DeviceMesh& mesh)>;

/// Makes all parameters and buffers of a module and its submodules distributed, in the module itself: those
/// that `partition` leaves alone are replicated. All handles on them change (see members.h), so optimisers
/// are made afterwards.
TESSERA_API void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const PartitionFn& partition = {}, const PrepareFn& prepare_inputs = {},
                                   const PrepareFn& prepare_outputs = {});

/// Makes one parameter or buffer of the module itself distributed, or redistributes it if it is
/// distributed on that mesh already. `source`: see distribute_tensor.
TESSERA_API void distribute_parameter(torch::nn::Module& module, const std::string& name,
                                      const DeviceMesh& mesh, Placements placements,
                                      std::optional<int64_t> source = 0);

/// Gives the distributed parameters and buffers of a module that is on meta memory on `device`, each rank its local
/// tensors, in the same tensors: handles stay valid. Their values are to be initialised, or loaded.
TESSERA_API void to_empty(torch::nn::Module& module, at::Device device);

}  // namespace tessera
