// The demo as processes: the same program under a launcher.

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tests/checkpoint/scratch.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

TEST(TrainGpt, RunsAsProcesses) {
  const std::vector<std::string> options{"--steps", "3", "--width", "32", "--context", "16", "--batch", "3"};
  std::vector<std::string> command{TESSERA_TRAIN_GPT};
  command.insert(command.end(), options.begin(), options.end());
  for (const std::string backend : {"gloo", "shm"}) {
    const auto results = support::spawn(4, command, testing::over(backend));
    testing::expect_ok(results);
    EXPECT_THAT(results[0].output,
                ::testing::HasSubstr("4 ranks over \"" + backend + "\" as mesh(dp=2, tp=2)"));
    EXPECT_THAT(results[0].output, ::testing::HasSubstr("All 3 losses agree"));
    EXPECT_EQ(results[1].output, "");
  }
}

TEST(TrainGpt, IsParallelInEachWay) {
  const std::vector<std::pair<std::string, std::string>> ways{
      {"fsdp", "dp=4, tp=1"}, {"fsdp+tp", "dp=2, tp=2"}, {"dp", "dp=4, tp=1"}, {"tp", "dp=1, tp=4"}};
  for (const auto& [parallel, mesh] : ways) {
    const std::vector<std::string> command{TESSERA_TRAIN_GPT, "--steps", "3",       "--width", "32",
                                           "--context",       "16",      "--batch", "4",       "--parallel",
                                           parallel};
    const auto results = support::spawn(4, command, {});
    testing::expect_ok(results);
    EXPECT_THAT(results[0].output, ::testing::HasSubstr("as mesh(" + mesh + ")"));
    EXPECT_THAT(results[0].output, ::testing::HasSubstr("All 3 losses agree"));
  }
}

TEST(TrainGpt, TracesAllRanks) {
  const checkpoint::Scratch scratch;
  const std::string file = scratch / "trace.json";
  const auto results = support::spawn(4, {TESSERA_TRAIN_GPT, "--steps", "2", "--width", "32", "--context",
                                          "16", "--batch", "4", "--trace", file});
  testing::expect_ok(results);
  EXPECT_THAT(results[0].output, ::testing::HasSubstr("Where the time went"));
  std::stringstream content;
  content << std::ifstream(file).rdbuf();
  const auto events = nlohmann::json::parse(content.str())["traceEvents"];
  std::set<std::pair<int, std::string>> seen;
  for (const auto& event : events)
    if (event["ph"] == "X") seen.emplace(event["pid"], event["cat"]);
  for (int rank = 0; rank < 4; ++rank) {
    for (const std::string kind :
         {"operator", "operator,backward", "compute", "collective", "wait", "redistribute"})
      EXPECT_TRUE(seen.contains({rank, kind})) << rank << " " << kind;
  }
}

/// Stopped after five steps on four processes, and resumed on two with another mesh: the losses of one device that was never
/// interrupted.
TEST(TrainGpt, GoesOnFromACheckpointOnAnotherMesh) {
  const checkpoint::Scratch scratch;
  const auto train = [](int64_t ranks, const std::vector<std::string>& options) {
    std::vector<std::string> command{TESSERA_TRAIN_GPT, "--steps", "8",       "--width", "32",
                                     "--context",       "16",      "--batch", "4"};
    command.insert(command.end(), options.begin(), options.end());
    auto results = support::spawn(ranks, command, {});
    testing::expect_ok(results);
    return results[0].output;
  };
  EXPECT_THAT(train(4, {"--save", scratch.path(), "--save-every", "2", "--stop-after", "5"}),
              ::testing::HasSubstr("All 5 losses agree"));
  EXPECT_THAT(train(2, {"--resume", scratch.path(), "--mesh", "tp=2"}),
              ::testing::AllOf(::testing::HasSubstr("resumed from " + (scratch / "step-5")),
                               ::testing::HasSubstr("All 3 losses agree")));
  EXPECT_TRUE(std::filesystem::exists(scratch / "step-2"));
}

TEST(TrainGpt, SaysWhatIsWrong) {
  auto output = [](const std::vector<std::string>& options, int64_t ranks = 1) {
    std::vector<std::string> command{TESSERA_TRAIN_GPT};
    command.insert(command.end(), options.begin(), options.end());
    const auto result = support::spawn(ranks, command, {})[0];
    EXPECT_NE(result.exit_code, 0);
    return result.output;
  };
  EXPECT_THAT(output({"--mesh", "dp=2,pp=2"}),
              ::testing::HasSubstr("\"pp=2\" is no dim; expected as in dp=2,tp=2"));
  EXPECT_THAT(output({"--mesh", "dp=0"}), ::testing::HasSubstr("\"dp=0\" is no dim"));
  EXPECT_THAT(output({"--width", "130"}), ::testing::HasSubstr("130 cannot be divided among 4 heads"));
  EXPECT_THAT(output({"--heads", "2", "--mesh", "tp=4"}),
              ::testing::HasSubstr("2 heads cannot be dealt to tp=4"));
  EXPECT_THAT(output({"--parallel", "pp"}), ::testing::HasSubstr("\"pp\" is none of dp, tp, tp+dp, fsdp"));
  EXPECT_THAT(output({"--parallel", "fsdp", "--mesh", "dp=2,tp=2"}),
              ::testing::HasSubstr("tp=2 needs tensor parallel"));
  EXPECT_THAT(output({"--parallel", "fsdp", "--sequence-parallel"}),
              ::testing::HasSubstr("--sequence-parallel: needs tensor parallel"));
  EXPECT_THAT(output({"--steps", "0"}), ::testing::HasSubstr("--steps"));
  EXPECT_THAT(output({"--mesh", "tp=4"}, 2), ::testing::HasSubstr("The launcher started 2 ranks"));
}

}  // namespace
}  // namespace tessera
