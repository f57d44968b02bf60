#pragma once

#include <tessera/comm/call_backend.h>
#include <tessera/comm/parcel.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace tessera {

/// How one member of a group posts collectives and messages, and carries them out: what a transport from memory to memory
/// has to do. Safe to use from several threads, except that they post one after the other: the collectives of a group have an
/// order, which is the same on all its ranks.
class Poster {
 public:
  using Milliseconds = std::chrono::milliseconds;

  virtual ~Poster() = default;

  /// Posts the next collective of this member and returns its sequence number: 1, 2, ...
  virtual uint64_t post(comm::CollectiveCall call, Milliseconds timeout) = 0;
  /// Waits for collective `number`, which `what` describes. Throws what went wrong if it, or the group, failed.
  virtual void wait(uint64_t number, Milliseconds timeout, c10::function_ref<std::string()> what) = 0;
  /// Whether collective `number` is done; helps if it can be.
  virtual bool poll(uint64_t number) = 0;

  virtual std::shared_ptr<comm::Parcel> send(int64_t to, int tag, const at::Tensor& tensor) = 0;
  /// `from` may be kAnySource.
  virtual std::shared_ptr<comm::Parcel> receive(int64_t from, int tag, const at::Tensor& tensor) = 0;
  /// Waits until the parcel is delivered. Throws if the two sides do not match, the peer has ended or `timeout` is over;
  /// then the parcel is taken back and its tensor is not touched any more. `is_final`: nothing else is tried after.
  virtual void wait(const std::shared_ptr<comm::Parcel>& parcel, bool sending, Milliseconds timeout,
                    bool is_final) = 0;
  virtual bool poll(const comm::Parcel& parcel) = 0;

  /// Makes all present and future waits of the group fail.
  virtual void abort() = 0;
  /// This member takes part in nothing more.
  virtual void leave() = 0;
};

/// A backend that moves tensors of the CPU by itself, from memory to memory: it takes every dtype, reduction and size. Its
/// calls post what is to be done and return; waiting for their work carries it out.
class PostingBackend final : public CallBackend {
 public:
  PostingBackend(std::string name, std::shared_ptr<Poster> poster, int64_t member, int64_t size,
                 std::chrono::milliseconds timeout);
  ~PostingBackend() override;

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  void abort() override { poster_->abort(); }
  void shutdown() override { poster_->leave(); }

  void startCoalescing() override;
  Work endCoalescing() override;

  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return last_; }

 private:
  Work submit(comm::CallBuilder& builder, c10d::OpType type, Tensors results,
              std::chrono::milliseconds timeout, Forward forward) override;
  comm::CallBuilder::Content content() const override { return comm::CallBuilder::Content::data; }

  Work track(Work work);
  Work receive(const Tensors& tensors, int64_t from, int tag, c10d::OpType type);
  void check_dense_cpu(const at::Tensor& tensor, const char* what) const;
  const at::Tensor& checked_message(const Tensors& tensors, const char* what, int64_t peer) const;

  const std::string name_;
  const std::shared_ptr<Poster> poster_;
  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> last_ = 0;
  bool coalescing_ = false;
  std::vector<Work> coalesced_;
};

}  // namespace tessera
