#pragma once

#include <array>
#include <cstdint>

namespace tessera::random {

/// Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): a
/// bijection of 128-bit counters for each 64-bit key, whose values pass for random. Any value can be had
/// without those before it.
///   philox({0, 0, 0, 0}, {0, 0}) == {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}
inline constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                                std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

}  // namespace tessera::random
