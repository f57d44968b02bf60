#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

namespace tessera {

/// What work of a rank is, for those who look at it.
enum class SpanKind {
  op,       ///< an operator on distributed tensors, from its call to its return; `detail` is null
  planned,  ///< inside of it, of no length: how it will be carried out; a PlannedCall (dispatch/op_plan.h)
  compute,  ///< what it computes on local tensors; null
  redistribute,  ///< the steps of a Plan (redistribute/plan.h), or the posting of them
  collective,    ///< a collective, until it is posted; a comm::Event (comm/observer.h)
  posted,        ///< inside of it, of no length: what is waited for; its c10d::Work
  wait,          ///< until a collective has ended; its c10d::Work
};

/// While alive, is notified of where work of the calling thread begins and ends: the innermost one alone. What begins
/// later ends earlier.
class TESSERA_API SpanObserver {
 public:
  SpanObserver();
  virtual ~SpanObserver();
  SpanObserver(const SpanObserver&) = delete;
  SpanObserver& operator=(const SpanObserver&) = delete;

  /// `name` lives as long as the process, `detail` during the call.
  virtual void began(SpanKind kind, const char* name, const void* detail) = 0;
  virtual void ended() = 0;

  /// The innermost one of the calling thread, or null.
  static SpanObserver* innermost();

 private:
  ThreadScope<SpanObserver*, SpanObserver> scope_;
};

/// Work that begins and ends with this object. Costs one look at the thread's observer where there is none.
class Span {
 public:
  explicit Span(SpanKind kind, const char* name, const void* detail = nullptr)
      : Span(SpanObserver::innermost(), kind, name, detail) {}
  /// With the observer that the caller knows already.
  Span(SpanObserver* observer, SpanKind kind, const char* name, const void* detail = nullptr)
      : observer_(observer) {
    if (observer_) [[unlikely]]
      observer_->began(kind, name, detail);
  }
  ~Span() {
    if (observer_) [[unlikely]]
      observer_->ended();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  SpanObserver* const observer_;
};

}  // namespace tessera
