// The header of safetensors files: what is written is read back, and nothing malformed is.

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/safetensors.h>

#include <random>

#include <c10/util/irange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/directory.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

SafetensorsHeader parse(const std::string& header, int64_t data_size) {
  return parse_safetensors_header(header, 8 + static_cast<int64_t>(header.size()) + data_size,
                                  "x.safetensors");
}

std::string error_of_header(const std::string& header, int64_t data_size) {
  return error_of([&] { parse(header, data_size); });
}

std::vector<c10::ScalarType> all_dtypes() {
  std::vector<c10::ScalarType> dtypes;
  for (const auto i : c10::irange(static_cast<int>(c10::ScalarType::Undefined))) {
    dtypes.push_back(static_cast<c10::ScalarType>(i));
  }
  return dtypes;
}

TEST(Safetensors, RoundTrip) {
  std::mt19937 random(0);
  const std::vector<c10::ScalarType> known = {at::kBool,
                                              at::kByte,
                                              at::kChar,
                                              at::kShort,
                                              at::kUInt16,
                                              at::kInt,
                                              at::kUInt32,
                                              at::kLong,
                                              at::kUInt64,
                                              at::kHalf,
                                              at::kBFloat16,
                                              at::kFloat,
                                              at::kDouble,
                                              at::kFloat8_e5m2,
                                              at::kFloat8_e4m3fn,
                                              at::kFloat8_e5m2fnuz,
                                              at::kFloat8_e4m3fnuz,
                                              at::kFloat8_e8m0fnu,
                                              at::kComplexFloat};
  const std::vector<std::string> names = {"a",
                                          "",
                                          "model.weight",
                                          "quote\"back\\slash",
                                          "näme \U0001F600",
                                          std::string("nul\0tab\t\n", 9),
                                          "/../x",
                                          "{}[],:"};
  for (int round = 0; round < 200; ++round) {
    std::vector<SafetensorsEntry> tensors;
    int64_t end = 0;
    for (const std::string& name : names) {
      if (random() % 3 == 0) continue;
      SafetensorsEntry entry;
      entry.name = name;
      entry.dtype = known[random() % known.size()];
      for (size_t dims = random() % 4; dims > 0; --dims) entry.shape.push_back(random() % 4);
      tensors.push_back(entry);
    }
    std::map<std::string, std::string> metadata;
    if (round % 2) metadata = {{"format", "pt"}, {"DCP_SHARDING_INFO", "{\"a\": \"\\u00e4\"}"}, {"", "ü"}};
    const std::string bytes = make_safetensors_header(tensors, metadata);
    EXPECT_EQ(bytes.size() % 64, 0u);
    end = static_cast<int64_t>(bytes.size());
    for (const SafetensorsEntry& entry : tensors) {
      EXPECT_EQ(entry.offset, end);
      end += entry.length;
    }

    const TemporaryDirectory directory;
    File file = File::create(directory / "a");
    file.write(0, bytes.data(), bytes.size());
    const std::string data(static_cast<size_t>(end) - bytes.size(), 'x');
    file.write(static_cast<int64_t>(bytes.size()), data.data(), data.size());
    const SafetensorsHeader header = read_safetensors_header(file);
    EXPECT_EQ(header.metadata, metadata);
    EXPECT_EQ(header.data_begin, static_cast<int64_t>(bytes.size()));
    ASSERT_EQ(header.tensors.size(), tensors.size());
    for (const SafetensorsEntry& entry : tensors) {
      const auto found = std::ranges::find(header.tensors, entry.name, &SafetensorsEntry::name);
      ASSERT_NE(found, header.tensors.end());
      EXPECT_EQ(found->dtype, entry.dtype);
      EXPECT_EQ(found->shape, entry.shape);
      EXPECT_EQ(found->offset, entry.offset);
      EXPECT_EQ(found->length, entry.length);
    }
  }
}

TEST(Safetensors, EveryDtypeHasAFormToLieIn) {
  for (const c10::ScalarType dtype : all_dtypes()) {
    const StoredType stored = safetensors_stored_type(dtype, {3, 5});
    EXPECT_NO_THROW(safetensors_dtype(stored.dtype)) << dtype;
    EXPECT_EQ(byte_count(stored.shape, stored.dtype, ""), byte_count({3, 5}, dtype, "")) << dtype;
  }
  EXPECT_EQ(safetensors_stored_type(at::kComplexDouble, {3}).shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(safetensors_stored_type(at::kComplexDouble, {}).dtype, at::kDouble);
  EXPECT_EQ(safetensors_stored_type(at::kComplexHalf, {3}).dtype, at::kHalf);
  EXPECT_EQ(safetensors_stored_type(at::kComplexFloat, {3}).dtype, at::kComplexFloat);
  EXPECT_EQ(safetensors_dtype(at::kBFloat16), "BF16");
  EXPECT_THAT(error_of([] { safetensors_dtype(at::kComplexDouble); }), HasSubstr("complex128"));
}

TEST(Safetensors, ReadsFourBitFloatsTwoToAnElement) {
  const auto header = parse(R"({"a":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]}})", 6);
  EXPECT_EQ(header.tensors[0].dtype, c10::ScalarType::Float4_e2m1fn_x2);
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{3, 2}));
  EXPECT_THAT(error_of_header(R"({"a":{"dtype":"F4","shape":[3,3],"data_offsets":[0,5]}})", 5),
              HasSubstr("even"));
  EXPECT_THAT(error_of_header(R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]}})", 1),
              HasSubstr("even"));
}

TEST(Safetensors, TakesWhatTheFormatAllows) {
  EXPECT_EQ(parse("{}", 0).tensors.size(), 0u);
  EXPECT_EQ(parse("{}      ", 0).tensors.size(), 0u);
  // In any order, with unknown members and tensors without elements anywhere.
  const auto header = parse(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3],"more":[1]},
      "e":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]},"z":{"dtype":"F32","shape":[0],"data_offsets":[3,3]},
      "a":{"data_offsets":[0,1],"shape":[],"dtype":"BOOL"},"__metadata__":{}})",
                            3);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[3].name, "z");
}

TEST(Safetensors, RefusesMalformedHeaders) {
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  const std::string good = tensor("\"U8\"", "[2]", "[0,2]");
  ASSERT_EQ(parse(good, 2).tensors.size(), 1u);
  struct Case {
    std::string header;
    int64_t data;
    std::string error;
  };
  const std::string huge = "9223372036854775807";
  std::string deep(10000, '[');
  for (
      const Case& bad : std::vector<Case>{
          {"", 0, "no safetensors file"},
          {" {}", 0, "no safetensors file"},
          {"[]", 0, "no safetensors file"},
          {"{", 0, "not valid JSON"},
          {"{}x", 0, "not valid JSON"},
          {std::string("{}\0", 3), 0, "NUL"},
          {"{\"a\":1}", 0, "must be an object"},
          {"{\"\xff\":1}", 0, "not valid JSON"},
          {"{\"\\ud800\":1}", 0, "not valid JSON"},
          {"{\"a\":" + deep, 0, "nested deeper"},
          {good, 1, "cut short"},
          {good, 3, "its tensors end at"},
          {"{}", 1, "its tensors end at"},
          {tensor("\"X8\"", "[2]", "[0,2]"), 2, "dtype 'X8'"},
          {tensor("8", "[2]", "[0,2]"), 2, "'dtype' must be text"},
          {tensor("\"U8\"", "2", "[0,2]"), 2, "'shape' must be a list"},
          {tensor("\"U8\"", "[2.0]", "[0,2]"), 2, "list of integers"},
          {tensor("\"U8\"", "[\"2\"]", "[0,2]"), 2, "list of integers"},
          {tensor("\"U8\"", "[-2]", "[0,2]"), 2, "negative size"},
          {tensor("\"U8\"", "[-1,-2]", "[0,2]"), 2, "negative size"},
          {tensor("\"U8\"", "[3]", "[0,2]"), 2, "take 3"},
          {tensor("\"F32\"", "[2]", "[0,2]"), 2, "take 8"},
          {tensor("\"F32\"", "[" + huge + "]", "[0,2]"), 2, "64 bits"},
          {tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "64 bits"},
          {tensor("\"U8\"", "[9223372036854775808]", "[0,2]"), 2, "64 bits"},
          {tensor("\"U8\"", "[99999999999999999999999]", "[0,2]"), 2, "64 bits"},
          {tensor("\"U8\"", "[" + huge + "]", "[0," + huge + "]"), 2, "cut short"},
          {tensor("\"U8\"", "[0]", "[" + huge + "," + huge + "]"), 2, "64 bits"},
          {tensor("\"U8\"", "[2]", "[2]"), 2, "begins and ends"},
          {tensor("\"U8\"", "[2]", "[0,1,2]"), 2, "begins and ends"},
          {tensor("\"U8\"", "[2]", "[2,0]"), 2, "begins and ends"},
          {tensor("\"U8\"", "[2]", "[-2,0]"), 2, "begins and ends"},
          {tensor("\"U8\"", "[2]", "[1,3]"), 3, "without gap"},
          {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, "no 'data_offsets'"},
          {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", 2, "no 'dtype'"},
          {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", 2, "no 'shape'"},
          {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
           3, "without overlap"},
          {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
           3, "without gap"},
          {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
           2, "'a' twice"},
          {R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "'dtype' twice"},
          {R"({"__metadata__":{"a":1}})", 0, "must be text"},
          {R"({"__metadata__":[]})", 0, "must be an object"},
          {R"({"__metadata__":{"a":"1","a":"1"}})", 0, "'a' twice"},
      }) {
    EXPECT_THAT(error_of_header(bad.header, bad.data), HasSubstr(bad.error)) << bad.header.substr(0, 200);
  }
}

TEST(Safetensors, RefusesFilesThatAreNone) {
  const TemporaryDirectory directory;
  const auto error = [&](const std::string& bytes) {
    const std::string path = directory / "a";
    remove_all(path);
    write_text(path, bytes);
    return error_of([&] { read_safetensors_header(File::open(path)); });
  };
  EXPECT_THAT(error(""), HasSubstr("no safetensors file"));
  EXPECT_THAT(error("1234567"), HasSubstr("no safetensors file"));
  EXPECT_THAT(error(std::string("\x00\x00\x00\x00\x00\x00\x00\x80{", 9)), HasSubstr("no safetensors file"));
  EXPECT_THAT(error(std::string("\x01\xe1\xf5\x05\x00\x00\x00\x00{", 9)), HasSubstr("100000001 bytes"));
  EXPECT_THAT(error(std::string("\x03\x00\x00\x00\x00\x00\x00\x00{}", 10)), HasSubstr("cut short"));
  EXPECT_THAT(error(std::string("\x00\x00\x00\x00\x00\x00\x00\x00{}", 10)), HasSubstr("no safetensors file"));
}

TEST(Safetensors, EachCutFileIsRefused) {
  std::vector<SafetensorsEntry> tensors = {{"a", at::kFloat, {3}, 0, 0}, {"b", at::kByte, {5}, 0, 0}};
  std::string bytes = make_safetensors_header(tensors, {{"format", "pt"}});
  bytes.resize(bytes.size() + 17);
  const TemporaryDirectory directory;
  for (size_t size = 0; size < bytes.size(); ++size) {
    remove_all(directory / "a");
    write_text(directory / "a", bytes.substr(0, size));
    EXPECT_THROW(read_safetensors_header(File::open(directory / "a")), c10::Error) << size;
  }
}

TEST(Safetensors, RefusesToWriteWhatCouldNotBeRead) {
  const auto error = [](std::vector<SafetensorsEntry> tensors) {
    return error_of([&] { make_safetensors_header(tensors, {}); });
  };
  EXPECT_THAT(error({{"a", at::kFloat, {}, 0, 0}, {"a", at::kFloat, {}, 0, 0}}),
              HasSubstr("two tensors 'a'"));
  EXPECT_THAT(error({{"__metadata__", at::kFloat, {}, 0, 0}}), HasSubstr("cannot have the name"));
  EXPECT_THAT(error({{"a\xff", at::kFloat, {}, 0, 0}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(error({{"a", at::kComplexDouble, {}, 0, 0}}), HasSubstr("complex128"));
  EXPECT_THAT(error({{"a", at::kByte, {INT64_MAX}, 0, 0}, {"b", at::kByte, {1}, 0, 0}}),
              HasSubstr("64 bits"));
  EXPECT_THAT(error({{"a", at::kByte, {INT64_MAX}, 0, 0}}), HasSubstr("64 bits"));
}

}  // namespace
}  // namespace tessera::checkpoint
