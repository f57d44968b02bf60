#include <tessera/carried.h>
#include <tessera/span.h>

namespace tessera {

namespace {
using CarriedSpans = Carried<SpanObserver*, SpanObserver>;
}

SpanObserver::SpanObserver() : scope_(this) { CarriedSpans::push(this); }
SpanObserver::~SpanObserver() { CarriedSpans::pop(); }

SpanObserver* SpanObserver::innermost() {
  if (SpanObserver* const own = ThreadScope<SpanObserver*, SpanObserver>::current()) return own;
  return CarriedSpans::find_or(nullptr);
}

}  // namespace tessera
