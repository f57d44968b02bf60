#include <tessera/checkpoint/pickle.h>

#include <limits>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::checkpoint::pickle {
namespace {

using namespace std::string_literals;
using testing::expect_error;

Value read(std::string_view bytes) { return to_value(Pickle(bytes, value_dialect(), "FILE")); }

std::string written(const Value& value) {
  Writer writer;
  writer.value(value);
  return std::move(writer).finish();
}

TEST(Pickle, ReadsWhatPythonWrites) {
  // {'a': (0.5, [None, True]), 'b': b'\x00\xff', 'c': -129, 'd': 2**40, 'e': ['é', 'é']}
  Value expected = Value::dict();
  expected["a"] = Value::list({0.5, Value::list({Value(), true})});
  expected["b"] = Bytes{"\x00\xff"s};
  expected["c"] = -129;
  expected["d"] = int64_t{1} << 40;
  expected["e"] = Value::list({"é", "é"});
  const std::string protocol_2 =
      "\x80\x02}q\x00(X\x01\x00\x00\x00"
      "aq\x01G?\xe0\x00\x00\x00\x00\x00\x00]q\x02(N\x88"
      "e\x86q\x03X\x01\x00\x00\x00"
      "bq\x04"
      "c_"
      "codecs\nencode\nq\x05X\x03\x00\x00\x00\x00\xc3\xbfq\x06X\x06\x00\x00\x00latin1q\x07\x86q\x08Rq\tX\x01"
      "\x00"
      "\x00\x00"
      "cq\nJ\x7f\xff\xff\xffX\x01\x00\x00\x00"
      "dq\x0b\x8a\x06\x00\x00\x00\x00\x00\x01X\x01\x00\x00\x00"
      "eq\x0c]q\r(X\x02\x00\x00\x00\xc3\xa9q\x0eh\x0e"
      "eu."s;
  const std::string protocol_4 =
      "\x80\x04\x95"
      "G\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01"
      "a\x94G?\xe0\x00\x00\x00\x00\x00\x00]\x94(N\x88"
      "e\x86\x94\x8c\x01"
      "b\x94"
      "C\x02\x00\xff\x94\x8c\x01"
      "c\x94J\x7f\xff\xff\xff\x8c\x01"
      "d\x94\x8a\x06\x00\x00\x00\x00\x00\x01\x8c\x01"
      "e\x94]\x94(\x8c\x02\xc3\xa9\x94h\x0a"
      "eu."s;
  EXPECT_EQ(read(protocol_2), expected);
  EXPECT_EQ(read(protocol_4), expected);
  for (const std::string& global : {protocol_2, protocol_4}) {
    for (size_t size = 0; size < global.size(); ++size) {
      expect_error<c10::Error>([&] { read(std::string_view(global).substr(0, size)); }, {"FILE"});
    }
    expect_error<c10::Error>([&] { read(global + "."); }, {"FILE goes on after the pickle's end"});
  }
}

TEST(Pickle, ReadsWhatItWrites) {
  Value value = Value::dict();
  Value integers = Value::list();
  for (int bit = 0; bit < 63; ++bit) {
    for (const int64_t near : {-1, 0, 1}) {
      integers.items().push_back((int64_t{1} << bit) + near);
      integers.items().push_back(-(int64_t{1} << bit) + near);
    }
  }
  integers.items().push_back(std::numeric_limits<int64_t>::max());
  integers.items().push_back(std::numeric_limits<int64_t>::min());
  value["integers"] = integers;
  value["floats"] = Value::list({0.1, -0.0, 1e308, std::numeric_limits<double>::infinity()});
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  value["bytes"] = Value::list({Bytes{bytes}, Bytes{}});
  value["texts"] = Value::list({"", "a\0b"s, "日本 😀", std::string(70000, 'x')});
  value["empty"] = Value::list({Value::list(), Value::dict()});
  Value many = Value::list();  // more than 256 things to remember
  for (int i = 0; i < 1000; ++i) many.items().push_back(std::to_string(i % 300));
  value["many"] = many;
  EXPECT_EQ(read(written(value)), value);
  expect_error<c10::Error>([] { written(Value("\xff")); }, {"not valid UTF-8"});
}

TEST(Pickle, RefusesNames) {
  expect_error<c10::TypeError>(
      [] {
        read(
            "\x80\x02"
            "cos\nsystem\nX\x02\x00\x00\x00ls\x85R."s);
      },
      {"FILE holds a Python object of type os.system", "byte 2", "only None, bool, int"});
  expect_error<c10::TypeError>([] { read("\x80\x04\x8c\x02os\x8c\x06system\x93."s); }, {"of type os.system"});
  expect_error<c10::TypeError>(
      [] {
        read(
            "\x80\x02"
            "cnumpy._core.multiarray\n_reconstruct\n."s);
      },
      {"of type numpy.ndarray"});
  expect_error<c10::TypeError>(
      [] {
        read(
            "\x80\x02"
            "c__builtin__\nset\n."s);
      },
      {"of type set;"});
  // Only names are called.
  expect_error<c10::Error>(
      [] {
        read(
            "\x80\x02X\x01\x00\x00\x00"
            "a)R."s);
      },
      {"calls a str"});
  // A name by itself is no value, and an allowed function takes only what torch gives it.
  expect_error<c10::Error>(
      [] {
        read(
            "\x80\x02"
            "c_codecs\nencode\n."s);
      },
      {"the value is the name _codecs.encode"});
  expect_error<c10::Error>(
      [] {
        read(
            "\x80\x02"
            "c_codecs\nencode\n)R."s);
      },
      {"_codecs.encode is made in an unknown way"});
}

TEST(Pickle, RefusesWhatIsNoPickle) {
  const auto refuses = [](const std::string& rest, std::string_view part) {
    expect_error<c10::Error>([&] { read("\x80\x04" + rest); }, {"FILE", part});
  };
  expect_error<c10::Error>([] { read("{}"); }, {"does not begin as a pickle"});
  expect_error<c10::Error>([] { read("\x80\x06N."); }, {"protocol 6"});
  refuses(".", "leaves 0 values");
  refuses("NN.", "leaves 2 values");
  refuses("(N.", "leaves 1 values");
  refuses("0", "takes a value that is not there");
  refuses("N(0", "takes a value that is not there");
  refuses("t", "takes a mark");
  refuses("h\x05.", "recalls the value 5");
  refuses("Nq\xff.", "remembers a value under the number 255");
  refuses("Nr\xff\xff\xff\xff.", "which it cannot need");
  refuses("NNa.", "appends to None");
  refuses("](Nu.", "sets items of a list");
  refuses("}(Nu.", "a key without a value");
  refuses("NNb.", "gives state to None");
  refuses("\xff.", "opcode 255");
  expect_error<c10::TypeError>([] { read("\x80\x04\x8f."); }, {"FILE", "of type set"});
  refuses("\x8c\x01\xff.", "not valid UTF-8");
  refuses("X\xff\xff\xff\xff.", "ends in the middle");
  refuses("\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "ends in the middle");
  refuses("\x8b\xff\xff\xff\xff.", "ends in the middle");
  refuses("\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "middle of a frame");
  refuses("}(NNu.", "the key of a dict is None");
  refuses("}(K\x01NK\x01Nu.", "the key '1' twice");
  refuses("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."s, "does not fit 64 bits");
}

TEST(Pickle, BoundsWhatSharedPartsBecome) {
  // A list that contains itself.
  expect_error<c10::Error>(
      [] {
        read(
            "\x80\x02]q\x00h\x00"
            "a."s);
      },
      {"contain themselves"});
  // Lists in lists.
  const std::string deep(1 << 17, ']');
  expect_error<c10::Error>([&] { read("\x80\x02" + deep + std::string(deep.size() - 1, 'a') + "."); },
                           {"nested more than 100 deep"});
  // Each list holds the one before ten times: 10^30 values in 1 kB.
  std::string bomb = "\x80\x02]q\x00"s;
  for (char i = 0; i < 30; ++i) {
    bomb += "](";
    for (int j = 0; j < 10; ++j) bomb += "h"s + i;
    bomb += "eq"s + static_cast<char>(i + 1);
  }
  expect_error<c10::Error>([&] { read(bomb + "."); }, {"leaves 31 values"});
  expect_error<c10::Error>([&] { read("\x80\x02(" + bomb.substr(2) + "t."); }, {"many times larger"});
  // A long text many times.
  std::string texts = "\x80\x02(X\x00\x00\x10\x00"s + std::string(1 << 20, 'x') + "q\x00"s;
  for (int i = 0; i < 100000; ++i) texts += "h\x00"s;
  expect_error<c10::Error>([&] { read(texts + "t."); }, {"many times larger"});
}

}  // namespace
}  // namespace tessera::checkpoint::pickle
