#include <tessera/comm/blocking.h>

namespace tessera {

namespace {

void* enter_nothing() { return nullptr; }
void leave_nothing(void* /*state*/) {}

std::string no_reason() { return ""; }

BlockingHooks hooks{enter_nothing, leave_nothing, no_reason};

}  // namespace

void set_blocking_hooks(BlockingHooks given) { hooks = given; }

Blocking::Blocking() : state_(hooks.enter()) {}
Blocking::~Blocking() { hooks.leave(state_); }

std::string why_endless() { return hooks.why_endless(); }

}  // namespace tessera
