// Shards of other ranks, read without their doing: over RPC between processes, directly between threads.

#include <tessera/comm/collectives.h>
#include <tessera/comm/rpc.h>
#include <tessera/comm/run.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>

#include <cstdlib>
#include <optional>
#include <signal.h>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/rpc/rref_impl.h>

#include "tests/sharded/specs.h"
#include "tests/support/ranks.h"

namespace tessera::sharded {
namespace {

using testing::chunks;
using testing::expect_error;
using testing::expect_ok;
using testing::global_tensor;
using testing::part;
using testing::spawn_ranks;
using namespace std::chrono_literals;

void barrier() { comm::barrier(current_world()->group()).wait(); }

/// The same tensor as shards on three ranks; each is a tensor of its own.
ShardedTensor sharded_by(const at::Tensor& global, const ShardingSpec& spec, const Ranks& ranks = {}) {
  std::vector<LocalShard> mine;
  const auto metadata = spec.build_metadata(global.sizes(), TensorProperties::of(global));
  for (const ShardMetadata& shard : metadata.shards_metadata) {
    const auto rank = shard.placement->rank() ? shard.placement->rank()
                                              : rpc::worker_rank(shard.placement->worker_name().value());
    if (rank == get_rank()) mine.emplace_back(part(global, shard.shard_offsets, shard.shard_sizes), shard);
  }
  return init_from_local_shards_and_global_metadata(mine, metadata, {ranks, /*init_rrefs=*/true});
}

/// Each shard is with its owner, and what `to_here` gives is its part of the whole. Gives their number.
/// Collective over all ranks, so that none lets its tensor go too early.
int64_t expect_remote_parts(const ShardedTensor& tensor, const at::Tensor& global) {
  int64_t count = 0;
  EXPECT_FALSE(tensor.remote_shards().contains(get_rank()));
  for (const auto& [owner, shards] : tensor.remote_shards()) {
    for (const RemoteShard& shard : shards) {
      EXPECT_EQ(shard.owner(), owner);
      const LocalShard here = shard.to_here();
      EXPECT_EQ(here.metadata, shard.metadata());
      const at::Tensor expected = part(global, here.metadata.shard_offsets, here.metadata.shard_sizes);
      EXPECT_TRUE(here.tensor.equal(expected)) << here.metadata << "\n" << here.tensor;
      EXPECT_EQ(here.tensor.scalar_type(), global.scalar_type());
      EXPECT_FALSE(here.tensor.requires_grad());
      ++count;
    }
  }
  barrier();  // all have read
  return count;
}

/// What holds on any three ranks.
void on_three_ranks() {
  const int64_t rank = get_rank();
  // Several shards on rank 1, an empty one at the end.
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kComplexDouble}) {
    const at::Tensor global = global_tensor({7, 5}).to(dtype);
    const ShardedTensor tensor = sharded_by(global, chunks(0, {1, 0, 1, 2, 1}));
    EXPECT_EQ(expect_remote_parts(tensor, global), rank == 1 ? 2 : 4);
  }
  // Nothing on rank 1: it reads the others', and is in nobody's list.
  const at::Tensor global = global_tensor({4, 6});
  const ShardedTensor two = sharded_by(global, chunks(1, {2, 0}));
  EXPECT_EQ(expect_remote_parts(two, global), rank == 1 ? 2 : 1);
  EXPECT_FALSE(two.remote_shards().contains(1));

  // Some of the ranks only.
  const ShardedTensor apart = sharded_by(global, chunks(1, {2, 0}), Ranks{2, 0});
  EXPECT_EQ(expect_remote_parts(apart, global), rank == 1 ? 0 : 1);

  // Other orders of local shards than the metadata's.
  const auto spec = chunks(0, {0, 0, 1, 2});
  const auto metadata = spec.build_metadata({4, 6}, TensorProperties());
  std::vector<LocalShard> mine;
  for (auto shard = metadata.shards_metadata.rbegin(); shard != metadata.shards_metadata.rend(); ++shard) {
    if (shard->placement->rank() == rank)
      mine.emplace_back(part(global, shard->shard_offsets, shard->shard_sizes), *shard);
  }
  expect_remote_parts(init_from_local_shards_and_global_metadata(mine, metadata, {{}, true}), global);

  // It is a copy, of what is there at the time.
  const ShardedTensor changing = sharded_by(at::zeros({3, 2}), chunks(0, {0, 1, 2}));
  const int64_t next = (rank + 1) % 3;
  const RemoteShard& other = changing.remote_shards().at(next).at(0);
  other.to_here().tensor.fill_(-1);
  barrier();
  EXPECT_TRUE(changing.local_tensor().equal(at::zeros({1, 2})));
  changing.local_tensor().fill_(rank);
  barrier();
  EXPECT_TRUE(other.to_here().tensor.equal(at::full({1, 2}, static_cast<float>(next))));

  // What is made of it has remote shards too; its gradient, which is not collective, has none.
  const ShardedTensor again = sharded_by(global, chunks(0, {0, 1, 2})).reshard(chunks(1, {2, 1, 0}));
  EXPECT_EQ(expect_remote_parts(again, global), 2);
  const ShardedTensor learning = sharded_by(global.detach().clone(), chunks(0, {0, 1, 2})).requires_grad_();
  learning.local_tensor().sum().backward();
  expect_remote_parts(learning, global);
  if (rank == 0) expect_error<c10::Error>([&] { learning.grad().remote_shards(); }, {"init_rrefs"});

  // It lives as long as any rank has it, or a handle, and then no longer.
  const auto is_part = [&](const RemoteShard& shard) {
    const auto& [offsets, sizes, placement] = shard.metadata();
    return shard.to_here().tensor.equal(part(global, offsets, sizes));
  };
  ShardedTensor shared = sharded_by(global, chunks(0, {0, 1, 2}));
  const c10::weak_intrusive_ptr<c10::TensorImpl> local(shared.local_tensor().getIntrusivePtr());
  std::optional<RemoteShard> handle = shared.remote_shards().at(next).at(0);
  ShardedTensor alias = shared.detach();
  shared = {};
  barrier();
  EXPECT_EQ(expect_remote_parts(alias, global), 2);
  if (rank != 1) alias = {};
  barrier();
  if (rank == 1) EXPECT_TRUE(is_part(alias.remote_shards().at(2).at(0)));
  alias = {};
  barrier();
  EXPECT_TRUE(is_part(*handle));
  barrier();
  handle.reset();
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (!local.expired() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(local.expired());
  barrier();
}

TEST(RemoteShards, BetweenThreads) {
  run(3, [] {
    rpc::init_rpc();
    on_three_ranks();
    const ShardedTensor tensor = sharded_by(global_tensor({3, 2}), chunks(0, {0, 1, 2}));
    const RemoteShard& shard = tensor.remote_shards().at((get_rank() + 1) % 3).at(0);
    expect_error<c10::Error>([&] { shard.rref(); }, {"is a thread of this process", "to_here"});
    barrier();
    rpc::shutdown();
  });
}

RANK_BODY(remote_shards) {
  launch(1, [] {
    at::set_num_threads(1);
    const int64_t rank = get_rank();
    const at::Tensor global = global_tensor({6, 4});
    expect_error<c10::Error>(
        [&] {
          sharded_by(global, chunks(0, {0, 1, 2}));
        },
        {"init_rrefs", "on rank 0 RPC is not initialized", "init_rpc"});
    rpc::init_rpc();
    on_three_ranks();
    {
      // Workers by their names, and libtorch's own references to their shards.
      const ShardedTensor named =
          sharded_by(global, ChunkShardingSpec(0, {"worker2/cpu", "worker0/cpu", "rank:1/cpu"}));
      EXPECT_EQ(expect_remote_parts(named, global), 2);
      for (const auto& [owner, shards] : named.remote_shards()) {
        const rpc::RRef rref = shards.at(0).rref();
        EXPECT_EQ(rref->owner(), owner);
        EXPECT_TRUE(rref->toHere().toTensor().equal(shards.at(0).to_here().tensor));
      }
      expect_error<c10::ValueError>([&] { sharded_by(global, ChunkShardingSpec(0, {"nobody/cpu"})); },
                                    {"no worker \"nobody\""});
      barrier();
    }
    {
      // An RRef keeps what it refers to.
      ShardedTensor tensor = sharded_by(global, chunks(0, {0, 1, 2}));
      const RemoteShard shard = tensor.remote_shards().at((rank + 1) % 3).at(0);
      const rpc::RRef rref = shard.rref();
      const at::Tensor before = rref->toHere().toTensor();
      barrier();
      tensor = {};
      barrier();
      EXPECT_TRUE(shard.to_here().tensor.equal(before));
      EXPECT_TRUE(rref->toHere().toTensor().equal(before));
      barrier();
    }
    rpc::shutdown();

    // If one rank has no RPC, all learn of it.
    rpc::init_rpc();
    const ShardedTensor tensor = sharded_by(global, chunks(0, {0, 1, 2}));
    EXPECT_EQ(expect_remote_parts(tensor, global), 2);
    barrier();
    if (rank == 1) rpc::shutdown(/*graceful=*/false);
    expect_error<c10::Error>(
        [&] {
          sharded_by(global, chunks(0, {0, 1, 2}));
        },
        {"on rank 1 RPC is not initialized"});
    rpc::shutdown(/*graceful=*/false);
  });
}

TEST(RemoteShards, BetweenProcesses) { expect_ok(spawn_ranks("remote_shards", 3)); }

/// A barrier of these ranks that works after others have died: by the store that the parent of all keeps.
void wait_for_ranks(const std::vector<int64_t>& ranks) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
  c10d::TCPStore store(std::getenv("MASTER_ADDR"), options);
  const auto key = [](int64_t rank) { return c10::str("tests/arrived/", rank); };
  store.set(key(get_rank()), std::vector<uint8_t>{1});
  std::vector<std::string> keys;
  for (const int64_t rank : ranks) keys.push_back(key(rank));
  store.wait(keys);
}

RANK_BODY(remote_killed) {
  launch(1, [] {
    rpc::Options options;
    options.timeout = 20s;
    rpc::init_rpc(options);
    const at::Tensor global = global_tensor({6, 4});
    const ShardedTensor tensor = sharded_by(global, chunks(0, {0, 1, 2}));
    EXPECT_EQ(expect_remote_parts(tensor, global), 2);
    barrier();
    if (get_rank() == 2) raise(SIGKILL);
    bool is_dead = false;
    while (!is_dead) {  // the kill may take a moment
      try {
        tensor.remote_shards().at(2).at(0).to_here(5s);
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("Cannot read shard 0 of rank 2"));
        is_dead = true;
      }
    }
    // The others still have theirs.
    const int64_t other = 1 - get_rank();
    EXPECT_TRUE(
        tensor.remote_shards().at(other).at(0).to_here().tensor.equal(global.narrow(0, 2 * other, 2)));
    wait_for_ranks({0, 1});  // who ends now could not be read any more
    expect_error<c10::Error>([] { rpc::shutdown(true, 3s); }, {"rank 2 (process ", "was killed by signal 9"});
  });
}

TEST(RemoteShards, OfAKilledProcessAreAnError) {
  const auto results = spawn_ranks("remote_killed", 3);
  EXPECT_EQ(results[2].signal, SIGKILL);
  for (const int rank : {0, 1}) EXPECT_TRUE(results[rank].ok()) << results[rank].output;
}

}  // namespace
}  // namespace tessera::sharded
