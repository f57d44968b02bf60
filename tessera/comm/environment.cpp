#include <tessera/comm/environment.h>
#include <tessera/comm/left_alone.h>
#include <tessera/comm/sockets.h>
#include <tessera/comm/store.h>
#include <tessera/comm/world.h>
#include <tessera/error.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera {

namespace {

class Reader {
 public:
  explicit Reader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    if (value && value->empty()) value.reset();
    return value;
  }

  std::optional<int64_t> number(const std::string& name, int64_t lowest, int64_t highest) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int64_t result = 0;
    const char* end = value->data() + value->size();
    const auto [rest, error] = std::from_chars(value->data(), end, result);
    TESSERA_CHECK_VALUE(error == std::errc() && rest == end && result >= lowest && result <= highest,
                        "The environment variable ", name, " is \"", *value,
                        "\", but must be an integer from ", lowest, " to ", highest, ".");
    return result;
  }

  int64_t need(const std::string& name, const char* launcher, int64_t lowest, int64_t highest) const {
    const auto value = number(name, lowest, highest);
    TESSERA_CHECK_VALUE(value, "The environment variable ", name, " is missing, though others say that ",
                        launcher, " started this process.");
    return *value;
  }

 private:
  const EnvironmentLookup& lookup_;
};

constexpr int64_t kMaxRanks = std::numeric_limits<int32_t>::max();  // as many as c10d can count

}  // namespace

std::optional<LaunchInfo> launch_info(const EnvironmentLookup& lookup) {
  const Reader env(lookup);
  LaunchInfo info;
  std::string rank, size, local_rank;
  if (env.text("RANK")) {
    info.launcher = "torchrun";
    rank = "RANK", size = "WORLD_SIZE", local_rank = "LOCAL_RANK";
  } else if (env.text("OMPI_COMM_WORLD_RANK")) {
    info.launcher = "mpirun";
    rank = "OMPI_COMM_WORLD_RANK", size = "OMPI_COMM_WORLD_SIZE", local_rank = "OMPI_COMM_WORLD_LOCAL_RANK";
  } else if (env.text("SLURM_PROCID")) {
    info.launcher = "slurm";
    rank = "SLURM_PROCID", size = "SLURM_NTASKS", local_rank = "SLURM_LOCALID";
  } else {
    return std::nullopt;
  }
  info.size = env.need(size, info.launcher.c_str(), 1, kMaxRanks);
  info.rank = env.need(rank, info.launcher.c_str(), 0, info.size - 1);
  info.local_rank = env.number(local_rank, 0, info.size - 1).value_or(0);

  if (const auto address = env.text("MASTER_ADDR")) {
    info.master_address = *address;
  } else if (info.launcher == "slurm") {
    if (const auto nodes = env.text("SLURM_JOB_NODELIST")) info.master_address = first_slurm_host(*nodes);
  } else if (info.launcher == "mpirun") {
    const int64_t here = env.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, info.size).value_or(info.size);
    TESSERA_CHECK_VALUE(
        here == info.size, "mpirun started ", here, " of ", info.size,
        " processes on this machine, so they need to know where rank 0 is: pass MASTER_ADDR to all "
        "(mpirun -x MASTER_ADDR=host ...).");
  }
  if (const auto port = env.number("MASTER_PORT", 1, 65535)) {
    info.master_port = static_cast<uint16_t>(*port);
  } else if (const auto job = env.number("SLURM_JOB_ID", 0, INT64_MAX); job && info.launcher == "slurm") {
    info.master_port = static_cast<uint16_t>(20000 + *job % 20000);
  }
  info.agent_store = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  info.attempt = env.number("TORCHELASTIC_RESTART_COUNT", 0, INT64_MAX).value_or(0);
  return info;
}

std::optional<LaunchInfo> launch_info() {
  return launch_info([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

std::string first_slurm_host(const std::string& node_list) {
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ',';) {
    if (node_list[i] != '[') {
      host += node_list[i++];
      continue;
    }
    // Of the numbers in brackets the first counts.
    const size_t close = node_list.find(']', i);
    TESSERA_CHECK_VALUE(close != std::string::npos, "The Slurm node list \"", node_list,
                        "\" has a '[' that is not closed.");
    const size_t stop = node_list.find_first_not_of("0123456789", i + 1);
    TESSERA_CHECK_VALUE(stop > i + 1 && std::string_view("-,]").find(node_list[stop]) != std::string::npos,
                        "The Slurm node list \"", node_list, "\" has a '[' that no number or range follows.");
    host += node_list.substr(i + 1, stop - i - 1);
    i = close + 1;
  }
  TESSERA_CHECK_VALUE(!host.empty(), "The Slurm node list \"", node_list, "\" does not begin with a host.");
  return host;
}

c10::intrusive_ptr<c10d::Store> connect_store(const LaunchInfo& info, std::chrono::milliseconds timeout) {
  timeout = std::min(timeout, kLongestTimeout);
  if (info.rank == 0 && !info.agent_store)
    return listen_for_store(address_towards(info.master_address), info.master_port, timeout);
  c10d::TCPStoreOptions options;
  options.port = info.master_port;
  options.timeout = timeout;
  options.waitWorkers = false;
  c10::intrusive_ptr<c10d::Store> store;
  std::string why = c10::str("It did not answer within ", timeout.count(), " ms.");
  try {
    // It looks for the store so long itself, but then waits for an answer without a limit.
    constexpr std::chrono::milliseconds kMore(1000);
    const auto found = ask_for_at_most(timeout + kMore, [host = info.master_address, options] {
      return c10::make_intrusive<c10d::TCPStore>(host, options);
    });
    if (found) store = *found;
  } catch (const std::exception& error) {
    why = error.what();
  }
  TESSERA_CHECK(
      store, "Rank ", info.rank, " does not reach the store, which ",
      info.agent_store ? "torchrun" : "rank 0", " keeps at ", info.master_address, ", port ",
      info.master_port, ". Check that ", info.agent_store ? "it" : "rank 0",
      " runs, and that MASTER_ADDR and MASTER_PORT are the same for all ranks and reachable from here.\n",
      why);
  if (!info.agent_store) return store;
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("/worker/attempt_", info.attempt), store);
}

}  // namespace tessera
