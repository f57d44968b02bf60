#include <tessera/dtensor/local_map.h>
#include <tessera/error.h>

namespace tessera::detail {

namespace {

void check_count(const std::vector<OptionalPlacements>& given, size_t tensors, const char* what) {
  TESSERA_CHECK_VALUE(given.empty() || given.size() == tensors, "local_map: ", what, " has ", given.size(),
                      " entries, but there are ", tensors, " tensors among the arguments.");
}

}  // namespace

LocalMapCall::LocalMapCall(const LocalMapOptions& options, size_t tensors) : options_(options) {
  check_count(options.in_placements, tensors, "in_placements");
  check_count(options.in_grad_placements, tensors, "in_grad_placements");
}

at::Tensor LocalMapCall::argument(const at::Tensor& tensor) {
  const size_t index = arguments_++;
  if (!DTensor::is_dtensor(tensor)) return tensor;
  DTensor distributed(tensor);
  if (!mesh_) mesh_ = options_.device_mesh.value_or(distributed.device_mesh());
  if (!options_.in_placements.empty()) {
    const OptionalPlacements& wanted = options_.in_placements[index];
    TESSERA_CHECK_VALUE(wanted.has_value(), "local_map: tensor ", index,
                        " is distributed, but in_placements has none for it.");
    if (distributed.placements() != normalize(*wanted, tensor.dim())) {
      TESSERA_CHECK_VALUE(options_.redistribute_inputs, "local_map: tensor ", index, " is placed ",
                          c10::ArrayRef<Placement>(distributed.placements()), ", but in_placements says ",
                          c10::ArrayRef<Placement>(*wanted),
                          ". Redistribute it, or set redistribute_inputs.");
      distributed = distributed.redistribute(*wanted);
    }
  }
  return distributed.to_local(options_.in_grad_placements.empty() ? std::nullopt
                                                                  : options_.in_grad_placements[index]);
}

at::Tensor LocalMapCall::result(const at::Tensor& tensor) {
  const size_t index = results_++;
  if (!mesh_) return tensor;
  TESSERA_CHECK_VALUE(index < options_.out_placements.size(),
                      "local_map: the function returned more tensors than the ",
                      options_.out_placements.size(), " that out_placements has entries for.");
  const OptionalPlacements& placements = options_.out_placements[index];
  if (!placements || !tensor.defined()) return tensor;
  TESSERA_CHECK_VALUE(!DTensor::is_dtensor(tensor),
                      "local_map: the function returned a tensor that is distributed already.");
  return DTensor::from_local(tensor, *mesh_, *placements);
}

void LocalMapCall::check_results(size_t count) const {
  TESSERA_CHECK_VALUE(!mesh_ || count == options_.out_placements.size(), "local_map: out_placements has ",
                      options_.out_placements.size(), " entries, but the function returned ", count,
                      " tensors.");
}

}  // namespace tessera::detail
