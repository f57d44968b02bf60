#pragma once

#include <tessera/comm/world.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

/// The ranks that save or load together: those of the current world; where there is none, this process alone.
/// They have a group of their own, so that a thread that writes in the background may use them while the rank
/// computes.
class Peers {
 public:
  /// Collective the first time. What may be under way at the same time needs different purposes.
  explicit Peers(const std::string& purpose);
  ~Peers();
  Peers(Peers&&) noexcept;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  /// Each rank's bytes, by rank. Collective.
  std::vector<std::string> all_gather(const std::string& mine) const;
  /// What rank 0 has, on every rank. Collective.
  std::string broadcast(const std::string& bytes) const;
  /// received[r] = rank r's sent[this rank]: byte tensors whose sizes both sides know. Collective.
  void exchange(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) const;

  /// Names and texts, the same names on every rank that has the same task.
  using Options = std::vector<std::pair<std::string, std::string>>;
  /// Calls `work`, as `together` does. Throws on every rank unless all came for the same `task`, with the same options.
  /// Collective.
  void agree(const std::string& task, const Options& options, const std::string& what,
             const std::function<void()>& work) const;
  void agree(const std::string& task, const Options& options) const {
    agree(task, options, "To " + task, [] {});
  }

  /// Calls `work`. If it threw on any rank, throws on every rank, saying `what` failed, on which rank and why.
  /// Collective.
  void together(const std::string& what, const std::function<void()>& work) const;
  /// The same, with what it returned on each rank, by rank.
  std::vector<std::string> gather_together(const std::string& what,
                                           const std::function<std::string()>& work) const;

 private:
  int64_t rank_ = 0;
  int64_t size_ = 1;
  std::shared_ptr<World> world_;
  Group group_;
};

}  // namespace tessera::checkpoint
