#pragma once

#include <tessera/comm/collectives.h>
#include <tessera/export.h>
#include <tessera/redistribute/plan.h>

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Runs the steps on this rank's local tensor and returns the new local tensor. All ranks of the mesh must
/// call it with equal plans. Ranks outside the mesh take part in nothing and get `local` back.
///
/// `local` must have the shape that `plan.from` gives this rank, and its dtype; it may have any strides and
/// is never written to. The result lies in memory as `plan.to` says (see memory.h) and is new, except that it
/// may be `local` or a view of it where no step communicates: with slices along the first dim, and with
/// to_partial on the ranks that keep their value. With no steps it is `local`, as it is. Of a tensor on the
/// meta device only the shape is made. Autograd is not involved.
///
/// Memory in use at the peak of a step, besides what it starts from:
///   all_reduce      the output; nothing if the input is the result of a step before. For any and all of a
///                   dtype other than bool, and for norms, also the values that are reduced
///   all_gather      the output along the first dim (that is not of size 1), even or not; else twice
///   reduce_scatter  the output along the first dim, even or not; else once more what it starts from. For
///                   any, all and norms also the values that are reduced
///   all_to_all      the output, and one copy of what is sent or received and is not contiguous in the local
///                   tensor
///   slice           the output, or nothing if it is a view
///   to_partial      the output, or nothing on the ranks that keep their value
///   rescale         the output
/// A backend that moves only equal sizes, or bytes, may need more (see comm/collectives.h).
TESSERA_API at::Tensor execute(const Plan& plan, const at::Tensor& local);

/// The result of execute_async: a local tensor that is still being communicated.
class TESSERA_API PendingTensor {
 public:
  /// `finish` makes the tensor, on the waiting thread, once the collective is done.
  PendingTensor(std::optional<comm::Pending> collective, std::function<at::Tensor()> finish);

  /// Waits for the tensor and returns it. Throws if the collective failed. Later calls return the same
  /// tensor.
  at::Tensor wait();

 private:
  std::optional<comm::Pending> collective_;
  std::function<at::Tensor()> finish_;
  at::Tensor result_;
};

/// The same, but returns when the last collective has been posted; what remains is done by `wait`. Until then
/// `local` must not be written to.
[[nodiscard]] TESSERA_API PendingTensor execute_async(const Plan& plan, const at::Tensor& local);

}  // namespace tessera
