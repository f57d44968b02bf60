#include <tessera/comm/blocking.h>
#include <tessera/comm/left_alone.h>
#include <tessera/comm/patient_store.h>
#include <tessera/comm/process_rank.h>
#include <tessera/comm/rpc.h>
#include <tessera/comm/waits.h>
#include <tessera/error.h>

#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>

#include <c10/util/ScopeExit.h>
#include <c10/util/irange.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace tessera::rpc {

namespace {

namespace torch_rpc = torch::distributed::rpc;
using Milliseconds = std::chrono::milliseconds;

/// What `init_rpc` made, as long as it lasts.
struct Session {
  std::shared_ptr<torch_rpc::TensorPipeAgent> agent;
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<World> world;
};

struct State {
  std::mutex mutex;
  std::optional<Session> session;
  int64_t next_session = 0;               // the least number that this rank has not tried
  std::atomic<bool> rrefs_ended = false;  // libtorch's RRefs work in the first session of a process only
};

State& state() {
  static auto& instance = *new State;  // may be asked by threads that outlive main
  return instance;
}

float seconds(Milliseconds timeout) {
  TESSERA_CHECK_VALUE(timeout.count() > 0, "rpc: the timeout must be positive, got ", timeout.count(),
                      " ms.");
  return std::chrono::duration<float>(timeout).count();
}

/// Throws what has failed in the world since, if anything has: then nobody needs to wait.
void check_world(const World& world) {
  const std::string failure = world.reported_failure();
  TESSERA_CHECK(failure.empty(), failure);
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The ranks that have not left word under `key` in the store within the timeout; that which keeps it, if it does not answer.
/// Throws if the world fails before.
std::vector<int64_t> wait_for_all(const StorePtr& store, const std::string& key, const World& world,
                                  Milliseconds timeout) {
  std::vector<std::string> keys;
  for (const int64_t rank : c10::irange(world.size())) keys.push_back(c10::str(key, "/", rank));
  const Blocking blocking;
  const Wait wait(world.rank(), [&] { return "for all ranks to leave word in the store at " + key; });
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<int64_t> absent;
  try {
    while (!store->check(keys) && std::chrono::steady_clock::now() < deadline) {
      check_world(world);
      std::this_thread::sleep_for(Milliseconds(2));
    }
    for (const int64_t rank : c10::irange(world.size())) {
      if (!store->check({keys[rank]})) absent.push_back(rank);
    }
  } catch (const c10::DistStoreError&) {
    return {0};
  }
  return absent;
}

/// Until it is done, or the world fails.
void wait_for(c10::ivalue::Future& future, const World& world) {
  const auto done = std::make_shared<std::promise<void>>();
  const auto is_done = done->get_future();
  future.addCallback([done](c10::ivalue::Future&) { done->set_value(); });
  while (is_done.wait_for(Milliseconds(50)) != std::future_status::ready) check_world(world);
}

std::shared_ptr<torch_rpc::RpcAgent> agent() {
  TESSERA_CHECK(is_initialized(),
                "RPC is not initialized in this process: call tessera::rpc::init_rpc() on all ranks first.");
  return torch_rpc::RpcAgent::getCurrentRpcAgent();
}

torch_rpc::WorkerInfo worker(const torch_rpc::RpcAgent& agent, int64_t rank) {
  for (const auto& worker : agent.getWorkerInfos()) {
    if (worker.id_ == rank) return worker;
  }
  TESSERA_CHECK_INDEX(false, "rpc: there is no worker of rank ", rank, ", only of ",
                      agent.getWorkerInfos().size(), " ranks.");
}

std::shared_ptr<torch::jit::Operator> operator_of(const std::string& name) {
  const size_t dot = name.find('.');
  const c10::OperatorName full(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
  auto op = torch::jit::findOperatorFor(full);
  TESSERA_CHECK_VALUE(op && name.rfind("aten::", 0) == 0, "rpc: there is no operator ", name,
                      " of the namespace aten.");
  return op;
}

std::unique_ptr<torch_rpc::TensorPipeAgent> make_agent(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::string& name, const World& world,
                                                       const Options& options) {
  const torch_rpc::TensorPipeRpcBackendOptions backend(
      options.threads, std::nullopt, std::nullopt, seconds(options.timeout), torch_rpc::kDefaultInitMethod);
  auto agent = std::make_unique<torch_rpc::TensorPipeAgent>(
      store, name, static_cast<torch_rpc::worker_id_t>(world.rank()), static_cast<int>(world.size()), backend,
      std::unordered_map<std::string, torch_rpc::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<torch_rpc::RequestCallbackNoPython>());
  agent->setTypeResolver(std::make_shared<torch_rpc::TypeResolver>([](const c10::QualifiedName& name) {
    return c10::StrongTypePtr(nullptr, torch::jit::ScriptTypeParser().parseType(name.qualifiedName()));
  }));
  return agent;
}

/// The number of a session, which is the same on all ranks that are in it. Each attempt has its own, and its
/// own keys in the store: what is left of one that failed is in nobody's way. The first rank opens them, one
/// after the other; the others join the one that is open, once.
class Attempt {
 public:
  Attempt(StorePtr store, const World& world, Milliseconds timeout)
      : store_(std::move(store)), opens_(world.rank() == 0) {
    int64_t& next = state().next_session;
    if (opens_) store_->set(kOpen, c10::str(next));
    number_ = opens_ ? next : wait_for(next, world, timeout);
    next = number_ + 1;
  }
  ~Attempt() {
    try {
      if (opens_) store_->deleteKey(kOpen);
    } catch (const std::exception&) {  // the store is gone
    }
  }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  int64_t number() const { return number_; }

 private:
  static constexpr const char* kOpen = "open";

  /// An open session of at least that number.
  int64_t wait_for(int64_t least, const World& world, Milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    store_->setTimeout(Milliseconds(1000));  // for what was there and is deleted before it is read
    const auto restore = c10::make_scope_exit([&] { store_->setTimeout(timeout); });
    while (std::chrono::steady_clock::now() < deadline) {
      check_world(world);
      try {
        const int64_t number = store_->check({kOpen}) ? std::stoll(store_->get_to_str(kOpen)) : -1;
        if (number >= least) return number;
      } catch (const std::exception&) {  // it was closed in between, or the store does not answer
      }
      std::this_thread::sleep_for(Milliseconds(10));
    }
    TESSERA_CHECK(false, "init_rpc: rank ", world.rank(), " waited ", timeout.count(),
                  " ms for ranks [0] to call it too, in vain.");
  }

  const StorePtr store_;
  const bool opens_;
  int64_t number_ = 0;
};

/// Throws unless all ranks are there, each with a name of its own. The first letter of what they leave in the
/// store says whether it is a name or why the rank cannot take part.
void meet(const StorePtr& store, const std::string& name, const World& world, Milliseconds timeout) {
  std::string word = "+" + name;
  try {
    const torch_rpc::WorkerInfo check(name, world.rank());
  } catch (const c10::Error& error) {
    word = c10::str("-", error.what_without_backtrace());
  }
  store->set(c10::str("name/", world.rank()), word);
  const auto missing = wait_for_all(store, "name", world, timeout);
  TESSERA_CHECK(missing.empty(), "init_rpc: rank ", world.rank(), " waited ", timeout.count(),
                " ms for ranks ", c10::IntArrayRef(missing), " to call it too, in vain.");
  std::map<std::string, int64_t> ranks;
  for (const int64_t rank : c10::irange(world.size())) {
    word = store->get_to_str(c10::str("name/", rank));
    const std::string text = word.substr(1);
    TESSERA_CHECK_VALUE(word[0] == '+', "init_rpc: rank ", rank, " cannot take part: ", text);
    const auto [first, is_new] = ranks.emplace(text, rank);
    TESSERA_CHECK_VALUE(is_new, "init_rpc: ranks ", first->second, " and ", rank, " are both called \"", text,
                        "\"; each rank needs a name of its own.");
  }
}

void end(torch_rpc::RpcAgent& agent) {
  agent.shutdown();
  torch_rpc::RpcAgent::setCurrentRpcAgent(nullptr);
}

/// All stop calling, then release what they refer to, then end the calls that takes.
void leave_together(const Session& session, Milliseconds timeout) {
  session.store->set(c10::str("done/", session.world->rank()), "");
  const auto missing = wait_for_all(session.store, "done", *session.world, timeout);
  TESSERA_CHECK(missing.empty(), "rank ", session.world->rank(), " waited ", timeout.count(),
                " ms for ranks ", c10::IntArrayRef(missing), " to shut down too, in vain.");
  session.store->setTimeout(timeout);
  if (!state().rrefs_ended) torch_rpc::RRefContext::getInstance().delAllUsersAndUnforkedOwners(timeout);
  session.agent->join(/*shutdown=*/true);
}

}  // namespace

void init_rpc(const Options& options) {
  const auto world = current_world();
  if (world->is_threads()) return;
  seconds(options.timeout);
  TESSERA_CHECK_VALUE(options.threads > 0, "init_rpc: needs threads to answer with, got ", options.threads,
                      ".");
  TESSERA_CHECK(world->size() <= std::numeric_limits<torch_rpc::worker_id_t>::max(),
                "init_rpc: libtorch's RPC has room for ", std::numeric_limits<torch_rpc::worker_id_t>::max(),
                " ranks, not for ", world->size(), ".");
  const std::string name = options.name.empty() ? c10::str("worker", world->rank()) : options.name;
  const Blocking blocking;
  const std::lock_guard lock(state().mutex);
  if (is_initialized()) {
    const auto& self = torch_rpc::RpcAgent::getCurrentRpcAgent()->getWorkerInfo();
    TESSERA_CHECK(self.id_ == world->rank() && (options.name.empty() || self.name_ == options.name),
                  "init_rpc: this process already is worker ", self.id_, ", \"", self.name_,
                  "\"; it cannot also be worker ", world->rank(), ", \"", name,
                  "\". Call tessera::rpc::shutdown() first.");
    return;
  }
  const c10::intrusive_ptr<c10d::Store> common = world->group()->getStore();
  TESSERA_CHECK(common, "init_rpc: the world has no store by which its ranks could find one another.");
  Session session;
  session.world = world;
  // A connection of its own, so that waiting there hinders nobody.
  const auto copy = ask_for_at_most(options.timeout, [common] { return common->clone(); });
  TESSERA_CHECK(copy, "init_rpc: rank ", world->rank(), " waited ", options.timeout.count(),
                " ms for the store to answer, in vain. The process that keeps it may be stopped.");
  (*copy)->setTimeout(options.timeout);
  const auto patient = c10::make_intrusive<comm::PatientStore>(*copy, [world] { check_world(*world); });
  const auto store = c10::make_intrusive<c10d::PrefixStore>("tessera/rpc", patient);
  const Attempt attempt(store, *world, options.timeout);
  session.store = c10::make_intrusive<c10d::PrefixStore>(c10::str(attempt.number()), store);
  meet(session.store, name, *world, options.timeout);

  torch::distributed::autograd::DistAutogradContainer::init(world->rank());
  session.agent = make_agent(session.store, name, *world, options);
  torch_rpc::RpcAgent::setCurrentRpcAgent(session.agent);
  try {
    session.agent->start();
  } catch (...) {
    end(*session.agent);
    throw;
  }
  state().session = std::move(session);
}

void shutdown(bool graceful, Milliseconds timeout) {
  seconds(timeout);
  const Blocking blocking;
  const std::lock_guard lock(state().mutex);
  if (!state().session) {
    TESSERA_CHECK(!is_initialized(),
                  "rpc::shutdown: RPC was not initialized by tessera::rpc::init_rpc; end it where it was.");
    return;
  }
  const Session session = *std::exchange(state().session, std::nullopt);
  std::string error;
  if (graceful) {
    try {
      leave_together(session, timeout);
    } catch (const c10::Error& failure) {
      error = failure.what_without_backtrace();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  torch_rpc::RRefContext::destroyInstance();
  state().rrefs_ended = true;
  end(*session.agent);
  TESSERA_CHECK(error.empty(), "rpc::shutdown: ", error, " This rank's RPC has been shut down.");
}

bool is_initialized() { return torch_rpc::RpcAgent::isCurrentRpcAgentSet(); }

std::string worker_name(int64_t rank) { return worker(*agent(), rank).name_; }

std::optional<int64_t> worker_rank(const std::string& name) {
  for (const auto& worker : agent()->getWorkerInfos()) {
    if (worker.name_ == name) return worker.id_;
  }
  return std::nullopt;
}

std::string why_not(const World& world) {
  if (!is_initialized()) return "RPC is not initialized; call tessera::rpc::init_rpc() on all ranks first";
  const auto agent = torch_rpc::RpcAgent::getCurrentRpcAgent();
  const auto& self = agent->getWorkerInfo();
  if (self.id_ != world.rank())
    return c10::str("its id in RPC (worker ", self.id_, ", \"", self.name_, "\") is not its rank");
  if (static_cast<int64_t>(agent->getWorkerInfos().size()) != world.size())
    return c10::str("RPC has ", agent->getWorkerInfos().size(), " workers, not one for each of the ",
                    world.size(), " ranks");
  return "";
}

c10::IValue rpc_sync(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments,
                     std::optional<Milliseconds> timeout) {
  const auto agent = rpc::agent();
  const auto to = worker(*agent, rank);
  const Milliseconds patience = timeout.value_or(agent->getRpcTimeout());
  torch_rpc::ScriptCall call(operator_of(op), std::move(arguments));
  const Blocking blocking;
  const Wait wait(agent->getWorkerInfo().id_,
                  [&] { return c10::str("for worker \"", to.name_, "\" to do ", op); });
  const auto future = agent->send(to, std::move(call).toMessage(), seconds(patience));
  const auto world = current_world();
  wait_for(*future, *world);
  if (!future->hasError())
    return torch_rpc::deserializeRespToIValue(*future->value().toCustomClass<torch_rpc::Message>());
  const bool is_late = torch_rpc::getRPCErrorType(*future) == torch_rpc::RPCErrorType::TIMEOUT;
  TESSERA_CHECK(!is_late, "The worker \"", to.name_, "\" did not answer within ", patience.count(), " ms.");
  std::string reason = future->tryRetrieveErrorMessage();
  // The connection has ended, not the call: the news of why comes in a moment.
  if (reason.find("tensorpipe") != std::string::npos && world->process_rank()) {
    const auto monitor = world->process_rank()->monitor();
    const std::string failure = monitor ? monitor->wait_for_failure(Milliseconds(1000), {rank}) : "";
    if (!failure.empty()) reason = failure;
  }
  reason.resize(std::min(reason.size(), reason.find("\nException raised from")));  // the other's stack trace
  TESSERA_CHECK(false, "The call of worker \"", to.name_, "\" failed: ", reason);
}

void notify(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments) noexcept {
  try {
    if (!is_initialized()) return;
    const auto agent = rpc::agent();
    agent->send(worker(*agent, rank),
                torch_rpc::ScriptCall(operator_of(op), std::move(arguments)).toMessage());
  } catch (const std::exception&) {  // RPC ends, or the other has ended
  }
}

RRef remote(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments,
            std::optional<Milliseconds> timeout) {
  const auto agent = rpc::agent();
  const auto to = worker(*agent, rank);
  const auto known = operator_of(op);
  TESSERA_CHECK(
      !state().rrefs_ended,
      "rpc::remote: RPC was shut down and initialized again in this process, and libtorch's RRefs do not "
      "outlive the first time. Use rpc_sync.");
  auto& context = torch_rpc::RRefContext::getInstance();
  auto rref = context.createUserRRef(to.id_, known->schema().returns()[0].type());
  torch_rpc::ScriptRemoteCall call(known, std::move(arguments), rref->rrefId(), rref->forkId());
  const auto future =
      agent->send(to, std::move(call).toMessage(), seconds(timeout.value_or(agent->getRpcTimeout())));
  rref->registerOwnerCreationFuture(future);
  context.addPendingUser(rref->forkId(), rref);
  future->addCallback([fork = rref->forkId()](torch_rpc::JitFuture& done) {
    torch_rpc::callback::confirmPendingUser(done, fork);
  });
  return rref;
}

}  // namespace tessera::rpc
