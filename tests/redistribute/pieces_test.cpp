#include <tessera/redistribute/pieces.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

std::vector<Pieces> pieces(std::initializer_list<Pieces> dims) { return dims; }

TEST(SelectPieces, ContractExample) {
  const at::Tensor x = at::arange(6).view({2, 3});
  EXPECT_TRUE(
      at::equal(select_pieces(x, pieces({{{1, 1}}, {{0, 1}, {2, 1}}})), at::tensor({3, 5}).view({1, 2})));
}

TEST(SelectPieces, ViewUnlessADimHasSeveralPieces) {
  const at::Tensor x = at::arange(24).view({4, 6});
  EXPECT_TRUE(select_pieces(x, pieces({{{1, 2}}, {{0, 6}}})).is_alias_of(x));
  EXPECT_FALSE(select_pieces(x, pieces({{{0, 1}, {2, 1}}, {{0, 6}}})).is_alias_of(x));
  EXPECT_EQ(select_pieces(x, pieces({{}, {{0, 6}}})).sizes(), (std::vector<int64_t>{0, 6}));
}

/// All choices of up to two pieces of each dim, against indices.
TEST(SelectPieces, CopyIntoWritesWhatSelectReads) {
  std::vector<Pieces> choices{{}};
  for (int64_t a = 0; a < 4; ++a) {
    for (int64_t b = a + 1; b <= 4; ++b) {
      choices.push_back({{a, b - a}});
      for (int64_t c = b + 1; c < 4; ++c) choices.push_back({{a, b - a}, {c, 4 - c}});
    }
  }
  auto indices = [](const Pieces& of) {
    std::vector<int64_t> result;
    for (const Range& range : of) {
      for (int64_t i = range.offset; i < range.end(); ++i) result.push_back(i);
    }
    return at::tensor(result, at::kLong);
  };
  const at::Tensor x = at::arange(32).view({4, 2, 4}).transpose(1, 2);
  for (const Pieces& rows : choices) {
    for (const Pieces& columns : choices) {
      const auto box = pieces({rows, columns, {{1, 1}}});
      const at::Tensor expected =
          x.index_select(0, indices(rows)).index_select(1, indices(columns)).narrow(2, 1, 1);
      const at::Tensor selected = select_pieces(x, box);
      EXPECT_TRUE(at::equal(selected, expected));

      const at::Tensor written = at::full_like(x, -1);
      copy_into_pieces(written, box, selected);
      EXPECT_TRUE(at::equal(select_pieces(written, box), expected));
      EXPECT_EQ(written.ge(0).sum().item<int64_t>(), expected.numel());
    }
  }
}

}  // namespace
}  // namespace tessera
