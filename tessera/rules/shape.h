#pragma once

#include <tessera/rules/einsum.h>
#include <tessera/rules/strategy.h>

#include <cstdint>
#include <vector>

/// Dims, sizes and strides, as rules speak of them.
namespace tessera::rules {

/// A dim counted from the start.
int64_t wrapped(int64_t dim, int64_t ndim);
/// The same of several; none: all.
Shape wrapped(Shape dims, int64_t ndim);
bool contains(const Shape& dims, int64_t dim);

/// Strides without gaps, with the dims in the same order in memory.
Shape dense_strides(const Spec& spec);

/// The strides of a new tensor like the first, as the call's memory_format, if any, says.
Shape new_strides(const OpCall& call);

/// The shapes and strides of the results, all tensors of lists among them, as libtorch computes them of a
/// meta tensor like the call's first. The rule has to read all arguments that are no tensors.
std::vector<Result> computed_results(const OpCall& call);

/// Whether one of the dims is sharded.
bool is_sharded_on(const Spec& spec, const Shape& dims);
/// How many of the dims' elements this rank holds, over how many there are.
double local_share(const Spec& spec, const Shape& dims);

/// The letters of `shape` when it meets `target` from the right, as in broadcasting.
///   broadcast({1, 4}, {2, 3, 4}, letters("abc")) == letters(".c")
Letters broadcast(c10::IntArrayRef shape, c10::IntArrayRef target, const Letters& letters);

}  // namespace tessera::rules
