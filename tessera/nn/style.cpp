#include <tessera/comm/agreement.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/nn/parallel_layer.h>
#include <tessera/nn/style.h>
#include <tessera/nn/tree.h>

#include <fnmatch.h>

#include <c10/util/irange.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera {

namespace {

using torch::nn::Module;

at::Tensor local(const at::Tensor& tensor) { return DTensor(tensor).to_local(); }

/// Distributes a parameter, if the module has it: so along the dim, along others as it is. The name is dotted
/// if it is a submodule's.
void shard(Module& module, const std::string& name, const ParallelDim& where, const Placement& along) {
  if (const size_t dot = name.find('.'); dot != std::string::npos)
    return shard(*module.named_children()[name.substr(0, dot)], name.substr(dot + 1), where, along);
  const at::Tensor* tensor = parameters_of(module).find(name);
  if (!tensor || !tensor->defined()) return;
  Placements placements = where.placements(along);
  if (DTensor::is_dtensor(*tensor)) {
    placements = DTensor(*tensor).placements();
    TESSERA_CHECK_VALUE(placements[where.dim].is_replicate() || placements[where.dim] == along,
                        "parallelize_module: parameter '", name, "' of ", module.name(), " is placed ",
                        placements[where.dim], " already along that dim of ", where.mesh,
                        ", but should be placed ", along, ". Does it belong to several modules of the plan?");
    placements[where.dim] = along;
  }
  distribute_parameter(module, name, where.mesh, std::move(placements), where.source);
}

void replicate_parameters(Module& module, const ParallelDim& where) {
  for (const std::string& name : parameters_of(module).keys()) shard(module, name, where, Replicate());
}

/// A Linear adds its bias to its output (see hooks.cpp). To a local output, whose spec was left in `output`,
/// the local tensor of the bias is added: of its features those that the output has. Where the output is
/// sharded along another dim, that is all of them, and each rank has a partial value of the gradient.
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

template <class... M>
bool is_any(const Module& module) {
  return (module.as<M>() || ...);
}

std::optional<LayerKind> kind_of(const Module& module) {
  using namespace torch::nn;
  if (is_any<LinearImpl>(module)) return LayerKind::linear;
  if (is_any<EmbeddingImpl, EmbeddingBagImpl>(module)) return LayerKind::embedding;
  if (is_any<Conv1dImpl>(module)) return LayerKind::conv1d;
  if (is_any<Conv2dImpl>(module)) return LayerKind::conv2d;
  if (is_any<Conv3dImpl>(module)) return LayerKind::conv3d;
  if (is_any<ConvTranspose1dImpl>(module)) return LayerKind::conv_transpose1d;
  if (is_any<ConvTranspose2dImpl>(module)) return LayerKind::conv_transpose2d;
  if (is_any<ConvTranspose3dImpl>(module)) return LayerKind::conv_transpose3d;
  if (is_any<MultiheadAttentionImpl>(module)) return LayerKind::multihead_attention;
  return std::nullopt;
}

/// Redistributes the output, and returns local tensors if asked to. `last` is the module whose output is that
/// of the layer.
void prepare_output(Module& last, std::shared_ptr<const ParallelLayer> layer, bool use_local_output) {
  if (!use_local_output) {
    return add_hooks(last, {}, [layer](std::vector<at::Tensor>& tensors) {
      tensors.at(0) = layer->prepare_output(tensors.at(0));
    });
  }
  const auto before = std::make_shared<std::optional<Spec>>();
  add_hooks(last, {}, [layer, before](std::vector<at::Tensor>& tensors) {
    tensors.at(0) = layer->prepare_output(tensors.at(0));
    *before = DTensor(tensors[0]).spec();
    tensors[0] = local(tensors[0]);
  });
  if (auto* linear = last.as<torch::nn::LinearImpl>()) add_bias_locally(*linear, before);
}

void parallelize(Module& module, const ParallelDim& where, LayerStyle style, const ColwiseOptions& options) {
  const auto kind = kind_of(module);
  const auto plan = kind ? layer_plan(style, *kind, options.blocks) : std::nullopt;
  if (!plan) refuse_layer(style, module.name());
  auto* attention = module.as<torch::nn::MultiheadAttentionImpl>();
  if (attention) check_heads(attention->options.num_heads(), where);
  for (const auto& [name, placement] : plan->parameters) shard(module, name, where, placement);
  std::optional<int64_t> features;
  if (plan->feature_dim) features = parameters_of(module)["weight"].size(*plan->feature_dim);
  const auto layer = std::make_shared<const ParallelLayer>(
      style, *plan, where, ParallelLayer::Layouts{options.input_layouts, options.output_layouts}, features,
      module.name());
  add_hooks(module, [layer](std::vector<at::Tensor>& tensors) { layer->prepare_inputs(tensors); }, {});
  prepare_output(attention ? *attention->out_proj : module, layer, options.use_local_output);
}

void check_layouts(const Layouts& given, const Layouts& desired, const char* what) {
  TESSERA_CHECK_VALUE(given.size() == desired.size(), what, ": there are ", given.size(), " layouts, but ",
                      desired.size(), " desired ones; there must be as many.");
}

TensorsHook prepare_all(const ParallelDim& where, const Layouts& given, const Layouts& desired,
                        bool use_local, const char* what) {
  return [=](std::vector<at::Tensor>& tensors) {
    TESSERA_CHECK_VALUE(tensors.size() == given.size(), what, ": the module has ", tensors.size(),
                        " tensors there, but ", given.size(), " layouts were given.");
    for (const size_t i : c10::irange(tensors.size())) {
      if (!given[i] || !tensors[i].defined()) continue;
      tensors[i] = prepare_activation(tensors[i], where, {.if_plain = *given[i], .desired = desired[i]},
                                      c10::str("tensor ", i, " of ", what));
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

/// Calls `apply` on all ranks of the mesh together. Without a source, they exchange nothing, and so compare nothing.
template <class Apply>
void parallelized(Module& module, const DeviceMesh& mesh, const ParallelizeOptions& options,
                  const std::string& paths, const Apply& apply) {
  const bool compares = options.source && mesh.is_member();
  std::optional<ParallelDim> where;
  comm::together(
      "parallelize_module", options.source ? mesh.joint_group_or_null() : Group(),
      [&] {
        where = where_of(mesh, options);
        if (!compares) return std::string();
        return c10::str(module.name(), ", ", mesh, " along dim ", where->dim, paths, ": ",
                        tensors_text(module));
      },
      [&] {
        const Tree tree(module);
        apply(*where);
      });
}

}  // namespace

ColwiseParallel::ColwiseParallel(ColwiseOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        parallelize(module, where, LayerStyle::colwise, options);
      }) {
  layer_plan(LayerStyle::colwise, LayerKind::linear, options.blocks);  // refuses bad options now
}

RowwiseParallel::RowwiseParallel(RowwiseOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        parallelize(module, where, LayerStyle::rowwise,
                    {.input_layouts = options.input_layouts,
                     .output_layouts = options.output_layouts,
                     .use_local_output = options.use_local_output});
      }) {}

SequenceParallel::SequenceParallel(SequenceParallelOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        replicate_parameters(module, where);
        const Placement sequence = Shard(options.sequence_dim);
        const std::string what = "the input of SequenceParallel on " + module.name();
        TensorsHook to_local;
        if (options.use_local_output)
          to_local = [](std::vector<at::Tensor>& tensors) { tensors.at(0) = local(tensors.at(0)); };
        const TensorsHook shard_input = [=](std::vector<at::Tensor>& tensors) {
          tensors.at(0) =
              prepare_activation(tensors.at(0), where, {.if_plain = sequence, .desired = sequence}, what);
        };
        add_hooks(module, shard_input, to_local);
      }) {}

ContextParallel::ContextParallel(ContextParallelStyleOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        const Placement sequence = Shard(options.sequence_dim);
        const std::string what = "the input of ContextParallel on " + module.name();
        const TensorsHook shard_input = [=](std::vector<at::Tensor>& tensors) {
          tensors.at(0) =
              prepare_activation(tensors.at(0), where, {.if_plain = sequence, .desired = sequence}, what);
        };
        add_hooks(module, shard_input, {});
        add_scope(module, [options] {
          return std::make_shared<ContextParallelGuard>(
              ContextParallelOptions{options.method, options.zigzag});
        });
      }) {}

PrepareModuleInput::PrepareModuleInput(PrepareInputOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        add_hooks(module,
                  prepare_all(where, options.input_layouts, options.desired_input_layouts,
                              options.use_local_output, "PrepareModuleInput"),
                  {});
      }) {
  check_layouts(options.input_layouts, options.desired_input_layouts, "PrepareModuleInput");
}

PrepareModuleOutput::PrepareModuleOutput(PrepareOutputOptions options)
    : ParallelStyle([options](Module& module, const ParallelDim& where) {
        add_hooks(module, {},
                  prepare_all(where, options.output_layouts, options.desired_output_layouts,
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
  std::string paths;
  for (const auto& [path, style] : plan) paths += c10::str(", \"", path, "\"");
  parallelized(module, mesh, options, paths, [&](const ParallelDim& where) {
    for (const auto& [path, style] : plan) {
      std::string miss;
      TESSERA_CHECK_VALUE(apply_plan(module, where, path, style, miss), "parallelize_module: \"", path,
                          "\" matches nothing: ", miss, ".");
    }
  });
}

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelStyle& style,
                        const ParallelizeOptions& options) {
  parallelized(module, mesh, options, "", [&](const ParallelDim& where) { style.apply(module, where); });
}

}  // namespace tessera
