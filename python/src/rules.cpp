#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/register.h>
#include <tessera/error.h>
#include <tessera/rules/rule.h>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"

namespace tessera::python {

namespace {

/// What a rule says of a call with these arguments, as the kernel would ask it: None if it does not apply.
py::object propose(const std::string& name, const std::string& overload, const py::args& args,
                   const py::kwargs& kwargs) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TESSERA_CHECK_VALUE(op, "There is no operator ", name, ".", overload, ".");
  const std::string full = overload.empty() ? name : name + "." + overload;
  const rules::Rule* rule = rules::find_rule(full, op->hasTag(at::Tag::pointwise));
  if (!rule || rule->itemwise) return py::none();
  const c10::FunctionSchema& schema = op->schema();
  const torch::jit::Stack stack = torch::jit::createStackForSchema(schema, args, kwargs, std::nullopt);
  rules::OpCall call;
  call.schema = &schema;
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    auto add = [&](const c10::IValue& value) {
      if (!value.isTensor() || !value.toTensor().defined()) return;
      const DTensorImpl* impl = DTensorImpl::of(value.toTensor());
      if (!impl) return;
      call.tensors.push_back(impl->spec());
      call.positions.push_back(static_cast<uint32_t>(i));
      call.written.push_back(alias && alias->isWrite());
    };
    if (stack[i].isList()) {
      for (const c10::IValue& item : stack[i].toList().vec()) add(item);
    } else {
      add(stack[i]);
    }
  }
  call.arguments = stack;
  if (call.tensors.empty()) return py::none();
  const auto strategies = rule->propose(call);
  if (!strategies) return py::none();
  py::list rows;
  for (const rules::Strategy& strategy : strategies->options)
    rows.append(py::make_tuple(from_placements(strategy.inputs), from_placements(strategy.outputs),
                               strategy.divisor));
  return py::make_tuple(rows, static_cast<bool>(strategies->decompose));
}

/// Whether the operator's kernels are given slices of replicas as views; see rules::Rule.
bool takes_slices(const std::string& name, const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TESSERA_CHECK_VALUE(op, "There is no operator ", name, ".", overload, ".");
  const rules::Rule* rule =
      rules::find_rule(overload.empty() ? name : name + "." + overload, op->hasTag(at::Tag::pointwise));
  return rule && rule->takes_slices;
}

/// A tensor of a call, as Python functions see it.
py::object tensor_spec(const Spec& spec) {
  return py::module_::import("tessera._sharding")
      .attr("TensorSpec")(py::tuple(py::cast(spec.shape().vec())), py::tuple(py::cast(spec.strides().vec())),
                          py::cast(spec.dtype()), from_placements(spec.placements()), spec.mesh());
}

bool holds_tensors(const c10::Argument& argument) {
  const c10::TypePtr type = argument.type();
  return type->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors()) ||
         type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
}

/// The call's arguments with tensors as specs; lists of them as lists.
py::list arguments_of(const rules::OpCall& call) {
  py::list result;
  size_t next = 0;
  for (size_t i = 0; i < call.schema->arguments().size(); ++i) {
    const c10::Argument& argument = call.schema->arguments()[i];
    if (!holds_tensors(argument)) {
      result.append(torch::jit::toPyObject(call.arguments[i]));
      continue;
    }
    py::list specs;
    for (; next < call.tensors.size() && call.positions[next] == i; ++next)
      specs.append(tensor_spec(call.tensors[next]));
    if (argument.type()->kind() == c10::TypeKind::ListType) {
      result.append(specs);
    } else {
      result.append(specs.empty() ? py::object(py::none()) : py::object(specs[0]));
    }
  }
  return result;
}

void add_placements(py::handle given, Placements& placements) {
  if (given.is_none()) return;
  if (py::isinstance<py::sequence>(given)) {
    for (const py::handle each : given) add_placements(each, placements);
  } else {
    placements.push_back(to_placement(given));
  }
}

void register_rule(const std::string& name, const std::string& overload, const py::function& function) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TESSERA_CHECK_VALUE(op, "register_sharding: there is no operator ", name, ".", overload, ".");
  const std::string text = c10::str(
      "given by ", py::str(py::getattr(function, "__name__", py::str("a function"))).cast<std::string>());
  rules::Names reads;
  for (const c10::Argument& argument : op->schema().arguments()) {
    if (!holds_tensors(argument)) reads.push_back(argument.name());
  }
  // Rules are kept to the end of the process, when Python may be gone.
  const auto* kept = new py::function(function);
  auto propose = [kept](const rules::OpCall& call) -> std::optional<rules::Strategies> {
    const py::gil_scoped_acquire acquire;
    rules::Strategies strategies;
    for (const py::handle given : (*kept)(*arguments_of(call))) {
      const auto pair = given.cast<std::pair<py::object, py::object>>();
      rules::Strategy strategy;
      add_placements(pair.first, strategy.outputs);
      add_placements(pair.second, strategy.inputs);
      TESSERA_CHECK_VALUE(strategy.inputs.size() == call.tensors.size(), "register_sharding: the rule of ",
                          call.schema->name(), " gives placements of ", strategy.inputs.size(),
                          " tensors, but the call has ", call.tensors.size(), ".");
      strategies.options.push_back(std::move(strategy));
    }
    return strategies;
  };
  rules::Rule rule(text, propose, std::move(reads), "registered by the user");
  tessera::register_sharding(overload.empty() ? name : name + "." + overload, std::move(rule));
}

}  // namespace

void bind_rules(py::module_& module) {
  module.def("sharding_rules", [] {
    py::dict result;
    for (const auto& [op, rule] : rules::all_rules()) result[py::str(op)] = rule->text();
    return result;
  });
  module.def("register_sharding", &register_rule, py::arg("name"), py::arg("overload"), py::arg("function"));
  module.def("propose_sharding", &propose, py::arg("name"), py::arg("overload"));
  module.def("takes_slices", &takes_slices, py::arg("name"), py::arg("overload"));
}

}  // namespace tessera::python
