#include <tessera/comm/packed_all_to_all.h>
#include <tessera/error.h>
#include <tessera/redistribute/memory.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>

/// Lookups in an embedding weight that is sharded in any way: by rows, by columns, or into any boxes. Each
/// rank requests from each other rank, once, the different rows that it needs of that rank's shards; then the
/// plain operator runs on those rows, so modes, paddings and gradients are its own.
namespace tessera::sharded {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// For each rank of the group a tensor for each of some shards, in their order.
using TensorsByRank = std::vector<comm::Tensors>;

/// Which rank needs which rows of which shards.
struct RowRequests : torch::CustomClassHolder {
  MembersPtr members;
  std::vector<int64_t> size;  // of the embedding weight
  int64_t count = 0;          // of rows that this rank needs
  at::TensorOptions options;  // of those

  /// A shard, and which of the rows that this rank needs lie in it.
  struct Requested {
    ShardMetadata shard;
    int64_t first = 0, count = 0;
    int64_t columns() const { return shard.shard_sizes[1]; }
    int64_t column() const { return shard.shard_offsets[1]; }
  };
  std::vector<std::vector<Requested>> requested;  // by the rank that has it, as its local shards are ordered

  /// The rows, counted from the shard's first, that a rank needs of a shard of this one.
  struct Served {
    size_t local;  // index of the local shard
    Tensor rows;
  };
  std::vector<std::vector<Served>> served;  // by the rank that needs them

  /// fn of each requested shard, and of each served one.
  template <class Fn>
  TensorsByRank for_requested(Fn fn) const {
    return map(requested, fn);
  }
  template <class Fn>
  TensorsByRank for_served(Fn fn) const {
    return map(served, fn);
  }

 private:
  template <class Lists, class Fn>
  static TensorsByRank map(const Lists& lists, Fn fn) {
    TensorsByRank result;
    for (const auto& of_rank : lists) {
      comm::Tensors& tensors = result.emplace_back();
      for (const auto& each : of_rank) tensors.push_back(fn(each));
    }
    return result;
  }
};

/// `needed`: sorted, all different. Collective; an index that is out of range is an error on every rank, and
/// so is a weight that has a gradient on some ranks only, as these would wait for the others in backward.
c10::intrusive_ptr<RowRequests> request_rows(const char* name, const ShardedTensor& weight,
                                             const Tensor& needed) {
  auto requests = c10::make_intrusive<RowRequests>();
  requests->members = weight.process_group_ptr();
  requests->size = weight.sizes().vec();
  requests->count = needed.numel();
  requests->options = at::TensorOptions(weight.scalar_type()).device(needed.device());
  const bool differentiable = weight.requires_grad() && at::GradMode::is_enabled();
  const Members& members = weight.process_group();
  const Tensor indices = needed.to(at::kCPU);
  const int64_t* begin = indices.const_data_ptr<int64_t>();
  const int64_t* end = begin + indices.numel();
  int64_t wrong = -1;  // an index that is out of range
  const bool is_wrong = begin != end && (*begin < 0 || end[-1] >= weight.size(0));
  if (is_wrong) wrong = *begin < 0 ? *begin : end[-1];

  requests->requested.resize(members.size());
  for (const ShardMetadata& shard : weight.metadata().shards_metadata) {
    RowRequests::Requested rows{shard};
    if (!is_wrong) {
      const int64_t row = shard.shard_offsets[0];
      const auto* first = std::lower_bound(begin, end, row);
      rows.first = first - begin;
      rows.count = shard.numel() == 0 ? 0 : std::lower_bound(first, end, row + shard.shard_sizes[0]) - first;
    }
    requests->requested[*members.group_rank_of(rank_of(shard.placement, members))].push_back(std::move(rows));
  }

  // How many rows of each shard; and before that, whether an index is wrong, and which, and whether there
  // will be a gradient.
  constexpr size_t kHead = 3;
  const size_t local_count = weight.local_shards().size();
  TensorsByRank counts, their_counts;
  for (const auto& of_rank : requests->requested) {
    std::vector<int64_t> values{is_wrong, wrong, differentiable};
    for (const auto& rows : of_rank) values.push_back(rows.count);
    counts.push_back({at::tensor(values, at::kLong)});
    their_counts.push_back({at::empty({static_cast<int64_t>(kHead + local_count)}, at::kLong)});
  }
  comm::packed_all_to_all(their_counts, counts, at::kLong, members.group());
  const int64_t* first = their_counts[0][0].const_data_ptr<int64_t>();
  for (const int64_t rank : c10::irange(members.size())) {
    const int64_t* theirs = their_counts[rank][0].const_data_ptr<int64_t>();
    TESSERA_CHECK_INDEX(theirs[0] == 0, name, ": on rank ", members.ranks()[rank], " index ", theirs[1],
                        " is looked up, but the embedding weight has ", weight.size(0), " rows.");
    TESSERA_CHECK(
        theirs[2] == first[2], name, ": on rank ", members.ranks()[rank], " the embedding weight ",
        theirs[2] ? "has" : "has no", " gradient, on rank ", members.ranks()[0], theirs[2] ? " none" : " one",
        ". Call requires_grad_() of the sharded tensor itself, and enable gradients or not, alike on "
        "all ranks.");
    auto& served = requests->served.emplace_back();
    for (const size_t i : c10::irange(local_count)) {
      const at::TensorOptions options =
          at::TensorOptions(at::kLong).device(weight.local_shards()[i].tensor.device());
      served.push_back({i, at::empty({theirs[kHead + i]}, options)});
    }
  }
  comm::packed_all_to_all(requests->for_served([](const RowRequests::Served& each) { return each.rows; }),
                          requests->for_requested([&](const RowRequests::Requested& each) {
                            return indices.narrow(0, each.first, each.count) - each.shard.shard_offsets[0];
                          }),
                          at::TensorOptions(at::kLong).device(members.device()), members.group());
  return requests;
}

at::TensorOptions in_transit(at::ScalarType dtype, const Members& members) {
  return at::TensorOptions(dtype).device(members.device());
}

/// The rows that this rank needs.
Tensor fetch(const RowRequests& requests, const std::vector<Tensor>& locals) {
  const at::NoGradGuard no_grad;
  const Members& members = *requests.members;
  const Tensor result = new_memory({requests.count, requests.size[1]}, requests.options);
  comm::packed_all_to_all(requests.for_requested([&](const RowRequests::Requested& each) {
    return result.narrow(0, each.first, each.count).narrow(1, each.column(), each.columns());
  }),
                          requests.for_served([&](const RowRequests::Served& each) {
                            return locals[each.local].index_select(0, each.rows);
                          }),
                          in_transit(c10::typeMetaToScalarType(requests.options.dtype()), members),
                          members.group());
  return result;
}

/// The gradients of the local shards, given that of the rows that this rank got.
variable_list give_back(const RowRequests& requests, const std::vector<at::IntArrayRef>& sizes,
                        const Tensor& gradient) {
  const Members& members = *requests.members;
  const at::TensorOptions transit = in_transit(gradient.scalar_type(), members);
  const auto received = requests.for_served([&](const RowRequests::Served& each) {
    return new_memory({each.rows.numel(), sizes[each.local][1]}, transit);
  });
  comm::packed_all_to_all(received, requests.for_requested([&](const RowRequests::Requested& each) {
    return gradient.narrow(0, each.first, each.count).narrow(1, each.column(), each.columns());
  }),
                          transit, members.group());
  variable_list result;
  for (const at::IntArrayRef size : sizes) result.push_back(at::zeros(size, gradient.options()));
  for (const size_t rank : c10::irange(received.size())) {
    for (const size_t i : c10::irange(received[rank].size())) {
      const RowRequests::Served& served = requests.served[rank][i];
      Tensor& mine = result[served.local];
      mine.index_add_(0, served.rows, received[rank][i].to(mine.device()));
    }
  }
  return result;
}

/// `locals`: of each rank some, so that ranks without shards take part in backward.
struct Fetch : torch::autograd::Function<Fetch> {
  static Tensor forward(AutogradContext* context, at::TensorList locals,
                        c10::intrusive_ptr<RowRequests> requests) {
    std::vector<int64_t> sizes;
    for (const Tensor& local : locals) sizes.insert(sizes.end(), {local.size(0), local.size(1)});
    context->saved_data["sizes"] = sizes;
    Tensor result = fetch(*requests, locals.vec());
    context->saved_data["requests"] = c10::IValue::make_capsule(std::move(requests));
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TESSERA_CHECK(
        !gradients[0].requires_grad() || !at::GradMode::is_enabled(),
        "The gradient of a lookup in a sharded embedding weight has no gradient itself (create_graph).");
    const auto requests = context->saved_data["requests"].toCapsule();
    const std::vector<int64_t> flat = context->saved_data["sizes"].toIntVector();
    std::vector<at::IntArrayRef> sizes;
    for (size_t i = 0; i < flat.size(); i += 2) sizes.emplace_back(flat.data() + i, 2);
    variable_list result =
        give_back(*static_cast<RowRequests*>(requests.get()), sizes, gradients[0].contiguous());
    result.resize(result.size() + 1);
    return result;
  }
};

/// The rows that are looked up, each once, and what to look up in them instead.
struct Rows {
  Tensor rows;
  Tensor indices;    // into `rows`
  Tensor of_weight;  // their indices in the embedding weight, sorted
  /// Where row `index` of the embedding weight is in `rows`, if it is.
  std::optional<int64_t> find(int64_t index) const {
    const Tensor where = of_weight.to(at::kCPU);
    const auto* begin = where.const_data_ptr<int64_t>();
    const auto* found = std::lower_bound(begin, begin + where.numel(), index);
    if (found == begin + where.numel() || *found != index) return std::nullopt;
    return found - begin;
  }
};

Rows look_up(const char* name, const Tensor& given, const Tensor& indices) {
  const ShardedTensor weight(given);
  weight.process_group().check_member(name);
  auto [needed, inverse] =
      at::_unique(indices.reshape({-1}).to(at::kLong), /*sorted=*/true, /*return_inverse=*/true);
  auto requests = request_rows(name, weight, needed);
  Tensor rows = Fetch::apply(at::TensorList(weight.local_tensors()), std::move(requests));
  return {std::move(rows), inverse.view(indices.sizes()), needed};
}

void check(const char* name, const Tensor& weight, const Tensor& indices, bool scale_grad_by_freq,
           bool sparse) {
  TESSERA_CHECK(ShardedTensor::is_sharded_tensor(weight), name,
                ": the embedding weight must be the sharded tensor; indices and all else are plain ones.");
  TESSERA_CHECK(!ShardedTensor::is_sharded_tensor(indices), name, ": the indices must be a plain tensor.");
  TESSERA_CHECK_VALUE(weight.dim() == 2, name, ": the embedding weight must have 2 dims, not ",
                      weight.sizes(), ".");
  TESSERA_CHECK_VALUE(at::isIntegralType(indices.scalar_type(), false), name,
                      ": indices must be integers, not ", indices.scalar_type(), ".");
  TESSERA_CHECK(!scale_grad_by_freq, name,
                ": scale_grad_by_freq does not work on a sharded embedding weight.");
  TESSERA_CHECK(!sparse, name, ": sparse gradients do not work on a sharded embedding weight.");
}

Tensor look_up_rows(const Tensor& weight, const Tensor& indices, int64_t padding_idx, bool scale_grad_by_freq,
                    bool sparse) {
  check("embedding", weight, indices, scale_grad_by_freq, sparse);
  const Rows found = look_up("embedding", weight, indices);
  const auto padding = padding_idx < 0 ? std::nullopt : found.find(padding_idx);
  return at::embedding(found.rows, found.indices, padding.value_or(-1));
}

using Bags = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Bags look_up_bags(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool scale_grad_by_freq,
                  int64_t mode, bool sparse, const std::optional<Tensor>& per_sample_weights,
                  bool include_last_offset, std::optional<int64_t> padding_idx) {
  check("embedding_bag", weight, indices, scale_grad_by_freq, sparse);
  const int64_t rows = weight.size(0);
  std::optional<int64_t> padding;
  if (padding_idx) {
    TESSERA_CHECK_INDEX(*padding_idx >= -rows && *padding_idx < rows, "embedding_bag: there is no row ",
                        *padding_idx, " for padding in an embedding weight of ", rows, " rows.");
    padding = *padding_idx < 0 ? *padding_idx + rows : *padding_idx;
  }
  const Rows found = look_up("embedding_bag", weight, indices);
  if (padding) padding = found.find(*padding);
  Bags result = at::embedding_bag(found.rows, found.indices, offsets.to(found.indices.scalar_type()), false,
                                  mode, false, per_sample_weights, include_last_offset, padding);
  constexpr int64_t kMax = 2;
  Tensor& largest =
      std::get<3>(result);  // in this mode alone, rows of `found`: make them those of the weight
  if (mode == kMax && largest.numel() > 0 && found.of_weight.numel() > 0)
    largest = found.of_weight.index_select(0, largest.reshape({-1})).view(largest.sizes());
  return result;
}

/// A norm over pieces of a row: what each piece gives, how to join them, and the norm of the join.
struct Norm {
  double p;
  bool is_max() const { return std::isinf(p); }
  Tensor of_pieces(const Tensor& rows) const {
    const Tensor x = rows.abs();
    if (is_max()) return rows.size(1) == 0 ? at::zeros({rows.size(0)}, rows.options()) : x.amax(1);
    if (p == 0) return x.ne(0).to(rows.scalar_type()).sum(1);
    return x.pow(p).sum(1);
  }
  Tensor join(const Tensor& a, const Tensor& b) const { return is_max() ? at::maximum(a, b) : a + b; }
  Tensor of_join(const Tensor& x) const { return is_max() || p == 0 ? x : x.pow(1 / p); }
};

/// Scales the rows that any rank looks up, and that are longer than `max_norm`, down to it: in the shards.
Tensor limit_norms(const Tensor& given, const Tensor& indices, double max_norm, double norm_type) {
  check("embedding_renorm_", given, indices, false, false);
  TESSERA_CHECK_VALUE(max_norm > 0, "embedding_renorm_: max_norm must be larger than zero, not ", max_norm,
                      ".");
  const at::NoGradGuard no_grad;
  const ShardedTensor weight(given);
  const Members& members = weight.process_group();
  members.check_member("embedding_renorm_");
  const auto requests =
      request_rows("embedding_renorm_", weight,
                   std::get<0>(at::_unique(indices.reshape({-1}).to(at::kLong), true, false)));
  const Norm norm{norm_type};
  const at::ScalarType dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::TensorOptions transit = in_transit(dtype, members);

  // Each rank sends the norms of its pieces of the rows ...
  const auto pieces = requests->for_requested(
      [&](const RowRequests::Requested& each) { return at::empty({each.count}, transit); });
  comm::packed_all_to_all(pieces, requests->for_served([&](const RowRequests::Served& each) {
    return norm.of_pieces(weight.local_shards()[each.local].tensor.index_select(0, each.rows).to(dtype));
  }),
                          transit, members.group());
  const Tensor joined = at::zeros({requests->count}, transit);
  for (const size_t rank : c10::irange(pieces.size())) {
    for (const size_t i : c10::irange(pieces[rank].size())) {
      const RowRequests::Requested& each = requests->requested[rank][i];
      const Tensor part = joined.narrow(0, each.first, each.count);
      part.copy_(norm.join(part, pieces[rank][i]));
    }
  }
  const Tensor length = norm.of_join(joined);
  const Tensor factor = at::where(length > max_norm, max_norm / (length + 1e-7), at::ones_like(length));

  // ... and receives the factors of its rows, the same from all that need a row.
  const auto factors = requests->for_served(
      [&](const RowRequests::Served& each) { return at::empty({each.rows.numel()}, transit); });
  comm::packed_all_to_all(factors, requests->for_requested([&](const RowRequests::Requested& each) {
    return factor.narrow(0, each.first, each.count);
  }),
                          transit, members.group());
  std::vector<Tensor> by_row;
  for (const LocalShard& shard : weight.local_shards())
    by_row.push_back(
        at::ones({shard.tensor.size(0)}, shard.tensor.options().dtype(dtype).requires_grad(false)));
  for (const size_t rank : c10::irange(factors.size())) {
    for (const size_t i : c10::irange(factors[rank].size())) {
      const RowRequests::Served& served = requests->served[rank][i];
      Tensor& mine = by_row[served.local];
      mine.index_copy_(0, served.rows, factors[rank][i].to(mine.device()));
    }
  }
  for (const size_t i : c10::irange(by_row.size())) {
    const Tensor& local = weight.local_shards()[i].tensor;
    const Tensor changed = by_row[i].ne(1).nonzero().squeeze(1);
    if (changed.numel() == 0) continue;
    const Tensor scaled =
        local.index_select(0, changed).to(dtype) * by_row[i].index_select(0, changed).unsqueeze(1);
    local.index_copy_(0, changed, scaled.to(local.scalar_type()));
  }
  return given;
}

const bool embedding_registered = [] {
  sharded_op_impl("aten::embedding", look_up_rows);
  sharded_op_impl("aten::embedding_renorm_", limit_norms);
  sharded_op_impl("aten::embedding_bag.padding_idx", look_up_bags);
  sharded_op_impl("aten::embedding_bag",
                  [](const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                     bool scale_grad_by_freq, int64_t mode, bool sparse,
                     const std::optional<Tensor>& per_sample_weights, bool include_last_offset) {
                    return look_up_bags(weight, indices, offsets, scale_grad_by_freq, mode, sparse,
                                        per_sample_weights, include_last_offset, std::nullopt);
                  });
  return true;
}();

}  // namespace

}  // namespace tessera::sharded
