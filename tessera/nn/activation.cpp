#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/gradient.h>
#include <tessera/error.h>
#include <tessera/nn/activation.h>

#include <utility>

#include <torch/csrc/autograd/custom_function.h>

namespace tessera {

namespace {

DTensor from_plain(const at::Tensor& tensor, const ParallelDim& where, const ActivationLayout& layout,
                   const std::string& what) {
  TESSERA_CHECK_VALUE(
      where.mesh.ndim() == 1, what, " is a plain tensor of shape ", tensor.sizes(),
      ", but the module was parallelized on ", where.mesh,
      ", and nothing says how the tensor is placed along the other dims. Pass a distributed "
      "tensor (distribute_tensor, DTensor from_local), or parallelize the module on a mesh of "
      "one dim, such as mesh[\"tp\"].");
  const Placement placement = normalize({layout.if_plain}, tensor.dim())[0];
  DTensor::FromLocalOptions options;
  if (layout.features && placement.is_shard_like(tensor.dim() - 1)) {
    options.shape = tensor.sizes().vec();
    options.shape->back() = *layout.features;
  } else {
    options.run_check = placement.is_shard_like();
  }
  try {
    return DTensor::from_local(tensor, where.mesh, {placement}, options);
  } catch (const c10::ValueError& error) {
    TESSERA_CHECK_VALUE(false, what, " is a plain tensor of shape ", tensor.sizes(),
                        ", but not the local tensor of one placed ", placement, ": ",
                        error.what_without_backtrace());
  }
}

/// The tensor itself, with its gradient redistributed to its placements, P as R.
struct ReduceGradient : torch::autograd::Function<ReduceGradient> {
  /// Of the tensor, which need not stay alive for this.
  struct Layout : torch::CustomClassHolder {
    Placements placements;
    DTensor::RedistributeOptions options;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor) {
    const Spec& spec = DTensor(tensor).spec();
    auto layout = c10::make_intrusive<Layout>();
    layout->placements = spec.placements();
    for (Placement& each : layout->placements) {
      if (each.is_partial()) each = Replicate();
    }
    layout->options.order.assign(spec.order().begin(), spec.order().end());
    layout->options.async_op = true;
    context->saved_data["layout"] = c10::IValue::make_capsule(std::move(layout));
    return tensor.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor()};
    const auto& layout = *static_cast<Layout*>(context->saved_data["layout"].toCapsule().get());
    return {DTensor(gradients[0]).redistribute(layout.placements, layout.options)};
  }
};

/// The tensor, with its gradient reduced as above. Layers that are called with the same tensor one after the
/// other, as the projections to queries, keys and values are, share the reduction: autograd adds up their
/// partial gradients, which does not communicate, and then reduces the sum.
at::Tensor with_reduced_gradient(const at::Tensor& tensor) {
  using torch::autograd::Node;
  if (!at::GradMode::is_enabled() || redistributes_gradient(tensor)) return tensor;
  // The last reduction, while a graph has it. Ranks agree on whether there is one: all that is in one backward
  // is in one graph.
  thread_local c10::weak_intrusive_ptr<Node> last{c10::intrusive_ptr<Node>()};
  if (const auto node = last.lock();
      node && node->next_edge(0) == torch::autograd::impl::gradient_edge(tensor)) {
    at::Tensor result = tensor.detach();
    torch::autograd::impl::set_gradient_edge(result, {node, 0});
    return result;
  }
  at::Tensor result = ReduceGradient::apply(tensor);
  last = c10::weak_intrusive_ptr<Node>(result.grad_fn());
  return result;
}

}  // namespace

Placements ParallelDim::placements(const Placement& along) const {
  Placements result(mesh.ndim(), Replicate());
  result[dim] = along;
  return result;
}

at::Tensor prepare_activation(const at::Tensor& tensor, const ParallelDim& where,
                              const ActivationLayout& layout, const std::string& what) {
  const bool plain = !DTensor::is_dtensor(tensor);
  const DTensor given = plain ? from_plain(tensor, where, layout, what) : DTensor(tensor);
  TESSERA_CHECK_VALUE(given.device_mesh() == where.mesh, what, " is on ", given.device_mesh(), " of ranks ",
                      c10::IntArrayRef(given.device_mesh().ranks()), ", but the module was parallelized on ",
                      where.mesh, " of ranks ", c10::IntArrayRef(where.mesh.ranks()), ".");
  Placements placements = given.placements();
  if (layout.desired) placements[where.dim] = normalize({*layout.desired}, given.dim())[0];
  // What from_local and redistribute return has its gradient redistributed by them.
  if (placements != given.placements()) return given.redistribute(std::move(placements), {.async_op = true});
  const bool reduce = layout.reduce_gradient && !plain && given.requires_grad();
  return reduce ? with_reduced_gradient(given) : at::Tensor(given);
}

}  // namespace tessera
