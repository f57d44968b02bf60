#include "tests/support/test_device.h"

#include <tessera/comm/world.h>

#include <cstdlib>
#include <string>

#include <c10/core/Device.h>

#include "tests/support/device/device.h"

namespace tessera::testing {

namespace {

/// When the program is loaded, as kernels of devices are registered.
const c10::DeviceType type = [] {
  const char* value = std::getenv("TESSERA_TEST_DEVICE");
  const std::string name = value ? value : "cpu";
  if (name == "tile") {
    device::set_first_device([] {
      return has_current_world() ? static_cast<int>(current_world()->rank() % device::kDevices) : 0;
    });
    device::set_strict_comparisons(false);
    device::enable();
  }
  return c10::Device(name).type();
}();

}  // namespace

c10::DeviceType test_device() { return type; }

}  // namespace tessera::testing
