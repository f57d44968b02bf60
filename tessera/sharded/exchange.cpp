#include <tessera/comm/packed_all_to_all.h>
#include <tessera/redistribute/memory.h>
#include <tessera/sharded/exchange.h>
#include <tessera/sharded/remote.h>
#include <tessera/sharded/sharded_tensor_impl.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <tuple>

#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::sharded {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// A tiling, and who holds what.
struct Tiling {
  std::vector<ShardMetadata> shards;
  std::vector<int64_t> size;         // of the global tensor
  std::vector<int64_t> group_ranks;  // that have the shards
  std::vector<size_t> mine;

  Tiling(const std::vector<ShardMetadata>& all, const Members& members)
      : shards(all), size(all[0].shard_offsets.size()) {
    for (const size_t i : c10::irange(shards.size())) {
      for (const size_t dim : c10::irange(size.size()))
        size[dim] = std::max(size[dim], box_of(shards[i]).end(dim));
      group_ranks.push_back(*members.group_rank_of(rank_of(shards[i].placement, members)));
      if (group_ranks.back() == members.group_rank()) mine.push_back(i);
    }
  }
};

/// What a box of one tiling shares with one of the other, and with whom it is exchanged.
struct Transfer {
  int64_t peer;
  size_t from, to;  // positions in the tilings
  Intersection box;
};

/// What this rank's boxes of one tiling share with all boxes of the other: in the same order on both ends.
std::vector<Transfer> transfers(const Tiling& mine, const Tiling& all, bool sends) {
  std::vector<Box> boxes;
  for (const size_t i : mine.mine) boxes.push_back(box_of(mine.shards[i]));
  std::vector<Transfer> result;
  const std::vector<Box> others = boxes_of(all.shards);
  for_each_overlap(boxes, others, [&](size_t i, size_t j) {
    const size_t here = mine.mine[i];
    result.push_back(
        {all.group_ranks[j], sends ? here : j, sends ? j : here, *intersect(boxes[i], others[j])});
    return false;
  });
  std::sort(result.begin(), result.end(), [](const Transfer& a, const Transfer& b) {
    return std::tie(a.peer, a.from, a.to) < std::tie(b.peer, b.from, b.to);
  });
  return result;
}

/// The part of the tensor of a shard that lies in a box.
at::Tensor view(at::Tensor tensor, const ShardMetadata& shard, const Intersection& box) {
  for (const int64_t dim : c10::irange(shard.dim())) {
    tensor = tensor.narrow(dim, box.offsets[dim] - shard.shard_offsets[dim], box.sizes[dim]);
  }
  return tensor;
}

at::Tensor of(const std::vector<at::Tensor>& tensors, const Tiling& tiling, size_t index) {
  const auto found = std::lower_bound(tiling.mine.begin(), tiling.mine.end(), index);
  return tensors[found - tiling.mine.begin()];
}

std::vector<at::Tensor> move(const Tiling& from, const std::vector<at::Tensor>& locals, const Tiling& to,
                             at::ScalarType dtype, const Members& members) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = at::TensorOptions(dtype).device(members.device());
  std::vector<at::Tensor> result;
  for (const size_t i : to.mine)
    result.push_back(new_memory(to.shards[i].shard_sizes, options.device(to.shards[i].placement->device())));
  if (result.empty()) result.push_back(empty_part(to.size, dtype, to.shards[0].placement->device()));

  std::vector<comm::Tensors> sent(members.size()), received(members.size());
  for (const Transfer& each : transfers(from, to, true))
    sent[each.peer].push_back(view(of(locals, from, each.from), from.shards[each.from], each.box));
  for (const Transfer& each : transfers(to, from, false))
    received[each.peer].push_back(view(of(result, to, each.to), to.shards[each.to], each.box));
  comm::packed_all_to_all(received, sent, options, members.group());
  return result;
}

struct Memory : torch::CustomClassHolder {
  Memory(Tiling source, Tiling target, at::ScalarType type, MembersPtr who)
      : from(std::move(source)), to(std::move(target)), dtype(type), members(std::move(who)) {}
  Tiling from, to;
  at::ScalarType dtype;
  MembersPtr members;
};

/// Ranks that hold nothing, before or after, take part in backward by what stands for that.
struct Reshard : torch::autograd::Function<Reshard> {
  static variable_list forward(AutogradContext* context, at::TensorList locals,
                               c10::intrusive_ptr<Memory> memory) {
    auto result = move(memory->from, locals.vec(), memory->to, memory->dtype, *memory->members);
    context->saved_data["memory"] = c10::IValue::make_capsule(std::move(memory));
    context->saved_data["locals"] = static_cast<int64_t>(locals.size());
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto memory = context->saved_data["memory"].toCapsule();
    const Memory& known = *static_cast<Memory*>(memory.get());
    for (const size_t i : c10::irange(known.to.mine.size())) {
      const ShardMetadata& shard = known.to.shards[known.to.mine[i]];
      if (!gradients[i].defined())
        gradients[i] =
            at::zeros(shard.shard_sizes, at::TensorOptions(known.dtype).device(shard.placement->device()));
    }
    // For gradients of gradients, this is differentiable itself, and on every rank if on one.
    if (at::GradMode::is_enabled()) gradients.push_back(at::zeros({0}, known.dtype).requires_grad_());
    variable_list result =
        Reshard::apply(at::TensorList(gradients),
                       c10::make_intrusive<Memory>(known.to, known.from, known.dtype, known.members));
    result.resize(context->saved_data["locals"].toInt() + 1);
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> exchange(const std::vector<ShardMetadata>& from,
                                 const std::vector<at::Tensor>& locals, const std::vector<ShardMetadata>& to,
                                 at::ScalarType dtype, const MembersPtr& members) {
  return Reshard::apply(
      at::TensorList(locals),
      c10::make_intrusive<Memory>(Tiling(from, *members), Tiling(to, *members), dtype, members));
}

}  // namespace tessera::sharded
