#pragma once

#include <cstddef>
#include <vector>

/// The memory of the test device: the host may not touch it, except inside of the device's own kernels.
namespace tessera::testing::device {

class Stream;

/// Memory of at least one byte that nobody can read or write until there is an Access to it. All its bits are
/// ones, so what is read too early is not a number.
void* allocate(size_t bytes);

/// Unmaps it. What still reads it then ends the process.
void release(void* memory);

/// The work of `stream` uses the memory, besides that of the stream it was allocated for.
void add_user(const void* memory, Stream& stream);
/// The streams of add_user.
std::vector<Stream*> users_of(const void* memory);

/// While alive, the process can read and write the allocations that these addresses are in; null is in none.
class Access {
 public:
  explicit Access(std::vector<const void*> addresses);
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

 private:
  std::vector<const void*> addresses_;
};

}  // namespace tessera::testing::device
