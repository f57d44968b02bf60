#include <mutex>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "bindings.h"

namespace tessera::python {

namespace {

/// The name by which operators find a group in c10d's registry, which is one for the process. Groups of ours get names of
/// their own there: on ranks that are threads, a group is called alike on each of them.
std::string registered_name(py::handle object) {
  const Group group = to_group(object);
  const auto is_known = [&](const std::string& name) {
    try {
      return c10d::resolve_process_group(name) == group;
    } catch (const c10::Error&) {  // it is not there yet, or one was there that is no more
      return false;
    }
  };
  if (is_known(group->getGroupName())) return group->getGroupName();  // torch.distributed has registered it
  std::string name = c10::str("tessera/", group.get());
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (is_known(name)) return name;
  c10d::unregister_process_group(name);
  c10d::register_process_group(name, group);
  return name;
}

}  // namespace

void bind_functional(py::module_& module) {
  module.def("registered_name", &registered_name, py::arg("group"));
}

}  // namespace tessera::python
