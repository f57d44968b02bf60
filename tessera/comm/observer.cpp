#include <tessera/comm/observer.h>

namespace tessera::comm {

namespace {
thread_local Observer* current = nullptr;
}

Observer::Observer() : outer_(current) { current = this; }

Observer::~Observer() { current = outer_; }

Observer* Observer::innermost() { return current; }

}  // namespace tessera::comm
