// A rank is killed in the midst of training, and the others go on without it, from the last checkpoint.

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <unistd.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// "step 7 loss 3.25" -> {7: "3.25"}: the last one counts.
std::map<int, std::string> losses(const std::string& output) {
  std::map<int, std::string> result;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    int step = 0;
    char loss[64];
    if (std::sscanf(line.c_str(), "step %d loss %63s", &step, loss) == 2) result[step] = loss;
  }
  return result;
}

class Elastic : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    std::string path = ::testing::TempDir() + "/tessera_elastic_XXXXXX";
    directory_ = ::mkdtemp(path.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::vector<support::ProcessResult> train(int64_t ranks, const std::string& directory, int pause,
                                            const support::SpawnOptions& options = {}) const {
    return support::spawn(ranks,
                          {TESSERA_ELASTIC_EXAMPLE, "--checkpoints", directory, "--steps", "20", "--pause",
                           std::to_string(pause)},
                          options);
  }

  std::string directory_;
};
INSTANTIATE_TEST_SUITE_P(Killed, Elastic, ::testing::Values(0, 2), ::testing::PrintToStringParamName());

TEST_P(Elastic, GoesOnAsIfItHadBegunWithTheRanksThatAreLeft) {
  const int killed = GetParam();
  const std::string first = directory_ + "/first", second = directory_ + "/second";
  support::SpawnOptions options;
  options.timeout = std::chrono::seconds(100);
  std::thread killer;
  options.after_start = [&](const std::vector<pid_t>& pids) {
    killer = std::thread([&, pid = pids[killed]] {
      while (!std::filesystem::exists(first + "/step-10"))
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      // What the others go on from, for the run that is compared.
      std::filesystem::create_directories(second);
      std::filesystem::copy(first + "/step-10", second + "/step-10");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ::kill(pid, SIGKILL);
    });
  };
  const auto disturbed = train(4, first, /*pause=*/60, options);
  killer.join();
  std::string output;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == killed) {
      EXPECT_EQ(disturbed[rank].signal, SIGKILL);
      continue;
    }
    EXPECT_TRUE(disturbed[rank].ok()) << disturbed[rank].output;
    EXPECT_THAT(disturbed[rank].output, HasSubstr("was killed by signal 9"));
    output += disturbed[rank].output;
  }
  EXPECT_THAT(output, HasSubstr("3 ranks go on from " + first + "/step-10"));
  const auto undisturbed = train(3, second, /*pause=*/0);
  const auto expected = losses(undisturbed[0].output), actual = losses(output);
  ASSERT_EQ(expected.size(), 10u) << undisturbed[0].output;
  for (const auto& [step, loss] : expected) EXPECT_EQ(actual.at(step), loss) << "step " << step;
}

#ifdef TESSERA_PYTHON
/// One that runs this program with these words among its arguments; 0 if there is none.
pid_t find_process(const std::string& program, const std::string& words) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::error_code none;
    if (std::filesystem::read_symlink(entry.path() / "exe", none) != program) continue;
    std::ifstream file(entry.path() / "cmdline");
    const std::string line{std::istreambuf_iterator<char>(file), {}};
    if (line.find(words) != std::string::npos) return std::atoi(entry.path().filename().c_str());
  }
  return 0;
}

/// torchrun ends all processes when one dies, and starts them again.
TEST(Restarted, ByTorchrunGoesOnFromTheLastCheckpoint) {
  std::string path = ::testing::TempDir() + "/tessera_restart_XXXXXX";
  const std::string directory = ::mkdtemp(path.data());
  const std::string command = std::string("OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo ") + TESSERA_PYTHON +
                              " -m torch.distributed.run --standalone --nproc-per-node=3 --max-restarts=1 "
                              "--monitor-interval=0.1 --no-python " +
                              TESSERA_ELASTIC_EXAMPLE + " --checkpoints " + directory +
                              "/steps --steps 20 --pause 60 >" + directory + "/output 2>&1";
  int status = -1;
  std::thread runner([&] { status = std::system(command.c_str()); });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::filesystem::exists(directory + "/steps/step-10") &&
         std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const pid_t victim = find_process(TESSERA_ELASTIC_EXAMPLE, directory);
  EXPECT_GT(victim, 0);
  if (victim > 0) ::kill(victim, SIGKILL);
  runner.join();
  std::ifstream file(directory + "/output");
  const std::string output{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(status, 0) << output;
  EXPECT_THAT(output, HasSubstr("3 ranks go on from " + directory + "/steps/step-10"));
  EXPECT_EQ(losses(output).size(), 20u) << output;
  std::filesystem::remove_all(directory);
}
#endif

}  // namespace
}  // namespace tessera
