#include <tessera/comm/collectives.h>
#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dispatch/guards.h>
#include <tessera/dtensor/dtensor.h>

#include <sstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

/// Each collective counts once, under its own name, whatever it is made of.
void count_each_collective(const std::string& backend) {
  run(2,
      [] {
        const Group group = current_world()->group();
        const at::Tensor a = at::ones({4}), b = at::ones({8});
        const comm::Tensors halves = b.split(4), uneven{at::ones({1}), at::ones({3})};
        const int64_t me = current_world()->rank();
        CommDebugMode outer;
        {
          CommDebugMode counts;
          comm::all_reduce(a, c10d::ReduceOp::SUM, group).wait();
          comm::all_reduce(at::ones({4}, at::kComplexFloat), c10d::ReduceOp::SUM, group).wait();
          comm::all_gather(halves, a, group).wait();
          comm::all_gather_into(b, a, group).wait();
          comm::reduce_scatter(a, halves, c10d::ReduceOp::SUM, group).wait();
          comm::reduce_scatter(at::ones({me == 0 ? 1 : 3}), uneven, c10d::ReduceOp::SUM, group).wait();
          comm::broadcast(at::ones({0}), 0, group).wait();
          comm::barrier(group).wait();
          using Count = CommDebugMode::Count;
          const std::map<std::string, Count> expected{{"all_reduce", {2, 16 + 32}},
                                                      {"all_gather", {2, 32 + 32}},
                                                      {"reduce_scatter", {2, 32 + 16}},
                                                      {"broadcast", {1, 0}},
                                                      {"barrier", {1, 0}}};
          EXPECT_EQ(counts.get_comm_counts(), expected);
          EXPECT_EQ(counts.get_total_counts(), 8);
          EXPECT_EQ(counts.calls("all_gather"), 2);
          EXPECT_EQ(counts.calls("all_to_all"), 0);
        }
        comm::barrier(group).wait();
        EXPECT_EQ(outer.get_total_counts(), 9);
        EXPECT_EQ(outer.calls("barrier"), 2);
      },
      {.backend = backend});
}

TEST(CommDebugMode, CountsEachCollectiveOnce) { count_each_collective(""); }
TEST(CommDebugMode, CountsEachCollectiveOnceOverGloo) { count_each_collective("gloo"); }

/// Also where a mesh dim of one rank makes several dims the same group.
TEST(CommDebugMode, KnowsTheMeshDim) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 1, 2}, {"dp", "pp", "tp"});
    const DTensor x = distribute_tensor(at::ones({8, 8}), mesh, {Shard(0), Replicate(), Shard(1)});
    CommDebugMode counts;
    x.redistribute({Shard(0), Replicate(), Replicate()});
    x.redistribute({Replicate(), Replicate(), Shard(1)});
    comm::barrier(mesh.get_joint_group()).wait();
    comm::all_reduce(at::ones({2}), c10d::ReduceOp::SUM, mesh.get_group({"dp", "tp"})).wait();
    const std::map<std::string, std::map<std::string, CommDebugMode::Count>> expected{
        {"all_gather", {{"dp", {1, 128}}, {"tp", {1, 128}}}},
        {"barrier", {{"dp_tp", {1, 0}}}},
        {"all_reduce", {{"dp_tp", {1, 8}}}}};
    EXPECT_EQ(counts.counts_by_mesh_dim(), expected);
    counts.reset();
    EXPECT_TRUE(counts.counts_by_mesh_dim().empty());
    // A group of no mesh has none.
    comm::barrier(current_world()->group({3, 2, 1, 0}, at::kCPU)).wait();
    EXPECT_EQ(counts.counts_by_mesh_dim().at("barrier").at("").calls, 1);
  });
}

TEST(CommDebugMode, SeesWhatOperatorsDo) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(at::ones({8, 8}), mesh, {Shard(0)});
    CommDebugMode counts;
    std::ostringstream text;
    text << counts;
    EXPECT_EQ(text.str(), "none");
    x.add(x);
    EXPECT_EQ(counts.get_total_counts(), 0);
    DTensor(x.sum()).full_tensor();
    DTensor(x).redistribute({Shard(1)});
    DTensor(x).redistribute({Replicate()});
    text.str("");
    text << counts;
    EXPECT_EQ(text.str(), "all_gather 1 (256 B), all_reduce 1 (4 B), all_to_all 1 (48 B)");
    counts.reset();
    EXPECT_EQ(counts.total_bytes(), 0);
  });
}

/// That ranks agree whether one of them refuses what it holds is communication, and counts as such.
TEST(CommDebugMode, CountsTheAgreementOnRefusals) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor x = distribute_tensor(at::ones({8, 3}), mesh, {Shard(0)});
    at::Tensor global = at::zeros({8, 3}, at::kLong);
    const at::Tensor good = distribute_tensor(global, mesh, {Shard(0)});
    global[7].fill_(9);  // the last rank alone sees it
    const at::Tensor bad = distribute_tensor(global, mesh, {Shard(0)});
    CommDebugMode counts;
    x.gather(1, good);
    std::ostringstream text;
    text << counts;
    EXPECT_EQ(text.str(), "all_reduce 1 (8 B)");
    EXPECT_THROW(x.gather(1, bad), c10::Error);
    EXPECT_EQ(counts.calls("all_reduce"), 2);
    EXPECT_EQ(counts.get_total_counts(), 2);
    {
      const ImplicitCommunicationGuard forbidden(ImplicitCommunication::forbidden);
      x.gather(1, good);
    }
    EXPECT_EQ(counts.get_total_counts(), 2);
  });
}

}  // namespace
}  // namespace tessera
