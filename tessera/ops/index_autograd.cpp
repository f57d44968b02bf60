#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/ops/as_one.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_ops.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// x[i] and x[mask] of what is cut: the gradient is cut as x is. libtorch's formula adds into zeros in place,
/// which are whole, as it knows nothing of x but its shape.
namespace tessera {

namespace {

using Indices = c10::List<std::optional<at::Tensor>>;

/// A tensor that is placed like another, and takes no memory.
at::Tensor placed_like(const at::Tensor& tensor) {
  const DTensorImpl& impl = *DTensorImpl::of(tensor);
  const Spec& spec = impl.spec();
  const at::Tensor local = at::zeros({}, impl.local().options()).expand(spec.local_shape());
  return make_dtensor(local, Spec(spec.mesh(), spec.placements(), spec.shape(),
                                  c10::DimVector(spec.ndim(), 0), spec.dtype(), spec.order()));
}

struct IndexOfCut : torch::autograd::Function<IndexOfCut> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self,
                            const Indices& indices) {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> saved{placed_like(self)};
    for (const std::optional<at::Tensor>& index : indices) saved.push_back(index.value_or(at::Tensor()));
    context->save_for_backward(std::move(saved));
    return at::index(self, indices);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    Indices indices;
    for (size_t i = 1; i < saved.size(); ++i)
      indices.push_back(saved[i].defined() ? std::optional(saved[i]) : std::nullopt);
    const at::Tensor zeros = at::zeros_like(saved[0], gradients[0].options());
    return {at::index_put(zeros, indices, gradients[0], /*accumulate=*/true), at::Tensor()};
  }
};

at::Tensor index(c10::DispatchKeySet keys, const at::Tensor& self, const Indices& indices) {
  const DTensorImpl* impl = DTensorImpl::of(self);
  if (!impl || !impl->spec().is_sharded() || !at::GradMode::is_enabled() || !self.requires_grad() ||
      has_tangent(self))
    return as_one<at::_ops::index_Tensor>(keys, self, indices);
  return IndexOfCut::apply(self, indices);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { library.impl("index.Tensor", index); }

}  // namespace

}  // namespace tessera
