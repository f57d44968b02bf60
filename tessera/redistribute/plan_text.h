#pragma once

#include <tessera/export.h>

#include <string>

namespace tessera {

/// "1.5 ms", "20.0 us".
TESSERA_API std::string seconds_text(double seconds);

}  // namespace tessera
