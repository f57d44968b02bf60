#pragma once

#include <memory>
#include <utility>

#include <c10/util/ThreadLocalDebugInfo.h>

/// Values of scopes that hold in backward too. libtorch computes gradients of the CPU on the thread that calls
/// backward, but those of any other device on a thread of that device, where no ThreadScope of the caller is seen. It
/// takes its own thread-local state there, of which the debug info is a part that others may add to.
namespace tessera {

namespace detail {

struct CarriedBase : c10::DebugInfoBase {
  const void* tag = nullptr;
  CarriedBase* outer = nullptr;  // alive as long as this one: its scope is around this one's
};

/// The innermost value that the calling thread has, or has been given by the thread that called backward.
CarriedBase* innermost_carried();
/// Adds a value for the calling thread. The last one added is taken away first.
void push_carried(std::shared_ptr<CarriedBase> value);
void pop_carried();

}  // namespace detail

/// The values with this tag, which a ThreadScope has as well: that one is quicker to ask.
template <class T, class Tag>
class Carried {
 public:
  static void push(T value) {
    auto added = std::make_shared<Value>();
    added->tag = &tag_;
    added->outer = detail::innermost_carried();
    added->value = std::move(value);
    detail::push_carried(std::move(added));
  }
  static void pop() { detail::pop_carried(); }

  /// The innermost one, if there is any.
  static const T* find() {
    for (auto* each = detail::innermost_carried(); each; each = each->outer)
      if (each->tag == &tag_) return &static_cast<const Value*>(each)->value;
    return nullptr;
  }
  static T find_or(T other) {
    const T* found = find();
    return found ? *found : std::move(other);
  }

 private:
  struct Value final : detail::CarriedBase {
    T value;
  };
  static constexpr char tag_ = 0;
};

}  // namespace tessera
