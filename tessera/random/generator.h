#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/random/kernels.h>
#include <tessera/thread_scope.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>

/// Random numbers that do not depend on a tensor's placements: each is a function of a seed, a stream, the
/// index of the call and the element's index in the global tensor, and of nothing else (docs/random.md).
namespace tessera::random {

/// Where a sequence of calls stands. Small enough to be written into any checkpoint.
struct TESSERA_API State {
  uint64_t seed = 0;
  /// Streams of one seed are independent of each other.
  uint64_t stream = 0;
  /// How many calls were made: the index of the next one.
  uint64_t call = 0;

  bool operator==(const State&) const = default;
  /// "seed 5 stream 0 call 17"
  std::string str() const;
  /// Throws unless the text is as `str` writes it.
  static State parse(std::string_view text);
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const State& state);
};

/// Gives each call of a random function its numbers. A cheap handle: copies go on together. Safe to use from
/// several threads.
class TESSERA_API Generator {
 public:
  explicit Generator(uint64_t seed, uint64_t stream = 0) : Generator(State{seed, stream, 0}) {}
  explicit Generator(const State& state);

  State state() const;
  void set_state(const State& state);
  /// What the numbers of the next call depend on.
  Draw next();
  /// A stream of its own, at its first call: the same for the same id, and independent of this one and of
  /// those with other ids. Does not depend on how many calls were made.
  Generator fork(uint64_t id) const;

  /// The same generator, not only the same state.
  friend bool operator==(const Generator& a, const Generator& b) { return a.shared_ == b.shared_; }

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// Each rank has a generator, which everything on distributed tensors draws from: all ranks make the same
// calls in the same order, so they agree without a word. A rank is a thread of `run`, or the process; a
// thread without ranks is taken to be one.
//
// Ranks that do not all make the same calls need generators of their own: `manual_seed(seed, mesh)` with a
// mesh of some ranks gives these one. Calls on a mesh draw from the one that belongs to the fewest ranks
// among those whose ranks include the mesh's.
//
// Before it is seeded, a rank's generator begins with the seed that libtorch's own has (torch::manual_seed)
// when it is first used.

/// Starts the calling rank again from `seed`, and forgets the generators of meshes.
TESSERA_API void manual_seed(uint64_t seed);
/// The same for the ranks of the mesh, which must all do so with the same seed: collective. On other ranks it does
/// nothing.
TESSERA_API void manual_seed(uint64_t seed, const DeviceMesh& mesh);

/// What calls on this rank, or on that mesh, draw from: that of the innermost `GeneratorScope` if any.
TESSERA_API Generator default_generator();
TESSERA_API Generator default_generator(const DeviceMesh& mesh);

/// While alive, makes random calls of the calling thread draw from `generator`.
class TESSERA_API GeneratorScope {
 public:
  explicit GeneratorScope(Generator generator);
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  ThreadScope<std::optional<Generator>, GeneratorScope> scope_;
};

/// A stream that no other rank has, for numbers that should differ between ranks. It goes on until
/// `manual_seed`.
///   at::Tensor noise = random::randn({3}, {}, random::rank_generator());
TESSERA_API Generator rank_generator();
/// The same for libtorch's own functions. Its default generator is one for all ranks that are threads, so
/// what they draw from it depends on who comes first; this one is the rank's own.
///   at::Tensor noise = torch::randn({3}, random::torch_generator());
TESSERA_API at::Generator torch_generator();

/// Everything that a rank's generators know.
struct TESSERA_API Snapshot {
  State state;
  /// Of generators that belong to some ranks only.
  std::vector<std::pair<std::vector<int64_t>, State>> meshes = {};
  State rank;  // of `rank_generator`

  bool operator==(const Snapshot&) const = default;
  std::string str() const;
  static Snapshot parse(std::string_view text);
};
TESSERA_API Snapshot get_state();
TESSERA_API void set_state(const Snapshot& snapshot);

/// While alive, makes the rank draw the numbers again that it drew after `snapshot` was taken; then the rank
/// goes on from where it was. For computing activations again in the backward pass.
class TESSERA_API ReplayScope {
 public:
  explicit ReplayScope(const Snapshot& snapshot);
  ~ReplayScope();
  ReplayScope(const ReplayScope&) = delete;
  ReplayScope& operator=(const ReplayScope&) = delete;

 private:
  Snapshot previous_;
};

/// Throws on all ranks of the mesh, naming those that differ, unless they would draw the same numbers on it.
/// A collective of a few bytes.
TESSERA_API void check_agreement(const DeviceMesh& mesh);
/// Whether that is done before each call; also switched on by TESSERA_CHECK_RANDOM=1 in the environment. The
/// same on all ranks.
TESSERA_API void set_checks_agreement(bool checks);

/// For one call on the mesh. A generator of libtorch that the user gave counts instead of ours: one number of
/// it is the key of all of the call's, so it must be in the same state on all ranks.
TESSERA_API Draw next_draw(const DeviceMesh& mesh, const std::optional<at::Generator>& given = std::nullopt);
TESSERA_API Draw draw_from(const at::Generator& given);
/// A generator of libtorch for that device that depends on nothing but the call.
TESSERA_API at::Generator make_generator(const Draw& draw, at::Device device);

}  // namespace tessera::random
