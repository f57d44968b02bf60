#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <optional>

#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

/// While alive, tensors that the calling thread makes without saying where are on meta: they have a shape, but no memory.
/// So a model is made that is too large for one rank. Distribute it, and then allocate each rank's part with `to_empty`.
///
///   const OnMeta on_meta;
///   Transformer model(options);                // of modules of torch::nn, which cannot be told a device
///
/// `dtype`: of those that are made without one.
class TESSERA_API OnMeta {
 public:
  explicit OnMeta(std::optional<c10::ScalarType> dtype = {});
  ~OnMeta();
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;

  /// The dtype of the innermost one of the calling thread.
  static std::optional<c10::ScalarType> dtype();

 private:
  ThreadScope<std::optional<c10::ScalarType>, OnMeta> scope_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace tessera
