#pragma once

#include <tessera/comm/world.h>
#include <tessera/kernels/exchange.h>

#include <functional>
#include <utility>

#include <ATen/core/Tensor.h>

/// The largest, the smallest and those in the middle, of what several ranks hold. All functions are
/// collective, and all ranks get the same.
namespace tessera::kernels {

/// Values along a dim, and their indices in it.
using ValuesAndIndices = std::pair<at::Tensor, at::Tensor>;
/// The first so many along a dim, in some order. The dim stays.
using First = std::function<ValuesAndIndices(const at::Tensor&)>;

/// The first along `dim` of all ranks, with global indices: those of what each rank names first. `each`: how
/// many a rank names, if it holds as many; `offset`: where its range of the dim begins.
ValuesAndIndices first_of_all(const at::Tensor& local, const ShardGroup& ranks, int64_t dim, int64_t offset,
                              int64_t each, const First& first);

/// The index of the largest, or smallest, element of all, counted row by row; of equal ones the first. Each
/// rank holds a contiguous range of each dim of `spec`. Of shape [1].
enum class Extreme { largest, smallest };
at::Tensor index_of_extreme(const at::Tensor& local, const Spec& spec, const ShardGroup& ranks,
                            Extreme extreme);

/// The median of all elements, of which there are `count`; NaN if one is, unless these are `ignored`.
enum class Nan { propagates, ignored };
at::Tensor median(const at::Tensor& local, int64_t count, Nan nan, const Group& group);

/// The largest of some integers; 0 if no rank has any.
int64_t largest_of_all(const at::Tensor& local, const Group& group);

}  // namespace tessera::kernels
