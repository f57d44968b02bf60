#pragma once

#include <tessera/rules/rule.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>

/// What is known of an operator before it is called.
namespace tessera {

/// What depends on the rules that are registered.
struct ResolvedRule {
  uint64_t version;         // of the registry
  const rules::Rule* rule;  // or null
  std::vector<bool> reads;  // by argument: whether the rule does

  bool is_itemwise() const { return rule && rule->itemwise; }
};

/// One for each operator; calls on all threads read it.
class OperatorInfo {
 public:
  explicit OperatorInfo(const c10::OperatorHandle& handle);
  OperatorInfo(const OperatorInfo&) = delete;
  OperatorInfo& operator=(const OperatorInfo&) = delete;

  const c10::OperatorHandle op;
  const c10::FunctionSchema& schema;
  const std::string name;  // "aten::add.Tensor"
  const bool is_random;
  const bool is_pointwise;
  const bool is_composite;       // computed by other operators, and without a rule of its own
  const bool reshapes_in_place;  // t_, squeeze_, ...
  const bool reallocates;        // resize_, set_, ...
  const bool is_as_strided;
  const bool is_cast;
  c10::DispatchKeySet autocast;     // keys at which autocast casts its arguments
  std::optional<size_t> generator;  // the position of the argument that is one
  bool has_out = false;
  bool has_views = false;
  std::vector<bool> written;               // by argument
  std::vector<bool> is_list;               // by argument: a list, of tensors or not
  std::vector<bool> has_holes;             // by argument: a list of tensors that may be missing
  std::vector<int64_t> returned_argument;  // by result: the argument written and returned as it, or -1
  std::vector<bool> is_view;               // by result

  mutable std::atomic<uint64_t> fallbacks{0};      // calls by the replicated fallback
  mutable std::atomic<uint64_t> layout_copies{0};  // results that did not lie in memory as their spec says

  const std::string& argument_name(size_t position) const { return schema.arguments()[position].name(); }

  /// The rule as of now. The reference is good until the end of the process.
  const ResolvedRule& resolved() const {
    const ResolvedRule* known = resolved_.load(std::memory_order_acquire);
    if (known && known->version == rules::registry_version()) [[likely]]
      return *known;
    return resolve();
  }

  /// The operator that returns new tensors instead of writing into arguments; null if there is none.
  const c10::OperatorHandle* functional() const;

 private:
  const ResolvedRule& resolve() const;
  const rules::Rule* find_rule() const;
  std::optional<c10::OperatorHandle> find_functional() const;

  mutable std::atomic<const ResolvedRule*> resolved_{nullptr};
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const ResolvedRule>> kept_;
  mutable bool searched_functional_ = false;
  mutable std::optional<c10::OperatorHandle> functional_;
};

}  // namespace tessera
