#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/observer.h>
#include <tessera/comm/within.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/views.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/dtensor/gradient.h>
#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/random/generator.h>
#include <tessera/random/sample.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/pieces.h>
#include <tessera/redistribute/plan_cache.h>

#include <ostream>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr std::string_view kRequiresGrad = " requires_grad";

/// What our autograd functions remember between forward and backward.
struct Memory : torch::CustomClassHolder {
  Spec spec;  // of the forward input
  OptionalPlacements grad_placements = {};
  DTensor::RedistributeOptions options = {};
};

c10::intrusive_ptr<Memory> remember(Spec spec, OptionalPlacements grad_placements = std::nullopt) {
  auto memory = c10::make_intrusive<Memory>();
  memory->spec = std::move(spec);
  memory->grad_placements = std::move(grad_placements);
  return memory;
}

const Memory& recall(AutogradContext* context) {
  return *static_cast<Memory*>(context->saved_data["memory"].toCapsule().get());
}

void store(AutogradContext* context, c10::intrusive_ptr<Memory> memory) {
  // A gradient that is not there stays so: autograd would make plain zeros of it.
  context->set_materialize_grads(false);
  context->saved_data["memory"] = c10::IValue::make_capsule(std::move(memory));
}

Placements with_partials_replicated(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return placements;
}

/// Errors of data_ptr() on tensors that users make; results of operators do without, as it costs an
/// allocation.
at::Tensor with_message(at::Tensor tensor) {
  tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "A DTensor has no data pointer, as its data lies on many ranks: call to_local() for this rank's local "
      "tensor.");
  return tensor;
}

/// Cast to `dtype`, then redistributed to `target`.
at::Tensor redistributed(const at::Tensor& tensor, const Spec& target, at::ScalarType dtype, bool async_op) {
  const auto* impl = DTensorImpl::of(tensor);
  const at::Tensor& local = impl->local();
  auto in_dtype = [&](const Spec& spec) {
    if (spec.dtype() == dtype) return spec;
    return Spec(spec.mesh(), spec.placements(), spec.shape(), spec.strides(), dtype, spec.order());
  };
  const Spec to = in_dtype(target);
  const auto plan = cached_plan(in_dtype(impl->spec()), to);
  const at::Tensor input = local.to(dtype);
  if (async_op && plan->communicates()) {
    return with_message(
        make_dtensor(std::make_shared<PendingTensor>(execute_async(*plan, input)), to, input.options()));
  }
  at::Tensor output = execute(*plan, input);
  if (output.is_alias_of(local)) output = output.clone();  // replicas must not be written to on one rank only
  return with_message(make_dtensor(std::move(output), to));
}

DTensor::RedistributeOptions in_order(const ShardOrder& order) {
  DTensor::RedistributeOptions options;
  options.order.assign(order.begin(), order.end());
  return options;
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static Variable forward(AutogradContext* context, const Variable& local,
                          c10::intrusive_ptr<Memory> memory) {
    at::Tensor result = with_message(make_dtensor(local.detach(), memory->spec));
    store(context, std::move(memory));
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Memory& memory = recall(context);
    if (!gradients[0].defined()) return {Variable(), Variable()};
    const DTensor gradient(gradients[0]);
    if (memory.grad_placements)
      return {gradient.redistribute(*memory.grad_placements).to_local(), Variable()};
    const auto placements = with_partials_replicated(memory.spec.placements());
    return {gradient.redistribute(placements, in_order(memory.spec.order())).to_local(), Variable()};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static Variable forward(AutogradContext* context, const Variable& tensor,
                          c10::intrusive_ptr<Memory> memory) {
    at::Tensor local = DTensorImpl::of(tensor)->local().detach();
    store(context, std::move(memory));
    return local;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Memory& memory = recall(context);
    if (!gradients[0].defined()) return {Variable(), Variable()};
    const auto placements =
        normalize(memory.grad_placements.value_or(with_partials_replicated(memory.spec.placements())),
                  memory.spec.ndim());
    // What is sharded as the tensor is, is so in its order.
    const bool sharded_alike =
        with_partials_replicated(placements) == with_partials_replicated(memory.spec.placements());
    const auto order = sharded_alike ? memory.spec.order() : ShardOrder();
    // Its dims lie in memory as the tensor's do.
    const auto strides =
        memory.spec.is_dense() ? c10::OptionalIntArrayRef(memory.spec.strides()) : std::nullopt;
    const Spec spec(memory.spec.mesh(), placements, memory.spec.shape(), strides, gradients[0].scalar_type(),
                    order);
    check_local(gradients[0], spec, "The gradient of to_local");
    return {FromLocal::apply(gradients[0], remember(spec)), Variable()};
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static Variable forward(AutogradContext* context, const Variable& tensor,
                          c10::intrusive_ptr<Memory> target) {
    auto memory = remember(DTensorImpl::of(tensor)->spec());
    memory->options = target->options;
    store(context, std::move(memory));
    const at::ScalarType dtype = target->options.forward_dtype.value_or(tensor.scalar_type());
    if (target->spec == DTensorImpl::of(tensor)->spec() && dtype == tensor.scalar_type())
      return as_it_was(tensor);  // which shares its version: autograd notices writes
    return redistributed(tensor, target->spec, dtype, target->options.async_op);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Memory& memory = recall(context);
    if (!gradients[0].defined()) return {Variable(), Variable()};
    DTensor::RedistributeOptions options = in_order(memory.spec.order());
    options.async_op = memory.options.async_op;
    options.forward_dtype = memory.options.backward_dtype;
    options.backward_dtype = memory.options.forward_dtype;
    // Where both are partial, the gradient stays so: to reduce it is left to who needs it.
    Placements placements = with_partials_replicated(memory.spec.placements());
    const Placements& own = DTensorImpl::of(gradients[0])->spec().placements();
    for (const size_t i : c10::irange(placements.size())) {
      if (memory.spec.placements()[i].is_partial() && own[i].is_partial()) placements[i] = own[i];
    }
    const DTensor gradient = DTensor(gradients[0]).redistribute(placements, options);
    return {gradient.to(memory.spec.dtype()), Variable()};
  }
};

/// Whether forward-mode AD carries a tangent along with it.
bool is_dual(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

/// A linear function of a dual tensor of forward-mode AD: that of its primal, and of its tangent.
template <class Function>
at::Tensor of_dual(const at::Tensor& dual, const Function& linear) {
  const auto [primal, tangent] = at::_unpack_dual(dual, /*level=*/0);
  return at::_make_dual(linear(primal), linear(tangent), /*level=*/0);
}

void check_linear(const Spec& spec, std::string_view what) {
  for (const Placement& placement : spec.placements()) {
    TESSERA_CHECK(!placement.is_partial() || is_linear(placement.op()), what, ": ", placement,
                  " has no derivative of forward-mode AD, as it is not linear. Redistribute to R or S before "
                  "the tensor becomes dual.");
  }
}

constexpr int64_t kMaxDims = 24;  // of what from_local checks

/// Finds the global shape from the local tensors, and checks that it fits together on all of them. All have the same
/// number of dims and dtype.
std::vector<int64_t> agreed_shape(const at::Tensor& local, const DeviceMesh& mesh,
                                  const Placements& placements) {
  at::Tensor mine = at::zeros({kMaxDims}, at::kLong);
  for (const int64_t dim : c10::irange(local.dim())) mine[dim] = local.size(dim);
  mine = mine.to(mesh.device_type());
  comm::Tensors all;
  for (int64_t i = 0; i < mesh.size(); ++i) all.push_back(at::empty_like(mine));
  const comm::WhileAgreeing agreeing;
  comm::all_to_all(all, comm::Tensors(all.size(), mine), mesh.get_joint_group()).wait();
  std::vector<c10::DimVector> shapes;
  for (const at::Tensor& each : all) {
    const at::Tensor sizes = each.cpu();
    const auto* words = sizes.const_data_ptr<int64_t>();
    shapes.emplace_back(words, words + local.dim());
  }
  const auto shape = global_shape_from_locals(shapes, mesh.shape(), placements);
  return {shape.begin(), shape.end()};
}

/// Those of a tensor that is channels last; else nothing, as ranks may hold the same values otherwise.
std::optional<std::vector<int64_t>> channels_last_strides(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return std::nullopt;
  const auto sizes = tensor.sizes();
  if (tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) return c10::get_channels_last_strides_2d(sizes);
  if (tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return c10::get_channels_last_strides_3d(sizes);
  return std::nullopt;
}

at::TensorOptions on_mesh(at::TensorOptions options, const DeviceMesh& mesh) {
  return options.has_device() ? options : options.device(mesh.device_type());
}

Spec factory_spec(c10::IntArrayRef shape, const DeviceMesh& mesh, const Placements& placements,
                  const at::TensorOptions& options) {
  return Spec(mesh, placements, shape, std::nullopt, c10::typeMetaToScalarType(options.dtype()));
}

DTensor made(at::Tensor local, const Spec& spec, const at::TensorOptions& options) {
  DTensor result(with_message(make_dtensor(std::move(local), spec)));
  if (options.requires_grad()) result.requires_grad_();
  return result;
}

/// A new tensor whose local tensor `write` fills. On P(op) the partial values reduce to what it writes.
template <class Write>
DTensor drawn(c10::IntArrayRef shape, const DeviceMesh& mesh, const Placements& placements,
              at::TensorOptions options, const Write& write) {
  const Spec spec = factory_spec(shape, mesh, placements, options);
  const Spec placed = spec.with_placements(with_partials_replicated(spec.placements()));
  at::Tensor local =
      new_memory(spec.local_shape(), on_mesh(options, mesh).dtype(spec.dtype()).requires_grad(false));
  if (mesh.is_member()) {
    if (!local.is_meta()) write(local, random::Region(placed), random::next_draw(mesh));
    local = execute(*cached_plan(placed, spec), local);
  }
  return made(std::move(local), spec, options);
}

DTensor drawn(c10::IntArrayRef shape, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options, const random::Distribution& distribution) {
  return drawn(shape, mesh, placements, options,
               [&](const at::Tensor& local, const auto& region, const auto& draw) {
                 random::fill(local, region, distribution, draw);
               });
}

at::TensorOptions of_integers(const at::TensorOptions& options) {
  return options.has_dtype() ? options : options.dtype(at::kLong);
}

}  // namespace

bool redistributes_gradient(const at::Tensor& tensor) {
  const torch::autograd::Node* node = tensor.grad_fn().get();
  return dynamic_cast<const torch::autograd::CppNode<Redistribute>*>(node) ||
         dynamic_cast<const torch::autograd::CppNode<FromLocal>*>(node);
}

DTensor::DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  TESSERA_CHECK_VALUE(!defined() || is_dtensor(*this), "This tensor of shape ", sizes(),
                      " is not distributed. Make it so with distribute_tensor or DTensor::from_local.");
}

bool DTensor::is_dtensor(const at::Tensor& tensor) {
  return tensor.defined() && DTensorImpl::of(tensor) != nullptr;
}

const Spec& DTensor::spec() const {
  TESSERA_CHECK(defined(), "This DTensor is undefined.");
  return DTensorImpl::of(*this)->spec();
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements) {
  return from_local(local, mesh, std::move(placements), {});
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                            const FromLocalOptions& options) {
  if (local.defined() && !is_dtensor(local) && is_dual(local))
    return DTensor(
        of_dual(local, [&](const at::Tensor& t) { return from_local(t, mesh, placements, options); }));
  if (local.defined() && !is_dtensor(local) && !local.is_meta() &&
      local.device().type() != mesh.device_type())
    return from_local(local.to(mesh.device_type()), mesh, std::move(placements), options);
  // Without run_check, nothing is exchanged, and so nothing compared.
  const Group compared = options.run_check ? mesh.joint_group_or_null() : Group();
  const comm::Agreement agreement("from_local", compared, [&] {
    TESSERA_CHECK_VALUE(local.defined() && !is_dtensor(local),
                        "from_local: needs a plain tensor, but this one is ",
                        local.defined() ? "distributed already; use redistribute." : "undefined.");
    TESSERA_CHECK_VALUE(static_cast<int64_t>(placements.size()) == mesh.ndim(), "from_local: got ",
                        placements.size(), " placements ", c10::ArrayRef<Placement>(placements), " for ",
                        mesh, ", which has ", mesh.ndim(), " dims.");
    TESSERA_CHECK_VALUE(!options.run_check || local.dim() <= kMaxDims, "from_local: a tensor of ",
                        local.dim(), " dims is too much.");
    placements = normalize(placements, local.dim());
    if (!options.run_check) return std::string();
    if (options.shape && mesh.is_member())
      check_local(local, Spec(mesh, placements, *options.shape, std::nullopt, local.scalar_type()),
                  "from_local");
    const auto given = [](const char* what, const std::optional<std::vector<int64_t>>& sizes) {
      return sizes ? c10::str(", ", what, " ", c10::IntArrayRef(*sizes)) : "";
    };
    return c10::str(local.scalar_type(), " of ", local.dim(), " dims, ",
                    local.requires_grad() ? "which requires grad, " : "",
                    c10::ArrayRef<Placement>(placements), ", ", mesh, given("shape", options.shape),
                    given("strides", options.strides));
  });
  std::vector<int64_t> shape;
  if (options.shape) {
    shape = *options.shape;
  } else if (options.run_check && mesh.is_member()) {
    shape = agreed_shape(local, mesh, placements);
  } else {
    const auto even = global_shape_if_even(local.sizes(), mesh.shape(), placements);
    shape.assign(even.begin(), even.end());
  }
  agreement.settle();
  c10::OptionalIntArrayRef strides;
  if (options.strides) strides = *options.strides;
  const Spec spec(mesh, placements, shape, strides, local.scalar_type());
  at::Tensor mine = mesh.is_member() ? local : at::empty({0}, local.options());
  if (mesh.is_member()) {
    check_local(local, spec, "from_local");
    if (options.run_check) {
      for (const int64_t dim : c10::irange(mesh.ndim())) {
        if (spec.placement(dim).is_replicate() && mesh.shape()[dim] > 1) {
          mine = laid_out(mine, spec);
          comm::broadcast(mine.detach(), 0, mesh.get_group(MeshDim(dim))).wait();
        }
      }
    }
  }
  return DTensor(FromLocal::apply(mine, remember(spec, options.grad_placements)));
}

at::Tensor DTensor::to_local(OptionalPlacements grad_placements) const {
  if (is_dual(*this)) {
    check_linear(spec(), "to_local");
    return of_dual(*this, [&](const at::Tensor& t) {
      const DTensor same = DTensor(t).redistribute(spec().placements(), in_order(spec().order()));
      return same.to_local(grad_placements);
    });
  }
  return ToLocal::apply(static_cast<const at::Tensor&>(*this), remember(spec(), std::move(grad_placements)));
}

DTensor DTensor::redistribute(Placements placements) const { return redistribute(std::move(placements), {}); }

DTensor DTensor::redistribute(Placements placements, const RedistributeOptions& options) const {
  const Spec target = spec().with_placements(placements, options.order);
  const bool is_there = target == spec() && options.forward_dtype.value_or(scalar_type()) == scalar_type();
  if (is_there && !(options.always && at::GradMode::is_enabled() && requires_grad())) return *this;
  if (is_dual(*this)) {
    check_linear(spec(), "redistribute");
    check_linear(target, "redistribute");
    return DTensor(
        of_dual(*this, [&](const at::Tensor& t) { return DTensor(t).redistribute(placements, options); }));
  }
  static const std::string name = "redistribute";
  const comm::Within within(&name);
  auto memory = remember(target);
  memory->options = options;
  return DTensor(Redistribute::apply(static_cast<const at::Tensor&>(*this), std::move(memory)));
}

std::pair<at::Tensor, DTensor::Context> DTensor::flatten() const {
  return {DTensorImpl::of(*this)->local(), Context{spec(), requires_grad()}};
}

DTensor DTensor::unflatten(const at::Tensor& local, const Context& context) {
  check_local(local, context.spec, "unflatten");
  DTensor result(with_message(make_dtensor(local.detach(), context.spec)));
  if (context.requires_grad) result.requires_grad_();
  return result;
}

DTensor DTensor::coerce_gradient(const DTensor& gradient) const {
  return DTensor(
      gradient.redistribute(with_partials_replicated(placements()), in_order(spec().order())).contiguous());
}

std::string DTensor::Context::str() const {
  return spec.str() + std::string(requires_grad ? kRequiresGrad : "");
}

DTensor::Context DTensor::Context::parse(std::string_view text, const DeviceMesh& mesh) {
  Context context;
  context.requires_grad = text.ends_with(kRequiresGrad);
  if (context.requires_grad) text.remove_suffix(kRequiresGrad.size());
  context.spec = parse_spec(text, mesh);
  return context;
}

void check_no_partial(at::TensorList tensors, const std::string& what) {
  for (const size_t i : c10::irange(tensors.size())) {
    if (!DTensor::is_dtensor(tensors[i])) continue;
    const Spec& spec = DTensorImpl::of(tensors[i])->spec();
    TESSERA_CHECK_VALUE(!spec.has_partial(), what, ": tensor ", i, " is ", spec,
                        ", which has yet to be reduced. Call redistribute() to R or S first.");
  }
}

at::Tensor DTensor::full_tensor(OptionalPlacements grad_placements) const {
  return redistribute(replicated(device_mesh())).to_local(std::move(grad_placements));
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  if (!tensor.defined()) return out << "DTensor undefined";
  const auto* impl = DTensorImpl::of(tensor);
  out << "DTensor " << impl->spec() << ", rank " << impl->spec().mesh().get_rank() << " holds:\n";
  // Not collective: one rank may print alone.
  for (const auto* view = impl; view->origin(); view = DTensorImpl::of(view->origin()->base)) {
    if (view->origin()->read && DTensorImpl::of(view->origin()->base)->writes() != view->origin()->writes)
      return out
             << "[ a view of a tensor that was written since: the next operator on it fetches its values ]";
  }
  return out << impl->local();
}

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                          std::optional<int64_t> source) {
  const at::NoGradGuard no_grad;
  at::Tensor global;
  Spec target;
  // Without a source, nothing is exchanged, and so nothing compared.
  const comm::Agreement agreement("distribute_tensor", source ? mesh.joint_group_or_null() : Group(), [&] {
    TESSERA_CHECK_VALUE(tensor.defined() && !DTensor::is_dtensor(tensor),
                        "distribute_tensor: needs a plain tensor, but this one is ",
                        tensor.defined() ? "distributed already; use redistribute." : "undefined.");
    TESSERA_CHECK_INDEX(!source || (*source >= 0 && *source < mesh.size()),
                        "distribute_tensor: there is no rank ", *source, " in ", mesh, ".");
    global = tensor.detach();
    if (!global.is_meta()) global = global.to(mesh.device_type());
    const auto strides = channels_last_strides(global);
    target = Spec(mesh, placements, global.sizes(),
                  strides ? c10::OptionalIntArrayRef(*strides) : std::nullopt, global.scalar_type());
    if (!source || mesh.size() == 1) return std::string();
    return c10::str(target, global.is_meta() ? " on meta" : "",
                    tensor.requires_grad() ? " requires_grad, source " : ", source ", *source);
  });
  const Spec placed = target.with_placements(with_partials_replicated(target.placements()));
  at::Tensor local;
  if (!mesh.is_member()) {
    local = at::empty({0}, global.options());
  } else if (!source || mesh.size() == 1 || global.is_meta()) {
    if (global.is_meta()) agreement.settle();
    local = select_pieces(global, placed.local_pieces()).contiguous();
    if (local.is_alias_of(global)) local = local.clone();
  } else {
    const Group group = mesh.get_joint_group();
    local = new_memory(placed.local_shape(), global.options());
    std::vector<at::Tensor> locals;
    if (group->getRank() == *source) {
      for (const auto& coordinate : mesh.coordinates())
        locals.push_back(select_pieces(global, placed.local_pieces(coordinate)).contiguous());
    }
    comm::scatter(local, locals, *source, group).wait();
  }
  if (mesh.is_member()) local = execute(*cached_plan(placed, target), laid_out(local, placed));
  DTensor result(with_message(make_dtensor(std::move(local), target)));
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

DTensor empty(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
              at::TensorOptions options) {
  const Spec spec = factory_spec(shape, mesh, placements, options);
  return made(new_memory(spec.local_shape(), on_mesh(options, mesh).requires_grad(false)), spec, options);
}

DTensor full(c10::IntArrayRef shape, const at::Scalar& value, const DeviceMesh& mesh, Placements placements,
             at::TensorOptions options) {
  const Spec spec = factory_spec(shape, mesh, placements, options);
  const Spec placed = spec.with_placements(with_partials_replicated(spec.placements()));
  at::Tensor local =
      at::full(spec.local_shape(), value, on_mesh(options, mesh).dtype(spec.dtype()).requires_grad(false));
  if (mesh.is_member()) local = execute(*cached_plan(placed, spec), local);
  return made(std::move(local), spec, options);
}

DTensor zeros(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
              at::TensorOptions options) {
  return full(shape, 0, mesh, std::move(placements), options);
}

DTensor ones(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
             at::TensorOptions options) {
  return full(shape, 1, mesh, std::move(placements), options);
}

DTensor rand(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
             at::TensorOptions options) {
  return drawn(shape, mesh, placements, options, random::Distribution::uniform());
}

DTensor randn(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
              at::TensorOptions options) {
  return drawn(shape, mesh, placements, options, random::Distribution::normal());
}

DTensor randint(int64_t low, int64_t high, c10::IntArrayRef shape, const DeviceMesh& mesh,
                Placements placements, at::TensorOptions options) {
  return drawn(shape, mesh, placements, of_integers(options), random::Distribution::integers(low, high));
}

DTensor randperm(int64_t n, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  TESSERA_CHECK(n >= 0, "randperm: there is no permutation of ", n, " numbers.");
  return drawn({n}, mesh, placements, of_integers(options), random::permutation_into);
}

}  // namespace tessera
