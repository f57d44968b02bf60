#include <tessera/comm/packed_all_to_all.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace tessera::comm {

namespace {

bool is_message(const Tensors& tensors, const at::TensorOptions& options) {
  return tensors.size() == 1 && tensors[0].is_contiguous() && tensors[0].dtype() == options.dtype() &&
         tensors[0].device() == options.device() && !tensors[0].is_conj() && !tensors[0].is_neg();
}

at::Tensor new_message(const Tensors& tensors, const at::TensorOptions& options) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return at::empty({elements}, options);
}

/// Calls fn(tensor, its values in the message) for each tensor.
template <class Fn>
void for_each(const Tensors& tensors, const at::Tensor& message, Fn fn) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    fn(tensor, message.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

at::Tensor pack(const Tensors& tensors, const at::TensorOptions& options) {
  if (is_message(tensors, options)) return tensors[0].view({-1});
  const at::Tensor message = new_message(tensors, options);
  for_each(tensors, message,
           [](const at::Tensor& tensor, const at::Tensor& values) { values.copy_(tensor); });
  return message;
}

}  // namespace

void packed_all_to_all(const std::vector<Tensors>& outputs, const std::vector<Tensors>& inputs,
                       const at::TensorOptions& options, const Group& group, Write write) {
  const at::NoGradGuard no_grad;
  const auto put = [write](const at::Tensor& tensor, const at::Tensor& values) {
    write == Write::add ? tensor.add_(values) : tensor.copy_(values);
  };
  const auto self = static_cast<size_t>(group ? group->getRank() : 0);
  for (size_t i = 0; i < outputs[self].size(); ++i) put(outputs[self][i], inputs[self][i]);
  if (!group) return;

  Tensors sent, received;
  std::vector<bool> in_place;
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    const bool is_self = rank == self;
    sent.push_back(is_self ? at::empty({0}, options) : pack(inputs[rank], options));
    in_place.push_back(is_self || (write == Write::copy && is_message(outputs[rank], options)));
    if (is_self) {
      received.push_back(at::empty({0}, options));
    } else {
      received.push_back(in_place.back() ? outputs[rank][0].view({-1}) : new_message(outputs[rank], options));
    }
  }
  all_to_all(received, sent, group).wait();
  for (size_t rank = 0; rank < outputs.size(); ++rank) {
    if (!in_place[rank]) for_each(outputs[rank], received[rank], put);
  }
}

}  // namespace tessera::comm
