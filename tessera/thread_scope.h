#pragma once

#include <type_traits>
#include <utility>

/// Of a thread-local variable that every operator call reads: it lies at a fixed distance from the thread's own address, so that
/// reading it is one instruction, not a call of the dynamic linker. There is room for few bytes of this kind in a process.
#if defined(__linux__)
#define TESSERA_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define TESSERA_STATIC_TLS
#endif

namespace tessera {

/// A value that code on the calling thread finds while the scope is alive: scopes nest, the innermost one
/// counts, and a scope that ends brings back what was there before. A scope must end on the thread that made
/// it, and after all scopes made inside it.
///
/// `Tag` distinguishes scopes of the same type. Where a public class is such a scope, it has one as a
/// member and its constructor and destructor are in the library, so that users and the library share one
/// value.
///
///   using Depth = ThreadScope<int, struct DepthTag>;
///   { Depth inner(3);  Depth::current() == 3; }   Depth::current() == 0
template <class T, class Tag>
class ThreadScope {
 public:
  explicit ThreadScope(T value) : outer_(std::exchange(slot(), std::move(value))) {}
  ~ThreadScope() { slot() = std::move(outer_); }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

  /// The value of the innermost scope of the calling thread; T() if there is none.
  static const T& current() { return slot(); }
  /// The value of the scope around this one; T() if there is none.
  const T& outer() const { return outer_; }

 private:
  static T& slot() {
    if constexpr (std::is_trivially_destructible_v<T> && sizeof(T) <= sizeof(void*)) {
      thread_local T value TESSERA_STATIC_TLS{};
      return value;
    } else {
      thread_local T value{};
      return value;
    }
  }

  T outer_;
};

}  // namespace tessera
