#include <tessera/checkpoint/inspect.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/read.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/error.h>

#include <algorithm>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

constexpr Format kFormats[] = {Format::Tessera, Format::HuggingFace, Format::DCP};

}  // namespace

const char* format_name(Format format) {
  switch (format) {
    case Format::Tessera:
      return "tessera";
    case Format::HuggingFace:
      return "huggingface";
    case Format::DCP:
      return "dcp";
  }
  return "unknown";
}

Format parse_format(const std::string& name) {
  for (const Format format : kFormats) {
    if (name == format_name(format)) return format;
  }
  TESSERA_CHECK_VALUE(false, "'", name,
                      "' is no format of checkpoints. There are tessera, huggingface and dcp.");
}

CheckpointInfo inspect(const std::string& path) {
  const OpenCheckpoint checkpoint = open_checkpoint(path);
  CheckpointInfo info;
  info.format = checkpoint.catalog.format;
  for (const auto& [key, leaf] : checkpoint.catalog.leaves) {
    const TensorEntry* tensor = leaf.tensor();
    if (!tensor) {
      info.values.push_back(
          {key, leaf.value() ? *leaf.value() : Value("unreadable: " + leaf.unreadable()->reason)});
      continue;
    }
    TensorInfo& each = info.tensors.emplace_back();
    each.key = key;
    each.shape = tensor->shape;
    each.dtype = tensor->dtype;
    each.bytes = byte_count(tensor->shape, tensor->dtype, key);
    for (const Chunk& chunk : tensor->chunks)
      each.chunks.push_back({chunk.offsets, chunk.sizes, chunk.file, chunk.offset, chunk.length});
    info.bytes += each.bytes;
  }
  return info;
}

VerifyReport verify(const std::string& path, const ProgressCallback& progress) {
  VerifyReport report;
  OpenCheckpoint checkpoint;
  try {
    checkpoint = open_checkpoint(path);
  } catch (const c10::Error& error) {
    report.errors.emplace_back(error.what_without_backtrace());
    return report;
  }
  int64_t total = 0;
  for (const auto& [key, leaf] : checkpoint.catalog.leaves) {
    if (const TensorEntry* tensor = leaf.tensor()) total += byte_count(tensor->shape, tensor->dtype, key);
  }
  ProgressMeter meter("verifying", total, progress, /*show_bar=*/true);
  ChunkFiles files(checkpoint);
  for (const auto& [key, leaf] : checkpoint.catalog.leaves) {
    const TensorEntry* tensor = leaf.tensor();
    if (!tensor) continue;
    for (const auto index : c10::irange(tensor->chunks.size())) {
      try {
        const int64_t bytes = byte_count(tensor->chunks[index].sizes, tensor->dtype, key);
        report.bytes += bytes;
        if (!verify_chunk(files.locate(key, index), meter)) report.unchecked += bytes;
      } catch (const c10::Error& error) {
        report.errors.emplace_back(error.what_without_backtrace());
      }
    }
  }
  meter.finish();
  return report;
}

void convert(const std::string& from, const std::string& to, const SaveOptions& options) {
  LoadOptions load_options;
  load_options.progress = options.progress;
  load_options.verify = Verify::WhileLoading;
  save(StateDict(load(from, load_options)), to, options);
}

}  // namespace tessera::checkpoint
