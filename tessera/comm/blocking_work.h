#pragma once

#include <tessera/comm/parcel.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

/// The error of those who waited for a rank that failed, went away or never came.
class PeerError : public c10::Error {
 public:
  explicit PeerError(std::string message) : c10::Error(std::move(message), nullptr) {}
};

/// Work that is carried out by who waits for it. It can be waited for from several threads, and is then finished once:
/// done, or failed with an error.
class BlockingWork : public c10d::Work {
 public:
  BlockingWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
      : c10d::Work(rank, type), results_(std::move(results)) {}

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override { return is_finished() || is_ready(); }
  bool isSuccess() const override { return is_finished() && !exception_; }
  std::exception_ptr exception() const override { return is_finished() ? exception_ : nullptr; }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  /// Carries the work out first: there is no thread of ours that could complete the future later.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  /// Throws if it fails. `timeout`: kNoTimeout for that of the call.
  virtual void complete(std::chrono::milliseconds timeout) = 0;
  virtual bool is_ready() = 0;

 private:
  bool is_finished() const {
    std::lock_guard lock(mutex_);
    return completed_;
  }

  std::mutex waiting_;
  std::vector<at::Tensor> results_;
};

/// Several at once.
class AllOfWork final : public BlockingWork {
 public:
  AllOfWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : BlockingWork(rank, c10d::OpType::COALESCED, {}), works_(std::move(works)) {}

 protected:
  void complete(std::chrono::milliseconds timeout) override;
  bool is_ready() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace tessera::comm
