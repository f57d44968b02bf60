#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Does `work`, which does not throw, on a thread of its own, and returns when that is done or so much time has passed. Then
/// the thread is left alone: for what nobody can end.
void do_for_at_most(std::chrono::milliseconds patience, std::function<void()> work);

}  // namespace tessera
