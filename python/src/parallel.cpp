#include <tessera/nn/gradient_reduction.h>

#include <memory>

#include "bindings.h"

namespace tessera::python {

namespace {

void bind_gradient_reduction(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("is_distributed_on", &is_distributed_on, py::arg("tensor"), py::arg("mesh"));
  module.def("broadcast_values", &broadcast_values, py::arg("tensor"), py::arg("mesh"), Release());
  py::class_<GradientReduction, std::shared_ptr<GradientReduction>>(module, "GradientReduction")
      .def(py::init([](const DeviceMesh& mesh, int64_t bucket_bytes, int64_t first_bucket_bytes) {
             return std::make_shared<GradientReduction>(
                 mesh, GradientReduction::Options{bucket_bytes, first_bucket_bytes});
           }),
           py::arg("mesh"), py::arg("bucket_bytes"), py::arg("first_bucket_bytes"))
      .def_property("enabled", &GradientReduction::enabled, &GradientReduction::set_enabled)
      .def("ready", &GradientReduction::ready, py::arg("parameter"), Release())
      .def(
          "__deepcopy__",
          [](const GradientReduction& reduction, const py::dict&) {
            return std::make_shared<GradientReduction>(reduction.mesh(), reduction.options());
          },
          py::arg("memo"));
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_gradient_reduction(module);
}

}  // namespace tessera::python
