#pragma once

#include <cstddef>

#include <c10/core/Storage.h>

namespace tessera::testing::device {

/// Registers the kernels of the device: a few of its own, and for all other operators those of the CPU.
void register_kernels();

/// Gives the storage so many bytes; those that it had stay.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace tessera::testing::device
