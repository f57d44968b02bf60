#pragma once

#include <tessera/export.h>

#include <string>

namespace tessera {

/// What the calling thread communicates for: the operator on distributed tensors that it is in ("aten::mm"), which the
/// program did not ask to communicate, or a function of the API ("redistribute"). Empty if it is in none. For observers of
/// collectives.
TESSERA_API std::string calling_operator();

}  // namespace tessera
