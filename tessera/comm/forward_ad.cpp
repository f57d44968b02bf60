#include <tessera/comm/blocking.h>
#include <tessera/comm/forward_ad.h>
#include <tessera/comm/threads/hub.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>

#include <exception>

#include <torch/csrc/autograd/forward_grad.h>

namespace tessera {

namespace {

using torch::autograd::ForwardADLevel;

constexpr uint64_t kLevel = 0;  // libtorch has no other
constexpr const char* kWhat = "forward-mode AD (a dual level)";

thread_local bool is_inside = false;

/// Null where libtorch's own level will do.
std::shared_ptr<World> world_of_threads() {
  if (!has_current_world()) return nullptr;
  auto world = current_world();
  return world->is_threads() && world->size() > 1 ? world : nullptr;
}

}  // namespace

uint64_t enter_dual_level() {
  TESSERA_CHECK(!is_inside,
                "enter_dual_level: this rank is inside already. Nested forward mode AD is not supported.");
  if (const auto world = world_of_threads()) {
    threads::check_only_run(kWhat);
    const Blocking blocking;
    world->hub()->forward_ad().enter(world->rank(), [] { ForwardADLevel::get_next_idx(); });
  } else {
    ForwardADLevel::get_next_idx();
  }
  is_inside = true;
  return kLevel;
}

void exit_dual_level(bool is_failing) {
  TESSERA_CHECK(is_inside, "exit_dual_level: this rank is not inside one.");
  is_inside = false;
  if (const auto world = world_of_threads()) {
    const Blocking blocking;
    world->hub()->forward_ad().leave(world->rank(), kWhat, world->timeout(), is_failing,
                                     [] { ForwardADLevel::release_idx(kLevel); });
  } else {
    ForwardADLevel::release_idx(kLevel);
  }
}

bool is_in_dual_level() { return is_inside; }

DualLevel::DualLevel() : exceptions_(std::uncaught_exceptions()) { enter_dual_level(); }
DualLevel::~DualLevel() noexcept(false) { exit_dual_level(std::uncaught_exceptions() > exceptions_); }

}  // namespace tessera
