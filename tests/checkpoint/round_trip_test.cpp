// What was saved on some ranks is loaded on others, from every layout to every other.

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>

#include <ATen/ATen.h>

#include "tests/checkpoint/scratch.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using tessera::testing::expect_ok;
using tessera::testing::same_bits;
using tessera::testing::spawn_ranks;
using ::testing::HasSubstr;

at::Tensor values_of(at::IntArrayRef shape, at::ScalarType dtype) {
  const at::Tensor count = at::arange(1, c10::multiply_integers(shape) + 1, at::kDouble).reshape(shape);
  if (dtype == at::kBool) return count.remainder(3).eq(0);
  if (at::isComplexType(dtype)) return at::complex(count, -count).to(dtype);
  // Whatever the bits mean: what is loaded must be equal in all of them.
  if (c10::elementSize(dtype) == 1) return count.remainder(251).to(at::kByte).view(dtype);
  return count.remainder(2000).to(dtype);
}

/// How a tensor lies on ranks.
struct RankLayout {
  std::vector<int64_t> mesh;
  Placements placements;
  ShardOrder order;
  std::string str() const {
    std::ostringstream out;
    out << "mesh " << c10::IntArrayRef(mesh) << " ";
    for (const Placement& placement : placements) out << placement << " ";
    return out.str();
  }
};

at::Tensor distribute(const at::Tensor& full, const RankLayout& layout) {
  if (layout.mesh.empty()) return full.clone();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, layout.mesh);
  DTensor tensor = distribute_tensor(full, mesh, replicated(mesh), std::nullopt);
  DTensor::RedistributeOptions options;
  options.order = {layout.order.begin(), layout.order.end()};
  return tensor.redistribute(layout.placements, options);
}

void on_ranks(const RankLayout& layout, const std::function<void()>& body) {
  if (layout.mesh.empty()) return body();
  run(c10::multiply_integers(layout.mesh), body);
}

/// All layouts of a 2-d tensor on meshes of 1 to 6 ranks, and none at all.
std::vector<RankLayout> all_rank_layouts() {
  std::vector<RankLayout> layouts{{}};
  for (const std::vector<int64_t>& mesh :
       std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {5}, {6}, {2, 2}, {2, 3}}) {
    for (const Placements& placements :
         tessera::testing::all_placements(static_cast<int64_t>(mesh.size()), 2, false))
      layouts.push_back({mesh, placements, {}});
  }
  layouts.push_back({{2, 2}, {Shard(0), Shard(0)}, {1, 0}});
  layouts.push_back({{2, 2}, {StridedShard(0, 2), Shard(0)}, {}});
  layouts.push_back({{3}, {StridedShard(1, 2)}, {}});
  layouts.push_back({{2, 3}, {Replicate(), StridedShard(0, 3)}, {}});
  return layouts;
}

TEST(RoundTrip, FromEveryLayoutToEveryOther) {
  const Scratch scratch;
  // Even, uneven, with empty shards, with no elements.
  const std::vector<std::vector<int64_t>> shapes{{12, 12}, {7, 5}, {2, 9}, {0, 3}};
  const auto layouts = all_rank_layouts();
  for (size_t i = 0; i < layouts.size(); ++i) {
    const std::string path = scratch / ("from-" + std::to_string(i));
    on_ranks(layouts[i], [&] {
      StateDict state;
      for (size_t k = 0; k < shapes.size(); ++k)
        state["w" + std::to_string(k)] = distribute(values_of(shapes[k], at::kFloat), layouts[i]);
      save(state, path);
    });
  }
  for (const RankLayout& to : layouts) {
    on_ranks(to, [&] {
      for (size_t i = 0; i < layouts.size(); ++i) {
        StateDict state;
        for (size_t k = 0; k < shapes.size(); ++k)
          state["w" + std::to_string(k)] = distribute(at::full(shapes[k], -1.0f), to);
        load(state, scratch / ("from-" + std::to_string(i)));
        for (size_t k = 0; k < shapes.size(); ++k) {
          const at::Tensor& loaded = state.at("w" + std::to_string(k)).tensor();
          const at::Tensor full = to.mesh.empty() ? loaded : DTensor(loaded).full_tensor();
          EXPECT_TRUE(same_bits(full, values_of(shapes[k], at::kFloat)))
              << layouts[i].str() << " -> " << to.str() << " shape " << c10::IntArrayRef(shapes[k]);
        }
      }
    });
  }
}

TEST(RoundTrip, EveryDtypeAndFormat) {
  const Scratch scratch;
  const std::vector<at::ScalarType> dtypes{
      at::kBool,   at::kByte,         at::kChar,          at::kShort,       at::kInt,          at::kLong,
      at::kUInt16, at::kUInt32,       at::kUInt64,        at::kHalf,        at::kBFloat16,     at::kFloat,
      at::kDouble, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexDouble};
  for (const Format format : {Format::Tessera, Format::DCP, Format::HuggingFace}) {
    const std::string path = scratch / std::to_string(static_cast<int>(format));
    run(3, [&] {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {3});
      const auto fill = [&](StateDict& state, bool real) {
        for (const at::ScalarType dtype : dtypes) {
          if (format == Format::HuggingFace && dtype == at::kComplexDouble) continue;
          for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {0}, {7, 3}}) {
            at::Tensor full = values_of(shape, dtype);
            if (!real) full = at::zeros_like(full);
            const std::string key = c10::str(dtype, c10::IntArrayRef(shape));
            state[key] =
                shape.size() < 2 ? full : at::Tensor(distribute_tensor(full, mesh, {Shard(0)}, std::nullopt));
          }
        }
      };
      StateDict saved, loaded;
      fill(saved, true);
      fill(loaded, false);
      SaveOptions options;
      options.format = format;
      save(saved, path, options);
      load(loaded, path);
      for (const Value::Entry& entry : saved.values().entries()) {
        const at::Tensor a = entry.value.tensor(), b = loaded.at(entry.key).tensor();
        EXPECT_TRUE(DTensor::is_dtensor(a) ? same_bits(DTensor(a).to_local(), DTensor(b).to_local())
                                           : same_bits(a, b))
            << entry.key;
      }
    });
  }
}

TEST(RoundTrip, ValuesAndStructure) {
  const Scratch scratch;
  Value state = Value::dict();
  state["step"] = 7;
  state["lr"] = 0.1;
  state["huge"] = std::numeric_limits<int64_t>::min();
  state["inf"] = -std::numeric_limits<double>::infinity();
  state["nan"] = std::nan("");
  state["name"] = "a \"name\"\nwith \u00e4\u4e2d odd characters";
  state["bytes"] = Bytes{std::string("\0\xff\x80", 3)};
  state["none"] = Value();
  state["flag"] = true;
  state["empty list"] = Value::list();
  state["empty dict"] = Value::dict();
  state["list"] = Value::list({1, 2.5, "x", Value::list({true})});
  state["layers"] = Value::list();
  for (int i = 0; i < 12; ++i) {
    Value layer = Value::dict();
    layer["weight"] = at::full({2}, i);
    state["layers"].items().push_back(layer);
  }
  state["odd/../key"]["a.b"] = at::ones({3});
  for (const Format format : {Format::Tessera, Format::DCP}) {
    const std::string path = scratch / std::to_string(static_cast<int>(format));
    SaveOptions options;
    options.format = format;
    save(StateDict(state), path, options);
    const Value loaded = load(path);
    for (const char* key :
         {"step", "lr", "huge", "inf", "nan", "name", "bytes", "none", "flag", "empty list", "list"})
      EXPECT_EQ(loaded.at(key), state.at(key)) << key;
    ASSERT_EQ(loaded.at("layers").size(), 12u);
    for (int i = 0; i < 12; ++i)
      EXPECT_TRUE(at::equal(loaded.at("layers").at(size_t(i)).at("weight").tensor(), at::full({2}, i)));
    EXPECT_TRUE(at::equal(loaded.at("odd/../key").at("a.b").tensor(), at::ones({3})));
    if (format == Format::Tessera) {
      EXPECT_EQ(loaded.at("empty dict"), Value::dict());
    }
  }
}

TEST(RoundTrip, ShardedTensorsAndDTensors) {
  const Scratch scratch;
  const at::Tensor full = values_of({11, 4}, at::kDouble);
  using sharded::ChunkShardingSpec;
  const auto shard = [&](const at::Tensor& tensor, int64_t ranks, int64_t dim) {
    std::vector<sharded::RemoteDevice> devices;
    for (int64_t rank = ranks; rank-- > 0;) devices.emplace_back(c10::str("rank:", rank, "/cpu"));
    return sharded::shard_tensor(tensor, ChunkShardingSpec(dim, {devices.begin(), devices.end()}));
  };
  run(4, [&] {
    StateDict state;
    state["w"] = shard(full, 4, 0);
    save(state, scratch / "sharded");
  });
  run(3, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {3});
    StateDict state;
    state["w"] = distribute_tensor(at::zeros_like(full), mesh, {Shard(1)});
    load(state, scratch / "sharded");
    EXPECT_TRUE(at::equal(DTensor(state.at("w").tensor()).full_tensor(), full));
    save(state, scratch / "dtensor");
  });
  run(2, [&] {
    StateDict state;
    state["w"] = shard(at::zeros_like(full), 2, 1);
    load(state, scratch / "dtensor");
    const at::Tensor gathered = ShardedTensor(state.at("w").tensor()).gather(0);
    if (get_rank() == 0) EXPECT_TRUE(at::equal(gathered, full));
  });
}

TEST(RoundTrip, PartialValuesAreReducedAndMemoryMayLieAnyhow) {
  const Scratch scratch;
  const at::Tensor full = values_of({6, 4}, at::kFloat);
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    StateDict state;
    state["partial"] = DTensor::from_local(get_rank() == 0 ? full * 3 : full * -2, mesh, {Partial()});
    state["transposed"] = distribute_tensor(full, mesh, {Shard(0)}).t();
    state["plain"] = full.t();
    state["conj"] = at::complex(full, full).conj();
    save(state, scratch / "a");
    StateDict back;
    back["partial"] = distribute_tensor(at::zeros({6, 4}), mesh, {Shard(1)});
    back["transposed"] = distribute_tensor(at::zeros({4, 6}), mesh, {Shard(0)});
    back["plain"] = at::zeros({6, 4}).t();
    back["conj"] = at::zeros({6, 4}, at::kComplexFloat).conj();
    load(back, scratch / "a");
    EXPECT_TRUE(at::equal(DTensor(back.at("partial").tensor()).full_tensor(), full));
    EXPECT_TRUE(at::equal(DTensor(back.at("transposed").tensor()).full_tensor(), full.t()));
    EXPECT_TRUE(at::equal(back.at("plain").tensor(), full.t()));
    EXPECT_TRUE(at::equal(back.at("conj").tensor(), at::complex(full, -full)));

    StateDict partial;
    partial["partial"] = DTensor::from_local(full, mesh, {Partial()});
    EXPECT_THAT(error_of([&] { load(partial, scratch / "a"); }), HasSubstr("'partial' has partial values"));
  });
}

TEST(Strict, ListsEverythingBeforeAnythingChanges) {
  const Scratch scratch;
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    StateDict state;
    state["a"] = at::ones({4});
    state["b"] = at::ones({4});
    state["c"] = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    state["d"] = 3;
    save(state, scratch / "x");

    StateDict other;
    other["a"] = at::zeros({4});
    other["b"] = at::zeros({5});
    other["c"] = distribute_tensor(at::zeros({4}, at::kDouble), mesh, {Shard(0)});
    other["e"] = at::zeros({1});
    const std::string error = error_of([&] { load(other, scratch / "x"); });
    EXPECT_THAT(error, HasSubstr("b: Float [4] in the checkpoint, but Float [5] in the state dict"));
    EXPECT_THAT(error, HasSubstr("c: Float [4] in the checkpoint, but Double [4] in the state dict"));
    EXPECT_THAT(error, HasSubstr("missing in the checkpoint:\n    e"));
    EXPECT_THAT(error, HasSubstr("only in the checkpoint:\n    d"));
    EXPECT_TRUE(at::equal(other.at("a").tensor(), at::zeros({4})));

    StateDict some;
    some["a"] = at::zeros({4});
    some["e"] = at::zeros({1});
    EXPECT_THAT(error_of([&] { load(some, scratch / "x"); }), HasSubstr("strict = false"));
    LoadOptions lenient;
    lenient.strict = false;
    const LoadReport report = load(some, scratch / "x", lenient);
    EXPECT_EQ(report.missing, std::vector<std::string>{"e"});
    EXPECT_EQ(report.unexpected, (std::vector<std::string>{"b", "c", "d"}));
    EXPECT_TRUE(at::equal(some.at("a").tensor(), at::ones({4})));
  });
}

TEST(Strict, AnEmptyDictIsNotMissing) {
  const Scratch scratch;
  StateDict state;
  state["a"] = 1;
  save(state, scratch / "x");
  state["a"] = 2;
  state["b"] = Value::dict();
  load(state, scratch / "x");
  EXPECT_EQ(state.at("a").integer(), 1);
  EXPECT_EQ(state.at("b"), Value::dict());
}

/// Loading writes into memory, which autograd and views that are copies must hear of.
TEST(Load, CountsAsAWrite) {
  const Scratch scratch;
  run(4, [&] {
    const at::Tensor full = values_of({6, 4}, at::kFloat);
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    StateDict state;
    at::Tensor sharded = distribute_tensor(full, mesh, {Shard(0)});
    at::Tensor plain = full.clone();
    state["sharded"] = sharded;
    state["plain"] = plain;
    save(state, scratch / "x");
    sharded.zero_();
    plain.zero_();
    const at::Tensor view = sharded.view({3, 8});
    const auto versions = std::make_pair(sharded._version(), plain._version());
    load(state, scratch / "x");
    EXPECT_TRUE(at::equal(DTensor(view).full_tensor(), full.view({3, 8})));
    EXPECT_GT(sharded._version(), versions.first);
    EXPECT_GT(plain._version(), versions.second);

    sharded.zero_();
    StateDict through;
    through["sharded"] = sharded.view({3, 8}).view({6, 4});
    through["plain"] = plain;
    load(through, scratch / "x");
    EXPECT_TRUE(at::equal(DTensor(sharded).full_tensor(), full));
  });
}

TEST(Save, CallsBeforeSaveOnTheWay) {
  const Scratch scratch;
  run(2, [&] {
    StateDict state;
    state.before_save([](Value& values) { values["step"] = 5; });
    save(state, scratch / "x");
    EXPECT_EQ(load(scratch / "x").at("step").integer(), 5);
    EXPECT_FALSE(state.values().contains("step"));
    state.before_save([](Value&) { TESSERA_CHECK(get_rank() == 0, "no"); });
    EXPECT_THAT(error_of([&] { save(state, scratch / "x"); }), HasSubstr("failed on rank 1: no"));
  });
}

/// Ranks may have different keys, as the stages of a pipeline do.
TEST(RoundTrip, RanksWithDifferentKeys) {
  const Scratch scratch;
  run(3, [&] {
    StateDict state;
    state[c10::str("stage", get_rank())] = at::full({3}, static_cast<double>(get_rank()));
    save(state, scratch / "x");
  });
  run(2, [&] {
    StateDict state;
    if (get_rank() == 0) {
      state["stage0"] = at::zeros({3});
      state["stage2"] = at::zeros({3});
    } else {
      state["stage1"] = at::zeros({3});
    }
    load(state, scratch / "x");
    for (const Value::Entry& entry : state.values().entries())
      EXPECT_EQ(entry.value.tensor()[0].item<float>(), entry.key.back() - '0');
  });
}

TEST(Save, RanksThatDisagreeAreAnError) {
  const Scratch scratch;
  run(2, [&] {
    StateDict state;
    state["step"] = get_rank();
    EXPECT_THAT(error_of([&] { save(state, scratch / "x"); }),
                HasSubstr("'step' is 0 on rank 0, but 1 on rank 1"));
    StateDict sparse;
    if (get_rank() == 1) sparse["s"] = at::eye(3).to_sparse();
    EXPECT_THAT(error_of([&] { save(sparse, scratch / "x"); }),
                HasSubstr("failed on rank 1: 's' is a tensor of layout"));
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  });
}

TEST(Save, ReplacesOnlyCheckpoints) {
  const Scratch scratch;
  StateDict state;
  state["a"] = at::ones({4});
  save(state, scratch / "x");
  state["a"] = at::zeros({2});
  save(state, scratch / "x");
  EXPECT_EQ(load(scratch / "x").at("a").tensor().numel(), 2);
  std::filesystem::create_directory(scratch / "home");
  std::ofstream(scratch / "home/thesis.txt") << "all of it";
  EXPECT_THAT(error_of([&] { save(state, scratch / "home"); }),
              HasSubstr("something else than a checkpoint"));
  EXPECT_THAT(error_of([&] { save(state, scratch / "home/thesis.txt"); }), HasSubstr("is a file"));
  EXPECT_THAT(error_of([&] { load(scratch / "nothing"); }), HasSubstr("There is no checkpoint at"));
  EXPECT_THAT(error_of([&] { load(scratch / "home"); }), HasSubstr("is no checkpoint"));
}

TEST(Save, KeepsTheLast) {
  const Scratch scratch;
  SaveOptions options;
  options.keep_last = 2;
  for (const int step : {7, 8, 9, 10, 100}) {
    StateDict state;
    state["step"] = step;
    save(state, scratch / c10::str("step-", step), options);
  }
  StateDict other;
  save(other, scratch / "best-1", options);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path()))
    names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step-10", "step-100", "best-1"));
  EXPECT_EQ(latest(scratch.path()), scratch / "step-100");
}

TEST(Save, PlansAreKept) {
  const Scratch scratch;
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    StateDict state;
    state["w"] = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    for (int i = 0; i < 3; ++i) {
      state["step"] = i;
      save(state, scratch / "x");
    }
    EXPECT_EQ(save_plan_cache_info().hits, 2);
    EXPECT_EQ(load(scratch / "x").at("step").integer(), 2);
    if (get_rank() == 0) state["only here"] = at::ones({2});
    save(state, scratch / "x");
    EXPECT_EQ(save_plan_cache_info().misses, 2);
    if (get_rank() == 0) state["step"] = at::ones({2});
    EXPECT_THAT(error_of([&] { save(state, scratch / "x"); }), HasSubstr("'step' is a tensor on some ranks"));
    if (get_rank() == 0) state["step"] = 2;
    LoadOptions lenient;
    lenient.strict = false;
    EXPECT_EQ(load(state, scratch / "x", lenient).unexpected.size(), 0u);
  });
}

TEST(AsyncSave, WritesWhatWasThereWhenItWasCalled) {
  const Scratch scratch;
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor full = values_of({512, 300}, at::kFloat);
    StateDict state;
    at::Tensor sharded = distribute_tensor(full, mesh, {Shard(0)});
    at::Tensor plain = full.clone();
    state["sharded"] = sharded;
    state["plain"] = plain;
    for (int i = 0; i < 3; ++i) {
      PendingSave pending = async_save(state, scratch / "x");
      sharded.add_(1);
      plain.add_(1);
      // Other collectives go on meanwhile.
      for (int k = 0; k < 20; ++k)
        EXPECT_EQ(sharded.min().item<float>(), full.min().item<float>() + float(i + 1));
      pending.wait();
      EXPECT_TRUE(pending.is_done());
      const Value loaded = load(scratch / "x");
      EXPECT_TRUE(at::equal(loaded.at("sharded").tensor(), full + i));
      EXPECT_TRUE(at::equal(loaded.at("plain").tensor(), full + i));
    }
  });
}

TEST(AsyncSave, ErrorsAreRaisedWhereItIsWaitedFor) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch / "home");
  std::ofstream(scratch / "home/thesis.txt") << "all of it";
  run(2, [&] {
    StateDict state;
    state["w"] = at::ones({3});
    PendingSave pending = async_save(state, scratch / "home");
    EXPECT_THAT(error_of([&] { pending.wait(); }), HasSubstr("something else than a checkpoint"));
  });
}

TEST(Progress, IsReported) {
  const Scratch scratch;
  StateDict state;
  state["w"] = at::ones({1 << 20});
  std::vector<std::string> phases;
  Progress last;
  SaveOptions options;
  options.progress = [&](const Progress& progress) {
    if (phases.empty() || phases.back() != progress.phase) phases.emplace_back(progress.phase);
    EXPECT_LE(progress.bytes, progress.total);
    last = progress;
  };
  save(state, scratch / "x", options);
  EXPECT_EQ(last.bytes, 4 << 20);
  LoadOptions load_options;
  load_options.progress = options.progress;
  load(state, scratch / "x", load_options);
  EXPECT_EQ(phases, (std::vector<std::string>{"saving", "verifying", "loading"}));
}

RANK_BODY(checkpoint_processes) {
  launch(1, [] {
    const std::string path = std::getenv("TESSERA_TEST_PATH");
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const at::Tensor full = values_of({70, 30}, at::kFloat);
    StateDict state;
    state["w"] = distribute_tensor(full, mesh, {Shard(0), Shard(1)});
    state["r"] = full.clone();
    state["step"] = 5;
    save(state, path);
    PendingSave pending = async_save(state, path + "-async");
    pending.wait();
    for (const std::string& each : {path, path + "-async"}) {
      StateDict back;
      back["w"] = distribute_tensor(at::zeros_like(full), mesh, {Shard(1), Replicate()});
      back["r"] = at::zeros_like(full);
      back["step"] = 0;
      load(back, each);
      EXPECT_TRUE(at::equal(DTensor(back.at("w").tensor()).full_tensor(), full));
      EXPECT_TRUE(at::equal(back.at("r").tensor(), full));
      EXPECT_EQ(back.at("step").integer(), 5);
    }
  });
}

TEST(RoundTrip, Processes) {
  const Scratch scratch;
  support::SpawnOptions options;
  options.environment = {{"TESSERA_TEST_PATH", scratch / "x"}};
  expect_ok(spawn_ranks("checkpoint_processes", 4, options));
  EXPECT_EQ(load(scratch / "x").at("step").integer(), 5);
}

}  // namespace
}  // namespace tessera::checkpoint
