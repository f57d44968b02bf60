// How much a load reads, and from where.

#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/torch_archive.h>
#include <tessera/checkpoint/zip_archive.h>
#include <tessera/comm/collectives.h>

#include <c10/util/irange.h>

#include "tests/checkpoint/directory.h"
#include "tests/checkpoint/small_state.h"

namespace tessera::checkpoint {
namespace {

at::Tensor counted(at::IntArrayRef shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).reshape(shape);
}

/// What all ranks together read to load [2048, 2048] floats, that were saved by 4 ranks in one way, in another.
int64_t bytes_to_load(const std::string& path, const Placement& to, Verify verify) {
  std::atomic<int64_t> bytes{0};
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    StateDict state;
    state["w"] = distribute_tensor(at::zeros({2048, 2048}), mesh, {to}, std::nullopt);
    const Group group = current_world()->group();
    comm::barrier(group).wait();
    if (get_rank() == 0) bytes = -bytes_read();
    comm::barrier(group).wait();
    LoadOptions options;
    options.verify = verify;
    load(state, path, options);
    comm::barrier(group).wait();
    if (get_rank() == 0) bytes += bytes_read();
    EXPECT_TRUE(at::equal(DTensor(state.at("w").tensor()).full_tensor(), counted({2048, 2048})));
  });
  return bytes;
}

TEST(Reads, LittleMoreThanIsNeeded) {
  const TemporaryDirectory directory;
  const std::vector<std::pair<std::string, Placement>> ways{
      {"S(0)", Shard(0)}, {"S(1)", Shard(1)}, {"R", Replicate()}};
  constexpr double kNeeded = 2048.0 * 2048 * 4;
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    for (const auto& [from_name, from] : ways) {
      const std::string path = directory / c10::str(name_of_format(format), from_name);
      run(4, [&] {
        const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
        StateDict state;
        state["w"] = distribute_tensor(counted({2048, 2048}), mesh, {from}, std::nullopt);
        SaveOptions options;
        options.format = format;
        save(state, path, options);
      });
      for (const auto& [to_name, to] : ways) {
        SCOPED_TRACE(c10::str(name_of_format(format), " ", from_name, " -> ", to_name));
        const double once = static_cast<double>(bytes_to_load(path, to, Verify::WhileLoading)) / kNeeded;
        const double twice = static_cast<double>(bytes_to_load(path, to, Verify::First)) / kNeeded;
        EXPECT_GE(once, 1.0);
        EXPECT_LE(once, 1.1);
        EXPECT_LE(twice, 2.1);
        std::printf("%-11s %s -> %s: %.4f of what is needed; verified first %.4f\n", name_of_format(format),
                    from_name.c_str(), to_name.c_str(), once, twice);
      }
    }
  }
}

/// One rank that wants one row-shard, of a tensor that was saved by columns, reads about that.
TEST(Reads, OnlyTheRowsOfTheRank) {
  const TemporaryDirectory directory;
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    StateDict state;
    state["w"] = distribute_tensor(counted({2048, 2048}), mesh, {Shard(1)}, std::nullopt);
    save(state, directory / "x");
  });
  std::atomic<int64_t> bytes{0};
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    StateDict state;
    if (get_rank() == 2)
      state["w"] = distribute_tensor(at::zeros({2048, 2048}), mesh, {Shard(0)}, std::nullopt);
    const Group group = current_world()->group();
    comm::barrier(group).wait();
    if (get_rank() == 0) bytes = -bytes_read();
    comm::barrier(group).wait();
    LoadOptions options;
    options.verify = Verify::WhileLoading;
    load(state, directory / "x", options);
    comm::barrier(group).wait();
    if (get_rank() != 2) return;
    bytes += bytes_read();
    EXPECT_TRUE(
        at::equal(DTensor(state.at("w").tensor()).to_local(), counted({2048, 2048}).narrow(0, 1024, 512)));
  });
  EXPECT_LE(static_cast<double>(bytes), 1.1 * 512 * 2048 * 4);
}

// --- Beyond 4 GiB ----------------------------------------------------------------------------------------

constexpr int64_t kHole = int64_t{5} << 30;

TensorEntry small_entry(int64_t offset, const at::Tensor& elements, const std::string& file) {
  TensorEntry entry;
  entry.shape = elements.sizes().vec();
  entry.dtype = elements.scalar_type();
  Chunk chunk;
  chunk.offsets.assign(entry.shape.size(), 0);
  chunk.sizes = entry.shape;
  chunk.file = file;
  chunk.offset = offset;
  chunk.length = static_cast<int64_t>(elements.nbytes());
  entry.chunks.push_back(chunk);
  return entry;
}

/// Loads the tensor behind the hole, without reading that.
void expect_loads(const std::string& path, const at::Tensor& expected) {
  StateDict state;
  state["small"] = at::zeros_like(expected);
  LoadOptions options;
  options.strict = false;
  const int64_t before = bytes_read();
  load(state, path, options);
  EXPECT_LT(bytes_read() - before, 1 << 20);
  EXPECT_TRUE(at::equal(state.at("small").tensor(), expected));
}

/// A file of a hole and what is behind it, which takes no room on the disk.
TEST(Reads, BeyondFourGiB) {
  const TemporaryDirectory directory;
  const at::Tensor expected = counted({7, 5});
  std::vector<SafetensorsEntry> entries(2);
  entries[0].name = "big";
  entries[0].dtype = at::kByte;
  entries[0].shape = {kHole};
  entries[0].length = kHole;
  entries[1].name = "small";
  entries[1].dtype = at::kFloat;
  entries[1].shape = expected.sizes().vec();
  entries[1].length = static_cast<int64_t>(expected.nbytes());
  const std::string header = make_safetensors_header(entries, {{"format", "pt"}});
  // The larger alignment may come first: which one is behind the hole is ours to say.
  ASSERT_GT(std::max(entries[0].offset, entries[1].offset), 0);
  const auto write_file = [&](const std::string& path) {
    File file = File::create(path);
    file.write(0, header.data(), header.size());
    file.write(entries[1].offset, expected.const_data_ptr(), expected.nbytes());
    const char zero = 0;
    file.write(entries[0].offset + kHole - 1, &zero, 1);
    file.write(entries[1].offset, expected.const_data_ptr(), expected.nbytes());
    file.close();
  };

  make_directory(directory / "native");
  write_file(directory / "native/data_00000_0.safetensors");
  Catalog catalog;
  catalog.leaves["small"] = {{"small"}, small_entry(entries[1].offset, expected, "data_00000_0.safetensors")};
  auto& chunk = std::get<TensorEntry>(catalog.leaves["small"].content).chunks[0];
  chunk.checksums = Checksums{1 << 16, {crc32c(expected.const_data_ptr(), expected.nbytes())}};
  TensorEntry big = small_entry(entries[0].offset, at::empty({1}, at::kByte), "data_00000_0.safetensors");
  big.shape = big.chunks[0].sizes = {kHole};
  big.chunks[0].length = kHole;
  catalog.leaves["big"] = {{"big"}, big};
  write_text(directory / "native/index.json", write_index(catalog));
  EXPECT_GT(entries[1].offset, int64_t{1} << 32);
  expect_loads(directory / "native", expected);

  make_directory(directory / "huggingface");
  write_file(directory / "huggingface/model.safetensors");
  expect_loads(directory / "huggingface", expected);

  // DCP: an archive behind the hole, and one that is itself larger than 32 bits can count.
  make_directory(directory / "dcp");
  const uint32_t crc = zip_crc32(expected.const_data_ptr(), expected.nbytes());
  const auto nbytes = static_cast<int64_t>(expected.nbytes());
  const TorchArchive archive = make_torch_archive(at::kFloat, expected.sizes(), nbytes, crc);
  const TorchArchive large = make_torch_archive(at::kByte, {kHole}, kHole, 0);
  File file = File::create(directory / "dcp/__0_0.distcp");
  int64_t position = 0;
  const auto append = [&](const void* data, size_t size) {
    file.write(position, data, size);
    position += static_cast<int64_t>(size);
  };
  append(large.before.data(), large.before.size());
  const int64_t payload = position;
  position += kHole;
  append(large.after.data(), large.after.size());
  const int64_t begin = position;
  append(archive.before.data(), archive.before.size());
  append(expected.const_data_ptr(), expected.nbytes());
  append(archive.after.data(), archive.after.size());
  EXPECT_EQ(find_torch_payload(file, 0, begin, at::kByte, {kHole}, "big").offset, payload);
  file.close();
  catalog.format = Format::DCP;
  for (auto& [key, leaf] : catalog.leaves) {
    Chunk& each = std::get<TensorEntry>(leaf.content).chunks[0];
    each.file = "__0_0.distcp";
    each.container = Container::TorchZip;
    each.checksums.reset();
    each.offset = key == "big" ? 0 : begin;
    each.length = key == "big" ? begin : position - begin;
  }
  write_text(directory / "dcp/.metadata", write_dcp_metadata(catalog, {}));
  expect_loads(directory / "dcp", expected);
}

}  // namespace
}  // namespace tessera::checkpoint
