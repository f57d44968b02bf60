#pragma once

#include <tessera/dtensor/dtensor.h>

#include <optional>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

/// The pieces of the extension module `tessera._C`, and what they have in common. The GIL is held on
/// entry of each function bound here; whatever may wait for other ranks releases it first.
namespace tessera::python {

void bind_placements(py::module_& module);
void bind_worlds(py::module_& module);
void bind_meshes(py::module_& module);
void bind_dtensors(py::module_& module);
void bind_functional(py::module_& module);
void bind_parallel(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_rules(py::module_& module);
void bind_random(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_sharded(py::module_& module);
void bind_debug(py::module_& module);

/// A placement of ours, or one of torch.distributed.tensor.
Placement to_placement(py::handle object);
/// A sequence of them; `what` begins the message if it is none.
Placements to_placements(py::handle objects, const char* what);
OptionalPlacements to_optional_placements(py::handle objects, const char* what);
/// As an object of the class Shard, Replicate, Partial, ...
py::object from_placement(const Placement& placement);
py::tuple from_placements(c10::ArrayRef<Placement> placements);

/// torch.device("cuda:1"), "cuda:1" or "cuda".
at::DeviceType to_device_type(const std::string& text);

/// A mesh dim, by position or by name.
MeshDim to_mesh_dim(py::handle object);

/// A torch.distributed.ProcessGroup.
Group to_group(py::handle object);
py::object from_group(const Group& group);

/// Sees to it that this thread has ranks to speak of: those of tessera.run, else of torch.distributed.
void ensure_world();

}  // namespace tessera::python
