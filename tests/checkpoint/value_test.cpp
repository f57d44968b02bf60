#include <tessera/checkpoint/value.h>

#include <cmath>
#include <sstream>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

namespace tessera::checkpoint {
namespace {

std::string text_of(const Value& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

template <class F>
std::string error_of(const F& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(Value, IsWhatItWasMadeFrom) {
  Value state;
  const at::Tensor weight = at::zeros({2, 3});
  state["model"]["weight"] = weight;
  state["step"] = 3;
  state["betas"] = Value::list({0.9, 0.999});
  state["name"] = "it's";
  state["nothing"] = Value();
  state["flag"] = true;
  state["raw"] = Bytes{std::string("\0x", 2)};
  EXPECT_TRUE(state.at("model").at("weight").tensor().is_same(weight));
  EXPECT_EQ(state.at("step").integer(), 3);
  EXPECT_EQ(state.at("step").number(), 3.0);
  EXPECT_EQ(state.at("betas").at(1).number(), 0.999);
  EXPECT_EQ(state.at("flag").boolean(), true);
  EXPECT_EQ(state.at("raw").bytes().data.size(), 2u);
  EXPECT_EQ(text_of(state),
            "{'model': {'weight': tensor(Float [2, 3])}, 'step': 3, 'betas': [0.90000000000000002, 0.999], "
            "'name': 'it\\'s', 'nothing': None, 'flag': True, 'raw': bytes(2)}");
  EXPECT_EQ(state, Value(state));
  Value other = state;
  other["step"] = 4;
  EXPECT_FALSE(state == other);
  EXPECT_EQ(Value(std::nan("")), Value(std::nan("")));
}

TEST(Value, ErrorsSayWhatThereIs) {
  Value state;
  state["step"] = 3;
  EXPECT_EQ(error_of([&] { state.at("steps"); }), "The state dict has no 'steps' here. It has: step.");
  EXPECT_EQ(error_of([&] { state.at("step").tensor(); }),
            "Expected a tensor in the state dict, got integer 3.");
  EXPECT_EQ(error_of([&] { Value::list({1}).at(size_t{1}); }), "The list has 1 items, so none at index 1.");
  EXPECT_THAT(error_of([&] { Value{at::Tensor()}; }), ::testing::HasSubstr("undefined tensor"));
}

}  // namespace
}  // namespace tessera::checkpoint
