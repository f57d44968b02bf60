// The command `tessera`, as a person uses it.

#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

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
