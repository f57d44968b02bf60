// The command `tessera`, as a person uses it.

#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

support::ProcessResult command(std::vector<std::string> arguments, support::SpawnOptions options = {}) {
  arguments.insert(arguments.begin(), TESSERA_COMMAND);
  return support::spawn(1, arguments, options)[0];
}

TEST(Command, Explains) {
  const auto good =
      command({"explain", "mm(f32[4096,4096] [S(0),R], f32[4096,4096] [R,S(1)])", "--mesh", "dp=8,tp=8"});
  EXPECT_TRUE(good.ok()) << good.output;
  EXPECT_THAT(good.output, HasSubstr("result: f32[4096,4096] [S(0),S(1)]"));
  const auto bad = command({"explain", "mm(f32[4,4] [Q])", "--mesh", "4"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.output, HasSubstr("  mm(f32[4,4] [Q])\n               ^"));
}

TEST(Command, Visualizes) {
  const auto text = command({"visualize", "[S(0)] on mesh(2): f32[4]"});
  EXPECT_TRUE(text.ok()) << text.output;
  EXPECT_THAT(text.output, HasSubstr("│  0  │  1  │"));
  const std::string file = ::testing::TempDir() + "tessera_picture.svg";
  EXPECT_TRUE(command({"visualize", "[S(0)] on mesh(2): f32[4]", "--to", "[R]", "-o", file}).ok());
  std::stringstream svg;
  svg << std::ifstream(file).rdbuf();
  EXPECT_THAT(svg.str(), HasSubstr("<svg"));
  EXPECT_EQ(command({"visualize", "[S(0)] on mesh(2): f32[4]", "-o", "/no/such/folder/x.svg"}).exit_code, 1);
}

TEST(Command, Plans) {
  const std::vector<std::string> small{"plan", "--layers", "2",  "--width",   "64", "--heads",
                                       "4",    "--batch",  "16", "--context", "32", "--vocabulary",
                                       "128"};
  const auto plan = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = small;
    all.insert(all.end(), more.begin(), more.end());
    return command(all);
  };
  const auto one = plan({"--mesh", "dp=4,tp=2", "--bandwidth", "dp=25GB/s,tp=300GB/s", "--latency", "5us"});
  EXPECT_TRUE(one.ok()) << one.output;
  EXPECT_THAT(one.output, AllOf(HasSubstr("rank 0 of mesh(dp=4, tp=2)"), HasSubstr("fsdp+tp"),
                                HasSubstr("reduce_scatter"), HasSubstr("activations"), HasSubstr("█")));
  const auto sweep = plan({"--mesh", "dp=8", "--sweep", "--memory", "2MiB"});
  EXPECT_TRUE(sweep.ok()) << sweep.output;
  EXPECT_THAT(sweep.output,
              AllOf(HasSubstr("dp=8,tp=1       fsdp "), HasSubstr("dp=2,tp=4       fsdp+tp, sequence"),
                    HasSubstr("does not fit"), HasSubstr("░")));
  const auto wrong = [&](const std::vector<std::string>& more, const std::string& says) {
    const auto result = plan(more);
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(result.output, HasSubstr(says));
  };
  wrong({"--mesh", "dp=3"}, "16 pieces cannot be dealt to dp=3 ranks");
  wrong({"--mesh", "tp=8"}, "4 heads cannot be dealt to tp=8 ranks");
  wrong({"--mesh", "pp=8"}, "there is no dim \"pp\"");
  wrong({"--mesh", "dp=2,tp=2", "--parallel", "fsdp"}, "needs tensor parallel");
  wrong({"--mesh", "dp=2", "--parallel", "zero"}, "\"zero\" is none of dp, tp");
  wrong({"--mesh", "dp=2", "--bandwidth", "dp=fast"}, "--bandwidth: cannot read \"fast\"");
  wrong({"--mesh", "dp=2", "--latency", "pp=1us"}, "there is no mesh dim \"pp\"");
  wrong({"--mesh", "dp=2", "--rank", "2"}, "Rank 2 is not in a world of 2 ranks");
  wrong({"--mesh", "dp=2", "--dtype", "f17"}, "--dtype: \"f17\"");
}

TEST(Command, PlansATableOfParameters) {
  const std::string file = ::testing::TempDir() + "tessera_parameters.txt";
  const auto plan = [&](const std::string& table, std::vector<std::string> more) {
    std::ofstream(file) << table;
    more.insert(more.begin(), {"plan", "--table", file, "--mesh", "dp=4"});
    return command(more);
  };
  const std::string table =
      "# two layers\nembed.weight f32[64, 32]\nlayers.0.weight f32[32, 32]\nlayers.1.weight bf16[32, 64]\n";
  const auto sharded = plan(table, {});
  EXPECT_TRUE(sharded.ok()) << sharded.output;
  EXPECT_THAT(sharded.output, AllOf(HasSubstr("3 parameters"), HasSubstr("parameters       4.0 KiB"),
                                    HasSubstr("all_gather"), HasSubstr("reduce_scatter")));
  const auto replicated = plan(table, {"--parallel", "dp"});
  EXPECT_TRUE(replicated.ok()) << replicated.output;
  EXPECT_THAT(replicated.output, AllOf(HasSubstr("parameters      16.0 KiB"), HasSubstr("all_reduce")));
  const auto json =
      plan(R"({"__metadata__": {}, "w": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 1]}})", {});
  EXPECT_TRUE(json.ok()) << json.output;
  EXPECT_THAT(json.output, HasSubstr("parameters       4.0 KiB"));
  const auto wrong = [&](const std::string& text, const std::string& says) {
    const auto result = plan(text, {});
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(result.output, HasSubstr(says));
  };
  wrong("", "has no parameters");
  wrong("a f32[2]\nb\n", "line 2: expected a name, a dtype and a shape");
  wrong("a f32[2, x]\n", "line 1: \"x\" is no size");
  wrong("a f17[2]\n", "there is no dtype \"f17\"");
  wrong("{\"a\": 3}", "expected {\"name\": {\"dtype\"");
  EXPECT_THAT(plan(table, {"--parallel", "tp"}).output, HasSubstr("a table of parameters has no layers"));
  EXPECT_THAT(command({"plan", "--table", "/no/such/file"}).output, HasSubstr("cannot read /no/such/file"));
}

TEST(Command, Examines) {
  const auto good = command({"doctor"});
  EXPECT_THAT(good.output, HasSubstr("ranks by threads  2 ranks: all_reduce of 4 B in "));
  EXPECT_THAT(good.output, HasSubstr("ranks by gloo"));
  support::SpawnOptions options;
  options.environment = {{"TESSERA_STRIKT", "1"}};
  const auto bad = command({"doctor", "--ranks", "0"}, options);
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.output, HasSubstr("TESSERA_STRIKT is set, but Tessera knows no such variable"));
  EXPECT_THAT(bad.output, HasSubstr("wrong: "));
}

}  // namespace
}  // namespace tessera
