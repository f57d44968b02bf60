#include <tessera/comm/observer.h>

namespace tessera::comm {

Observer::Observer() : scope_(this) {}
Observer::~Observer() = default;

WhileAgreeing::WhileAgreeing() : scope_(true) {}
WhileAgreeing::~WhileAgreeing() = default;
bool WhileAgreeing::is_alive() { return ThreadScope<bool, WhileAgreeing>::current(); }

MemoryInFlight::MemoryInFlight() : scope_(true) {}
MemoryInFlight::~MemoryInFlight() = default;
bool MemoryInFlight::is_alive() { return ThreadScope<bool, MemoryInFlight>::current(); }

Observer* Observer::innermost() { return ThreadScope<Observer*, Observer>::current(); }

}  // namespace tessera::comm
