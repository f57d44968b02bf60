#include <tessera/dispatch/dtensor_impl.h>
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
  rules::Call call;
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
  const auto proposal = rule->propose(call);
  if (!proposal) return py::none();
  py::list rows;
  for (const rules::Row& row : proposal->rows)
    rows.append(py::make_tuple(from_placements(row.inputs), from_placements(row.outputs), row.divisor));
  return py::make_tuple(rows, static_cast<bool>(proposal->decompose));
}

}  // namespace

void bind_rules(py::module_& module) {
  module.def("sharding_rules", [] {
    py::dict result;
    for (const auto& [op, rule] : rules::all_rules()) result[py::str(op)] = rule->text;
    return result;
  });
  module.def("propose_sharding", &propose, py::arg("name"), py::arg("overload"));
}

}  // namespace tessera::python
