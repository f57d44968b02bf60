// Directories as Hugging Face's libraries and torch's HuggingFaceStorageWriter make them.

#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/safetensors.h>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/directory.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class HuggingFace : public ::testing::Test {
 protected:
  /// A file with these tensors, whose elements are zeros.
  void write(const std::string& name, std::vector<SafetensorsEntry> tensors,
             const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
    std::string bytes = make_safetensors_header(tensors, metadata);
    for (const SafetensorsEntry& entry : tensors)
      bytes.resize(bytes.size() + static_cast<size_t>(entry.length));
    write_text(directory / name, bytes);
  }
  static SafetensorsEntry entry(const std::string& name, std::vector<int64_t> shape,
                                c10::ScalarType dtype = at::kFloat) {
    return {name, dtype, std::move(shape), 0, 0};
  }
  void write_index(const std::string& weight_map) {
    write_text(directory / kHuggingFaceIndexFile,
               "{\"metadata\":{\"total_size\":1},\"weight_map\":" + weight_map + "}");
  }
  static const TensorEntry& tensor(const Catalog& catalog, const std::string& key) {
    return *catalog.leaves.at(key).tensor();
  }
  std::string error() {
    return error_of<c10::Error>([&] { read_huggingface(directory.path()); });
  }

  TemporaryDirectory directory;
};

TEST_F(HuggingFace, OneFile) {
  write("model.safetensors",
        {entry("model.weight", {2, 3}, at::kBFloat16), entry("empty", {0, 4}), entry("scalar", {})});
  write("other.safetensors", {entry("other", {1})});
  for (const std::string& path :
       {directory.path(), directory.path() + "/", directory / "model.safetensors"}) {
    const Catalog catalog = read_huggingface(path);
    EXPECT_EQ(catalog.format, Format::HuggingFace);
    ASSERT_EQ(catalog.leaves.size(), 3u);
    EXPECT_EQ(catalog.leaves.at("model.weight").path, (Path{"model.weight"}));
    EXPECT_EQ(tensor(catalog, "model.weight").dtype, at::kBFloat16);
    EXPECT_THAT(tensor(catalog, "model.weight").shape, ElementsAre(2, 3));
    ASSERT_EQ(tensor(catalog, "model.weight").chunks.size(), 1u);
    const Chunk& chunk = tensor(catalog, "model.weight").chunks[0];
    EXPECT_EQ(chunk.file, "model.safetensors");
    EXPECT_EQ(chunk.length, 12);
    EXPECT_EQ(chunk.offset % 64, 0);
    EXPECT_FALSE(chunk.checksums);
    EXPECT_TRUE(tensor(catalog, "empty").chunks.empty());
    EXPECT_THAT(tensor(catalog, "empty").shape, ElementsAre(0, 4));
    EXPECT_EQ(tensor(catalog, "scalar").chunks.size(), 1u);
  }
  EXPECT_EQ(read_huggingface(directory / "other.safetensors").leaves.size(), 1u);
}

TEST_F(HuggingFace, FilesWithAnIndex) {
  write("model-00001-of-00002.safetensors", {entry("a", {2}), entry("b", {3})});
  write("model-00002-of-00002.safetensors", {entry("c", {4}), entry("b", {5})});
  write("unrelated.safetensors", {entry("d", {4})});
  write_index(
      R"({"a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"})");
  const Catalog catalog = read_huggingface(directory.path());
  EXPECT_EQ(catalog.leaves.size(), 3u);
  EXPECT_THAT(tensor(catalog, "b").shape, ElementsAre(3));
  EXPECT_EQ(tensor(catalog, "c").chunks[0].file, "model-00002-of-00002.safetensors");
}

TEST_F(HuggingFace, FilesWithoutAnIndex) {
  write("x.safetensors", {entry("a", {2})});
  write("y.safetensors", {entry("b", {3})});
  EXPECT_EQ(read_huggingface(directory.path()).leaves.size(), 2u);
  write("z.safetensors", {entry("b", {3})});
  EXPECT_THAT(error(), HasSubstr("'b'"));
}

TEST_F(HuggingFace, ThroughLinksAsInTheCache) {
  make_directory(directory / "snapshot");
  write("blob", {entry("a", {2})});
  ASSERT_EQ(::symlink("../blob", (directory / "snapshot/model.safetensors").c_str()), 0);
  EXPECT_EQ(read_huggingface(directory / "snapshot").leaves.size(), 1u);
}

TEST_F(HuggingFace, ShardedFiles) {
  const auto info = [](const std::string& text) {
    return std::map<std::string, std::string>{
        {"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", text}};
  };
  write("shard-00001-model-00001-of-00001.safetensors", {entry("w", {2, 3}), entry("s", {}), entry("e", {0})},
        info(R"({"w":{"saved_offsets":[0,0]},"s":{"saved_offsets":[]},"e":{"saved_offsets":[0]}})"));
  write("shard-00002-model-00001-of-00001.safetensors", {entry("w", {1, 3})},
        info(R"({"w":{"saved_offsets":[2,0]}})"));
  const Catalog catalog = read_huggingface(directory.path());
  EXPECT_THAT(tensor(catalog, "w").shape, ElementsAre(3, 3));
  ASSERT_EQ(tensor(catalog, "w").chunks.size(), 2u);
  EXPECT_THAT(tensor(catalog, "w").chunks[1].offsets, ElementsAre(2, 0));
  EXPECT_THAT(tensor(catalog, "e").shape, ElementsAre(0));

  const std::string third = "shard-00003-model-00001-of-00001.safetensors";
  const auto with = [&](std::vector<int64_t> shape, const std::string& text,
                        c10::ScalarType dtype = at::kFloat) {
    remove_all(directory / third);
    write(third, {entry("w", std::move(shape), dtype)}, info(text));
    return error();
  };
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[4,0]}})"), HasSubstr("holds the element [3, 0]"));
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[2,0]}})"), HasSubstr("'w'"));
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[-3,0]}})"), HasSubstr("offset -3"));
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[9223372036854775807,0]}})"),
              HasSubstr("no tensor can have"));
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[3]}})"), HasSubstr("offsets for 1"));
  EXPECT_THAT(with({1, 3}, R"({"w":{}})"), HasSubstr("no 'saved_offsets'"));
  EXPECT_THAT(with({1, 3}, R"({})"), HasSubstr("does not say where tensor 'w'"));
  EXPECT_THAT(with({1, 3}, R"([])"), HasSubstr("must be an object"));
  EXPECT_THAT(with({1, 3}, R"({"w")"), HasSubstr("not valid JSON"));
  EXPECT_THAT(with({3}, R"({"w":{"saved_offsets":[3]}})"), HasSubstr("another dtype or number of dims"));
  EXPECT_THAT(with({1, 3}, R"({"w":{"saved_offsets":[3,0]}})", at::kHalf), HasSubstr("another dtype"));
}

TEST_F(HuggingFace, SaysWhatIsWrong) {
  EXPECT_THAT(error(), HasSubstr("has no model.safetensors.index.json"));
  EXPECT_THAT(error_of([&] { read_huggingface(directory / "none"); }), HasSubstr("No such file"));
  write("a.safetensors", {entry("a", {2})});
  const auto with = [&](const std::string& map) {
    remove_all(directory / kHuggingFaceIndexFile);
    write_index(map);
    return error();
  };
  EXPECT_THAT(with(R"({"b":"a.safetensors"})"), HasSubstr("Tensor 'b' is not in"));
  EXPECT_THAT(with(R"({"a":"b.safetensors"})"), HasSubstr("No such file"));
  EXPECT_THAT(with(R"({"a":"../a.safetensors"})"), HasSubstr("directory"));
  EXPECT_THAT(with(R"({"a":"/etc/passwd"})"), HasSubstr("directory"));
  EXPECT_THAT(with(R"({"a":1})"), HasSubstr("must be text"));
  EXPECT_THAT(with(R"([])"), HasSubstr("must be an object"));
  remove_all(directory / kHuggingFaceIndexFile);
  write_text(directory / kHuggingFaceIndexFile, "{}");
  EXPECT_THAT(error(), HasSubstr("no 'weight_map'"));
}

std::vector<std::vector<std::string>> plan(const std::vector<std::pair<std::string, int64_t>>& sizes,
                                           int64_t limit) {
  std::vector<std::vector<std::string>> keys;
  for (const HuggingFaceFile& file : plan_huggingface_files(sizes, limit)) keys.push_back(file.keys);
  return keys;
}

TEST(HuggingFacePlan, IsThatOfTransformers) {
  // The example of huggingface_hub's documentation.
  EXPECT_THAT(plan({{"a", 6}, {"b", 6}, {"c", 2}, {"d", 6}, {"e", 2}, {"f", 2}}, 10),
              ElementsAre(ElementsAre("a"), ElementsAre("b", "c"), ElementsAre("d", "e", "f")));
  // A larger one has a file of its own, and does not end the one that is being filled.
  EXPECT_THAT(plan({{"a", 2}, {"b", 11}, {"c", 2}}, 10),
              ElementsAre(ElementsAre("b"), ElementsAre("a", "c")));
  EXPECT_THAT(plan({{"a", 10}, {"b", 0}}, 10), ElementsAre(ElementsAre("a", "b")));
  EXPECT_THAT(plan({}, 10), ElementsAre(ElementsAre()));
  EXPECT_EQ(plan_huggingface_files({{"a", 1}}, 10)[0].name, "model.safetensors");
  EXPECT_EQ(plan_huggingface_files({{"a", 8}, {"b", 8}}, 10)[1].name, "model-00002-of-00002.safetensors");
  EXPECT_THAT(error_of([] { plan({}, 0); }), HasSubstr("positive"));
}

TEST_F(HuggingFace, WritesAnIndexThatItReads) {
  const auto files = plan_huggingface_files({{"b\"", 8}, {"a", 8}}, 10);
  for (const HuggingFaceFile& file : files) write(file.name, {entry(file.keys[0], {2})});
  const std::string text = write_huggingface_index(files, 16);
  EXPECT_EQ(text,
            "{\n  \"metadata\": {\n    \"total_size\": 16\n  },\n  \"weight_map\": {\n"
            "    \"a\": \"model-00002-of-00002.safetensors\",\n"
            "    \"b\\\"\": \"model-00001-of-00002.safetensors\"\n  }\n}\n");
  write_text(directory / kHuggingFaceIndexFile, text);
  EXPECT_EQ(read_huggingface(directory.path()).leaves.size(), 2u);
}

}  // namespace
}  // namespace tessera::checkpoint
