#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/progress.h>
#include <tessera/checkpoint/save_plan.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

/// Writing the elements of tensors into files of each format. Each rank calls these for itself.
namespace tessera::checkpoint {

/// What a rank writes, and the elements: of the write's sizes, in any memory.
struct ElementsToWrite {
  Write write;
  at::Tensor elements;
};

/// What was written of a tensor.
struct WrittenChunk {
  std::string key;
  Chunk chunk;
};
std::string to_bytes(const std::vector<WrittenChunk>& chunks);
std::vector<WrittenChunk> written_from_bytes(std::string_view bytes);

/// Calls `use` with the bytes of a tensor's elements in row-major order, in spans. Elements that lie so in
/// memory of the CPU are not copied.
void for_each_span(const at::Tensor& elements, const std::function<void(const char* data, size_t size)>& use);

/// Into data_<rank>_<n>.safetensors: as many files as one tensor has chunks, so that each name is in a file once. The
/// files are on the disk when it returns.
std::vector<WrittenChunk> write_native_files(const std::string& directory, int64_t rank,
                                             const std::vector<ElementsToWrite>& elements,
                                             ProgressMeter& meter);

/// Into __<rank>_0.distcp; rank 0 also writes the leaves that are no tensors, and says where in `values`.
std::vector<WrittenChunk> write_dcp_file(const std::string& directory, int64_t rank, const Catalog& catalog,
                                         const std::vector<ElementsToWrite>& elements,
                                         std::map<std::string, ArchiveLocation>& values,
                                         ProgressMeter& meter);

/// Files of global tensors, as Hugging Face's libraries have them. One rank makes them, with their headers; then each
/// writes its elements.
class HuggingFaceFiles {
 public:
  /// Throws if the catalog has leaves that are no tensors.
  HuggingFaceFiles(std::string directory, const Catalog& catalog, int64_t file_limit);
  void create() const;
  void write(const std::vector<ElementsToWrite>& elements, ProgressMeter& meter) const;
  /// model.safetensors.index.json, if there is more than one file.
  void finish() const;

 private:
  struct Place {
    std::string file;
    int64_t offset = 0;
  };
  struct NewFile {
    std::string name;
    std::string header;
    int64_t size = 0;
  };
  const std::string directory_;
  const Catalog& catalog_;
  std::map<std::string, Place> places_;
  std::vector<NewFile> files_;
  std::string index_;  // empty if none is needed
};

}  // namespace tessera::checkpoint
