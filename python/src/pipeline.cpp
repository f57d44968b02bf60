#include <tessera/error.h>
#include <tessera/nn/gradient_reduction.h>
#include <tessera/pipeline/microbatch.h>
#include <tessera/pipeline/runner.h>
#include <tessera/pipeline/simulate.h>

#include <memory>

#include <torch/csrc/Exceptions.h>

#include "bindings.h"

namespace tessera::python {

namespace {

using Tensors = PipelineStage::Tensors;

/// A Python function that may be copied, called and destroyed by threads that do not hold the GIL.
template <class Result, class... Arguments>
std::function<Result(Arguments...)> without_gil(py::function function) {
  const std::shared_ptr<py::function> shared(new py::function(std::move(function)),
                                             [](py::function* pointer) {
                                               const py::gil_scoped_acquire acquire;
                                               delete pointer;
                                             });
  return [shared](Arguments... arguments) {
    const py::gil_scoped_acquire acquire;
    return (*shared)(arguments...).template cast<Result>();
  };
}

PipelineTable table_of(std::string name, int64_t microbatches, std::vector<int64_t> rank_of_stage,
                       const std::vector<std::vector<std::string>>& actions, bool has_backward) {
  PipelineTable table;
  table.name = std::move(name);
  table.microbatches = microbatches;
  table.rank_of_stage = std::move(rank_of_stage);
  table.has_backward = has_backward;
  for (const auto& of_rank : actions) {
    auto& parsed = table.actions.emplace_back();
    for (const std::string& action : of_rank) parsed.push_back(PipelineAction::parse(action));
  }
  return table;
}

std::vector<std::vector<std::string>> actions_of(const PipelineTable& table) {
  std::vector<std::vector<std::string>> result;
  for (const auto& of_rank : table.actions) {
    auto& texts = result.emplace_back();
    for (const PipelineAction& action : of_rank) texts.push_back(action.str());
  }
  return result;
}

void bind_tables(py::module_& module) {
  py::class_<PipelineSimulation>(module, "PipelineSimulation", "What happens if a table runs.")
      .def_readonly("starts", &PipelineSimulation::starts, "When each action begins, by rank.")
      .def_readonly("time", &PipelineSimulation::time, "When the last rank is done.")
      .def_readonly("busy", &PipelineSimulation::busy, "How long each rank computes.")
      .def_readonly("peak_live", &PipelineSimulation::peak_live,
                    "How many (stage, micro-batch) each rank keeps the activations of, at most.")
      .def_property_readonly("bubble", &PipelineSimulation::bubble,
                             "The share of the time in which ranks wait.");
  py::class_<PipelineTable>(module, "PipelineTable",
                            "What each rank of a pipeline does, in order. Actions are written as PyTorch "
                            "writes them: \"1F0\", \"1SEND_F0\".")
      .def(py::init(&table_of), py::arg("name"), py::arg("microbatches"), py::arg("rank_of_stage"),
           py::arg("actions"), py::arg("has_backward") = true)
      .def_static("gpipe", &PipelineTable::gpipe, py::arg("stages"), py::arg("microbatches"))
      .def_static("one_f_one_b", &PipelineTable::one_f_one_b, py::arg("stages"), py::arg("microbatches"))
      .def_static("interleaved_1f1b", &PipelineTable::interleaved_1f1b, py::arg("ranks"),
                  py::arg("stages_per_rank"), py::arg("microbatches"))
      .def_readonly("name", &PipelineTable::name, "What it is called.")
      .def_readonly("microbatches", &PipelineTable::microbatches, "How many there are.")
      .def_readonly("rank_of_stage", &PipelineTable::rank_of_stage, "The rank of each stage.")
      .def_readonly("has_backward", &PipelineTable::has_backward, "Whether it computes gradients.")
      .def_property_readonly("actions", &actions_of, "By rank.")
      .def("with_messages", &PipelineTable::with_messages,
           "The same with the messages that its forwards and backwards need.")
      .def("without_backward", &PipelineTable::without_backward, "Its forwards alone.")
      .def(
          "check", [](const PipelineTable& table) { check(table); },
          "Raise, with what is wrong, unless it can run.")
      .def(
          "simulate",
          [](const PipelineTable& table, int64_t forward, int64_t backward) {
            return simulate(table, {forward, backward});
          },
          py::arg("forward") = 1, py::arg("backward") = 1)
      .def(
          "grid",
          [](const PipelineTable& table, int64_t forward, int64_t backward) {
            return grid(table, {forward, backward});
          },
          py::arg("forward") = 1, py::arg("backward") = 1)
      .def(
          "__eq__", [](const PipelineTable& a, const PipelineTable& b) { return a == b; }, py::is_operator())
      .def("__repr__", &PipelineTable::str);
}

void bind_stages(py::module_& module) {
  py::class_<PipelineStage>(module, "PipelineStage")
      .def(py::init([](py::function forward, py::function reductions, py::function parameters, int64_t index,
                       int64_t count, const DeviceMesh& mesh) {
             return PipelineStage(
                 without_gil<Tensors, const Tensors&, int64_t>(std::move(forward)),
                 without_gil<std::vector<std::shared_ptr<GradientReduction>>>(std::move(reductions)), index,
                 count, mesh, without_gil<Tensors>(std::move(parameters)));
           }),
           py::arg("forward"), py::arg("reductions"), py::arg("parameters"), py::arg("stage_index"),
           py::arg("num_stages"), py::arg("mesh"));
  py::class_<PipelineBatch>(module, "PipelineBatch")
      .def(py::init<>())
      .def_readwrite("inputs", &PipelineBatch::inputs)
      .def_readwrite("samples", &PipelineBatch::samples)
      .def_readwrite("input_rule", &PipelineBatch::input_rule)
      .def_readwrite("target_rule", &PipelineBatch::target_rule)
      .def_readwrite("is_mean", &PipelineBatch::is_mean)
      .def_readwrite("return_outputs", &PipelineBatch::return_outputs)
      .def(
          "set_loss",
          [](PipelineBatch& batch, py::function loss) {
            batch.loss = without_gil<at::Tensor, const Tensors&, int64_t>(std::move(loss));
          },
          py::arg("loss"));
}

/// `prepare` makes the batch. If it throws on one rank, all of them refuse the step.
py::tuple run(PipelineRunner& runner, const py::function& prepare) {
  PipelineBatch batch;
  try {
    batch = prepare().cast<PipelineBatch>();
  } catch (...) {
    batch.refusal = std::current_exception();
  }
  PipelineResult result;
  try {
    const py::gil_scoped_release release;
    result = runner.run(batch);
  } catch (python_error& error) {  // of a backward that is written in Python
    error.restore();
    throw py::error_already_set();
  }
  return py::make_tuple(result.losses, result.outputs);
}

}  // namespace

void bind_pipeline(py::module_& module) {
  bind_tables(module);
  bind_stages(module);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<PipelineRunner>(module, "PipelineRunner")
      .def(py::init<std::vector<PipelineStage>, PipelineTable>(), py::arg("stages"), py::arg("table"),
           Release())
      .def_property_readonly("has_first", &PipelineRunner::has_first)
      .def_property_readonly("has_last", &PipelineRunner::has_last)
      .def("run", &run, py::arg("prepare"));
  module.def("split_microbatches", &split_microbatches, py::arg("batch"), py::arg("count"), Release());
  module.def("split_rule", &split_rule, py::arg("batch"), py::arg("count"));
}

}  // namespace tessera::python
