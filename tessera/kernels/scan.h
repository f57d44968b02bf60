#pragma once

#include <tessera/kernels/call.h>
#include <tessera/kernels/exchange.h>

#include <functional>

namespace tessera::kernels {

/// Results of a range of a dim (values, or values and their indices) that follow on those of what is before.
/// These have size 1 in the dim.
using Follow = std::function<Stack(const Stack& before, const Stack& range)>;

/// Running sums and their like along a dim: from what each rank computes of its own range to what these are
/// of the global tensor. Collective: ranks exchange the last of their results.
Stack scan(const Stack& local, const ShardGroup& ranks, int64_t dim, const Follow& follow);

}  // namespace tessera::kernels
