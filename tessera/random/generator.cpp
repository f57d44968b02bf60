#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>
#include <tessera/random/generator.h>
#include <tessera/random/philox.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <ostream>
#include <sstream>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>

namespace tessera::random {

namespace {

/// A bijection of 64-bit numbers in which all bits of the result depend on all of the argument's; 0 stays 0.
uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/// Different for different streams of one seed.
uint64_t key_of(const State& state) { return state.seed ^ mixed(state.stream); }

/// 64 bits of a call that none of its elements is made of.
uint64_t bits_beside(const Draw& draw) {
  const auto words =
      philox({~0u, ~0u, static_cast<uint32_t>(draw.call), static_cast<uint32_t>(draw.call >> 32)},
             {static_cast<uint32_t>(draw.key), static_cast<uint32_t>(draw.key >> 32)});
  return uint64_t{words[1]} << 32 | words[0];
}

uint64_t torch_seed() { return at::globalContext().defaultGenerator(at::kCPU).current_seed(); }

/// All that one rank draws from.
class RankGenerators {
 public:
  /// `first`: the seed to begin with, if not that of libtorch.
  RankGenerators(int64_t rank, std::optional<uint64_t> first) : rank_(rank), first_(first) {}

  /// What it was seeded with, if it was.
  std::optional<uint64_t> seeded() {
    const std::lock_guard lock(mutex_);
    return first_;
  }

  void seed(uint64_t seed) {
    const std::lock_guard lock(mutex_);
    meshes_.clear();
    first_ = seed;
    begin(seed);
  }

  void seed(uint64_t seed, std::vector<int64_t> ranks) {
    const std::lock_guard lock(mutex_);
    add(std::move(ranks), Generator(seed));
  }

  Generator all() {
    const std::lock_guard lock(mutex_);
    return begun();
  }

  Generator of(const DeviceMesh& mesh) {
    const std::lock_guard lock(mutex_);
    if (meshes_.empty()) [[likely]]
      return begun();
    std::vector<int64_t> ranks = mesh.ranks();
    std::sort(ranks.begin(), ranks.end());
    for (const auto& [owners, generator] : meshes_) {
      if (std::includes(owners.begin(), owners.end(), ranks.begin(), ranks.end())) return generator;
    }
    return begun();
  }

  Generator own() {
    const std::lock_guard lock(mutex_);
    begun();
    return *own_;
  }

  at::Generator own_torch() {
    const std::lock_guard lock(mutex_);
    begun();
    if (!own_torch_) own_torch_ = at::make_generator<at::CPUGeneratorImpl>(mixed(key_of(own_->state()) + 1));
    return *own_torch_;
  }

  Snapshot snapshot() {
    const std::lock_guard lock(mutex_);
    Snapshot result{begun().state(), {}, own_->state()};
    for (const auto& [ranks, generator] : meshes_) result.meshes.emplace_back(ranks, generator.state());
    return result;
  }

  void restore(const Snapshot& snapshot) {
    const std::lock_guard lock(mutex_);
    begun().set_state(snapshot.state);
    own_->set_state(snapshot.rank);
    // Generators that are still there stay the same, as others may hold them.
    auto previous = std::exchange(meshes_, {});
    for (const auto& [ranks, state] : snapshot.meshes) {
      const auto known = std::find_if(previous.begin(), previous.end(),
                                      [&](const auto& item) { return item.first == ranks; });
      Generator generator = known == previous.end() ? Generator(state) : known->second;
      generator.set_state(state);
      add(ranks, std::move(generator));
    }
  }

 private:
  Generator& begun() {
    if (!all_) begin(first_ ? *first_ : torch_seed());
    return *all_;
  }

  void begin(uint64_t seed) {
    all_.emplace(seed);
    own_.emplace(all_->fork(kRanks).fork(static_cast<uint64_t>(rank_)));
    own_torch_.reset();
  }

  /// Those of the fewest ranks first.
  void add(std::vector<int64_t> ranks, Generator generator) {
    std::sort(ranks.begin(), ranks.end());
    std::erase_if(meshes_, [&](const auto& item) { return item.first == ranks; });
    const auto position = std::find_if(meshes_.begin(), meshes_.end(),
                                       [&](const auto& item) { return item.first.size() > ranks.size(); });
    meshes_.insert(position, {std::move(ranks), std::move(generator)});
  }

  /// The stream that those of ranks are forked from; users count theirs from 0.
  static constexpr uint64_t kRanks = ~uint64_t{0};

  const int64_t rank_;
  std::optional<uint64_t> first_;
  std::mutex mutex_;
  std::optional<Generator> all_, own_;
  std::optional<at::Generator> own_torch_;
  std::vector<std::pair<std::vector<int64_t>, Generator>> meshes_;
};

/// Of a thread without ranks.
const std::shared_ptr<RankGenerators>& alone() {
  thread_local const auto generators = std::make_shared<RankGenerators>(0, std::nullopt);
  return generators;
}

/// The generators of every rank of this process, as long as its world exists. A thread that was seeded before
/// it became a rank keeps its seed.
std::shared_ptr<RankGenerators> generators_of(const std::shared_ptr<World>& world) {
  struct Known {
    std::weak_ptr<World> world;
    std::shared_ptr<RankGenerators> generators;
  };
  static auto& mutex = *new std::mutex;
  static auto& table = *new std::map<const World*, Known>;
  const std::lock_guard lock(mutex);
  const auto found = table.find(world.get());
  if (found != table.end() && found->second.world.lock() == world) return found->second.generators;
  std::erase_if(table, [](const auto& item) { return item.second.world.expired(); });
  Known& known = table[world.get()];
  known = {world, std::make_shared<RankGenerators>(world->rank(), alone()->seeded())};
  return known.generators;
}

std::shared_ptr<RankGenerators> my_generators() {
  return has_current_world() ? generators_of(current_world()) : alone();
}

/// That of the innermost GeneratorScope, if any.
const std::optional<Generator>& scoped_generator() {
  return ThreadScope<std::optional<Generator>, GeneratorScope>::current();
}

std::atomic<bool>& checks_agreement() {
  static std::atomic<bool> checks = [] {
    const char* text = std::getenv("TESSERA_CHECK_RANDOM");
    return text && std::string_view(text) == "1";
  }();
  return checks;
}

/// Reads what `str` wrote, word by word.
class Words {
 public:
  explicit Words(std::string_view text) : text_(text), rest_(text) {}

  bool at_end() const { return rest_.empty(); }

  bool accept(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  void expect(std::string_view word) {
    TESSERA_CHECK_VALUE(
        accept(word),
        "The state of a random generator is written as \"seed 5 stream 0 call 17\"; expected \"",
        std::string(word), "\" at \"", std::string(rest_), "\" in \"", std::string(text_), "\".");
  }

  void expect_end() const {
    TESSERA_CHECK_VALUE(at_end(), "The state of a random generator: expected nothing more at \"",
                        std::string(rest_), "\" in \"", std::string(text_), "\".");
  }

  template <class Number>
  Number number() {
    Number result = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), result);
    TESSERA_CHECK_VALUE(error == std::errc(), "The state of a random generator: expected a number at \"",
                        std::string(rest_), "\" in \"", std::string(text_), "\".");
    rest_.remove_prefix(end - rest_.data());
    return result;
  }

  State state() {
    State result;
    expect("seed ");
    result.seed = number<uint64_t>();
    expect(" stream ");
    result.stream = number<uint64_t>();
    expect(" call ");
    result.call = number<uint64_t>();
    return result;
  }

 private:
  std::string_view text_, rest_;
};

}  // namespace

std::string State::str() const { return c10::str("seed ", seed, " stream ", stream, " call ", call); }

State State::parse(std::string_view text) {
  Words words(text);
  const State result = words.state();
  words.expect_end();
  return result;
}

std::ostream& operator<<(std::ostream& out, const State& state) { return out << state.str(); }

struct Generator::Shared {
  std::mutex mutex;
  State state;
};

Generator::Generator(const State& state) : shared_(std::make_shared<Shared>()) { shared_->state = state; }

State Generator::state() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->state;
}

void Generator::set_state(const State& state) {
  const std::lock_guard lock(shared_->mutex);
  shared_->state = state;
}

Draw Generator::next() {
  const std::lock_guard lock(shared_->mutex);
  return {key_of(shared_->state), shared_->state.call++};
}

Generator Generator::fork(uint64_t id) const {
  const State from = state();
  return Generator(from.seed, mixed(mixed(from.stream + 0x9e3779b97f4a7c15) + id + 1));
}

void manual_seed(uint64_t seed) { my_generators()->seed(seed); }

void manual_seed(uint64_t seed, const DeviceMesh& mesh) {
  if (!mesh.is_member()) return;
  if (mesh.size() > 1)
    comm::agree("manual_seed", mesh.get_joint_group(), [&] { return c10::str(seed, ", ", mesh); });
  const auto generators = generators_of(mesh.world());
  mesh.size() == mesh.world()->size() ? generators->seed(seed) : generators->seed(seed, mesh.ranks());
}

Generator default_generator() { return scoped_generator() ? *scoped_generator() : my_generators()->all(); }

Generator default_generator(const DeviceMesh& mesh) {
  return scoped_generator() ? *scoped_generator() : generators_of(mesh.world())->of(mesh);
}

GeneratorScope::GeneratorScope(Generator generator) : scope_(std::move(generator)) {}
GeneratorScope::~GeneratorScope() = default;

Generator rank_generator() { return my_generators()->own(); }
at::Generator torch_generator() { return my_generators()->own_torch(); }

std::string Snapshot::str() const {
  std::ostringstream out;
  out << state << "; rank " << rank;
  for (const auto& [ranks, of] : meshes) {
    out << "; ranks";
    for (const int64_t each : ranks) out << ' ' << each;
    out << ": " << of;
  }
  return out.str();
}

Snapshot Snapshot::parse(std::string_view text) {
  Words words(text);
  Snapshot result;
  result.state = words.state();
  words.expect("; rank ");
  result.rank = words.state();
  while (!words.at_end()) {
    words.expect("; ranks");
    auto& [ranks, state] = result.meshes.emplace_back();
    while (!words.accept(": ")) {
      words.expect(" ");
      ranks.push_back(words.number<int64_t>());
    }
    state = words.state();
  }
  return result;
}

Snapshot get_state() { return my_generators()->snapshot(); }
void set_state(const Snapshot& snapshot) { my_generators()->restore(snapshot); }

ReplayScope::ReplayScope(const Snapshot& snapshot) : previous_(get_state()) { set_state(snapshot); }
ReplayScope::~ReplayScope() { set_state(previous_); }

void set_checks_agreement(bool checks) { checks_agreement() = checks; }

void check_agreement(const DeviceMesh& mesh) {
  if (mesh.size() == 1 || !mesh.is_member()) return;
  const State mine = default_generator(mesh).state();
  const at::Tensor own = at::empty({3}, at::kLong);
  auto* words = own.mutable_data_ptr<int64_t>();
  words[0] = static_cast<int64_t>(mine.seed);
  words[1] = static_cast<int64_t>(mine.stream);
  words[2] = static_cast<int64_t>(mine.call);
  std::vector<MeshDim> dims;
  for (const int64_t dim : c10::irange(mesh.ndim())) dims.emplace_back(dim);
  at::Tensor all = at::empty({mesh.size(), 3}, own.options().device(mesh.device_type()));
  comm::all_gather_into(all, own.to(mesh.device_type()), mesh.get_group(dims)).wait();
  all = all.cpu();
  const int64_t* row = all.const_data_ptr<int64_t>();
  auto state_of = [&](int64_t index) {
    const int64_t* given = row + 3 * index;
    return State{static_cast<uint64_t>(given[0]), static_cast<uint64_t>(given[1]),
                 static_cast<uint64_t>(given[2])};
  };
  std::ostringstream different;
  for (const int64_t index : c10::irange(mesh.size())) {
    if (state_of(index) != state_of(0))
      different << (different.tellp() > 0 ? ", " : "") << "rank " << mesh.ranks()[index] << " at "
                << state_of(index);
  }
  TESSERA_CHECK(different.tellp() == 0, "The ranks of ", mesh,
                " would not draw the same random numbers: rank ", mesh.ranks()[0], " is at ", state_of(0),
                ", but ", different.str(),
                ". Seed all of them alike (random::manual_seed), make the same random calls on each, and use "
                "random::rank_generator for numbers of one rank.");
}

Draw draw_from(const at::Generator& given) {
  at::Generator generator = given;
  const std::lock_guard lock(generator.mutex());
  if (generator.device().is_cpu())
    return {at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), 0};
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);  // it counts in fours
  return {mixed(generator.current_seed() + 1), offset};
}

Draw next_draw(const DeviceMesh& mesh, const std::optional<at::Generator>& given) {
  if (given && given->defined()) return draw_from(*given);
  if (checks_agreement().load(std::memory_order_relaxed)) [[unlikely]]
    check_agreement(mesh);
  return default_generator(mesh).next();
}

at::Generator make_generator(const Draw& draw, at::Device device) {
  const uint64_t seed = bits_beside(draw);
  if (device.is_cpu()) return at::make_generator<at::CPUGeneratorImpl>(seed);
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed);
  return generator;
}

}  // namespace tessera::random
