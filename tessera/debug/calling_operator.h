#pragma once

#include <tessera/export.h>

#include <string>

namespace tessera {

/// The operator on distributed tensors that the calling thread is in: what it communicates is not asked for by the program.
/// Empty if it is in none. For observers of collectives.
TESSERA_API std::string calling_operator();

}  // namespace tessera
