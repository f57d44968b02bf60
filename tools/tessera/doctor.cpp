#include "tools/tessera/doctor.h"

#include <tessera/comm/collectives.h>
#include <tessera/comm/environment.h>
#include <tessera/comm/run.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/ones.h>
#include <c10/util/StringUtil.h>
#include <torch/version.h>

extern char** environ;

namespace {

using namespace tessera;

struct Variable {
  std::string_view name, meaning;
};
constexpr Variable kVariables[] = {
    {"TESSERA_CHECK_COLLECTIVES", "compare what ranks call before each collective"},
    {"TESSERA_CHECK_LAYOUT", "check that local tensors lie in memory as their specs say"},
    {"TESSERA_CHECK_RANDOM", "check that ranks draw alike"},
    {"TESSERA_FILL_MEMORY", "fill new memory with NaN"},
    {"TESSERA_BACKEND", "what carries tensors between processes that name no backend"},
    {"TESSERA_JOB_TOKEN", "the secret by which processes of a job know each other"},
    {"TESSERA_LOG", "what is logged to stderr"},
    {"TESSERA_STRICT", "forbid or warn about implicit communication"},
    {"TESSERA_WAIT_REPORT_SECONDS", "report waits that last longer"},
};
constexpr std::string_view kOthers[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "OMP_NUM_THREADS",
                                        "MKL_NUM_THREADS",
                                        "CUDA_VISIBLE_DEVICES",
                                        "SLURM_NTASKS",
                                        "SLURM_PROCID",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "GLOO_SOCKET_IFNAME",
                                        "NCCL_SOCKET_IFNAME"};

class Doctor {
 public:
  Doctor(const DoctorOptions& options, std::ostream& out) : options_(options), out_(out) {}

  int64_t examine() {
    say("Tessera", TESSERA_VERSION);
    say("libtorch",
        c10::str(TORCH_VERSION, at::hasCUDA()
                                    ? c10::str(", ", at::detail::getCUDAHooks().getNumGPUs(), " CUDA devices")
                                    : ", no CUDA device"));
    look_at_machine();
    look_at_environment();
    if (options_.ranks > 0) {
      try_collectives("threads", "");
      try_collectives("gloo", "gloo");
    }
    out_ << "\n";
    for (const std::string& problem : problems_) out_ << "wrong: " << problem << "\n";
    if (problems_.empty()) out_ << "nothing is wrong\n";
    return static_cast<int64_t>(problems_.size());
  }

 private:
  void say(const std::string& what, const std::string& value) {
    out_ << what << std::string(what.size() < 18 ? 18 - what.size() : 1, ' ') << value << "\n";
  }
  void wrong(std::string problem) { problems_.push_back(std::move(problem)); }

  void look_at_machine() {
    const auto cores = std::thread::hardware_concurrency();
    say("cores", std::to_string(cores));
    const auto pages = sysconf(_SC_PHYS_PAGES), available = sysconf(_SC_AVPHYS_PAGES),
               size = sysconf(_SC_PAGESIZE);
    say("memory", bytes_text(pages * size) + ", " + bytes_text(available * size) + " of it free");
    struct statvfs shared {};
    if (statvfs("/dev/shm", &shared) == 0) {
      const auto free = static_cast<int64_t>(shared.f_bavail) * static_cast<int64_t>(shared.f_frsize);
      say("shared memory", bytes_text(free) + " free in /dev/shm");
      if (free < (int64_t{64} << 20))
        wrong("/dev/shm has only " + bytes_text(free) +
              " left: data loaders and processes on one machine need more. In a container, give it "
              "--shm-size=1g.");
    } else {
      wrong("there is no /dev/shm, which processes on one machine use.");
    }
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
      say("open files", std::to_string(files.rlim_cur));
      if (files.rlim_cur < 1024)
        wrong(c10::str(
            "a process may open only ", files.rlim_cur,
            " files: each rank needs a socket for each of its peers. Raise it with ulimit -n 65536."));
    }
    const char* const threads = std::getenv("OMP_NUM_THREADS");
    if (threads && std::atoi(threads) > static_cast<int>(cores))
      wrong(c10::str("OMP_NUM_THREADS is ", threads, ", but there are ", cores,
                     " cores: threads get in each other's way."));
  }

  void look_at_environment() {
    for (char** each = environ; *each; ++each) {
      const std::string_view entry = *each;
      const size_t equals = entry.find('=');
      const std::string_view name = entry.substr(0, equals);
      if (!name.starts_with("TESSERA_")) continue;
      const auto known = std::find_if(std::begin(kVariables), std::end(kVariables),
                                      [&](const Variable& v) { return v.name == name; });
      if (known == std::end(kVariables)) {
        std::string all;
        for (const Variable& variable : kVariables) all += c10::str(all.empty() ? "" : ", ", variable.name);
        wrong(c10::str(name, " is set, but Tessera knows no such variable. It knows ", all, "."));
        continue;
      }
      const bool is_secret = name == "TESSERA_JOB_TOKEN";
      say(std::string(name),
          c10::str(is_secret ? "is set" : entry.substr(equals + 1), "  (", known->meaning, ")"));
    }
    for (const std::string_view name : kOthers) {
      if (const char* value = std::getenv(std::string(name).c_str())) say(std::string(name), value);
    }
    try {
      const auto info = launch_info();
      say("launched by", info ? c10::str(info->launcher, ": rank ", info->rank, " of ", info->size,
                                         ", store at ", info->master_address, ":", info->master_port)
                              : "no launcher: ranks are threads of one process");
    } catch (const c10::Error& error) {
      wrong(error.what_without_backtrace());
    }
  }

  /// Bandwidths are those of the algorithm: bytes of the tensor by the time of the call.
  void try_collectives(const std::string& what, const std::string& backend) {
    double small = 0, large = 0;
    const int64_t elements = 4 << 20;
    try {
      run(options_.ranks,
          [&] {
            const Group group = current_world()->group();
            const at::Tensor one = at::ones({1}), many = at::ones({elements});
            const double alone = seconds_of(one, group, 20), together = seconds_of(many, group, 3);
            TORCH_CHECK(one[0].item<float>() > 1, "the sum of ones is ", one[0].item<float>(), ".");
            if (get_rank() == 0) small = alone, large = together;
          },
          {.timeout = std::chrono::seconds(60), .backend = backend});
      const double bytes = static_cast<double>(elements) * sizeof(float);
      say("ranks by " + what, c10::str(options_.ranks, " ranks: all_reduce of 4 B in ", seconds_text(small),
                                       ", of ", bytes_text(elements * 4), " in ", seconds_text(large), ", ",
                                       bytes_text(static_cast<int64_t>(bytes / large)), "/s"));
    } catch (const c10::Error& error) {
      wrong("ranks by " + what + " cannot all_reduce: " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      wrong("ranks by " + what + " cannot all_reduce: " + error.what());
    }
  }

  static double seconds_of(const at::Tensor& tensor, const Group& group, int calls) {
    comm::all_reduce(tensor, c10d::ReduceOp::SUM, group).wait();
    comm::barrier(group).wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) comm::all_reduce(tensor, c10d::ReduceOp::SUM, group).wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
  }

  const DoctorOptions options_;
  std::ostream& out_;
  std::vector<std::string> problems_;
};

}  // namespace

int64_t doctor(const DoctorOptions& options, std::ostream& out) { return Doctor(options, out).examine(); }
