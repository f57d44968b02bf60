#include <tessera/placement/chunk.h>

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

std::vector<int64_t> elements(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

std::vector<int64_t> elements(const Pieces& pieces) {
  std::vector<int64_t> out;
  for (const Range& piece : pieces) {
    for (int64_t i = piece.offset; i < piece.end(); ++i) out.push_back(i);
  }
  return out;
}

// What torch.chunk gives, and empty tensors for the chunks that it leaves out.
at::Tensor torch_chunk(const at::Tensor& tensor, int64_t count, int64_t index) {
  const auto chunks = tensor.chunk(count);
  return index < static_cast<int64_t>(chunks.size()) ? chunks[index] : at::empty({0}, tensor.options());
}

at::Tensor torch_strided_chunk(const at::Tensor& tensor, int64_t split, int64_t count, int64_t index) {
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < split; ++i)
    pieces.push_back(torch_chunk(torch_chunk(tensor, split, i), count, index));
  return at::cat(pieces);
}

void expect_well_formed(const Pieces& pieces) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_GT(pieces[i].size, 0);
    if (i > 0) {
      EXPECT_GT(pieces[i].offset, pieces[i - 1].end());
    }
  }
}

TEST(Chunk, ContractExamples) {
  EXPECT_EQ(chunk(10, 4, 3), (Range{9, 1}));
  EXPECT_EQ(chunk(2, 4, 3), (Range{2, 0}));
  EXPECT_EQ(chunk(0, 3, 1), (Range{0, 0}));
}

TEST(Pieces, AppendMergesWhatTouches) {
  const auto after = [](Pieces pieces, Range range) {
    append(pieces, range);
    return pieces;
  };
  EXPECT_EQ(after({{0, 2}}, {2, 3}), (Pieces{{0, 5}}));
  EXPECT_EQ(after({{0, 2}}, {4, 3}), (Pieces{{0, 2}, {4, 3}}));
  EXPECT_EQ(after({{0, 2}}, {4, 0}), (Pieces{{0, 2}}));
  EXPECT_EQ(after({}, {4, 1}), (Pieces{{4, 1}}));
}

TEST(Chunk, SplitsAsTorchChunk) {
  for (int64_t size = 0; size <= 40; ++size) {
    const at::Tensor all = at::arange(size, at::kLong);
    for (int64_t count = 1; count <= 12; ++count) {
      int64_t end = 0;
      for (int64_t index = 0; index < count; ++index) {
        const Range range = chunk(size, count, index);
        EXPECT_EQ(range.offset, end) << size << ' ' << count << ' ' << index;
        end = range.end();
        EXPECT_EQ(elements(Pieces{range}), elements(torch_chunk(all, count, index)));
        if (range.size == 0) {
          EXPECT_EQ(range.offset, size);
        }
      }
      EXPECT_EQ(end, size);
    }
  }
}

TEST(Chunk, LargestSizesDoNotOverflow) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(chunk(most, 1, 0), (Range{0, most}));
  EXPECT_EQ(chunk(most, most, most - 1), (Range{most - 1, 1}));
  EXPECT_EQ(chunk(most, most - 1, most - 2), (Range{most, 0}));
}

TEST(Chunk, RefusesWhatMakesNoSense) {
  EXPECT_THROW(chunk(-1, 2, 0), c10::ValueError);
  EXPECT_THROW(chunk(4, 0, 0), c10::ValueError);
  EXPECT_THROW(chunk(4, 2, 2), c10::IndexError);
  EXPECT_THROW(chunk(4, 2, -1), c10::IndexError);
  EXPECT_THROW(unsharded(-1), c10::ValueError);
  EXPECT_THROW(strided_shard(unsharded(4), 0, 2, 0), c10::ValueError);
  EXPECT_THROW(strided_shard(unsharded(0), 1, 2, 2), c10::IndexError);
}

TEST(Pieces, ContractExamples) {
  EXPECT_EQ(unsharded(8), (Pieces{{0, 8}}));
  EXPECT_EQ(unsharded(0), Pieces{});
  EXPECT_EQ(length({{0, 2}, {4, 1}}), 3);
  EXPECT_EQ(shard({{0, 2}, {4, 2}}, 2, 1), (Pieces{{4, 2}}));
  EXPECT_EQ(shard({{0, 2}, {4, 2}}, 4, 2), (Pieces{{4, 1}}));
  EXPECT_EQ(strided_shard({{0, 8}}, 2, 2, 0), (Pieces{{0, 2}, {4, 2}}));
}

// The way any two splits follow each other on one dim.
TEST(Pieces, TwoSplitsAreThoseOfTorch) {
  int64_t cases = 0;
  for (int64_t size = 0; size <= 20; ++size) {
    const at::Tensor all = at::arange(size, at::kLong);
    for (int64_t split1 = 1; split1 <= 4; ++split1) {
      for (int64_t count1 = 1; count1 <= 4; ++count1) {
        for (int64_t index1 = 0; index1 < count1; ++index1) {
          const Pieces first = strided_shard(unsharded(size), split1, count1, index1);
          const at::Tensor torch_first = torch_strided_chunk(all, split1, count1, index1);
          ASSERT_EQ(elements(first), elements(torch_first));
          for (int64_t split2 = 1; split2 <= 5; ++split2) {
            for (int64_t count2 = 1; count2 <= 3; ++count2) {
              int64_t covered = 0;
              for (int64_t index2 = 0; index2 < count2; ++index2) {
                const Pieces second = strided_shard(first, split2, count2, index2);
                expect_well_formed(second);
                ASSERT_EQ(elements(second),
                          elements(torch_strided_chunk(torch_first, split2, count2, index2)));
                if (split2 == 1) {
                  ASSERT_EQ(second, shard(first, count2, index2));
                }
                covered += length(second);
                ++cases;
              }
              ASSERT_EQ(covered, length(first));
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 21 * 4 * (1 + 2 + 3 + 4) * 5 * (1 + 2 + 3));
}

TEST(Pieces, CostDoesNotGrowWithElements) {
  const int64_t huge = int64_t{1} << 60;
  const Pieces pieces = strided_shard(unsharded(huge), 1024, 2, 1);
  EXPECT_EQ(pieces.size(), 1024);
  EXPECT_EQ(length(pieces), huge / 2);
  EXPECT_EQ(length(shard(pieces, 3, 2)), chunk(huge / 2, 3, 2).size);
}

TEST(Pieces, AreNotMoreThanCanBeListed) {
  const int64_t huge = int64_t{1} << 60;
  EXPECT_EQ(strided_shard(unsharded(huge), kMaxSplit, 2, 0).size(), static_cast<size_t>(kMaxSplit));
  EXPECT_THROW(strided_shard(unsharded(huge), kMaxSplit + 1, 2, 0), c10::ValueError);
  EXPECT_THROW(strided_shard(unsharded(INT64_MAX), INT64_MAX, 2, 0), c10::ValueError);
}

TEST(Pieces, SplitMayExceedTheSize) {
  EXPECT_EQ(strided_shard(unsharded(3), int64_t{1} << 60, 2, 0), (Pieces{{0, 3}}));
  EXPECT_EQ(strided_shard(unsharded(3), int64_t{1} << 60, 2, 1), Pieces{});
}

}  // namespace
}  // namespace tessera
