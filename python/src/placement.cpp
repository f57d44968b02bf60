#include <tessera/error.h>
#include <tessera/placement/layout.h>
#include <tessera/placement/placement.h>
#include <tessera/placement/text.h>

#include <c10/util/strides.h>

#include "bindings.h"

namespace tessera::python {

namespace {

// One Python class for each kind, so that isinstance distinguishes them. All are values of the same C++ type.
struct ShardObject : Placement {
  explicit ShardObject(const Placement& placement) : Placement(placement) {}
};
struct StridedShardObject : Placement {
  explicit StridedShardObject(const Placement& placement) : Placement(placement) {}
};
struct ReplicateObject : Placement {
  explicit ReplicateObject(const Placement& placement) : Placement(placement) {}
};
struct PartialObject : Placement {
  explicit PartialObject(const Placement& placement) : Placement(placement) {}
};

PartialObject make_partial(const std::string& name) {
  const auto op = reduce_op(name == "prod" ? "product" : name);
  TESSERA_CHECK_VALUE(op && *op != ReduceOp::norm, "Partial: there is no reduction '", name,
                      "'. Known: sum, avg, product, min, max, any, all; and _NormPartial(p) for norms.");
  return PartialObject(Partial(*op));
}

std::string placement_text(const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::replicate:
      return "Replicate()";
    case Placement::Kind::shard:
      return c10::str("Shard(dim=", placement.dim(), ")");
    case Placement::Kind::strided_shard:
      return c10::str("_StridedShard(dim=", placement.dim(), ", sf=", placement.split(), ")");
    case Placement::Kind::partial:
      break;
  }
  return placement.is_partial(ReduceOp::norm) ? c10::str("_NormPartial(p=", placement.norm(), ")")
                                              : c10::str("Partial(", name(placement.op()), ")");
}

bool has(py::handle object, const char* method) {
  return py::hasattr(object, method) && object.attr(method)().cast<bool>();
}

}  // namespace

Placement to_placement(py::handle object) {
  if (py::isinstance<Placement>(object)) return object.cast<Placement>();
  if (has(object, "is_replicate")) return Replicate();
  if (py::hasattr(object, "split_factor")) {
    return StridedShard(object.attr("dim").cast<int64_t>(), object.attr("split_factor").cast<int64_t>());
  }
  if (has(object, "is_shard")) return Shard(object.attr("dim").cast<int64_t>());
  if (has(object, "is_partial")) {
    if (py::hasattr(object, "norm_type")) return NormPartial(object.attr("norm_type").cast<double>());
    return make_partial(object.attr("reduce_op").cast<std::string>());
  }
  throw py::type_error(c10::str("Expected a placement such as Shard(0), Replicate() or Partial(), got ",
                                py::repr(object).cast<std::string>(), "."));
}

Placements to_placements(py::handle objects, const char* what) {
  if (!py::isinstance<py::sequence>(objects) || py::isinstance<py::str>(objects)) {
    throw py::type_error(
        c10::str(what, ": placements must be a sequence with one placement for each mesh dim, got ",
                 py::repr(objects).cast<std::string>(), "."));
  }
  Placements result;
  for (const py::handle object : objects) result.push_back(to_placement(object));
  return result;
}

OptionalPlacements to_optional_placements(py::handle objects, const char* what) {
  return objects.is_none() ? std::nullopt : OptionalPlacements(to_placements(objects, what));
}

py::object from_placement(const Placement& placement) {
  switch (placement.kind()) {
    case Placement::Kind::replicate:
      return py::cast(ReplicateObject(placement));
    case Placement::Kind::shard:
      return py::cast(ShardObject(placement));
    case Placement::Kind::strided_shard:
      return py::cast(StridedShardObject(placement));
    case Placement::Kind::partial:
      break;
  }
  return py::cast(PartialObject(placement));
}

py::tuple from_placements(c10::ArrayRef<Placement> placements) {
  py::tuple result(placements.size());
  for (size_t i = 0; i < placements.size(); ++i) result[i] = from_placement(placements[i]);
  return result;
}

void bind_placements(py::module_& module) {
  module.def(
      "parse_placement", [](const std::string& text) { return from_placement(parse_placement(text)); },
      py::arg("text"), R"doc(The placement that ``str`` wrote: ``parse_placement("S(0)") == Shard(0)``.)doc");

  module.def(
      "parse_layout",
      [](const std::string& text) {
        const Layout layout = parse_layout(text);
        TESSERA_CHECK_VALUE(layout.shape, "A layout of a tensor has a shape, but there is none in \"", text,
                            "\".");
        const c10::DimVector strides = layout.strides.value_or(c10::contiguous_strides(*layout.shape));
        return py::make_tuple(from_placements(layout.placements), c10::IntArrayRef(*layout.shape).vec(),
                              c10::IntArrayRef(strides).vec());
      },
      py::arg("text"), "The placements, the shape and the strides in the text of a spec.");
  module.def(
      "local_shape_and_global_offset",
      [](const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh_shape, py::handle placements,
         const std::vector<int64_t>& coordinate) {
        const LocalBox box = local_shape_and_global_offset(
            shape, mesh_shape, to_placements(placements, "local_shape_and_global_offset"), {}, coordinate);
        return std::make_pair(std::vector<int64_t>(box.shape.begin(), box.shape.end()),
                              std::vector<int64_t>(box.offset.begin(), box.offset.end()));
      },
      py::arg("shape"), py::arg("mesh_shape"), py::arg("placements"), py::arg("coordinate"));

  py::class_<Placement>(module, "Placement",
                        R"doc(What the ranks along one mesh dim hold of a tensor: Shard, Replicate or Partial.

A small immutable value that can be compared, hashed and pickled.)doc")
      .def(
          "is_shard",
          [](const Placement& self, std::optional<int64_t> dim) {
            return dim ? self.is_shard(*dim) : self.is_shard();
          },
          py::arg("dim") = py::none(),
          "Whether it is a Shard (of that dim, if given). A _StridedShard is none, as in torch.")
      .def("is_replicate", &Placement::is_replicate, "Whether every rank has the full tensor.")
      .def(
          "is_partial",
          [](const Placement& self, const std::optional<std::string>& reduce_op) {
            return self.is_partial() && (!reduce_op || name(self.op()) == *reduce_op);
          },
          py::arg("reduce_op") = py::none(),
          "Whether the ranks' values have yet to be reduced (by that reduction, if given).")
      .def(
          "__eq__", [](const Placement& self, const Placement& other) { return self == other; },
          py::is_operator())
      .def("__hash__", &Placement::hash)
      .def("__repr__", placement_text)
      .def("__str__", &Placement::str)
      .def("__reduce__", [](const Placement& self) {
        const auto rebuild = py::module_::import("tessera._rebuild").attr("rebuild_placement");
        return py::make_tuple(rebuild, py::make_tuple(self.str()));
      });

  py::class_<ShardObject, Placement>(
      module, "Shard",
      R"doc(Tensor dim ``dim`` is split into chunks as by ``torch.chunk``, one for each rank in order.

A negative dim counts from the end.)doc")
      .def(py::init([](int64_t dim) { return ShardObject(Shard(dim)); }), py::arg("dim"))
      .def_property_readonly(
          "dim", [](const ShardObject& self) { return self.dim(); }, "The tensor dim that is sharded.");

  py::class_<StridedShardObject, Placement>(
      module, "_StridedShard",
      R"doc(Tensor dim ``dim`` is split into ``split_factor`` chunks, each of these into one for each rank.)doc")
      .def(py::init([](int64_t dim, int64_t split_factor) {
             return StridedShardObject(StridedShard(dim, split_factor));
           }),
           py::arg("dim"), py::kw_only(), py::arg("split_factor"))
      .def_property_readonly(
          "dim", [](const StridedShardObject& self) { return self.dim(); }, "The tensor dim that is sharded.")
      .def_property_readonly(
          "split_factor", [](const StridedShardObject& self) { return self.split(); },
          "Into how many chunks the dim is split before it is sharded.");

  py::class_<ReplicateObject, Placement>(module, "Replicate", R"doc(Every rank has the full tensor.)doc")
      .def(py::init([] { return ReplicateObject(Replicate()); }));

  py::class_<PartialObject, Placement>(
      module, "Partial",
      R"doc(Every rank holds a value of the tensor's full shape; reduced over the ranks they give the true one.

``reduce_op``: "sum", "avg", "product", "min", "max", "any" or "all".)doc")
      .def(py::init(&make_partial), py::arg("reduce_op") = "sum")
      .def_property_readonly(
          "reduce_op", [](const PartialObject& self) { return std::string(name(self.op())); },
          "How the values are reduced.");

  module.def(
      "_NormPartial", [](double p) { return from_placement(NormPartial(p)); }, py::arg("p") = 2.0,
      R"doc(A Partial of which every rank holds the p-norm of its part.)doc");
}

}  // namespace tessera::python
