#include <tessera/comm/blocking.h>

namespace tessera {

namespace {

void* enter_nothing() { return nullptr; }
void leave_nothing(void* /*state*/) {}

BlockingHooks hooks{enter_nothing, leave_nothing};

}  // namespace

void set_blocking_hooks(BlockingHooks given) { hooks = given; }

Blocking::Blocking() : state_(hooks.enter()) {}
Blocking::~Blocking() { hooks.leave(state_); }

}  // namespace tessera
