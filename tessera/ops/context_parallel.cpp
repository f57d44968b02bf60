#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/context_parallel.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/ring_attention.h>
#include <tessera/lru_cache.h>
#include <tessera/ops/as_one.h>
#include <tessera/ops/composites.h>
#include <tessera/redistribute/cost.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

/// `scaled_dot_product_attention` over a sequence that is sharded. Each method is a redistribution of queries,
/// keys and values, an attention, and the redistribution back.
namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kBatchDim = 0, kHeadsDim = 1, kLengthDim = 2;
using MeshDims = std::vector<int64_t>;

struct AttentionCall {
  at::Tensor query, key, value;
  std::optional<at::Tensor> mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;

  int64_t heads() const { return query.size(kHeadsDim); }
  int64_t groups() const { return key.size(kHeadsDim); }
  bool has_mask() const { return mask && mask->defined(); }
};

/// A tensor of that geometry on the CPU, which has no values: for what looks at nothing else.
at::Tensor stand_in_on_cpu(const at::Tensor& tensor) {
  static char nothing = 0;
  return at::from_blob(&nothing, tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

/// On meta libtorch composes attention of products of matrices. A dry run is about what would be computed with values, on the
/// CPU.
bool would_be_flash(const AttentionCall& call) {
  if (!call.query.is_meta() || (call.has_mask() && call.mask->scalar_type() == at::kBool)) return false;
  const DTensorImpl* impl = DTensorImpl::of(call.query);
  if (!impl || !impl->spec().mesh().world()->is_dry_run()) return false;
  const auto mask = call.has_mask() ? std::optional(stand_in_on_cpu(*call.mask)) : std::nullopt;
  return at::_fused_sdp_choice(stand_in_on_cpu(call.query), stand_in_on_cpu(call.key),
                               stand_in_on_cpu(call.value), mask, call.dropout_p, call.is_causal, call.scale,
                               call.enable_gqa) == static_cast<int64_t>(at::SDPBackend::flash_attention);
}

/// As libtorch composes it, on the placements that the tensors have.
at::Tensor composed(const AttentionCall& call) {
  if (would_be_flash(call))
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, call.dropout_p, call.is_causal, call.mask, call.scale));
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, call.query, call.key, call.value, call.mask, call.dropout_p, call.is_causal,
                   call.scale, call.enable_gqa);
  compose(op, &stack);
  return stack.back().toTensor();
}

int64_t ranks_along(const DeviceMesh& mesh, const MeshDims& mesh_dims) {
  int64_t count = 1;
  for (const int64_t m : mesh_dims) count *= mesh.shape()[m];
  return count;
}

at::Tensor placed(const at::Tensor& tensor, const Placements& placements, const ShardOrder& order) {
  const Spec& spec = DTensorImpl::of(tensor)->spec();
  const Spec target = spec.with_placements(placements, order);
  if (target.placements() == spec.placements() && target.order() == spec.order()) return tensor;
  return DTensor(tensor).redistribute(placements, {.order = {order.begin(), order.end()}});
}

/// The same but for some mesh dims.
at::Tensor placed_along(const at::Tensor& tensor, const MeshDims& mesh_dims, const Placement& along,
                        const ShardOrder& order) {
  Placements placements = DTensorImpl::of(tensor)->spec().placements();
  for (const int64_t m : mesh_dims) placements[m] = along;
  return placed(tensor, placements, order);
}

// ---- what the call is

/// Which mesh dims shard the length of the queries; none for calls that are none of ours.
MeshDims sequence_dims(const AttentionCall& call) {
  for (const at::Tensor& each : {call.query, call.key, call.value}) {
    if (!each.defined() || !DTensorImpl::of(each) || each.dim() != 4 || each.numel() == 0 ||
        has_tangent(each) || each.scalar_type() != call.query.scalar_type() || !each.is_floating_point() ||
        DTensorImpl::of(each)->spec().mesh() != DTensorImpl::of(call.query)->spec().mesh())
      return {};
  }
  const auto q = call.query.sizes(), k = call.key.sizes(), v = call.value.sizes();
  const bool fits = q[0] == k[0] && q[3] == k[3] && k.slice(0, 3) == v.slice(0, 3) &&
                    (q[1] == k[1] || (call.enable_gqa && q[1] % k[1] == 0)) &&
                    !(call.is_causal && call.has_mask());
  const Spec& spec = DTensorImpl::of(call.query)->spec();
  MeshDims dims = kernels::mesh_dims_of(spec, kLengthDim);
  if (!fits || !spec.mesh().is_member() || ranks_along(spec.mesh(), dims) == 1) dims.clear();
  return dims;
}

/// Of a call that is none of ours, which takes `is_causal` by the order of elements: that is the one of
/// positions on one rank only.
void check_is_in_order(const AttentionCall& call) {
  const auto& options = context_parallel_options();
  if (!options || !options->zigzag || !call.is_causal) return;
  for (const at::Tensor& each : {call.query, call.key, call.value}) {
    const DTensorImpl* impl = each.defined() ? DTensorImpl::of(each) : nullptr;
    if (!impl || each.dim() < 2 || each.numel() == 0 || !impl->spec().mesh().is_member()) continue;
    const Spec& spec = impl->spec();
    const MeshDims dims = kernels::mesh_dims_of(spec, each.dim() - 2);
    TESSERA_CHECK_AS(
        c10::NotImplementedError,
        spec.mesh().size() == 1 || (!dims.empty() && ranks_along(spec.mesh(), dims) == 1),
        "scaled_dot_product_attention: causal attention in zig-zag order takes queries, keys and values of "
        "dims "
        "(batch, heads, length, size), with the length of the queries sharded, and no forward-mode AD; got ",
        spec, ". Redistribute them so, or leave the sequence in order and zigzag out.");
  }
}

/// How many ranks share the heads of `spec`, if these mesh dims do too.
int64_t ranks_of_heads(const Spec& spec, const MeshDims& mesh_dims) {
  MeshDims all = kernels::mesh_dims_of(spec, kHeadsDim);
  all.insert(all.end(), mesh_dims.begin(), mesh_dims.end());
  return ranks_along(spec.mesh(), all);
}

/// Whether so many ranks can each have some of the heads: where several of queries share one of keys, those
/// that go together.
bool shares_heads(const AttentionCall& call, int64_t ranks) {
  return call.heads() == call.groups() ? call.heads() >= ranks : call.groups() % ranks == 0;
}

/// The cheaper one of those that can do every call, by what moves in forward.
std::optional<ContextMethod> cheapest(const AttentionCall& call, const MeshDims& mesh_dims) {
  const Spec& spec = DTensorImpl::of(call.query)->spec();
  for (const at::Tensor& each : {call.key, call.value}) {
    if (kernels::mesh_dims_of(DTensorImpl::of(each)->spec(), kLengthDim) != mesh_dims) return std::nullopt;
  }
  // Operators move what they need themselves, and say so where they must not.
  if (implicit_communication() != ImplicitCommunication::allowed) return std::nullopt;
  if (call.has_mask() && DTensorImpl::of(*call.mask) && DTensorImpl::of(*call.mask)->spec().is_sharded())
    return std::nullopt;
  const auto links = CostModel().of(spec.mesh());
  double gather = 0, exchange = 0;
  for (const int64_t m : mesh_dims) {
    const auto cost = [&](const at::Tensor& tensor, const Placement& to) {
      const Spec& moved = DTensorImpl::of(tensor)->spec();
      double bytes = static_cast<double>(moved.numel()) * static_cast<double>(tensor.element_size());
      for (const size_t other : c10::irange(moved.placements().size())) {
        if (static_cast<int64_t>(other) != m && moved.placement(other).is_shard_like())
          bytes /= static_cast<double>(moved.mesh().shape()[other]);
      }
      return transition_cost(Shard(kLengthDim), to, moved.mesh().shape()[m], bytes, links[m]);
    };
    gather += cost(call.key, Replicate()) + cost(call.value, Replicate());
    for (const at::Tensor& each :
         {call.query, call.key, call.value, call.query})  // the last one as the output
      exchange += cost(each, Shard(kHeadsDim));
  }
  const bool can_exchange = shares_heads(call, ranks_of_heads(spec, mesh_dims));
  return can_exchange && exchange <= gather ? ContextMethod::ulysses : ContextMethod::allgather;
}

// ---- attention that is computed again in backward

/// Activation checkpointing calls attention again, in backward, where the scope of its forward may have ended. The same
/// call must then be computed in the same way: another method would save other tensors, and zig-zag order taken for
/// order would be wrong in silence. So each thread remembers how it computed calls by the spec of their queries.
struct Remembered {
  std::optional<ContextParallelOptions> options;
  bool ambiguous = false;  // there were calls with other options too
};

std::atomic<bool> zigzag_was_used{false};

LruCache<Spec, Remembered>& remembered_calls() {
  thread_local LruCache<Spec, Remembered> calls(64);
  return calls;
}

bool is_recomputed() {
  return torch::autograd::get_current_graph_task_id() != -1 && c10::GradMode::is_enabled();
}

void remember(const Spec& query, const std::optional<ContextParallelOptions>& options) {
  if (options && options->zigzag) zigzag_was_used.store(true, std::memory_order_relaxed);
  Remembered* known = remembered_calls().find(query);
  if (!known)
    remembered_calls().insert(query, {options});
  else if (known->options != options)
    known->ambiguous = true;
}

/// The options of a call: those of the scope around it, or of the forward that it repeats.
std::optional<ContextParallelOptions> options_of(const AttentionCall& call) {
  const auto& given = context_parallel_options();
  const Spec& query = DTensorImpl::of(call.query)->spec();
  if (!is_recomputed()) {
    remember(query, given);
    return given;
  }
  if (given) return given;
  const Remembered* known = remembered_calls().find(query);
  // Backward on a GPU has a thread of its own, which remembers nothing.
  const bool is_clear =
      known ? !known->ambiguous : !(call.is_causal && zigzag_was_used.load(std::memory_order_relaxed));
  TESSERA_CHECK(
      is_clear, "scaled_dot_product_attention: called again in backward, as activation checkpointing does, ",
      "outside of a ContextParallelGuard (in Python: context_parallel()), and ",
      known ? "calls with queries of this shape were made with different options"
            : "it is not known whether its sequence is in zig-zag order",
      ". Make the guard inside of the function that is computed again, or keep one around backward.");
  return known ? known->options : given;
}

// ---- attention of what a rank has to what it has or gets

/// What is remembered between forward and backward of AttendBlocks.
struct BlocksMemory : torch::CustomClassHolder {
  kernels::AttentionRing ring;
  Spec output;
  Spec of_query, of_key, of_value;  // the gradients
};

struct AttendBlocks : torch::autograd::Function<AttendBlocks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const c10::intrusive_ptr<BlocksMemory>& memory) {
    const auto local = [](const at::Tensor& tensor) { return DTensorImpl::of(tensor)->local(); };
    const auto [sum, logsumexp] =
        kernels::ring_attention(local(query), local(key), local(value), memory->ring);
    at::Tensor output = make_dtensor(sum.to(query.scalar_type()), memory->output);
    context->set_materialize_grads(false);
    context->save_for_backward({query, key, value, output, logsumexp});
    context->saved_data["memory"] = c10::IValue::make_capsule(memory);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(4);
    TESSERA_CHECK_AS(
        c10::NotImplementedError, !c10::GradMode::is_enabled(),
        "scaled_dot_product_attention over a sharded sequence has no second derivative. Redistribute "
        "its inputs so that the sequence is not sharded.");
    const auto capsule = context->saved_data["memory"].toCapsule();
    const auto& memory = *static_cast<const BlocksMemory*>(capsule.get());
    const auto saved = context->get_saved_variables();
    const auto local = [](const at::Tensor& tensor) { return DTensorImpl::of(tensor)->local(); };
    const at::Tensor gradient = placed(gradients[0], memory.output.placements(), memory.output.order());
    const auto [of_query, of_key, of_value] =
        kernels::ring_attention_backward({local(gradient).contiguous(), local(saved[3]), saved[4]},
                                         local(saved[0]), local(saved[1]), local(saved[2]), memory.ring);
    return {make_dtensor(of_query, memory.of_query), make_dtensor(of_key, memory.of_key),
            make_dtensor(of_value, memory.of_value), at::Tensor()};
  }
};

/// How queries are placed where each rank computes some of the batch, the heads and the sequence.
Placements block_placements(const AttentionCall& call) {
  const Spec& spec = DTensorImpl::of(call.query)->spec();
  Placements result = spec.placements();
  for (Placement& each : result) {
    const bool keeps_heads =
        call.heads() == call.groups() || (each.is_shard() && shares_heads(call, ranks_of_heads(spec, {})));
    const bool keeps = each.is_shard_like(kBatchDim) || each.is_shard_like(kLengthDim) ||
                       (each.is_shard_like(kHeadsDim) && keeps_heads);
    if (!keeps) each = Replicate();
  }
  return result;
}

Spec contiguous_spec(const at::Tensor& tensor, const Placements& placements, const ShardOrder& order) {
  const Spec& spec = DTensorImpl::of(tensor)->spec();
  return Spec(spec.mesh(), placements, spec.shape(), std::nullopt, spec.dtype(), order);
}

/// Which rank has which keys.
void fill_ring(kernels::AttentionRing& ring, const Spec& key, const MeshDims& mesh_dims,
               const kernels::SequenceRuns& keys) {
  ring.group = kernels::group_of(key.mesh(), mesh_dims);
  const auto here = *key.mesh().get_coordinate();
  for (const auto& coordinate : key.mesh().coordinates_along(mesh_dims)) {
    if (std::equal(here.begin(), here.end(), coordinate.begin())) ring.self = ring.keys.size();
    ring.keys.push_back(kernels::local_runs(keys, key.local_pieces(coordinate)[kLengthDim]));
  }
}

/// How keys and values come to the queries.
enum class Reach { ring, gathered };

/// Each rank attends with its queries. `mesh_dims` shard their sequence; `zigzag`: in the order for so many ranks,
/// or 0.
at::Tensor attend_blocks(const AttentionCall& call, const MeshDims& mesh_dims, Reach reach, int64_t zigzag) {
  const ShardOrder order = DTensorImpl::of(call.query)->spec().order();
  const Placements placements = block_placements(call);
  Placements of_keys = placements, of_gradients = placements;
  if (reach == Reach::gathered) {
    for (const int64_t m : mesh_dims) of_keys[m] = Replicate(), of_gradients[m] = Partial();
  }
  const at::Tensor query = placed(call.query, placements, order), key = placed(call.key, of_keys, order),
                   value = placed(call.value, of_keys, order);
  const auto runs = [&](int64_t length) {
    return zigzag ? kernels::zigzag_runs(length, zigzag) : kernels::runs_in_order(length);
  };
  const Spec &q = DTensorImpl::of(query)->spec(), &k = DTensorImpl::of(key)->spec();
  auto memory = c10::make_intrusive<BlocksMemory>();
  memory->ring.causal = call.is_causal;
  memory->ring.scale = call.scale;
  memory->ring.queries = kernels::local_runs(runs(query.size(kLengthDim)), q.local_pieces()[kLengthDim]);
  if (reach == Reach::ring)
    fill_ring(memory->ring, k, mesh_dims, runs(key.size(kLengthDim)));
  else
    memory->ring.keys = {runs(key.size(kLengthDim))};
  const auto shape = query.sizes();
  const int64_t size = value.size(3);
  memory->output = Spec(q.mesh(), placements, {shape[0], shape[1], shape[2], size},
                        {{shape[1] * shape[2] * size, size, shape[1] * size, 1}}, q.dtype(), order);
  memory->of_query = contiguous_spec(query, placements, order);
  memory->of_key = contiguous_spec(key, of_gradients, order);
  memory->of_value = contiguous_spec(value, of_gradients, order);
  return AttendBlocks::apply(query, key, value, std::move(memory));
}

// ---- the methods

at::Tensor by_ring(const AttentionCall& call, const MeshDims& mesh_dims, int64_t zigzag) {
  constexpr auto kOthers =
      " Use ContextMethod::allgather or ContextMethod::ulysses (from Python \"allgather\", \"ulysses\").";
  TESSERA_CHECK_AS(c10::NotImplementedError, !call.has_mask(),
                   "scaled_dot_product_attention: ring attention takes no attn_mask, as no "
                   "rank has a row of the scores.",
                   kOthers);
  TESSERA_CHECK_AS(c10::NotImplementedError, call.dropout_p == 0,
                   "scaled_dot_product_attention: ring attention has no dropout, but "
                   "dropout_p is ",
                   call.dropout_p, ".", kOthers);
  return attend_blocks(call, mesh_dims, Reach::ring, zigzag);
}

at::Tensor by_allgather(AttentionCall call, const MeshDims& mesh_dims, int64_t zigzag) {
  const bool whole = call.has_mask() || call.dropout_p != 0;
  if (call.is_causal && !whole) return attend_blocks(call, mesh_dims, Reach::gathered, zigzag);
  for (at::Tensor* each : {&call.key, &call.value})
    *each = placed_along(*each, mesh_dims, Replicate(), DTensorImpl::of(*each)->spec().order());
  return composed(call);
}

at::Tensor by_ulysses(AttentionCall call, const MeshDims& mesh_dims, int64_t zigzag) {
  const Spec before = DTensorImpl::of(call.query)->spec();
  const int64_t ranks = ranks_of_heads(before, mesh_dims);
  TESSERA_CHECK_VALUE(
      shares_heads(call, ranks),
      "scaled_dot_product_attention: ulysses shards heads instead of the sequence, but ", call.heads(),
      " heads of queries and ", call.groups(), " of keys and values cannot be shared by ", ranks,
      " ranks. Use ContextMethod::ring or ContextMethod::allgather (from Python \"ring\", \"allgather\").");
  // Mesh dims that shard the heads already split first, so that each rank exchanges with those along `mesh_dims` only.
  ShardOrder order = before.order();
  if (order.empty()) {
    order.resize(before.placements().size());
    std::iota(order.begin(), order.end(), 0);
  }
  std::stable_partition(order.begin(), order.end(), [&](int64_t m) {
    return std::find(mesh_dims.begin(), mesh_dims.end(), m) == mesh_dims.end();
  });
  for (at::Tensor* each : {&call.query, &call.key, &call.value})
    *each = placed_along(*each, mesh_dims, Shard(kHeadsDim), order);
  const at::Tensor output = zigzag ? attend_blocks(call, {}, Reach::gathered, zigzag) : composed(call);
  Placements placements = DTensorImpl::of(output)->spec().placements();
  for (const int64_t m : mesh_dims) placements[m] = before.placement(m);
  return placed(output, placements, before.order());
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                        double dropout_p, bool is_causal, std::optional<double> scale,
                                        bool enable_gqa) {
  const AttentionCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  const MeshDims mesh_dims = sequence_dims(call);
  if (mesh_dims.empty()) {
    check_is_in_order(call);
    return composed(call);
  }
  const auto options = options_of(call);
  const auto method = options ? options->method : cheapest(call, mesh_dims);
  if (!method) return composed(call);
  // What is not causal does not depend on the order.
  const bool ordered = options && options->zigzag && is_causal;
  TESSERA_CHECK_AS(c10::NotImplementedError, !ordered || dropout_p == 0,
                   "scaled_dot_product_attention: a sequence in zig-zag order has no dropout "
                   "if it is causal, but dropout_p is ",
                   dropout_p,
                   ". Leave the sequence in order, and use ContextMethod::ulysses "
                   "or ContextMethod::allgather (from Python \"ulysses\", \"allgather\").");
  const int64_t zigzag = ordered ? ranks_along(DTensor(query).device_mesh(), mesh_dims) : 0;
  switch (*method) {
    case ContextMethod::ring:
      return by_ring(call, mesh_dims, zigzag);
    case ContextMethod::ulysses:
      return by_ulysses(call, mesh_dims, zigzag);
    case ContextMethod::allgather:
      break;
  }
  return by_allgather(call, mesh_dims, zigzag);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

}  // namespace

}  // namespace tessera
