#include <tessera/span.h>

namespace tessera {

SpanObserver::SpanObserver() : scope_(this) {}
SpanObserver::~SpanObserver() = default;

SpanObserver* SpanObserver::innermost() { return ThreadScope<SpanObserver*, SpanObserver>::current(); }

}  // namespace tessera
