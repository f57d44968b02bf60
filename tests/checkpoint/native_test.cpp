// index.json: what is written is read back, and nothing that was changed is.

#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/native.h>

#include <cmath>
#include <limits>
#include <random>

#include <c10/util/irange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kNames = {"a",
                                         "",
                                         "layers.0.weight",
                                         ".",
                                         "..",
                                         "a.",
                                         "quote\"back\\slash/",
                                         "näme \U0001F600",
                                         std::string("nul\0tab\t\n\x1f\x7f", 11),
                                         "$bytes",
                                         "crc32c",
                                         "0"};

Leaf tensor_leaf(Path path) {
  TensorEntry tensor;
  tensor.shape = {4, 6};
  tensor.chunks = {{{0, 0}, {4, 3}, "a.safetensors", 128, 48, Container::Raw, Checksums{32, {0xe3069283, 7}}},
                   {{0, 3}, {4, 3}, "dir/b.safetensors", int64_t{1} << 40, 48, Container::Raw, {}}};
  return {std::move(path), std::move(tensor)};
}

void expect_same(const Catalog& a, const Catalog& b) {
  EXPECT_EQ(a.format, b.format);
  ASSERT_EQ(a.leaves.size(), b.leaves.size());
  for (const auto& [key, leaf] : a.leaves) {
    ASSERT_TRUE(b.leaves.contains(key)) << key;
    const Leaf& other = b.leaves.at(key);
    EXPECT_EQ(leaf.path, other.path) << key;
    EXPECT_TRUE(leaf.content == other.content) << key;
  }
}

Catalog round_trip(const Catalog& catalog) {
  const std::string text = write_index(catalog);
  Catalog back = parse_index(text, "index.json");
  expect_same(catalog, back);
  EXPECT_EQ(write_index(back), text);
  return back;
}

Catalog sample() {
  Catalog catalog;
  catalog.leaves["model.weight"] = tensor_leaf({"model", "weight"});
  catalog.leaves["model.bias.x"] = tensor_leaf({"model", "bias.x"});
  catalog.leaves["optimizer.groups.0.lr"] = {{"optimizer", "groups", 0, "lr"}, Value(0.1)};
  catalog.leaves["step"] = {{"step"}, Value(7)};
  return catalog;
}

TEST(Index, RoundTrip) { round_trip(sample()); }

TEST(Index, OfNothing) {
  round_trip({});
  // A state dict that is a single leaf.
  Catalog catalog;
  catalog.leaves[""] = {{}, Value(1)};
  round_trip(catalog);
}

TEST(Index, KeepsOddKeysAndPaths) {
  Catalog catalog;
  for (const std::string& outer : kNames) {
    for (const std::string& inner : kNames) {
      const Path path = {"a" + outer, inner};
      catalog.leaves[c10::str(key_of(path), "#", catalog.leaves.size())] = tensor_leaf(path);
    }
  }
  for (const auto i : c10::irange(3)) catalog.leaves[c10::str("list.", i)] = {{"list", i}, Value(i)};
  round_trip(catalog);
}

TEST(Index, KeepsEveryDtypeAndShape) {
  Catalog catalog;
  for (const auto i : c10::irange(static_cast<int>(c10::ScalarType::Undefined))) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {0}, {3, 0, 2}, {2, 3}}) {
      TensorEntry tensor;
      tensor.dtype = dtype;
      tensor.shape = shape;
      const int64_t bytes = byte_count(shape, dtype, "");
      if (bytes > 0) tensor.chunks = {{std::vector<int64_t>(shape.size()), shape, "f", 0, bytes, {}, {}}};
      const std::string key = c10::str("t", catalog.leaves.size());
      catalog.leaves[key] = {{key}, tensor};
    }
  }
  round_trip(catalog);
}

TEST(Index, SaysPathsOnlyWhereKeysDoNot) {
  Catalog catalog;
  catalog.leaves["a.b.c"] = tensor_leaf({"a", "b", "c"});
  EXPECT_THAT(write_index(catalog), HasSubstr("\"paths\":{}"));
  catalog.leaves["a.b.c"] = tensor_leaf({"a", "b.c"});
  EXPECT_THAT(write_index(catalog), HasSubstr("\"a.b.c\":[\"a\",\"b.c\"]"));
}

TEST(Index, IsTheTextThatTheDocumentationSays) {
  Catalog catalog;
  catalog.leaves["w"] = {
      {"model", "w"},
      TensorEntry{{2}, at::kFloat, {{{0}, {2}, "f", 64, 8, Container::Raw, Checksums{1024, {0xe3069283}}}}}};
  catalog.leaves["step"] = {{"step"}, Value(7)};
  const std::string body =
      "{\"format\":\"tessera-checkpoint\",\"version\":1,\n\"tensors\":{\n"
      "\"w\":{\"dtype\":\"float32\",\"shape\":[2],\"chunks\":[{\"offsets\":[0],\"sizes\":[2],\"file\":\"f\","
      "\"offset\":64,\"length\":8,\"block\":1024,\"crc32c\":\"e3069283\"}]}},\n"
      "\"values\":{\n\"step\":7},\n\"paths\":{\n\"w\":[\"model\",\"w\"]},";
  EXPECT_EQ(write_index(catalog), seal_index(body));
  EXPECT_THAT(seal_index(body), ::testing::EndsWith("\"}\n"));
}

TEST(Index, EveryChangedByteIsNoticed) {
  const std::string text = write_index(sample());
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int flip : {1, 2, 32, 128}) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      // Hexadecimal digits may be large.
      if (std::tolower(changed[i]) == text[i] && i + 11 >= text.size()) continue;
      EXPECT_THROW(parse_index(changed, "index.json"), c10::Error) << i << " " << flip;
    }
    EXPECT_THROW(parse_index(text.substr(0, i), "index.json"), c10::Error) << i;
    EXPECT_THROW(parse_index(text.substr(0, i) + text.substr(i + 1), "index.json"), c10::Error) << i;
  }
  EXPECT_THROW(parse_index(text + "\n", "index.json"), c10::Error);
}

TEST(Index, SaysWhatIsWrong) {
  const auto error = [](const std::string& text) {
    return error_of([&] { parse_index(text, "p/index.json"); });
  };
  EXPECT_THAT(error(""), AllOf(HasSubstr("p/index.json"), HasSubstr("does not begin")));
  EXPECT_THAT(error("{\"format\":\"tessera-checkpoint\",\"version\":2,..."), HasSubstr("version 2"));
  EXPECT_THAT(error("{\"format\":\"tessera-checkpoint\",\"version\":x"), HasSubstr("version"));
  EXPECT_THAT(error("{\"format\":\"tessera-checkpoint\",\"version\":1,"), HasSubstr("cut short"));
  std::string text = write_index(sample());
  text[text.find("float32") + 6] = '4';
  EXPECT_THAT(error(text), HasSubstr("checksum"));
}

/// An index with a valid checksum and these members.
std::string index_of(const std::string& tensors, const std::string& values = "{}",
                     const std::string& paths = "{}") {
  return seal_index(c10::str("{\"format\":\"tessera-checkpoint\",\"version\":1,\n\"tensors\":", tensors,
                             ",\"values\":", values, ",\"paths\":", paths, ","));
}

TEST(Index, BelievesNothing) {
  const auto chunk = [](const std::string& members) {
    return "{\"a\":{\"dtype\":\"uint8\",\"shape\":[4],\"chunks\":[{" + members + "}]}}";
  };
  const std::string box = "\"offsets\":[0],\"sizes\":[4],";
  const std::string place = "\"file\":\"f\",\"offset\":0,\"length\":4";
  ASSERT_NO_THROW(parse_index(index_of(chunk(box + place)), "index.json"));
  struct Case {
    std::string text;
    std::string error;
  };
  const std::string huge = "9223372036854775807";
  const std::string deep = std::string(1000, '[') + std::string(1000, ']');
  for (const Case& bad : std::vector<Case>{
           {index_of("[]"), "'tensors' must be an object"},
           {index_of("{}", "0"), "'values' must be an object"},
           {index_of("{}", "{}", "null"), "'paths' must be an object"},
           {seal_index("{\"format\":\"tessera-checkpoint\",\"version\":1,"), "no 'tensors'"},
           {index_of("{\"a\":1}"), "must be an object"},
           {index_of("{\"a\":{}}"), "no 'dtype'"},
           {index_of("{\"a\":{\"dtype\":\"float31\"}}"), "dtype 'float31'"},
           {index_of("{\"a\":{\"dtype\":\"uint8\"}}"), "no 'shape'"},
           {index_of("{\"a\":{\"dtype\":\"uint8\",\"shape\":[4]}}"), "no 'chunks'"},
           {index_of("{\"a\":{\"dtype\":\"uint8\",\"shape\":[4],\"chunks\":[]}}"), "holds the element"},
           {index_of("{\"a\":{\"dtype\":\"uint8\",\"shape\":[-4],\"chunks\":[]}}"), "negative"},
           {index_of("{\"a\":{\"dtype\":\"uint8\",\"shape\":[" + huge + "," + huge + "],\"chunks\":[]}}"),
            "64 bits"},
           {index_of("{\"a\":{\"dtype\":\"uint8\",\"shape\":[4],\"chunks\":[1]}}"), "must be an object"},
           {index_of(chunk(place)), "no 'offsets'"},
           {index_of(chunk("\"offsets\":[0,0],\"sizes\":[4]," + place)), "number of dims"},
           {index_of(chunk("\"offsets\":[1],\"sizes\":[4]," + place)), "does not lie in"},
           {index_of(chunk("\"offsets\":[" + huge + "],\"sizes\":[4]," + place)), "does not lie in"},
           {index_of(chunk("\"offsets\":[0],\"sizes\":[3],\"file\":\"f\",\"offset\":0,\"length\":3")),
            "element [3]"},
           {index_of(chunk(box + "\"file\":\"../f\",\"offset\":0,\"length\":4")), "directory"},
           {index_of(chunk(box + "\"file\":\"/f\",\"offset\":0,\"length\":4")), "directory"},
           {index_of(chunk(box + "\"file\":\"\",\"offset\":0,\"length\":4")), "directory"},
           {index_of(chunk(box + "\"file\":\"f\\u0000\",\"offset\":0,\"length\":4")), "directory"},
           {index_of(chunk(box + "\"file\":\"f\",\"offset\":0,\"length\":5")), "5 bytes"},
           {index_of(chunk(box + "\"file\":\"f\",\"offset\":-1,\"length\":4")), "negative"},
           {index_of(chunk(box + "\"file\":\"f\",\"offset\":" + huge + ",\"length\":4")), "64 bits"},
           {index_of(chunk(box + "\"file\":\"f\",\"offset\":0.0,\"length\":4")), "must be an integer"},
           {index_of(chunk(box + place + ",\"block\":4")), "no 'crc32c'"},
           {index_of(chunk(box + place + ",\"crc32c\":\"00000000\"")), "no 'block'"},
           {index_of(chunk(box + place + ",\"block\":4,\"crc32c\":\"0000000\"")), "8 hexadecimal"},
           {index_of(chunk(box + place + ",\"block\":4,\"crc32c\":\"0000000g\"")), "hexadecimal"},
           {index_of(chunk(box + place + ",\"block\":4,\"crc32c\":\"-0000001\"")), "hexadecimal"},
           {index_of(chunk(box + place + ",\"block\":3,\"crc32c\":\"00000000\"")), "no multiple of 16"},
           {index_of(chunk(box + place + ",\"block\":0,\"crc32c\":\"00000000\"")), "blocks of 0"},
           {index_of(chunk(box + place + ",\"offset\":0")), "'offset' twice"},
           {index_of("{\"a\":1,\"a\":1}"), "'a' twice"},
           {index_of(chunk(box + place), "{\"a\":1}"), "both a tensor and a value"},
           {index_of("{}", "{\"a\":" + deep + "}"), "nested deeper"},
           {index_of("{}", "{\"a\":{\"$what\":1}}"), "unknown kind '$what'"},
           {index_of("{}", "{\"a\":{\"$bytes\":1}}"), "xpected text"},
           {index_of("{}", "{\"a\":{\"$bytes\":\"0\"}}"), "odd number"},
           {index_of("{}", "{\"a\":{\"$bytes\":\"0x\"}}"), "hexadecimal"},
           {index_of("{}", "{\"a\":{\"$float\":\"1\"}}"), "nan, inf"},
           {index_of("{}", "{\"a\":{\"$dict\":[]}}"), "must be an object"},
           {index_of("{}", "{\"a\":1}", "{\"b\":[\"b\"]}"), "neither a tensor nor a value"},
           {index_of("{}", "{\"a\":1}", "{\"a\":\"b\"}"), "must be a list"},
           {index_of("{}", "{\"a\":1}", "{\"a\":[1.5]}"), "text and integers"},
           {index_of("{}", "{\"a\":1,\"a.b\":1}"), "at or below 'a'"},
           {index_of("{}", "{\"a\":1,\"b\":1}", "{\"b\":[\"a\"]}"), "at or below 'a'"},
           {index_of("{}", "{\"a\":1,\"b\":1}", "{\"b\":[]}"), "at or below ''"},
           {index_of("{}", "{\"a\":1,\"b\":1}", "{\"b\":[0]}"), "of a dict and of a list"},
           {index_of("{}", "{\"a\":1}", "{\"a\":[1000000000000]}"), "none before it at index 0"},
           {index_of("{}", "{\"a\":1}", "{\"a\":[-1]}"), "none before it at index 0"},
           {index_of("{}", "{\"a\":1}", "{\"a\":[" + std::string(999, '0').replace(0, 0, "0") + "]}"),
            "JSON"},
       }) {
    EXPECT_THAT(error_of<c10::Error>([&] { parse_index(bad.text, "index.json"); }), HasSubstr(bad.error))
        << bad.text.substr(0, 300);
  }
  std::string steps = "0";
  for (int i = 0; i < 1000; ++i) steps += ",0";
  EXPECT_THAT(error_of([&] { parse_index(index_of("{}", "{\"a\":1}", "{\"a\":[" + steps + "]}"), "i"); }),
              HasSubstr("nested deeper"));
}

TEST(Index, RefusesToWriteWhatCouldNotBeRead) {
  const auto error = [](const std::string& key, const Leaf& leaf) {
    Catalog catalog;
    catalog.leaves[key] = leaf;
    return error_of([&] { write_index(catalog); });
  };
  EXPECT_THAT(error("a\xff", {{"a\xff"}, Value(1)}), AllOf(HasSubstr("not UTF-8"), HasSubstr("ename")));
  EXPECT_THAT(error("a", {{"a\xff"}, Value(1)}), HasSubstr("not UTF-8"));
  EXPECT_THAT(error("a", {{"a"}, Value("\xff")}), HasSubstr("not UTF-8"));
  EXPECT_THAT(error("a", {{1}, Value(1)}), HasSubstr("index 0"));
  Value deep;
  for (int i = 0; i < 200; ++i) deep = Value::list({deep});
  EXPECT_THAT(error("a", {{"a"}, deep}), HasSubstr("nested deeper"));
  Leaf leaf = tensor_leaf({"a"});
  std::get<TensorEntry>(leaf.content).chunks[0].file = "../a";
  EXPECT_THAT(error("a", leaf), HasSubstr("directory"));
  leaf = tensor_leaf({"a"});
  std::get<TensorEntry>(leaf.content).chunks[0].container = Container::TorchZip;
  EXPECT_THAT(error("a", leaf), HasSubstr("archive"));
}

Value random_value(std::mt19937& random, int depth) {
  switch (random() % (depth > 0 ? 9 : 7)) {
    case 0:
      return {};
    case 1:
      return random() % 2 == 0;
    case 2: {
      const int64_t choices[] = {
          0, -1, INT64_MAX, INT64_MIN, int64_t{1} << 53, static_cast<int64_t>(random())};
      return choices[random() % std::size(choices)];
    }
    case 3: {
      const double infinity = std::numeric_limits<double>::infinity();
      const double choices[] = {0.0,
                                -0.0,
                                1.0,
                                0.1,
                                1e300,
                                5e-324,
                                1e22,
                                infinity,
                                -infinity,
                                std::nan(""),
                                9007199254740993.0,
                                1.7976931348623157e308,
                                std::ldexp(random(), -40)};
      return choices[random() % std::size(choices)];
    }
    case 4:
    case 5:
      return kNames[random() % kNames.size()];
    case 6: {
      Bytes bytes;
      for (size_t size = random() % 300; size > 0; --size) bytes.data += static_cast<char>(random());
      return bytes;
    }
    case 7: {
      Value::List items;
      for (size_t size = random() % 4; size > 0; --size) items.push_back(random_value(random, depth - 1));
      return Value::list(items);
    }
    default: {
      Value dict = Value::dict();
      for (size_t size = random() % 4; size > 0; --size) {
        dict[kNames[random() % kNames.size()]] = random_value(random, depth - 1);
      }
      return dict;
    }
  }
}

TEST(ValueJson, RoundTrip) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    const Value value = random_value(random, 5);
    const std::string text = value_to_json(value);
    const Value back = value_from_json(text, "value");
    ASSERT_EQ(back, value) << text;
    ASSERT_EQ(value_to_json(back), text);
  }
}

TEST(ValueJson, KeepsWhatKindOfNumber) {
  EXPECT_EQ(value_to_json(Value(1.0)), "1.0");
  EXPECT_EQ(value_to_json(Value(1)), "1");
  EXPECT_EQ(value_to_json(Value(std::nan(""))), "{\"$float\":\"nan\"}");
  EXPECT_TRUE(std::signbit(value_from_json(value_to_json(Value(-0.0)), "").number()));
  EXPECT_EQ(value_to_json(Value(Bytes{std::string("\x00\xff", 2)})), "{\"$bytes\":\"00ff\"}");
  Value dict = Value::dict();
  dict["$bytes"] = "00";
  EXPECT_EQ(value_to_json(dict), "{\"$dict\":{\"$bytes\":\"00\"}}");
  dict["b"] = 1;
  EXPECT_EQ(value_to_json(dict), "{\"$bytes\":\"00\",\"b\":1}");
}

TEST(ValueJson, KeepsTheOrderOfDicts) {
  Value dict = Value::dict();
  for (const char* key : {"z", "a", "m"}) dict[key] = 1;
  EXPECT_EQ(value_from_json(value_to_json(dict), "").entries()[0].key, "z");
}

TEST(ValueJson, WritesAsDeepAsItReads) {
  const auto nested = [](int levels, bool odd) {
    Value value;
    for (int i = 0; i < levels; ++i) {
      Value outer = Value::dict();
      outer[odd ? "$" : "a"] = value;
      value = outer;
    }
    return value;
  };
  for (const bool odd : {false, true}) {
    int levels = 1;
    for (;; ++levels) {
      std::string text;
      try {
        text = value_to_json(nested(levels, odd));
      } catch (const c10::ValueError&) {
        break;
      }
      Catalog catalog;
      catalog.leaves["a"] = {{"a"}, nested(levels, odd)};
      round_trip(catalog);
    }
    EXPECT_GT(levels, 50);
  }
}

TEST(Json, RefusesWhatIsNone) {
  for (const std::string& text :
       {std::string(""), std::string("nan"), std::string("{'a':1}"), std::string("[1,]"), std::string("01"),
        std::string("1 2"), std::string("\"\n\""), std::string("1e999"), std::string("[1]\0", 4),
        std::string("\"\xc0\x80\""), std::string("// x\n1")}) {
    EXPECT_THROW(parse_json(text, "text", 100), c10::Error) << text;
  }
  EXPECT_THAT(error_of([] { parse_json("[1,2,3,4]", "text", 4); }), HasSubstr("too many"));
  EXPECT_EQ(parse_json("[1,2,3]", "text", 4).size(), 3u);
}

}  // namespace
}  // namespace tessera::checkpoint
