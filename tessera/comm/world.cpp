#include <tessera/carried.h>
#include <tessera/comm/backends.h>
#include <tessera/comm/blocking.h>
#include <tessera/comm/checked.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/hierarchical.h>
#include <tessera/comm/left_alone.h>
#include <tessera/comm/log.h>
#include <tessera/comm/process_rank.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/comm/sockets.h>
#include <tessera/comm/staged.h>
#include <tessera/comm/store.h>
#include <tessera/comm/threads/backend.h>
#include <tessera/comm/threads/hub.h>
#include <tessera/comm/waits.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

#include <c10/core/Device.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {

namespace {

bool is_device_type(const std::string& text) {
  try {
    return !c10::Device(text).has_index();
  } catch (const c10::Error&) {
    return false;
  }
}

/// "gloo" -> {"": gloo}; "cpu:gloo,cuda:nccl" -> {"cpu": gloo, "cuda": nccl}.
std::map<std::string, std::string> parse_backends(const std::string& text) {
  std::map<std::string, std::string> result;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string item = text.substr(start, end - start);
    const size_t colon = item.find(':');
    const std::string device = colon == std::string::npos ? "" : item.substr(0, colon);
    const std::string name = colon == std::string::npos ? item : item.substr(colon + 1);
    TESSERA_CHECK_VALUE(
        !name.empty() && (colon == std::string::npos || is_device_type(device)) &&
            result.emplace(device, name).second,
        "\"", text,
        "\" does not say which backends to use. Expected a name, or one per device type as in "
        "\"cpu:gloo,cuda:nccl\".");
    start = end + 1;
  }
  return result;
}

/// The ranks, or, if they are many, their number and a hash.
std::string members_text(c10::IntArrayRef ranks) {
  if (ranks.size() <= 64) return c10::Join(",", ranks);
  return c10::str(ranks.size(), "#", c10::hash<std::vector<int64_t>>()(ranks.vec()));
}

std::vector<int64_t> all_ranks(int64_t size) {
  std::vector<int64_t> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// Throws unless a rank of a world of that size can make a group of these.
void check_members(c10::IntArrayRef ranks, int64_t rank, int64_t size) {
  TESSERA_CHECK_VALUE(std::find(ranks.begin(), ranks.end(), rank) != ranks.end(), "Rank ", rank,
                      " is not in the group ", ranks, ". A group is made by its members alone.");
  auto sorted = ranks.vec();
  std::sort(sorted.begin(), sorted.end());
  TESSERA_CHECK_VALUE(sorted.front() >= 0 && sorted.back() < size, "The group ", ranks,
                      " has a rank outside the world of ", size, " ranks.");
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  TESSERA_CHECK_VALUE(twice == sorted.end(), "The group ", ranks, " has rank ", *twice, " more than once.");
}

/// Whether the backend compares what the ranks call, or nobody has to.
bool compares_by_itself(const std::string& backend) {
  return backend == threads::kBackendName || backend == shm::kBackendName || backend == "fake";
}

bool environment_asks_for_checks() {
  const char* value = std::getenv("TESSERA_CHECK_COLLECTIVES");
#ifdef NDEBUG
  return value && std::string(value) == "1";
#else
  return !value || std::string(value) != "0";
#endif
}

/// What the options name; for processes, else what the environment names.
std::string named_backend(const WorldOptions& options) {
  const char* value = std::getenv("TESSERA_BACKEND");
  return options.backend.empty() && !options.hub && value ? value : options.backend;
}

using Backends = std::map<std::string, std::string>;

/// What was chosen for the device; empty if nothing was.
std::string chosen_backend(const Backends& backends, c10::DeviceType device) {
  for (const std::string& key : {c10::DeviceTypeName(device, /*lower_case=*/true), std::string()}) {
    if (const auto found = backends.find(key); found != backends.end()) return found->second;
  }
  return "";
}

/// What carries tensors on the device in a group of these ranks.
std::string backend_for(const World& world, const Backends& backends, c10::IntArrayRef ranks,
                        c10::DeviceType device) {
  const std::string chosen = chosen_backend(backends, device);
  const bool shared = chosen == shm::kBackendName || chosen == hierarchical::kBackendName ||
                      (chosen.empty() && device == c10::DeviceType::CPU);
  // Within a host, that is: between hosts there is no memory to share.
  if (shared && world.process_rank()) {
    const std::vector<int64_t> hosts = world.process_rank()->hosts_of(ranks);
    const size_t count = std::set<int64_t>(hosts.begin(), hosts.end()).size();
    if (count <= 1) return shm::kBackendName;
    return count < hosts.size() ? hierarchical::kBackendName : "gloo";
  }
  if (!chosen.empty()) return chosen;
  if (device == c10::DeviceType::CUDA) return "nccl";
  return world.hub() ? threads::kBackendName : "gloo";
}

using ThreadWorld = ThreadScope<std::shared_ptr<World>, WorldScope>;
using CarriedWorld = Carried<std::shared_ptr<World>, WorldScope>;

struct ProcessWorld {
  std::mutex mutex;
  std::shared_ptr<World> world;
};

ProcessWorld& process_world() {
  static ProcessWorld instance;
  return instance;
}

/// Throws if this process is a rank already. With the lock.
void check_no_world() {
  TESSERA_CHECK(!process_world().world, "This process already is rank ", process_world().world->rank(),
                " of a world; call tessera::destroy_process_group() first.");
}

std::shared_ptr<World> find_world() {
  if (const auto& world = ThreadWorld::current()) return world;
  if (const auto* world = CarriedWorld::find()) return *world;
  std::lock_guard lock(process_world().mutex);
  return process_world().world;
}

}  // namespace

World::World(WorldOptions options)
    : options_(std::move(options)), backends_(parse_backends(named_backend(options_))) {
  TESSERA_CHECK_VALUE(options_.size >= 1, "A world needs at least one rank, got ", options_.size, ".");
  TESSERA_CHECK_VALUE(options_.size <= std::numeric_limits<int32_t>::max(), "A world has at most ",
                      std::numeric_limits<int32_t>::max(), " ranks, as c10d counts them in 32 bits, got ",
                      options_.size, ".");
  TESSERA_CHECK_VALUE(options_.rank >= 0 && options_.rank < options_.size, "Rank ", options_.rank,
                      " is not in a world of ", options_.size, " ranks.");
  TESSERA_CHECK_VALUE(options_.timeout.count() > 0, "The timeout must be positive, got ",
                      options_.timeout.count(), " ms.");
  options_.timeout = std::min(options_.timeout, kLongestTimeout);
  TESSERA_CHECK_VALUE(!options_.dry_run || options_.backend == "fake",
                      "A dry run needs the backend \"fake\", got \"", options_.backend, "\".");
  if (options_.hub && !options_.store) options_.store = options_.hub->store();
  options_.check_collectives = options_.check_collectives || environment_asks_for_checks();
  if (!options_.hub && options_.store && options_.size > 1 &&
      chosen_backend(backends_, c10::DeviceType::CPU) != "fake")
    process_rank_ = std::make_shared<ProcessRank>(options_);
  if (logs(LogLevel::info, "comm"))
    write_log("comm",
              c10::str("world of ", size(), options_.hub ? " threads" : " processes", ", CPU tensors by ",
                       backend(c10::kCPU)),
              std::pair(rank(), size()));
}

World::~World() { leave(); }

std::string World::backend(c10::DeviceType device) const {
  // Only processes are asked who they are; a world of another kind may be too large to list its ranks.
  return backend_for(*this, backends_, process_rank_ ? all_ranks(size()) : std::vector<int64_t>(), device);
}

Group World::group(c10::IntArrayRef ranks, c10::DeviceType device, const std::string& backend_name) {
  const Blocking blocking;
  if (process_rank_) check_members(ranks, rank(), size());  // they are waited for
  GroupKey key{ranks.vec(), device,
               backend_name.empty() ? backend_for(*this, backends_, ranks, device) : backend_name, ""};
  if (Group known = find(key)) return known;
  const std::lock_guard lock(making_);
  if (Group known = find(key)) return known;
  check_members(ranks, rank(), size());
  if (options_.existing_group && backend_name.empty()) {
    const std::set<uint16_t> before = process_rank_ ? listening_ports() : std::set<uint16_t>();
    if (Group given = options_.existing_group(ranks, device)) {
      if (process_rank_) {
        std::set<uint16_t> added = listening_ports();
        for (const uint16_t port : before) added.erase(port);
        const auto backend = given->getBackend(device);
        const std::string name = backend->getBackendName();
        // Others listen nowhere: a port is that of a server of the user.
        if (name == "gloo") process_rank_->add_ports(added);
        if (name == shm::kBackendName) process_rank_->add_abortable(backend);
      }
      return keep(std::move(key), given);
    }
  }
  return find_or_make(std::move(key));
}

Group World::group_for(const std::string& purpose) {
  const Blocking blocking;
  std::string backend = this->backend(c10::kCPU);
  const std::lock_guard lock(making_);
  return find_or_make({all_ranks(size()), c10::kCPU, std::move(backend), purpose});
}

Group World::find(const GroupKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(key);
  return found == groups_.end() ? Group() : found->second;
}

Group World::keep(GroupKey key, Group group) {
  const std::lock_guard lock(mutex_);
  return groups_.emplace(std::move(key), std::move(group)).first->second;
}

Group World::find_or_make(GroupKey key) {
  if (Group known = find(key)) return known;
  const c10::IntArrayRef ranks = key.ranks;
  const c10::DeviceType device = key.device;
  BackendRequest request;
  request.ranks = key.ranks;
  request.member = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
  request.name = c10::str(key.backend, "/", c10::DeviceTypeName(device, true), "/", members_text(ranks));
  if (!key.purpose.empty()) request.name += "/" + key.purpose;
  const bool is_staged = !comm::carries(key.backend, device);
  request.device = is_staged ? c10::DeviceType::CPU : device;
  request.timeout = timeout();
  request.hub = options_.hub;

  // Processes wait for each other here.
  std::optional<Wait> wait;
  if (!options_.hub)
    wait.emplace(rank(), [&] { return "to make the group " + request.name + " with its other members"; });
  if (process_rank_) {
    process_rank_->expect_members(request.name, key.ranks);
    request.store = process_rank_->store_for(request.name, key.ranks, key.purpose);
    const bool in_steps = key.backend == hierarchical::kBackendName;
    if (in_steps) request.hosts = process_rank_->hosts_of(ranks);
    if (in_steps || key.backend == "gloo") request.gloo = process_rank_->gloo();
  } else if (options_.store) {
    request.store = c10::make_intrusive<c10d::PrefixStore>("tessera/group/" + request.name, options_.store);
  }
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = process_rank_ ? process_rank_->make_backend(key.backend, request)
                            : make_backend(key.backend, request);
  } catch (const std::exception& error) {
    // gloo notices that a member is gone as a connection that cannot be made.
    const auto monitor = process_rank_ ? process_rank_->monitor() : nullptr;
    const std::string failure = monitor ? monitor->wait_for_failure(std::chrono::milliseconds(500)) : "";
    if (failure.empty() || std::string_view(error.what()).find(failure) != std::string_view::npos) throw;
    TESSERA_CHECK(false, failure, "\nRank ", rank(), " was making the group ", request.name, ".");
  }
  wait.reset();
  if (process_rank_ && key.backend != "gloo") process_rank_->add_abortable(backend);
  if (options_.check_collectives && !compares_by_itself(key.backend)) {
    backend = make_checked(std::move(backend), key.ranks, request.device);
  }
  if (is_staged) backend = comm::make_staged(std::move(backend));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(request.store, static_cast<int>(request.member),
                                                       static_cast<int>(ranks.size()));
  const auto type = c10d::ProcessGroup::strToBackendType(key.backend);
  group->setBackend(device, type, backend);
  if (is_staged) group->setBackend(c10::DeviceType::CPU, type, backend);
  if (options_.dry_run) group->setBackend(c10::DeviceType::Meta, type, backend);
  group->setDefaultBackend(type);
  group->setGroupName(request.name);
  group->setGroupDesc("tessera");
  if (logs(LogLevel::debug, "comm")) write_log("comm", "group " + request.name, std::pair(rank(), size()));
  return keep(std::move(key), std::move(group));
}

Group World::group(c10::DeviceType device) { return group(all_ranks(size()), device); }

std::optional<std::vector<int64_t>> World::ranks_of(const Group& group) const {
  std::lock_guard lock(mutex_);
  for (const auto& [key, known] : groups_) {
    if (known == group) return key.ranks;
  }
  return std::nullopt;
}

void World::meet(const std::string& what) {
  if (!options_.hub || size() == 1) return;
  threads::check_only_run(what);
  const Blocking blocking;
  options_.hub->meet(rank(), what, timeout());
}

void World::report_failure(const std::string& reason) noexcept {
  try {
    if (options_.hub) {
      options_.hub->fail(rank(), reason);
    } else if (const auto monitor = process_rank_ ? process_rank_->monitor() : nullptr) {
      monitor->fail(c10::str("rank ", rank(), " failed: ", reason));
    }
  } catch (const std::exception& error) {
    TORCH_WARN("tessera: rank ", rank(), " could not notify the others that it failed: ", error.what());
  }
}

std::string World::reported_failure() const {
  if (options_.hub) return options_.hub->failure();
  const auto monitor = process_rank_ ? process_rank_->monitor() : nullptr;
  return monitor ? monitor->failure() : "";
}

std::vector<int64_t> World::lost_ranks() const {
  const auto monitor = process_rank_ ? process_rank_->monitor() : nullptr;
  return monitor ? monitor->lost() : std::vector<int64_t>();
}

void World::wait_for_end_of_others(std::chrono::milliseconds patience) const {
  const auto monitor = process_rank_ ? process_rank_->monitor() : nullptr;
  if (!monitor) return;
  const Blocking blocking;
  const Wait wait(rank(), [] { return "at its end, for the other ranks to end"; });
  monitor->wait_until_alone(patience);
}

void World::leave() {
  const bool has_failed = !reported_failure().empty();
  if (!process_rank_ || !process_rank_->leave()) return;
  // Meshes may outlive the world, in caches too, and refer to its groups; connections and threads end.
  std::vector<Group> made;
  {
    const std::lock_guard lock(mutex_);
    options_.store.reset();
    for (const auto& [key, group] : groups_) {
      if (ProcessRank::made(group)) made.push_back(group);
    }
  }
  const Blocking blocking;
  const auto release = [made = std::move(made)] {
    for (const auto& group : made) group->release_resources();
  };
  if (!has_failed) return release();
  // What a transport was doing then may last.
  constexpr std::chrono::seconds kPatience(1);
  do_for_at_most(kPatience, release);
}

void World::name_group(const Group& group, const std::string& name) {
  {
    std::lock_guard lock(mutex_);
    if (!names_.emplace(group.get(), name).second) return;
  }
  const auto ranks = process_rank_ ? ranks_of(group) : std::nullopt;
  if (ranks) process_rank_->name_group(group, *ranks, name);
}

std::string World::name_of(const Group& group) const {
  std::lock_guard lock(mutex_);
  const auto found = names_.find(group.get());
  return found == names_.end() ? "" : found->second;
}

std::shared_ptr<World> current_world() {
  auto world = find_world();
  TESSERA_CHECK(world,
                "There are no ranks here. Start them as threads with tessera::run(n, [] { ... }), or call "
                "tessera::init_process_group() in a process that torchrun, mpirun or srun started.");
  return world;
}

bool has_current_world() { return find_world() != nullptr; }

WorldScope::WorldScope(std::shared_ptr<World> world) : scope_(world) { CarriedWorld::push(std::move(world)); }
WorldScope::~WorldScope() { CarriedWorld::pop(); }

std::shared_ptr<World> init_process_group(const std::string& backend, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(process_world().mutex);
    check_no_world();
  }
  const auto info = launch_info();
  TESSERA_CHECK(
      info,
      "No launcher's environment variables are set, so this process does not know which rank it is. Start it "
      "with torchrun, mpirun or srun, or use tessera::run to have ranks as threads.");
  WorldOptions options;
  options.rank = info->rank;
  options.size = info->size;
  options.backend = backend;
  options.timeout = timeout;
  options.store = connect_store(*info, timeout);
  return init_process_group(std::move(options));
}

std::shared_ptr<World> init_process_group(WorldOptions options) {
  // Before it is made: who joins a world in vain is out of step with the others in the next.
  {
    const std::lock_guard lock(process_world().mutex);
    check_no_world();
  }
  auto world = std::make_shared<World>(std::move(options));
  const std::lock_guard lock(process_world().mutex);
  check_no_world();
  process_world().world = world;
  return world;
}

void destroy_process_group() {
  std::shared_ptr<World> world;
  {
    std::lock_guard lock(process_world().mutex);
    world.swap(process_world().world);
  }
  if (world) world->leave();  // others may hold it
}

std::shared_ptr<World> shrink_process_group() {
  std::shared_ptr<World> old;
  {
    std::lock_guard lock(process_world().mutex);
    old = process_world().world;
  }
  const auto monitor = old && old->process_rank() ? old->process_rank()->monitor() : nullptr;
  TESSERA_CHECK(monitor,
                "shrink_process_group: this process is no rank of a world of processes. Call "
                "init_process_group first.");
  const Blocking blocking;
  c10::intrusive_ptr<c10d::Store> store;
  const auto survivors = monitor->gather_survivors(
      [&] {
        const std::string& address = old->process_rank()->address();
        const auto listening = listen_for_store(address, 0, old->timeout());
        store = listening;
        return c10::str(listening->getPort(), " ", address);
      },
      old->timeout());
  const auto& ranks = survivors.ranks;
  const auto mine = std::find(ranks.begin(), ranks.end(), old->rank());
  TESSERA_CHECK(mine != ranks.end(), "shrink_process_group: the other ranks take rank ", old->rank(),
                ", this one, for dead, and go on without it.");
  if (!store) {
    const size_t space = survivors.invitation.find(' ');
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(std::stoi(survivors.invitation));
    options.timeout = old->timeout();
    store = c10::make_intrusive<c10d::TCPStore>(survivors.invitation.substr(space + 1), options);
  }
  WorldOptions options = old->options();
  options.rank = mine - ranks.begin();
  options.size = static_cast<int64_t>(ranks.size());
  options.store = store;
  destroy_process_group();
  return init_process_group(std::move(options));
}

int64_t get_rank() { return current_world()->rank(); }
int64_t get_world_size() { return current_world()->size(); }

}  // namespace tessera
