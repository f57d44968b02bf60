#include <tessera/dtensor/context_parallel.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/kernels/attention_blocks.h>

#include <array>
#include <utility>

#include <ATen/ATen.h>

namespace tessera {

namespace {

constexpr std::array<std::pair<ContextMethod, std::string_view>, 3> kContextMethods{
    {{ContextMethod::allgather, "allgather"},
     {ContextMethod::ulysses, "ulysses"},
     {ContextMethod::ring, "ring"}}};

at::Tensor reordered(const at::Tensor& tensor, int64_t dim, const at::Tensor& order) {
  const at::Tensor indices = order.to(tensor.device());
  if (!DTensor::is_dtensor(tensor)) return tensor.index_select(dim, indices);
  const DeviceMesh& mesh = DTensor(tensor).device_mesh();
  return tensor.index_select(dim, DTensor::from_local(indices, mesh, replicated(mesh)));
}

}  // namespace

std::string_view name_of(ContextMethod method) {
  for (const auto& [known, name] : kContextMethods) {
    if (known == method) return name;
  }
  TESSERA_CHECK_VALUE(false, "There is no method of context parallel of number ", static_cast<int>(method),
                      ".");
}

ContextMethod context_method(std::string_view name) {
  for (const auto& [method, known] : kContextMethods) {
    if (known == name) return method;
  }
  TESSERA_CHECK_VALUE(false, "context_parallel: there is no method \"", name,
                      "\"; use \"allgather\", \"ulysses\" or \"ring\".");
}

const std::optional<ContextParallelOptions>& context_parallel_options() {
  return ThreadScope<std::optional<ContextParallelOptions>, ContextParallelGuard>::current();
}
ContextParallelGuard::ContextParallelGuard(ContextParallelOptions options) : scope_(options) {}
ContextParallelGuard::~ContextParallelGuard() = default;

at::Tensor zigzag_order(int64_t length, int64_t ranks) {
  TESSERA_CHECK_VALUE(length >= 0 && ranks >= 1, "zigzag_order: got a length of ", length, " and ", ranks,
                      " ranks; the length must not be negative, and there must be a rank.");
  at::Tensor order = at::empty({length}, at::kLong);
  for (const auto& [index, position, size] : kernels::zigzag_runs(length, ranks))
    order.narrow(0, index, size).copy_(at::arange(position, position + size));
  return order;
}

at::Tensor to_zigzag(const at::Tensor& tensor, int64_t dim, int64_t ranks) {
  return reordered(tensor, dim, zigzag_order(tensor.size(dim), ranks));
}

at::Tensor from_zigzag(const at::Tensor& tensor, int64_t dim, int64_t ranks) {
  return reordered(tensor, dim, zigzag_order(tensor.size(dim), ranks).argsort());
}

}  // namespace tessera
