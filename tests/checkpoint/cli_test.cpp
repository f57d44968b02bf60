// The command line program, as a person uses it.

#include <tessera/checkpoint/checkpoint.h>

#include <fstream>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/scratch.h"
#include "tests/support/ranks.h"

namespace tessera::checkpoint {
namespace {

using ::testing::HasSubstr;

support::ProcessResult tool(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TESSERA_CHECKPOINT_TOOL);
  return support::spawn(1, arguments, {})[0];
}

StateDict example() {
  StateDict state;
  state["model"]["weight"] = at::arange(12, at::kFloat).reshape({3, 4});
  state["model"]["mask"] = at::ones({5}, at::kBool);
  state["step"] = 7;
  return state;
}

TEST(CheckpointTool, Inspects) {
  const Scratch scratch;
  save(example(), scratch / "x");
  const auto table = tool({"inspect", scratch / "x", "--chunks"});
  EXPECT_TRUE(table.ok()) << table.output;
  EXPECT_THAT(table.output, ::testing::ContainsRegex("model.weight +f32 +\\[3, 4\\] +48 B"));
  EXPECT_THAT(table.output, HasSubstr("data_00000_0.safetensors"));
  EXPECT_THAT(table.output, ::testing::ContainsRegex("step +7"));
  EXPECT_THAT(table.output, HasSubstr("tessera: 2 tensors, 1 other values, 53 B"));
  const auto json = nlohmann::json::parse(tool({"inspect", scratch / "x", "--json"}).output);
  EXPECT_EQ(json["tensors"]["model.weight"]["shape"], (std::vector<int>{3, 4}));
  EXPECT_EQ(json["tensors"]["model.weight"]["chunks"].size(), 1u);
  EXPECT_EQ(json["values"]["step"], "7");
}

TEST(CheckpointTool, Verifies) {
  const Scratch scratch;
  save(example(), scratch / "x");
  const auto good = tool({"verify", scratch / "x"});
  EXPECT_TRUE(good.ok());
  EXPECT_THAT(good.output, HasSubstr("whole: 53 B read"));
  const std::string file = scratch / "x/data_00000_0.safetensors";
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(file));
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(size - 1);
  stream.put('\x55');
  stream.close();
  const auto bad = tool({"verify", scratch / "x"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.output, HasSubstr("data_00000_0.safetensors is damaged"));
  EXPECT_THAT(bad.output, HasSubstr("tensor 'model."));
  const auto nothing = tool({"verify", scratch / "y"});
  EXPECT_EQ(nothing.exit_code, 1);
  EXPECT_THAT(nothing.output, HasSubstr("There is no checkpoint at"));
}

TEST(CheckpointTool, Converts) {
  const Scratch scratch;
  save(example(), scratch / "tessera");
  ASSERT_TRUE(tool({"convert", scratch / "tessera", scratch / "dcp", "--format", "dcp"}).ok());
  ASSERT_TRUE(tool({"verify", scratch / "dcp"}).ok());
  ASSERT_TRUE(tool({"convert", scratch / "dcp", scratch / "back"}).ok());
  const Value back = load(scratch / "back");
  EXPECT_TRUE(at::equal(back.at("model").at("weight").tensor(), at::arange(12, at::kFloat).reshape({3, 4})));
  EXPECT_EQ(back.at("step").integer(), 7);
  const auto refused = tool({"convert", scratch / "dcp", scratch / "hf", "--format", "huggingface"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, HasSubstr("holds tensors only, but the state dict also has 'step'"));
  EXPECT_NE(tool({"convert", scratch / "dcp", scratch / "hf", "--format", "onnx"}).exit_code, 0);
  EXPECT_NE(tool({}).exit_code, 0);
}

}  // namespace
}  // namespace tessera::checkpoint
