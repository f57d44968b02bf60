#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/native.h>

namespace tessera::checkpoint {

namespace {

int64_t get_below(ByteReader& in, int64_t limit) {
  const auto value = in.get<uint8_t>();
  in.check(value < limit);
  return value;
}

}  // namespace

c10::ScalarType get_dtype(ByteReader& in) {
  return static_cast<c10::ScalarType>(get_below(in, static_cast<int64_t>(c10::ScalarType::Undefined)));
}

void put_path(ByteWriter& out, const Path& path) {
  out.put(static_cast<int64_t>(path.size()));
  for (const PathStep& step : path) {
    const auto* key = std::get_if<std::string>(&step);
    out.put(static_cast<uint8_t>(key != nullptr));
    if (key) {
      out.put(std::string_view(*key));
    } else {
      out.put(std::get<int64_t>(step));
    }
  }
}

Path get_path(ByteReader& in) {
  Path path;
  for (int64_t count = in.get_count(1); count > 0; --count) {
    if (in.get<uint8_t>()) {
      path.emplace_back(std::string(in.get_text()));
    } else {
      path.emplace_back(in.get<int64_t>());
    }
  }
  return path;
}

void put_chunk(ByteWriter& out, const Chunk& chunk) {
  out.put_list(chunk.offsets);
  out.put_list(chunk.sizes);
  out.put(std::string_view(chunk.file));
  out.put(chunk.offset);
  out.put(chunk.length);
  out.put(static_cast<uint8_t>(chunk.container));
  out.put(chunk.checksums ? chunk.checksums->block : int64_t{0});
  if (chunk.checksums) out.put_list(chunk.checksums->crc32c);
}

Chunk get_chunk(ByteReader& in) {
  Chunk chunk;
  chunk.offsets = in.get_list();
  chunk.sizes = in.get_list();
  chunk.file = in.get_text();
  chunk.offset = in.get<int64_t>();
  chunk.length = in.get<int64_t>();
  chunk.container = static_cast<Container>(get_below(in, static_cast<uint8_t>(Container::TorchZip) + 1));
  if (const int64_t block = in.get<int64_t>()) {
    Checksums& checksums = chunk.checksums.emplace();
    checksums.block = block;
    for (const int64_t checksum : in.get_list()) checksums.crc32c.push_back(static_cast<uint32_t>(checksum));
  }
  return chunk;
}

std::string to_bytes(const Catalog& catalog) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(catalog.format));
  out.put(static_cast<int64_t>(catalog.leaves.size()));
  for (const auto& [key, leaf] : catalog.leaves) {
    out.put(std::string_view(key));
    put_path(out, leaf.path);
    const TensorEntry* tensor = leaf.tensor();
    out.put(static_cast<uint8_t>(leaf.content.index()));
    if (const Value* value = leaf.value()) out.put(std::string_view(value_to_json(*value)));
    if (const Unreadable* unreadable = leaf.unreadable()) out.put(std::string_view(unreadable->reason));
    if (!tensor) continue;
    out.put_list(tensor->shape);
    out.put(static_cast<int8_t>(tensor->dtype));
    out.put(static_cast<int64_t>(tensor->chunks.size()));
    for (const Chunk& chunk : tensor->chunks) put_chunk(out, chunk);
  }
  return out.take();
}

Catalog catalog_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "the catalog of a checkpoint");
  Catalog catalog;
  catalog.format = static_cast<Format>(get_below(in, static_cast<uint8_t>(Format::DCP) + 1));
  for (int64_t count = in.get_count(1); count > 0; --count) {
    const std::string key(in.get_text());
    Leaf& leaf = catalog.leaves[key];
    leaf.path = get_path(in);
    const int64_t content = get_below(in, 3);
    if (content == 1) leaf.content = value_from_json(in.get_text(), "'" + key + "'");
    if (content == 2) leaf.content = Unreadable{std::string(in.get_text())};
    if (content != 0) continue;
    TensorEntry tensor;
    tensor.shape = in.get_list();
    tensor.dtype = get_dtype(in);
    for (int64_t chunks = in.get_count(1); chunks > 0; --chunks) tensor.chunks.push_back(get_chunk(in));
    leaf.content = std::move(tensor);
  }
  in.check(in.done());
  return catalog;
}

}  // namespace tessera::checkpoint
