#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/json.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kShardingKey = "DCP_SHARDING_INFO";
constexpr int64_t kMaxWeightMap = 100'000'000;
constexpr size_t kMaxWeightMapValues = size_t{1} << 23;

/// Which file each tensor is in, of model.safetensors.index.json.
std::map<std::string, std::string> read_weight_map(const std::string& directory) {
  const std::string path = c10::str(directory, "/", kHuggingFaceIndexFile);
  const Value json = parse_json(read_file(path, kMaxWeightMap), path, kMaxWeightMapValues);
  std::map<std::string, std::string> files;
  for (const Value::Entry& entry : json_dict(json, "weight_map", {path})) {
    const auto* file = std::get_if<std::string>(&entry.value.content());
    TESSERA_CHECK(file, path, ": the file of tensor '", entry.key, "' must be text, but it is ",
                  entry.value.kind(), ".");
    path_in(directory, *file, path);
    files.emplace(entry.key, *file);
  }
  return files;
}

/// Adds a chunk; the tensor's shape grows so that it lies in it.
void add_chunk(Catalog& catalog, const SafetensorsEntry& entry, std::vector<int64_t> offsets,
               const std::string& file, const std::string& path) {
  const std::string what = c10::str(path, ", tensor '", entry.name, "'");
  auto [found, fresh] = catalog.leaves.try_emplace(entry.name);
  Leaf& leaf = found->second;
  if (fresh) {
    TensorEntry tensor;
    tensor.dtype = entry.dtype;
    tensor.shape.resize(entry.shape.size());
    leaf = {{entry.name}, std::move(tensor)};
  }
  auto& tensor = std::get<TensorEntry>(leaf.content);
  TESSERA_CHECK(tensor.dtype == entry.dtype && tensor.shape.size() == entry.shape.size(), what,
                " has another dtype or number of dims here than in another file.");
  TESSERA_CHECK(offsets.size() == entry.shape.size(), what, " has offsets for ", offsets.size(),
                " dims, but ", entry.shape.size(), " dims.");
  for (const auto dim : c10::irange(offsets.size())) {
    int64_t end = 0;
    TESSERA_CHECK(offsets[dim] >= 0 && !__builtin_add_overflow(offsets[dim], entry.shape[dim], &end), what,
                  " has the offset ", offsets[dim], ", which no tensor can have.");
    tensor.shape[dim] = std::max(tensor.shape[dim], end);
  }
  if (entry.length == 0) return;
  tensor.chunks.push_back(
      {std::move(offsets), entry.shape, file, entry.offset, entry.length, Container::Raw, {}});
}

/// Where the chunks of a file belong, if it says so.
std::optional<Value> read_sharding(const SafetensorsHeader& header, const std::string& path) {
  const auto found = header.metadata.find(kShardingKey);
  if (found == header.metadata.end()) return std::nullopt;
  return parse_json(found->second, c10::str(path, ", ", kShardingKey), kMaxWeightMapValues);
}

}  // namespace

Catalog read_huggingface(const std::string& path) {
  std::string directory = path;
  std::map<std::string, std::string> weight_map;
  std::set<std::string> files;
  if (!is_directory(path)) {
    directory = parent_of(path);
    files.insert(path.substr(path.rfind('/') + 1));
  } else if (exists(c10::str(path, "/", kHuggingFaceIndexFile))) {
    weight_map = read_weight_map(path);
    for (const auto& [key, file] : weight_map) files.insert(file);
  } else if (exists(c10::str(path, "/", kSingleFile))) {
    files.insert(kSingleFile);
  } else {
    for (const std::string& name : list_directory(path)) {
      if (name.ends_with(".safetensors")) files.insert(name);
    }
    TESSERA_CHECK(!files.empty(), "The directory ", path, " has no ", kHuggingFaceIndexFile, ", ",
                  kSingleFile, " or other .safetensors file.");
  }

  Catalog catalog;
  catalog.format = Format::HuggingFace;
  for (const std::string& name : files) {
    const File file = File::open(c10::str(directory, "/", name));
    const SafetensorsHeader header = read_safetensors_header(file);
    const auto sharding = read_sharding(header, file.path());
    std::map<std::string_view, const Value*> shards;
    if (sharding) {
      TESSERA_CHECK(sharding->is_dict(), file.path(), ", ", kShardingKey, " must be an object.");
      for (const Value::Entry& entry : sharding->entries()) shards.emplace(entry.key, &entry.value);
    }
    for (const SafetensorsEntry& entry : header.tensors) {
      const auto mapped = weight_map.find(entry.name);
      if (mapped != weight_map.end() && mapped->second != name) continue;
      std::vector<int64_t> offsets(entry.shape.size());
      if (sharding) {
        const JsonPlace place{file.path(), "tensor", entry.name};
        const auto shard = shards.find(entry.name);
        TESSERA_CHECK(shard != shards.end(), file.path(), ": ", kShardingKey, " does not say where tensor '",
                      entry.name, "' belongs.");
        offsets = json_integers(*shard->second, "saved_offsets", place);
      }
      add_chunk(catalog, entry, std::move(offsets), name, file.path());
    }
  }
  for (const auto& [key, file] : weight_map) {
    TESSERA_CHECK(catalog.leaves.contains(key), "Tensor '", key, "' is not in ", directory, "/", file,
                  ", where ", kHuggingFaceIndexFile, " says it is. The files are not of one checkpoint.");
  }
  check(catalog, path);
  return catalog;
}

std::vector<HuggingFaceFile> plan_huggingface_files(const std::vector<std::pair<std::string, int64_t>>& sizes,
                                                    int64_t file_limit) {
  TESSERA_CHECK_VALUE(file_limit > 0, "The size of a file must be positive, got ", file_limit, ".");
  std::vector<HuggingFaceFile> files;
  HuggingFaceFile current;
  int64_t current_size = 0;
  for (const auto& [key, size] : sizes) {
    if (size > file_limit) {
      files.push_back({"", {key}});
      continue;
    }
    if (current_size > file_limit - size) {
      files.push_back(std::exchange(current, {}));
      current_size = 0;
    }
    current.keys.push_back(key);
    current_size += size;
  }
  if (!current.keys.empty() || files.empty()) files.push_back(std::move(current));
  for (const auto i : c10::irange(files.size())) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    files[i].name = files.size() == 1 ? kSingleFile : name;
  }
  return files;
}

std::string write_huggingface_index(const std::vector<HuggingFaceFile>& files, int64_t total_size) {
  std::map<std::string_view, std::string_view> weight_map;
  for (const HuggingFaceFile& file : files) {
    for (const std::string& key : file.keys) weight_map.emplace(key, file.name);
  }
  std::string out =
      c10::str("{\n  \"metadata\": {\n    \"total_size\": ", total_size, "\n  },\n  \"weight_map\": {");
  const char* separator = "\n    ";
  for (const auto& [key, file] : weight_map) {
    out += std::exchange(separator, ",\n    ");
    append_json_text(out, key, "The name of a tensor");
    out += ": ";
    append_json_text(out, file, "The name of a file");
  }
  out += "\n  }\n}\n";
  return out;
}

}  // namespace tessera::checkpoint
