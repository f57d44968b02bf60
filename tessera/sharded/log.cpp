#include <tessera/comm/world.h>
#include <tessera/sharded/log.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace tessera::sharded {

namespace {

using Handler = std::function<void(const LogEvent&)>;

std::atomic<bool> has_handler{false};
std::mutex mutex;
std::shared_ptr<const Handler>& current() {
  static auto& handler = *new std::shared_ptr<const Handler>;
  return handler;
}

}  // namespace

void set_log_handler(Handler handler) {
  const std::lock_guard lock(mutex);
  has_handler = static_cast<bool>(handler);
  current() = handler ? std::make_shared<const Handler>(std::move(handler)) : nullptr;
}

void log_call(const char* call, const std::function<std::string()>& detail) {
  if (!has_handler.load(std::memory_order_relaxed)) return;
  std::shared_ptr<const Handler> handler;
  {
    const std::lock_guard lock(mutex);
    handler = current();
  }
  if (handler) (*handler)({call, has_current_world() ? get_rank() : -1, detail()});
}

}  // namespace tessera::sharded
