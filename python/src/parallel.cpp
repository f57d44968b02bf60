#include <tessera/error.h>
#include <tessera/nn/gradient_reduction.h>
#include <tessera/nn/parallel_layer.h>
#include <tessera/nn/saved_shard.h>

#include <memory>

#include "bindings.h"

namespace tessera::python {

namespace {

LayerStyle to_style(const std::string& name) {
  if (name == "colwise") return LayerStyle::colwise;
  TESSERA_CHECK_VALUE(name == "rowwise", "a layer is sharded \"colwise\" or \"rowwise\", not \"", name,
                      "\".");
  return LayerStyle::rowwise;
}

std::optional<LayerPlan> plan_of(const std::string& style, const std::string& kind, int64_t blocks) {
  const auto known = layer_kind(kind);
  TESSERA_CHECK_VALUE(known, "there is no kind of layer \"", kind, "\".");
  return layer_plan(to_style(style), *known, blocks);
}

std::optional<Placement> to_optional_placement(py::handle object) {
  return object.is_none() ? std::nullopt : std::optional(to_placement(object));
}

std::unique_ptr<ParallelLayer> make_layer(const std::string& style, const LayerPlan& plan,
                                          const DeviceMesh& mesh, int64_t dim, py::handle input_layout,
                                          py::handle output_layout, std::optional<int64_t> features,
                                          const std::string& module) {
  const ParallelLayer::Layouts layouts{to_optional_placement(input_layout),
                                       to_optional_placement(output_layout)};
  return std::make_unique<ParallelLayer>(to_style(style), plan, ParallelDim{mesh, dim}, layouts, features,
                                         module);
}

void bind_layers(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<LayerPlan>(module, "LayerPlan")
      .def_property_readonly("parameters",
                             [](const LayerPlan& plan) {
                               py::list result;
                               for (const auto& [name, placement] : plan.parameters)
                                 result.append(py::make_tuple(name, from_placement(placement)));
                               return result;
                             })
      .def_readonly("inputs", &LayerPlan::inputs)
      .def_property_readonly("input", [](const LayerPlan& plan) { return from_placement(plan.input); })
      .def_property_readonly("output", [](const LayerPlan& plan) { return from_placement(plan.output); })
      .def_readonly("feature_dim", &LayerPlan::feature_dim)
      .def_readonly("reduces_input_gradient", &LayerPlan::reduces_input_gradient)
      .def("__repr__", &LayerPlan::str);
  module.def("layer_plan", &plan_of, py::arg("style"), py::arg("kind"), py::arg("blocks"));
  module.def(
      "refuse_layer",
      [](const std::string& style, const std::string& name) { refuse_layer(to_style(style), name); },
      py::arg("style"), py::arg("module"));
  module.def(
      "check_heads",
      [](int64_t heads, const DeviceMesh& mesh, int64_t dim) {
        check_heads(heads, {mesh, dim});
      },
      py::arg("heads"), py::arg("mesh"), py::arg("dim"));
  py::class_<ParallelLayer>(module, "ParallelLayer")
      .def(py::init(&make_layer), py::arg("style"), py::arg("plan"), py::arg("mesh"), py::arg("dim"),
           py::arg("input_layout"), py::arg("output_layout"), py::arg("features"), py::arg("module"))
      .def(
          "prepare_inputs",
          [](const ParallelLayer& layer, std::vector<at::Tensor> tensors) {
            layer.prepare_inputs(tensors);
            return tensors;
          },
          py::arg("tensors"), Release())
      .def("prepare_output", &ParallelLayer::prepare_output, py::arg("output"), Release());
}

at::Tensor prepare(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim, py::handle if_plain,
                   py::handle desired, const std::string& what) {
  const ActivationLayout layout{.if_plain = to_placement(if_plain),
                                .desired = to_optional_placement(desired)};
  const py::gil_scoped_release release;
  return prepare_activation(tensor, {mesh, dim}, layout, what);
}

void bind_saved_shards(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<SavedShard>(module, "SavedShard")
      .def_static(
          "of",
          [](const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim, bool is_replica) {
            return SavedShard::of(tensor, {.mesh = mesh, .dim = dim}, is_replica);
          },
          py::arg("tensor"), py::arg("mesh"), py::arg("dim"), py::arg("is_replica"), Release())
      .def("gathered", &SavedShard::gathered, Release());
}

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
  bind_layers(module);
  module.def("prepare_activation", &prepare, py::arg("tensor"), py::arg("mesh"), py::arg("dim"),
             py::arg("if_plain"), py::arg("desired"), py::arg("what"));
  bind_saved_shards(module);
  bind_gradient_reduction(module);
}

}  // namespace tessera::python
