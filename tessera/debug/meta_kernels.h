#pragma once

namespace tessera {

/// Gives libtorch the shapes of results on meta where it has none of its own, for operators of usual models. (In Python,
/// torch has them all.) Once in a process.
void register_meta_kernels();

}  // namespace tessera
