#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/checkpoint/zip_archive.h>

#include <cstring>
#include <filesystem>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

// The files in TESSERA_CHECKPOINT_DATA were written by torch: data/make.py.
namespace tessera::checkpoint {
namespace {

using namespace std::string_literals;
using c10::ScalarType;
using testing::expect_error;
using Ints = std::vector<int64_t>;

std::string data(const std::string& name) { return c10::str(TESSERA_CHECKPOINT_DATA, "/", name); }
std::string content(const std::string& path) { return read_file(path, 1 << 20); }

/// A directory that goes with the test.
class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera_dcp_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no directory " << name;
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

  void write(const std::string& name, std::string_view bytes) const {
    std::filesystem::remove(path_ + "/" + name);
    File::create(path_ + "/" + name).write(0, bytes.data(), bytes.size());
  }

 private:
  std::string path_;
};

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  bool found = false;
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
    found = true;
  }
  EXPECT_TRUE(found) << from;
  return text;
}

template <typename T>
std::vector<T> elements(const std::string& directory, const TensorEntry& tensor, size_t chunk) {
  const Chunk& place = tensor.chunks.at(chunk);
  const File file = File::open(directory + "/" + place.file);
  const ByteRange range =
      find_torch_payload(file, place.offset, place.length, tensor.dtype, place.sizes, "The chunk");
  std::vector<T> result(static_cast<size_t>(range.length) / sizeof(T));
  file.read(range.offset, result.data(), static_cast<size_t>(range.length));
  EXPECT_EQ(range.crc32, zip_crc32(result.data(), static_cast<size_t>(range.length)));
  return result;
}

TEST(DCP, ReadsWhatTorchWrote) {
  const std::string directory = data("dcp");
  const Catalog catalog = read_dcp(directory);
  EXPECT_EQ(catalog.format, Format::DCP);
  const auto tensor = [&](const std::string& key) { return *catalog.leaves.at(key).tensor(); };
  const auto value = [&](const std::string& key) { return *catalog.leaves.at(key).value(); };
  EXPECT_EQ(catalog.leaves.size(), 12);

  const TensorEntry weight = tensor("model.weight");
  EXPECT_EQ(catalog.leaves.at("model.weight").path, (Path{"model", "weight"}));
  EXPECT_EQ(weight.dtype, ScalarType::Float);
  EXPECT_EQ(weight.shape, (Ints{5, 4}));
  ASSERT_EQ(weight.chunks.size(), 2);
  EXPECT_EQ(weight.chunks[1].offsets, (Ints{3, 0}));
  EXPECT_EQ(weight.chunks[1].sizes, (Ints{2, 4}));
  EXPECT_EQ(weight.chunks[1].container, Container::TorchZip);
  EXPECT_EQ(elements<float>(directory, weight, 0),
            (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(elements<float>(directory, weight, 1), (std::vector<float>{12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(elements<int64_t>(directory, tensor("model.columns"), 0), (Ints{0, 1, 3, 4}));
  EXPECT_EQ(elements<int64_t>(directory, tensor("model.columns"), 1), (Ints{2, 5}));
  // The second rank had none.
  ASSERT_EQ(tensor("model.row").chunks.size(), 1);
  EXPECT_EQ(elements<uint8_t>(directory, tensor("model.row"), 0), (std::vector<uint8_t>{7, 8}));
  EXPECT_EQ(tensor("optim.step").shape, Ints());
  EXPECT_EQ(elements<float>(directory, tensor("optim.step"), 0), std::vector<float>{3});
  EXPECT_EQ(tensor("half").dtype, ScalarType::BFloat16);
  EXPECT_EQ(elements<uint16_t>(directory, tensor("half"), 0), (std::vector<uint16_t>{0x3FC0, 0xC000}));
  EXPECT_EQ(tensor("unsigned").dtype, ScalarType::UInt16);
  EXPECT_EQ(elements<uint16_t>(directory, tensor("unsigned"), 0), std::vector<uint16_t>{65535});
  EXPECT_EQ(tensor("empty").shape, (Ints{0, 3}));
  EXPECT_TRUE(tensor("empty").chunks.empty());

  EXPECT_EQ(catalog.leaves.at("optim.param_groups.0.lr").path,
            (Path{"optim", "param_groups", int64_t{0}, "lr"}));
  EXPECT_EQ(value("optim.param_groups.0.lr"), Value(0.1));
  EXPECT_EQ(value("optim.param_groups.0.betas"), Value::list({0.9, 0.999}));
  EXPECT_EQ(value("optim.param_groups.0.fused"), Value());
  EXPECT_EQ(value("name"), Value("é"));
  EXPECT_EQ(value("bytes"), Value(Bytes{"\x00\xff"s}));
}

TEST(DCP, ReadsWhatItWrites) {
  const Directory directory;
  Catalog catalog = read_dcp(data("dcp"));
  std::map<std::string, ArchiveLocation> values;
  std::string file;
  for (auto& [key, leaf] : catalog.leaves) {
    if (const Value* value = leaf.value()) {
      const std::string archive = make_torch_archive(*value);
      values[key] = {"__0_0.distcp", static_cast<int64_t>(file.size()), static_cast<int64_t>(archive.size())};
      file += archive;
      continue;
    }
    for (Chunk& chunk : std::get<TensorEntry>(leaf.content).chunks) {
      const std::string archive =
          content(data("dcp/" + chunk.file))
              .substr(static_cast<size_t>(chunk.offset), static_cast<size_t>(chunk.length));
      chunk.file = "__0_0.distcp";
      chunk.offset = static_cast<int64_t>(file.size());
      file += archive;
    }
  }
  directory.write("__0_0.distcp", file);
  directory.write(kDCPMetadataFile, write_dcp_metadata(catalog, values));
  const Catalog back = read_dcp(directory.path());
  ASSERT_EQ(back.leaves.size(), catalog.leaves.size());
  for (const auto& [key, leaf] : catalog.leaves) {
    EXPECT_EQ(back.leaves.at(key).path, leaf.path) << key;
    EXPECT_TRUE(back.leaves.at(key).content == leaf.content) << key;
  }
  values.erase("name");
  expect_error<c10::Error>([&] { write_dcp_metadata(catalog, values); },
                           {"where the value 'name' was written"});
}

TEST(DCP, NamesDamagedFiles) {
  const Directory directory;
  expect_error<c10::Error>([&] { read_dcp(directory.path()); }, {directory.path(), "has no file .metadata"});
  const std::string metadata = content(data("dcp/.metadata"));
  directory.write(".metadata", metadata);
  directory.write("__0_0.distcp", content(data("dcp/__0_0.distcp")));
  expect_error<c10::Error>([&] { read_dcp(directory.path()); }, {"__1_0.distcp"});
  const std::string second = content(data("dcp/__1_0.distcp"));
  directory.write("__1_0.distcp", second.substr(0, second.size() - 1600));
  expect_error<c10::Error>([&] { read_dcp(directory.path()); },
                           {"'unsigned'", "__1_0.distcp", "the file ends at 15616"});
  std::string flipped = second;
  flipped[second.find("\xc3\xa9")] = '\xc4';  // of "é"
  directory.write("__1_0.distcp", flipped);
  expect_error<c10::Error>([&] { read_dcp(directory.path()); },
                           {"The value 'name'", "__1_0.distcp", "checksum is wrong"});
  directory.write("__1_0.distcp", second);
  read_dcp(directory.path());

  // Of the metadata itself, any end is too early.
  for (size_t size = 0; size < metadata.size(); ++size) {
    expect_error<c10::Error>([&] { parse_dcp_metadata(std::string_view(metadata).substr(0, size), "FILE"); },
                             {"FILE"});
  }
  directory.write(".metadata", replaced(metadata, "__1_0.distcp", "../../passwd"));
  expect_error<c10::Error>([&] { read_dcp(directory.path()); },
                           {".metadata names the file '../../passwd'", "does not lie in"});
  directory.write(".metadata", replaced(metadata, "__1_0.distcp", "__0_0.distcp"));
  expect_error<c10::Error>([&] { read_dcp(directory.path()); }, {"where something else ends"});
  expect_error<c10::TypeError>(
      [&] { parse_dcp_metadata(replaced(metadata, "BytesStorageMetadata", "BytesStorageMetadatb"), "FILE"); },
      {"FILE holds a Python object of type", "BytesStorageMetadatb"});
  // One key twice, a path that does not fit its key.
  expect_error<c10::Error>([&] { parse_dcp_metadata(replaced(metadata, "half", "name"), "FILE"); },
                           {"the key 'name' twice"});
  expect_error<c10::Error>(
      [&] { parse_dcp_metadata(replaced(metadata, "model.columns", "model.colours"), "FILE"); },
      {"does not fit the key"});
}

/// A metadata of one tensor.
std::string metadata_of(const TensorEntry& tensor) {
  Catalog catalog;
  catalog.leaves["t"] = Leaf{{"t"}, tensor};
  return write_dcp_metadata(catalog, {});
}

TEST(DCP, RefusesWhatCannotBe) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const auto refuses = [](const TensorEntry& tensor, std::string_view part) {
    expect_error<c10::Error>([&] { parse_dcp_metadata(metadata_of(tensor), "FILE"); }, {part});
  };
  const Chunk good{{0}, {4}, "f", 0, 1577, Container::TorchZip, std::nullopt};
  TensorEntry tensor{{4}, ScalarType::Float, {good}};
  EXPECT_TRUE(*parse_dcp_metadata(metadata_of(tensor), "FILE").catalog.leaves.at("t").tensor() == tensor);
  const auto with = [&](auto&& change) {
    TensorEntry changed = tensor;
    change(changed.chunks[0]);
    return changed;
  };
  // A chunk whose place is not said: the last offset is that of its entry in storage_data.
  std::string moved = metadata_of(tensor);
  moved[moved.rfind("K\0\x85"s) + 1] = 1;
  expect_error<c10::Error>([&] { parse_dcp_metadata(moved, "FILE"); },
                           {"storage_data does not say where the chunk [0] of 't' is"});
  refuses({{-4}, ScalarType::Float, {}}, "negative");
  refuses({{huge, huge}, ScalarType::Float, {}}, "64 bits");
  refuses({{4}, ScalarType::Float, {}}, "holds the element");
  refuses({{4, 1}, ScalarType::Float, {good}}, "number of dims");
  refuses({{4}, ScalarType::Float, {good, good}}, "two entries for the same part of 't'");
  refuses({Ints(100, 1), ScalarType::Float, {}}, "more than 64 dims");
  refuses(with([](Chunk& chunk) { chunk.offsets = {1}; }), "does not lie in");
  refuses(with([&](Chunk& chunk) { chunk.offsets = {huge}; }), "does not lie in");
  refuses(with([](Chunk& chunk) { chunk.sizes = {-4}; }), "negative");
  refuses(with([](Chunk& chunk) { chunk.length = 15; }), "15 bytes");
  refuses(with([](Chunk& chunk) { chunk.length = -1; }), "which cannot be");
  refuses(with([&](Chunk& chunk) { chunk.offset = huge; }), "which cannot be");
  refuses(with([](Chunk& chunk) { chunk.file = "/etc/passwd"; }),
          "does not lie in the checkpoint's directory");
  refuses(with([](Chunk& chunk) { chunk.file = "a/../../b"; }), "does not lie in the checkpoint's directory");
  refuses(with([](Chunk& chunk) { chunk.file = std::string(5000, 'f'); }), "too long");
}

TEST(TorchArchive, IsWhatTorchWrites) {
  // But for the id, 40 digits, and its checksum, which is there twice.
  const auto without_id = [](std::string archive) {
    const size_t at = archive.find("ZZ", archive.find("serialization_id"));
    const size_t id = archive.find_first_not_of('Z', at);
    archive.replace(id, 40, 40, '0');
    archive.replace(id + 44, 4, 4, '0');
    archive.replace(archive.rfind("PK\x01\x02") + 16, 4, 4, '0');
    return archive;
  };
  // torch calls the archive as the file is called, unless it writes into a stream, as DCP does.
  const Catalog catalog = read_dcp(data("dcp"));
  for (const auto& [key, leaf] : catalog.leaves) {
    const TensorEntry* tensor = leaf.tensor();
    if (tensor == nullptr) continue;
    for (const Chunk& chunk : tensor->chunks) {
      const std::string archive =
          content(data("dcp/" + chunk.file))
              .substr(static_cast<size_t>(chunk.offset), static_cast<size_t>(chunk.length));
      const ByteRange range = find_torch_payload(archive, tensor->dtype, chunk.sizes, key);
      const std::string elements =
          archive.substr(static_cast<size_t>(range.offset), static_cast<size_t>(range.length));
      const TorchArchive made = make_torch_archive(tensor->dtype, chunk.sizes, range.length, *range.crc32);
      EXPECT_EQ(made.before.size() % 64, 0);
      EXPECT_TRUE(without_id(made.before + elements + made.after) == without_id(archive)) << key;
    }
  }
}

TEST(TorchArchive, FindsContiguousTensors) {
  const auto find = [](const std::string& name, ScalarType dtype, Ints sizes) {
    return find_torch_payload(content(data(name)), dtype, sizes, "The tensor");
  };
  const ByteRange global = find("whole.pt", ScalarType::Float, {3, 4});
  EXPECT_EQ(global.length, 48);
  EXPECT_TRUE(global.crc32);
  // A part of a storage: its checksum is not that of the tensor.
  const ByteRange rows = find("rows.pt", ScalarType::Float, {2, 4});
  EXPECT_EQ(rows.length, 32);
  EXPECT_FALSE(rows.crc32);
  float first = 0;
  std::memcpy(&first, content(data("rows.pt")).data() + rows.offset, sizeof(first));
  EXPECT_EQ(first, 4);

  expect_error<c10::Error>(
      [&] {
        find("whole.pt", ScalarType::Int, {3, 4});
      },
      {"The tensor holds a tensor of dtype torch.float32", "one of torch.int32"});
  expect_error<c10::Error>(
      [&] {
        find("whole.pt", ScalarType::Float, {4, 3});
      },
      {"holds a tensor of shape [3, 4], but should hold one of [4, 3]"});
  EXPECT_EQ(find("transposed.pt", ScalarType::Float, {4, 3}).strides, (Ints{1, 4}));
  EXPECT_TRUE(find("whole.pt", ScalarType::Float, {3, 4}).strides.empty());
  expect_error<c10::Error>([&] { find("conjugated.pt", ScalarType::ComplexFloat, {1}); },
                           {"lazily conjugated"});
  expect_error<c10::TypeError>([&] { find("values.pt", ScalarType::Float, {1}); },
                               {"_codecs.encode", "only plain tensors"});

  const std::string archive = content(data("whole.pt"));
  for (size_t size = 0; size < archive.size(); ++size) {
    expect_error<c10::Error>(
        [&] {
          find_torch_payload(archive.substr(0, size), ScalarType::Float, Ints{3, 4}, "The tensor");
        },
        {"The tensor"});
  }
  expect_error<c10::Error>(
      [&] {
        find_torch_payload(replaced(archive, "little", "bigger"), ScalarType::Float, Ints{3, 4}, "T");
      },
      {"checksum is wrong"});
}

TEST(TorchArchive, ReadsValues) {
  const auto read = [](const std::string& name) {
    return read_torch_value(content(data(name)), "The value");
  };
  Value dict = Value::dict();
  dict["k"] = Bytes{};
  EXPECT_EQ(read("values.pt"), Value::list({Value(), true, -129, int64_t{1} << 40, 0.5, "é",
                                            Bytes{"\x00\xff"s}, Value::list({1, Value::list({2})}), dict}));
  EXPECT_EQ(read_torch_value(make_torch_archive(dict), "The value"), dict);
  expect_error<c10::TypeError>([&] { read("numpy.pt"); },
                               {"The value holds a Python object of type numpy.ndarray"});
  expect_error<c10::TypeError>([&] { read("tensor_in_tuple.pt"); }, {"type torch.Tensor in a place"});
  expect_error<c10::Error>([&] { read("large.pt"); }, {"an integer does not fit 64 bits"});
}

TEST(TorchArchive, MayBeLarge) {
  const Directory directory;
  const int64_t count = (int64_t{1} << 32) + 100;
  const int64_t begin = 1000;
  const TorchArchive archive = make_torch_archive(ScalarType::Byte, {count}, count, 7);
  const auto before = static_cast<int64_t>(archive.before.size());
  const int64_t length = before + count + static_cast<int64_t>(archive.after.size());
  File file = File::create(directory.path() + "/sparse");
  file.write(begin, archive.before.data(), archive.before.size());
  file.write(begin + before + count, archive.after.data(), archive.after.size());
  const ByteRange range = find_torch_payload(file, begin, length, ScalarType::Byte, {count}, "The tensor");
  EXPECT_EQ(range.offset, begin + before);
  EXPECT_EQ(range.length, count);
  EXPECT_EQ(range.crc32, 7);
  expect_error<c10::Error>(
      [&] { find_torch_payload(file, begin, length + 1, ScalarType::Byte, {count}, "The tensor"); },
      {"The tensor at byte 1000", "/sparse", "cut off"});
}

TEST(TorchArchive, ChecksumsGoOn) {
  const std::string text = "123456789";
  EXPECT_EQ(zip_crc32(text.data(), text.size()), 0xCBF43926);
  EXPECT_EQ(zip_crc32(text.data() + 4, 5, zip_crc32(text.data(), 4)), 0xCBF43926);
}

}  // namespace
}  // namespace tessera::checkpoint
