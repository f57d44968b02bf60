#include "tests/support/device/memory.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <utility>

namespace tessera::testing::device {

namespace {

struct Block {
  size_t bytes = 0;
  int users = 0;  // alive Accesses
  std::vector<Stream*> streams;
};

std::mutex blocks_mutex;

/// By the address after their last byte. Never destroyed: tensors may be.
std::map<uintptr_t, Block>& blocks() {
  static auto& instance = *new std::map<uintptr_t, Block>();
  return instance;
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::abort();
}

/// The block with this address. With the lock.
std::map<uintptr_t, Block>::value_type& block_at(const void* address) {
  const auto found = blocks().upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == blocks().end() || found->first - found->second.bytes > reinterpret_cast<uintptr_t>(address))
    fail("no memory of the device is at this address");
  return *found;
}

void protect(const std::map<uintptr_t, Block>::value_type& block, int protection) {
  void* begin = reinterpret_cast<void*>(block.first - block.second.bytes);
  if (::mprotect(begin, block.second.bytes, protection) != 0) fail("mprotect");
}

}  // namespace

void* allocate(size_t bytes) {
  constexpr size_t kPage = 4096;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  std::memset(memory, 0xff, bytes);
  if (::mprotect(memory, bytes, PROT_NONE) != 0) fail("mprotect");
  const std::lock_guard lock(blocks_mutex);
  blocks()[reinterpret_cast<uintptr_t>(memory) + bytes].bytes = bytes;
  return memory;
}

void release(void* memory) {
  const std::lock_guard lock(blocks_mutex);
  const auto& block = block_at(memory);
  if (::munmap(memory, block.second.bytes) != 0) fail("munmap");
  blocks().erase(block.first);
}

void add_user(const void* memory, Stream& stream) {
  const std::lock_guard lock(blocks_mutex);
  block_at(memory).second.streams.push_back(&stream);
}

std::vector<Stream*> users_of(const void* memory) {
  const std::lock_guard lock(blocks_mutex);
  return block_at(memory).second.streams;
}

Access::Access(std::vector<const void*> addresses) : addresses_(std::move(addresses)) {
  const std::lock_guard lock(blocks_mutex);
  for (const void* address : addresses_) {
    if (!address) continue;
    auto& block = block_at(address);
    if (block.second.users++ == 0) protect(block, PROT_READ | PROT_WRITE);
  }
}

Access::~Access() {
  const std::lock_guard lock(blocks_mutex);
  for (const void* address : addresses_) {
    if (!address) continue;
    auto& block = block_at(address);
    if (--block.second.users == 0) protect(block, PROT_NONE);
  }
}

}  // namespace tessera::testing::device
