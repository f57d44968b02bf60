#include <tessera/error.h>
#include <tessera/placement/spec.h>
#include <tessera/placement/text.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>
#include <unordered_map>
#include <utility>

#include <c10/util/hash.h>
#include <c10/util/strides.h>

namespace tessera {

namespace {

void check_shape(c10::IntArrayRef shape) {
  int64_t count = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    TESSERA_CHECK_VALUE(shape[i] >= 0, "dim ", i, " of shape ", shape, " is negative");
    TESSERA_CHECK_VALUE(!__builtin_mul_overflow(count, std::max<int64_t>(shape[i], 1), &count),
                        "a tensor of shape ", shape, " has more elements than can be counted");
  }
}

void check_strides(c10::IntArrayRef strides, c10::IntArrayRef shape) {
  TESSERA_CHECK_VALUE(strides.size() == shape.size(), "got ", strides.size(), " strides ", strides,
                      " for shape ", shape, ": expected one for each of its ", shape.size(), " dims");
  for (size_t i = 0; i < strides.size(); ++i) {
    TESSERA_CHECK_VALUE(strides[i] >= 0, "stride ", i, " of strides ", strides, " is negative");
  }
}

bool is_dense(c10::IntArrayRef shape, c10::IntArrayRef strides) {
  const c10::DimVector dense = local_strides(strides, shape);
  bool equal = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return true;
    equal &= shape[i] == 1 || strides[i] == dense[i];
  }
  return equal;
}

}  // namespace

/// The specs that exist. Entries are keyed by hash and hold no reference: the deleter of a spec removes its
/// own.
class Spec::Table {
 public:
  /// Never destroyed: specs in static and thread-local variables may outlive any other order.
  static Table& instance() {
    static auto& table = *new Table;
    return table;
  }

  size_t size() {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

  std::shared_ptr<const State> find(const State& wanted) {
    const std::lock_guard lock(mutex_);
    return find_locked(wanted);
  }

  /// The one that is already there, if another thread was faster.
  std::shared_ptr<const State> insert(State&& state) {
    std::shared_ptr<const State> made(new State(std::move(state)), [this](const State* old) { remove(old); });
    // Declared before the lock, so that a spec that lost the race is removed after it is released.
    const std::lock_guard lock(mutex_);
    if (auto found = find_locked(*made)) return found;
    entries_.emplace(made->hash, Entry{made.get(), made});
    return made;
  }

 private:
  struct Entry {
    // Valid as long as the entry is there: a spec is deleted only after its entry was removed.
    const State* state;
    std::weak_ptr<const State> handle;
  };

  std::shared_ptr<const State> find_locked(const State& wanted) {
    const auto [begin, end] = entries_.equal_range(wanted.hash);
    for (auto it = begin; it != end; ++it) {
      if (!equal(*it->second.state, wanted)) continue;
      // Null if its last handle is going away right now; a new one then takes its place beside it.
      if (auto found = it->second.handle.lock()) return found;
    }
    return nullptr;
  }

  void remove(const State* old) {
    {
      const std::lock_guard lock(mutex_);
      const auto [begin, end] = entries_.equal_range(old->hash);
      const auto it = std::find_if(begin, end, [&](const auto& entry) { return entry.second.state == old; });
      if (it != end) entries_.erase(it);
    }
    delete old;
  }

  std::mutex mutex_;
  std::unordered_multimap<size_t, Entry> entries_;
};

Spec::Spec(const DeviceMesh& mesh, c10::ArrayRef<Placement> placements, c10::IntArrayRef shape,
           c10::OptionalIntArrayRef strides, c10::ScalarType dtype, c10::IntArrayRef order) {
  TESSERA_CHECK_VALUE(static_cast<int64_t>(placements.size()) == mesh.ndim(), "got ", placements.size(),
                      " placements ", placements, " for ", mesh, ": expected one for each of its ",
                      mesh.ndim(), " dims");
  check_partials_agree(placements);
  check_shape(shape);
  if (strides) check_strides(*strides, shape);
  Placements normal = normalize(placements, static_cast<int64_t>(shape.size()));
  ShardOrder canonical = canonical_order(order, normal);
  State state{.mesh = mesh,
              .placements = std::move(normal),
              .order = std::move(canonical),
              .shape = c10::DimVector(shape),
              .strides = strides ? c10::DimVector(*strides) : c10::contiguous_strides(shape),
              .dtype = dtype};
  state.hash = hash_of(state);
  state_ = Table::instance().find(state);
  if (state_ != nullptr) return;
  complete(state);
  state_ = Table::instance().insert(std::move(state));
}

void Spec::complete(State& state) {
  state.dense = tessera::is_dense(state.shape, state.strides);
  state.numel = std::accumulate(state.shape.begin(), state.shape.end(), int64_t{1}, std::multiplies<>());
  if (const auto coordinate = state.mesh.get_coordinate()) {
    state.local = local_shape_and_global_offset(state.shape, state.mesh.shape(), state.placements,
                                                state.order, *coordinate);
    state.local_strides = tessera::local_strides(state.strides, state.local.shape);
  } else {
    state.local.shape = {0};
    state.local_strides = {1};
  }
  for (const Placement& placement : state.placements) {
    state.sharded |= placement.is_shard_like();
    state.partial |= placement.is_partial();
  }
  state.replicated = !state.sharded && !state.partial;
}

size_t Spec::hash_of(const State& state) {
  size_t hash = c10::hash_combine(state.mesh.hash(), static_cast<size_t>(state.dtype));
  const auto add = [&](const auto& values) {
    hash = c10::hash_combine(hash, values.size());
    for (const auto& value : values)
      hash = c10::hash_combine(hash, std::hash<std::decay_t<decltype(value)>>()(value));
  };
  add(state.placements);
  add(state.order);
  add(state.shape);
  add(state.strides);
  return hash;
}

bool Spec::equal(const State& a, const State& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.strides == b.strides && a.placements == b.placements &&
         a.order == b.order && a.mesh == b.mesh;
}

void Spec::undefined() {
  throw c10::Error(
      "this Spec is undefined: it was default-made and never assigned. Make one with "
      "Spec(mesh, placements, shape), or test it with `if (spec)` first",
      /*backtrace=*/nullptr);
}

std::vector<Pieces> Spec::local_pieces() const {
  const auto coordinate = mesh().get_coordinate();
  return coordinate ? local_pieces(*coordinate) : std::vector<Pieces>();
}

c10::DimVector Spec::local_shape(c10::IntArrayRef coordinate) const {
  return tessera::local_shape(shape(), mesh().shape(), placements(), order(), coordinate);
}

c10::DimVector Spec::global_offset(c10::IntArrayRef coordinate) const {
  return local_shape_and_global_offset(shape(), mesh().shape(), placements(), order(), coordinate).offset;
}

std::vector<Pieces> Spec::local_pieces(c10::IntArrayRef coordinate) const {
  return tessera::local_pieces(shape(), mesh().shape(), placements(), order(), coordinate);
}

Spec Spec::with_placements(c10::ArrayRef<Placement> placements, c10::IntArrayRef order) const {
  Spec same(mesh(), placements, shape(), strides(), dtype(), order);
  if (is_dense() || same == *this) return same;
  return Spec(mesh(), placements, shape(), tessera::local_strides(strides(), shape()), dtype(), order);
}

std::string Spec::str() const { return state_ == nullptr ? "undefined" : to_text(layout_of(*this)); }

std::ostream& operator<<(std::ostream& out, const Spec& spec) { return out << spec.str(); }

size_t Spec::interned_count() { return Table::instance().size(); }

Placements replicated(const DeviceMesh& mesh) { return Placements(mesh.ndim(), Replicate()); }

}  // namespace tessera
