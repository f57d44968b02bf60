#include <tessera/random/plain_draws.h>
#include <tessera/random/random.h>

#include <memory>
#include <vector>

#include "bindings.h"

namespace tessera::python {

namespace {

using random::Generator;

/// Draws from a stream of its own, from __enter__ to __exit__.
class StreamScope {
 public:
  explicit StreamScope(uint64_t id) : generator_(random::default_generator().fork(id)) {}
  void enter() { scopes_.push_back(std::make_unique<random::GeneratorScope>(generator_)); }
  void exit() { scopes_.pop_back(); }

 private:
  Generator generator_;
  std::vector<std::unique_ptr<random::GeneratorScope>> scopes_;
};

/// Notices plain draws of this thread, from __enter__ to __exit__, which returns the first.
class DrawsWatch {
 public:
  void enter() { watch_ = std::make_unique<random::PlainDrawsWatch>(); }
  std::string exit() {
    std::string seen = watch_->seen();
    watch_.reset();
    return seen;
  }

 private:
  std::unique_ptr<random::PlainDrawsWatch> watch_;
};

at::TensorOptions of_dtype(std::optional<at::ScalarType> dtype) {
  return dtype ? at::TensorOptions(*dtype) : at::TensorOptions();
}

/// A new distributed tensor of these options.
template <class Make>
at::Tensor made(const char* what, const Make& make, py::handle placements,
                std::optional<at::ScalarType> dtype, at::Layout layout, bool requires_grad) {
  Placements placed = to_placements(placements, what);
  const py::gil_scoped_release release;
  return make(std::move(placed), of_dtype(dtype).layout(layout).requires_grad(requires_grad));
}

}  // namespace

void bind_random(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  using Sizes = std::vector<int64_t>;
  using Dtype = std::optional<at::ScalarType>;
  module.def(
      "manual_seed",
      [](uint64_t seed, const std::optional<DeviceMesh>& mesh) {
        mesh ? random::manual_seed(seed, *mesh) : random::manual_seed(seed);
      },
      py::arg("seed"), py::arg("mesh"));
  module.def("get_rng_state", [] { return random::get_state().str(); });
  module.def(
      "set_rng_state", [](const std::string& text) { random::set_state(random::Snapshot::parse(text)); },
      py::arg("text"));
  module.def("rank_generator", &random::torch_generator);
  module.def("check_random_agreement", &random::check_agreement, py::arg("mesh"), Release());
  module.def("set_checks_random_agreement", &random::set_checks_agreement, py::arg("checks"));
  py::class_<StreamScope>(module, "RandomStreamScope")
      .def(py::init<uint64_t>(), py::arg("id"))
      .def("enter", &StreamScope::enter)
      .def("exit", &StreamScope::exit);
  py::class_<DrawsWatch>(module, "PlainDrawsWatch")
      .def(py::init<>())
      .def("enter", &DrawsWatch::enter)
      .def("exit", &DrawsWatch::exit);

  module.def(
      "rand",
      [](const Sizes& size, const DeviceMesh& mesh, py::handle placements, Dtype dtype, at::Layout layout,
         bool requires_grad) {
        return made(
            "rand", [&](Placements placed, const auto& options) { return rand(size, mesh, placed, options); },
            placements, dtype, layout, requires_grad);
      },
      py::arg("size"), py::arg("mesh"), py::arg("placements"), py::arg("dtype"), py::arg("layout"),
      py::arg("requires_grad"));
  module.def(
      "randn",
      [](const Sizes& size, const DeviceMesh& mesh, py::handle placements, Dtype dtype, at::Layout layout,
         bool requires_grad) {
        return made(
            "randn",
            [&](Placements placed, const auto& options) { return randn(size, mesh, placed, options); },
            placements, dtype, layout, requires_grad);
      },
      py::arg("size"), py::arg("mesh"), py::arg("placements"), py::arg("dtype"), py::arg("layout"),
      py::arg("requires_grad"));

  module.def(
      "plain_rand", [](const Sizes& size, Dtype dtype) { return random::rand(size, of_dtype(dtype)); },
      py::arg("size"), py::arg("dtype"), Release());
  module.def(
      "plain_randn", [](const Sizes& size, Dtype dtype) { return random::randn(size, of_dtype(dtype)); },
      py::arg("size"), py::arg("dtype"), Release());
  module.def(
      "plain_randint",
      [](int64_t low, int64_t high, const Sizes& size, Dtype dtype) {
        return random::randint(low, high, size, of_dtype(dtype));
      },
      py::arg("low"), py::arg("high"), py::arg("size"), py::arg("dtype"), Release());
  module.def(
      "plain_randperm", [](int64_t n, Dtype dtype) { return random::randperm(n, of_dtype(dtype)); },
      py::arg("n"), py::arg("dtype"), Release());
}

}  // namespace tessera::python
