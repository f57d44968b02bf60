#pragma once

#include <tessera/comm/asked.h>
#include <tessera/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

/// The calls of a collective by the ranks of a group, whether they match, and what has to be moved and
/// reduced to carry them out. Pure: no ranks, no threads, no transport.
namespace tessera::comm {

enum class Collective : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  barrier,
};

const char* name(Collective kind);
const char* name(c10d::ReduceOp::RedOpType op);

/// Elements in a row in memory.
struct Buffer {
  std::byte* data = nullptr;  // null where only sizes are compared
  int64_t elements = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  uint64_t shape = 0;  // a hash; equal shapes have equal ones
};

/// One rank's side of a collective over n ranks. With k tensors at once (k > 1: coalesced), part j of
/// tensor i stands at i * n + j:
///
///                    in                          out
///   all_reduce       k tensors                   the same k
///   reduce           k tensors                   the same k (root alone is written)
///   broadcast        k tensors (root's is read)  the same k (others are written)
///   all_gather       k tensors                   k * n parts, or k joined
///   reduce_scatter   k * n parts, or k joined    k tensors
///   all_to_all       n parts                     n parts
///   gather           1 tensor                    n parts at the root, else none
///   scatter          n parts at the root         1 tensor
///   barrier          none                        none
///
/// A joined buffer holds the parts of all ranks one after the other; their sizes are the peers'.
struct CollectiveCall {
  Collective kind = Collective::barrier;
  bool joined = false;
  int64_t root = -1;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  double factor = 1;  // of PREMUL_SUM
  c10::SmallVector<Buffer, 4> in;
  c10::SmallVector<Buffer, 4> out;

  /// What keeps the memory alive until the collective is done.
  c10::SmallVector<at::Tensor, 2> tensors;
  /// The description of a call whose tensors are not here (the call of another process).
  std::string text;
  /// What the user called, if all ranks must have called it alike. One that refuses makes a barrier.
  Asked asked;
  /// The operator that the call is made for, if it is: "aten::mm".
  const std::string* within = nullptr;
};

/// "all_reduce(sum, Float[3, 4]) in aten::mm": for errors.
std::string describe(const CollectiveCall& call);

/// Every target becomes the reduction of the sources, in their order, element by element; with one source: a
/// copy.
struct Task {
  int64_t elements = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  uint32_t first_source = 0, sources = 0;  // in CollectivePlan::pointers
  uint32_t first_target = 0, targets = 0;
};

struct CollectivePlan {
  std::vector<Task> tasks;  // none is empty
  std::vector<std::byte*> pointers;
  std::vector<uint32_t> owners;  // of the pointers: members
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  double factor = 1;

  void clear();
};

/// Makes `result` the plan that carries out the calls of all ranks of a group; calls[i] is member i's.
/// Throws if ranks asked for different things, one refuses, or they do not match: another collective, dtype,
/// shape, root or reduction, or a part whose sender and receiver disagree on its size. The error shows both
/// sides, and names member i by its world rank `members[i]`.
void make_plan(std::span<const CollectiveCall> calls, std::span<const int64_t> members,
               CollectivePlan& result);

/// Whether a tensor is contiguous and its memory holds its values: not their conjugates or negatives.
bool is_plain(const at::Tensor& tensor);
/// The tensor, or a plain copy of it.
at::Tensor plain(const at::Tensor& tensor);

/// Turns the tensors of a c10d call into a CollectiveCall. Where an output is not plain, or an input and an
/// output share memory, the collective works on temporary tensors, and `take_copy_back` says what to copy
/// when it is done.
class CallBuilder {
 public:
  /// What calls contain: the addresses of the data, or sizes only (then tensors are not touched at all).
  enum class Content { data, sizes };

  CallBuilder(Collective kind, Content content) : content_(content) { call_.kind = kind; }

  CallBuilder& root(int64_t root);
  CallBuilder& reduction(const c10d::ReduceOp& op);
  CallBuilder& joined();
  CallBuilder& in(const at::Tensor& tensor);
  CallBuilder& in(at::TensorList tensors);
  CallBuilder& out(const at::Tensor& tensor);
  CallBuilder& out(at::TensorList tensors);
  /// Read and written in place.
  CallBuilder& in_out(const at::Tensor& tensor);
  CallBuilder& in_out(at::TensorList tensors);
  /// Parts of `tensor` along its first dim; equal ones if `sizes` is empty.
  CallBuilder& in_parts(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t count);
  CallBuilder& out_parts(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t count);

  CollectiveCall build();

  /// (what the caller gave, what was written instead)
  using CopyBack = std::vector<std::pair<at::Tensor, at::Tensor>>;
  CopyBack take_copy_back() { return std::move(copy_back_); }

 private:
  Buffer buffer(const at::Tensor& contiguous);
  at::Tensor readable(const at::Tensor& tensor) const;
  at::Tensor writable(const at::Tensor& tensor, bool with_values);
  static void split(const at::Tensor& tensor, const Buffer& all, at::IntArrayRef sizes, int64_t count,
                    const char* side, c10::SmallVector<Buffer, 4>& parts);

  /// Gives an input and an output that share memory separate memory, so that the result does not depend on
  /// the order of reads and writes.
  void separate_overlaps();

  const Content content_;
  CollectiveCall call_;
  c10::SmallVector<at::Tensor, 2> outputs_;  // of call_.out, where those are not parts of a tensor
  CopyBack copy_back_;
};

}  // namespace tessera::comm
