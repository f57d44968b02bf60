#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// A store that keeps nobody waiting for ever. libtorch's waits without a limit for the process that keeps the data to answer,
/// and that may be stopped.
///
/// Each call asks the given store on a thread of its own. It throws c10::DistStoreError if there is no answer within the given
/// store's timeout and `kStorePatience`, and at once while an earlier call has no answer. It throws whatever `check` throws, which it
/// calls every 20 ms: who would answer may have failed.
class PatientStore final : public c10d::Store {
 public:
  PatientStore(c10::intrusive_ptr<c10d::Store> store, std::function<void()> check);

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& current,
                                  const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;

 private:
  template <class Question>
  auto ask(std::chrono::milliseconds timeout, Question question);
  template <class Question>
  auto ask(Question question);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void()> check_;
  const std::shared_ptr<std::atomic<int>> unanswered_;  // calls that were given up and still wait
};

}  // namespace tessera::comm
