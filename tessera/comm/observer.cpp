#include <tessera/comm/observer.h>

namespace tessera::comm {

Observer::Observer() : scope_(this) {}
Observer::~Observer() = default;

Observer* Observer::innermost() { return ThreadScope<Observer*, Observer>::current(); }

}  // namespace tessera::comm
