#pragma once

#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/operator_info.h>
#include <tessera/rules/rule.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

namespace tessera {

using torch::jit::Stack;

/// The same tensor, replicated on all mesh dims.
inline Spec replicated(const Spec& spec) { return spec.with_placements(replicated(spec.mesh())); }

/// What a plan depends on: the operator, the specs of its tensors, and the values of
/// the other arguments that its rule reads.
using CallKey = c10::SmallVector<uint64_t, 14>;

/// A distributed tensor among the arguments of a call.
struct DistributedArgument {
  uint32_t position;  // among the arguments
  bool written;
  bool in_list;
  bool moved = false;  // `local` does not share the tensor's memory
  at::Tensor tensor;   // the distributed one
  at::Tensor local;    // what the operator gets instead

  DTensorImpl& impl() const { return *static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl()); }
  const Spec& spec() const { return impl().spec(); }
};

/// The arguments of one call, which lie on the stack: one pass finds the distributed tensors among them and
/// forms the key of the call.
class Arguments {
 public:
  Arguments(const OperatorInfo& info, const ResolvedRule& resolved, Stack& stack)
      : info_(info),
        resolved_(resolved),
        stack_(stack),
        first_(stack.size() - info.schema.arguments().size()) {}

  c10::IValue& operator[](size_t position) { return stack_[first_ + position]; }
  const c10::IValue& operator[](size_t position) const { return stack_[first_ + position]; }
  /// All of them, as they are on the stack.
  Stack values() const { return Stack(begin(), stack_.end()); }

  /// The pass. Distributed tensors, but those in lists, are taken from the stack. Plain tensors with dims
  /// that are the same on all ranks become distributed ones, which are replicated.
  void collect() {
    collect_given();
    if (!with_dims_.empty()) [[unlikely]]
      replicate_plain();
  }

  /// After the pass: what a plan depends on.
  const CallKey& key() const { return key_; }
  /// After the pass: the distributed tensors in order, those in lists too.
  c10::SmallVector<DistributedArgument, 4>& distributed() { return distributed_; }
  const c10::SmallVector<DistributedArgument, 4>& distributed() const { return distributed_; }
  /// Whether a plain tensor is written, as implicit replication allows.
  bool writes_plain() const { return writes_plain_; }
  /// Whether a distributed tensor is written.
  bool writes() const;

  /// Brings scalar tensors on other meshes than that of the first tensor with dims there, and passes over the
  /// arguments again. Lists that are worked on item by item are left alone. Returns whether there were any.
  bool unify_meshes();

  /// All of them, with the distributed tensors where they were taken from.
  Stack with_tensors() const;
  /// What a rule is asked about. `all`: what with_tensors() gave; must live as long.
  rules::OpCall call(const Stack& all) const;
  /// Puts the distributed tensors back where they were taken from.
  void restore();
  /// Puts local tensors where the distributed ones were.
  void substitute_locals();

  /// Takes all of them from the stack.
  Stack take();
  /// Puts results in their place.
  void replace_by(Stack results);

 private:
  Stack::iterator begin() const { return stack_.begin() + static_cast<std::ptrdiff_t>(first_); }

  void collect_given();
  void add(size_t position, const at::Tensor& tensor);
  void add_distributed(size_t position, at::Tensor tensor, bool in_list);
  void add_other(size_t position, const at::Tensor& tensor);
  void add_value(const c10::IValue& value);
  void replicate_plain();
  void check_plain(size_t position, const at::Tensor& tensor) const;
  bool may_be_plain(size_t position, const at::Tensor& tensor) const;
  template <class Replace>
  void collect_again(c10::ArrayRef<size_t> positions, const Replace& replacement);

  const OperatorInfo& info_;
  const ResolvedRule& resolved_;
  Stack& stack_;
  const size_t first_;
  CallKey key_;
  c10::SmallVector<DistributedArgument, 4> distributed_;
  c10::SmallVector<size_t, 1> with_dims_;  // positions of plain tensors that have dims and are read
  bool writes_plain_ = false;
};

}  // namespace tessera
