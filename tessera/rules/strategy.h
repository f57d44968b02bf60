#pragma once

#include <tessera/export.h>
#include <tessera/placement/spec.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

/// What a sharding rule is asked, and what it answers: pure metadata, without any rank. Rules speak of one mesh
/// dim at a time. That everything may be replicated goes without saying.
namespace tessera::rules {

using Stack = torch::jit::Stack;

/// Sizes, strides or dims.
using Shape = std::vector<int64_t>;

/// One call of an operator.
struct TESSERA_API OpCall {
  const c10::FunctionSchema* schema = nullptr;
  /// The distributed tensors, in order, those in lists too. Plain tensors with dims count as replicated ones;
  /// plain scalar tensors are not among these.
  std::vector<Spec> tensors = {};
  std::vector<uint32_t> positions = {};       // of each, among the arguments; ascending
  std::vector<bool> written = {};             // which are written in place
  c10::ArrayRef<c10::IValue> arguments = {};  // all; tensors among them may be missing
  /// The names of the arguments that may be asked for; null: all.
  const std::vector<std::string>* readable = nullptr;

  /// The position of an argument, or nothing if the operator has none of that name.
  std::optional<size_t> position(std::string_view name) const;
  /// The tensor given for an argument: its index in `tensors`. Nothing if it was left out, or is plain.
  std::optional<size_t> tensor(std::string_view name) const;
  /// The name of the argument that tensor `index` was given for.
  const std::string& name_of(size_t index) const;

  /// Whether the operator has that argument and it was not left out.
  bool has(std::string_view name) const;
  /// Values of arguments that are not tensors. Throws unless the rule says that it reads them: what it reads
  /// is part of the key under which op plans are cached.
  const c10::IValue& value(std::string_view name) const;
  int64_t integer(std::string_view name) const { return value(name).toInt(); }
  bool flag(std::string_view name) const { return value(name).toBool(); }
  /// Empty if left out.
  std::vector<int64_t> integers(std::string_view name) const;
};

/// One valid way to place all tensors of a call on one mesh dim.
struct Strategy {
  Placements inputs;   // of each of the call's tensors
  Placements outputs;  // of each result; one alone is meant for all
  /// If not 0: the number of shards that all mesh dims together make of the dims concerned must divide this.
  int64_t divisor = 0;
  /// Each rank must hold one contiguous range of what is sharded: no strided shards.
  bool contiguous = false;
  /// Partial() stands for any partial placement, the same for all that are.
  bool any_partial = false;
  /// If not -1: on this mesh dim alone.
  int64_t mesh_dim = -1;
  bool operator==(const Strategy&) const = default;
};

/// The global shape and strides of a result. Sizes of dims that are never sharded may be kLocal: as the local
/// result has them. Without strides: contiguous. Strides follow from the inputs' global strides alone, never
/// from a local tensor: formulas of autograd choose by strides, and all ranks must choose alike.
inline constexpr int64_t kLocal = -1;
struct Result {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides = {};
};

/// The specs of a call once its strategies are chosen.
struct ChosenSpecs {
  std::vector<Spec> inputs;
  std::vector<Spec> outputs;  // undefined where the shape was not known; dtype: of the first input
  ShardOrder order = {};      // in which mesh dims shard, of all of them
};

/// The tensor that an operator is about: its first argument, which most call "self".
inline const at::Tensor& self_tensor(const Stack& arguments) { return arguments[0].toTensor(); }

/// From all arguments of an operator to all its results.
using Function = std::function<Stack(const c10::OperatorHandle& op, Stack arguments)>;

/// What a rank computes, where that is not the operator with the same arguments.
struct LocalCall {
  /// Arguments, by position, that are replaced by values of this rank.
  std::vector<std::pair<size_t, c10::IValue>> arguments = {};
  /// Called on local tensors instead of the operator. If it communicates, `communicates` must say so.
  Function compute = {};
  bool communicates = false;
  /// Output sizes depend on the data: `compute` returns, after the outputs, the global shape of each.
  bool sized = false;
  /// `compute` writes into the arguments itself that the operator writes into.
  bool writes = false;
  /// Results of a view operator do not share the memory of its input.
  bool detached = false;
  /// Of these: writes the local view into the local input. Called by all ranks. Without it all is gathered.
  std::function<void(const at::Tensor& base, const at::Tensor& view)> write_back = {};
};
using Localize = std::function<LocalCall(const ChosenSpecs&)>;

/// What a rule says of a call.
struct Strategies {
  std::vector<Strategy> options;
  /// Global shapes of the results. Without any they follow from the options: a sharded dim is as large as the
  /// input's dim that is sharded in the same option, others are as the local result has them.
  std::vector<Result> results = {};
  /// What a rank computes, if not the operator with the same arguments. Called once for each op plan.
  Localize localize = {};
  /// Instead of all that: computed by other operators, on the distributed tensors themselves.
  Function decompose = {};
  /// `decompose` writes into the arguments itself that the operator writes into.
  bool writes = false;
};

}  // namespace tessera::rules
