#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/operator_info.h>

namespace tessera {

/// Runs an operator on a rank that is not in the mesh of its distributed tensors, where nothing is computed
/// and nobody waits for it. Results have the placements that they have on the ranks of the mesh, and no
/// elements, but for scalars, which are zero; a Boolean result is true, as of all elements of nothing. Throws
/// if the shapes of the results depend on values, which this rank does not have.
void run_outside_of_mesh(const OperatorInfo& info, const ResolvedRule& resolved, Arguments& arguments);

}  // namespace tessera
