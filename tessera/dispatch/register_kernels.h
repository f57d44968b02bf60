#pragma once

namespace tessera {

/// At load, once all rules are known: a kernel for each operator that does not decompose by itself.
void register_kernels();

}  // namespace tessera
