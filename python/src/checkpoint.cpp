#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/local_boxes.h>
#include <tessera/error.h>

#include <memory>
#include <unordered_set>

#include "bindings.h"

namespace tessera::python {

namespace {

using checkpoint::LoadOptions;
using checkpoint::SaveOptions;
using checkpoint::StateDict;
using checkpoint::Value;

/// So that a state dict that contains itself is an error.
class Nested {
 public:
  Nested() {
    if (Py_EnterRecursiveCall(" in a state dict") != 0) throw py::error_already_set();
  }
  ~Nested() { Py_LeaveRecursiveCall(); }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
};

bool is_mapping(py::handle object) {
  return PyDict_Check(object.ptr()) ||
         py::isinstance(object, py::module_::import("collections.abc").attr("Mapping"));
}

bool is_sequence(py::handle object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); }

py::list items_of(py::handle mapping) {
  auto items = py::reinterpret_steal<py::list>(PyMapping_Items(mapping.ptr()));
  if (!items) throw py::error_already_set();
  return items;
}

std::string text_of(py::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!data) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

std::string type_name(py::handle object) { return py::type::of(object).attr("__name__").cast<std::string>(); }

/// A state dict of Python as one of C++, and what was loaded back into it. Its parts are used with Python's lock.
class PythonState {
 public:
  /// `adopt` makes a tensor of ours, on the same memory, of one whose class is Python's.
  PythonState(py::handle state, py::handle adopt) : state_(state), adopt_(adopt) {}

  Value read() const {
    TESSERA_CHECK_AS(c10::TypeError, is_mapping(state_), "A state dict must be a dict, got ",
                     type_name(state_), ".");
    return to_value(state_, "");
  }

  /// Puts what differs from the state into it.
  void write(const Value& values) const { updated(state_, values); }

 private:
  std::string key_text(py::handle key, const std::string& where) const {
    if (PyUnicode_Check(key.ptr())) return text_of(key);
    TESSERA_CHECK_AS(c10::TypeError, PyLong_Check(key.ptr()) && !PyBool_Check(key.ptr()),
                     "The state dict has a key of type ", type_name(key), " below '", where,
                     "'. Keys are str or int.");
    return text_of(py::str(key));
  }

  Value to_value(py::handle object, const std::string& where) const {
    const Nested nested;
    PyObject* pointer = object.ptr();
    if (object.is_none()) return {};
    if (PyBool_Check(pointer)) return object.cast<bool>();
    if (THPVariable_Check(pointer)) return to_tensor(object, where);
    if (PyLong_Check(pointer)) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(pointer, &overflow);
      TESSERA_CHECK_VALUE(overflow == 0, "The int at '", where,
                          "' of the state dict does not fit into 64 bits.");
      return value;
    }
    if (PyFloat_Check(pointer)) return PyFloat_AsDouble(pointer);
    if (PyUnicode_Check(pointer)) return text_of(object);
    if (PyBytes_Check(pointer)) return checkpoint::Bytes{object.cast<py::bytes>()};
    const std::string below = where.empty() ? "" : where + ".";
    if (is_sequence(object)) {
      Value::List items;
      for (const py::handle item : object)
        items.push_back(to_value(item, below + std::to_string(items.size())));
      return Value::list(std::move(items));
    }
    TESSERA_CHECK_AS(c10::TypeError, is_mapping(object), "The state dict has a ", type_name(object), " at '",
                     where,
                     "'. Checkpoints hold tensors, None, bool, int, float, str, bytes, and dicts, lists and "
                     "tuples of these: convert it, or leave it out.");
    Value dict = Value::dict();
    std::unordered_set<std::string> keys;
    for (const py::handle item : items_of(object)) {
      const auto pair = py::reinterpret_borrow<py::tuple>(item);
      std::string key = key_text(pair[0], where);
      TESSERA_CHECK_VALUE(keys.insert(key).second, "The state dict has the keys ", key, " and '", key,
                          "' below '", where, "'. Int keys are saved as text: rename one of them.");
      Value value = to_value(pair[1], below + key);
      dict.entries().push_back({std::move(key), std::move(value)});
    }
    return dict;
  }

  Value to_tensor(py::handle object, const std::string& where) const {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
    const py::object ours = adopt_(object);
    TESSERA_CHECK_AS(c10::TypeError, !ours.is_none(), "The state dict has a tensor of the class ",
                     type_name(object), " at '", where,
                     "', which is neither plain nor distributed by tessera or torch.distributed.tensor.");
    return THPVariable_Unpack(ours.ptr());
  }

  /// The object with what was loaded: itself where it can be changed, or did not change.
  py::object updated(py::handle object, const Value& value) const {
    const auto same = py::reinterpret_borrow<py::object>(object);
    if (value.is_tensor()) return same;
    if (is_mapping(object) && value.is_dict() && py::len(object) == value.size()) {
      // Entries are loaded in their places: only leaves are replaced, and an empty dict is one.
      size_t position = 0;
      for (const py::handle item : items_of(object)) {
        const auto pair = py::reinterpret_borrow<py::tuple>(item);
        const py::object before = pair[1];
        const py::object loaded = updated(before, value.entries()[position++].value);
        if (!loaded.is(before)) same[pair[0]] = loaded;
      }
      return same;
    }
    if (is_sequence(object) && value.is_list()) {
      py::list items;
      bool is_changed = py::len(object) != value.size();
      for (const Value& item : value.items()) {
        const size_t position = items.size();
        const bool is_known = position < py::len(object);
        const py::object before = is_known ? same[py::int_(position)] : py::object(py::none());
        const py::object loaded = is_known ? updated(before, item) : from_value(item);
        is_changed = is_changed || !loaded.is(before);
        items.append(loaded);
      }
      if (!is_changed) return same;
      if (PyList_Check(object.ptr())) {
        if (PyList_SetSlice(object.ptr(), 0, PyList_GET_SIZE(object.ptr()), items.ptr()) != 0)
          throw py::error_already_set();
        return same;
      }
      const py::type type = py::type::of(object);
      return py::hasattr(type, "_make") ? type.attr("_make")(items)
                                        : type(items);  // a namedtuple, or another
    }
    return to_value(object, "") == value ? same : from_value(value);
  }

 public:
  static py::object from_value(const Value& value) {
    struct Convert {
      py::object operator()(std::monostate) const { return py::none(); }
      py::object operator()(const at::Tensor& tensor) const { return py::cast(tensor); }
      py::object operator()(bool content) const { return py::bool_(content); }
      py::object operator()(int64_t content) const { return py::int_(content); }
      py::object operator()(double content) const { return py::float_(content); }
      py::object operator()(const std::string& content) const { return py::str(content); }
      py::object operator()(const checkpoint::Bytes& content) const { return py::bytes(content.data); }
      py::object operator()(const Value::List& content) const {
        py::list list;
        for (const Value& item : content) list.append(from_value(item));
        return list;
      }
      py::object operator()(const Value::Dict& content) const {
        py::dict dict;
        for (const Value::Entry& entry : content) dict[py::str(entry.key)] = from_value(entry.value);
        return dict;
      }
    };
    return std::visit(Convert{}, value.content());
  }

 private:
  py::handle state_;
  py::handle adopt_;
};

/// A function that is called, and let go of, with Python's lock.
checkpoint::ProgressCallback to_progress(const py::object& function) {
  if (function.is_none()) return {};
  const std::shared_ptr<PyObject> held(function.inc_ref().ptr(), [](PyObject* object) {
    if (!Py_IsInitialized()) return;  // the process ends
    const py::gil_scoped_acquire acquire;
    Py_DECREF(object);
  });
  return [held](const checkpoint::Progress& progress) {
    const py::gil_scoped_acquire acquire;
    py::handle(held.get())(std::string(progress.phase), progress.bytes, progress.total);
  };
}

SaveOptions save_options(const std::string& format, int64_t keep_last, int64_t file_limit,
                         const py::object& progress) {
  SaveOptions options;
  if (format == "huggingface") {
    options.format = checkpoint::Format::HuggingFace;
  } else if (format == "dcp") {
    options.format = checkpoint::Format::DCP;
  } else {
    TESSERA_CHECK_VALUE(format == "tessera",
                        "save: the format is \"tessera\", \"huggingface\" or \"dcp\", got \"", format, "\".");
  }
  options.keep_last = keep_last;
  options.file_limit = file_limit;
  options.progress = to_progress(progress);
  return options;
}

LoadOptions load_options(bool strict, const std::string& verify, const py::object& progress) {
  LoadOptions options;
  options.strict = strict;
  if (verify == "while_loading") {
    options.verify = checkpoint::Verify::WhileLoading;
  } else if (verify == "never") {
    options.verify = checkpoint::Verify::Never;
  } else {
    TESSERA_CHECK_VALUE(verify == "first",
                        "load: verify is \"first\", \"while_loading\" or \"never\", got \"", verify, "\".");
  }
  options.progress = to_progress(progress);
  return options;
}

/// Reads the state while ranks save together, so that what is wrong with it on one of them is an error on all.
StateDict state_to_save(const PythonState& state) {
  StateDict result;
  result.before_save([&state](Value& values) {
    const py::gil_scoped_acquire acquire;
    values = state.read();
  });
  return result;
}

void save(py::handle state, py::handle adopt, const std::string& path, const std::string& format,
          int64_t keep_last, int64_t file_limit, const py::object& progress) {
  const SaveOptions options = save_options(format, keep_last, file_limit, progress);
  const PythonState python(state, adopt);
  const py::gil_scoped_release release;
  checkpoint::save(state_to_save(python), path, options);
}

checkpoint::PendingSave async_save(py::handle state, py::handle adopt, const std::string& path,
                                   const std::string& format, int64_t keep_last, int64_t file_limit,
                                   const py::object& progress) {
  const SaveOptions options = save_options(format, keep_last, file_limit, progress);
  const PythonState python(state, adopt);
  const py::gil_scoped_release release;
  return checkpoint::async_save(state_to_save(python), path, options);
}

checkpoint::LoadReport load(py::handle state, py::handle adopt, const std::string& path, bool strict,
                            const std::string& verify, const py::object& progress) {
  const LoadOptions options = load_options(strict, verify, progress);
  const PythonState python(state, adopt);
  StateDict values;
  values.before_load([&python](Value& read, const std::vector<std::string>&) {
    const py::gil_scoped_acquire acquire;
    read = python.read();
  });
  values.on_load([&python](const Value& loaded) {
    const py::gil_scoped_acquire acquire;
    python.write(loaded);
  });
  const py::gil_scoped_release release;
  return checkpoint::load(values, path, options);
}

py::object load_full(const std::string& path, const std::string& verify, const py::object& progress) {
  const LoadOptions options = load_options(true, verify, progress);
  const Value values = [&] {
    const py::gil_scoped_release release;
    return checkpoint::load(path, options);
  }();
  return PythonState::from_value(values);
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<checkpoint::PendingSave>(module, "PendingSave", "A save under way.")
      .def("wait", &checkpoint::PendingSave::wait, Release(),
           "Return when the checkpoint is on the disk. Raises if it failed, on any rank.")
      .def("done", &checkpoint::PendingSave::is_done, "Whether wait() would return at once.");
  module.def("save_checkpoint", &save, py::arg("state"), py::arg("adopt"), py::arg("path"), py::arg("format"),
             py::arg("keep_last"), py::arg("file_limit"), py::arg("progress"));
  module.def("async_save_checkpoint", &async_save, py::arg("state"), py::arg("adopt"), py::arg("path"),
             py::arg("format"), py::arg("keep_last"), py::arg("file_limit"), py::arg("progress"));
  module.def(
      "load_checkpoint",
      [](py::handle state, py::handle adopt, const std::string& path, bool strict, const std::string& verify,
         const py::object& progress) {
        const auto report = load(state, adopt, path, strict, verify, progress);
        return py::make_tuple(report.missing, report.unexpected);
      },
      py::arg("state"), py::arg("adopt"), py::arg("path"), py::arg("strict"), py::arg("verify"),
      py::arg("progress"));
  module.def("load_full_checkpoint", &load_full, py::arg("path"), py::arg("verify"), py::arg("progress"));
  module.def("latest_checkpoint", &checkpoint::latest, py::arg("directory"), Release());
  module.def(
      "local_boxes",
      [](const at::Tensor& tensor, const std::string& key) {
        py::list boxes;
        for (const auto& box : checkpoint::local_boxes(key, tensor).boxes)
          boxes.append(py::make_tuple(box.offsets, box.elements));
        return boxes;
      },
      py::arg("tensor"), py::arg("key"));
}

}  // namespace tessera::python
