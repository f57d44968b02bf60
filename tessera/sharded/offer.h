#pragma once

#include <tessera/sharded/metadata.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::sharded {

/// What a rank sends to the others: under which id it has published which shards, or why it cannot.
struct Offer {
  std::string error;
  int64_t id = 0;
  std::vector<ShardMetadata> shards;
};
std::string to_bytes(const Offer& offer);
/// Throws if they are none.
Offer offer_from_bytes(std::string_view bytes);

}  // namespace tessera::sharded
