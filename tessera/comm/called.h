#pragma once

#include <tessera/comm/call.h>
#include <tessera/thread_scope.h>

#include <utility>

namespace tessera::comm {

/// While alive, what the calling thread called of collectives.h, before that is made of calls that the transport has.
/// A backend that compares calls shows it in its errors.
class CalledBase {
 public:
  /// The outermost one of the calling thread, which is the user's; null if there is none.
  static const CalledBase* outermost() { return Scope::current(); }

  /// Without data.
  virtual CollectiveCall call() const = 0;

 protected:
  CalledBase() : scope_(outermost() ? outermost() : this) {}
  ~CalledBase() = default;

 private:
  using Scope = ThreadScope<const CalledBase*, CalledBase>;
  const Scope scope_;
};

/// `make` returns the call; it is only called where somebody asks.
template <class Make>
class Called final : public CalledBase {
 public:
  explicit Called(Make make) : make_(std::move(make)) {}
  CollectiveCall call() const override { return make_(); }

 private:
  const Make make_;
};

}  // namespace tessera::comm
