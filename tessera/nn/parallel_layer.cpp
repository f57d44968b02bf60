#include <tessera/error.h>
#include <tessera/nn/parallel_layer.h>

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

namespace tessera {

ParallelLayer::ParallelLayer(LayerStyle style, LayerPlan plan, ParallelDim where, const Layouts& layouts,
                             std::optional<int64_t> features, std::string_view module)
    : where_(std::move(where)),
      num_inputs_(plan.inputs.size()),
      input_{.if_plain = layouts.input.value_or(plan.input),
             .desired = plan.input,
             .features = features,
             .reduce_gradient = plan.reduces_input_gradient},
      output_{.if_plain = layouts.output.value_or(plan.output),
              .desired = layouts.output.value_or(plan.output)},
      what_(c10::str("of ", name_of(style), " on ", module)) {}

void ParallelLayer::prepare_inputs(std::vector<at::Tensor>& tensors) const {
  const std::vector<at::Tensor> given = tensors;
  for (const size_t i : c10::irange(given.size())) {
    if (!given[i].defined()) continue;
    const bool is_input = i < num_inputs_;
    const auto same = std::find_if(given.begin(), given.begin() + static_cast<ptrdiff_t>(i),
                                   [&](const at::Tensor& each) { return each.is_same(given[i]); });
    const auto first = static_cast<size_t>(same - given.begin());
    if (first < i && (first < num_inputs_) == is_input) {
      tensors[i] = tensors[first];
    } else if (is_input) {
      tensors[i] = prepare_activation(given[i], where_, input_, "the input " + what_);
    } else {
      tensors[i] = prepare_activation(given[i], where_, {.if_plain = Replicate()}, "an argument " + what_);
    }
  }
}

at::Tensor ParallelLayer::prepare_output(const at::Tensor& output) const {
  return prepare_activation(output, where_, output_, "the output " + what_);
}

void check_heads(int64_t heads, const ParallelDim& where) {
  const int64_t ranks = where.mesh.shape()[where.dim];
  TESSERA_CHECK_VALUE(heads % ranks == 0, "ColwiseParallel: the ", heads,
                      " heads of a MultiheadAttention cannot be divided evenly between the ", ranks,
                      " ranks of ", where.mesh, " along dim ", where.dim, ".");
}

}  // namespace tessera
