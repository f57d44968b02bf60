#include <tessera/comm/environment.h>
#include <tessera/comm/forward_ad.h>
#include <tessera/comm/run.h>
#include <tessera/comm/shared_error.h>
#include <tessera/comm/threads/hub.h>
#include <tessera/error.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>

namespace tessera {

namespace {

class IntraOpThreads {
 public:
  explicit IntraOpThreads(int count) : previous_(at::get_num_threads()) { at::set_num_threads(count); }
  ~IntraOpThreads() { at::set_num_threads(previous_); }
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  int previous_;
};

/// Sees to it that a rank that ends, or fails, inside a dual level leaves it to the others.
struct LeavesDualLevel {
  ~LeavesDualLevel() {
    if (is_in_dual_level()) exit_dual_level(/*is_failing=*/true);
  }
};

/// Ends a world however its scope is left: meshes in caches hold it longer.
struct LeavesWorld {
  World& world;
  ~LeavesWorld() { world.leave(); }
};

}  // namespace

void run(int64_t world_size, const std::function<void()>& function, const RunOptions& options) {
  TESSERA_CHECK_VALUE(world_size >= 1, "run: needs at least one rank, got ", world_size, ".");
  TESSERA_CHECK_VALUE(function, "run: the function is empty.");
  TESSERA_CHECK_VALUE(options.threads_per_rank >= 0, "run: threads_per_rank is ", options.threads_per_rank,
                      ".");
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const IntraOpThreads intra_op(options.threads_per_rank > 0
                                    ? options.threads_per_rank
                                    : static_cast<int>(std::max<int64_t>(1, cores / world_size)));

  const threads::RunCount counted;
  auto hub = std::make_shared<threads::Hub>(world_size);
  std::atomic<bool> has_failed{false};
  std::exception_ptr first;
  auto fail = [&](int64_t rank, const std::exception_ptr& error) {
    if (!has_failed.exchange(true)) first = error;
    hub->fail(rank, comm::message_of(error));
  };
  const at::ThreadLocalState caller_state;
  auto rank_main = [&](int64_t rank) {
    try {
      const at::ThreadLocalStateGuard state(caller_state);
      WorldOptions world;
      world.rank = rank;
      world.size = world_size;
      world.backend = options.backend;
      world.timeout = options.timeout;
      world.hub = hub;
      const WorldScope scope(std::make_shared<World>(std::move(world)));
      const threads::Roster::OwnThread own(hub->roster(), rank);
      const LeavesDualLevel leaves;
      // Autocast's cache of casts is one for the process. Ranks would clear each other's, so that some would
      // cast again, and communicate for it, where others do not; and its lock is held while it casts.
      at::autocast::set_autocast_cache_enabled(false);
      function();
      hub->leave(rank);
    } catch (...) {
      fail(rank, std::current_exception());
    }
  };

  std::vector<std::thread> ranks;
  ranks.reserve(world_size);
  try {
    for (int64_t rank = 0; rank < world_size; ++rank) ranks.emplace_back(rank_main, rank);
  } catch (...) {
    fail(static_cast<int64_t>(ranks.size()), std::current_exception());
  }
  for (std::thread& rank : ranks) rank.join();
  if (first) std::rethrow_exception(first);
}

void launch(int64_t world_size, const std::function<void()>& function, const RunOptions& options) {
  const auto info = launch_info();
  if (!info) return run(world_size, function, options);

  WorldOptions world_options;
  world_options.rank = info->rank;
  world_options.size = info->size;
  world_options.backend = options.backend;
  world_options.timeout = options.timeout;
  world_options.store = connect_store(*info, options.timeout);
  const IntraOpThreads intra_op(options.threads_per_rank > 0 ? options.threads_per_rank
                                                             : at::get_num_threads());
  const auto world = std::make_shared<World>(std::move(world_options));
  const LeavesWorld leaves{*world};
  try {
    const WorldScope scope(world);
    function();
  } catch (...) {
    world->report_failure(comm::message_of(std::current_exception()));
    throw;
  }
  // Who keeps the store outlives the others.
  if (info->rank == 0 && !info->agent_store) world->wait_for_end_of_others(options.timeout);
}

}  // namespace tessera
