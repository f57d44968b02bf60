#include <tessera/error.h>
#include <tessera/placement/chunk.h>
#include <tessera/sharded/spec.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <ostream>
#include <sstream>
#include <typeinfo>

#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

constexpr std::string_view kChunk = "chunk ", kEnumerable = "enumerable: ";

template <class Values>
std::string joined(std::string begin, const Values& values) {
  std::ostringstream out;
  out << begin;
  for (size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ", ") << values[i];
  return out.str();
}

}  // namespace

ShardingSpec::~ShardingSpec() = default;
PlacementSpec::~PlacementSpec() = default;

bool operator==(const ShardingSpec& a, const ShardingSpec& b) {
  return &a == &b || (typeid(a) == typeid(b) && a.str() == b.str());
}

std::ostream& operator<<(std::ostream& out, const ShardingSpec& spec) { return out << spec.str(); }

// --- ChunkShardingSpec

ChunkShardingSpec::ChunkShardingSpec(int64_t dim, std::vector<RemoteDevice> placements)
    : dim_(dim), placements_(std::move(placements)) {
  TESSERA_CHECK_VALUE(!placements_.empty(), "A ChunkShardingSpec needs at least one placement.");
}

ShardedTensorMetadata ChunkShardingSpec::build_metadata(c10::IntArrayRef size,
                                                        const TensorProperties& properties) const {
  const auto ndim = static_cast<int64_t>(size.size());
  TESSERA_CHECK_VALUE(dim_ < ndim && dim_ >= -ndim, "ChunkShardingSpec: there is no dim ", dim_,
                      " to shard in a tensor of size ", size, ".");
  const int64_t dim = dim_ < 0 ? dim_ + ndim : dim_;
  ShardedTensorMetadata result;
  result.size = size.vec();
  result.tensor_properties = properties;
  static_cast<void>(result.numel());  // throws if there are too many
  result.shards_metadata.reserve(placements_.size());
  for (const size_t i : c10::irange(placements_.size())) {
    const Range part = chunk(size[dim], static_cast<int64_t>(placements_.size()), static_cast<int64_t>(i));
    std::vector<int64_t> offsets(ndim, 0), sizes = size.vec();
    offsets[dim] = part.offset;
    sizes[dim] = part.size;
    result.shards_metadata.emplace_back(std::move(offsets), std::move(sizes), placements_[i]);
  }
  return result;
}

std::string ChunkShardingSpec::str() const { return joined(c10::str(kChunk, dim_, ": "), placements_); }

ShardingSpecPtr ChunkShardingSpec::clone() const { return std::make_shared<ChunkShardingSpec>(*this); }

// --- EnumerableShardingSpec

EnumerableShardingSpec::EnumerableShardingSpec(std::vector<ShardMetadata> shards)
    : shards_(std::move(shards)) {
  TESSERA_CHECK_VALUE(!shards_.empty(), "An EnumerableShardingSpec needs at least one shard.");
  validate_non_overlapping_shards_metadata(shards_);
}

ShardedTensorMetadata EnumerableShardingSpec::build_metadata(c10::IntArrayRef size,
                                                             const TensorProperties& properties) const {
  check_tensor(shards_, size);
  return {shards_, size.vec(), properties};
}

std::string EnumerableShardingSpec::str() const { return joined(std::string(kEnumerable), shards_); }

ShardingSpecPtr EnumerableShardingSpec::clone() const {
  return std::make_shared<EnumerableShardingSpec>(*this);
}

// --- from text, and from shards

ShardingSpecPtr parse_sharding_spec(std::string_view text) {
  if (text.starts_with(kEnumerable)) {
    // The text of a sharded tensor's metadata ends so.
    const auto metadata = ShardedTensorMetadata::parse(c10::str("[] f32: ", text.substr(kEnumerable.size())));
    return std::make_shared<EnumerableShardingSpec>(metadata.shards_metadata);
  }
  if (!text.starts_with(kChunk)) return nullptr;
  int64_t dim = 0;
  const auto [end, error] = std::from_chars(text.data() + kChunk.size(), text.data() + text.size(), dim);
  std::string_view rest = text.substr(std::min<size_t>(end - text.data(), text.size()));
  TESSERA_CHECK_VALUE(error == std::errc() && rest.starts_with(": "), "\"", text,
                      "\" is no ChunkShardingSpec; expected \"chunk 0: rank:0/cpu, ...\".");
  std::vector<RemoteDevice> placements;
  for (rest.remove_prefix(2); !rest.empty();) {
    const size_t comma = rest.find(", ");
    placements.emplace_back(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 2);
  }
  return std::make_shared<ChunkShardingSpec>(dim, std::move(placements));
}

ShardingSpecPtr infer_sharding_spec(const std::vector<ShardMetadata>& shards) {
  // The one dim in which not all shards begin at 0.
  std::optional<size_t> dim;
  bool is_one = true;
  for (const ShardMetadata& shard : shards) {
    for (const size_t i : c10::irange(shard.shard_offsets.size())) {
      if (shard.shard_offsets[i] == 0) continue;
      is_one &= !dim || *dim == i;
      dim = i;
    }
    is_one &= shard.placement.has_value();
  }
  if (dim && is_one) {
    std::vector<size_t> order(shards.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return shards[a].shard_offsets[*dim] < shards[b].shard_offsets[*dim];
    });
    int64_t total = 0;  // of shards that hold nothing, any sizes may come together
    for (const ShardMetadata& shard : shards)
      is_one &= !__builtin_add_overflow(total, shard.shard_sizes[*dim], &total);
    if (!is_one) return std::make_shared<EnumerableShardingSpec>(shards);
    const auto count = static_cast<int64_t>(shards.size());
    std::vector<RemoteDevice> placements;
    for (const int64_t i : c10::irange(count)) {
      const ShardMetadata& shard = shards[order[i]];
      const Range part = chunk(total, count, i);
      const bool fits = shard.shard_sizes[*dim] == part.size &&
                        (part.size == 0 || shard.shard_offsets[*dim] == part.offset);
      if (!fits) return std::make_shared<EnumerableShardingSpec>(shards);
      placements.push_back(*shard.placement);
    }
    return std::make_shared<ChunkShardingSpec>(static_cast<int64_t>(*dim), std::move(placements));
  }
  return std::make_shared<EnumerableShardingSpec>(shards);
}

}  // namespace tessera::sharded
