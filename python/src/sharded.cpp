#include <tessera/error.h>
#include <tessera/sharded/bridge.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/validate.h>

#include <chrono>
#include <functional>
#include <memory>

#include "bindings.h"

namespace tessera::python {

namespace {

using sharded::LocalShard;
using sharded::RemoteDevice;
using sharded::ShardedTensorMetadata;
using sharded::ShardingSpecPtr;
using sharded::ShardMetadata;
using sharded::TensorProperties;

py::object class_of(const char* module, const char* name) { return py::module_::import(module).attr(name); }

/// An object that threads without Python's lock may let go of.
std::shared_ptr<PyObject> held(const py::object& object) {
  return {object.inc_ref().ptr(), [](PyObject* pointer) {
            if (!Py_IsInitialized()) return;  // the process ends
            const py::gil_scoped_acquire acquire;
            Py_DECREF(pointer);
          }};
}

// --- values: dataclasses in Python, which programs change in place, and structs in C++

std::optional<RemoteDevice> to_placement_of_shard(py::handle object) {
  if (object.is_none()) return std::nullopt;
  return RemoteDevice(py::str(object).cast<std::string>());
}

py::object from_remote_device(const std::optional<RemoteDevice>& device) {
  if (!device) return py::none();
  return class_of("torch.distributed", "_remote_device")(device->str());
}

ShardMetadata to_shard_metadata(py::handle object) {
  return {object.attr("shard_offsets").cast<std::vector<int64_t>>(),
          object.attr("shard_sizes").cast<std::vector<int64_t>>(),
          to_placement_of_shard(object.attr("placement"))};
}

py::object from_shard_metadata(const ShardMetadata& shard) {
  return class_of("tessera.sharded.metadata", "ShardMetadata")(shard.shard_offsets, shard.shard_sizes,
                                                               from_remote_device(shard.placement));
}

std::vector<ShardMetadata> to_shards(py::handle objects) {
  std::vector<ShardMetadata> result;
  for (const py::handle each : objects) result.push_back(to_shard_metadata(each));
  return result;
}

py::list from_shards(const std::vector<ShardMetadata>& shards) {
  py::list result;
  for (const ShardMetadata& shard : shards) result.append(from_shard_metadata(shard));
  return result;
}

TensorProperties to_properties(py::handle object) {
  TensorProperties result;
  result.dtype = object.attr("dtype").cast<at::ScalarType>();
  result.layout = object.attr("layout").cast<at::Layout>();
  result.requires_grad = object.attr("requires_grad").cast<bool>();
  result.memory_format = object.attr("memory_format").cast<at::MemoryFormat>();
  result.pin_memory = object.attr("pin_memory").cast<bool>();
  return result;
}

py::object from_properties(const TensorProperties& properties) {
  return class_of("tessera.sharded.sharded_tensor.metadata", "TensorProperties")(
      properties.dtype, properties.layout, properties.requires_grad, properties.memory_format,
      properties.pin_memory);
}

ShardedTensorMetadata to_metadata(py::handle object) {
  ShardedTensorMetadata result;
  result.shards_metadata = to_shards(object.attr("shards_metadata"));
  result.size = object.attr("size").cast<std::vector<int64_t>>();
  result.tensor_properties = to_properties(object.attr("tensor_properties"));
  return result;
}

py::object from_metadata(const ShardedTensorMetadata& metadata) {
  const py::object size = class_of("torch", "Size")(metadata.size);
  return class_of("tessera.sharded.sharded_tensor.metadata", "ShardedTensorMetadata")(
      from_shards(metadata.shards_metadata), size, from_properties(metadata.tensor_properties));
}

std::vector<LocalShard> to_local_shards(py::handle objects) {
  std::vector<LocalShard> result;
  for (const py::handle each : objects) {
    // Not checked here: what is wrong with a shard is then said to all ranks.
    LocalShard shard;
    shard.tensor = each.attr("tensor").cast<at::Tensor>();
    shard.metadata = to_shard_metadata(each.attr("metadata"));
    result.push_back(std::move(shard));
  }
  return result;
}

/// A torch.distributed.ProcessGroup, a list of global ranks, or None for all ranks.
sharded::Ranks to_members(py::handle object) {
  ensure_world();
  if (object.is_none()) return {};
  if (py::isinstance<py::sequence>(object)) return object.cast<std::vector<int64_t>>();
  const Group group = to_group(object);
  if (current_world()->is_threads()) return group;
  return {group,
          class_of("torch.distributed", "get_process_group_ranks")(object).cast<std::vector<int64_t>>()};
}

// --- specs

/// A spec of the user's, in Python.
class PythonSpec final : public sharded::ShardingSpec {
 public:
  explicit PythonSpec(const py::object& spec) : spec_(held(spec)) {}

  py::object object() const { return py::reinterpret_borrow<py::object>(spec_.get()); }

  ShardedTensorMetadata build_metadata(c10::IntArrayRef size,
                                       const TensorProperties& properties) const override {
    const py::gil_scoped_acquire acquire;
    return to_metadata(
        object().attr("build_metadata")(class_of("torch", "Size")(size.vec()), from_properties(properties)));
  }

  std::string str() const override {
    const py::gil_scoped_acquire acquire;
    const auto type = py::type::of(object());
    return c10::str(type.attr("__module__").cast<std::string>(), ".",
                    type.attr("__qualname__").cast<std::string>(), ": ",
                    py::repr(object()).cast<std::string>());
  }

  ShardingSpecPtr clone() const override { return std::make_shared<const PythonSpec>(*this); }

  ShardedTensor shard(const at::Tensor& tensor, int64_t src_rank,
                      const sharded::Ranks& process_group) const override;

 private:
  std::shared_ptr<PyObject> spec_;
};

ShardedTensor PythonSpec::shard(const at::Tensor& tensor, int64_t src_rank,
                                const sharded::Ranks& process_group) const {
  const py::gil_scoped_acquire acquire;
  const py::object own = py::type::of(object()).attr("shard");
  if (own.is(class_of("tessera.sharded.sharding_spec.api", "ShardingSpec").attr("shard"))) {
    const py::gil_scoped_release release;
    return ShardingSpec::shard(tensor, src_rank, process_group);
  }
  const sharded::Members members(process_group, tensor.device().type());
  const py::object group = members.is_member() ? from_group(members.group()) : py::none();
  const py::object result =
      object().attr("shard")(tensor, py::arg("src_rank") = src_rank, py::arg("process_group") = group);
  return result.cast<at::Tensor>();
}

ShardingSpecPtr to_spec(const py::object& object) {
  const py::type type = py::type::of(object);
  const auto name = type.attr("__name__").cast<std::string>();
  const auto module = type.attr("__module__").cast<std::string>();
  const bool is_known =
      module.rfind("tessera.sharded.", 0) == 0 || module.rfind("torch.distributed._shard.", 0) == 0;
  if (is_known && name == "ChunkShardingSpec") {
    std::vector<RemoteDevice> placements;
    for (const py::handle each : object.attr("placements"))
      placements.emplace_back(py::str(each).cast<std::string>());
    return std::make_shared<const sharded::ChunkShardingSpec>(object.attr("dim").cast<int64_t>(),
                                                              std::move(placements));
  }
  if (is_known && name == "EnumerableShardingSpec")
    return std::make_shared<const sharded::EnumerableShardingSpec>(to_shards(object.attr("shards")));
  TESSERA_CHECK_VALUE(py::hasattr(object, "build_metadata"), "Expected a ShardingSpec, got a ", name, ".");
  return std::make_shared<const PythonSpec>(object);
}

py::object from_spec(const sharded::ShardingSpec& spec) {
  constexpr const char* module = "tessera.sharded.sharding_spec";
  if (const auto* chunks = dynamic_cast<const sharded::ChunkShardingSpec*>(&spec)) {
    py::list placements;
    for (const RemoteDevice& placement : chunks->placements())
      placements.append(from_remote_device(placement));
    return class_of(module, "ChunkShardingSpec")(chunks->dim(), placements);
  }
  if (const auto* python = dynamic_cast<const PythonSpec*>(&spec)) return python->object();
  const auto* boxes = dynamic_cast<const sharded::EnumerableShardingSpec*>(&spec);
  TESSERA_CHECK(boxes, "There is no class in Python for the sharding spec ", spec, ".");
  return class_of(module, "EnumerableShardingSpec")(from_shards(boxes->shards()));
}

// --- making tensors

at::Tensor make_sharded(const std::string& name, const py::object& spec, const std::vector<int64_t>& size,
                        const at::Tensor& value, std::optional<at::ScalarType> dtype, at::Layout layout,
                        bool requires_grad, bool pin_memory, at::MemoryFormat memory_format,
                        const py::object& process_group, bool init_rrefs) {
  const ShardingSpecPtr known = to_spec(spec);
  sharded::Options options;
  options.dtype = dtype;
  options.layout = layout;
  options.requires_grad = requires_grad;
  options.pin_memory = pin_memory;
  options.memory_format = memory_format;
  options.process_group = to_members(process_group);
  options.init_rrefs = init_rrefs;
  const py::gil_scoped_release release;
  if (name == "empty") return sharded::empty(*known, size, options);
  if (name == "full") return sharded::full(*known, size, value.item(), options);
  if (name == "rand") return sharded::rand(*known, size, options);
  TESSERA_CHECK_VALUE(name == "randn", "There is no factory \"", name, "\".");
  return sharded::randn(*known, size, options);
}

sharded::InitOptions init_options(const py::object& process_group, bool init_rrefs) {
  sharded::InitOptions options;
  options.process_group = to_members(process_group);
  options.init_rrefs = init_rrefs;
  return options;
}

at::Tensor from_local_shards(py::handle shards, std::vector<std::optional<int64_t>> size,
                             const py::object& process_group, bool init_rrefs) {
  std::vector<LocalShard> local_shards = to_local_shards(shards);
  const auto options = init_options(process_group, init_rrefs);
  std::vector<int64_t> sizes;
  for (const auto& each : size) sizes.push_back(each.value_or(sharded::kUnknownSize));
  const py::gil_scoped_release release;
  return sharded::init_from_local_shards(std::move(local_shards), sizes, options);
}

at::Tensor from_local_tensor(const at::Tensor& tensor, const py::object& spec,
                             const std::vector<int64_t>& size, const py::object& process_group,
                             bool init_rrefs) {
  const ShardingSpecPtr known = to_spec(spec);
  const auto options = init_options(process_group, init_rrefs);
  const py::gil_scoped_release release;
  return sharded::init_from_local_tensor(tensor, *known, size, options);
}

at::Tensor from_global_metadata(py::handle shards, py::handle metadata, const py::object& process_group,
                                bool init_rrefs, const py::object& spec) {
  std::vector<LocalShard> local_shards = to_local_shards(shards);
  ShardedTensorMetadata known = to_metadata(metadata);
  const auto options = init_options(process_group, init_rrefs);
  const ShardingSpecPtr how = spec.is_none() ? nullptr : to_spec(spec);
  const py::gil_scoped_release release;
  return sharded::init_from_local_shards_and_global_metadata(std::move(local_shards), std::move(known),
                                                             options, how);
}

at::Tensor shard_tensor_by(const at::Tensor& tensor, const py::object& spec, int64_t src_rank,
                           const py::object& process_group, bool is_checked) {
  const ShardingSpecPtr known = to_spec(spec);
  const sharded::Ranks ranks = to_members(process_group);
  const py::gil_scoped_release release;
  if (is_checked) return sharded::shard_tensor(tensor, *known, src_rank, ranks);
  return known->sharded::ShardingSpec::shard(tensor, src_rank, ranks);
}

// --- what is known of one

bool is_sharded_tensor(py::handle object) {
  if (!THPVariable_Check(object.ptr())) return false;
  return ShardedTensor::is_sharded_tensor(THPVariable_Unpack(object.ptr()));
}

py::object group_of(const at::Tensor& tensor) {
  const sharded::Members& members = ShardedTensor(tensor).process_group();
  if (!members.is_member()) return class_of("torch.distributed", "GroupMember").attr("NON_GROUP_MEMBER");
  return from_group(members.group());
}

py::list local_shards_of(const at::Tensor& tensor) {
  py::list result;
  for (const LocalShard& shard : ShardedTensor(tensor).local_shards())
    result.append(py::make_tuple(shard.tensor, from_shard_metadata(shard.metadata)));
  return result;
}

py::dict remote_shards_of(const at::Tensor& tensor) {
  py::dict result;
  for (const auto& [rank, shards] : ShardedTensor(tensor).remote_shards()) {
    py::list of_rank;
    for (const sharded::RemoteShard& shard : shards) of_rank.append(py::cast(shard));
    result[py::int_(rank)] = of_rank;
  }
  return result;
}

// --- moving data

py::object gather_sharded(const at::Tensor& tensor, int64_t dst, std::optional<at::Tensor> out,
                          bool enforce_dtype, std::optional<at::ScalarType> dtype) {
  ShardedTensor::GatherOptions options;
  if (out) options.out = *out;
  options.enforce_dtype = enforce_dtype;
  options.dtype = dtype;
  at::Tensor result;
  {
    const py::gil_scoped_release release;
    result = ShardedTensor(tensor).gather(dst, options);
  }
  return result.defined() ? py::cast(result) : py::none();
}

at::Tensor moved_to(const at::Tensor& tensor, std::optional<at::Device> device,
                    std::optional<at::ScalarType> dtype, bool non_blocking, bool copy,
                    at::MemoryFormat memory_format, const py::object& process_group) {
  ShardedTensor::ToOptions options;
  options.device = device;
  options.dtype = dtype;
  options.non_blocking = non_blocking;
  options.copy = copy;
  options.memory_format = memory_format;
  if (!process_group.is_none()) options.process_group = to_members(process_group);
  const py::gil_scoped_release release;
  return ShardedTensor(tensor).to(options);
}

void set_sharded_log_handler(const py::object& handler) {
  std::function<void(const sharded::LogEvent&)> call;
  if (!handler.is_none()) {
    call = [function = held(handler)](const sharded::LogEvent& event) {
      const py::gil_scoped_acquire acquire;
      py::handle(function.get())(event.call, event.rank, event.detail);
    };
  }
  const py::gil_scoped_release release;
  sharded::set_log_handler(std::move(call));
}

void bind_values(py::module_& module) {
  module.def(
      "build_sharded_metadata",
      [](const py::object& spec, const std::vector<int64_t>& size, py::handle properties) {
        return from_metadata(to_spec(spec)->build_metadata(size, to_properties(properties)));
      },
      py::arg("spec"), py::arg("size"), py::arg("properties"));
  module.def(
      "validate_non_overlapping_shards",
      [](py::handle shards) { sharded::validate_non_overlapping_shards_metadata(to_shards(shards)); },
      py::arg("shards"));
  module.def(
      "check_shards_cover",
      [](py::handle shards, const std::vector<int64_t>& size) {
        sharded::check_tensor(to_shards(shards), size);
      },
      py::arg("shards"), py::arg("size"));
  module.def(
      "infer_sharding_spec",
      [](py::handle shards) { return from_spec(*sharded::infer_sharding_spec(to_shards(shards))); },
      py::arg("shards"));
  module.def(
      "check_shard",
      [](const at::Tensor& tensor, py::handle metadata) { LocalShard(tensor, to_shard_metadata(metadata)); },
      py::arg("tensor"), py::arg("metadata"));
}

void bind_making(py::module_& module) {
  module.def("make_sharded", &make_sharded, py::arg("name"), py::arg("spec"), py::arg("size"),
             py::arg("value"), py::arg("dtype"), py::arg("layout"), py::arg("requires_grad"),
             py::arg("pin_memory"), py::arg("memory_format"), py::arg("process_group"),
             py::arg("init_rrefs"));
  module.def("sharded_from_local_shards", &from_local_shards, py::arg("local_shards"), py::arg("size"),
             py::arg("process_group"), py::arg("init_rrefs"));
  module.def("sharded_from_local_tensor", &from_local_tensor, py::arg("tensor"), py::arg("spec"),
             py::arg("size"), py::arg("process_group"), py::arg("init_rrefs"));
  module.def("sharded_from_global_metadata", &from_global_metadata, py::arg("local_shards"),
             py::arg("metadata"), py::arg("process_group"), py::arg("init_rrefs"), py::arg("spec"));
  module.def("shard_tensor", &shard_tensor_by, py::arg("tensor"), py::arg("spec"), py::arg("src_rank"),
             py::arg("process_group"), py::arg("is_checked"));
}

void bind_remote_shards(py::module_& module) {
  py::class_<sharded::RemoteShard>(module, "RemoteShard")
      .def_property_readonly("rank", &sharded::RemoteShard::owner)
      .def_property_readonly(
          "metadata", [](const sharded::RemoteShard& self) { return from_shard_metadata(self.metadata()); })
      .def(
          "fetch",
          [](const sharded::RemoteShard& self, std::optional<double> timeout) {
            std::optional<std::chrono::milliseconds> patience;
            if (timeout) patience = std::chrono::milliseconds(static_cast<int64_t>(*timeout * 1000));
            const py::gil_scoped_release release;
            return self.to_here(patience).tensor;
          },
          py::arg("timeout"));
}

}  // namespace

void bind_sharded(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  bind_values(module);
  bind_making(module);
  bind_remote_shards(module);
  module.def("is_sharded_tensor", &is_sharded_tensor, py::arg("object"));
  module.def(
      "sharded_metadata",
      [](const at::Tensor& tensor) { return from_metadata(ShardedTensor(tensor).metadata()); },
      py::arg("tensor"));
  module.def(
      "sharded_metadata_hash",
      [](const at::Tensor& tensor) { return ShardedTensor(tensor).metadata().hash(); }, py::arg("tensor"));
  module.def(
      "sharding_spec",
      [](const at::Tensor& tensor) { return from_spec(ShardedTensor(tensor).sharding_spec()); },
      py::arg("tensor"));
  module.def("sharded_group", &group_of, py::arg("tensor"));
  module.def(
      "sharded_ranks", [](const at::Tensor& tensor) { return ShardedTensor(tensor).process_group().ranks(); },
      py::arg("tensor"));
  module.def(
      "has_rrefs", [](const at::Tensor& tensor) { return ShardedTensor(tensor).init_rrefs(); },
      py::arg("tensor"));
  module.def("local_shards", &local_shards_of, py::arg("tensor"));
  module.def(
      "local_tensors", [](const at::Tensor& tensor) { return ShardedTensor(tensor).local_tensors(); },
      py::arg("tensor"));
  module.def("remote_shards", &remote_shards_of, py::arg("tensor"));
  module.def(
      "set_local_tensor",
      [](const at::Tensor& tensor, int64_t index, at::Tensor local) {
        ShardedTensor(tensor).set_local_tensor(index, std::move(local));
      },
      py::arg("tensor"), py::arg("index"), py::arg("local"));
  module.def("gather_sharded", &gather_sharded, py::arg("tensor"), py::arg("dst"), py::arg("out"),
             py::arg("enforce_dtype"), py::arg("dtype"));
  module.def(
      "reshard",
      [](const at::Tensor& tensor, const py::object& spec, bool in_place) -> at::Tensor {
        const ShardingSpecPtr known = to_spec(spec);
        const py::gil_scoped_release release;
        const ShardedTensor sharded(tensor);
        return in_place ? sharded.reshard_(*known) : sharded.reshard(*known);
      },
      py::arg("tensor"), py::arg("spec"), py::arg("in_place"));
  module.def("move_sharded", &moved_to, py::arg("tensor"), py::arg("device"), py::arg("dtype"),
             py::arg("non_blocking"), py::arg("copy"), py::arg("memory_format"), py::arg("process_group"));
  module.def(
      "copy_sharded",
      [](const at::Tensor& tensor) -> at::Tensor { return sharded::deepcopy(ShardedTensor(tensor)); },
      py::arg("tensor"), Release());
  module.def(
      "sharded_to_dtensor",
      [](const at::Tensor& tensor, const std::optional<DeviceMesh>& mesh,
         py::handle placements) -> at::Tensor {
        const auto placed = to_optional_placements(placements, "to_dtensor");
        TESSERA_CHECK_VALUE(mesh.has_value() == placed.has_value(),
                            "to_dtensor: give a mesh and placements, or neither.");
        const py::gil_scoped_release release;
        if (!mesh) return sharded::to_dtensor(ShardedTensor(tensor));
        return sharded::to_dtensor(ShardedTensor(tensor), *mesh, *placed);
      },
      py::arg("tensor"), py::arg("mesh"), py::arg("placements"));
  module.def(
      "dtensor_to_sharded",
      [](const at::Tensor& tensor) -> at::Tensor { return sharded::from_dtensor(DTensor(tensor)); },
      py::arg("tensor"), Release());
  module.def("set_sharded_log_handler", &set_sharded_log_handler, py::arg("handler"));
}

}  // namespace tessera::python
