#pragma once

#include <tessera/comm/collectives.h>

namespace tessera::testing {

/// Every collective of tessera/comm/collectives.h on `group`, over dtypes, reductions, sizes, roots, uneven
/// and empty parts and tensors that are not contiguous, each against the same computed here on the inputs of
/// all ranks.
void run_collective_suite(const Group& group);

/// The suite on the group of all ranks of the current world, and on sub-groups of it.
void run_collective_suite_on_all_groups();

}  // namespace tessera::testing
