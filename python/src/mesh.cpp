#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/mesh/device_mesh.h>

#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"

namespace tessera::python {

MeshDim to_mesh_dim(py::handle object) {
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  return object.cast<int64_t>();
}

namespace {

using Names = DeviceMesh::Names;

std::optional<MeshDim> to_optional_mesh_dim(py::handle object) {
  return object.is_none() ? std::nullopt : std::optional<MeshDim>(to_mesh_dim(object));
}

Names to_names(const std::optional<std::vector<std::string>>& names) { return names.value_or(Names()); }

/// An integer tensor, or anything torch.tensor takes.
at::Tensor to_ranks(py::handle object) {
  if (THPVariable_Check(object.ptr())) return object.cast<at::Tensor>();
  const auto torch = py::module_::import("torch");
  return torch.attr("tensor")(object, py::arg("dtype") = torch.attr("int64"), py::arg("device") = "cpu")
      .cast<at::Tensor>();
}

/// Groups are made at their first use, whatever `_init_backend` says.
DeviceMesh make_mesh(const std::string& device_type, py::handle ranks,
                     const std::optional<std::vector<std::string>>& names, bool) {
  ensure_world();
  return DeviceMesh(to_device_type(device_type), to_ranks(ranks), to_names(names));
}

std::vector<Group> to_groups(py::handle objects) {
  std::vector<Group> groups;
  for (const py::handle each : objects) groups.push_back(to_group(each));
  return groups;
}

DeviceMesh mesh_from_group(py::handle group, const std::string& device_type, py::handle ranks,
                           const std::optional<std::vector<std::string>>& names) {
  ensure_world();
  const auto device = to_device_type(device_type);
  if (!py::isinstance<py::sequence>(group)) {
    std::vector<int64_t> members;
    if (!ranks.is_none()) {
      const at::Tensor given = to_ranks(ranks).to(at::kLong).contiguous();
      TESSERA_CHECK_VALUE(given.dim() == 1, "Invalid mesh ",
                          py::repr(py::cast(given).attr("tolist")()).cast<std::string>(),
                          " for ProcessGroup with ranks ",
                          py::repr(py::cast(given).attr("flatten")().attr("tolist")()).cast<std::string>(),
                          ": a mesh of one group has one dim.");
      members.assign(given.const_data_ptr<int64_t>(), given.const_data_ptr<int64_t>() + given.numel());
    } else if (!current_world()->is_threads()) {
      members = py::module_::import("torch.distributed")
                    .attr("get_process_group_ranks")(group)
                    .cast<std::vector<int64_t>>();
    }
    return DeviceMesh::from_group(to_group(group), device, members, to_names(names));
  }
  const std::vector<Group> groups = to_groups(group);
  if (ranks.is_none() && groups.size() == 1) {
    return mesh_from_group(py::reinterpret_borrow<py::sequence>(group)[0], device_type, ranks, names);
  }
  TESSERA_CHECK_VALUE(!ranks.is_none(), "DeviceMesh.from_group: with ", groups.size(),
                      " groups, `mesh` must give the ranks, with one dim for each group.");
  const at::Tensor given = to_ranks(ranks);
  TESSERA_CHECK_VALUE(given.dim() == static_cast<int64_t>(groups.size()),
                      "Expects mesh with ndim equal to number of ProcessGroups but got mesh ",
                      py::repr(py::cast(given).attr("tolist")()).cast<std::string>(), " and ", groups.size(),
                      " ProcessGroups.");
  return DeviceMesh::from_groups(groups, device, given, to_names(names));
}

py::tuple to_tuple(at::IntArrayRef values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

/// Errors are torch's: a RuntimeError if the mesh has no names, else a KeyError.
DeviceMesh slice(const DeviceMesh& mesh, py::handle names) {
  TESSERA_CHECK(!mesh.mesh_dim_names().empty(),
                "Cannot slice a DeviceMesh without mesh_dim_names! Give names to the dims of ", mesh,
                " where it is made.");
  try {
    if (py::isinstance<py::str>(names)) return mesh[names.cast<std::string>()];
    return mesh[names.cast<Names>()];
  } catch (const c10::ValueError& error) {
    throw py::key_error(c10::str("Invalid mesh_dim_names ", py::repr(names).cast<std::string>(), ": ",
                                 error.what_without_backtrace()));
  }
}

/// The scopes of `with mesh:` on this thread, innermost last.
std::vector<std::unique_ptr<MeshScope>>& scopes() {
  thread_local std::vector<std::unique_ptr<MeshScope>> instance;
  return instance;
}

std::string repr(const DeviceMesh& mesh) {
  const std::string text = mesh.str();  // mesh(dp=2, tp=4)
  return c10::str("DeviceMesh", text.substr(4, text.size() - 5), ", '",
                  c10::DeviceTypeName(mesh.device_type(), true), "', ranks=", c10::IntArrayRef(mesh.ranks()),
                  ")");
}

}  // namespace

at::DeviceType to_device_type(const std::string& text) { return c10::Device(text).type(); }

Group to_group(py::handle object) {
  if (object.is_none()) return {};
  return Group::reclaim_copy(object.cast<c10d::ProcessGroup*>());
}

py::object from_group(const Group& group) {
  const auto boxed = torch::jit::toPyObject(c10::IValue(group));
  return py::module_::import("torch.distributed").attr("ProcessGroup").attr("unbox")(boxed);
}

void bind_meshes(py::module_& module) {
  py::class_<DeviceMesh>(
      module, "DeviceMesh",
      R"doc(An n-d array of ranks, seen from one of them: the stage on which tensors are distributed.

``mesh``: the ranks, as an integer tensor or nested lists. All ranks must make the same meshes; those that are not in a
mesh may hold it too. Used as ``with mesh:``, it is the default of functions that take one.

    mesh = tessera.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"]            # the part of the mesh along tp that this rank is in)doc")
      .def(py::init(&make_mesh), py::arg("device_type"), py::arg("mesh"), py::kw_only(),
           py::arg("mesh_dim_names") = py::none(), py::arg("_init_backend") = true)
      .def_static("from_group", &mesh_from_group, py::arg("group"), py::arg("device_type"),
                  py::arg("mesh") = py::none(), py::kw_only(), py::arg("mesh_dim_names") = py::none(),
                  "The mesh over the ranks of a group of torch.distributed, or of one group for each dim.")
      .def_static("_concatenate", &DeviceMesh::concatenate, py::arg("device_mesh_list"),
                  "The mesh whose dims are the dims of all these meshes, which are slices of one.")
      .def_property_readonly(
          "device_type", [](const DeviceMesh& self) { return c10::DeviceTypeName(self.device_type(), true); },
          "What the tensors lie on: \"cpu\", \"cuda\", ...")
      .def_property_readonly("ndim", &DeviceMesh::ndim, "How many dims it has.")
      .def_property_readonly(
          "shape", [](const DeviceMesh& self) { return to_tuple(self.shape()); },
          "How many ranks each dim has.")
      .def_property_readonly(
          "mesh", [](const DeviceMesh& self) { return self.mesh().to(at::kInt); },
          "The ranks, as an int32 tensor.")
      .def_property_readonly(
          "mesh_dim_names",
          [](const DeviceMesh& self) -> py::object {
            if (self.mesh_dim_names().empty()) return py::none();
            return py::tuple(py::cast(self.mesh_dim_names()));
          },
          "The names of the dims, or None.")
      .def(
          "size",
          [](const DeviceMesh& self, py::handle dim) {
            const auto given = to_optional_mesh_dim(dim);
            return given ? self.size(*given) : self.size();
          },
          py::arg("mesh_dim") = py::none(), "How many ranks there are, in all or along one dim.")
      .def("get_rank", &DeviceMesh::get_rank, "This rank in the world, whether in the mesh or not.")
      .def(
          "get_local_rank",
          [](const DeviceMesh& self, py::handle dim) {
            TESSERA_CHECK(!dim.is_none() || self.ndim() == 1,
                          "Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1: ", self,
                          " has ", self.ndim(), " dims.");
            return self.get_local_rank(to_optional_mesh_dim(dim));
          },
          py::arg("mesh_dim") = py::none(),
          "This rank's coordinate along a dim, which may be left out on a 1-d mesh.")
      .def(
          "get_coordinate",
          [](const DeviceMesh& self) -> py::object {
            const auto coordinate = self.get_coordinate();
            return coordinate ? py::object(to_tuple(*coordinate)) : py::none();
          },
          "This rank's coordinate along each dim, or None if it is not in the mesh.")
      .def(
          "get_group",
          [](const DeviceMesh& self, py::handle dim) {
            const auto given = to_optional_mesh_dim(dim);
            Group group;
            {
              const py::gil_scoped_release release;
              group = self.get_group(given);
            }
            return from_group(group);
          },
          py::arg("mesh_dim") = py::none(),
          "The group of the ranks that differ from this one in one dim only.")
      .def(
          "get_all_groups",
          [](const DeviceMesh& self) {
            std::vector<Group> groups;
            {
              const py::gil_scoped_release release;
              groups = self.get_all_groups();
            }
            py::list result;
            for (const Group& group : groups) result.append(from_group(group));
            return result;
          },
          "One group for each dim.")
      .def("__getitem__", &slice, py::arg("mesh_dim_names"),
           "The part of the mesh along some dims that this rank is in.")
      .def(
          "_get_mesh_dim_by_name",
          [](const DeviceMesh& self, const std::string& name) { return self.dim_index(name); },
          py::arg("mesh_dim_name"), "The position of a dim.")
      .def("_get_root_mesh", &DeviceMesh::root, "The mesh that this one is a slice of.")
      .def(
          "_get_all_submeshes",
          [](const DeviceMesh& self, py::handle dim) { return self.submeshes(to_mesh_dim(dim)); },
          py::arg("mesh_dim_name"), "All slices of the mesh along one of its dims.")
      .def_property_readonly("_flatten_mapping", &DeviceMesh::flattened,
                             "The dims that _flatten made of dims of this mesh, by name.")
      .def("_is_current_rank_part_of_mesh", &DeviceMesh::is_member, "Whether this rank is in the mesh.")
      .def(
          "_flatten",
          [](const DeviceMesh& self, const std::optional<std::string>& name, py::handle override) {
            if (override.is_none()) return self.flatten(name.value_or(""));
            const auto make = py::module_::import("tessera._mesh").attr("override_flat_group");
            return self.flatten(
                name.value_or(""),
                to_group(make(self, self.flatten(name.value_or("")).mesh_dim_names()[0], override)));
          },
          py::arg("mesh_dim_name") = py::none(), py::arg("backend_override") = py::none(),
          "All dims as one; ``backend_override``: the backend of its group, as that of init_device_mesh.")
      .def(
          "_unflatten",
          [](const DeviceMesh& self, py::handle dim, const std::vector<int64_t>& sizes, const Names& names,
             py::handle overrides) {
            DeviceMesh result = self.unflatten(to_mesh_dim(dim), sizes, names);
            if (overrides.is_none()) return result;
            const auto make = py::module_::import("tessera._mesh").attr("override_groups");
            const py::list groups = make(result, overrides, self.dim_index(to_mesh_dim(dim)), sizes.size());
            return self.unflatten(to_mesh_dim(dim), sizes, names, to_groups(groups));
          },
          py::arg("dim"), py::arg("mesh_sizes"), py::arg("mesh_dim_names"),
          py::arg("backend_override") = py::none(), "One dim as several.")
      .def("__enter__",
           [](const DeviceMesh& self) {
             scopes().push_back(std::make_unique<MeshScope>(self));
             return self;
           })
      .def("__exit__", [](const DeviceMesh&, const py::args&) { scopes().pop_back(); })
      .def(
          "__eq__", [](const DeviceMesh& self, const DeviceMesh& other) { return self == other; },
          py::is_operator())
      .def("__hash__", &DeviceMesh::hash)
      .def("__repr__", repr)
      .def("__str__", repr)
      .def("__copy__", [](const DeviceMesh& self) { return self; })
      .def(
          "__deepcopy__", [](const DeviceMesh& self, py::handle) { return self; }, py::arg("memo"))
      .def("__reduce__", [](const DeviceMesh& self) {
        const auto rebuild = py::module_::import("tessera._rebuild").attr("rebuild_mesh");
        return py::make_tuple(
            rebuild, py::make_tuple(c10::DeviceTypeName(self.device_type(), true), self.shape().vec(),
                                    self.ranks(), self.mesh_dim_names()));
      });

  module.def(
      "init_device_mesh",
      [](const std::string& device_type, const std::vector<int64_t>& shape,
         const std::optional<std::vector<std::string>>& names) {
        ensure_world();
        return init_device_mesh(to_device_type(device_type), shape, to_names(names));
      },
      py::arg("device_type"), py::arg("mesh_shape"), py::kw_only(), py::arg("mesh_dim_names") = py::none());
  module.def("has_current_mesh", &has_current_mesh);
  module.def("current_mesh", &current_mesh,
             "The mesh of the innermost ``with mesh:`` of this thread; an error if there is none.");
}

}  // namespace tessera::python
