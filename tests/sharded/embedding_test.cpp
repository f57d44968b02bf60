// Lookups in sharded tables, and their gradients, against the plain operators.

#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>

#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/embedding.h>

#include "tests/sharded/specs.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

namespace F = torch::nn::functional;
using testing::chunks;
using testing::expect_close;
using testing::expect_error;
using testing::grid_spec;
using testing::on_ranks;
using testing::part;
using testing::random_spec;

constexpr int64_t kRows = 17, kColumns = 10;

/// The same on every rank.
at::Tensor table() {
  return (at::remainder(at::arange(kRows * kColumns) * 7, 23) - 11).to(at::kFloat).view({kRows, kColumns}) /
         8;
}

/// Other indices on each rank, also other numbers of them.
at::Tensor indices(int64_t rank, int64_t bags) {
  return at::remainder(at::arange(bags * 6) * (rank + 3) + rank, kRows).view({bags, 6});
}

std::vector<std::shared_ptr<const ShardingSpec>> specs() {
  std::mt19937 random(7);
  return {chunks(0, {0, 1, 2, 3}).clone(),         chunks(1, {0, 1, 2, 3}).clone(),
          chunks(0, {3, 0, 2, 1}).clone(),         chunks(-1, {2, 3, 1, 0}).clone(),
          chunks(0, {0, 1, 0, 2, 1}).clone(),  // two shards on a rank, none on another
          grid_spec({kRows, kColumns}, 4).clone(), random_spec(random, {kRows, kColumns}, 9, 4).clone()};
}

/// The gradient of the embedding weight, of which each rank has what its shards got.
void expect_gradient(const ShardedTensor& weight, const at::Tensor& expected, const std::string& what) {
  for (const LocalShard& shard : weight.local_shards()) {
    if (shard.tensor.numel() == 0) continue;
    ASSERT_TRUE(shard.tensor.grad().defined()) << what;
    expect_close(shard.tensor.grad(),
                 part(expected, shard.metadata.shard_offsets, shard.metadata.shard_sizes), what);
  }
}

/// `function` of a sharded table on each rank against a plain one. The gradient of the plain one is that of
/// all ranks' losses.
void compare(const std::function<at::Tensor(const at::Tensor& weight, int64_t rank)>& function) {
  for (const auto& spec : specs()) {
    on_ranks(4, [&](int64_t rank) {
      const at::Tensor plain = table().requires_grad_();
      at::Tensor loss = at::zeros({});
      at::Tensor expected;
      for (int64_t each = 0; each < 4; ++each) {
        const at::Tensor result = function(plain, each);
        loss = loss + (result * (at::arange(result.numel(), at::kFloat).view(result.sizes()) + 1)).sum();
        if (each == rank) expected = result.detach();
      }
      loss.backward();
      const ShardedTensor weight = shard_tensor(table().requires_grad_(), *spec);
      const at::Tensor actual = function(weight, rank);
      ASSERT_FALSE(ShardedTensor::is_sharded_tensor(actual));
      expect_close(actual.detach(), expected, spec->str());
      (actual * (at::arange(actual.numel(), at::kFloat).view(actual.sizes()) + 1)).sum().backward();
      expect_gradient(weight, plain.grad(), spec->str());
    });
  }
}

TEST(ShardedEmbedding, EqualsThePlainOne) {
  compare(
      [](const at::Tensor& weight, int64_t rank) { return F::embedding(indices(rank, rank + 1), weight); });
}

TEST(ShardedEmbedding, OfAnyShapeOfIndices) {
  compare([](const at::Tensor& weight, int64_t rank) {
    return at::embedding(weight, indices(rank, 4).view({2, 3, 4}).to(rank == 1 ? at::kInt : at::kLong));
  });
  compare([](const at::Tensor& weight, int64_t rank) {  // one rank looks up nothing
    return at::embedding(weight, indices(rank, rank == 2 ? 0 : 2));
  });
}

TEST(ShardedEmbedding, PaddingGetsNoGradient) {
  for (const int64_t padding : {0, 3, 16}) {
    compare([&](const at::Tensor& weight, int64_t rank) {
      return F::embedding(indices(rank, 3), weight, F::EmbeddingFuncOptions().padding_idx(padding));
    });
  }
}

TEST(ShardedEmbeddingBag, EqualsThePlainOneInAllModes) {
  for (const torch::nn::EmbeddingBagMode& mode :
       std::vector<torch::nn::EmbeddingBagMode>{torch::kSum, torch::kMean, torch::kMax}) {
    compare([&](const at::Tensor& weight, int64_t rank) {
      return F::embedding_bag(indices(rank, 3), weight, F::EmbeddingBagFuncOptions().mode(mode));
    });
    // Bags of different sizes, of which one is empty.
    compare([&](const at::Tensor& weight, int64_t rank) {
      return F::embedding_bag(indices(rank, 3).view({18}), weight,
                              F::EmbeddingBagFuncOptions().mode(mode).offsets(
                                  at::tensor(std::vector<int64_t>{0, 5 + rank, 5 + rank, 12})));
    });
    for (const int64_t padding : {2, -1}) {
      compare([&](const at::Tensor& weight, int64_t rank) {
        return F::embedding_bag(indices(rank, 3), weight,
                                F::EmbeddingBagFuncOptions().mode(mode).padding_idx(padding));
      });
    }
  }
}

/// With many items in few rows, and all that the operator returns.
TEST(ShardedEmbeddingBag, EqualsThePlainOneInAllResults) {
  for (const int64_t mode : {0, 1, 2}) {
    for (const auto& spec : specs()) {
      on_ranks(4, [&](int64_t rank) {
        const at::Tensor few = at::remainder(at::arange(12), rank + 1) * 3 + 1;
        for (const bool last : {false, true}) {
          const at::Tensor offsets = last ? at::tensor({0, 7, 12}, at::kLong) : at::tensor({0, 7}, at::kLong);
          const at::Tensor weight = shard_tensor(table(), *spec);
          const auto actual = at::embedding_bag(weight, few, offsets, false, mode, false, {}, last);
          const auto expected = at::embedding_bag(table(), few, offsets, false, mode, false, {}, last);
          expect_close(std::get<0>(actual), std::get<0>(expected), spec->str());
          EXPECT_TRUE(at::equal(std::get<1>(actual), std::get<1>(expected))) << mode;
          EXPECT_TRUE(at::equal(std::get<2>(actual), std::get<2>(expected))) << mode;
          EXPECT_TRUE(at::equal(std::get<3>(actual), std::get<3>(expected))) << mode;
        }
      });
    }
    compare([&](const at::Tensor& weight, int64_t rank) {  // two rows, in bags of six
      return std::get<0>(at::embedding_bag(weight, at::remainder(indices(rank, 3), 2).view({18}),
                                           at::tensor({0, 6, 12}, at::kLong), false, mode));
    });
  }
}

TEST(ShardedEmbeddingBag, WithLastOffset) {
  compare([](const at::Tensor& weight, int64_t rank) {
    return F::embedding_bag(indices(rank, 2).view({12}), weight,
                            F::EmbeddingBagFuncOptions()
                                .mode(torch::kSum)
                                .offsets(at::tensor({0, 4, 12}, at::kLong))
                                .include_last_offset(true));
  });
}

TEST(ShardedEmbeddingBag, WeighsSamples) {
  compare([](const at::Tensor& weight, int64_t rank) {
    return F::embedding_bag(indices(rank, 3), weight,
                            F::EmbeddingBagFuncOptions()
                                .mode(torch::kSum)
                                .per_sample_weights(at::arange(18, at::kFloat).view({3, 6}) / 7));
  });
  // Their gradients are as of the plain operator.
  on_ranks(4, [](int64_t rank) {
    auto gradient = [&](const at::Tensor& weight) {
      const at::Tensor samples = at::ones({3, 6}).requires_grad_();
      F::embedding_bag(indices(rank, 3), weight,
                       F::EmbeddingBagFuncOptions().mode(torch::kSum).per_sample_weights(samples))
          .square()
          .sum()
          .backward();
      return samples.grad();
    };
    expect_close(gradient(shard_tensor(table(), chunks(1, {0, 1, 2, 3}))), gradient(table()), "samples");
  });
}

// The rows that any rank looks up are scaled down, in the table itself.
TEST(ShardedEmbedding, MaxNorm) {
  for (const double p : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const auto& spec : specs()) {
      on_ranks(4, [&](int64_t rank) {
        const at::NoGradGuard no_grad;
        const at::Tensor plain = table();
        at::Tensor expected;
        const auto options = F::EmbeddingFuncOptions().max_norm(1.5).norm_type(p);
        for (int64_t each = 0; each < 4; ++each) F::embedding(indices(each, 1), plain, options);
        const ShardedTensor weight = shard_tensor(table(), *spec);
        const at::Tensor actual = F::embedding(indices(rank, 1), weight, options);
        expect_close(actual, at::embedding(plain, indices(rank, 1)), spec->str());
        for (const LocalShard& shard : weight.local_shards())
          expect_close(shard.tensor, part(plain, shard.metadata.shard_offsets, shard.metadata.shard_sizes),
                       spec->str());
      });
    }
  }
  compare([](const at::Tensor& weight, int64_t) {  // and then it is trained
    return F::embedding_bag(indices(0, 3), weight,
                            F::EmbeddingBagFuncOptions().mode(torch::kSum).max_norm(1.5));
  });
}

TEST(ShardedEmbedding, AnIndexThatIsNotThereIsAnErrorOnEveryRank) {
  on_ranks(4, [](int64_t rank) {
    const at::Tensor weight = shard_tensor(table(), chunks(0, {0, 1, 2, 3}));
    for (const int64_t wrong : {kRows, int64_t{-1}}) {
      at::Tensor mine = indices(rank, 2);
      if (rank == 2) mine[0][0] = wrong;
      expect_error<c10::IndexError>([&] { at::embedding(weight, mine); },
                                    {"rank 2", c10::str("index ", wrong), "17 rows"});
    }
    expect_close(at::embedding(weight, indices(rank, 2)), at::embedding(table(), indices(rank, 2)),
                 "afterwards");
  });
}

TEST(ShardedEmbedding, Errors) {
  on_ranks(2, [](int64_t) {
    at::Tensor weight = shard_tensor(table(), chunks(0, {0, 1}));
    const at::Tensor some = indices(0, 2);
    expect_error<c10::Error>([&] { at::embedding(weight, some, -1, true); }, {"scale_grad_by_freq"});
    expect_error<c10::Error>([&] { at::embedding(weight, some, -1, false, true); }, {"sparse"});
    expect_error<c10::ValueError>([&] { at::embedding(zeros(chunks(0, {0, 1}), {4}), some); }, {"2 dims"});
    expect_error<c10::ValueError>([&] { at::embedding(weight, some.to(at::kFloat)); }, {"must be integers"});
    expect_error<c10::Error>(
        [&] {
          at::embedding(at::ones({4, 4}), weight);
        },
        {"must be the sharded tensor"});
    expect_error<c10::ValueError>([&] { at::embedding_renorm_(weight, some, -1, 2); }, {"max_norm"});
    expect_error<c10::IndexError>(
        [&] { at::embedding_bag(weight, some.view({12}), at::tensor({0}), false, 0, false, {}, false, 99); },
        {"99"});
  });
}

TEST(ShardedEmbedding, InAnyFloatingDtype) {
  on_ranks(2, [](int64_t rank) {
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
      const at::Tensor weight = shard_tensor(table().to(dtype), chunks(1, {1, 0}));
      EXPECT_TRUE(at::equal(at::embedding(weight, indices(rank, 2)),
                            at::embedding(table().to(dtype), indices(rank, 2))));
    }
  });
}

}  // namespace
}  // namespace tessera::sharded
