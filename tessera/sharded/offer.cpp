#include <tessera/bytes.h>
#include <tessera/sharded/offer.h>

namespace tessera::sharded {

std::string to_bytes(const Offer& offer) {
  ByteWriter out;
  out.put(std::string_view(offer.error));
  out.put(offer.id);
  out.put(static_cast<int64_t>(offer.shards.size()));
  for (const ShardMetadata& shard : offer.shards) out.put(std::string_view(shard.to_bytes()));
  return out.take();
}

Offer offer_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "offer of shards");
  Offer offer;
  offer.error = in.get_text();
  offer.id = in.get<int64_t>();
  const int64_t count = in.get_count(sizeof(int64_t));
  for (int64_t i = 0; i < count; ++i) offer.shards.push_back(ShardMetadata::from_bytes(in.get_text()));
  in.check(in.done());
  return offer;
}

}  // namespace tessera::sharded
