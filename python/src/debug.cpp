#include <tessera/comm/observer.h>
#include <tessera/dispatch/dtensor_impl.h>

#include <memory>
#include <vector>

#include "bindings.h"

namespace tessera::python {

namespace {

/// Calls a function of Python with the name and the bytes of every collective of the thread that entered it, but not
/// of agreements, which torch has none of.
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
      const py::gil_scoped_acquire acquire;
      owner_.called_(event.name, event.bytes);
    }

   private:
    const CommObserver& owner_;
  };

  py::function called_;
  std::vector<std::unique_ptr<Scope>> scopes_;
};

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
}

}  // namespace tessera::python
