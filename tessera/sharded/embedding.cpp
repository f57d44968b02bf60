#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>

/// Lookups in a table that is cut in any way: by rows, by columns, or into any boxes. Each rank asks each
/// other rank, once, for the different rows that it needs of what that rank holds; then the plain operator
/// runs on those rows, so modes, paddings and gradients are its own.
namespace tessera::sharded {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// All ranks' pieces for this one, flat; `sizes` says how large each is.
comm::Tensors swap(const comm::Tensors& inputs, const std::vector<int64_t>& sizes, const Members& members) {
  comm::Tensors outputs;
  for (const int64_t size : sizes) outputs.push_back(at::empty({size}, inputs[0].options()));
  comm::all_to_all(outputs, inputs, members.group()).wait();
  return outputs;
}

/// Who needs which rows of whom.
struct Requests : torch::CustomClassHolder {
  MembersPtr members;
  std::vector<int64_t> size;  // of the whole table
  int64_t count = 0;          // of rows that this rank needs
  at::TensorOptions options;  // of those

  /// A shard that holds something, and which of the rows that this rank needs lie in it.
  struct Asked {
    ShardMetadata shard;
    int64_t first = 0, count = 0;
    int64_t columns() const { return shard.shard_sizes[1]; }
    int64_t column() const { return shard.shard_offsets[1]; }
  };
  std::vector<std::vector<Asked>> asked;  // by the rank that holds it, as its local shards are ordered

  /// The rows, counted from the shard's first, that a rank needs of a shard of this one.
  struct Wanted {
    size_t local;  // position among the local shards
    Tensor rows;
  };
  std::vector<std::vector<Wanted>> wanted;  // by the rank that needs them

  /// `numbers` per row of each asked shard, as one size for each rank; and the same for what is wanted.
  template <class Numbers>
  std::vector<int64_t> sizes_asked(const Numbers& numbers) const {
    std::vector<int64_t> sizes;
    for (const auto& of_rank : asked) {
      int64_t& size = sizes.emplace_back(0);
      for (const Asked& each : of_rank) size += each.count * numbers(each.shard);
    }
    return sizes;
  }
};

/// `needed`: sorted, all different. Collective; an index that is not in the table is an error on every rank,
/// and so is a table that has a gradient on some ranks only, as these would wait for the others in backward.
c10::intrusive_ptr<Requests> ask(const char* name, const ShardedTensor& weight, const Tensor& needed) {
  auto requests = c10::make_intrusive<Requests>();
  requests->members = weight.process_group_ptr();
  requests->size = weight.sizes().vec();
  requests->count = needed.numel();
  requests->options = at::TensorOptions(weight.scalar_type()).device(needed.device());
  const bool differentiable = weight.requires_grad() && at::GradMode::is_enabled();
  const Members& members = weight.process_group();
  const Tensor indices = needed.to(at::kCPU);
  const int64_t* begin = indices.const_data_ptr<int64_t>();
  const int64_t* end = begin + indices.numel();
  int64_t wrong = -1;  // an index that is not in the table
  const bool is_wrong = begin != end && (*begin < 0 || end[-1] >= weight.size(0));
  if (is_wrong) wrong = *begin < 0 ? *begin : end[-1];

  requests->asked.resize(members.size());
  for (const ShardMetadata& shard : weight.metadata().shards_metadata) {
    Requests::Asked asked{shard};
    if (!is_wrong) {
      const int64_t row = shard.shard_offsets[0];
      const auto* first = std::lower_bound(begin, end, row);
      asked.first = first - begin;
      asked.count = shard.numel() == 0 ? 0 : std::lower_bound(first, end, row + shard.shard_sizes[0]) - first;
    }
    requests->asked[*members.place_of(rank_of(shard.placement, members))].push_back(std::move(asked));
  }

  constexpr size_t kHead = 3;
  // How many rows of each shard; and before that, whether an index is wrong, and which, and whether there
  // will be a gradient.
  comm::Tensors counts;
  const size_t local_count = weight.local_shards().size();
  for (const auto& of_rank : requests->asked) {
    std::vector<int64_t> numbers{is_wrong, wrong, differentiable};
    for (const auto& asked : of_rank) numbers.push_back(asked.count);
    counts.push_back(at::tensor(numbers, at::kLong));
  }
  const auto their_counts =
      swap(counts, std::vector<int64_t>(members.size(), static_cast<int64_t>(local_count) + kHead), members);
  std::vector<int64_t> sizes;
  for (const int64_t place : c10::irange(members.size())) {
    const int64_t* numbers = their_counts[place].const_data_ptr<int64_t>();
    TESSERA_CHECK_INDEX(numbers[0] == 0, name, ": on rank ", members.ranks()[place], " index ", numbers[1],
                        " is looked up, but the table has ", weight.size(0), " rows.");
    const int64_t* first = their_counts[0].const_data_ptr<int64_t>();
    TESSERA_CHECK(
        numbers[2] == first[2], name, ": on rank ", members.ranks()[place], " the table ",
        numbers[2] ? "has" : "has no", " gradient, on rank ", members.ranks()[0],
        numbers[2] ? " none" : " one",
        ". Call requires_grad_() of the sharded tensor itself, and enable gradients or not, alike on "
        "all ranks.");
    sizes.push_back(0);
    for (const size_t i : c10::irange(local_count)) sizes.back() += numbers[kHead + i];
  }

  comm::Tensors rows;
  for (const auto& of_rank : requests->asked) {
    std::vector<Tensor> parts{at::empty({0}, at::kLong)};
    for (const auto& asked : of_rank)
      parts.push_back(indices.narrow(0, asked.first, asked.count) - asked.shard.shard_offsets[0]);
    rows.push_back(at::cat(parts).to(members.device()));
  }
  const auto their_rows = swap(rows, sizes, members);
  requests->wanted.resize(members.size());
  for (const int64_t place : c10::irange(members.size())) {
    int64_t from = 0;
    for (const size_t i : c10::irange(local_count)) {
      const int64_t count = their_counts[place].const_data_ptr<int64_t>()[kHead + i];
      const at::Device device = weight.local_shards()[i].tensor.device();
      requests->wanted[place].push_back({i, their_rows[place].narrow(0, from, count).to(device)});
      from += count;
    }
  }
  return requests;
}

Tensor joined(const std::vector<Tensor>& parts, at::TensorOptions options) {
  std::vector<Tensor> flat{at::empty({0}, options)};
  for (const Tensor& part : parts) flat.push_back(part.reshape({-1}).to(options));
  return at::cat(flat);
}

at::TensorOptions in_transit(at::ScalarType dtype, const Members& members) {
  return at::TensorOptions(dtype).device(members.device());
}

/// The rows that this rank needs.
Tensor fetch(const Requests& requests, const std::vector<Tensor>& locals) {
  const at::NoGradGuard no_grad;
  const Members& members = *requests.members;
  const at::TensorOptions transit = in_transit(c10::typeMetaToScalarType(requests.options.dtype()), members);
  comm::Tensors given;
  for (const auto& of_rank : requests.wanted) {
    std::vector<Tensor> parts;
    for (const auto& wanted : of_rank) parts.push_back(locals[wanted.local].index_select(0, wanted.rows));
    given.push_back(joined(parts, transit));
  }
  const auto got = swap(
      given, requests.sizes_asked([](const ShardMetadata& shard) { return shard.shard_sizes[1]; }), members);
  Tensor result = at::empty({requests.count, requests.size[1]}, requests.options);
  for (const size_t place : c10::irange(got.size())) {
    int64_t from = 0;
    for (const auto& asked : requests.asked[place]) {
      const int64_t size = asked.count * asked.columns();
      result.narrow(0, asked.first, asked.count)
          .narrow(1, asked.column(), asked.columns())
          .copy_(got[place].narrow(0, from, size).view({asked.count, asked.columns()}));
      from += size;
    }
  }
  return result;
}

/// The gradients of the local shards, given that of the rows that this rank got.
variable_list give_back(const Requests& requests, const std::vector<at::IntArrayRef>& sizes,
                        const Tensor& gradient) {
  const Members& members = *requests.members;
  const at::TensorOptions transit = in_transit(gradient.scalar_type(), members);
  comm::Tensors given;
  for (const auto& of_rank : requests.asked) {
    std::vector<Tensor> parts;
    for (const auto& asked : of_rank)
      parts.push_back(
          gradient.narrow(0, asked.first, asked.count).narrow(1, asked.column(), asked.columns()));
    given.push_back(joined(parts, transit));
  }
  std::vector<int64_t> counts;
  for (const auto& of_rank : requests.wanted) {
    counts.push_back(0);
    for (const auto& wanted : of_rank) counts.back() += wanted.rows.numel() * sizes[wanted.local][1];
  }
  const auto got = swap(given, counts, members);
  variable_list result;
  for (const at::IntArrayRef size : sizes) result.push_back(at::zeros(size, gradient.options()));
  for (const size_t place : c10::irange(got.size())) {
    int64_t from = 0;
    for (const auto& wanted : requests.wanted[place]) {
      const int64_t count = wanted.rows.numel(), columns = sizes[wanted.local][1];
      Tensor& mine = result[wanted.local];
      mine.index_add_(0, wanted.rows,
                      got[place].narrow(0, from, count * columns).view({count, columns}).to(mine.device()));
      from += count * columns;
    }
  }
  return result;
}

/// `locals`: of each rank some, so that ranks that hold nothing take part in backward.
struct Fetch : torch::autograd::Function<Fetch> {
  static Tensor forward(AutogradContext* context, at::TensorList locals,
                        c10::intrusive_ptr<Requests> requests) {
    std::vector<int64_t> sizes;
    for (const Tensor& local : locals) sizes.insert(sizes.end(), {local.size(0), local.size(1)});
    context->saved_data["sizes"] = sizes;
    Tensor result = fetch(*requests, locals.vec());
    context->saved_data["requests"] = c10::IValue::make_capsule(std::move(requests));
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TESSERA_CHECK(!gradients[0].requires_grad() || !at::GradMode::is_enabled(),
                  "The gradient of a lookup in a sharded table has no gradient itself (create_graph).");
    const auto requests = context->saved_data["requests"].toCapsule();
    const std::vector<int64_t> numbers = context->saved_data["sizes"].toIntVector();
    std::vector<at::IntArrayRef> sizes;
    for (size_t i = 0; i < numbers.size(); i += 2) sizes.emplace_back(numbers.data() + i, 2);
    variable_list result =
        give_back(*static_cast<Requests*>(requests.get()), sizes, gradients[0].contiguous());
    result.resize(result.size() + 1);
    return result;
  }
};

/// The rows that are looked up, each once, and what to look up in them instead.
struct Rows {
  Tensor rows;
  Tensor indices;  // into `rows`
  Tensor numbers;  // of the rows, in the table
  /// Where a row of the table is in `rows`, if it is.
  std::optional<int64_t> find(int64_t number) const {
    const Tensor where = numbers.to(at::kCPU);
    const auto* begin = where.const_data_ptr<int64_t>();
    const auto* found = std::lower_bound(begin, begin + where.numel(), number);
    if (found == begin + where.numel() || *found != number) return std::nullopt;
    return found - begin;
  }
};

Rows look_up(const char* name, const Tensor& table, const Tensor& indices) {
  const ShardedTensor weight(table);
  weight.process_group().check_member(name);
  auto [numbers, inverse] =
      at::_unique(indices.reshape({-1}).to(at::kLong), /*sorted=*/true, /*return_inverse=*/true);
  auto requests = ask(name, weight, numbers);
  Tensor rows = Fetch::apply(at::TensorList(weight.local_tensors()), std::move(requests));
  return {std::move(rows), inverse.view(indices.sizes()), numbers};
}

void check(const char* name, const Tensor& weight, const Tensor& indices, bool scale_grad_by_freq,
           bool sparse) {
  TESSERA_CHECK(ShardedTensor::is_sharded_tensor(weight), name,
                ": the table must be the sharded tensor; indices and all else are plain ones.");
  TESSERA_CHECK(!ShardedTensor::is_sharded_tensor(indices), name, ": the indices must be a plain tensor.");
  TESSERA_CHECK_VALUE(weight.dim() == 2, name, ": the table must have 2 dims, not ", weight.sizes(), ".");
  TESSERA_CHECK_VALUE(at::isIntegralType(indices.scalar_type(), false), name,
                      ": indices are whole numbers, not ", indices.scalar_type(), ".");
  TESSERA_CHECK(!scale_grad_by_freq, name, ": scale_grad_by_freq does not work on a sharded table.");
  TESSERA_CHECK(!sparse, name, ": sparse gradients do not work on a sharded table.");
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
                        *padding_idx, " for padding in a table of ", rows, " rows.");
    padding = *padding_idx < 0 ? *padding_idx + rows : *padding_idx;
  }
  const Rows found = look_up("embedding_bag", weight, indices);
  if (padding) padding = found.find(*padding);
  Bags result = at::embedding_bag(found.rows, found.indices, offsets.to(found.indices.scalar_type()), false,
                                  mode, false, per_sample_weights, include_last_offset, padding);
  constexpr int64_t kMax = 2;
  Tensor& largest = std::get<3>(result);  // in this mode alone, rows of `found`: make them those of the table
  if (mode == kMax && largest.numel() > 0 && found.numbers.numel() > 0)
    largest = found.numbers.index_select(0, largest.reshape({-1})).view(largest.sizes());
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
Tensor limit_norms(const Tensor& weight, const Tensor& indices, double max_norm, double norm_type) {
  check("embedding_renorm_", weight, indices, false, false);
  TESSERA_CHECK_VALUE(max_norm > 0, "embedding_renorm_: max_norm must be larger than zero, not ", max_norm,
                      ".");
  const at::NoGradGuard no_grad;
  const ShardedTensor table(weight);
  const Members& members = table.process_group();
  members.check_member("embedding_renorm_");
  const auto requests = ask("embedding_renorm_", table,
                            std::get<0>(at::_unique(indices.reshape({-1}).to(at::kLong), true, false)));
  const Norm norm{norm_type};
  const at::ScalarType dtype = table.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::TensorOptions transit = in_transit(dtype, members);

  // Each rank tells of the pieces that it holds ...
  comm::Tensors given;
  for (const auto& of_rank : requests->wanted) {
    std::vector<Tensor> parts;
    for (const auto& wanted : of_rank)
      parts.push_back(
          norm.of_pieces(table.local_shards()[wanted.local].tensor.index_select(0, wanted.rows).to(dtype)));
    given.push_back(joined(parts, transit));
  }
  const auto sizes = requests->sizes_asked([](const ShardMetadata&) { return 1; });
  const auto pieces = swap(given, sizes, members);
  Tensor whole = at::zeros({requests->count}, transit);
  for (const size_t place : c10::irange(pieces.size())) {
    int64_t from = 0;
    for (const auto& asked : requests->asked[place]) {
      Tensor part = whole.narrow(0, asked.first, asked.count);
      part.copy_(norm.join(part, pieces[place].narrow(0, from, asked.count)));
      from += asked.count;
    }
  }
  const Tensor length = norm.of_join(whole);
  const Tensor factor = at::where(length > max_norm, max_norm / (length + 1e-7), at::ones_like(length));

  // ... and is told of the rows' factors: the same by all who need a row.
  given.clear();
  for (const auto& of_rank : requests->asked) {
    std::vector<Tensor> parts;
    for (const auto& asked : of_rank) parts.push_back(factor.narrow(0, asked.first, asked.count));
    given.push_back(joined(parts, transit));
  }
  std::vector<int64_t> counts;
  for (const auto& of_rank : requests->wanted) {
    counts.push_back(0);
    for (const auto& wanted : of_rank) counts.back() += wanted.rows.numel();
  }
  const auto factors = swap(given, counts, members);
  std::vector<Tensor> by_row;
  for (const LocalShard& shard : table.local_shards())
    by_row.push_back(
        at::ones({shard.tensor.size(0)}, shard.tensor.options().dtype(dtype).requires_grad(false)));
  for (const size_t place : c10::irange(factors.size())) {
    int64_t from = 0;
    for (const auto& wanted : requests->wanted[place]) {
      Tensor& mine = by_row[wanted.local];
      mine.index_copy_(0, wanted.rows, factors[place].narrow(0, from, wanted.rows.numel()).to(mine.device()));
      from += wanted.rows.numel();
    }
  }
  for (const size_t i : c10::irange(by_row.size())) {
    const Tensor& local = table.local_shards()[i].tensor;
    const Tensor changed = by_row[i].ne(1).nonzero().squeeze(1);
    if (changed.numel() == 0) continue;
    const Tensor scaled =
        local.index_select(0, changed).to(dtype) * by_row[i].index_select(0, changed).unsqueeze(1);
    local.index_copy_(0, changed, scaled.to(local.scalar_type()));
  }
  return weight;
}

const bool registered = [] {
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
