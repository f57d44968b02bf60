#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/order.h>
#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <limits>
#include <string>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

// --- what a rank computes

/// A mean, or its gradient, where something is sharded: that of a sum, divided by how many there are in all.
Localize mean_by_count(int64_t count) {
  return [count](const ChosenSpecs& chosen) {
    const auto is_sharded = [](const Spec& spec) { return spec.is_sharded(); };
    if (std::none_of(chosen.inputs.begin(), chosen.inputs.end(), is_sharded)) return LocalCall();
    return LocalCall{{}, [count](const c10::OperatorHandle& op, Stack arguments) {
                       NamedArguments(op, arguments)["reduction"] = static_cast<int64_t>(at::Reduction::Sum);
                       Stack results = call_operator(op, std::move(arguments));
                       results[0] = results[0].toTensor().div_(static_cast<double>(count));
                       return results;
                     }};
  };
}

const char* const kByCount = "by the global count";

/// A mean over all elements, which are broadcast.
LocalStep mean_of_elements() {
  return {kByCount, [](const OpCall& call) {
            Shape shape;
            for (const Spec& spec : call.tensors) shape = at::infer_size(shape, spec.shape());
            return mean_by_count(c10::multiply_integers(shape));
          }};
}

/// Of samples, which are the first dim of `self` if that has two. libtorch leaves a sum of none as memory has
/// it.
enum class Samples { summed, averaged };
LocalStep of_samples(Samples kind) {
  return {kind == Samples::averaged ? kByCount : "", [kind](const OpCall& call) -> Localize {
            const size_t self = *call.tensor("self");
            const Localize mean = mean_by_count(call.tensors[self].shape()[0]);
            return [=](const ChosenSpecs& chosen) {
              const Spec& x = chosen.inputs[self];
              if (x.local_shape()[0] > 0) return kind == Samples::averaged ? mean(chosen) : LocalCall();
              return LocalCall{{},
                               [x, outputs = chosen.outputs](const c10::OperatorHandle& op, Stack arguments) {
                                 const auto options = NamedArguments(op, arguments).tensor("self").options();
                                 Stack results;
                                 for (const Spec& output : outputs) {
                                   // Those whose classes only the operator knows are like `self`.
                                   const auto shape = (output ? output : x).local_shape();
                                   results.emplace_back(at::zeros(shape, options));
                                 }
                                 return results;
                               }};
            };
          }};
}

// --- rules by the argument `reduction`

Cases by_reduction(Rule none, Rule mean, Rule sum) {
  const auto value = [](at::Reduction::Reduction reduction) { return static_cast<int64_t>(reduction); };
  return {"reduction",
          {{"none", value(at::Reduction::None), std::move(none)},
           {"mean", value(at::Reduction::Mean), std::move(mean)},
           {"sum", value(at::Reduction::Sum), std::move(sum)}}};
}

Rule with(Form form, LocalStep local) {
  Rule rule(std::move(form), {});
  rule.local = std::move(local);
  return rule;
}

/// A loss for each element, which may then be summed, or summed and divided by how many there are.
Cases elementwise_loss() {
  const Pattern reduced{.letters = {"B,B,B?->"}, .never_empty = true};
  return by_reduction(Pointwise{}, with(reduced, mean_of_elements()), reduced);
}

/// `also`: what it is linear in besides the gradient.
Cases elementwise_loss_backward(const std::vector<Names>& also = {}) {
  Pointwise pointwise{.linear = also};
  pointwise.linear.push_back({"grad_output"});
  return by_reduction(pointwise, with(pointwise, mean_of_elements()), pointwise);
}

std::optional<Strategies> cross_entropy_backward(const OpCall& call) {
  auto strategies = propose(elementwise_loss_backward({{"weight"}}), call);
  const auto target = call.tensor("target");
  if (!strategies || !target) return strategies;
  Placements inputs;
  inputs.assign(call.tensors.size(), Replicate());
  inputs[*target] = Partial(ReduceOp::avg);
  strategies->options.push_back({std::move(inputs), {Partial(ReduceOp::avg)}});
  return strategies;
}

at::Tensor reduced(const at::Tensor& losses, int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  return reduction == at::Reduction::Mean ? at::mean(losses) : at::sum(losses);
}

Stack soft_margin(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor product = at::mul(arguments.tensor("self"), arguments.tensor("target"));
  return {reduced(at::log1p(at::exp(at::neg(product))), arguments["reduction"].toInt())};
}

/// (1 - t) x + log(1 + exp(-|x|)) + max(-x, 0), the last two weighted for what is true.
Stack cross_entropy_with_logits(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor x = arguments.tensor("self"), target = arguments.tensor("target");
  at::Tensor soft = at::add(at::clamp_min(at::neg(x), 0), at::log1p(at::exp(at::neg(at::abs(x)))));
  if (const at::Tensor positive = arguments.tensor("pos_weight"); positive.defined())
    soft = at::mul(soft, at::add(at::mul(at::sub(positive, 1), target), 1));
  at::Tensor losses = at::add(at::mul(at::rsub(target, 1), x), soft);
  if (const at::Tensor weight = arguments.tensor("weight"); weight.defined())
    losses = at::mul(losses, weight);
  return {reduced(losses, arguments["reduction"].toInt())};
}

/// A loss for each sample n, of all its classes; without a dim of samples there is one. `each`, `all`: the
/// patterns of losses that are not reduced, and that are.
Rule sample_loss(Names each, Names all, const std::vector<Names>& linear = {}) {
  const Pattern one{.letters = std::move(each), .linear = linear, .never_empty = true};
  const Pattern reduced{.letters = std::move(all), .linear = linear, .never_empty = true};
  Rule rule =
      by_reduction(with(one, of_samples(Samples::summed)), with(reduced, of_samples(Samples::averaged)),
                   with(reduced, of_samples(Samples::summed)));
  rule.checks_values_of = {"target"};
  return rule;
}

// --- negative log likelihood: dims n are of samples, c of classes. Where classes are sharded, each rank
// knows of the targets that are its classes.

/// The operator itself, with targets that are among the local classes; others are ignored.
Stack nll_of_local_classes(const Spec& input, int64_t class_dim, const c10::OperatorHandle& op, Stack stack) {
  constexpr int64_t kIgnored = -100;
  const int64_t size = input.shape()[class_dim];
  const NamedArguments arguments(op, stack);
  const at::Tensor target = arguments.tensor("target");
  const at::Tensor ignored = at::eq(target, arguments["ignore_index"].toInt());
  const at::Tensor classes = at::masked_fill(target, ignored, 0);
  if (classes.numel() > 0 && !classes.is_meta()) {
    const auto [lowest, highest] = at::aminmax(classes);
    if (classes.is_cpu()) {
      TESSERA_CHECK_INDEX(lowest.item<int64_t>() >= 0 && highest.item<int64_t>() < size, op.schema().name(),
                          ": targets go from ", lowest.item<int64_t>(), " to ", highest.item<int64_t>(),
                          ", but must be classes from 0 to ", size - 1, ", or ignore_index.");
    } else {
      // It checks them by itself: a look at them would wait for it.
      at::_assert_async(at::logical_and(at::ge(lowest, 0), at::lt(highest, size)),
                        c10::str(op.schema().name(), ": targets must be classes from 0 to ", size - 1,
                                 ", or ignore_index."));
    }
  }
  const at::Tensor own = at::sub(classes, input.global_offset()[class_dim]);
  const at::Tensor elsewhere = at::logical_or(at::lt(own, 0), at::ge(own, input.local_shape()[class_dim]));
  arguments["target"] = at::masked_fill(own, at::logical_or(elsewhere, ignored), kIgnored);
  arguments["ignore_index"] = kIgnored;
  return call_operator(op, std::move(stack));
}

LocalStep of_local_classes() {
  return {"of local classes", [](const OpCall& call) -> Localize {
            return [self = *call.tensor("self")](const ChosenSpecs& chosen) {
              const Spec& input = chosen.inputs[self];
              const int64_t class_dim = input.ndim() > 1 ? 1 : 0;
              if (mesh_dims_of(input, class_dim).empty()) return LocalCall();
              return LocalCall{{}, [=](const c10::OperatorHandle& op, Stack arguments) {
                                 return nll_of_local_classes(input, class_dim, op, std::move(arguments));
                               }};
            };
          }};
}

/// A weighted mean is a sum of losses over a sum of weights: both partial.
Stack weighted_mean(const c10::OperatorHandle& op, Stack arguments) {
  NamedArguments(op, arguments)["reduction"] = static_cast<int64_t>(at::Reduction::Sum);
  Stack sums = call_operator(op, std::move(arguments));
  const at::Tensor weight = at::add(sums[1].toTensor(), 0);
  return {at::div(sums[0].toTensor(), weight), weight};
}

Cases nll() {
  const Pattern each{
      .letters = {"nc,n,c?->n,", "c,,c?->,", "nchw,nhw,c?->nhw,"}, .contiguous = "c", .never_empty = true};
  const Pattern sum{
      .letters = {"nc,n,c?->,", "c,,c?->,", "nchw,nhw,c?->,"}, .contiguous = "c", .never_empty = true};
  const Pattern mean{.letters = {"..,..,..?->,"},
                     .never_empty = true,
                     .if_sharded = Decomposition{{"nll_loss_forward", "div"}, weighted_mean}};
  return by_reduction(with(each, of_local_classes()), mean, with(sum, of_local_classes()));
}

Cases nll_backward() {
  // The last is the total weight. Only a mean looks at it, and it is partial if the losses were computed so.
  const Pattern each{.letters = {"n,nc,n,c?,->nc", ",c,,c?,->c", "nhw,nchw,nhw,c?,->nchw"},
                     .contiguous = "c",
                     .unread = {"total_weight"},
                     .never_empty = true};
  Pattern sum = each;
  sum.letters = {",nc,n,c?,->nc", ",c,,c?,->c", ",nchw,nhw,c?,->nchw"};
  Pattern mean = sum;
  mean.unread = {};
  return by_reduction(with(each, of_local_classes()), with(mean, of_local_classes()),
                      with(sum, of_local_classes()));
}

// --- losses of sequences

/// How many entries of a row of the targets count, by sample: as lists, of which a rank gets its part, or as
/// tensors.
struct Lengths {
  std::vector<std::pair<size_t, Shape>> lists;  // by position
  /// Of what is kept for the gradient: as wide as the longest targets of all. Nothing if these are a tensor.
  std::optional<int64_t> width;

  static int64_t width_of(int64_t length) { return 2 * length + 1; }

  /// Nothing if there are not as many as samples.
  static std::optional<Lengths> of(const OpCall& call, int64_t samples) {
    Lengths result;
    for (const char* name : {"input_lengths", "target_lengths"}) {
      if (call.tensor(name)) continue;
      const Shape lengths = call.integers(name);
      if (static_cast<int64_t>(lengths.size()) != samples) return std::nullopt;
      result.lists.emplace_back(*call.position(name), lengths);
      if (name == std::string("target_lengths"))
        result.width = width_of(*std::max_element(lengths.begin(), lengths.end()));
    }
    return result;
  }

  /// Those of the local samples.
  void put_local(const Spec& probabilities, LocalCall& local) const {
    const int64_t size = probabilities.local_shape()[1];
    for (const auto& [position, lengths] : lists) {
      const auto begin = lengths.begin() + (size > 0 ? probabilities.global_offset()[1] : 0);
      local.arguments.emplace_back(position, c10::IValue(Shape(begin, begin + size)));
    }
  }
};

enum class Ctc { losses, gradient };

/// The operator on the local samples.
Localize ctc_of_local_samples(const OpCall& call, const Lengths& lengths, Ctc kind) {
  return [=, index = *call.tensor("log_probs")](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[index];
    const std::vector<int64_t> mesh_dims = mesh_dims_of(x, 1);
    if (mesh_dims.empty()) return local;
    lengths.put_local(x, local);
    local.communicates = kind == Ctc::losses && !lengths.width;
    local.compute = [=, width = lengths.width](const c10::OperatorHandle& op, Stack stack) {
      const NamedArguments arguments(op, stack);
      const at::Tensor own = arguments.tensor("log_probs");
      const bool is_empty = own.size(1) == 0;
      if (kind == Ctc::gradient)
        return is_empty ? Stack{at::zeros_like(own)} : call_operator(op, std::move(stack));
      const int64_t wide = width ? *width
                                 : Lengths::width_of(largest_of_all(arguments.tensor("target_lengths"),
                                                                    group_of(x.mesh(), mesh_dims)));
      if (is_empty) return Stack{own.new_empty({0}), own.new_empty({0, own.size(0), wide})};
      Stack results = call_operator(op, std::move(stack));
      const at::Tensor kept = results[1].toTensor();
      results[1] =
          at::constant_pad_nd(kept, {0, wide - kept.size(2)}, -std::numeric_limits<double>::infinity());
      return results;
    };
    return local;
  };
}

/// Samples may be sharded where their targets are rows of one length.
std::optional<Strategies> ctc(const OpCall& call, Ctc kind) {
  const auto probabilities = call.tensor("log_probs"), targets = call.tensor("targets");
  if (!probabilities || !targets) return std::nullopt;
  const Spec& x = call.tensors[*probabilities];
  if (x.ndim() != 3 || call.tensors[*targets].ndim() != 2 || x.numel() == 0) return std::nullopt;
  const int64_t time = x.shape()[0], samples = x.shape()[1];
  const auto lengths = Lengths::of(call, samples);
  if (!lengths) return std::nullopt;
  Einsum einsum;
  einsum.contiguous = true;
  for (const size_t i : c10::irange(call.tensors.size())) {
    Letters letters(call.tensors[i].ndim(), kUnsharded);
    if (letters.empty()) return std::nullopt;
    letters[i == *probabilities ? 1 : 0] = 'n';
    einsum.inputs.push_back(std::move(letters));
  }
  Strategies strategies;
  if (kind == Ctc::gradient) {
    einsum.outputs = {letters(".n.")};
    einsum.linear = linear_tensors(call, {{"grad"}});
    strategies.results = {{x.shape().vec()}};
  } else {
    einsum.outputs = {letters("n"), letters("n..")};
    strategies.results = {{{samples}}, {{samples, time, lengths->width.value_or(kLocal)}}};
  }
  strategies.options = strategies_of(einsum);
  strategies.localize = ctc_of_local_samples(call, *lengths, kind);
  return strategies;
}

Rule ctc_rule(const char* text, Ctc kind) {
  return {text,
          [kind](const OpCall& call) { return ctc(call, kind); },
          {"input_lengths", "target_lengths"},
          "lengths are lists or tensors, and the longest of all decides on a shape"};
}

}  // namespace

Table loss_rules() {
  return {
      {{"mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"}, elementwise_loss()},
      {{"mse_loss_backward"}, elementwise_loss_backward({{"self", "target"}})},
      {{"binary_cross_entropy_backward"},
       {"as other gradients of losses, linear in `weight` too; P(avg) of `target` stays",
        cross_entropy_backward,
        {"reduction"},
        "a distance from the target is no linear function of it, but averages of distances are distances"}},
      {{"smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward"},
       elementwise_loss_backward()},
      {{"soft_margin_loss"}, Decomposition{{"mul", "exp", "log1p", "sum"}, soft_margin}},
      {{"binary_cross_entropy_with_logits"},
       Decomposition{{"mul", "exp", "log1p", "sum"}, cross_entropy_with_logits}},
      {{"multi_margin_loss"}, sample_loss({"n.,n,.?->n", ".,,.?->"}, {"n.,n,.?->", ".,,.?->"})},
      {{"multilabel_margin_loss_forward"},
       sample_loss({"n.,n.->n,n.", ".,.->,."}, {"n.,n.->,n.", ".,.->,."})},
      {{"multi_margin_loss_backward"},
       sample_loss({"n,n.,n,.?->n.", ",.,,.?->."}, {",n.,n,.?->n.", ",.,,.?->."}, {{"grad_output"}})},
      {{"multilabel_margin_loss_backward"},
       sample_loss({"n,n.,n.,n.->n.", ",.,.,.->."}, {",n.,n.,n.->n.", ",.,.,.->."}, {{"grad_output"}})},
      {{"_ctc_loss", "_ctc_loss.Tensor"}, ctc_rule(".n.,n.->n,n..", Ctc::losses)},
      {{"_ctc_loss_backward", "_ctc_loss_backward.Tensor"}, ctc_rule("n,.n.,n.,n,n..->.n.", Ctc::gradient)},
      {{"nll_loss_forward", "nll_loss2d_forward"}, for_loss_parallel(nll())},
      {{"nll_loss_backward", "nll_loss2d_backward"}, for_loss_parallel(nll_backward())},
  };
}

}  // namespace tessera::ops

// --- composites

namespace tessera {

namespace {

at::Tensor ctc_loss(const at::Tensor& log_probs, const at::Tensor& targets, const at::Tensor& input_lengths,
                    const at::Tensor& target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  return at::ctc_loss(log_probs, targets, integers_of(input_lengths), integers_of(target_lengths), blank,
                      reduction, zero_infinity);
}

void register_loss_composites(torch::Library& library) {
  register_composed(library, {"ctc_loss.IntList"});
  library.impl("ctc_loss.Tensor", ctc_loss);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_loss_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { register_loss_composites(library); }

}  // namespace

}  // namespace tessera
