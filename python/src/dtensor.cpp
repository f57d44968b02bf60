#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/all_to_all.h>
#include <tessera/dtensor/context_parallel.h>
#include <tessera/error.h>

#include <map>

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include "bindings.h"

namespace tessera::python {

namespace {

bool is_dtensor(py::handle object) {
  if (!THPVariable_Check(object.ptr())) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  return tensor.defined() && DTensor::is_dtensor(tensor);
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, py::handle placements, bool run_check,
                      std::optional<std::vector<int64_t>> shape, std::optional<std::vector<int64_t>> stride,
                      py::handle grad_placements) {
  DTensor::FromLocalOptions options;
  options.run_check = run_check;
  options.shape = std::move(shape);
  options.strides = std::move(stride);
  options.grad_placements = to_optional_placements(grad_placements, "from_local");
  Placements placed = to_placements(placements, "from_local");
  const py::gil_scoped_release release;
  return DTensor::from_local(local, mesh, std::move(placed), options);
}

at::Tensor redistribute(const at::Tensor& tensor, py::handle placements, bool async_op,
                        std::optional<at::ScalarType> forward_dtype,
                        std::optional<at::ScalarType> backward_dtype) {
  DTensor::RedistributeOptions options;
  options.async_op = async_op;
  options.forward_dtype = forward_dtype;
  options.backward_dtype = backward_dtype;
  options.always = true;
  Placements placed = to_placements(placements, "redistribute");
  const py::gil_scoped_release release;
  return DTensor(tensor).redistribute(std::move(placed), options);
}

at::Tensor distribute(const at::Tensor& tensor, const DeviceMesh& mesh, py::handle placements,
                      std::optional<int64_t> src_data_rank) {
  Placements placed = to_placements(placements, "distribute_tensor");
  const py::gil_scoped_release release;
  return distribute_tensor(tensor, mesh, std::move(placed), src_data_rank);
}

at::TensorOptions options_of(std::optional<at::ScalarType> dtype, at::Layout layout, bool requires_grad) {
  at::TensorOptions options = at::TensorOptions().layout(layout).requires_grad(requires_grad);
  return dtype ? options.dtype(*dtype) : options;
}

/// A guard as a context manager: it lives from __enter__ to __exit__.
template <class Guard, class... Arguments>
class Scope {
 public:
  explicit Scope(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  void enter() {
    guards_.push_back(
        std::apply([](const auto&... each) { return std::make_unique<Guard>(each...); }, arguments_));
  }
  void exit() { guards_.pop_back(); }

 private:
  std::tuple<Arguments...> arguments_;
  std::vector<std::unique_ptr<Guard>> guards_;
};
using ReplicationScope = Scope<ImplicitReplicationGuard>;
using ContextScope = Scope<ContextParallelGuard, ContextParallelOptions>;

/// Copies of distributed tensors that share memory, and are views, as those do that they are copies of.
class Copies {
 public:
  at::Tensor copy(const at::Tensor& tensor) {
    const DTensorImpl& impl = *DTensorImpl::of(DTensor(tensor));
    const at::Tensor& local = impl.local();
    const auto found = copies_.try_emplace(local.storage().unsafeGetStorageImpl()).first;
    Copy& copy = found->second;
    if (!copy.of) {
      copy.of = local.storage();
      const auto bytes = static_cast<int64_t>(local.storage().nbytes());
      const at::Tensor all = at::empty({0}, local.options().dtype(at::kByte));
      copy.storage = at::clone(at::Tensor(all).set_(local.storage(), 0, {bytes}, {1})).storage();
    }
    at::Tensor memory = at::empty({0}, local.options());
    memory.set_(copy.storage, local.storage_offset(), local.sizes(), local.strides());
    at::Tensor result = make_dtensor(std::move(memory), impl.spec());
    DTensorImpl& made = *DTensorImpl::of(result);
    made.set_storage_offset(tensor.storage_offset());
    if (copy.first.defined()) made.share_writes(*DTensorImpl::of(copy.first));
    copy.first = result;
    if (const auto& origin = impl.origin()) {
      at::Tensor base = this->copy(origin->base);
      const uint64_t writes = DTensorImpl::of(base)->writes();
      made.set_origin(std::make_shared<const DTensorImpl::Origin>(
          DTensorImpl::Origin{std::move(base), origin->write, origin->read, writes}));
    }
    return result;
  }

 private:
  struct Copy {
    c10::Storage of;  // kept, so that its address stays its own
    c10::Storage storage;
    at::Tensor first;
  };
  std::map<const c10::StorageImpl*, Copy> copies_;
};

void bind_sequences(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<ContextScope>(module, "ContextParallelScope")
      .def(py::init([](const std::string& method, bool zigzag) {
             return ContextScope(ContextParallelOptions{context_method(method), zigzag});
           }),
           py::arg("method"), py::arg("zigzag"))
      .def("enter", &ContextScope::enter)
      .def("exit", &ContextScope::exit);
  module.def("zigzag_order", &zigzag_order, py::arg("length"), py::arg("ranks"));
  module.def("to_zigzag", &to_zigzag, py::arg("tensor"), py::arg("dim"), py::arg("ranks"), Release());
  module.def("from_zigzag", &from_zigzag, py::arg("tensor"), py::arg("dim"), py::arg("ranks"), Release());
  module.def(
      "all_to_all_single",
      [](const at::Tensor& input, std::vector<int64_t> output_split_sizes,
         std::vector<int64_t> input_split_sizes, const DeviceMesh& mesh, py::handle dim) {
        const MeshDim along = to_mesh_dim(dim);
        const py::gil_scoped_release release;
        return all_to_all_single(input, std::move(output_split_sizes), std::move(input_split_sizes), mesh,
                                 along);
      },
      py::arg("input"), py::arg("output_split_sizes"), py::arg("input_split_sizes"), py::arg("mesh"),
      py::arg("dim"));
  module.def(
      "exchange_sizes",
      [](const std::vector<int64_t>& sizes, const DeviceMesh& mesh, py::handle dim) {
        const MeshDim along = to_mesh_dim(dim);
        const py::gil_scoped_release release;
        return exchange_sizes(sizes, mesh, along);
      },
      py::arg("sizes"), py::arg("mesh"), py::arg("dim"));
}

}  // namespace

void bind_dtensors(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("is_dtensor", &is_dtensor, py::arg("object"));
  module.def("from_local", &from_local, py::arg("local"), py::arg("mesh"), py::arg("placements"),
             py::arg("run_check"), py::arg("shape"), py::arg("stride"), py::arg("grad_placements"));
  module.def(
      "to_local",
      [](const at::Tensor& tensor, py::handle grad_placements) {
        auto placed = to_optional_placements(grad_placements, "to_local");
        const py::gil_scoped_release release;
        return DTensor(tensor).to_local(std::move(placed));
      },
      py::arg("tensor"), py::arg("grad_placements"));
  module.def(
      "full_tensor",
      [](const at::Tensor& tensor, py::handle grad_placements) {
        auto placed = to_optional_placements(grad_placements, "full_tensor");
        const py::gil_scoped_release release;
        return DTensor(tensor).full_tensor(std::move(placed));
      },
      py::arg("tensor"), py::arg("grad_placements"));
  module.def("redistribute", &redistribute, py::arg("tensor"), py::arg("placements"), py::arg("async_op"),
             py::arg("forward_dtype"), py::arg("backward_dtype"));
  module.def("distribute_tensor", &distribute, py::arg("tensor"), py::arg("mesh"), py::arg("placements"),
             py::arg("src_data_rank"));
  module.def(
      "placements", [](const at::Tensor& tensor) { return from_placements(DTensor(tensor).placements()); },
      py::arg("tensor"));
  module.def(
      "is_placed",
      [](const at::Tensor& tensor, py::handle placements) {
        return normalize(to_placements(placements, "distribute_tensor"), tensor.dim()) ==
               DTensor(tensor).placements();
      },
      py::arg("tensor"), py::arg("placements"));
  module.def(
      "device_mesh", [](const at::Tensor& tensor) { return DTensor(tensor).device_mesh(); },
      py::arg("tensor"));
  module.def(
      "local_tensor", [](const at::Tensor& tensor) { return DTensorImpl::of(DTensor(tensor))->local(); },
      py::arg("tensor"), Release());
  module.def(
      "flatten",
      [](const at::Tensor& tensor) {
        const auto [local, context] = DTensor(tensor).flatten();
        return std::make_pair(local, context.str());
      },
      py::arg("tensor"));
  module.def(
      "unflatten",
      [](const at::Tensor& local, const DeviceMesh& mesh, const std::string& text) -> at::Tensor {
        return DTensor::unflatten(local, DTensor::Context::parse(text, mesh));
      },
      py::arg("local"), py::arg("mesh"), py::arg("text"));
  module.def(
      "empty",
      [](const std::vector<int64_t>& size, const DeviceMesh& mesh, py::handle placements,
         std::optional<at::ScalarType> dtype, at::Layout layout, bool requires_grad) -> at::Tensor {
        return empty(size, mesh, to_placements(placements, "empty"),
                     options_of(dtype, layout, requires_grad));
      },
      py::arg("size"), py::arg("mesh"), py::arg("placements"), py::arg("dtype"), py::arg("layout"),
      py::arg("requires_grad"));
  module.def(
      "full",
      [](const std::vector<int64_t>& size, const DeviceMesh& mesh, py::handle placements,
         std::optional<at::ScalarType> dtype, at::Layout layout, bool requires_grad,
         const at::Tensor& value) -> at::Tensor {
        Placements placed = to_placements(placements, "full");
        const py::gil_scoped_release release;
        return full(size, value.item(), mesh, std::move(placed), options_of(dtype, layout, requires_grad));
      },
      py::arg("size"), py::arg("mesh"), py::arg("placements"), py::arg("dtype"), py::arg("layout"),
      py::arg("requires_grad"), py::arg("value"));

  py::class_<Copies>(module, "Copies")
      .def(py::init<>())
      .def("copy", &Copies::copy, py::arg("tensor"), Release());
  bind_sequences(module);
  py::class_<ReplicationScope>(module, "ImplicitReplicationScope")
      .def(py::init<>())
      .def("enter", &ReplicationScope::enter)
      .def("exit", &ReplicationScope::exit);

  module.def("fallback_counts", &fallback_counts);
  module.def("layout_copy_counts", &layout_copy_counts);
  module.def("dispatch_cache_statistics", [] {
    const CacheStatistics statistics = dispatch_cache_statistics();
    return py::make_tuple(statistics.hits, statistics.misses, statistics.size);
  });
}

}  // namespace tessera::python
