// Tries everything that parses text or bytes, or computes with sizes, with inputs that nobody would write. See
// tests/support/fuzz.h for its options. What is pure is compiled into this program with UndefinedBehaviorSanitizer, so that a
// sum of sizes that overflows ends it.
//
// Texts that are valid stand in tests/fuzz/corpus, one a line; valid bytes are made from them. Where there is a printer, what
// was read must be the same when it is printed and read again.

#include <tessera/comm/call_record.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/monitor_messages.h>
#include <tessera/comm/run.h>
#include <tessera/comm/world.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/mesh/axis.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/pipeline/table.h>
#include <tessera/pipeline/tensor_meta.h>
#include <tessera/placement/text.h>
#include <tessera/random/generator.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/offer.h>
#include <tessera/sharded/spec.h>
#include <tessera/sharded/state.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <sstream>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tests/support/fuzz.h"

namespace tessera::fuzz {
namespace {

using Lists = std::vector<std::string>;
using Names = DeviceMesh::Names;

Lists corpus(const std::string& name) {
  return lines_of(std::string(TESSERA_FUZZ_CORPUS) + "/" + name + ".txt");
}

std::shared_ptr<World> fake_world(int64_t rank, int64_t size) {
  return std::make_shared<World>(WorldOptions{.rank = rank, .size = size, .backend = "fake"});
}

// ---- kinds of targets

Target text_target(std::string name, Lists valid, std::function<void(std::string_view)> read) {
  auto make = [valid](Random& random) {
    std::string text = one_of(valid, random);
    const std::string& other = one_of(valid, random);
    for (size_t count = 1 + below(random, 4); count > 0; --count) {
      random() % 4 ? mutate_text(text, other, random) : mutate_bytes(text, other, random);
    }
    return text;
  };
  return {std::move(name), std::move(valid), make, std::move(read)};
}

Target bytes_target(std::string name, Lists valid, std::function<void(std::string_view)> read) {
  auto make = [valid](Random& random) {
    std::string bytes = one_of(valid, random);
    const std::string& other = one_of(valid, random);
    for (size_t count = 1 + below(random, 4); count > 0; --count) {
      if (random() % 3 != 0 || bytes.size() < sizeof(int64_t)) {
        mutate_bytes(bytes, other, random);
        continue;
      }
      // A length or a number: small steps are wrong in other ways than extremes.
      const size_t at = below(random, bytes.size() - sizeof(int64_t) + 1);
      int64_t value = 0;
      std::memcpy(&value, bytes.data() + at, sizeof value);
      const auto step = static_cast<uint64_t>(below(random, 17)) - 8;
      value = random() % 2 ? some_integer(random) : static_cast<int64_t>(static_cast<uint64_t>(value) + step);
      std::memcpy(bytes.data() + at, &value, sizeof value);
    }
    return bytes;
  };
  return {std::move(name), std::move(valid), make, std::move(read)};
}

/// The numbers that an input consists of, one after the other; then zeros.
class Numbers {
 public:
  explicit Numbers(std::string_view bytes) : bytes_(bytes) {}

  int64_t next() {
    int64_t value = 0;
    if (bytes_.size() < sizeof value) return 0;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(static_cast<uint64_t>(next()) % limit); }
  std::vector<int64_t> list(int64_t count) {
    std::vector<int64_t> values(count);
    for (int64_t& value : values) value = next();
    return values;
  }

 private:
  std::string_view bytes_;
};

/// For what computes with sizes: reads an input as numbers.
Target numbers_target(std::string name, std::function<void(Numbers)> read) {
  auto make = [](Random& random) {
    std::string bytes;
    for (size_t count = below(random, 40); count > 0; --count) {
      int64_t value = static_cast<int64_t>(below(random, 9));
      const auto kind = random() % 10;
      if (kind >= 8) {
        value = some_integer(random);
      } else if (kind == 7) {
        value = static_cast<int64_t>(random() >> below(random, 64));
      }
      bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    return bytes;
  };
  return {std::move(name), {}, make, [read](std::string_view bytes) { read(Numbers(bytes)); }};
}

Placement some_placement(Numbers& numbers) {
  switch (numbers.below(6)) {
    case 0:
    case 1:
      return Shard(numbers.next());
    case 2:
      return StridedShard(numbers.next(), numbers.next());
    case 3:
      return Partial();
    default:
      return Replicate();
  }
}

Placements some_placements(Numbers& numbers, int64_t count) {
  Placements placements;
  for (int64_t i = 0; i < count; ++i) placements.push_back(some_placement(numbers));
  return placements;
}

// ---- placements and specs as text

void read_placement(std::string_view text) {
  const Placement placement = parse_placement(text);
  require(parse_placement(placement.str()) == placement, "a placement is another one when printed");
}

void read_placements(std::string_view text) {
  const Placements placements = parse_placements(text);
  require(parse_placements(to_text(placements)) == placements, "placements are others when printed");
}

void read_layout(std::string_view text) {
  const Layout layout = parse_layout(text);
  require(parse_layout(to_text(layout)) == layout, "a layout is another one when printed");
}

/// On the mesh that the text itself names, if there can be one.
void read_context(std::string_view text) {
  constexpr std::string_view kSuffix = " requires_grad";
  const std::string_view spec = text.ends_with(kSuffix) ? text.substr(0, text.size() - kSuffix.size()) : text;
  const Layout layout = parse_layout(spec);
  const DeviceMesh mesh =
      init_device_mesh(at::kCPU, layout.mesh_shape, layout.mesh_dim_names, fake_world(5, 64));
  const auto context = DTensor::Context::parse(text, mesh);
  const auto again = DTensor::Context::parse(context.str(), mesh);
  require(again.spec == context.spec && again.requires_grad == context.requires_grad,
          "a context is another one when printed");
  require(parse_spec(context.spec.str(), mesh) == context.spec, "a spec is another one when printed");
  if (mesh.is_member()) {
    require(context.spec.local_shape() == context.spec.local_shape(*mesh.get_coordinate()),
            "local shapes differ");
  }
}

// ---- sharded tensors as text and bytes

void read_remote_device(std::string_view text) {
  const sharded::RemoteDevice device(text);
  require(sharded::RemoteDevice(device.str()) == device, "a device is another one when printed");
}

template <class T>
void read_text_of(std::string_view text) {
  const T value = T::parse(text);
  require(T::parse(value.str()) == value, "a value is another one when printed");
  require(T::from_bytes(value.to_bytes()) == value, "a value is another one when written");
}

template <class T>
void read_bytes_of(std::string_view bytes) {
  const T value = T::from_bytes(bytes);
  require(T::from_bytes(value.to_bytes()) == value, "a value is another one when written");
  require(T::parse(value.str()) == value, "a value is another one when printed");
}

template <class T>
Lists bytes_of(const Lists& texts) {
  Lists result;
  for (const std::string& text : texts) result.push_back(T::parse(text).to_bytes());
  return result;
}

void use(const sharded::ShardedTensorMetadata& metadata) {
  static_cast<void>(metadata.numel());
  for (const auto& shard : metadata.shards_metadata) static_cast<void>(shard.numel());
  sharded::validate_non_overlapping_shards_metadata(metadata.shards_metadata);
  sharded::check_tensor(metadata.shards_metadata, metadata.size);
  const auto spec = sharded::infer_sharding_spec(metadata.shards_metadata);
  // Shards that hold nothing may lie anywhere, and are put in order by a chunk spec.
  require(spec->build_metadata(metadata.size, metadata.tensor_properties).size == metadata.size,
          "the spec of shards does not fit them");
}

void read_metadata(std::string_view text) {
  read_text_of<sharded::ShardedTensorMetadata>(text);
  use(sharded::ShardedTensorMetadata::parse(text));
}

void read_metadata_bytes(std::string_view bytes) {
  read_bytes_of<sharded::ShardedTensorMetadata>(bytes);
  use(sharded::ShardedTensorMetadata::from_bytes(bytes));
}

void read_sharding_spec(std::string_view text) {
  const auto spec = sharded::parse_sharding_spec(text);
  if (!spec) return;
  const auto again = sharded::parse_sharding_spec(spec->str());
  require(again && *again == *spec, "a spec is another one when printed");
  for (const std::vector<int64_t>& size : {std::vector<int64_t>{10, 4},
                                           {7},
                                           {},
                                           {INT64_MAX, 1},
                                           {INT64_MAX, INT64_MAX},
                                           {-1, 4},
                                           {0, INT64_MAX}}) {
    try {
      use(spec->build_metadata(size, {}));
    } catch (const c10::Error&) {
    }
  }
}

void read_pipeline_action(std::string_view text) {
  const PipelineAction action = PipelineAction::parse(text);
  require(PipelineAction::parse(action.str()) == action, "an action is another one when printed");
}

/// The mesh of stages, of which tensors are on the other dims; always the same, as a mesh is one of its world.
const DeviceMesh& pipeline_mesh() {
  static const DeviceMesh mesh =
      init_device_mesh(at::kCPU, {2, 2, 3}, {"pp", "dp", "tp"}, fake_world(7, 12))["pp"];
  return mesh;
}

Lists tensor_metas() {
  TensorMeta plain, distributed;
  plain.sizes = {4, 6};
  plain.requires_grad = true;
  distributed.dtype = at::kBFloat16;
  distributed.spec =
      Spec(pipeline_mesh().root()[{"dp", "tp"}], {Shard(0), Partial()}, {5, 4}, std::nullopt, at::kBFloat16);
  const DeviceMesh& mesh = pipeline_mesh();
  return {to_bytes({}, mesh, 0), to_bytes({plain}, mesh, 0), to_bytes({distributed, plain}, mesh, 1)};
}

void read_tensor_metas(std::string_view bytes) {
  const DeviceMesh& mesh = pipeline_mesh();
  const TensorMetas metas = from_bytes(bytes, mesh);
  require(from_bytes(to_bytes(metas, mesh, 0), mesh) == metas, "descriptions of tensors differ when written");
}

Lists offers() {
  using sharded::ShardMetadata;
  Lists result{to_bytes(sharded::Offer{"RPC is not initialized", 0, {}}),
               to_bytes(sharded::Offer{"", 7, {}})};
  sharded::Offer offer{"", 3, {}};
  for (const std::string& line : corpus("shard")) offer.shards.push_back(ShardMetadata::parse(line));
  result.push_back(to_bytes(offer));
  return result;
}

void read_offer(std::string_view bytes) {
  const sharded::Offer offer = sharded::offer_from_bytes(bytes);
  require(sharded::offer_from_bytes(to_bytes(offer)).shards == offer.shards,
          "an offer is another one when written");
}

/// What this rank, the only one of its world, has saved.
Lists states() {
  using namespace sharded;
  const ChunkShardingSpec chunk(0, {"rank:0/cpu", "rank:0/cpu"});
  const auto sharded = ones(chunk, {3, 2}, {.requires_grad = true});
  TensorDict state;
  state["plain"] = at::arange(6).reshape({2, 3});
  state["half"] = at::ones({2}, at::kHalf);
  state["empty"] = at::ones({0, 3});
  state["scalar"] = at::ones({}, at::kBool);
  const std::string plain = to_bytes(state);
  state["sharded"] = sharded;
  return {plain, to_bytes(state), to_bytes(TensorDict{}), to_bytes(TensorDict{{"one", sharded}})};
}

void read_state(std::string_view bytes) {
  const sharded::TensorDict state = sharded::from_bytes(bytes);
  const std::string written = sharded::to_bytes(state);
  require(sharded::to_bytes(sharded::from_bytes(written)) == written,
          "an accepted state is another one when written");
}

Lists sharded_tensors() {
  using namespace sharded;
  const EnumerableShardingSpec grid({{{0, 0}, {2, 1}, "rank:0/cpu"}, {{0, 1}, {2, 2}, "rank:0/cpu"}});
  return {ones(ChunkShardingSpec(0, {"rank:0/cpu"}), {3, 2}).to_bytes(),
          ones(grid, {2, 3}, {.requires_grad = true}).to_bytes(),
          ones(ChunkShardingSpec(-1, {"rank:0/cpu", "rank:0/cpu", "rank:0/cpu"}), {2}).to_bytes()};
}

void read_sharded_tensor(std::string_view bytes) {
  const auto tensor = ShardedTensor::from_bytes(bytes);
  require(ShardedTensor::from_bytes(tensor.to_bytes()).metadata() == tensor.metadata(),
          "a sharded tensor is another one when written");
  static_cast<void>(tensor.gather(0));
}

// ---- random state

void read_random_state(std::string_view text) {
  const auto state = random::State::parse(text);
  require(random::State::parse(state.str()) == state, "a random state is another one when printed");
}

void read_random_snapshot(std::string_view text) {
  const auto snapshot = random::Snapshot::parse(text);
  require(random::Snapshot::parse(snapshot.str()).str() == snapshot.str(),
          "a random snapshot is another one when printed");
}

// ---- launchers

/// "RANK=0 WORLD_SIZE=2"
void read_environment(std::string_view text) {
  std::map<std::string, std::string> values;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals != std::string::npos) values[word.substr(0, equals)] = word.substr(equals + 1);
  }
  const auto info = launch_info([&](const std::string& name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  });
  if (!info) return;
  require(info->size >= 1 && info->size <= INT32_MAX && info->rank >= 0 && info->rank < info->size &&
              info->local_rank >= 0 && info->local_rank < info->size && !info->master_address.empty() &&
              info->master_port > 0 && info->attempt >= 0,
          "what a launcher says makes no sense");
}

void read_node_list(std::string_view text) {
  const std::string host = first_slurm_host(std::string(text));
  require(!host.empty() && host.size() <= text.size() && host.find_first_of(",[") == std::string::npos,
          "this is no host");
}

void read_backends(std::string_view text) {
  const World world(WorldOptions{.rank = 0, .size = 1, .backend = std::string(text)});
  require(!world.backend(at::kCPU).empty() && !world.backend(at::kCUDA).empty(), "a backend has no name");
}

// ---- what monitors of ranks send each other

constexpr int64_t kWorldSize = 8;

Lists presences() {
  return {to_bytes(Presence{"4242 17 node7", "10.0.0.1", 29500}),
          to_bytes(Presence{"1 2 n", "", 0, "rank 1 failed"}), to_bytes(Presence{})};
}
void read_presence(std::string_view bytes) {
  require(to_bytes(presence_from_bytes(bytes)) == bytes, "a presence is another one when written");
}

RankState some_state() {
  return {
      "in all_reduce(Float[3, 4]), call 3 of group [0, 2], for 1.5 s",
      {{"[0, 2]", 1, "broadcast(Long[])", "broadcast(Long[])"}, {"[0, 2]", 2, "all_gather()", "all_gather"}}};
}

Lists messages() {
  Lists messages{to_bytes(Hello{"secret", 3, "4242 17 node7"})};
  const auto add = [&](NewsKind kind, std::string text) {
    messages.push_back(to_bytes(News{kind, 1, 5, 2, std::move(text)}));
  };
  add(NewsKind::Left, "");
  add(NewsKind::Failed, "rank 2 failed: out of memory");
  add(NewsKind::Died, "rank 2 (process 4242 on node7) was killed");
  add(NewsKind::Ask, "");
  add(NewsKind::Answer, to_bytes(Answer{5, to_bytes(some_state())}));
  add(NewsKind::Ready, "");
  add(NewsKind::Invitation, to_bytes(Survivors{{0, 2, 5}, "10.0.0.1:4000"}));
  Lists framed_messages;
  for (const std::string& message : messages) framed_messages.push_back(framed(message));
  framed_messages.push_back(framed(messages[0]) + framed(messages[5]) + framed(messages[7]).substr(0, 9));
  return framed_messages;
}

/// What comes on a connection, as the monitor takes it.
void read_messages(std::string_view bytes) {
  std::string come(bytes);
  bool has_said_hello = !bytes.empty() && bytes.size() > 4 && bytes[4] != 0;
  while (const auto message = take_framed(come, has_said_hello ? kMaxMessage : kMaxHello)) {
    if (!has_said_hello) {
      require(to_bytes(hello_from_bytes(*message)) == *message, "a hello is another one when written");
      has_said_hello = true;
      continue;
    }
    const News news = news_from_bytes(*message, kWorldSize);
    if (news.kind == NewsKind::Answer) state_from_bytes(answer_from_bytes(news.text).state);
    if (news.kind == NewsKind::Invitation) {
      const Survivors survivors = survivors_from_bytes(news.text, kWorldSize);
      require(survivors.ranks.size() <= kWorldSize, "more ranks are left than there were");
    }
  }
}

Lists rank_states() { return {to_bytes(some_state()), to_bytes(RankState{"in no collective", {}})}; }
void read_rank_state(std::string_view bytes) {
  require(to_bytes(state_from_bytes(bytes)) == bytes, "a rank's state is another one when written");
}

// ---- sizes

bool lie_in(const Pieces& pieces, int64_t size) {
  int64_t end = 0;
  for (const Range& piece : pieces) {
    if (piece.offset < end || piece.size <= 0 || piece.size > size - piece.offset) return false;
    end = piece.end();
  }
  return true;
}

void try_chunks(Numbers numbers) {
  const int64_t size = numbers.next(), count = numbers.next(), index = numbers.next(), split = numbers.next();
  const Range range = chunk(size, count, index);
  require(range.offset >= 0 && range.size >= 0 && range.size <= size - range.offset, "a chunk lies outside");
  const Pieces first = strided_shard(unsharded(size), split, count, index);
  require(lie_in(first, size), "pieces lie outside");
  const Pieces second = shard(first, 3, numbers.below(3));
  require(lie_in(second, size) && length(second) <= length(first), "pieces of pieces lie outside");
}

void try_layouts(Numbers numbers) {
  const int64_t mesh_ndim = numbers.below(4), ndim = numbers.below(4);
  const auto mesh_shape = numbers.list(mesh_ndim), coordinate = numbers.list(mesh_ndim);
  const auto shape = numbers.list(ndim);
  const Placements placements = some_placements(numbers, mesh_ndim);
  const auto order = numbers.list(numbers.below(2) ? mesh_ndim : 0);
  const auto attempt = [](const auto& function) {
    try {
      function();
    } catch (const c10::Error&) {
    }
  };
  attempt([&] {
    const LocalBox box = local_shape_and_global_offset(shape, mesh_shape, placements, order, coordinate);
    for (int64_t i = 0; i < ndim; ++i) {
      require(box.shape[i] >= 0 && box.offset[i] >= 0 && box.shape[i] <= shape[i] - box.offset[i],
              "a local box lies outside");
    }
  });
  attempt([&] { global_shape_if_even(shape, mesh_shape, placements); });
  attempt([&] { local_strides(numbers.list(ndim), shape); });
  attempt([&] {
    std::vector<c10::DimVector> locals(1 + numbers.below(4), c10::DimVector(shape));
    if (ndim > 0) locals.back()[0] = numbers.next();
    global_shape_from_locals(locals, mesh_shape, placements, order);
  });
}

void try_specs(Numbers numbers) {
  const int64_t ndim = numbers.below(4), mesh_ndim = 1 + numbers.below(3);
  const std::vector<int64_t> mesh_shape(mesh_ndim, 2);
  const DeviceMesh mesh = init_device_mesh(at::kCPU, mesh_shape, {}, fake_world(numbers.below(8), 8));
  const auto shape = numbers.list(ndim), strides = numbers.list(ndim);
  const Placements placements = some_placements(numbers, mesh_ndim);
  const auto order = numbers.list(numbers.below(2) ? mesh_ndim : 0);
  c10::OptionalIntArrayRef given;
  if (numbers.below(2)) given = strides;
  const Spec spec(mesh, placements, shape, given, at::kFloat, order);
  require(parse_spec(spec.str(), mesh) == spec, "a spec is another one when printed");
  const Spec same = spec.with_placements(replicated(mesh));
  require(same.shape() == spec.shape(), "a spec has another shape when replicated");
}

void try_sharding(Numbers numbers) {
  using namespace sharded;
  const auto size = numbers.list(numbers.below(4));
  const std::vector<RemoteDevice> placements(1 + numbers.below(5), RemoteDevice(numbers.below(3), at::kCPU));
  const ChunkShardingSpec chunk(numbers.next(), placements);
  try {
    use(chunk.build_metadata(size, {}));
  } catch (const c10::Error&) {
  }
  std::vector<ShardMetadata> shards;
  for (int64_t count = numbers.below(6); count > 0; --count) {
    auto offsets = numbers.list(static_cast<int64_t>(size.size()));
    shards.emplace_back(std::move(offsets), numbers.list(static_cast<int64_t>(size.size())), placements[0]);
  }
  use(EnumerableShardingSpec(shards).build_metadata(size, {}));
}

void try_meshes(Numbers numbers) {
  const int64_t world_size = numbers.next(), rank = numbers.next();
  const auto world = fake_world(rank, world_size);
  const auto shape = numbers.list(numbers.below(4));
  Names names;
  if (numbers.below(2)) {
    for (size_t i = 0; i < shape.size(); ++i)
      names.emplace_back(1, static_cast<char>('a' + numbers.below(20)));
  }
  if (numbers.below(4) == 0) {
    const DeviceMesh some(at::kCPU, shape, numbers.list(numbers.below(6)), names, world);
    static_cast<void>(some.ranks());
  }
  const DeviceMesh mesh = init_device_mesh(at::kCPU, shape, names, world);
  require(mesh.size() >= 1 && mesh.size() <= world_size, "a mesh is larger than its world");
  const auto coordinate = mesh.get_coordinate();
  require(coordinate.has_value() == mesh.is_member(), "a member has no coordinate");
  if (coordinate) require(mesh.rank_at(*coordinate) == rank, "a coordinate is another rank's");
  const auto attempt = [](const auto& function) {
    try {
      function();
    } catch (const c10::Error&) {
    }
  };
  attempt([&] { mesh.rank_at(numbers.list(mesh.ndim())); });
  attempt([&] { mesh.dim_index(numbers.next()); });
  attempt([&] { static_cast<void>(mesh.size(MeshDim(numbers.next()))); });
  attempt([&] {
    const auto sizes = numbers.list(numbers.below(4));
    Names parts;
    for (size_t i = 0; i < sizes.size() && !names.empty(); ++i) parts.push_back(c10::str("part", i));
    const DeviceMesh many = mesh.unflatten(numbers.next(), sizes, parts);
    require(many.size() == mesh.size(), "a mesh has another size when unflattened");
    require(many.flatten("all").size() == mesh.size(), "a mesh has another size when flattened");
  });
}

void try_axes(Numbers numbers) {
  const auto shape = numbers.list(1 + numbers.below(4));
  // Only what a mesh accepts.
  int64_t size = 1;
  for (const int64_t each : shape) {
    if (each < 1 || __builtin_mul_overflow(size, each, &size) || size > INT32_MAX) return;
  }
  std::vector<Axis> axes(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) axes[i].append({shape[i], stride});
  std::rotate(axes.begin(), axes.begin() + numbers.below(static_cast<int64_t>(axes.size())), axes.end());
  const Axis all = join(axes);
  require(all.size() == size && covers(axes, all), "joined axes have another size");
  const int64_t coordinate = numbers.below(size);
  require(all.coordinate(all.offset(coordinate)) == coordinate, "a coordinate is another one");
  require(first_index(axes, numbers.below(size)) == 0, "the first index is another one");
  std::vector<int64_t> parts{size};
  for (int64_t count = numbers.below(3); count > 0; --count) {
    const int64_t divisor = 1 + numbers.below(6);
    if (parts[0] % divisor != 0) continue;
    parts[0] /= divisor;
    parts.insert(parts.begin(), divisor);
  }
  if (const auto pieces = split(all, parts)) require(join(*pieces).digits == all.digits, "split axes differ");
}

// ---- memory of tensors

/// Counts the memory of tensors with all other.
class CountedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* data = ::operator new (size + 1, std::align_val_t{64});
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  static void release(void* data) { ::operator delete (data, std::align_val_t{64}); }
};

std::vector<Target> targets() {
  using namespace sharded;
  const Lists shards = corpus("shard"), properties = corpus("properties"), metadata = corpus("metadata");
  return {
      text_target("placement", corpus("placement"), read_placement),
      text_target("placements", corpus("placements"), read_placements),
      text_target("layout", corpus("layout"), read_layout),
      text_target("context", corpus("context"), read_context),
      text_target("remote_device", corpus("remote_device"), read_remote_device),
      text_target("shard", shards, read_text_of<ShardMetadata>),
      bytes_target("shard_bytes", bytes_of<ShardMetadata>(shards), read_bytes_of<ShardMetadata>),
      text_target("properties", properties, read_text_of<TensorProperties>),
      bytes_target("properties_bytes", bytes_of<TensorProperties>(properties),
                   read_bytes_of<TensorProperties>),
      text_target("metadata", metadata, read_metadata),
      bytes_target("metadata_bytes", bytes_of<ShardedTensorMetadata>(metadata), read_metadata_bytes),
      text_target("sharding_spec", corpus("sharding_spec"), read_sharding_spec),
      text_target("pipeline_action", corpus("pipeline_action"), read_pipeline_action),
      bytes_target("tensor_metas", tensor_metas(), read_tensor_metas),
      bytes_target("offer", offers(), read_offer),
      bytes_target("state", states(), read_state),
      bytes_target("sharded_tensor", sharded_tensors(), read_sharded_tensor),
      text_target("random_state", corpus("random_state"), read_random_state),
      text_target("random_snapshot", corpus("random_snapshot"), read_random_snapshot),
      text_target("environment", corpus("environment"), read_environment),
      text_target("node_list", corpus("node_list"), read_node_list),
      text_target("backends", corpus("backends"), read_backends),
      bytes_target("presence", presences(), read_presence),
      bytes_target("messages", messages(), read_messages),
      bytes_target("rank_state", rank_states(), read_rank_state),
      numbers_target("chunks", try_chunks),
      numbers_target("layouts", try_layouts),
      numbers_target("specs", try_specs),
      numbers_target("sharding", try_sharding),
      numbers_target("meshes", try_meshes),
      numbers_target("axes", try_axes),
  };
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  static tessera::fuzz::CountedAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/255);
  int result = 1;
  // A world of one rank, for what needs ranks.
  tessera::run(1, [&] {
    result = tessera::fuzz::run(argc, argv, "Tries everything that parses or takes sizes.",
                                tessera::fuzz::targets());
  });
  return result;
}
