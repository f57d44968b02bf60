#pragma once

#include <c10/core/DeviceType.h>

namespace tessera::testing {

/// Where the meshes of tests are: on the CPU, or on the device that TESSERA_TEST_DEVICE names. `tile` is that of
/// tests/support/device; a program that calls this has it, and there each rank that is a thread has a device of its
/// own.
c10::DeviceType test_device();

}  // namespace tessera::testing
