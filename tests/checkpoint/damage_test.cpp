// Checkpoints that are damaged, incomplete or made to harm: an error on every rank that says where, and the state as it was.

#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/native.h>
#include <tessera/comm/collectives.h>

#include <functional>
#include <map>
#include <sys/stat.h>

#include <c10/util/irange.h>

#include "tests/checkpoint/directory.h"
#include "tests/checkpoint/small_state.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

/// All elements differ, so that no two files are the same.
StateDict state_of(Format format, bool zeros) {
  StateDict state;
  const at::Tensor full = at::arange(1, 25, at::kFloat).reshape({8, 3});
  const at::Tensor value = zeros ? at::zeros_like(full) : full;
  if (has_current_world()) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {get_world_size()});
    state["sharded"] = distribute_tensor(value, mesh, {Shard(0)}, std::nullopt);
  } else {
    state["sharded"] = value.clone();
  }
  state["plain"] = zeros ? at::zeros({5}, at::kLong) : at::arange(5, at::kLong) + 100;
  if (format != Format::HuggingFace) state["step"] = zeros ? 0 : 77;
  return state;
}

at::Tensor local_of(const Value& value) {
  const at::Tensor tensor = value.tensor();
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).to_local() : tensor;
}

bool are_equal(const StateDict& a, const StateDict& b) {
  for (const Value::Entry& entry : a.values().entries()) {
    const Value& other = b.at(entry.key);
    if (entry.value.is_tensor() ? !at::equal(local_of(entry.value), local_of(other))
                                : !(entry.value == other))
      return false;
  }
  return true;
}

/// What became of a load.
struct Outcome {
  std::string error;  // the same on every rank; "" if none
  bool is_right = false;
};

void on_ranks_or_none(int64_t ranks, const std::function<void()>& body) {
  ranks == 0 ? body() : run(ranks, body);
}

void meet_if_ranks() {
  if (has_current_world()) comm::barrier(current_world()->group()).wait();
}

/// Loads on every rank: all of them have the same error, or none. After an error the state must be as it was.
Outcome try_load(const std::string& path, Format format) {
  StateDict state = state_of(format, true);
  Outcome outcome;
  try {
    load(state, path);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    outcome.error = known ? known->what_without_backtrace() : error.what();
    EXPECT_TRUE(are_equal(state, state_of(format, true))) << "half loaded: " << outcome.error;
  }
  outcome.is_right = outcome.error.empty() && are_equal(state, state_of(format, false));
  return outcome;
}

void put(const std::string& path, const std::string& content) {
  fs::remove_all(path);
  write_text(path, content);
}

/// A checkpoint of a few hundred bytes whose files are damaged one way after the other.
class Damage : public ::testing::TestWithParam<std::tuple<Format, int64_t>> {
 protected:
  Format format() const { return std::get<0>(GetParam()); }
  int64_t ranks() const { return std::get<1>(GetParam()); }

  void SetUp() override {
    path = directory / "x";
    on_ranks_or_none(ranks(), [&] {
      SaveOptions options;
      options.format = format();
      options.file_limit = 64;  // for Hugging Face's: a file each
      save(state_of(format(), false), path, options);
    });
    for (const std::string& name : list_directory(path)) files[name] = read_file(path + "/" + name, 1 << 20);
    ASSERT_GE(files.size(), 2u);
  }

  /// The file that says what the others hold.
  std::string index() const {
    return format() == Format::Tessera ? "index.json"
           : format() == Format::DCP   ? ".metadata"
                                       : "model.safetensors.index.json";
  }

  /// Calls `each` with the outcome of loading what each of `damages` has made; the files are then put back.
  void for_each_damage(const std::vector<std::function<void()>>& damages,
                       const std::function<void(size_t, const Outcome&)>& each) {
    on_ranks_or_none(ranks(), [&] {
      for (const auto i : c10::irange(damages.size())) {
        const bool is_first = !has_current_world() || get_rank() == 0;
        if (is_first) damages[i]();
        meet_if_ranks();
        const Outcome outcome = try_load(path, format());
        each(i, outcome);
        meet_if_ranks();
        if (is_first) {
          fs::remove_all(path);
          fs::create_directory(path);
          for (const auto& [name, content] : files) put(path + "/" + name, content);
        }
        meet_if_ranks();
      }
      EXPECT_TRUE(try_load(path, format()).is_right);
    });
  }

  TemporaryDirectory directory;
  std::string path;
  std::map<std::string, std::string> files;
};

INSTANTIATE_TEST_SUITE_P(Formats, Damage,
                         ::testing::Combine(::testing::Values(Format::Tessera, Format::DCP,
                                                              Format::HuggingFace),
                                            ::testing::Values(0, 2, 3)),
                         [](const auto& info) {
                           return c10::str(name_of_format(std::get<0>(info.param)), std::get<1>(info.param));
                         });

/// Where each payload begins and ends: of tensors whose bytes are known.
std::vector<std::pair<size_t, size_t>> payloads_in(const std::string& content, const StateDict& state) {
  std::vector<std::pair<size_t, size_t>> found;
  const at::Tensor full = state.at("sharded").tensor(), plain = state.at("plain").tensor();
  const auto look_for = [&](const char* bytes, size_t size) {
    for (size_t at = content.find(std::string_view(bytes, size)); at != std::string::npos;
         at = content.find(std::string_view(bytes, size), at + 1))
      found.emplace_back(at, at + size);
  };
  const auto* rows = static_cast<const char*>(full.const_data_ptr());
  for (size_t element = 0; element < 24; ++element) look_for(rows + element * 4, 4);
  const auto* numbers = static_cast<const char*>(plain.const_data_ptr());
  for (size_t element = 0; element < 5; ++element) look_for(numbers + element * 8, 8);
  return found;
}

TEST_P(Damage, FlippedBytesAreNoticedOrDoNoHarm) {
  const StateDict global = state_of(format(), false);
  struct Flip {
    std::string file;
    size_t position;
    bool is_payload;
  };
  std::vector<Flip> flips;
  for (const auto& [name, content] : files) {
    std::vector<bool> is_payload(content.size(), false);
    if (name != index()) {
      for (const auto& [begin, end] : payloads_in(content, global))
        std::fill(is_payload.begin() + static_cast<std::ptrdiff_t>(begin),
                  is_payload.begin() + static_cast<std::ptrdiff_t>(end), true);
    }
    // Every byte in one process; on ranks, some of them.
    for (size_t i = 0; i < content.size(); i += ranks() == 0 ? 1 : 7)
      flips.push_back({name, i, is_payload[i]});
  }
  std::vector<std::function<void()>> damages;
  for (const Flip& flip : flips) {
    damages.push_back([&] {
      std::string content = files.at(flip.file);
      content[flip.position] = static_cast<char>(content[flip.position] ^ (1 << flip.position % 8));
      put(path + "/" + flip.file, content);
    });
  }
  std::atomic<int64_t> noticed{0}, harmless{0}, silent{0};
  for_each_damage(damages, [&](size_t i, const Outcome& outcome) {
    const auto& [file, position, is_payload] = flips[i];
    SCOPED_TRACE(
        c10::str(file, " at byte ", position, is_payload ? ", of a payload" : "", ": ", outcome.error));
    if (outcome.error.empty()) {
      (outcome.is_right ? harmless : silent) += 1;
      EXPECT_FALSE(format() == Format::Tessera && (is_payload || file == index()));
      EXPECT_FALSE(format() == Format::DCP && is_payload);
      // Hugging Face's format has no checksums: docs/checkpoint.md.
      if (!(format() == Format::HuggingFace && is_payload)) EXPECT_TRUE(outcome.is_right);
      return;
    }
    ++noticed;
    EXPECT_THAT(outcome.error, HasSubstr(path));
    if (format() == Format::Tessera && file == index())
      EXPECT_THAT(outcome.error, HasSubstr(path + "/index.json"));
    if (is_payload) {
      EXPECT_THAT(outcome.error, AllOf(HasSubstr(path + "/" + file),
                                       AnyOf(HasSubstr("tensor 'sharded'"), HasSubstr("tensor 'plain'"))));
    }
  });
  const int64_t all = std::max<int64_t>(ranks(), 1);
  std::cout << flips.size() << " flips: " << noticed / all << " noticed, " << harmless / all
            << " did no harm, " << silent << " (by rank) were not noticed\n";
}

TEST_P(Damage, TruncatedFiles) {
  std::vector<std::pair<std::string, size_t>> cuts;
  for (const auto& [name, content] : files) {
    for (size_t length = 0; length < content.size(); length += ranks() == 0 ? 5 : 41)
      cuts.emplace_back(name, length);
    cuts.emplace_back(name, content.size() - 1);
  }
  std::vector<std::function<void()>> damages;
  for (const auto& [name, length] : cuts)
    damages.push_back(
        [&, name = name, length = length] { put(path + "/" + name, files.at(name).substr(0, length)); });
  for_each_damage(damages, [&](size_t i, const Outcome& outcome) {
    SCOPED_TRACE(c10::str(cuts[i].first, " cut at ", cuts[i].second, ": ", outcome.error));
    // The text of Hugging Face's index may end with a line end or without one.
    if (outcome.error.empty() && outcome.is_right && cuts[i].first == "model.safetensors.index.json") return;
    EXPECT_THAT(outcome.error, HasSubstr(path + "/" + cuts[i].first));
  });
}

TEST_P(Damage, MissingAndReplacedFiles) {
  std::vector<std::pair<std::string, std::function<void()>>> damages;
  for (const auto& [name, content] : files) {
    const std::string file = path + "/" + name;
    damages.push_back({name + " removed", [file] { fs::remove_all(file); }});
    damages.push_back({name + " a directory", [file] {
                         fs::remove_all(file);
                         fs::create_directory(file);
                       }});
    damages.push_back({name + " a loop of links", [file] {
                         fs::remove_all(file);
                         fs::create_symlink(file, file);
                       }});
    damages.push_back({name + " a pipe", [file] {
                         fs::remove_all(file);
                         ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
                       }});
    damages.push_back({name + " unreadable", [file] {
                         fs::remove_all(file);
                         fs::create_symlink("/nowhere/at/all", file);
                       }});
  }
  std::vector<std::function<void()>> calls;
  for (const auto& [what, call] : damages) calls.push_back(call);
  for_each_damage(calls, [&](size_t i, const Outcome& outcome) {
    SCOPED_TRACE(c10::str(damages[i].first, ": ", outcome.error));
    // Without its index, a directory of whole files of Hugging Face's is still a checkpoint.
    if (outcome.is_right && format() == Format::HuggingFace) return;
    EXPECT_THAT(outcome.error, HasSubstr(path));
  });
}

TEST_P(Damage, SwappedFiles) {
  std::vector<std::string> data;
  for (const auto& [name, content] : files) {
    if (name != index()) data.push_back(name);
  }
  if (data.size() < 2) GTEST_SKIP() << "there is one file";
  for_each_damage({[&] {
                    fs::rename(path + "/" + data[0], path + "/swapped");
                    fs::rename(path + "/" + data[1], path + "/" + data[0]);
                    fs::rename(path + "/swapped", path + "/" + data[1]);
                  }},
                  [&](size_t, const Outcome& outcome) {
                    // Nothing in PyTorch's format says what is in a file: if both hold the same shapes, it is not noticed.
                    if (format() == Format::DCP && outcome.error.empty()) return;
                    EXPECT_THAT(outcome.error, HasSubstr(path));
                  });
}

TEST_P(Damage, ReplacedTexts) {
  struct Replacement {
    std::string from;
    std::string to;
    std::string error;
  };
  std::vector<Replacement> replacements;
  const std::string huge = "9223372036854775807";
  if (format() == Format::Tessera) {
    const std::string file = "data_00000_0.safetensors";
    replacements = {{file, "../x/" + file, "does not lie in the checkpoint's directory"},
                    {file, "/etc/passwd", "does not lie in the checkpoint's directory"},
                    {file, "a/../../" + file, "does not lie in the checkpoint's directory"},
                    {file, "", "does not lie in the checkpoint's directory"},
                    {file, "index.json", "index.json"},
                    {file, "other.safetensors", "other.safetensors"},
                    {"\"shape\":[8,3]", "\"shape\":[" + huge + ",3]", "'sharded'"},
                    {"\"shape\":[8,3]", "\"shape\":[" + huge + "]", "'sharded'"},
                    {"\"shape\":[8,3]", "\"shape\":[-8,3]", "'sharded'"},
                    {"\"shape\":[8,3]", "\"shape\":[8,3e400]", "index.json"},
                    {"\"shape\":[5]", "\"shape\":[6]", "'plain'"},
                    {"\"length\":40", "\"length\":" + huge, "'plain'"},
                    {"\"length\":40", "\"length\":-40", "'plain'"},
                    {"\"block\":", "\"block\":-", "multiple of 16"},
                    {"\"offset\":", "\"offset\":9", "bytes"},
                    {"\"offset\":", "\"offset\":-", "negative position"},
                    {"\"int64\"", "\"int65\"", "'plain'"},
                    {"\"int64\"", "\"float64\"", "plain: Double [5] in the checkpoint, but Long [5]"},
                    {"\"version\":1", "\"version\":2", "version 2"},
                    {"\"version\":1", "\"version\":" + huge + "9", "version"},
                    {"77", std::string(5000, '[') + "7", "index.json"}};
  } else if (format() == Format::DCP) {
    replacements = {{"__0_0.distcp", "../0_0.distcp", ".metadata"},
                    {"__0_0.distcp", "../../../abc", "does not lie in the checkpoint's directory"},
                    {"__0_0.distcp", "/etc/passwd1", "does not lie in the checkpoint's directory"},
                    {"__0_0.distcp", "__9_9.distcp", "__9_9.distcp"},
                    {"_rebuild_tensor", "_rebuild_sensor", ""},
                    {"TensorStorageMetadata", "TensorStorageMetadatb", ".metadata"},
                    {"sharded", "shorded", "shorded"}};
  } else {
    const std::string file = "model-00001-of-00002.safetensors";
    replacements = {{file, "../el-00001-of-00002.safetensors", "does not lie in the checkpoint's directory"},
                    {file, "/etc/passwd", "does not lie in the checkpoint's directory"},
                    {file, "model-00002-of-00002.safetensors", "is not in"},
                    {"\"weight_map\"", "\"weight_mop\"", "model.safetensors.index.json"},
                    {"\"plain\"", "\"plaim\"", "plaim"}};
  }
  std::vector<std::function<void()>> damages;
  std::vector<std::string> errors;
  for (const auto& [from, to, error] : replacements) {
    std::string text = files.at(index());
    size_t at = text.find(from);
    if (at == std::string::npos) continue;  // not on that many ranks
    for (; at != std::string::npos; at = text.find(from, at + to.size())) text.replace(at, from.size(), to);
    if (format() == Format::Tessera) text = seal_index(text.substr(0, text.rfind("\n\"crc32c\":\"")));
    damages.push_back([this, text] { put(path + "/" + index(), text); });
    errors.push_back(error);
  }
  EXPECT_GT(damages.size(), 2u);
  for_each_damage(damages, [&](size_t i, const Outcome& outcome) {
    SCOPED_TRACE(i);
    EXPECT_THAT(outcome.error, AllOf(HasSubstr(path), HasSubstr(errors[i])));
  });
}

/// Saved on two ranks and loaded on others, so that ranks read parts of chunks.
TEST(DamageElsewhere, IsNoticedOnAnyNumberOfRanks) {
  const at::Tensor full = at::arange(1 << 18, at::kFloat).reshape({512, 512});
  for (const Format format : {Format::Tessera, Format::DCP}) {
    const TemporaryDirectory directory;
    const std::string path = directory / "x";
    run(2, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
      StateDict state;
      state["w"] = distribute_tensor(full, mesh, {Shard(1)}, std::nullopt);
      state["r"] = full.clone();
      SaveOptions options;
      options.format = format;
      save(state, path, options);
    });
    const std::string damaged =
        path + (format == Format::Tessera ? "/data_00001_0.safetensors" : "/__1_0.distcp");
    {
      const std::string content = read_file(damaged, 1 << 24);
      File file = File::modify(damaged);
      const char flipped = static_cast<char>(content[content.size() / 2] ^ 4);
      file.write(static_cast<int64_t>(content.size() / 2), &flipped, 1);
    }
    for (const Verify verify : {Verify::First, Verify::WhileLoading}) {
      if (format == Format::DCP && verify == Verify::WhileLoading) continue;
      for (const int64_t ranks : {1, 2, 3, 5}) {
        for (const int64_t dim : {0, 1}) {
          run(ranks, [&] {
            const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks});
            StateDict state;
            state["w"] = distribute_tensor(at::zeros({512, 512}), mesh, {Shard(dim)}, std::nullopt);
            state["r"] = at::zeros({512, 512});
            LoadOptions options;
            options.verify = verify;
            EXPECT_THAT(error_of([&] { load(state, path, options); }),
                        AllOf(HasSubstr(damaged + " is damaged: "), HasSubstr("tensor '")));
            if (verify != Verify::First) return;
            EXPECT_TRUE(at::equal(state.at("r").tensor(), at::zeros({512, 512})));
            EXPECT_TRUE(at::equal(DTensor(state.at("w").tensor()).full_tensor(), at::zeros({512, 512})));
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::checkpoint
