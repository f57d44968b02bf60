#pragma once

#include <tessera/comm/call_backend.h>
#include <tessera/comm/threads/hub.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tessera::threads {

/// The c10d backend of ranks that are threads of one process. One object per member of a group.
/// Collectives return at once; waiting on their work carries them out. See GroupCollectives.
class ThreadsBackend final : public CallBackend {
 public:
  ThreadsBackend(std::shared_ptr<MeetingPoint> point, int64_t member, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  void abort() override;

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

  const std::shared_ptr<MeetingPoint> point_;
  const int64_t member_;
  std::chrono::milliseconds timeout_;
  uint64_t last_ = 0;
  bool coalescing_ = false;
  std::vector<Work> coalesced_;
};

}  // namespace tessera::threads
