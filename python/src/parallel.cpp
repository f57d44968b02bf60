#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/gradient_reduction.h>
#include <tessera/nn/parallel_layer.h>
#include <tessera/nn/saved_shard.h>
#include <tessera/nn/shard_unit.h>

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

/// A parameter of a unit: a plain one with the values of the first rank, a distributed one with its own.
at::Tensor shard_parameter(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim) {
  const Spec target = shard_target(tensor, ShardDims::of(mesh), dim);
  if (DTensor::is_dtensor(tensor)) return sharded_as(tensor, target);
  return distribute_tensor(tensor.detach(), target.mesh(), target.placements());
}

std::shared_ptr<ShardUnit> make_unit(const std::vector<std::string>& names,
                                     const std::vector<at::Tensor>& tensors, const DeviceMesh& mesh,
                                     std::optional<bool> reshard_after_forward,
                                     std::optional<int64_t> post_forward_ranks,
                                     std::optional<at::ScalarType> param_dtype,
                                     std::optional<at::ScalarType> reduce_dtype) {
  std::vector<ShardUnit::Parameter> parameters;
  for (size_t i = 0; i < names.size(); ++i) parameters.push_back({names[i], tensors.at(i)});
  ShardUnit::Options options;
  options.reshard_after_forward = reshard_after_forward;
  options.post_forward_ranks = post_forward_ranks;
  options.mp_policy.param_dtype = param_dtype;
  options.mp_policy.reduce_dtype = reduce_dtype;
  options.only_in_forward = true;
  return ShardUnit::make(std::move(parameters), ShardDims::of(mesh), options);
}

void bind_shard_units(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def(
      "check_shard_dim",
      [](const at::Tensor& tensor, const DeviceMesh& mesh, int64_t dim) {
        shard_target(tensor, ShardDims::of(mesh), dim);
      },
      py::arg("tensor"), py::arg("mesh"), py::arg("dim"));
  module.def("shard_parameter", &shard_parameter, py::arg("tensor"), py::arg("mesh"), py::arg("dim"),
             Release());
  py::class_<ShardUnit, std::shared_ptr<ShardUnit>>(module, "ShardUnit")
      .def(py::init(&make_unit), py::arg("names"), py::arg("parameters"), py::arg("mesh"),
           py::arg("reshard_after_forward"), py::arg("post_forward_ranks"), py::arg("param_dtype"),
           py::arg("reduce_dtype"), Release())
      .def_static(
          "has", [](const at::Tensor& parameter) { return ShardUnit::of(parameter).first != nullptr; },
          py::arg("parameter"))
      .def("adopt", &ShardUnit::adopt, py::arg("inner"))
      .def("set_parameters", &ShardUnit::set_parameters, py::arg("parameters"), Release())
      .def("gathered", &ShardUnit::gathered, py::arg("index"), Release())
      .def_property_readonly("is_gathered", &ShardUnit::is_gathered)
      .def("unshard", &ShardUnit::unshard, Release())
      .def("reshard", &ShardUnit::reshard, Release())
      .def("begin_forward", &ShardUnit::begin_forward, py::arg("local"), Release())
      .def("end_forward", &ShardUnit::end_forward, Release())
      .def("begin_backward", &ShardUnit::begin_backward, Release())
      .def("set_syncs_gradients", &ShardUnit::set_syncs_gradients, py::arg("syncs"))
      .def("set_reshard_after_forward", &ShardUnit::set_reshard_after_forward, py::arg("reshard"))
      .def("set_reshard_after_backward", &ShardUnit::set_reshard_after_backward, py::arg("reshard"))
      .def("set_gradient_divisor", &ShardUnit::set_gradient_divisor, py::arg("divisor"));
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_layers(module);
  module.def("prepare_activation", &prepare, py::arg("tensor"), py::arg("mesh"), py::arg("dim"),
             py::arg("if_plain"), py::arg("desired"), py::arg("what"));
  bind_saved_shards(module);
  bind_gradient_reduction(module);
  bind_shard_units(module);
}

}  // namespace tessera::python
