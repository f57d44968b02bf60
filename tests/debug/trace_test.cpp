// What ranks spend their time with.

#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/debug/trace.h>
#include <tessera/dtensor/dtensor.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using testing::expect_error;
using ::testing::HasSubstr;

/// One step in which rank 1 comes late.
void work() {
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {get_world_size()});
  const at::Tensor x = distribute_tensor(at::ones({8, 8}), mesh, {Shard(0)}).requires_grad_();
  if (get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const at::Tensor y = at::mm(x, x);
  DTensor(y.sum()).redistribute({Replicate()}).backward();
}

void check_document(const std::string& text, int64_t ranks) {
  const auto document = nlohmann::json::parse(text);
  std::map<std::pair<int64_t, std::string>, int64_t> found;
  std::map<int64_t, std::vector<std::pair<double, double>>> spans;
  for (const auto& event : document["traceEvents"]) {
    if (event["ph"] == "M") continue;
    EXPECT_EQ(event["ph"], "X");
    EXPECT_GE(event["ts"].get<double>(), 0);
    ++found[{event["pid"], event["cat"]}];
    spans[event["pid"]].emplace_back(event["ts"], event["ts"].get<double>() + event["dur"].get<double>());
    if (event["cat"] == "collective") {
      EXPECT_TRUE(event["args"].contains("bytes")) << event;
      EXPECT_TRUE(event["args"].contains("group")) << event;
    }
    if (event["name"] == "aten::mm" && event["cat"] == "operator")
      EXPECT_THAT(event["args"]["inputs"].get<std::string>(), HasSubstr("f32[8,8] [S(0)], f32[8,8] [S(0)]"));
  }
  EXPECT_EQ(static_cast<int64_t>(spans.size()), ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (const std::string kind :
         {"operator", "compute", "collective", "wait", "redistribute", "operator,backward"})
      EXPECT_GT((found[{rank, kind}]), 0) << rank << " " << kind;
    // Of any two, one is inside the other, or they have nothing in common: else a trace cannot be drawn.
    const auto& all = spans[rank];
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const auto [a, b] = all[j];
        const auto [c, d] = all[i];
        EXPECT_TRUE(d <= a || b <= c || (a <= c && d <= b) || (c <= a && b <= d))
            << a << " " << b << " " << c << " " << d;
      }
    }
  }
}

void trace_and_check() {
  Trace trace;
  work();
  trace.stop();
  work();  // is not in it
  const std::string text = trace.json();
  EXPECT_EQ(text.empty(), get_rank() != 0);
  if (get_rank() == 0) {
    check_document(text, get_world_size());
    size_t count = 0;
    for (size_t at = text.find("\"aten::mm\",\"cat\":\"operator\""); at != std::string::npos;
         at = text.find("\"aten::mm\",\"cat\":\"operator\"", at + 1))
      ++count;
    EXPECT_EQ(count, static_cast<size_t>(get_world_size()));
  }
  const std::string summary = trace.summary();
  EXPECT_THAT(summary, HasSubstr("rank"));
  std::istringstream lines(summary);
  std::string line;
  std::getline(lines, line);
  EXPECT_THAT(line, HasSubstr("waiting"));
  std::getline(lines, line);
  EXPECT_THAT(line, ContainsRegex("^ +0 .*for rank 1: [0-9.]+%|^ +0 .*[ ,]1: [0-9.]+%"));
  std::getline(lines, line);
  EXPECT_THAT(line, ::testing::Not(ContainsRegex("for rank 1:")));
}

TEST(Trace, HasAllRanksThatAreThreads) { run(3, trace_and_check); }

RANK_BODY(traced_processes) {
  init_process_group();
  trace_and_check();
  destroy_process_group();
}

TEST(Trace, HasAllRanksThatAreProcesses) { testing::expect_ok(testing::spawn_ranks("traced_processes", 2)); }

TEST(Trace, WritesAFile) {
  const std::string file = ::testing::TempDir() + "tessera_trace.json";
  run(2, [&] {
    Trace trace;
    work();
    trace.write(file);
    expect_error<c10::Error>([&] { trace.write("/no/such/folder/trace.json"); },
                             {"/no/such/folder/trace.json"});
  });
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  check_document(text.str(), 2);
  std::filesystem::remove(file);
}

TEST(Trace, IsBounded) {
  run(2, [] {
    Trace trace({.capacity = 10});
    work();
    const auto document = trace.json();
    EXPECT_THAT(trace.summary(), HasSubstr("spans are left out"));
    if (get_rank() == 0) EXPECT_EQ(nlohmann::json::parse(document)["traceEvents"].size(), 2u * 2 + 2 * 10);
  });
}

/// Work without ranks has a trace too.
TEST(Trace, OfNoRanks) {
  Trace trace;
  EXPECT_EQ(nlohmann::json::parse(trace.json())["traceEvents"].size(), 2u);
}

}  // namespace
}  // namespace tessera
