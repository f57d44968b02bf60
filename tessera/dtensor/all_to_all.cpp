#include <tessera/comm/collectives.h>
#include <tessera/dtensor/all_to_all.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera {

namespace {

using SplitSizes = std::vector<int64_t>;

at::Tensor exchange_rows(const at::Tensor& input, const SplitSizes& incoming, const SplitSizes& outgoing,
                         const Group& group) {
  auto shape = input.sizes().vec();
  shape[0] = std::accumulate(incoming.begin(), incoming.end(), int64_t{0});
  const at::Tensor output = new_memory(shape, input.options());
  comm::all_to_all(output.split_with_sizes(incoming), input.contiguous().split_with_sizes(outgoing), group)
      .wait();
  return output;
}

struct ExchangeMemory : torch::CustomClassHolder {
  SplitSizes incoming, outgoing;
  Group group;
};

struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const c10::intrusive_ptr<ExchangeMemory>& memory) {
    context->saved_data["memory"] = c10::IValue::make_capsule(memory);
    return exchange_rows(input, memory->incoming, memory->outgoing, memory->group);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto capsule = context->saved_data["memory"].toCapsule();
    const auto& memory = *static_cast<const ExchangeMemory*>(capsule.get());
    auto back = c10::make_intrusive<ExchangeMemory>();
    back->incoming = memory.outgoing;
    back->outgoing = memory.incoming;
    back->group = memory.group;
    return {ExchangeRows::apply(gradients[0], std::move(back)), at::Tensor()};
  }
};

SplitSizes even_sizes(int64_t rows, int64_t ranks) {
  TESSERA_CHECK_VALUE(rows % ranks == 0, "all_to_all_single: ", rows, " rows cannot be split evenly among ",
                      ranks, " ranks. Give the split sizes.");
  return SplitSizes(ranks, rows / ranks);
}

void check_split_sizes(const SplitSizes& sizes, int64_t ranks, const char* what) {
  TESSERA_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == ranks, "all_to_all_single: got ", sizes.size(),
                      " ", what, " for ", ranks, " ranks; there must be one for each.");
  TESSERA_CHECK_VALUE(std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }),
                      "all_to_all_single: ", what, " must not be negative, got ", c10::IntArrayRef(sizes),
                      ".");
}

}  // namespace

at::Tensor all_to_all_single(const at::Tensor& input, SplitSizes output_split_sizes,
                             SplitSizes input_split_sizes, const DeviceMesh& mesh, const MeshDim& dim) {
  TESSERA_CHECK_VALUE(
      input.defined() && !DTensor::is_dtensor(input) && input.dim() > 0,
      "all_to_all_single: needs a plain tensor of one dim at least. Use local_map or to_local() for a "
      "distributed one.");
  const int64_t ranks = mesh.size(dim);
  if (input_split_sizes.empty()) input_split_sizes = even_sizes(input.size(0), ranks);
  if (output_split_sizes.empty()) output_split_sizes = even_sizes(input.size(0), ranks);
  check_split_sizes(input_split_sizes, ranks, "input_split_sizes");
  check_split_sizes(output_split_sizes, ranks, "output_split_sizes");
  const int64_t sent = std::accumulate(input_split_sizes.begin(), input_split_sizes.end(), int64_t{0});
  TESSERA_CHECK_VALUE(sent == input.size(0), "all_to_all_single: input_split_sizes ",
                      c10::IntArrayRef(input_split_sizes), " are ", sent,
                      " rows together, but the input has ", input.size(0), ".");
  auto memory = c10::make_intrusive<ExchangeMemory>();
  memory->incoming = std::move(output_split_sizes);
  memory->outgoing = std::move(input_split_sizes);
  memory->group = mesh.get_group(dim);
  return ExchangeRows::apply(input, std::move(memory));
}

SplitSizes exchange_sizes(const SplitSizes& sizes, const DeviceMesh& mesh, const MeshDim& dim) {
  check_split_sizes(sizes, mesh.size(dim), "sizes");
  const SplitSizes one(sizes.size(), 1);
  const at::Tensor known =
      exchange_rows(at::tensor(sizes).to(mesh.device_type()), one, one, mesh.get_group(dim)).cpu();
  return {known.const_data_ptr<int64_t>(), known.const_data_ptr<int64_t>() + known.numel()};
}

}  // namespace tessera
