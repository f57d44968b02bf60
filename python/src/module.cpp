#include <tessera/comm/blocking.h>

#include <c10/util/Exception.h>

#include "bindings.h"

namespace tessera::python {

namespace {

void raise(PyObject* type, const c10::Error& error) { PyErr_SetString(type, error.what_without_backtrace()); }

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const c10::IndexError& error) {
    raise(PyExc_IndexError, error);
  } catch (const c10::ValueError& error) {
    raise(PyExc_ValueError, error);
  } catch (const c10::TypeError& error) {
    raise(PyExc_TypeError, error);
  } catch (const c10::NotImplementedError& error) {
    raise(PyExc_NotImplementedError, error);
  } catch (const c10::Error& error) {
    raise(PyExc_RuntimeError, error);
  }
}

std::string why_endless() {
  const py::gil_scoped_acquire acquire;
  try {
    return py::module_::import("tessera._process").attr("why_endless")().cast<std::string>();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("tessera");
    return "";
  }
}

}  // namespace

}  // namespace tessera::python

PYBIND11_MODULE(_C, module) {
  using namespace tessera::python;
  module.doc() = "Tessera's C++ library, as the Python package uses it.";
  // Some operators reach us with the GIL held (indexing, for one). Waiting for another rank with it
  // would keep that rank, a thread of this process, from ever getting there.
  tessera::set_blocking_hooks({[]() -> void* { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; },
                               [](void* state) {
                                 if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
                               },
                               why_endless});
  py::register_local_exception_translator(&translate);
  bind_placements(module);
  bind_worlds(module);
  bind_meshes(module);
  bind_dtensors(module);
  bind_functional(module);
  bind_parallel(module);
  bind_pipeline(module);
  bind_rules(module);
  bind_random(module);
  bind_checkpoint(module);
  bind_sharded(module);
  bind_debug(module);
}
