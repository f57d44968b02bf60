#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <memory>
#include <string>

#include <ATen/record_function.h>

namespace tessera::random {

/// While alive, notices operators by which the calling thread draws plain tensors from libtorch's default generator.
///
/// That generator is one for the process. Ranks that are threads share it, so what one of them has drawn it cannot draw
/// again, as activation checkpointing wants: others have drawn in between. Watches nest.
class TESSERA_API PlainDrawsWatch {
 public:
  PlainDrawsWatch();
  ~PlainDrawsWatch();
  PlainDrawsWatch(const PlainDrawsWatch&) = delete;
  PlainDrawsWatch& operator=(const PlainDrawsWatch&) = delete;

  /// The first operator that was noticed, as "aten::bernoulli_.float"; empty if none was.
  const std::string& seen() const { return seen_; }

 private:
  static std::unique_ptr<at::ObserverContext> look_at(const at::RecordFunction& call);

  const ThreadScope<PlainDrawsWatch*, PlainDrawsWatch> scope_;
  std::string seen_;
  at::CallbackHandle handle_;
};

}  // namespace tessera::random
