#pragma once

#include <tessera/export.h>

namespace tessera {

/// Forward-mode AD on ranks: torch::autograd::forward_ad's level, in which dual tensors are made and
/// unpacked.
///
/// libtorch has one level for the process. Ranks that are threads share it: it begins with the first rank
/// that enters and ends when the last has left, and who leaves waits for that. So tangents of one rank never
/// end up in another's next level, and none is freed while its rank still uses it. Ranks that are processes,
/// and code that is no rank's, have libtorch's level as it is.

/// Enters the level and returns its index, for at::_make_dual and at::_unpack_dual. An error if this rank is
/// inside already.
TESSERA_API uint64_t enter_dual_level();

/// Leaves the level. `is_failing`: an exception is being thrown, so this does not wait for other ranks.
TESSERA_API void exit_dual_level(bool is_failing = false);

/// Whether this rank is inside.
TESSERA_API bool is_in_dual_level();

/// Enters the level, and leaves it at the end of the scope.
class TESSERA_API DualLevel {
 public:
  DualLevel();
  ~DualLevel() noexcept(false);
  DualLevel(const DualLevel&) = delete;
  DualLevel& operator=(const DualLevel&) = delete;

 private:
  const int exceptions_;
};

}  // namespace tessera
