#include <tessera/carried.h>
#include <tessera/comm/observer.h>

namespace tessera::comm {

namespace {
using CarriedObserver = Carried<Observer*, Observer>;
}

Observer::Observer() : scope_(this) { CarriedObserver::push(this); }
Observer::~Observer() { CarriedObserver::pop(); }

WhileAgreeing::WhileAgreeing() : scope_(true) {}
WhileAgreeing::~WhileAgreeing() = default;
bool WhileAgreeing::is_alive() { return ThreadScope<bool, WhileAgreeing>::current(); }

MemoryInFlight::MemoryInFlight() : scope_(true) {}
MemoryInFlight::~MemoryInFlight() = default;
bool MemoryInFlight::is_alive() { return ThreadScope<bool, MemoryInFlight>::current(); }

Observer* Observer::innermost() {
  if (Observer* const own = ThreadScope<Observer*, Observer>::current()) return own;
  return CarriedObserver::find_or(nullptr);
}

}  // namespace tessera::comm
