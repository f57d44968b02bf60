#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

enum class Queries { unsharded, sharded };
char letter_of(Queries queries) { return queries == Queries::sharded ? 'l' : kUnsharded; }

/// Batch and heads may be sharded; so may the queries, where each sees all keys.
Letters letters_of(const std::string& name, const Spec& spec, const Spec& query, Queries queries) {
  const char l = letter_of(queries);
  if (name == "query" || name == "grad_out" || name == "grad_out_" || name == "out")
    return {'b', 'h', l, kUnsharded};
  if (name == "key" || name == "value") return {'b', 'h', kUnsharded, kUnsharded};
  if (name == "logsumexp") return {'b', 'h', l};
  if (name == "attn_mask" || name == "attn_bias") {
    const Letters all{'b', 'h', l, kUnsharded};
    if (spec.ndim() > 4) return Letters(spec.ndim(), kUnsharded);
    Shape full = query.shape().vec();
    full[3] = spec.ndim() > 0 ? spec.shape().back() : 1;
    return broadcast(spec.shape(), full, all);
  }
  return Letters(spec.ndim(), kUnsharded);  // counts, states of random numbers
}

/// Dims (batch, heads, length, size), in memory (batch, length, heads, size).
Result attended(const Spec& query, int64_t size) {
  const auto shape = query.shape();
  return {{shape[0], shape[1], shape[2], size}, {shape[1] * shape[2] * size, size, shape[1] * size, 1}};
}

std::optional<std::vector<Letters>> inputs_of(const OpCall& call, Queries queries) {
  const auto query = call.tensor("query"), key = call.tensor("key"), value = call.tensor("value");
  if (!query || !key || !value) return std::nullopt;
  for (const auto& index : {query, key, value}) {
    if (call.tensors[*index].ndim() != 4) return std::nullopt;
  }
  const int64_t groups = call.tensors[*key].shape()[1];
  if (groups == 0 || call.tensors[*query].shape()[1] % groups != 0) return std::nullopt;
  if (call.value("dropout_p").toDouble() != 0) return std::nullopt;
  std::vector<Letters> result;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    result.push_back(letters_of(call.name_of(i), call.tensors[i], call.tensors[*query], queries));
  }
  return result;
}

/// Where several heads of queries share one of keys and values, a rank must hold those that go together.
std::vector<Strategy> strategies_of_heads(const OpCall& call, const Einsum& einsum) {
  std::vector<Strategy> result = strategies_of(einsum);
  const size_t query = *call.tensor("query"), key = *call.tensor("key");
  const int64_t heads = call.tensors[query].shape()[1], groups = call.tensors[key].shape()[1];
  for (Strategy& strategy : result) {
    if (heads != groups && strategy.inputs[query] == Shard(1)) strategy.divisor = groups;
  }
  return result;
}

/// A rank without queries has nothing to do; libtorch's kernels do not expect that.
Localize nothing_if_empty(size_t query) {
  return [query](const ChosenSpecs& chosen) {
    LocalCall local;
    const auto shape = chosen.inputs[query].local_shape();
    if (std::find(shape.begin(), shape.end(), 0) == shape.end()) return local;
    local.compute = [outputs = chosen.outputs](const c10::OperatorHandle& op, Stack arguments) {
      const auto options = arguments[*op.schema().argumentIndexWithName("query")].toTensor().options();
      const auto wide = options.dtype(at::toOpMathType(options.dtype().toScalarType()));
      Stack results;
      for (size_t i = 0; i < outputs.size(); ++i) {
        const bool is_sum = op.schema().returns()[i].name() == "logsumexp";
        results.emplace_back(at::zeros(outputs[i].local_shape(), is_sum ? wide : options));
      }
      return results;
    };
    return local;
  };
}

std::optional<Strategies> attention(const OpCall& call) {
  const Queries queries = call.flag("is_causal") ? Queries::unsharded : Queries::sharded;
  auto inputs = inputs_of(call, queries);
  if (!inputs) return std::nullopt;
  const Spec &query = call.tensors[*call.tensor("query")], &value = call.tensors[*call.tensor("value")];
  const char l = letter_of(queries);
  Einsum einsum{.inputs = *std::move(inputs), .outputs = {{'b', 'h', l, kUnsharded}, {'b', 'h', l}}};
  // What else there may be does not depend on what is sharded.
  const size_t tensors =
      std::count_if(call.schema->returns().begin(), call.schema->returns().end(),
                    [](const c10::Argument& a) { return a.type()->kind() == c10::TypeKind::TensorType; });
  const auto shape = query.shape();
  std::vector<Result> results{attended(query, value.shape()[3]),
                              {{shape[0], shape[1], tensors == 2 ? shape[2] : kLocal}}};
  if (tensors == 2) results[1].strides = {shape[1] * shape[2], 1, shape[1]};
  Strategies strategies;
  if (tensors > 2) {
    // The length of what is saved may be rounded up.
    for (Letters& letters : einsum.inputs) std::replace(letters.begin(), letters.end(), 'l', kUnsharded);
    for (Letters& letters : einsum.outputs) std::replace(letters.begin(), letters.end(), 'l', kUnsharded);
  }
  strategies.options = strategies_of_heads(call, einsum);
  for (size_t i = 2; i < tensors; ++i) {
    for (Strategy& strategy : strategies.options) strategy.outputs.push_back(Replicate());
    results.push_back({});
  }
  strategies.results = std::move(results);
  if (tensors == 2) strategies.localize = nothing_if_empty(*call.tensor("query"));
  return strategies;
}

std::optional<Strategies> attention_backward(const OpCall& call) {
  const bool on_cpu = !call.position("philox_seed");
  const Queries queries = on_cpu && !call.flag("is_causal") ? Queries::sharded : Queries::unsharded;
  auto inputs = inputs_of(call, queries);
  if (!inputs || call.has("grad_input_mask")) return std::nullopt;
  const Spec &query = call.tensors[*call.tensor("query")], &key = call.tensors[*call.tensor("key")],
             &value = call.tensors[*call.tensor("value")];
  const char l = letter_of(queries);
  Einsum einsum{
      .inputs = *std::move(inputs),
      .outputs = {
          {'b', 'h', l, kUnsharded}, {'b', 'h', kUnsharded, kUnsharded}, {'b', 'h', kUnsharded, kUnsharded}}};
  Strategies strategies{
      strategies_of_heads(call, einsum),
      {attended(query, query.shape()[3]), attended(key, key.shape()[3]), attended(value, value.shape()[3])}};
  if (on_cpu) strategies.localize = nothing_if_empty(*call.tensor("query"));
  return strategies;
}

}  // namespace

Table attention_rules() {
  const auto rule = [](const char* text, auto propose) {
    Rule result{
        text,
        propose,
        {"dropout_p", "is_causal", "grad_input_mask"},
        "heads of queries may share one of keys and values, and which results there are depends on the "
        "device"};
    result.for_random = true;
    return result;
  };
  return {
      {{"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"},
       rule("batch and heads sharded; on CPU, unless causal, also queries", attention)},
      {{"_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"},
       rule("batch and heads sharded; on CPU, unless causal, also queries, with P(sum) of keys and values",
            attention_backward)},
  };
}

}  // namespace tessera::ops

// --- composites

namespace tessera {

namespace {

void register_attention_composites(torch::Library& library) {
  register_composed(library, {"_scaled_dot_product_attention_math"});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_attention_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { register_attention_composites(library); }

}  // namespace

}  // namespace tessera
