#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/error.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace tessera::checkpoint {

namespace {

using pickle::Kind;
using pickle::Node;
using DCPNodes = std::vector<const Node*>;

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kStorageModule = "torch.distributed.checkpoint.filesystem";

const pickle::Dialect& metadata_dialect() {
  static const pickle::Dialect dialect = [] {
    pickle::Dialect result{{
                               "torch.distributed.checkpoint.metadata.Metadata",
                               "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
                               "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
                               "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
                               "torch.distributed.checkpoint.metadata.TensorProperties",
                               "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
                               "torch.distributed.checkpoint.metadata.MetadataIndex",
                               "torch.distributed.checkpoint.metadata.StorageMeta",
                               "torch.distributed.checkpoint.filesystem._StorageInfo",
                               "torch.Size",
                               "torch.serialization._get_layout",
                               // What torch 2.0 to 2.2 wrote instead.
                               "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
                               "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
                               // The directory that it was saved in.
                               "pathlib.PosixPath",
                               "pathlib.WindowsPath",
                               "pathlib._local.PosixPath",
                               "pathlib._local.WindowsPath",
                               "collections.OrderedDict",
                           },
                           "the classes of torch.distributed.checkpoint's own metadata"};
    const auto& dtypes = torch_dtype_names();
    result.names.insert(result.names.end(), dtypes.begin(), dtypes.end());
    return result;
  }();
  return dialect;
}

/// Numbers for texts, of which equal ones have the same. Each place of the pickle is looked at once, so that a
/// long text that is shared many times costs its length once.
class TextNumbers {
 public:
  size_t number(std::string_view text) {
    const auto [place, fresh] = by_place_.try_emplace({text.data(), text.size()}, 0);
    if (fresh) place->second = by_text_.try_emplace(text, by_text_.size()).first->second;
    return place->second;
  }

 private:
  struct PlaceHash {
    size_t operator()(const std::pair<const char*, size_t>& place) const {
      return std::hash<const char*>()(place.first) ^ place.second;
    }
  };
  std::unordered_map<std::pair<const char*, size_t>, size_t, PlaceHash> by_place_;
  std::unordered_map<std::string_view, size_t> by_text_;
};

/// An item in storage_data: a tensor's chunk by its offsets, or, without, an object.
struct StorageKey {
  size_t name = 0;  // of TextNumbers
  std::optional<std::vector<int64_t>> offsets;
  bool operator==(const StorageKey&) const = default;
};

struct StorageKeyHash {
  size_t operator()(const StorageKey& key) const {
    size_t hash = key.name * 2 + key.offsets.has_value();
    if (key.offsets) {
      for (const int64_t offset : *key.offsets)
        hash = hash * 0x9E3779B97F4A7C15u + static_cast<size_t>(offset);
    }
    return hash ^ hash >> 29;
  }
};

/// Understands the nodes of a `.metadata`. Whatever is walked may be shared: work and memory stay in proportion to
/// the bytes of the pickle.
class MetadataReader {
 public:
  MetadataReader(std::string_view bytes, const std::string& path)
      : pickle_(bytes, metadata_dialect(), path), path_(path), chunk_budget_(bytes.size()) {}

  DCPMetadata read() {
    const Node& root = pickle_.root();
    need_class(root, kMetadataModule, "Metadata", "the checkpoint's metadata");
    read_storage(need_attribute(root, "storage_data"));
    read_paths(attribute(root, "planner_data"));
    const Node& entries = need_attribute(root, "state_dict_metadata");
    const DCPNodes& children = pickle_.dict(entries, "state_dict_metadata");
    for (size_t i = 0; i < children.size(); i += 2) read_leaf(*children[i], *children[i + 1]);
    check(result_.catalog, path_);
    return std::move(result_);
  }

 private:
  // Far more than any version has; a shared state with many would be searched many times.
  static constexpr size_t kMaxAttributes = 64;
  static constexpr size_t kMaxDims = 64;
  static constexpr size_t kMaxFileName = 4096;

  bool is_class(const Node& node, std::string_view module, std::string_view name) const {
    const std::string_view is = pickle_.name(node);
    return node.kind == Kind::Object && is.size() == module.size() + 1 + name.size() &&
           is.starts_with(module) && is.ends_with(name);
  }

  void need_class(const Node& node, std::string_view module, std::string_view name, const char* role) const {
    if (is_class(node, module, name)) return;
    pickle_.object(node, role);
    pickle_.fail(node,
                 c10::str(role, " is of class ", pickle_.name(node), ", but must be of ", module, ".", name));
  }

  /// nullptr if the object does not have it, or it is None.
  const Node* attribute(const Node& object, std::string_view name) const {
    const Node* state = pickle_.object(object, name)[pickle::kObjectState];
    if (state == nullptr) return nullptr;
    const DCPNodes& children = pickle_.dict(*state, "the state of an object");
    if (children.size() > 2 * kMaxAttributes) pickle_.fail(*state, "an object has too many attributes");
    for (size_t i = 0; i < children.size(); i += 2) {
      if (pickle_.text(*children[i], "the name of an attribute") != name) continue;
      return children[i + 1]->kind == Kind::None ? nullptr : children[i + 1];
    }
    return nullptr;
  }

  const Node& need_attribute(const Node& object, std::string_view name) const {
    const Node* value = attribute(object, name);
    if (value == nullptr)
      pickle_.fail(object, c10::str("an object of ", pickle_.name(object), " has no ", name));
    return *value;
  }

  /// A torch.Size, or a list or tuple of integers.
  std::vector<int64_t> sizes(const Node& node, const char* role) const {
    const Node* numbers = &node;
    if (node.kind == Kind::Object && pickle_.name(node) == "torch.Size") {
      const DCPNodes& arguments =
          pickle_.tuple(*pickle_.object(node, role)[pickle::kObjectArguments], "the arguments of torch.Size");
      if (arguments.size() != 1) pickle_.fail(node, "a torch.Size is made in an unknown way");
      numbers = arguments[0];
    }
    const DCPNodes& items = pickle_.items(*numbers, role);
    if (items.size() > kMaxDims) pickle_.fail(node, c10::str(role, " has more than ", kMaxDims, " dims"));
    std::vector<int64_t> result;
    result.reserve(items.size());
    for (const Node* item : items) {
      result.push_back(pickle_.integer(*item, role));
      if (result.back() < 0) pickle_.fail(node, c10::str(role, " has a negative number, ", result.back()));
    }
    return result;
  }

  void read_storage(const Node& node) {
    const DCPNodes& children = pickle_.dict(node, "storage_data");
    for (size_t i = 0; i < children.size(); i += 2) {
      const Node& index = *children[i];
      need_class(index, kMetadataModule, "MetadataIndex", "a key of storage_data");
      const std::string_view name = pickle_.text(need_attribute(index, "fqn"), "fqn");
      StorageKey key{names_.number(name), std::nullopt};
      if (const Node* offset = attribute(index, "offset")) key.offsets = sizes(*offset, "offset");
      need_class(*children[i + 1], kStorageModule, "_StorageInfo", "a value of storage_data");
      if (!storage_.emplace(std::move(key), children[i + 1]).second) {
        pickle_.fail(index, c10::str("storage_data has two entries for the same part of '", name, "'"));
      }
    }
  }

  void read_paths(const Node* node) {
    if (node == nullptr || node->kind != Kind::Dict) return;
    const DCPNodes& children = pickle_.dict(*node, "planner_data");
    for (size_t i = 0; i < children.size(); i += 2) {
      const std::string_view name = pickle_.text(*children[i], "a key of planner_data");
      if (!paths_.emplace(name, children[i + 1]).second) {
        pickle_.fail(*children[i], c10::str("planner_data has the key '", name, "' twice"));
      }
    }
  }

  ArchiveLocation location(const Node& node, std::string_view name) const {
    const std::string_view file = pickle_.text(need_attribute(node, "relative_path"), "relative_path");
    if (file.size() > kMaxFileName) pickle_.fail(node, "the name of a file is too long");
    ArchiveLocation place{std::string(file), pickle_.integer(need_attribute(node, "offset"), "offset"),
                          pickle_.integer(need_attribute(node, "length"), "length")};
    path_in("", place.file, path_);
    int64_t end = 0;
    if (place.offset < 0 || place.length < 0 || __builtin_add_overflow(place.offset, place.length, &end)) {
      pickle_.fail(node, c10::str("'", name, "' has ", place.length, " bytes at byte ", place.offset, " of ",
                                  place.file, ", which cannot be"));
    }
    if (const Node* transforms = attribute(node, "transform_descriptors")) {
      const DCPNodes& list = pickle_.items(*transforms, "transform_descriptors");
      if (!list.empty()) {
        pickle_.fail(node, c10::str("'", name, "' was saved with the extension '",
                                    pickle_.text(*list[0], "transform_descriptors"),
                                    "'; only checkpoints without extensions are read"));
      }
    }
    return place;
  }

  const Node& need_storage(const Node& node, std::string_view name, const StorageKey& key) const {
    const auto found = storage_.find(key);
    if (found != storage_.end()) return *found->second;
    const std::string part =
        key.offsets ? c10::str("the chunk [", c10::Join(", ", *key.offsets), "] of ") : std::string();
    pickle_.fail(node, c10::str("storage_data does not say where ", part, "'", name, "' is"));
  }

  void read_leaf(const Node& key, const Node& node) {
    const std::string_view view = pickle_.text(key, "a key of state_dict_metadata");
    // Looked for before it is copied: it may be long, and shared.
    if (!seen_.emplace(names_.number(view)).second) {
      pickle_.fail(key, c10::str("state_dict_metadata has the key '", view, "' twice"));
    }
    const std::string name(view);
    Leaf leaf{read_path(name), Value()};
    if (is_class(node, kMetadataModule, "BytesStorageMetadata")) {
      const Node& storage = need_storage(node, name, {names_.number(view), std::nullopt});
      result_.values.emplace(name, location(storage, name));
    } else {
      need_class(node, kMetadataModule, "TensorStorageMetadata", "an entry of state_dict_metadata");
      leaf.content = read_tensor(node, view);
    }
    result_.catalog.leaves.emplace(name, std::move(leaf));
  }

  /// The planner's keys are paths joined by dots; a state dict that was not flattened has none.
  Path read_path(const std::string& name) const {
    const auto found = paths_.find(name);
    if (found == paths_.end()) return {name};
    std::string_view rest = name;
    Path path;
    const auto take = [&](std::string_view part) {
      if (!rest.starts_with(part)) {
        pickle_.fail(*found->second, c10::str("the path in planner_data does not fit the key '", name, "'"));
      }
      rest.remove_prefix(part.size());
    };
    for (const Node* step : pickle_.items(*found->second, "a path in planner_data")) {
      if (!path.empty()) take(".");
      if (step->kind == Kind::Integer) {
        const int64_t index = pickle_.integer(*step, "a step of a path");
        if (index < 0) pickle_.fail(*step, c10::str("the path of '", name, "' has a negative index"));
        take(std::to_string(index));
        path.emplace_back(index);
      } else {
        const std::string_view text = pickle_.text(*step, "a step of a path");
        take(text);
        path.emplace_back(std::string(text));
      }
    }
    if (path.empty() || !rest.empty()) {
      pickle_.fail(*found->second, c10::str("the path in planner_data does not fit the key '", name, "'"));
    }
    return path;
  }

  c10::ScalarType dtype(const Node& node, std::string_view name) const {
    const std::string_view is = pickle_.name(node);
    if (node.kind != Kind::Object || !is.ends_with(".TensorProperties")) {
      pickle_.fail(node, c10::str("the properties of '", name, "' are no TensorProperties"));
    }
    const Node* state = pickle_.object(node, "properties")[pickle::kObjectState];
    if (state == nullptr) pickle_.fail(node, c10::str("the properties of '", name, "' are empty"));
    // dtype, layout, requires_grad, memory_format, pin_memory
    const DCPNodes& values = pickle_.tuple(*state, "the state of TensorProperties");
    if (values.size() < 2) pickle_.fail(*state, c10::str("the properties of '", name, "' are incomplete"));
    const Node& layout = *values[1];
    if (layout.kind == Kind::Object && pickle_.name(layout) == "torch.serialization._get_layout") {
      const DCPNodes& arguments =
          pickle_.tuple(*pickle_.object(layout, "layout")[pickle::kObjectArguments], "layout");
      if (arguments.size() != 1 || pickle_.text(*arguments[0], "layout") != "torch.strided") {
        pickle_.fail(layout, c10::str("'", name, "' is a sparse tensor; only dense ones are read"));
      }
    } else {
      pickle_.fail(layout, c10::str("'", name, "' has an unknown layout"));
    }
    const auto dtype = torch_dtype_named(values[0]->kind == Kind::Name ? pickle_.name(*values[0]) : "");
    if (!dtype) pickle_.fail(*values[0], c10::str("'", name, "' has an unknown dtype"));
    return *dtype;
  }

  TensorEntry read_tensor(const Node& node, std::string_view name) {
    TensorEntry tensor;
    tensor.dtype = dtype(need_attribute(node, "properties"), name);
    tensor.shape = sizes(need_attribute(node, "size"), "size");
    const DCPNodes& chunks = pickle_.items(need_attribute(node, "chunks"), "chunks");
    // Each took more than a byte, unless it is shared between tensors, which torch does not do.
    if (chunks.size() > chunk_budget_) pickle_.fail(node, "tensors share more chunks than the file can hold");
    chunk_budget_ -= chunks.size();
    for (const Node* item : chunks) {
      need_class(*item, kMetadataModule, "ChunkStorageMetadata", "a chunk");
      Chunk chunk;
      chunk.sizes = sizes(need_attribute(*item, "sizes"), "sizes");
      if (std::find(chunk.sizes.begin(), chunk.sizes.end(), 0) != chunk.sizes.end()) continue;
      StorageKey key{names_.number(name), sizes(need_attribute(*item, "offsets"), "offsets")};
      ArchiveLocation place = location(need_storage(*item, name, key), name);
      chunk.offsets = std::move(*key.offsets);
      chunk.file = std::move(place.file);
      chunk.offset = place.offset;
      chunk.length = place.length;
      chunk.container = Container::TorchZip;
      tensor.chunks.push_back(std::move(chunk));
    }
    return tensor;
  }

  pickle::Pickle pickle_;
  std::string path_;
  size_t chunk_budget_;
  TextNumbers names_;
  std::unordered_map<StorageKey, const Node*, StorageKeyHash> storage_;
  std::unordered_map<std::string_view, const Node*> paths_;
  std::unordered_set<size_t> seen_;
  DCPMetadata result_;
};

/// Writes the objects of a `.metadata`.
class MetadataWriter {
 public:
  std::string write(const Catalog& catalog, const std::map<std::string, ArchiveLocation>& values) {
    begin(kMetadataModule, "Metadata");
    attribute("state_dict_metadata");
    begin_dict();
    for (const auto& [key, leaf] : catalog.leaves) {
      out_.text(key);
      write_leaf(leaf);
    }
    out_.set_items();
    attribute("planner_data");
    begin_dict();
    for (const auto& [key, leaf] : catalog.leaves) {
      out_.text(key);
      write_path(leaf.path);
    }
    out_.set_items();
    attribute("storage_data");
    begin_dict();
    for (const auto& [key, leaf] : catalog.leaves) write_storage(key, leaf, values);
    out_.set_items();
    attribute("storage_meta");
    out_.none();
    attribute("version");
    out_.text("1.0.0");
    end();
    return std::move(out_).finish();
  }

 private:
  /// An object, whose attributes follow.
  void begin(std::string_view module, std::string_view name) {
    out_.name(module, name);
    out_.empty_tuple();
    out_.make();
    begin_dict();
  }
  void attribute(std::string_view name) { out_.text(name); }
  void end() {
    out_.set_items();
    out_.build();
  }
  void begin_dict() {
    out_.empty_dict();
    out_.mark();
  }

  void write_size(c10::ArrayRef<int64_t> sizes) {
    out_.name("torch", "Size");
    out_.mark();
    out_.integers(sizes);
    out_.tuple();
    out_.call();
  }

  void write_leaf(const Leaf& leaf) {
    const TensorEntry* tensor = leaf.tensor();
    if (tensor == nullptr) {
      out_.name(kMetadataModule, "BytesStorageMetadata");
      out_.empty_tuple();
      out_.make();
      return;
    }
    begin(kMetadataModule, "TensorStorageMetadata");
    attribute("properties");
    write_properties(tensor->dtype);
    attribute("size");
    write_size(tensor->shape);
    attribute("chunks");
    out_.empty_list();
    out_.mark();
    for (const Chunk& chunk : tensor->chunks) {
      begin(kMetadataModule, "ChunkStorageMetadata");
      attribute("offsets");
      write_size(chunk.offsets);
      attribute("sizes");
      write_size(chunk.sizes);
      end();
    }
    out_.append();
    end();
  }

  /// Written once for each dtype.
  void write_properties(c10::ScalarType dtype) {
    const auto [place, fresh] = properties_.try_emplace(dtype, 0);
    if (!fresh) {
      out_.recall(place->second);
      return;
    }
    out_.name(kMetadataModule, "TensorProperties");
    out_.empty_tuple();
    out_.make();
    out_.mark();
    out_.name("torch", torch_dtype_name(dtype).substr(std::string_view("torch.").size()));
    out_.name("torch.serialization", "_get_layout");
    out_.mark();
    out_.text("torch.strided");
    out_.tuple();
    out_.call();
    out_.boolean(false);  // requires_grad
    out_.name(kMetadataModule, "_MEM_FORMAT_ENCODING");
    out_.integers({0});  // contiguous
    out_.call();
    out_.boolean(false);  // pin_memory
    out_.tuple();
    out_.build();
    place->second = out_.remember();
  }

  void write_path(const Path& path) {
    out_.mark();
    for (const PathStep& step : path) {
      if (const auto* name = std::get_if<std::string>(&step)) {
        out_.text(*name);
      } else {
        out_.integer(std::get<int64_t>(step));
      }
    }
    out_.tuple();
  }

  void write_storage(const std::string& key, const Leaf& leaf,
                     const std::map<std::string, ArchiveLocation>& values) {
    if (const TensorEntry* tensor = leaf.tensor()) {
      int64_t index = 0;
      for (const Chunk& chunk : tensor->chunks) {
        TESSERA_CHECK(chunk.container == Container::TorchZip, "A chunk of tensor '", key,
                      "' is no archive of torch.save, which a DCP checkpoint needs.");
        write_item(key, index++, chunk.offsets, {chunk.file, chunk.offset, chunk.length});
      }
      return;
    }
    const auto place = values.find(key);
    TESSERA_CHECK(place != values.end(), "It is not said where the value '", key, "' was written.");
    write_item(key, std::nullopt, std::nullopt, place->second);
  }

  void write_item(const std::string& key, std::optional<int64_t> index,
                  std::optional<c10::ArrayRef<int64_t>> offsets, const ArchiveLocation& place) {
    begin(kMetadataModule, "MetadataIndex");
    attribute("fqn");
    out_.text(key);
    attribute("index");
    index ? out_.integer(*index) : out_.none();
    if (offsets) {
      attribute("offset");
      write_size(*offsets);
    }
    end();
    begin(kStorageModule, "_StorageInfo");
    attribute("relative_path");
    out_.text(place.file);
    attribute("offset");
    out_.integer(place.offset);
    attribute("length");
    out_.integer(place.length);
    end();
  }

  pickle::Writer out_;
  std::map<c10::ScalarType, uint32_t> properties_;
};

constexpr int64_t kDCPMetadataLimit = int64_t{1} << 31;

/// Opens the files of archives, which must be asked for in the order of files and offsets. None lies beyond the end
/// of its file; no two overlap, so that what is read in all is no more than the files hold.
class ArchiveFiles {
 public:
  explicit ArchiveFiles(std::string directory) : directory_(std::move(directory)) {}

  const File& open(const ArchiveLocation& place, const std::string& what) {
    if (!file_ || name_ != place.file) {
      file_.emplace(File::open(path_in(directory_, place.file, directory_ + "/" + kDCPMetadataFile)));
      name_ = place.file;
      size_ = file_->size();
      end_ = 0;
    }
    TESSERA_CHECK(place.offset >= end_, what, " lies at byte ", place.offset, " of ", file_->path(),
                  ", where something else ends at ", end_, ".");
    end_ = place.offset + place.length;
    TESSERA_CHECK(place.offset <= size_ && place.length <= size_ - place.offset, what, " should have ",
                  place.length, " bytes at byte ", place.offset, " of ", file_->path(),
                  ", but the file ends at ", size_, ": it is cut off.");
    return *file_;
  }

 private:
  std::string directory_;
  std::string name_;
  std::optional<File> file_;
  int64_t size_ = 0;
  int64_t end_ = 0;  // of the last one
};

}  // namespace

DCPMetadata parse_dcp_metadata(std::string_view bytes, const std::string& path) {
  return MetadataReader(bytes, path).read();
}

Catalog read_dcp(const std::string& directory) {
  const std::string path = directory + "/" + kDCPMetadataFile;
  TESSERA_CHECK(exists(path), directory,
                " is no checkpoint of torch.distributed.checkpoint, or was not saved to ",
                "the end: it has no file ", kDCPMetadataFile, ".");
  DCPMetadata metadata = parse_dcp_metadata(read_file(path, kDCPMetadataLimit), path);

  struct Item {
    ArchiveLocation place;
    const std::string* key;
    Leaf* value;  // nullptr for a chunk of a tensor
  };
  std::vector<Item> items;
  for (auto& [key, leaf] : metadata.catalog.leaves) {
    if (const TensorEntry* tensor = leaf.tensor()) {
      for (const Chunk& chunk : tensor->chunks) {
        items.push_back({{chunk.file, chunk.offset, chunk.length}, &key, nullptr});
      }
    } else {
      items.push_back({metadata.values.at(key), &key, &leaf});
    }
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tie(a.place.file, a.place.offset) < std::tie(b.place.file, b.place.offset);
  });
  ArchiveFiles files(directory);
  for (const Item& item : items) {
    const File& file = files.open(item.place, c10::str("'", *item.key, "'"));
    if (item.value == nullptr) continue;
    std::string archive(static_cast<size_t>(item.place.length), '\0');
    file.read(item.place.offset, archive.data(), archive.size());
    const std::string what =
        c10::str("The value '", *item.key, "' at byte ", item.place.offset, " of ", file.path());
    try {
      item.value->content = read_torch_value(archive, what);
    } catch (const c10::TypeError& error) {
      item.value->content = Unreadable{error.what_without_backtrace()};
    }
  }
  metadata.catalog.format = Format::DCP;
  return std::move(metadata.catalog);
}

std::string write_dcp_metadata(const Catalog& catalog, const std::map<std::string, ArchiveLocation>& values) {
  return MetadataWriter().write(catalog, values);
}

}  // namespace tessera::checkpoint
