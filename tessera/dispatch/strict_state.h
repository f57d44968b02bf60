#pragma once

#include <tessera/dispatch/strict.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/redistribute/plan.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace tessera {

/// What a Strict looks at, and what it has seen. Of one thread.
class Strict::State {
 public:
  explicit State(StrictOptions given) : options(std::move(given)) {}

  /// Whether it looks at what moves so many bytes along these mesh dims.
  bool concerns(const DeviceMesh& mesh, c10::ArrayRef<int64_t> mesh_dims, int64_t bytes) const;
  /// Whether it looks at such a redistribution.
  bool concerns(const Plan& plan) const;
  /// Returns whether it is the first of its kind at its location.
  bool count(ImplicitMove move);
  const std::vector<ImplicitMove>& moves() const { return moves_; }

  const StrictOptions options;

 private:
  std::map<std::tuple<std::string, std::string, std::string>, size_t> index_;  // of call, what and location
  std::vector<ImplicitMove> moves_;
};

}  // namespace tessera
