// One rank comes to grief, in every way, at every kind of step, on processes (over gloo and over shared memory) and on threads: every other rank has an error,
// within a bound, that names the one; nothing is left behind, and the process can go on.
//
// `make faults` tries all of it; else a sample does, drawn by a seed.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/rpc.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <new>
#include <random>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/optim/sgd.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::spawn_ranks;
using Clock = std::chrono::steady_clock;

constexpr int64_t kRanks = 4;
constexpr std::chrono::milliseconds kTimeout(4000);

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowness = 4;
#else
constexpr int kSlowness = 1;
#endif

/// In what a process was told by the test.
std::string told(const char* name, const std::string& otherwise = "") {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

int64_t culprit() {
  static const int64_t rank = std::stoll(told("TESSERA_TEST_CULPRIT", "2"));
  return rank;
}
/// One that it exchanges messages with.
int64_t other() { return culprit() == 0 ? 1 : 0; }

// --- The ways ---------------------------------------------------------------------------------------------

struct Fault {
  std::string name;
  std::function<void()> strike;
  bool is_silent;                     // nobody hears of it: the others wait for their timeout
  bool ends_process;                  // else it works on threads too
  std::vector<std::string> named_as;  // what the others' error says of it: one of these
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all{
      {"kill", [] { ::raise(SIGKILL); }, false, true, {"was killed by signal 9"}},
      {"segfault",
       [] {
         std::signal(SIGSEGV, SIG_DFL);
         ::raise(SIGSEGV);
       },
       false,
       true,
       {"was killed by signal 11"}},
      {"stop", [] { ::raise(SIGSTOP); }, true, true, {"does not answer"}},
      {"exit", [] { std::_Exit(3); }, false, true, {"exited with code 3"}},
      {"throw",
       [] { throw std::runtime_error("the disk is full"); },
       false,
       false,
       {"failed: the disk is full"}},
      {"throw_int", [] { throw 7; }, false, false, {"failed: an exception that is not a std::exception"}},
      {"bad_alloc", [] { throw std::bad_alloc(); }, false, false, {"failed: std::bad_alloc"}},
      {"sleep",
       [] { std::this_thread::sleep_for(kTimeout * 2); },
       true,
       false,
       {"in no collective", "has never come", "so far"}},
      {"return", [] { throw Fault(); }, false, false, {"has ended"}},
  };
  return all;
}

// --- The steps --------------------------------------------------------------------------------------------

/// What a step works with.
struct Scene {
  Group group = current_world()->group();
  Group pair;  // of ranks 0 and 1, on these: without the culprit
  DeviceMesh mesh = init_device_mesh(at::kCPU, {kRanks});
  std::string directory;
  int turn = 0;
};

at::Tensor some(const DeviceMesh& mesh, const Placement& placement) {
  return distribute_tensor(at::arange(48, at::kFloat).view({8, 6}), mesh, {placement});
}

sharded::ChunkShardingSpec sharded_along(int64_t dim) {
  return {dim, {"rank:0/cpu", "rank:1/cpu", "rank:2/cpu", "rank:3/cpu"}};
}
sharded::ShardedTensor sharded_rows() { return sharded::shard_tensor(at::ones({8, 4}), sharded_along(0)); }

using Step = std::function<void(Scene&)>;

const std::map<std::string, Step>& steps() {
  static const std::map<std::string, Step> all{
      {"all_reduce", [](Scene& s) { comm::all_reduce(at::ones({100}), ReduceOp::SUM, s.group).wait(); }},
      {"all_reduce_large",
       [](Scene& s) { comm::all_reduce(at::ones({1 << 20}), ReduceOp::SUM, s.group).wait(); }},
      {"all_gather",
       [](Scene& s) { comm::all_gather_into(at::empty({400}), at::ones({100}), s.group).wait(); }},
      {"reduce_scatter",
       [](Scene& s) {
         comm::reduce_scatter_from(at::empty({100}), at::ones({400}), ReduceOp::SUM, s.group).wait();
       }},
      {"all_to_all",
       [](Scene& s) {
         comm::Tensors in, out;
         for (int i = 0; i < kRanks; ++i)
           in.push_back(at::ones({i + 1})), out.push_back(at::empty({get_rank() + 1}));
         comm::all_to_all(out, in, s.group).wait();
       }},
      {"broadcast",
       [](Scene& s) {
         comm::broadcast(at::ones({100}), culprit(), s.group).wait();
         comm::barrier(s.group).wait();
       }},
      {"reduce",
       [](Scene& s) {
         comm::reduce(at::ones({100}), ReduceOp::SUM, 0, s.group).wait();
         comm::barrier(s.group).wait();
       }},
      {"gather",
       [](Scene& s) {
         comm::Tensors out;
         if (get_rank() == 0) out.assign(kRanks, at::empty({3}));
         comm::gather(out, at::ones({3}), 0, s.group).wait();
         comm::barrier(s.group).wait();
       }},
      {"scatter",
       [](Scene& s) {
         comm::Tensors in;
         if (get_rank() == culprit()) in.assign(kRanks, at::ones({3}));
         comm::scatter(at::empty({3}), in, culprit(), s.group).wait();
         comm::barrier(s.group).wait();
       }},
      {"barrier", [](Scene& s) { comm::barrier(s.group).wait(); }},
      {"message",
       [](Scene& s) {
         if (get_rank() == culprit()) comm::send(at::ones({3}), other(), s.group).wait();
         if (get_rank() == other()) comm::recv(at::empty({3}), culprit(), s.group).wait();
         comm::barrier(s.group).wait();
       }},
      {"other_groups",
       [](Scene& s) {
         // Half of the ranks have nothing to do with the culprit, and hear of it nevertheless.
         do {
           comm::barrier(s.pair).wait();
         } while (s.turn == 2 && get_rank() < 2);
       }},
      {"new_group",
       [](Scene&) {
         comm::barrier(current_world()->group({3, 2, 1, 0}, at::kCPU)).wait();
       }},
      {"mesh",
       [](Scene&) {
         init_device_mesh(at::kCPU, {2, 2});
         comm::barrier(current_world()->group({1, 0, 3, 2}, at::kCPU)).wait();
       }},
      {"redistribute",
       [](Scene& s) {
         DTensor(some(s.mesh, Shard(0))).redistribute(Placements{Shard(1)});
         comm::barrier(s.group).wait();
       }},
      {"operator",
       [](Scene& s) {
         some(s.mesh, Shard(1)).softmax(1);
         comm::barrier(s.group).wait();
       }},
      {"backward",
       [](Scene& s) {
         const at::Tensor x = some(s.mesh, Shard(0)).requires_grad_(),
                          w = some(s.mesh, Replicate()).requires_grad_();
         (x.mul(w)).sum().backward();
         w.grad().sum().item<float>();
       }},
      {"optimizer",
       [](Scene& s) {
         const at::Tensor w = some(s.mesh, Shard(0)).requires_grad_();
         torch::optim::SGD optimizer({w}, 0.1);
         w.pow(2).sum().backward();
         optimizer.step();
         w.sum().item<float>();
       }},
      {"sharded_gather",
       [](Scene&) {
         sharded_rows().gather(0);
         comm::barrier(current_world()->group()).wait();
       }},
      {"reshard",
       [](Scene&) {
         sharded_rows().reshard(sharded_along(1));
         comm::barrier(current_world()->group()).wait();
       }},
      {"rpc",
       [](Scene& s) {
         rpc::Options options;
         options.timeout = kTimeout;
         rpc::init_rpc(options);
         if (get_rank() != culprit() && !current_world()->is_threads())
           rpc::rpc_sync(culprit(), "aten::neg", {at::ones({2})});
         comm::barrier(s.group).wait();
       }},
      {"save",
       [](Scene& s) {
         checkpoint::StateDict state;
         state["w"] = some(s.mesh, Shard(0));
         checkpoint::save(state, s.directory + "/step");
       }},
      {"load",
       [](Scene& s) {
         checkpoint::StateDict state;
         state["w"] = some(s.mesh, Shard(0));
         checkpoint::load(state, s.directory + "/first");
       }},
      {"shutdown", {}},
      {"init", {}},
  };
  return all;
}

/// The culprit is struck before the third time; the others are in it, or on the way to it. `is_during`: by another thread, while
/// all do nothing else.
void do_step(const std::string& name, const Fault& fault, const std::string& directory,
             bool is_during = false) {
  const bool is_culprit = get_rank() == culprit();
  Scene scene;
  scene.directory = directory;
  scene.pair = current_world()->group(
      get_rank() < 2 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{2, 3}, at::kCPU);
  if (name == "load") {
    checkpoint::StateDict state;
    state["w"] = some(scene.mesh, Shard(0));
    checkpoint::save(state, directory + "/first");
  }
  const auto& step = steps().at(name);
  if (is_during) {
    std::thread striker;
    if (is_culprit) {
      striker = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        fault.strike();
      });
    }
    while (true) step(scene);
  }
  for (int& turn = scene.turn; turn < 4; ++turn) {
    if (turn == 2) {
      if (is_culprit) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        fault.strike();
      }
    }
    if (step) step(scene);
  }
}

// --- On processes -----------------------------------------------------------------------------------------

int64_t count_entries(const char* directory) {
  return std::distance(std::filesystem::directory_iterator(directory), {});
}

std::string open_files() {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    text += entry.path().filename().string() + " -> " +
            std::filesystem::read_symlink(entry.path(), none).string() + "\n";
  }
  return text;
}

/// How much of it this process maps.
int64_t count_shared_memory() {
  int64_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:tessera") != std::string::npos;
  return count;
}

void note_time(const std::string& path) {
  std::ofstream(path) << Clock::now().time_since_epoch().count() << std::endl;
}

const Fault& fault_named(const std::string& name) {
  return *std::find_if(faults().begin(), faults().end(),
                       [&](const Fault& each) { return each.name == name; });
}

/// Returns when all processes are there: on a busy machine that may take longer than what ranks wait for each other.
void wait_for_processes(const std::string& directory) {
  note_time(directory + "/started" + told("RANK"));
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    while (!std::filesystem::exists(c10::str(directory, "/started", rank)))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// For a moment.
void keep_a_store() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
}

/// In a world of their own.
void go_on_with_the_others(const std::string& backend, const std::string& step,
                           const std::string& directory) {
  constexpr std::chrono::seconds kPatience(60);
  const auto info = launch_info();
  WorldOptions options;
  options.rank = info->rank - (info->rank > culprit() ? 1 : 0);
  options.size = kRanks - 1;
  options.backend = backend;
  options.timeout = kPatience;
  options.store = c10::make_intrusive<c10d::PrefixStore>("again", connect_store(*info, kPatience));
  const auto world = init_process_group(std::move(options));
  at::Tensor tensor = at::ones({1});
  comm::all_reduce(tensor, ReduceOp::SUM, world->group()).wait();
  EXPECT_EQ(tensor.item<float>(), kRanks - 1);
  if (step == "save") {
    checkpoint::StateDict state;
    state["w"] = some(init_device_mesh(at::kCPU, {kRanks - 1}), Shard(0));
    checkpoint::save(state, directory + "/step");
  }
  destroy_process_group();
}

RANK_BODY(fault) {
  const std::string step = told("TESSERA_TEST_STEP"), directory = told("TESSERA_TEST_DIRECTORY");
  Fault fault = fault_named(told("TESSERA_TEST_FAULT"));
  const bool is_culprit = told("RANK") == std::to_string(culprit());
  const bool has_own_store = told("TORCHELASTIC_USE_AGENT_STORE") == "False";
  const auto strike = fault.strike;
  fault.strike = [&] {
    note_time(directory + "/struck");
    strike();
  };
  RunOptions options;
  options.timeout = kTimeout;
  options.backend = told("TESSERA_TEST_BACKEND");
  std::string error;
  int64_t threads = 0, files = 0;
  // What libtorch keeps for the process is there after the first tensor operation, and the first store.
  at::ones({1000, 1000}).sum();
  if (has_own_store) keep_a_store();
  threads = count_entries("/proc/self/task");
  files = count_entries("/proc/self/fd");
  wait_for_processes(directory);
  try {
    if (step == "init" && is_culprit) fault.strike();
    launch(
        1,
        [&] {
          try {
            do_step(step, fault, directory, told("TESSERA_TEST_DURING") == "1");
            if (step == "shutdown" && is_culprit) fault.strike();
          } catch (const Fault&) {  // "return"
          }
        },
        options);
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    error = caught.what();
  } catch (int) {
    error = "an int";
  } catch (const Fault&) {
  }
  const auto now = Clock::now().time_since_epoch().count();
  if (rpc::is_initialized()) rpc::shutdown(/*graceful=*/false);
  std::cout << "\n<<error " << error << ">>\n<<time " << now << ">>" << std::endl;
  if (is_culprit) return;
  // tensorpipe keeps threads and files for the process. Others end a moment after they are told to.
  // Whoever waits for a store whose keeper is stopped stays until it goes.
  // gloo may lose a collective whose connection ends: its thread stays until that collective's timeout.
  const bool is_checked = step != "rpc" && !(has_own_store && fault.name == "stop");
  const auto end = Clock::now() + std::chrono::seconds(1) +
                   (options.backend == "gloo" ? kTimeout : std::chrono::milliseconds(0));
  while (is_checked && Clock::now() < end && count_entries("/proc/self/task") > threads)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (is_checked) {
    EXPECT_LE(count_entries("/proc/self/task"), threads);
    EXPECT_LE(count_entries("/proc/self/fd"), files) << open_files();
    EXPECT_EQ(count_shared_memory(), 0);
  }
  // The process can go on.
  if (!has_own_store) go_on_with_the_others(options.backend, step, directory);
  run(2, [] {
    at::Tensor tensor = at::ones({1});
    comm::all_reduce(tensor, ReduceOp::SUM, current_world()->group()).wait();
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t from = text.find(begin);
  if (from == std::string::npos) return "";
  return text.substr(from + begin.size(), text.find(end, from) - from - begin.size());
}

class Directory {
 public:
  Directory() {
    std::string path = ::testing::TempDir() + "/tessera_faults_XXXXXX";
    path_ = ::mkdtemp(path.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A process that stopped is killed when the others have ended.
std::function<void(const std::vector<pid_t>&)> kill_last(int64_t culprit, std::thread& waiter) {
  return [culprit, &waiter](const std::vector<pid_t>& pids) {
    waiter = std::thread([culprit, pids] {
      for (size_t rank = 0; rank < pids.size(); ++rank) {
        siginfo_t info{};
        if (rank != static_cast<size_t>(culprit))
          ::waitid(P_PID, static_cast<id_t>(pids[rank]), &info, WEXITED | WNOWAIT);
      }
      ::kill(pids[culprit], SIGKILL);
    });
  };
}

struct Cell {
  std::string fault, step;
  int64_t culprit = 2;
  bool has_own_store = false;  // kept by rank 0, not by the launcher
  bool is_during = false;      // struck by another thread, in the midst of the step
  bool is_checked = false;     // with TESSERA_CHECK_COLLECTIVES
};
std::ostream& operator<<(std::ostream& out, const Cell& cell) {
  return out << cell.fault << (cell.is_during ? "_during_" : "_in_") << cell.step << "_of_" << cell.culprit
             << (cell.has_own_store ? "_with_own_store" : "") << (cell.is_checked ? "_checked" : "");
}

/// Without what makes no sense: to return at the end is what all do.
std::vector<Cell> all_cells() {
  std::vector<Cell> cells;
  for (const Fault& fault : faults()) {
    for (const auto& [step, body] : steps()) {
      if (step == "shutdown" && fault.name == "return") continue;
      // They do not hear of ranks that do nothing wrong.
      if (step == "other_groups" && (fault.is_silent || fault.name == "return")) continue;
      cells.push_back({fault.name, step});
    }
  }
  return cells;
}

/// All, or as many, drawn by the seed.
std::vector<Cell> cells_to_try(std::vector<Cell> cells, size_t count, uint64_t seed) {
  if (told("TESSERA_FAULTS") == "all") return cells;
  std::mt19937_64 random(seed);
  std::shuffle(cells.begin(), cells.end(), random);
  cells.resize(count);
  return cells;
}

/// Rank 0 as the culprit, and as the keeper of the store; struck in the midst of a step.
std::vector<Cell> other_cells() {
  const auto cell = [](const char* fault, const char* step, int64_t culprit, bool has_own_store) {
    return Cell{fault, step, culprit, has_own_store};
  };
  std::vector<Cell> cells{
      cell("kill", "all_reduce", 0, true),  cell("kill", "new_group", 0, true),
      cell("stop", "all_reduce", 0, true),  cell("stop", "new_group", 0, true),
      cell("stop", "save", 0, true),        cell("exit", "save", 0, true),
      cell("throw", "backward", 0, true),   cell("sleep", "barrier", 0, true),
      cell("kill", "rpc", 0, false),        cell("kill", "message", 0, false),
      cell("kill", "all_reduce", 2, true),  cell("kill", "shutdown", 2, true),
      cell("throw", "all_to_all", 2, true),
  };
  for (const char* fault : {"kill", "stop", "exit"}) {
    for (const char* step : {"all_reduce_large", "all_to_all", "backward", "save"}) {
      cells.push_back({fault, step});
      cells.back().is_during = true;
    }
  }
  return cells;
}

/// On transports, ranks compare what they call before they call it.
std::vector<Cell> checked_cells() {
  std::vector<Cell> cells;
  for (const char* fault : {"kill", "stop", "exit", "throw", "sleep", "return"}) {
    for (const char* step : {"all_reduce", "broadcast", "redistribute"}) {
      cells.push_back({fault, step});
      cells.back().is_checked = true;
    }
  }
  return cells;
}

/// From when it was struck to when a survivor's call has thrown. Much more than it takes, as machines may be busy; what is
/// noticed, is so before the timeout.
std::chrono::milliseconds bound_of(const Cell& cell) {
  const bool takes_timeout =
      fault_named(cell.fault).is_silent || cell.step == "init" || cell.step == "shutdown";
  return kSlowness * (takes_timeout ? kTimeout + std::chrono::seconds(4) : kTimeout);
}

void check_error(const Cell& cell, int64_t rank, const std::string& error) {
  const std::string who = c10::str("rank ", cell.culprit);
  if (cell.step == "init") {
    EXPECT_THAT(error, AllOf(HasSubstr(who + " has never come"), HasSubstr("rank 0 (process ")));
    return;
  }
  // Who has ended before it does not hear of it, except for who keeps the store.
  const bool may_miss_it = cell.step == "shutdown" && !(cell.has_own_store && rank == 0);
  if (may_miss_it && error.empty()) return;
  EXPECT_THAT(error, HasSubstr(who));
  const auto& names = fault_named(cell.fault).named_as;
  EXPECT_TRUE(std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return error.find(name) != std::string::npos;
  })) << error;
}

void check_on_processes(const Cell& cell, const std::string& backend) {
  const Directory directory;
  support::SpawnOptions options;
  if (cell.has_own_store) options = testing::without_agent();
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"TESSERA_TEST_FAULT", cell.fault},
           {"TESSERA_TEST_STEP", cell.step},
           {"TESSERA_TEST_CULPRIT", std::to_string(cell.culprit)},
           {"TESSERA_TEST_DURING", cell.is_during ? "1" : "0"},
           {"TESSERA_TEST_BACKEND", backend},
           {"TESSERA_TEST_DIRECTORY", directory.path()},
           {"TESSERA_CHECK_COLLECTIVES", cell.is_checked ? "1" : "0"},
           {"TESSERA_WAIT_REPORT_SECONDS", "0"}})
    options.environment.emplace_back(name, value);
  options.timeout = std::chrono::minutes(3);
  std::thread waiter;
  options.after_start = kill_last(cell.culprit, waiter);
  const auto results = spawn_ranks("fault", kRanks, options);
  waiter.join();
  int64_t struck = 0;
  std::ifstream(directory.path() + "/struck") >> struck;
  ASSERT_NE(struck, 0) << "the culprit never came so far:\n" << results[cell.culprit].output;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    if (rank == cell.culprit) continue;
    SCOPED_TRACE(c10::str("rank ", rank));
    const std::string& output = results[rank].output;
    EXPECT_TRUE(results[rank].ok()) << output;
    const std::string error = between(output, "<<error ", ">>");
    check_error(cell, rank, error);
    const int64_t took_ns = std::atoll(between(output, "<<time ", ">>").c_str()) - struck;
    const std::chrono::duration<double> took = std::chrono::nanoseconds(took_ns);
    std::cout << "rank " << rank << " after " << took.count() << " s: " << error << "\n";
    EXPECT_LT(took, bound_of(cell));
  }
  // What a save that failed has written is gone after the next one.
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    const std::string name = entry.path().filename();
    EXPECT_TRUE(cell.step != "save" || cell.has_own_store || name == "step" || name == "struck" ||
                name.starts_with("started"))
        << name;
  }
}

class FaultOnGloo : public ::testing::TestWithParam<Cell> {};
INSTANTIATE_TEST_SUITE_P(Matrix, FaultOnGloo, ::testing::ValuesIn(cells_to_try(all_cells(), 12, 18)),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });
INSTANTIATE_TEST_SUITE_P(Others, FaultOnGloo, ::testing::ValuesIn(cells_to_try(other_cells(), 4, 18)),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });
INSTANTIATE_TEST_SUITE_P(Checked, FaultOnGloo, ::testing::ValuesIn(cells_to_try(checked_cells(), 2, 18)),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });
TEST_P(FaultOnGloo, EverySurvivorKnowsWho) { check_on_processes(GetParam(), "gloo"); }

class FaultOnSharedMemory : public ::testing::TestWithParam<Cell> {};
INSTANTIATE_TEST_SUITE_P(Matrix, FaultOnSharedMemory, ::testing::ValuesIn(cells_to_try(all_cells(), 12, 21)),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });
INSTANTIATE_TEST_SUITE_P(Others, FaultOnSharedMemory, ::testing::ValuesIn(cells_to_try(other_cells(), 4, 21)),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });
TEST_P(FaultOnSharedMemory, EverySurvivorKnowsWho) { check_on_processes(GetParam(), "shm"); }

// --- On threads -------------------------------------------------------------------------------------------

std::vector<Cell> thread_cells() {
  std::vector<Cell> cells;
  for (const Cell& cell : all_cells()) {
    if (!fault_named(cell.fault).ends_process && cell.step != "init" && cell.step != "shutdown")
      cells.push_back(cell);
  }
  return cells;
}

class FaultOnThreads : public ::testing::TestWithParam<Cell> {};
INSTANTIATE_TEST_SUITE_P(Matrix, FaultOnThreads, ::testing::ValuesIn(thread_cells()),
                         [](const auto& info) { return ::testing::PrintToString(info.param); });

TEST_P(FaultOnThreads, EverySurvivorKnowsWho) {
  const std::string& step = GetParam().step;
  const Fault& fault = fault_named(GetParam().fault);
  const Directory directory;
  RunOptions options;
  options.timeout = std::chrono::milliseconds(fault.is_silent ? 300 : 4000);
  Fault mine = fault;
  if (fault.is_silent) mine.strike = [] { std::this_thread::sleep_for(std::chrono::milliseconds(900)); };
  std::vector<std::string> errors(kRanks);
  at::ones({1000, 1000}).sum();
  const int64_t threads = count_entries("/proc/self/task"), files = count_entries("/proc/self/fd");
  run(
      kRanks,
      [&] {
        try {
          do_step(step, mine, directory.path());
        } catch (const Fault&) {
        } catch (const c10::Error& caught) {
          errors[get_rank()] = caught.what_without_backtrace();
          current_world()->report_failure(errors[get_rank()]);
        } catch (const std::exception& caught) {
          errors[get_rank()] = caught.what();
          current_world()->report_failure(errors[get_rank()]);
        } catch (...) {
          errors[get_rank()] = "an exception that is not a std::exception";
          current_world()->report_failure(errors[get_rank()]);
        }
      },
      options);
  EXPECT_LE(count_entries("/proc/self/task"), threads + 1);  // that which reports long waits
  EXPECT_LE(count_entries("/proc/self/fd"), files) << open_files();
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    if (rank == culprit()) continue;
    SCOPED_TRACE(c10::str("rank ", rank));
    EXPECT_THAT(errors[rank], HasSubstr("rank 2"));
    bool is_named = fault.is_silent && errors[rank].find("gave up") != std::string::npos;
    for (const std::string& name : fault.named_as)
      is_named = is_named || errors[rank].find(name) != std::string::npos;
    EXPECT_TRUE(is_named) << errors[rank];
  }
}

}  // namespace
}  // namespace tessera
