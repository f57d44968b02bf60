#pragma once

#include <tessera/dispatch/guards.h>
#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/spec.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Placements that may be left out.
using OptionalPlacements = std::optional<Placements>;

/// One tensor over the ranks of a mesh. It is an at::Tensor, and any at::Tensor that is distributed can be
/// seen as one:
///
///   at::Tensor y = torch::mm(x, w);     // x and w are distributed, and so is y
///   DTensor(y).placements()             // throws if it were not
///
/// Gradients flow through everything here. Gradients of a tensor placed P(op) are replicated: a change of any
/// rank's part changes the true value by as much (docs/dtensor.md).
class TESSERA_API DTensor : public at::Tensor {
 public:
  DTensor() = default;
  /// Throws if `tensor` is defined and not distributed.
  DTensor(at::Tensor tensor);

  static bool is_dtensor(const at::Tensor& tensor);

  struct FromLocalOptions {
    /// Let all ranks compare what they hold first: wrong local shapes or dtypes on any rank are an error on
    /// every one, and replicas are made those of the first rank. The global shape is then found from the
    /// local ones, even or not.
    bool run_check = false;
    /// The global shape; by default every rank holds as much as this one.
    std::optional<std::vector<int64_t>> shape = {};
    /// The global strides; by default contiguous, whatever the local ones are: all ranks must say the same.
    std::optional<std::vector<int64_t>> strides = {};
    /// How the gradient that goes back to the local tensor is to be placed; by default as the tensor, with P
    /// as R.
    OptionalPlacements grad_placements = {};
  };
  /// The tensor of which each rank of the mesh holds `local`. It shares its memory if that lies as the global
  /// strides say (contiguous, by default), else it is a copy. Outside the mesh `local` is ignored.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                            const FromLocalOptions& options);
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements);

  const Spec& spec() const;
  const DeviceMesh& device_mesh() const { return spec().mesh(); }
  const Placements& placements() const { return spec().placements(); }

  /// The local tensor; shares its memory. `grad_placements`: how the gradient that comes back is placed;
  /// by default as the tensor, with P as R.
  at::Tensor to_local(OptionalPlacements grad_placements = std::nullopt) const;
  /// The global tensor, replicated on every rank.
  at::Tensor full_tensor(OptionalPlacements grad_placements = std::nullopt) const;
  struct RedistributeOptions {
    /// The order in which mesh dims shard; see layout.h.
    std::vector<int64_t> order = {};
    /// Return at once; the first use of the local tensor waits.
    bool async_op = false;
    /// What to compute in, and to have then; by default the tensor's own. Communicating bfloat16 instead of
    /// float halves the bytes.
    std::optional<at::ScalarType> forward_dtype = {};
    /// The same for the gradient on its way back; it is the tensor's dtype again in the end.
    std::optional<at::ScalarType> backward_dtype = {};
    /// Also if the tensor is placed so already: its gradient then comes back placed as it is, and not as what
    /// follows leaves it.
    bool always = false;
  };
  /// The same tensor placed otherwise. The gradient comes back placed as this tensor, with P as R.
  DTensor redistribute(Placements placements, const RedistributeOptions& options) const;
  DTensor redistribute(Placements placements) const;

  /// Everything about a distributed tensor but its data: can be compared, and written as text.
  struct Context {
    Spec spec;
    bool requires_grad = false;
    bool operator==(const Context&) const = default;
    /// "[S(0), R] on mesh(dp=2, tp=2): f32[4, 6] requires_grad"
    std::string str() const;
    /// On a mesh that is as the text says.
    static Context parse(std::string_view text, const DeviceMesh& mesh);
  };
  /// This rank's local tensor, and the rest.
  std::pair<at::Tensor, Context> flatten() const;
  /// Back again: the local tensor may be another one of that shape and dtype.
  static DTensor unflatten(const at::Tensor& local, const Context& context);
  /// A gradient as one for this tensor must be: placed as it, but for P, which is replicated, and with a
  /// dense local tensor.
  DTensor coerce_gradient(const DTensor& gradient) const;

  /// "DTensor [S(0)] on mesh(tp=2): f32[4, 6], rank 0 holds:" and the local tensor. Not collective.
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const DTensor& tensor);
};

/// Throws if one of the tensors is distributed and has yet to be reduced on some mesh dim, naming it and
/// `what` cannot be done.
TESSERA_API void check_no_partial(at::TensorList tensors, const std::string& what);

/// `tensor` as a distributed one. Each rank gets its part of what the `source`-th rank of the mesh has; with
/// no source, its part of what it has itself, without communication. requires_grad is kept: the result is a
/// leaf. A tensor on meta stays there, and `at::empty_like(result, device)` gives each rank memory for its shard.
TESSERA_API DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                                      std::optional<int64_t> source = 0);

/// New tensors, of which each rank allocates its shard; on meta, if the options say so. On P(op) partial values
/// reduce to the value asked for.
TESSERA_API DTensor empty(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
                          at::TensorOptions options = {});
TESSERA_API DTensor full(c10::IntArrayRef shape, const at::Scalar& value, const DeviceMesh& mesh,
                         Placements placements, at::TensorOptions options = {});
TESSERA_API DTensor zeros(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
                          at::TensorOptions options = {});
TESSERA_API DTensor ones(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
                         at::TensorOptions options = {});

/// Random numbers: uniform in [0, 1), normal, integers in [low, high), and a permutation of 0, ..., n - 1. Each
/// rank makes only its shard; the tensor is the same on every mesh and however it is placed (tessera/random).
TESSERA_API DTensor rand(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
                         at::TensorOptions options = {});
TESSERA_API DTensor randn(c10::IntArrayRef shape, const DeviceMesh& mesh, Placements placements,
                          at::TensorOptions options = {});
TESSERA_API DTensor randint(int64_t low, int64_t high, c10::IntArrayRef shape, const DeviceMesh& mesh,
                            Placements placements, at::TensorOptions options = {});
TESSERA_API DTensor randperm(int64_t n, const DeviceMesh& mesh, Placements placements,
                             at::TensorOptions options = {});

}  // namespace tessera
