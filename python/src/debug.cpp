#include <tessera/comm/observer.h>
#include <tessera/comm/world.h>
#include <tessera/debug/assert_placements.h>
#include <tessera/debug/calling_operator.h>
#include <tessera/debug/dry_run.h>
#include <tessera/debug/explain.h>
#include <tessera/debug/trace.h>
#include <tessera/debug/visualize.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/strict.h>
#include <tessera/error.h>
#include <tessera/redistribute/plan.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"

namespace tessera::python {

namespace {

/// Calls a function of Python for every collective of the thread that entered it, but not of agreements, which torch has
/// none of: with its name, its bytes, the operator that called it of its own accord or "", the ranks of its group, and the
/// mesh dim that these are along or "".
class CommObserver {
 public:
  explicit CommObserver(py::function called) : called_(std::move(called)) {}
  void enter() { scopes_.push_back(std::make_unique<Scope>(*this)); }
  void exit() { scopes_.pop_back(); }

 private:
  class Scope final : public comm::Observer {
   public:
    explicit Scope(const CommObserver& owner) : owner_(owner) {}
    void called(const comm::Event& event) override {
      if (event.is_agreement) return;
      const std::string op = calling_operator();
      const auto world = has_current_world() ? current_world() : nullptr;
      const auto ranks = world ? world->ranks_of(event.group) : std::nullopt;
      const std::string mesh_dim = world ? world->name_of(event.group) : "";
      const py::gil_scoped_acquire acquire;
      owner_.called_(event.name, event.bytes, op, ranks.value_or(std::vector<int64_t>()), mesh_dim);
    }

   private:
    const CommObserver& owner_;
  };

  py::function called_;
  std::vector<std::unique_ptr<Scope>> scopes_;
};

ImplicitCommunication to_level(const std::string& name) {
  if (name == "allow" || name == "count") return ImplicitCommunication::allowed;
  if (name == "warn") return ImplicitCommunication::warned;
  TESSERA_CHECK_VALUE(name == "forbid",
                      "Strict: the level is \"allow\", \"count\", \"warn\" or \"forbid\", got \"", name,
                      "\".");
  return ImplicitCommunication::forbidden;
}

/// A Strict as a context manager: it lives from __enter__ to __exit__.
class StrictScope {
 public:
  StrictScope(const std::string& level, bool local, std::vector<std::string> mesh_dims, int64_t above)
      : options_{
            .level = to_level(level), .local = local, .mesh_dims = std::move(mesh_dims), .above = above} {}
  void enter() { scope_ = std::make_unique<Strict>(options_); }
  /// What was counted or warned about.
  std::vector<ImplicitMove> exit() {
    const auto moves = scope_->moves();
    scope_.reset();
    return moves;
  }

 private:
  const StrictOptions options_;
  std::unique_ptr<Strict> scope_;
};

/// Where the program is, as a function of Python says it. Never destroyed: threads may outlive the interpreter.
py::function& location_function() {
  static auto& function = *new py::function;
  return function;
}

std::string location() {
  const py::gil_scoped_acquire acquire;
  try {
    return location_function()().cast<std::string>();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("tessera");
    return "";
  }
}

std::string redistribute_code(const std::string& name, const Placements& placements) {
  const py::gil_scoped_acquire acquire;
  return name + " = " + name +
         ".redistribute(placements=" + py::repr(py::list(from_placements(placements))).cast<std::string>() +
         ")";
}

/// Scopes as context managers.
class ExplainScope {
 public:
  void enter() { explain_ = std::make_unique<Explain>(); }
  std::string exit() {
    std::string text = explain_->str();
    explain_.reset();
    return text;
  }

 private:
  std::unique_ptr<Explain> explain_;
};

class TraceScope {
 public:
  explicit TraceScope(size_t capacity) : capacity_(capacity) {}
  void enter() { trace_ = std::make_unique<Trace>(TraceOptions{capacity_}); }
  void stop() { entered().stop(); }
  void drop() { trace_.reset(); }
  std::string json() { return entered().json(); }
  std::string summary() { return entered().summary(); }
  void write(const std::string& path) { entered().write(path); }

 private:
  Trace& entered() const {
    TESSERA_CHECK(trace_, "Trace: nothing was traced. Use it as a context manager first.");
    return *trace_;
  }
  const size_t capacity_;
  std::unique_ptr<Trace> trace_;
};

MemoryUse to_use(const std::string& name) {
  if (name == "parameters") return MemoryUse::parameters;
  if (name == "optimizer") return MemoryUse::optimizer;
  TESSERA_CHECK_VALUE(name == "activations", "DryRun: memory is for \"parameters\", \"activations\" or ",
                      "\"optimizer\", got \"", name, "\".");
  return MemoryUse::activations;
}

/// A DryRun as a scope of two calls.
class DryRunScope {
 public:
  DryRunScope(const std::string& mesh, int64_t rank, const std::vector<std::pair<double, double>>& links)
      : mesh_(parse_mesh(mesh)) {
    options_.rank = rank;
    for (const auto& [latency, per_byte] : links) options_.cost.links.push_back({latency, per_byte});
  }
  DeviceMesh enter() {
    run_ = std::make_unique<DryRun>(mesh_, options_);
    return run_->mesh();
  }
  void exit() { run_.reset(); }
  void set_use(const std::string& use) { run_->set_use(to_use(use)); }
  void begin_step(const std::vector<at::Tensor>& parameters) { run_->begin_step(parameters); }
  StepCost end_step(const std::vector<at::Tensor>& parameters, double more_flops) {
    StepCost cost = run_->end_step(parameters);
    cost.flops += more_flops;
    return cost;
  }

 private:
  const Layout mesh_;
  DryRunOptions options_;
  std::unique_ptr<DryRun> run_;
};

/// Of a tensor, and of its way to other placements unless that is None.
std::string picture(const at::Tensor& tensor, py::handle to, const std::string& format) {
  const PictureFormat parsed = parse_picture_format(format);
  if (to.is_none()) return visualize(tensor, parsed);
  const Spec& spec = DTensor(tensor).spec();
  return visualize(plan(spec, spec.with_placements(normalize(to_placements(to, "visualize"), tensor.dim()))),
                   parsed);
}

using Box = std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>;

/// Which elements each rank of the mesh has: its rank, where they begin, and how many along each dim. A strided shard is several boxes.
std::vector<Box> boxes(const at::Tensor& tensor) {
  const Spec& spec = DTensorImpl::of(DTensor(tensor))->spec();
  std::vector<Box> result;
  const auto ranks = spec.mesh().ranks();
  const auto coordinates = spec.mesh().coordinates();
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::vector<Box> of_rank{{ranks[i], {}, {}}};
    for (const Pieces& pieces : spec.local_pieces(coordinates[i])) {
      std::vector<Box> longer;
      for (const auto& [rank, offset, shape] : of_rank) {
        for (const Range& range : pieces) {
          longer.emplace_back(rank, offset, shape);
          std::get<1>(longer.back()).push_back(range.offset);
          std::get<2>(longer.back()).push_back(range.size);
        }
      }
      of_rank = std::move(longer);
    }
    result.insert(result.end(), of_rank.begin(), of_rank.end());
  }
  return result;
}

}  // namespace

void bind_debug(py::module_& module) {
  py::class_<CommObserver>(module, "CommObserver")
      .def(py::init<py::function>(), py::arg("called"))
      .def("enter", &CommObserver::enter)
      .def("exit", &CommObserver::exit);
  module.def("boxes", &boxes, py::arg("tensor"));
  py::class_<StrictScope>(module, "StrictScope")
      .def(py::init<const std::string&, bool, std::vector<std::string>, int64_t>(), py::arg("level"),
           py::arg("local"), py::arg("mesh_dims"), py::arg("above"))
      .def("enter", &StrictScope::enter)
      .def("exit", &StrictScope::exit);
  py::class_<ImplicitMove>(module, "ImplicitMove")
      .def_readonly("call", &ImplicitMove::call)
      .def_readonly("what", &ImplicitMove::what)
      .def_readonly("location", &ImplicitMove::location)
      .def_readonly("calls", &ImplicitMove::calls)
      .def_readonly("bytes", &ImplicitMove::bytes);
  py::class_<ExplainScope>(module, "ExplainScope")
      .def(py::init<>())
      .def("enter", &ExplainScope::enter)
      .def("exit", &ExplainScope::exit);
  py::class_<TraceScope>(module, "TraceScope")
      .def(py::init<size_t>(), py::arg("capacity"))
      .def("enter", &TraceScope::enter)
      .def("stop", &TraceScope::stop)
      .def("drop", &TraceScope::drop)
      .def("json", &TraceScope::json, py::call_guard<py::gil_scoped_release>())
      .def("summary", &TraceScope::summary, py::call_guard<py::gil_scoped_release>())
      .def("write", &TraceScope::write, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  py::class_<MemoryOfRank>(module, "MemoryOfRank")
      .def_readonly("parameters", &MemoryOfRank::parameters)
      .def_readonly("gradients", &MemoryOfRank::gradients)
      .def_readonly("optimizer", &MemoryOfRank::optimizer)
      .def_readonly("activations", &MemoryOfRank::activations)
      .def_readonly("in_flight", &MemoryOfRank::in_flight)
      .def_readonly("peak", &MemoryOfRank::peak);
  py::class_<CollectivesOfStep>(module, "CollectivesOfStep")
      .def_readonly("name", &CollectivesOfStep::name)
      .def_readonly("mesh_dims", &CollectivesOfStep::mesh_dims)
      .def_readonly("is_agreement", &CollectivesOfStep::is_agreement)
      .def_readonly("ranks", &CollectivesOfStep::ranks)
      .def_readonly("calls", &CollectivesOfStep::calls)
      .def_readonly("bytes", &CollectivesOfStep::bytes)
      .def_readonly("seconds", &CollectivesOfStep::seconds);
  py::class_<StepCost>(module, "StepCost")
      .def_readonly("mesh", &StepCost::mesh)
      .def_readonly("rank", &StepCost::rank)
      .def_readonly("memory", &StepCost::memory)
      .def_readonly("collectives", &StepCost::collectives)
      .def_readonly("flops", &StepCost::flops)
      .def_property_readonly("bytes", &StepCost::bytes)
      .def_property_readonly("communication_seconds", &StepCost::communication_seconds)
      .def("__str__", [](const StepCost& cost) { return c10::str(cost); });
  py::class_<DryRunScope>(module, "DryRunScope")
      .def(py::init<const std::string&, int64_t, const std::vector<std::pair<double, double>>&>(),
           py::arg("mesh"), py::arg("rank"), py::arg("links"))
      .def("enter", &DryRunScope::enter)
      .def("exit", &DryRunScope::exit)
      .def("set_use", &DryRunScope::set_use, py::arg("use"))
      .def("begin_step", &DryRunScope::begin_step, py::arg("parameters"))
      .def("end_step", &DryRunScope::end_step, py::arg("parameters"), py::arg("more_flops"));
  module.def(
      "parse_mesh",
      [](const std::string& text) {
        const Layout layout = parse_mesh(text);
        return std::pair(layout.mesh_dim_names,
                         std::vector<int64_t>(layout.mesh_shape.begin(), layout.mesh_shape.end()));
      },
      py::arg("text"));
  module.def(
      "explain",
      [](const std::string& call, const std::string& mesh) {
        const py::gil_scoped_release release;
        return mesh.empty() ? explain(call) : explain(call, parse_mesh(mesh));
      },
      py::arg("call"), py::arg("mesh"));
  module.def("picture", &picture, py::arg("tensor"), py::arg("to"), py::arg("format"));
  module.def(
      "picture_of_text",
      [](const std::string& spec, const std::string& to, const std::string& format) {
        return visualize_text(spec, to, parse_picture_format(format));
      },
      py::arg("spec"), py::arg("to"), py::arg("format"));
  module.def(
      "assert_placements",
      [](const at::Tensor& tensor, py::handle placements) {
        assert_placements(tensor, to_placements(placements, "assert_placements"));
      },
      py::arg("tensor"), py::arg("placements"));
  module.def(
      "set_location_function",
      [](py::function function) {
        location_function() = std::move(function);
        set_host_language({location, redistribute_code});
      },
      py::arg("function"));
}

}  // namespace tessera::python
