#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/nn/style.h>
#include <tessera/nn/tree.h>

#include <fnmatch.h>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera {

namespace {

using torch::nn::Module;

/// What a plain tensor is a part of. Parts may differ in size, and a rank knows only its own: unless it is
/// the last dim, of size `features`, that is cut, the ranks tell one another.
DTensor from_plain(const at::Tensor& tensor, const ParallelDim& where, const Placement& placement,
                   std::optional<int64_t> features, const char* what) {
  const Placement normal = normalize({placement}, tensor.dim())[0];
  DTensor::FromLocalOptions options;
  if (features && normal.is_shard_like(tensor.dim() - 1)) {
    options.shape = tensor.sizes().vec();
    options.shape->back() = *features;
  } else {
    options.run_check = normal.is_shard_like();
  }
  try {
    return DTensor::from_local(tensor, where.mesh, {normal}, options);
  } catch (const c10::ValueError& error) {
    TESSERA_CHECK_VALUE(false, what, ": got a plain tensor of shape ", tensor.sizes(),
                        " that is no part of one placed ", normal, ": ", error.what_without_backtrace());
  }
}

/// Distributed, and placed so along the dim. `features`: see from_plain.
at::Tensor placed(const at::Tensor& tensor, const ParallelDim& where, const Placement& if_plain,
                  const Placement& wanted, const char* what, std::optional<int64_t> features = {}) {
  DTensor result;
  if (DTensor::is_dtensor(tensor)) {
    result = DTensor(tensor);
    TESSERA_CHECK_VALUE(result.device_mesh() == where.mesh, what, ": got a tensor on ", result.device_mesh(),
                        " of ranks ", c10::IntArrayRef(result.device_mesh().ranks()),
                        " for a module that was parallelised on ", where.mesh, " of ranks ",
                        c10::IntArrayRef(where.mesh.ranks()), ".");
  } else {
    TESSERA_CHECK_VALUE(where.mesh.ndim() == 1, what, ": got a plain tensor of shape ", tensor.sizes(),
                        " for a module that was parallelised on ", where.mesh,
                        ", and cannot tell how it is placed there. Give it a distributed one "
                        "(distribute_tensor, DTensor::from_local).");
    result = from_plain(tensor, where, if_plain, features, what);
  }
  Placements placements = result.placements();
  placements[where.dim] = normalize({wanted}, result.dim())[0];
  return result.redistribute(std::move(placements));
}

/// The tensor itself, whose gradient is then placed as it is, with P as R: where a layer begins that ranks
/// share, its gradient is reduced, once and for all that was before.
struct PlaceGradient : torch::autograd::Function<PlaceGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor) {
    context->save_for_backward({tensor});
    return tensor.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const DTensor tensor(context->get_saved_variables()[0]);
    return {gradients[0].defined() ? tensor.coerce_gradient(DTensor(gradients[0])) : gradients[0]};
  }
};

/// This rank's part. A replica's gradient is taken to be the whole one on every rank.
at::Tensor local(const at::Tensor& tensor) { return DTensor(tensor).to_local(); }

/// The first tensor placed so.
TensorsHook place_first(const ParallelDim& where, const Placement& if_plain, const Placement& wanted,
                        const char* what, std::optional<int64_t> features = {}) {
  return [=](std::vector<at::Tensor>& tensors) {
    tensors.at(0) = placed(tensors.at(0), where, if_plain, wanted, what, features);
  };
}

/// A parameter that may be missing, along the dim; along others as it is.
void cut(Module& module, const std::string& name, const ParallelDim& where, const Placement& along) {
  const at::Tensor* tensor = parameters_of(module).find(name);
  if (!tensor || !tensor->defined()) return;
  Placements placements = where.placements(along);
  if (DTensor::is_dtensor(*tensor)) {
    placements = DTensor(*tensor).placements();
    TESSERA_CHECK_VALUE(placements[where.dim].is_replicate() || placements[where.dim] == along,
                        "parallelize_module: parameter '", name, "' of ", module.name(), " is placed ",
                        placements[where.dim], " already along that dim of ", where.mesh,
                        ", but shall be placed ", along, ". Does it belong to several modules of the plan?");
    placements[where.dim] = along;
  }
  distribute_parameter(module, name, where.mesh, std::move(placements), where.source);
}

void replicate_parameters(Module& module, const ParallelDim& where) {
  for (const std::string& name : parameters_of(module).keys()) cut(module, name, where, Replicate());
}

/// A Linear adds its bias to its output (see hooks.cpp). To a local output this rank's part is added, which
/// depends on what the output was before, that is left in `output`: of its features those that the output
/// has; where the ranks have other places of it, all, and then each has its part of the gradient.
void add_bias_locally(torch::nn::LinearImpl& module, const std::shared_ptr<std::optional<Spec>>& output) {
  if (!module.bias.defined()) return;
  auto hooks = std::make_shared<WeightHooks>();
  hooks->uses[WeightUse::linear].inputs.push_back([output](std::vector<at::Tensor>& bias_and_output) {
    const auto spec = std::exchange(*output, std::nullopt);
    if (!spec) return;  // not our output
    Placements added, of_gradient;
    for (const Placement& each : spec->placements()) {
      if (each.is_shard_like(spec->ndim() - 1)) {
        added.push_back(each.is_shard() ? Shard(0) : StridedShard(0, each.split()));
        of_gradient.push_back(added.back());
      } else {
        added.push_back(each.is_shard_like() ? Replicate() : each);
        of_gradient.push_back(each.is_shard_like() ? Partial() : Replicate());
      }
    }
    bias_and_output.at(0) =
        DTensor(bias_and_output.at(0)).redistribute(std::move(added)).to_local(std::move(of_gradient));
  });
  DTensorImpl::of(module.bias)->set_attachment(std::move(hooks));
}

/// How a layer's tensors are placed, by style: what the parameters are cut along, the input, and the output.
struct LayerPlan {
  Placement weight, bias, input, output;
};

void parallelize(Module& module, const ParallelDim& where, const LayerPlan& plan,
                 const LayerStyleOptions& options, const char* style) {
  cut(module, "weight", where, plan.weight);
  cut(module, "bias", where, plan.bias);
  const Placement output = options.output_layouts.value_or(plan.output);
  auto* linear = module.as<torch::nn::LinearImpl>();
  std::optional<int64_t> features;
  if (linear) features = linear->weight.size(1);
  TensorsHook place_input =
      place_first(where, options.input_layouts.value_or(plan.input), plan.input, style, features);
  if (plan.input.is_replicate()) {
    place_input = [place = std::move(place_input)](std::vector<at::Tensor>& tensors) {
      place(tensors);
      if (tensors.at(0).requires_grad()) tensors[0] = PlaceGradient::apply(tensors[0]);
    };
  }
  TensorsHook place_output = place_first(where, output, output, style);
  if (options.use_local_output) {
    const auto before = std::make_shared<std::optional<Spec>>();
    place_output = [before, place = std::move(place_output)](std::vector<at::Tensor>& tensors) {
      place(tensors);
      *before = DTensor(tensors.at(0)).spec();
      tensors[0] = local(tensors[0]);
    };
    if (linear) add_bias_locally(*linear, before);
  }
  add_hooks(module, std::move(place_input), std::move(place_output));
}

template <class... M>
bool is_any(const Module& module) {
  return (module.as<M>() || ...);
}

/// Where a convolution has its channels, counted from the end, as inputs may have no batch; 0 if it is none.
int64_t channels_of(const Module& module) {
  using namespace torch::nn;
  if (is_any<Conv1dImpl, ConvTranspose1dImpl>(module)) return -2;
  if (is_any<Conv2dImpl, ConvTranspose2dImpl>(module)) return -3;
  return is_any<Conv3dImpl, ConvTranspose3dImpl>(module) ? -4 : 0;
}

/// Of a convolution's weight: that of the output channels. The other is that of the input channels.
int64_t output_dim_of(const Module& module) {
  using namespace torch::nn;
  return is_any<ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>(module) ? 1 : 0;
}

std::optional<LayerPlan> colwise_plan(const Module& module) {
  using namespace torch::nn;
  if (is_any<LinearImpl>(module)) return LayerPlan{Shard(0), Shard(0), Replicate(), Shard(-1)};
  if (is_any<EmbeddingImpl, EmbeddingBagImpl>(module))
    return LayerPlan{Shard(1), Shard(1), Replicate(), Shard(-1)};
  if (const int64_t dim = channels_of(module))
    return LayerPlan{Shard(output_dim_of(module)), Shard(0), Replicate(), Shard(dim)};
  return std::nullopt;
}

std::optional<LayerPlan> rowwise_plan(const Module& module) {
  using namespace torch::nn;
  if (is_any<LinearImpl>(module)) return LayerPlan{Shard(1), Replicate(), Shard(-1), Replicate()};
  if (is_any<EmbeddingImpl, EmbeddingBagImpl>(module))
    return LayerPlan{Shard(0), Replicate(), Replicate(), Replicate()};
  if (const int64_t dim = channels_of(module))
    return LayerPlan{Shard(1 - output_dim_of(module)), Replicate(), Shard(dim), Replicate()};
  return std::nullopt;
}

/// Each rank has the queries, keys and values of its heads.
void cut_heads(torch::nn::MultiheadAttentionImpl& attention, const ParallelDim& where,
               const LayerStyleOptions& options) {
  const int64_t heads = attention.options.num_heads(), ranks = where.mesh.shape()[where.dim];
  TESSERA_CHECK_VALUE(heads % ranks == 0, "ColwiseParallel: the ", heads,
                      " heads of a MultiheadAttention cannot be dealt evenly to ", ranks, " ranks of ",
                      where.mesh, ".");
  for (const char* name : {"q_proj_weight", "k_proj_weight", "v_proj_weight"}) {
    cut(attention, name, where, Shard(0));
  }
  // Three matrices, one below the other: each is cut.
  cut(attention, "in_proj_weight", where, StridedShard(0, 3));
  cut(attention, "in_proj_bias", where, StridedShard(0, 3));
  for (const char* name : {"bias_k", "bias_v"}) cut(attention, name, where, Shard(2));
  parallelize(*attention.out_proj, where, *rowwise_plan(*attention.out_proj),
              {.output_layouts = options.output_layouts, .use_local_output = options.use_local_output},
              "ColwiseParallel");
}

void check_layouts(const Layouts& given, const Layouts& desired, const char* what) {
  TESSERA_CHECK_VALUE(given.size() == desired.size(), what, ": there are ", given.size(), " layouts, but ",
                      desired.size(), " desired ones; each tensor needs both or neither.");
}

TensorsHook place_all(const ParallelDim& where, const Layouts& given, const Layouts& desired, bool use_local,
                      const char* what) {
  return [=](std::vector<at::Tensor>& tensors) {
    TESSERA_CHECK_VALUE(tensors.size() == given.size(), what, ": the module has ", tensors.size(),
                        " tensors there, but ", given.size(), " layouts were given.");
    for (const size_t i : c10::irange(tensors.size())) {
      if (!given[i] || !tensors[i].defined()) continue;
      tensors[i] = placed(tensors[i], where, *given[i], desired[i].value_or(*given[i]), what);
      if (use_local) tensors[i] = local(tensors[i]);
    }
  };
}

/// Applies a style to all that the path matches. Returns whether there was any; if not, `miss` says why.
bool apply_plan(Module& module, const ParallelDim& where, const std::string& path, const ParallelStyle& style,
                std::string& miss) {
  if (path.empty()) {
    style.apply(module, where);
    return true;
  }
  const size_t dot = path.find('.');
  const std::string token = path.substr(0, dot);
  const std::string rest = dot == std::string::npos ? "" : path.substr(dot + 1);
  bool matched = false, applied = false;
  const auto children = module.named_children();
  for (const auto& child : children) {
    if (fnmatch(token.c_str(), child.key().c_str(), 0) != 0) continue;
    matched = true;
    applied |= apply_plan(*child.value(), where, rest, style, miss);
  }
  if (!matched)
    miss = c10::str("no submodule of ", module.name(), " matches \"", token, "\"; it has ", children.keys());
  return applied;
}

ParallelDim where_of(const DeviceMesh& mesh, const ParallelizeOptions& options) {
  TESSERA_CHECK_VALUE(options.dim || mesh.ndim() == 1, "parallelize_module: ", mesh, " has ", mesh.ndim(),
                      " dims; say which one to use, as in {.dim = \"tp\"}.");
  return {mesh, options.dim ? mesh.dim_index(*options.dim) : 0, options.source};
}

}  // namespace

Placements ParallelDim::placements(const Placement& along) const {
  Placements result(mesh.ndim(), Replicate());
  result[dim] = along;
  return result;
}

ColwiseParallel::ColwiseParallel(LayerStyleOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        if (auto* attention = module.as<torch::nn::MultiheadAttentionImpl>())
          return cut_heads(*attention, where, options);
        const auto plan = colwise_plan(module);
        TESSERA_CHECK_VALUE(plan, "ColwiseParallel: does not know how to cut a ", module.name(),
                            "; it knows Linear, Embedding, EmbeddingBag, convolutions and "
                            "MultiheadAttention. Use distribute_module, or a ParallelStyle of your own.");
        parallelize(module, where, *plan, options, "ColwiseParallel");
      }) {}

RowwiseParallel::RowwiseParallel(LayerStyleOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        const auto plan = rowwise_plan(module);
        TESSERA_CHECK_VALUE(plan, "RowwiseParallel: does not know how to cut a ", module.name(),
                            "; it knows Linear, Embedding, EmbeddingBag and convolutions. Use "
                            "distribute_module, or a ParallelStyle of your own.");
        parallelize(module, where, *plan, options, "RowwiseParallel");
      }) {}

SequenceParallel::SequenceParallel(SequenceParallelOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        replicate_parameters(module, where);
        const Placement cut = Shard(options.sequence_dim);
        TensorsHook to_local;
        if (options.use_local_output)
          to_local = [](std::vector<at::Tensor>& tensors) { tensors.at(0) = local(tensors.at(0)); };
        add_hooks(module, place_first(where, cut, cut, "SequenceParallel"), to_local);
      }) {}

PrepareModuleInput::PrepareModuleInput(PrepareInputOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        add_hooks(module,
                  place_all(where, options.input_layouts, options.desired_input_layouts,
                            options.use_local_output, "PrepareModuleInput"),
                  {});
      }) {
  check_layouts(options.input_layouts, options.desired_input_layouts, "PrepareModuleInput");
}

PrepareModuleOutput::PrepareModuleOutput(PrepareOutputOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        add_hooks(module, {},
                  place_all(where, options.output_layouts, options.desired_output_layouts,
                            options.use_local_output, "PrepareModuleOutput"));
      }) {
  check_layouts(options.output_layouts, options.desired_output_layouts, "PrepareModuleOutput");
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareInputOptions inputs, PrepareOutputOptions outputs)
    : ParallelStyle(
          [inputs = PrepareModuleInput(std::move(inputs)), outputs = PrepareModuleOutput(std::move(outputs))](
              Module& module, const ParallelDim& where) {
            inputs.apply(module, where);
            outputs.apply(module, where);
          }) {}

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options) {
  const ParallelDim where = where_of(mesh, options);
  const Tree tree(module);
  for (const auto& [path, style] : plan) {
    std::string miss;
    TESSERA_CHECK_VALUE(apply_plan(module, where, path, style, miss), "parallelize_module: \"", path,
                        "\" matches nothing: ", miss, ".");
  }
}

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelStyle& style,
                        const ParallelizeOptions& options) {
  const Tree tree(module);
  style.apply(module, where_of(mesh, options));
}

}  // namespace tessera
