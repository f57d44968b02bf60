#include <tessera/comm/monitor.h>
#include <tessera/comm/patient_store.h>

#include <future>
#include <thread>
#include <type_traits>

#include <c10/util/ScopeExit.h>

namespace tessera::comm {

using std::chrono::milliseconds;

namespace {

enum class AskState { kWaits, kAnswered, kGivenUp };

}  // namespace

PatientStore::PatientStore(c10::intrusive_ptr<c10d::Store> store, std::function<void()> check)
    : store_(std::move(store)),
      check_(std::move(check)),
      unanswered_(std::make_shared<std::atomic<int>>(0)) {}

/// What `question` returns or throws, which owns all that it needs: it may outlive this call.
template <class Question>
auto PatientStore::ask(milliseconds timeout, Question question) {
  constexpr const char* kStopped = "The process that keeps the store may be stopped.";
  TORCH_CHECK_WITH(DistStoreError, *unanswered_ <= 0, "The store has not answered an earlier call. ",
                   kStopped);
  const auto state = std::make_shared<std::atomic<AskState>>(AskState::kWaits);
  using Answer = std::invoke_result_t<Question, c10d::Store&>;
  std::packaged_task<Answer()> task(
      [question = std::move(question), store = store_, state, unanswered = unanswered_] {
        const auto done = c10::make_scope_exit([&] {
          if (state->exchange(AskState::kAnswered) == AskState::kGivenUp) --*unanswered;
        });
        return question(*store);
      });
  auto answer = task.get_future();
  std::thread([task = std::move(task)]() mutable { task(); }).detach();
  const auto give_up = c10::make_scope_exit([&] {
    if (state->exchange(AskState::kGivenUp) == AskState::kWaits) ++*unanswered_;
  });
  const auto deadline = std::chrono::steady_clock::now() + timeout + kStorePatience;
  while (answer.wait_for(milliseconds(20)) != std::future_status::ready) {
    check_();
    TORCH_CHECK_WITH(DistStoreError, std::chrono::steady_clock::now() < deadline,
                     "The store did not answer within ", timeout.count(), " ms. ", kStopped);
  }
  return answer.get();
}

template <class Question>
auto PatientStore::ask(Question question) {
  return ask(getTimeout(), std::move(question));
}

c10::intrusive_ptr<c10d::Store> PatientStore::clone() {
  return c10::make_intrusive<PatientStore>(ask([](Store& store) { return store.clone(); }), check_);
}

void PatientStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask([key, value](Store& store) { store.set(key, value); });
}

std::vector<uint8_t> PatientStore::compareSet(const std::string& key, const std::vector<uint8_t>& current,
                                              const std::vector<uint8_t>& value) {
  return ask([key, current, value](Store& store) { return store.compareSet(key, current, value); });
}

std::vector<uint8_t> PatientStore::get(const std::string& key) {
  return ask([key](Store& store) { return store.get(key); });
}

int64_t PatientStore::add(const std::string& key, int64_t value) {
  return ask([key, value](Store& store) { return store.add(key, value); });
}

bool PatientStore::deleteKey(const std::string& key) {
  return ask([key](Store& store) { return store.deleteKey(key); });
}

bool PatientStore::check(const std::vector<std::string>& keys) {
  return ask([keys](Store& store) { return store.check(keys); });
}

int64_t PatientStore::getNumKeys() {
  return ask([](Store& store) { return store.getNumKeys(); });
}

void PatientStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void PatientStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  ask(timeout, [keys, timeout](Store& store) { store.wait(keys, timeout); });
}

const milliseconds& PatientStore::getTimeout() const noexcept { return store_->getTimeout(); }

void PatientStore::setTimeout(const milliseconds& timeout) { store_->setTimeout(timeout); }

}  // namespace tessera::comm
