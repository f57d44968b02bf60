#pragma once

#include <tessera/dispatch/guards.h>
#include <tessera/export.h>
#include <tessera/placement/placement.h>
#include <tessera/thread_scope.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct StrictOptions {
  /// `allowed` only counts; `warned` warns once per line of the program.
  ImplicitCommunication level = ImplicitCommunication::forbidden;
  /// Look also at slices and other changes of placement that move nothing.
  bool local = false;
  /// Look only at what moves along one of these mesh dims, by name or by position ("0"); without any, along all.
  std::vector<std::string> mesh_dims = {};
  /// Look only at redistributions by which the busiest rank receives more than so many bytes.
  int64_t above = 0;
};

/// Something that an operator did of its own accord.
struct ImplicitMove {
  std::string call;      // "aten::mm(f32[2048,256] [S(0)], f32[256,64] [R]) on mesh(2)"
  std::string what;      // "argument 'mat2' has to be redistributed from ..."
  std::string location;  // where the program called it, "train.py:12"; empty where that is not known
  int64_t calls = 0;
  int64_t bytes = 0;  // received by the busiest rank in all calls, as far as that is known
};

/// An ImplicitCommunicationGuard that says what it looks at, and counts it. An error or warning shows the operator with its
/// arguments, what would move, and the line of code that says so explicitly. What is asked for by name, as
/// redistribute(), is always allowed.
///
///   const Strict strict;                                                        // all of it is an error
///   const Strict large({.above = 1 << 20});                                     // what moves more than 1 MiB
///   const Strict warn({.level = ImplicitCommunication::warned, .mesh_dims = {"tp"}});
///
/// If several are alive, the innermost one says what is looked at and counts it; the innermost guard of either kind says
/// the level. Without any, TESSERA_STRICT in the environment does: 1 or "forbid", "warn", or 0; the same on all ranks.
///
/// Distributed kernels (a halo, a sort) do not say beforehand what they move: they count as more than any
/// `above`, along all mesh dims.
class TESSERA_API Strict {
 public:
  explicit Strict(StrictOptions options = {});
  ~Strict();
  Strict(const Strict&) = delete;
  Strict& operator=(const Strict&) = delete;

  const StrictOptions& options() const;
  /// What was looked at while this was the innermost one, in the order of its first call.
  const std::vector<ImplicitMove>& moves() const;
  /// Of all of them.
  int64_t calls() const;
  int64_t bytes() const;

  class State;
  /// Of the innermost one of the calling thread, or of its guards without one; null if everything is allowed and
  /// nobody counts.
  static State* current();

 private:
  const std::unique_ptr<State> state_;
  const ImplicitCommunicationGuard guard_;
  const ThreadScope<State*, Strict> scope_;
};

/// How a host language says where the program is now, and writes code in messages.
struct HostLanguage {
  /// "train.py:12"; empty if that is not known.
  std::string (*location)() = nullptr;
  /// "x = x.redistribute(placements=[Shard(0)])"
  std::string (*redistribute)(const std::string& name, const Placements& placements) = nullptr;
};
/// Set once, before operators are called. Without it, code is C++.
TESSERA_API void set_host_language(HostLanguage language);
TESSERA_API const HostLanguage& host_language();

}  // namespace tessera
