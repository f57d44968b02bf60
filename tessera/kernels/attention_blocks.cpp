#include <tessera/kernels/attention_blocks.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

namespace tessera::kernels {

namespace {

constexpr int64_t kLength = 2;  // the dim

at::Tensor rows_at(const at::Tensor& tensor, const Range& range) {
  return tensor.narrow(kLength, range.offset, range.size);
}

/// libtorch's kernel that never has all scores at once.
bool has_flash_kernel(const at::Tensor& query, const at::Tensor& value) {
  return query.is_cpu() && query.size(3) == value.size(3);
}

double scale_of(const at::Tensor& query, std::optional<double> scale) {
  return scale ? *scale : 1 / std::sqrt(static_cast<double>(query.size(3)));
}

/// The scores of a block, and keys and values for each head of the queries, all in the wider dtype.
struct Scores {
  at::Tensor query, key, value, scores;

  Scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool diagonal, double scale) {
    const auto wide = at::toOpMathType(q.scalar_type());
    const int64_t repeats = q.size(1) / k.size(1);
    query = q.to(wide);
    key = k.to(wide).repeat_interleave(repeats, 1);
    value = v.to(wide).repeat_interleave(repeats, 1);
    scores = query.matmul(key.mT()) * scale;
    if (!diagonal) return;
    const auto unseen = at::ones({q.size(kLength), k.size(kLength)}, q.options().dtype(at::kBool)).triu(1);
    scores.masked_fill_(unseen, -std::numeric_limits<double>::infinity());
  }
};

std::tuple<at::Tensor, at::Tensor> attention_of(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value, bool diagonal,
                                                std::optional<double> scale) {
  if (has_flash_kernel(query, value))
    return at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, diagonal, {}, scale);
  const Scores block(query, key, value, diagonal, scale_of(query, scale));
  const at::Tensor sums = block.scores.logsumexp(-1);
  return {(block.scores - sums.unsqueeze(-1)).exp().matmul(block.value), sums};
}

/// The sum over the heads of queries that share one of keys.
at::Tensor by_group(const at::Tensor& gradient, int64_t groups) {
  return gradient.unflatten(1, {groups, gradient.size(1) / groups}).sum(2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gradients_of(const AttentionResult& result,
                                                            const at::Tensor& query, const at::Tensor& key,
                                                            const at::Tensor& value, bool diagonal,
                                                            std::optional<double> scale) {
  if (has_flash_kernel(query, value))
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(
        result.gradient, query, key, value, result.output, result.logsumexp, 0.0, diagonal, {}, scale);
  const double factor = scale_of(query, scale);
  const Scores block(query, key, value, diagonal, factor);
  const at::Tensor weights = (block.scores - result.logsumexp.unsqueeze(-1)).exp();
  const at::Tensor gradient = result.gradient.to(weights.scalar_type());
  const at::Tensor delta = (gradient * result.output).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores = weights * (gradient.matmul(block.value.mT()) - delta) * factor;
  return {of_scores.matmul(block.key), by_group(of_scores.mT().matmul(block.query), key.size(1)),
          by_group(weights.mT().matmul(gradient), key.size(1))};
}

}  // namespace

SequenceRuns runs_in_order(int64_t length) {
  return length == 0 ? SequenceRuns() : SequenceRuns{{0, 0, length}};
}

SequenceRuns zigzag_runs(int64_t length, int64_t ranks) {
  SequenceRuns result;
  int64_t front = 0, back = length;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Range shard = chunk(length, ranks, rank);
    const int64_t first = (shard.size + 1) / 2, second = shard.size - first;
    back -= second;
    if (first > 0) result.push_back({shard.offset, front, first});
    if (second > 0) result.push_back({shard.offset + first, back, second});
    front += first;
  }
  return result;
}

SequenceRuns local_runs(const SequenceRuns& runs, const Pieces& pieces) {
  SequenceRuns result;
  int64_t before = 0;
  for (const Range& piece : pieces) {
    for (const SequenceRun& run : runs) {
      const int64_t first = std::max(piece.offset, run.index);
      const int64_t end = std::min(piece.end(), run.index + run.size);
      if (first < end)
        result.push_back({before + first - piece.offset, run.position + first - run.index, end - first});
    }
    before += piece.size;
  }
  return result;
}

std::vector<AttentionBlock> attention_blocks(const SequenceRuns& queries, const SequenceRuns& keys,
                                             bool causal) {
  std::vector<AttentionBlock> result;
  const auto add = [&](Range q, Range k, bool diagonal = false) {
    if (q.size > 0 && k.size > 0) result.push_back({q, k, diagonal});
  };
  if (!causal) {
    const auto all = [](const SequenceRuns& runs) {
      return Range{0, runs.empty() ? 0 : runs.back().index + runs.back().size};
    };
    add(all(queries), all(keys));
    return result;
  }
  for (const SequenceRun& q : queries) {
    for (const SequenceRun& k : keys) {
      const int64_t q_end = q.position + q.size, k_end = k.position + k.size;
      // Queries behind all of the keys see all of them.
      const int64_t behind = std::clamp(k_end, q.position, q_end);
      add({q.index + behind - q.position, q_end - behind}, {k.index, k.size});
      // Of those among the keys, each sees the keys before the first of them, and those up to its own.
      const int64_t first = std::max(q.position, k.position), count = std::min(q_end, k_end) - first;
      const Range among{q.index + first - q.position, count};
      add(among, {k.index, first - k.position});
      add(among, {k.index + first - k.position, count}, /*diagonal=*/true);
    }
  }
  return result;
}

Attended nothing_attended(const at::Tensor& query, int64_t value_size) {
  const auto wide = query.options().dtype(at::toOpMathType(query.scalar_type()));
  const auto shape = query.sizes();
  const at::Tensor output = at::zeros({shape[0], shape[2], shape[1], value_size}, wide);
  const at::Tensor logsumexp =
      at::full({shape[0], shape[2], shape[1]}, -std::numeric_limits<double>::infinity(), wide);
  return {output.transpose(1, 2), logsumexp.transpose(1, 2)};
}

void attend(const Attended& sum, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
            const std::vector<AttentionBlock>& blocks, std::optional<double> scale) {
  if (query.numel() == 0) return;
  for (const AttentionBlock& block : blocks) {
    const auto [output, logsumexp] = attention_of(rows_at(query, block.queries), rows_at(key, block.keys),
                                                  rows_at(value, block.keys), block.diagonal, scale);
    const at::Tensor known = rows_at(sum.logsumexp, block.queries);
    const at::Tensor merged = at::logaddexp(known, logsumexp);
    rows_at(sum.output, block.queries)
        .mul_((known - merged).exp_().unsqueeze(-1))
        .add_(output * (logsumexp - merged).exp_().unsqueeze(-1));
    known.copy_(merged);
  }
}

void attend_backward(const AttentionGradients& sum, const AttentionResult& result, const at::Tensor& query,
                     const at::Tensor& key, const at::Tensor& value,
                     const std::vector<AttentionBlock>& blocks, std::optional<double> scale) {
  if (query.numel() == 0) return;
  for (const AttentionBlock& block : blocks) {
    const AttentionResult rows{rows_at(result.gradient, block.queries), rows_at(result.output, block.queries),
                               rows_at(result.logsumexp, block.queries)};
    const auto [of_query, of_key, of_value] =
        gradients_of(rows, rows_at(query, block.queries), rows_at(key, block.keys),
                     rows_at(value, block.keys), block.diagonal, scale);
    rows_at(sum.query, block.queries).add_(of_query);
    rows_at(sum.key, block.keys).add_(of_key);
    rows_at(sum.value, block.keys).add_(of_value);
  }
}

}  // namespace tessera::kernels
