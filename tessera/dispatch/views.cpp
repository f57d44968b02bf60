#include <tessera/dispatch/views.h>
#include <tessera/error.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/plan_cache.h>

#include <functional>
#include <memory>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

using c10::IValue;

/// One of the views that an operator makes of a tensor.
at::Tensor view_of(const c10::OperatorHandle& op, Stack arguments, const at::Tensor& base, size_t index) {
  arguments.front() = base;
  if (op.schema().name() == "aten::as_strided" && DTensorImpl::of(base)) {
    // In `arguments` it counts from where the base begins; see offset_from_self.
    IValue& offset = arguments[*op.schema().argumentIndexWithName("storage_offset")];
    if (!offset.isNone()) offset = offset.toInt() + base.storage_offset();
  }
  op.callBoxed(arguments);
  std::vector<at::Tensor> views;
  for (const IValue& result : arguments) {
    if (result.isTensor()) views.push_back(result.toTensor());
    if (result.isTensorList()) {
      for (const at::Tensor& each : result.toTensorVector()) views.push_back(each);
    }
  }
  return views.at(index);
}

/// Where elements of the target share memory, as in what was expanded, their values are one too.
void copy_into(at::Tensor to, at::Tensor from) {
  for (const int64_t dim : c10::irange(to.dim())) {
    if (to.stride(dim) != 0 || to.size(dim) < 2) continue;
    to = to.narrow(dim, 0, 1);
    from = from.narrow(dim, 0, 1);
  }
  to.copy_(from);
}

/// Makes the view of the gathered base again, on every rank, and writes there.
std::function<void(const at::Tensor&, const at::Tensor&)> replay(const c10::OperatorHandle& op,
                                                                 const Stack& arguments, const Spec& of_base,
                                                                 const Spec& of_view, size_t index) {
  return [op, arguments, of_base, of_view, index](const at::Tensor& base, const at::Tensor& view) {
    const Spec full_base = replicated(of_base);
    const Spec full_view = replicated(of_view);
    const at::Tensor full = new_memory(of_base.shape(), of_base.strides(), base.options());
    copy_into(full, execute(*cached_plan(of_base, full_base), base));
    copy_into(view_of(op, arguments, full, index), execute(*cached_plan(of_view, full_view), view));
    copy_into(base, execute(*cached_plan(full_base, of_base), full));
  };
}

}  // namespace

std::vector<int64_t> view_offsets(const c10::OperatorHandle& op, Stack arguments, size_t position,
                                  const Spec& base) {
  arguments[position] =
      at::empty_strided(base.shape(), base.strides(), at::TensorOptions(base.dtype()).device(at::kMeta));
  op.callBoxed(arguments);
  std::vector<int64_t> offsets;
  for (const IValue& result : arguments) {
    if (result.isTensor()) offsets.push_back(result.toTensor().storage_offset());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& each : result.toTensorVector()) offsets.push_back(each.storage_offset());
  }
  return offsets;
}

void offset_from_self(const OperatorInfo& as_strided, Arguments& arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  IValue& offset = arguments[*as_strided.schema.argumentIndexWithName("storage_offset")];
  if (offset.isNone()) return;
  TESSERA_CHECK(offset.toInt() >= self.storage_offset(), as_strided.name, ": storage offset ", offset.toInt(),
                " lies before 'self', a view that begins at ", self.storage_offset(),
                " of its storage. Call as_strided on the base of the view.");
  offset = offset.toInt() - self.storage_offset();
}

void set_origin(const at::Tensor& view, size_t index, const DistributedArgument& base, const OpPlan& plan,
                const c10::OperatorHandle& op, const Stack& arguments) {
  const rules::LocalCall& local = plan.strategy.local;
  DTensorImpl& impl = *DTensorImpl::of(view);
  const bool shares =
      plan.by_rule && !local.detached && !base.moved && impl.local().is_alias_of(base.impl().local());
  if (shares) impl.share_writes(base.impl());
  if (shares && !base.impl().origin()) [[likely]]
    return;
  // As it is now: it may change its shape in place, but the view remains one of what it was.
  DTensorImpl::Origin origin{as_it_was(base.tensor), {}, {}, base.impl().writes()};
  if (!shares) {
    origin.write = local.write_back && !base.moved
                       ? local.write_back
                       : replay(op, arguments, base.spec(), plan.outputs[index], index);
    origin.read = [op, arguments, index](const at::Tensor& of) {
      const at::AutoDispatchBelowADInplaceOrView below;
      return view_of(op, arguments, of, index);
    };
  }
  impl.set_origin(std::make_shared<const DTensorImpl::Origin>(std::move(origin)));
}

at::Tensor as_it_was(const at::Tensor& tensor) {
  const DTensorImpl& impl = *DTensorImpl::of(tensor);
  return at::Tensor(
      impl.shallow_copy_and_detach(impl.version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace tessera
