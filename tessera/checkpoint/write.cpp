#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/load_plan.h>
#include <tessera/checkpoint/runs.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/checkpoint/write.h>
#include <tessera/checkpoint/zip_archive.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstdio>

#include <c10/util/irange.h>
#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

namespace {

/// What is handed to the system at once: it stays in the processor's cache between the checksum and the copy.
constexpr size_t kSpanBytes = 1 << 20;

bool lies_row_major(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::string numbered(const char* format, int64_t rank, int64_t number) {
  char name[64];
  std::snprintf(name, sizeof name, format, static_cast<long long>(rank), static_cast<long long>(number));
  return name;
}

/// Checksums of bytes that come in spans.
class ChecksumsInBlocks {
 public:
  explicit ChecksumsInBlocks(int64_t length) { result_.block = checksum_block(length); }

  void add(const char* data, size_t size) {
    while (size > 0) {
      const size_t part = std::min(size, static_cast<size_t>(result_.block) - filled_);
      current_ = crc32c(data, part, filled_ == 0 ? 0 : current_);
      filled_ += part;
      data += part;
      size -= part;
      if (filled_ == static_cast<size_t>(result_.block)) end_block();
    }
  }

  Checksums finish() {
    if (filled_ > 0) end_block();
    return std::move(result_);
  }

 private:
  void end_block() {
    result_.crc32c.push_back(current_);
    filled_ = 0;
  }

  Checksums result_;
  uint32_t current_ = 0;
  size_t filled_ = 0;
};

/// Which chunks of tensors lie where: what torch's own readers of safetensors files need to know.
std::map<std::string, std::string> sharding_metadata(const std::vector<const Write*>& writes) {
  nlohmann::json info = nlohmann::json::object();
  for (const Write* write : writes) info[write->key] = {{"saved_offsets", write->box.offsets}};
  return {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", info.dump()}};
}

/// One file: the header, then the elements one after the other.
void write_native_file(const std::string& directory, const std::string& name,
                       const std::vector<const ElementsToWrite*>& elements, std::vector<WrittenChunk>& chunks,
                       ProgressMeter& meter) {
  std::vector<SafetensorsEntry> entries;
  std::vector<const Write*> writes;
  for (const ElementsToWrite* each : elements) {
    SafetensorsEntry entry;
    entry.name = each->write.key;
    const StoredType stored = safetensors_stored_type(each->elements.scalar_type(), each->write.box.sizes);
    entry.dtype = stored.dtype;
    entry.shape = stored.shape;
    entries.push_back(std::move(entry));
    writes.push_back(&each->write);
  }
  const std::string header = make_safetensors_header(entries, sharding_metadata(writes));
  File file = File::create(directory + "/" + name);
  file.write(0, header.data(), header.size());
  for (const auto i : c10::irange(entries.size())) {
    int64_t position = entries[i].offset;
    ChecksumsInBlocks checksums(entries[i].length);
    for_each_span(elements[i]->elements, [&](const char* data, size_t size) {
      checksums.add(data, size);
      file.write(position, data, size);
      position += static_cast<int64_t>(size);
      meter.add(static_cast<int64_t>(size));
    });
    WrittenChunk written;
    written.key = entries[i].name;
    written.chunk.offsets = writes[i]->box.offsets;
    written.chunk.sizes = writes[i]->box.sizes;
    written.chunk.file = name;
    written.chunk.offset = entries[i].offset;
    written.chunk.length = entries[i].length;
    written.chunk.checksums = checksums.finish();
    chunks.push_back(std::move(written));
  }
  file.sync();
  file.close();
}

}  // namespace

std::string to_bytes(const std::vector<WrittenChunk>& chunks) {
  ByteWriter out;
  out.put(static_cast<int64_t>(chunks.size()));
  for (const auto& [key, chunk] : chunks) {
    out.put(std::string_view(key));
    put_chunk(out, chunk);
  }
  return out.take();
}

std::vector<WrittenChunk> written_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "the list of what a rank has written");
  std::vector<WrittenChunk> chunks;
  for (int64_t count = in.get_count(1); count > 0; --count) {
    std::string key(in.get_text());
    chunks.push_back({std::move(key), get_chunk(in)});
  }
  in.check(in.done());
  return chunks;
}

void for_each_span(const at::Tensor& elements,
                   const std::function<void(const char* data, size_t size)>& use) {
  if (elements.numel() == 0) return;
  if (lies_row_major(elements)) {
    const char* data = static_cast<const char*>(elements.const_data_ptr());
    const size_t size = elements.nbytes();
    for (size_t begin = 0; begin < size; begin += kSpanBytes)
      use(data + begin, std::min(kSpanBytes, size - begin));
    return;
  }
  const int64_t rows = elements.dim() == 0 ? 1 : elements.size(0);
  const int64_t row_bytes = static_cast<int64_t>(elements.nbytes()) / rows;
  if (rows > 1 && row_bytes < static_cast<int64_t>(elements.nbytes())) {
    const int64_t step =
        std::max<int64_t>(static_cast<int64_t>(kSpanBytes) / std::max<int64_t>(row_bytes, 1), 1);
    if (step < rows) {
      for (int64_t row = 0; row < rows; row += step)
        for_each_span(elements.narrow(0, row, std::min(step, rows - row)), use);
      return;
    }
  } else if (rows == 1 && elements.dim() > 1) {
    return for_each_span(elements.squeeze(0), use);
  }
  at::Tensor copy = at::empty(elements.sizes(), elements.options().device(at::kCPU));
  copy.copy_(elements);
  for_each_span(copy, use);
}

std::vector<WrittenChunk> write_native_files(const std::string& directory, int64_t rank,
                                             const std::vector<ElementsToWrite>& elements,
                                             ProgressMeter& meter) {
  std::vector<std::vector<const ElementsToWrite*>> files;
  std::map<std::string, size_t> seen;
  for (const ElementsToWrite& each : elements) {
    const size_t number = seen[each.write.key]++;
    if (number == files.size()) files.emplace_back();
    files[number].push_back(&each);
  }
  std::vector<WrittenChunk> chunks;
  for (const auto number : c10::irange(files.size()))
    write_native_file(directory, numbered("data_%05lld_%lld.safetensors", rank, static_cast<int64_t>(number)),
                      files[number], chunks, meter);
  return chunks;
}

std::vector<WrittenChunk> write_dcp_file(const std::string& directory, int64_t rank, const Catalog& catalog,
                                         const std::vector<ElementsToWrite>& elements,
                                         std::map<std::string, ArchiveLocation>& values,
                                         ProgressMeter& meter) {
  std::vector<WrittenChunk> chunks;
  const std::string name = numbered("__%lld_%lld.distcp", rank, 0);
  File file = File::create(directory + "/" + name);
  int64_t position = 0;
  const auto append = [&](const void* data, size_t size) {
    file.write(position, data, size);
    position += static_cast<int64_t>(size);
  };
  for (const ElementsToWrite& each : elements) {
    WrittenChunk written;
    written.key = each.write.key;
    written.chunk.offsets = each.write.box.offsets;
    written.chunk.sizes = each.write.box.sizes;
    written.chunk.file = name;
    written.chunk.offset = position;
    written.chunk.container = Container::TorchZip;
    const c10::ScalarType dtype = each.elements.scalar_type();
    const int64_t length = byte_count(written.chunk.sizes, dtype, written.key);
    const std::string before = make_torch_archive(dtype, written.chunk.sizes, length, 0).before;
    append(before.data(), before.size());
    uint32_t checksum = 0;
    for_each_span(each.elements, [&](const char* data, size_t size) {
      checksum = zip_crc32(data, size, checksum);
      append(data, size);
      meter.add(static_cast<int64_t>(size));
    });
    const std::string after = make_torch_archive(dtype, written.chunk.sizes, length, checksum).after;
    append(after.data(), after.size());
    written.chunk.length = position - written.chunk.offset;
    chunks.push_back(std::move(written));
  }
  if (rank == 0) {
    for (const auto& [key, leaf] : catalog.leaves) {
      if (leaf.tensor()) continue;
      const std::string archive = make_torch_archive(*leaf.value());
      values[key] = {name, position, static_cast<int64_t>(archive.size())};
      append(archive.data(), archive.size());
    }
  }
  file.sync();
  file.close();
  return chunks;
}

HuggingFaceFiles::HuggingFaceFiles(std::string directory, const Catalog& catalog, int64_t file_limit)
    : directory_(std::move(directory)), catalog_(catalog) {
  std::vector<std::pair<std::string, int64_t>> sizes;
  std::string others;
  int64_t count = 0;
  int64_t total = 0;
  for (const auto& [key, leaf] : catalog.leaves) {
    if (const TensorEntry* tensor = leaf.tensor()) {
      sizes.emplace_back(key, byte_count(tensor->shape, tensor->dtype, "'" + key + "'"));
      total += sizes.back().second;
    } else {
      if (++count <= 5) others += (others.empty() ? "'" : ", '") + key + "'";
    }
  }
  TESSERA_CHECK_VALUE(others.empty(),
                      "Hugging Face's format holds tensors only, but the state dict also has ", others,
                      count > 5 ? c10::str(" and ", count - 5, " others") : "",
                      ". Leave these out, or save in another format.");
  const auto files = plan_huggingface_files(sizes, file_limit);
  for (const HuggingFaceFile& file : files) {
    std::vector<SafetensorsEntry> entries;
    for (const std::string& key : file.keys) {
      const TensorEntry& tensor = *catalog.leaves.at(key).tensor();
      SafetensorsEntry entry;
      entry.name = key;
      entry.dtype = tensor.dtype;
      entry.shape = tensor.shape;
      entry.length = byte_count(tensor.shape, tensor.dtype, key);
      entries.push_back(std::move(entry));
    }
    NewFile made;
    made.name = file.name;
    made.header = make_safetensors_header(entries, {{"format", "pt"}});
    made.size = static_cast<int64_t>(made.header.size());
    for (const SafetensorsEntry& entry : entries) {
      places_[entry.name] = {file.name, entry.offset};
      made.size = std::max(made.size, entry.offset + entry.length);
    }
    files_.push_back(std::move(made));
  }
  if (files.size() > 1) index_ = write_huggingface_index(files, total);
}

void HuggingFaceFiles::create() const {
  for (const NewFile& made : files_) {
    File file = File::create(directory_ + "/" + made.name);
    file.write(0, made.header.data(), made.header.size());
    const char zero = 0;
    if (made.size > static_cast<int64_t>(made.header.size())) file.write(made.size - 1, &zero, 1);
    file.sync();
    file.close();
  }
}

void HuggingFaceFiles::write(const std::vector<ElementsToWrite>& elements, ProgressMeter& meter) const {
  std::map<std::string, File> open;
  for (const ElementsToWrite& each : elements) {
    const TensorEntry& tensor = *catalog_.leaves.at(each.write.key).tensor();
    const Place& place = places_.at(each.write.key);
    const auto known = open.find(place.file);
    File& file = known != open.end()
                     ? known->second
                     : open.emplace(place.file, File::modify(directory_ + "/" + place.file)).first->second;
    const int64_t element_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const std::vector<int64_t> origin(tensor.shape.size(), 0);
    const Runs runs(origin, tensor.shape, each.write.box.offsets, each.write.box.sizes);
    int64_t done = 0;  // bytes of the box, which come in order
    for_each_span(each.elements, [&](const char* data, size_t size) {
      int64_t index = done / (runs.length() * element_size);
      for (size_t used = 0; used < size; ++index) {
        const Runs::Run run = runs.at(index);
        const int64_t skip = done - run.in_b * element_size;
        const size_t part = std::min(size - used, static_cast<size_t>(run.length * element_size - skip));
        file.write(place.offset + run.in_a * element_size + skip, data + used, part);
        used += part;
        done += static_cast<int64_t>(part);
      }
      meter.add(static_cast<int64_t>(size));
    });
  }
  for (auto& [name, file] : open) {
    file.sync();
    file.close();
  }
}

void HuggingFaceFiles::finish() const {
  if (index_.empty()) return;
  File file = File::create(directory_ + "/model.safetensors.index.json");
  file.write(0, index_.data(), index_.size());
  file.sync();
  file.close();
}

}  // namespace tessera::checkpoint
