#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/operator_info.h>

/// Operators that write into their arguments otherwise than element by element: by the operator that returns
/// new tensors (`out=`, and what a rule computes in another way), in another shape (t_, squeeze_), or in
/// other memory (resize_, set_).
namespace tessera {

/// What can be done of changing memory in place: to become another distributed tensor, or to stay as it is.
/// False: nothing was done.
bool run_reallocation(const OperatorInfo& info, Arguments& arguments);

/// Calls the operator that returns new tensors, which must exist, and writes its results into the arguments.
/// False if a result of `out=` would have to be converted, and nothing was written: the operator itself
/// decides whether it does that.
bool run_functional(const OperatorInfo& info, Arguments& arguments);

}  // namespace tessera
