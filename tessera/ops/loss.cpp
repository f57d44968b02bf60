#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

namespace tessera::ops {

namespace {

/// A mean, or its gradient, where `self` is cut: that of a sum, divided by how many there are in all.
Localize mean_by_count(const OpCall& call, size_t self, int64_t count) {
  return [=, position = *call.position("reduction")](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!chosen.inputs[self].is_sharded()) return local;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      arguments[position] = static_cast<int64_t>(at::Reduction::Sum);
      Stack results = call_operator(op, std::move(arguments));
      results[0] = results[0].toTensor().div_(static_cast<double>(count));
      return results;
    };
    return local;
  };
}

/// A loss for each element, which may then be summed, or summed and divided by how many there are.
std::optional<Strategies> elementwise_loss(const OpCall& call) {
  const int64_t reduction = call.integer("reduction");
  if (reduction == at::Reduction::None) return propose(Pointwise{}, call);
  const auto self = call.tensor("self"), target = call.tensor("target");
  if (!self || !target || call.tensors[*self].shape() != call.tensors[*target].shape()) return std::nullopt;
  const Spec& spec = call.tensors[*self];
  if (spec.numel() == 0) return std::nullopt;
  Einsum einsum;
  const Letters all = identity(spec.ndim());
  for (const Spec& tensor : call.tensors) {
    if (!at::is_expandable_to(tensor.shape(), spec.shape())) return std::nullopt;
    einsum.inputs.push_back(broadcast(tensor.shape(), spec.shape(), all));
  }
  einsum.outputs = {{}};
  Strategies strategies{strategies_of(einsum), {{Shape()}}};
  if (reduction == at::Reduction::Mean) strategies.localize = mean_by_count(call, *self, spec.numel());
  return strategies;
}

/// The gradient of a mean is that of a sum, divided by how many there are in all.
std::optional<Strategies> elementwise_loss_backward(const OpCall& call) {
  const int64_t reduction = call.integer("reduction");
  auto strategies = propose(Pointwise{.linear = {{"grad_output"}}}, call);
  if (!strategies || reduction != at::Reduction::Mean) return strategies;
  const auto self = call.tensor("self");
  if (!self) return std::nullopt;
  strategies->localize = mean_by_count(call, *self, call.tensors[*self].numel());
  return strategies;
}

at::Tensor reduced(const at::Tensor& losses, int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  return reduction == at::Reduction::Mean ? at::mean(losses) : at::sum(losses);
}

std::optional<Strategies> soft_margin(const OpCall&) {
  Strategies strategies;
  strategies.decompose = [](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor product = at::mul(arguments[0].toTensor(), arguments[1].toTensor());
    return Stack{reduced(at::log1p(at::exp(at::neg(product))), arguments[2].toInt())};
  };
  return strategies;
}

/// (1 - t) x + log(1 + exp(-|x|)) + max(-x, 0), the last two weighted for what is true.
std::optional<Strategies> cross_entropy_with_logits(const OpCall&) {
  Strategies strategies;
  strategies.decompose = [](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor x = arguments[0].toTensor(), target = arguments[1].toTensor();
    at::Tensor soft = at::add(at::clamp_min(at::neg(x), 0), at::log1p(at::exp(at::neg(at::abs(x)))));
    if (arguments[3].isTensor()) {
      const at::Tensor weight = at::add(at::mul(at::sub(arguments[3].toTensor(), 1), target), 1);
      soft = at::mul(soft, weight);
    }
    at::Tensor losses = at::add(at::mul(at::rsub(target, 1), x), soft);
    if (arguments[2].isTensor()) losses = at::mul(losses, arguments[2].toTensor());
    return Stack{reduced(losses, arguments[4].toInt())};
  };
  return strategies;
}

/// Dims: batch, classes, places. Where classes are cut, each rank knows of the targets that are its classes.
constexpr char kClass = 'C';

struct Nll {
  Letters input, target;
  int64_t class_dim;

  explicit Nll(int64_t ndim) : class_dim(ndim > 1 ? 1 : 0) {
    for (int64_t d = 0; d < ndim; ++d) {
      input.push_back(d == class_dim ? kClass : static_cast<char>('a' + d));
      if (d != class_dim) target.push_back(static_cast<char>('a' + d));
    }
  }

  /// The operator itself, with targets that are among the classes this rank holds; others are ignored.
  Localize localize(const OpCall& call, size_t self) const {
    const size_t target_position = *call.position("target"),
                 ignored_position = *call.position("ignore_index");
    return [=, dim = class_dim](const ChosenSpecs& chosen) {
      LocalCall local;
      const Spec& spec = chosen.inputs[self];
      if (mesh_dims_of(spec, dim).empty()) return local;
      const int64_t offset = spec.global_offset()[dim], held = spec.local_shape()[dim],
                    size = spec.shape()[dim];
      local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
        constexpr int64_t kIgnored = -100;
        const at::Tensor target = arguments[target_position].toTensor();
        const at::Tensor ignored = at::eq(target, arguments[ignored_position].toInt());
        const at::Tensor classes = at::masked_fill(target, ignored, 0);
        if (classes.numel() > 0 && classes.is_cpu()) {
          const auto [lowest, highest] = at::aminmax(classes);
          TESSERA_CHECK_INDEX(lowest.item<int64_t>() >= 0 && highest.item<int64_t>() < size,
                              op.schema().name(), ": targets go from ", lowest.item<int64_t>(), " to ",
                              highest.item<int64_t>(), ", but must be classes from 0 to ", size - 1,
                              ", or ignore_index.");
        }
        const at::Tensor own = at::sub(classes, offset);
        const at::Tensor elsewhere = at::logical_or(at::lt(own, 0), at::ge(own, held));
        arguments[target_position] = at::masked_fill(own, at::logical_or(elsewhere, ignored), kIgnored);
        arguments[ignored_position] = kIgnored;
        return call_operator(op, std::move(arguments));
      };
      return local;
    };
  }
};

/// Ranks must hold one range of classes.
std::vector<Strategy> nll_strategies(const Einsum& einsum, size_t self, int64_t class_dim) {
  std::vector<Strategy> result = strategies_of(einsum);
  for (Strategy& strategy : result) strategy.contiguous = strategy.inputs[self].is_shard_like(class_dim);
  return result;
}

/// A weighted mean is a sum of losses over a sum of weights: both partial.
Stack weighted_mean(const c10::OperatorHandle& op, Stack arguments) {
  arguments[3] = static_cast<int64_t>(at::Reduction::Sum);
  Stack sums = call_operator(op, std::move(arguments));
  const at::Tensor weight = at::add(sums[1].toTensor(), 0);
  return {at::div(sums[0].toTensor(), weight), weight};
}

std::optional<Strategies> nll(const OpCall& call) {
  const auto self = call.tensor("self"), target = call.tensor("target");
  if (!self || !target) return std::nullopt;
  const Spec& spec = call.tensors[*self];
  const int64_t reduction = call.integer("reduction");
  const Nll dims(spec.ndim());
  if (spec.numel() == 0) return std::nullopt;
  if (reduction == at::Reduction::Mean &&
      std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& s) { return s.is_sharded(); })) {
    Strategies strategies;
    strategies.decompose = weighted_mean;
    return strategies;
  }
  Einsum einsum;
  einsum.inputs = {dims.input, dims.target};
  if (call.tensor("weight")) einsum.inputs.push_back({kClass});
  einsum.outputs = {reduction == at::Reduction::None ? dims.target : Letters(), {}};
  if (reduction == at::Reduction::Mean) einsum.contracted = std::nullopt;
  Shape losses;
  if (reduction == at::Reduction::None) losses = call.tensors[*target].shape().vec();
  Strategies strategies{nll_strategies(einsum, *self, dims.class_dim), {{losses}, {Shape()}}};
  strategies.localize = dims.localize(call, *self);
  return strategies;
}

std::optional<Strategies> nll_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad_output"), self = call.tensor("self"),
             target = call.tensor("target");
  if (!gradient || !self || !target) return std::nullopt;
  const Spec& spec = call.tensors[*self];
  const Nll dims(spec.ndim());
  if (spec.numel() == 0) return std::nullopt;
  Einsum einsum;
  for (const uint32_t position : call.positions) {
    const std::string& name = call.schema->arguments()[position].name();
    if (name == "grad_output") {
      einsum.inputs.push_back(call.integer("reduction") == at::Reduction::None ? dims.target : Letters());
    } else if (name == "self") {
      einsum.inputs.push_back(dims.input);
    } else if (name == "target") {
      einsum.inputs.push_back(dims.target);
    } else if (name == "weight") {
      einsum.inputs.push_back({kClass});
    } else {
      einsum.inputs.emplace_back();
    }
  }
  einsum.outputs = {dims.input};
  Strategies strategies{nll_strategies(einsum, *self, dims.class_dim), {{spec.shape().vec()}}};
  strategies.localize = dims.localize(call, *self);
  const auto total = call.tensor("total_weight");
  if (total && call.integer("reduction") != at::Reduction::Mean) {
    // It is not looked at, and partial if the losses were computed so.
    for (Strategy& strategy : strategies.options) strategy.inputs[*total] = Partial();
  }
  return strategies;
}

/// A loss for each sample, of all its classes. Without a dim of samples it is one, and whole.
std::optional<Strategies> sample_loss(const OpCall& call, bool backward) {
  const auto self = call.tensor("self"), target = call.tensor("target");
  if (!self || !target) return std::nullopt;
  const Spec& spec = call.tensors[*self];
  const bool batched = spec.ndim() == 2;
  if (spec.numel() == 0 || spec.ndim() == 0) return std::nullopt;
  if (batched && call.tensors[*target].ndim() == 0) return std::nullopt;
  const int64_t reduction = call.integer("reduction");
  Einsum einsum;
  auto of_samples = [&](int64_t ndim) {
    Letters letters(ndim, kUnsharded);
    if (batched && ndim > 0) letters[0] = 'n';
    return letters;
  };
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const bool is_weight = call.schema->arguments()[call.positions[i]].name() == "weight";
    einsum.inputs.push_back(is_weight ? Letters{kUnsharded} : of_samples(call.tensors[i].ndim()));
  }
  std::vector<Result> results{{spec.shape().vec()}};
  if (!backward) {
    Shape losses;
    if (batched && reduction == at::Reduction::None) losses = {spec.shape()[0]};
    results.insert(results.begin(), {losses});
  }
  results.resize(call.schema->returns().size());
  for (const Result& result : results)
    einsum.outputs.push_back(of_samples(static_cast<int64_t>(result.shape.size())));
  if (backward) einsum.linear = linear_tensors(call, {{first_argument(call)}});
  Strategies strategies{strategies_of(einsum), std::move(results)};
  strategies.localize = [self = *self, mean = mean_by_count(call, *self, spec.shape()[0]),
                         reduction](const ChosenSpecs& chosen) {
    LocalCall local;
    if (chosen.inputs[self].local_shape()[0] == 0) {
      // libtorch leaves a sum of none as memory has it.
      local.compute = [outputs = chosen.outputs](const c10::OperatorHandle&, Stack arguments) {
        Stack results;
        for (const Spec& output : outputs)
          results.emplace_back(at::zeros(output.local_shape(), arguments[0].toTensor().options()));
        return results;
      };
    } else if (reduction == at::Reduction::Mean) {
      local = mean(chosen);
    }
    return local;
  };
  return strategies;
}

Rule sample_loss_rule(const char* text, bool backward) {
  Rule rule{text, [backward](const OpCall& call) { return sample_loss(call, backward); }, {"reduction"}};
  rule.checks_values_of = {"target"};
  return rule;
}

/// The largest of the target lengths that all ranks have along some mesh dims. Collective.
int64_t longest(const at::Tensor& lengths, const Spec& spec, const std::vector<int64_t>& mesh_dims) {
  const at::Tensor most = at::zeros({1}, lengths.options().dtype(at::kLong));
  if (lengths.numel() > 0) most.copy_(lengths.max());
  comm::all_reduce(most, c10d::ReduceOp::MAX, group_of(spec.mesh(), mesh_dims)).wait();
  return most.item<int64_t>();
}

/// Losses of sequences; samples may be cut where their targets are rows of one length. How many of these
/// count is told by lists, of which a rank gets its part, or by tensors. What is kept for the gradient is as
/// wide as the longest targets of all.
std::optional<Strategies> ctc(const OpCall& call, bool backward) {
  const auto probabilities = call.tensor("log_probs"), targets = call.tensor("targets");
  if (!probabilities || !targets) return std::nullopt;
  const Spec& x = call.tensors[*probabilities];
  if (x.ndim() != 3 || call.tensors[*targets].ndim() != 2 || x.numel() == 0) return std::nullopt;
  const int64_t time = x.shape()[0], samples = x.shape()[1];
  Einsum einsum;
  einsum.contiguous = true;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    Letters letters(call.tensors[i].ndim(), kUnsharded);
    if (letters.empty()) return std::nullopt;
    letters[i == *probabilities ? 1 : 0] = 'n';
    einsum.inputs.push_back(std::move(letters));
  }
  std::vector<std::pair<size_t, Shape>> lists;  // by position
  for (const char* name : {"input_lengths", "target_lengths"}) {
    if (call.tensor(name)) continue;
    lists.emplace_back(*call.position(name), call.integers(name));
    if (static_cast<int64_t>(lists.back().second.size()) != samples) return std::nullopt;
  }
  auto width_of = [](int64_t length) { return 2 * length + 1; };
  const size_t counted = *call.position("target_lengths");
  std::optional<int64_t> width;
  if (!lists.empty() && lists.back().first == counted)
    width = width_of(*std::max_element(lists.back().second.begin(), lists.back().second.end()));
  Strategies strategies;
  if (backward) {
    einsum.outputs = {letters(".n.")};
    einsum.linear = linear_tensors(call, {{first_argument(call)}});
    strategies.results = {{x.shape().vec()}};
  } else {
    einsum.outputs = {letters("n"), letters("n..")};
    strategies.results = {{{samples}}, {{samples, time, width.value_or(kLocal)}}};
  }
  strategies.options = strategies_of(einsum);
  strategies.localize = [=, number = *probabilities,
                         position = call.positions[*probabilities]](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[number];
    const std::vector<int64_t> mesh_dims = mesh_dims_of(x, 1);
    if (mesh_dims.empty()) return local;
    const int64_t held = x.local_shape()[1];
    for (const auto& [at, lengths] : lists) {
      const auto begin = lengths.begin() + (held > 0 ? x.global_offset()[1] : 0);
      local.arguments.emplace_back(at, c10::IValue(Shape(begin, begin + held)));
    }
    local.communicates = !backward && !width;
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor own = arguments[position].toTensor();
      const int64_t wide = backward || width ? width.value_or(0)
                                             : width_of(longest(arguments[counted].toTensor(), x, mesh_dims));
      if (held == 0 && backward) return Stack{at::zeros_like(own)};
      if (held == 0) return Stack{own.new_empty({0}), own.new_empty({0, time, wide})};
      Stack results = call_operator(op, std::move(arguments));
      if (backward) return results;
      const at::Tensor kept = results[1].toTensor();
      results[1] =
          at::constant_pad_nd(kept, {0, wide - kept.size(2)}, -std::numeric_limits<double>::infinity());
      return results;
    };
    return local;
  };
  return strategies;
}

Rule ctc_rule(const char* text, bool backward) {
  return {text,
          [backward](const OpCall& call) { return ctc(call, backward); },
          {"input_lengths", "target_lengths"}};
}

}  // namespace

Table loss_rules() {
  constexpr bool kForward = false, kBackward = true;
  return {
      {{"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"},
       {"pointwise; reduced: P(sum), a mean by the global count", elementwise_loss, {"reduction"}}},
      {{"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
        "binary_cross_entropy_backward", "soft_margin_loss_backward"},
       {"pointwise; of a mean by the global count", elementwise_loss_backward, {"reduction"}}},
      {{"soft_margin_loss"}, {"by pointwise operators", soft_margin}},
      {{"binary_cross_entropy_with_logits"}, {"by pointwise operators", cross_entropy_with_logits}},
      {{"multi_margin_loss", "multilabel_margin_loss_forward"},
       sample_loss_rule("samples cut; reduced: P(sum), a mean by the global count", kForward)},
      {{"multi_margin_loss_backward", "multilabel_margin_loss_backward"},
       sample_loss_rule("samples cut; of a mean by the global count", kBackward)},
      {{"_ctc_loss", "_ctc_loss.Tensor"}, ctc_rule(".n.,n.->n,n..", kForward)},
      {{"_ctc_loss_backward", "_ctc_loss_backward.Tensor"}, ctc_rule("n,.n.,n.,n,n..->.n.", kBackward)},
      {{"nll_loss_forward", "nll_loss2d_forward"},
       for_loss_parallel(
           {"nc..,n..(,c)->n..; reduced: P(sum), a mean by sums of losses and weights", nll, {"reduction"}})},
      {{"nll_loss_backward", "nll_loss2d_backward"},
       for_loss_parallel({"n..,nc..,n..(,c)->nc..", nll_backward, {"reduction"}})},
  };
}

}  // namespace tessera::ops
