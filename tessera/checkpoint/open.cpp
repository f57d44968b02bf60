#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/huggingface.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/open.h>
#include <tessera/error.h>

#include <algorithm>

namespace tessera::checkpoint {

namespace {

bool is_safetensors(const std::string& name) {
  constexpr std::string_view kEnding = ".safetensors";
  return name.size() > kEnding.size() &&
         std::string_view(name).substr(name.size() - kEnding.size()) == kEnding;
}

}  // namespace

std::optional<Format> find_format(const std::string& path) {
  if (!exists(path)) return std::nullopt;
  if (!is_directory(path)) return is_safetensors(path) ? std::optional(Format::HuggingFace) : std::nullopt;
  if (exists(path + "/" + kIndexFile)) return Format::Tessera;
  if (exists(path + "/" + kDCPMetadataFile)) return Format::DCP;
  const auto names = list_directory(path);
  if (std::any_of(names.begin(), names.end(), is_safetensors)) return Format::HuggingFace;
  return std::nullopt;
}

OpenCheckpoint open_checkpoint(const std::string& given) {
  const std::string path = resolve_checkpoint(given);
  TESSERA_CHECK(exists(path), "There is no checkpoint at ", given, ": nothing has that name.");
  const auto format = find_format(path);
  TESSERA_CHECK(format, given, " is no checkpoint: it has neither ", kIndexFile, " nor ", kDCPMetadataFile,
                " nor a .safetensors file.");
  const std::string directory = is_directory(path) ? path : parent_of(path);
  switch (*format) {
    case Format::Tessera: {
      const std::string index = path + "/" + kIndexFile;
      return {directory, parse_index(read_file(index, kMaxIndexBytes), index)};
    }
    case Format::DCP:
      return {directory, read_dcp(path)};
    case Format::HuggingFace:
      return {directory, read_huggingface(path)};
  }
  TESSERA_CHECK(false, "unknown format");
}

}  // namespace tessera::checkpoint
