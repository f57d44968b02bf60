// Redistribution on real ranks, from every layout to every other, against the full tensor.

#include <tessera/comm/run.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include <ATen/ATen.h>

#include "tests/redistribute/cases.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/test_device.h"

namespace tessera {
namespace {

using testing::all_placements;
using testing::expect_error;
using testing::expect_ok;
using testing::spawn_ranks;
using testing::test_device;

/// The part of the full tensor that a spec gives the calling rank.
at::Tensor part_of(at::Tensor full, const Spec& spec) {
  const std::vector<Pieces> pieces = spec.local_pieces();
  for (int64_t d = 0; d < full.dim(); ++d) {
    std::vector<int64_t> index;
    for (const Range& piece : pieces[d]) {
      for (int64_t i = piece.offset; i < piece.end(); ++i) index.push_back(i);
    }
    full = full.index_select(d, at::tensor(index, at::kLong));
  }
  return full;
}

std::vector<MeshDim> partial_dims(const Spec& spec) {
  std::vector<MeshDim> dims;
  for (int64_t i = 0; i < spec.mesh().ndim(); ++i) {
    if (spec.placement(i).is_partial()) dims.emplace_back(i);
  }
  return dims;
}

/// 1, 2, 3, ... in the given shape.
at::Tensor count(c10::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::arange(1, c10::multiply_integers(shape) + 1).reshape(shape).to(dtype);
}

/// Values of the full shape, one for each rank along the partial mesh dims, that reduce to `full`: integers
/// for sum and max.
at::Tensor partial_value(const at::Tensor& full, const Spec& spec) {
  int64_t ranks = 1, rank = 0, averaged = 1;
  Placement placement;
  for (int64_t i = 0; i < spec.mesh().ndim(); ++i) {
    if (!spec.placement(i).is_partial()) continue;
    placement = spec.placement(i);
    ranks *= spec.mesh().shape()[i];
    rank = rank * spec.mesh().shape()[i] + spec.mesh().get_local_rank(i);
    if (placement.op() == ReduceOp::avg) averaged *= spec.mesh().shape()[i];
  }
  if (!placement.is_partial()) return full;
  const at::Tensor position = at::arange(full.numel()).reshape(full.sizes());
  const auto share = [&](int64_t r) {
    return position.mul(3).add(7 * r).remainder(5).to(full.scalar_type());
  };
  const at::Tensor turn = position.add(rank).remainder(ranks);  // 0 on one of the ranks
  switch (placement.op()) {
    case ReduceOp::sum:
    case ReduceOp::avg: {
      if (rank != 0) return share(rank);
      at::Tensor rest = full * averaged;
      for (int64_t r = 1; r < ranks; ++r) rest -= share(r);
      return rest;
    }
    case ReduceOp::max:
      return full - turn.to(full.scalar_type());
    case ReduceOp::min:
      return full + turn.to(full.scalar_type());
    case ReduceOp::product:
      return at::where(turn == 0, full / std::pow(2., ranks - 1), at::full_like(full, 2));
    case ReduceOp::any:
      return full.ne(0).logical_and(turn == 0).to(full.scalar_type());
    case ReduceOp::all:
      return full.ne(0).logical_or(turn != 0).to(full.scalar_type());
    case ReduceOp::norm:  // equal shares of the p-th power
      return full / std::pow(static_cast<double>(ranks), 1 / placement.norm());
  }
  return {};
}

/// What the ranks hold of a partial result, reduced by hand.
at::Tensor reduced(const at::Tensor& local, const Spec& spec) {
  const std::vector<MeshDim> dims = partial_dims(spec);
  if (dims.empty()) return local;
  const Group group = spec.mesh().get_group(dims);
  comm::Tensors all;
  for (int i = 0; i < group->getSize(); ++i) all.push_back(at::empty_like(local));
  comm::all_gather(all, local, group).wait();
  const at::Tensor values = at::stack(all);
  int64_t averaged = 1;
  Placement placement;
  for (int64_t i = 0; i < spec.mesh().ndim(); ++i) {
    if (!spec.placement(i).is_partial()) continue;
    placement = spec.placement(i);
    if (placement.op() == ReduceOp::avg) averaged *= spec.mesh().shape()[i];
  }
  switch (placement.op()) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return averaged == 1 ? values.sum(0).to(local.scalar_type()) : values.sum(0).div(averaged);
    case ReduceOp::max:
      return values.numel() ? values.amax(0) : values.select(0, 0);
    case ReduceOp::min:
      return values.amin(0);
    case ReduceOp::product:
      return values.prod(0);
    case ReduceOp::any:
      return values.any(0);
    case ReduceOp::all:
      return values.all(0);
    case ReduceOp::norm: {
      auto power = [](const at::Tensor& x, double p) { return x.sgn() * x.abs().pow(p); };
      return power(power(values, placement.norm()).sum(0), 1 / placement.norm());
    }
  }
  return {};
}

/// Redistributes and compares with the full tensor.
void expect_right(const Spec& from, const Spec& to, const at::Tensor& full, bool async = false,
                  double tolerance = 0) {
  const at::Tensor local = laid_out(part_of(partial_value(full, from), from).to(test_device()), from);
  const at::Tensor before = local.clone();
  const Plan steps = plan(from, to);
  at::Tensor result = async ? execute_async(steps, local).wait() : execute(steps, local);
  const at::Tensor expected = part_of(full, to);
  ASSERT_TRUE(result.sizes() == to.local_shape() && result.strides() == to.local_strides() &&
              result.scalar_type() == to.dtype())
      << "rank " << get_rank() << " got " << result.sizes() << " with strides " << result.strides() << " for "
      << to.local_shape() << " with strides " << to.local_strides() << "\n"
      << steps;
  ASSERT_TRUE(at::equal(local, before)) << "the input was changed by\n" << steps;
  result = reduced(result, to).cpu();
  ASSERT_TRUE(tolerance == 0 ? at::equal(result, expected) : at::allclose(result, expected, tolerance, 0))
      << "rank " << get_rank() << " got\n"
      << result << "\nfor\n"
      << expected << "\n"
      << steps;
}

/// All pairs of layouts, or that share of them, drawn at random: contiguous ones and column-major ones.
void expect_all_right(c10::IntArrayRef mesh_shape, double share = 1) {
  std::atomic<int64_t> checked = 0;
  run(c10::multiply_integers(mesh_shape), [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), mesh_shape);
    const auto lists = all_placements(mesh_shape.size());
    std::mt19937 random(0);  // draws the same on every rank
    const auto drawn = [&](double chance) { return std::uniform_real_distribution<>()(random) < chance; };
    for (const c10::DimVector& shape : {c10::DimVector{4, 6}, c10::DimVector{5, 7}, c10::DimVector{1, 3},
                                        c10::DimVector{0, 2}, c10::DimVector{8, 12}}) {
      const at::Tensor full = count(shape);
      for (const Placements& from : lists) {
        for (const Placements& to : lists) {
          if (!drawn(share)) continue;
          const auto spec = [&, strides = drawn(0.5) ? c10::DimVector{1, std::max<int64_t>(shape[0], 1)}
                                                     : c10::DimVector{std::max<int64_t>(shape[1], 1), 1}](
                                const Placements& placements) {
            return Spec(mesh, placements, shape, c10::IntArrayRef(strides));
          };
          expect_right(spec(from), spec(to), full, drawn(1. / 3));
          if (::testing::Test::HasFatalFailure()) throw std::runtime_error("see above");
          if (mesh.get_rank() == 0) ++checked;
        }
      }
    }
  });
  ::testing::Test::RecordProperty("pairs", static_cast<int>(checked));
  std::cout << checked << " pairs on mesh " << mesh_shape << "\n";
  EXPECT_GT(checked, 0);
}

TEST(Execute, EveryPairOn1) { expect_all_right({1}); }
TEST(Execute, EveryPairOn2) { expect_all_right({2}); }
TEST(Execute, EveryPairOn3) { expect_all_right({3}); }
TEST(Execute, EveryPairOn4) { expect_all_right({4}); }
TEST(Execute, EveryPairOn2By2) { expect_all_right({2, 2}); }
TEST(Execute, EveryPairOn2By3) { expect_all_right({2, 3}); }
TEST(Execute, EveryPairOn1By3) { expect_all_right({1, 3}); }
TEST(Execute, SomePairsOn2By2By2) { expect_all_right({2, 2, 2}, 1. / 71); }

struct Laid {
  Placements placements;
  ShardOrder order;
};

TEST(Execute, EveryShardOrder) {
  run(6, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 3}, {"dp", "tp"});
    const std::vector<Laid> layouts = {{{Shard(0), Shard(0)}, {}},
                                       {{Shard(0), Shard(0)}, {1, 0}},
                                       {{Shard(1), Shard(1)}, {1, 0}},
                                       {{StridedShard(0, 3), Shard(0)}, {}},
                                       {{StridedShard(0, 3), Shard(0)}, {1, 0}},
                                       {{Shard(0), StridedShard(0, 2)}, {1, 0}},
                                       {{Shard(1), StridedShard(1, 4)}, {1, 0}},
                                       {{Replicate(), Shard(0)}, {}},
                                       {{Shard(0), Replicate()}, {}},
                                       {{Partial(), Shard(0)}, {}},
                                       {{Shard(0), Partial()}, {}},
                                       {{Partial(ReduceOp::max), Partial(ReduceOp::max)}, {}},
                                       {{Replicate(), Replicate()}, {}}};
    for (const c10::DimVector& shape :
         {c10::DimVector{12, 12}, c10::DimVector{13, 5}, c10::DimVector{3, 1}, c10::DimVector{2, 2}}) {
      for (const Laid& from : layouts) {
        for (const Laid& to : layouts) {
          expect_right(Spec(mesh, from.placements, shape, std::nullopt, at::kFloat, from.order),
                       Spec(mesh, to.placements, shape, std::nullopt, at::kFloat, to.order), count(shape));
        }
      }
    }
  });
}

TEST(Execute, EveryReduceOp) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    const c10::DimVector shape = {5, 3};
    for (const Placement& partial :
         {Partial(), Partial(ReduceOp::avg), Partial(ReduceOp::product), Partial(ReduceOp::min),
          Partial(ReduceOp::max), Partial(ReduceOp::any), Partial(ReduceOp::all), NormPartial(1),
          NormPartial(2), NormPartial(3.5), NormPartial(-2)}) {
      const bool boolean = partial.op() == ReduceOp::any || partial.op() == ReduceOp::all;
      const bool inexact = partial.op() == ReduceOp::norm;
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBool, at::kInt, at::kComplexFloat}) {
        if (dtype == at::kBool && !boolean) continue;
        const bool divides = partial.op() == ReduceOp::product || partial.op() == ReduceOp::avg || inexact;
        if (dtype == at::kInt && divides) continue;
        const bool ordered = partial.op() == ReduceOp::min || partial.op() == ReduceOp::max;
        if (dtype == at::kComplexFloat && (ordered || boolean || inexact)) continue;
        const at::Tensor full = boolean ? count(shape).remainder(3).ne(0).to(dtype) : count(shape, dtype);
        const auto lists = all_placements(2, {Replicate(), Shard(0), Shard(1), partial});
        for (const Placements& from : lists) {
          for (const Placements& to : lists) {
            const auto spec = [&](const Placements& p) { return Spec(mesh, p, shape, std::nullopt, dtype); };
            if (boolean && dtype != at::kBool) {
              // `reduced` answers in bool.
              if (spec(to).has_partial()) continue;
            }
            expect_right(spec(from), spec(to), full, false, inexact ? 1e-5 : 0);
            if (::testing::Test::HasFatalFailure()) throw std::runtime_error("see above");
          }
        }
      }
    }
  });
}

TEST(Execute, SumsAndAveragesMix) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    const Placement sum = Partial(), avg = Partial(ReduceOp::avg);
    const std::vector<Placements> lists = {
        {sum, avg},          {avg, sum},         {avg, avg},
        {sum, sum},          {avg, Replicate()}, {Replicate(), sum},
        {Shard(0), avg},     {sum, Shard(1)},    {Replicate(), Replicate()},
        {Shard(0), Shard(1)}};
    for (const at::ScalarType dtype : {at::kFloat, at::kLong}) {
      for (const Placements& from : lists) {
        for (const Placements& to : lists) {
          const auto spec = [&](const Placements& p) { return Spec(mesh, p, {5, 4}, std::nullopt, dtype); };
          const at::Tensor full = count({5, 4}, dtype);
          if (dtype == at::kLong && spec(to).has_partial()) continue;  // `reduced` answers in float
          expect_right(spec(from), spec(to), full);
        }
      }
    }
  });
}

TEST(Execute, TensorsWithAnyStridesAndDims) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Placement scalar_choices[] = {Replicate(), Partial(), Partial(ReduceOp::max)};
    for (const Placement& from : scalar_choices) {
      for (const Placement& to : scalar_choices) {
        expect_right(Spec(mesh, {from}, {}), Spec(mesh, {to}, {}), count({}));
      }
    }
    const at::Tensor full = count({3, 4, 5});
    for (const int64_t a : {0, 1, 2}) {
      for (const int64_t b : {0, 1, 2}) {
        const Spec from(mesh, {Shard(a)}, {3, 4, 5}), to(mesh, {Shard(b)}, {3, 4, 5});
        const at::Tensor local = part_of(full, from).permute({2, 0, 1}).contiguous().permute({1, 2, 0});
        EXPECT_TRUE(at::equal(execute(plan(from, to), local), part_of(full, to)));
        const Spec global = to.with_placements({Replicate()});
        const at::Tensor gathered = execute(plan(from, global), local);
        EXPECT_TRUE(at::equal(gathered, full) && gathered.is_contiguous());
        EXPECT_TRUE(at::equal(execute(plan(global, to), full.transpose(0, 2).contiguous().transpose(0, 2)),
                              part_of(full, to)));
      }
    }
    const Spec from(mesh, {Shard(0)}, {4, 2}, std::nullopt, at::kComplexFloat);
    const at::Tensor z = at::complex(count({4, 2}), count({4, 2}).neg());
    EXPECT_TRUE(at::equal(execute(plan(from, from.with_placements({Replicate()})), part_of(z, from).conj()),
                          z.conj().resolve_conj()));
  });
}

TEST(Execute, LaysTheResultOutAsTheTargetSays) {
  run(4, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2, 2});
    std::mt19937 random(0);
    const auto lists = all_placements(2, {Replicate(), Shard(0), Shard(1), Shard(2), Partial()});
    for (const c10::DimVector& shape : {c10::DimVector{4, 6, 2}, c10::DimVector{3, 1, 5}}) {
      const at::Tensor full = count(shape);
      c10::DimVector order{0, 1, 2};
      do {
        c10::DimVector wide(3);
        int64_t stride = 1;
        for (const int64_t dim : order) {
          wide[dim] = stride;
          stride *= shape[dim];
        }
        for (const Placements& from : lists) {
          // Strides with gaps lie densely after redistribution.
          const Spec dense(mesh, from, shape, c10::IntArrayRef(wide));
          for (int64_t& each : wide) each *= 2;
          const Spec gaps(mesh, from, shape, c10::IntArrayRef(wide));
          for (int64_t& each : wide) each /= 2;
          EXPECT_TRUE(dense.is_dense() && !gaps.is_dense());
          const Placements& to = lists[random() % lists.size()];
          expect_right(dense, dense.with_placements(to), full);
          if (to != from) {
            EXPECT_EQ(gaps.with_placements(to).local_strides(), dense.with_placements(to).local_strides());
          }
        }
      } while (std::next_permutation(order.begin(), order.end()));
    }
  });
}

TEST(Memory, IsCopiedOnlyIfItLiesOtherwise) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Spec rows(mesh, {Shard(0)}, {4, 3}), columns(mesh, {Shard(0)}, {4, 3}, c10::IntArrayRef{1, 4});
    const at::Tensor contiguous = count({2, 3}), transposed = count({3, 2}).t();
    EXPECT_TRUE(laid_out(contiguous, rows).is_same(contiguous));
    EXPECT_TRUE(laid_out(transposed, columns).is_same(transposed));
    for (const auto& [local, spec] : {std::pair(contiguous, columns), {transposed, rows}}) {
      EXPECT_FALSE(lies_as(local, spec));
      const at::Tensor copy = laid_out(local, spec);
      EXPECT_EQ(copy.strides(), spec.local_strides());
      EXPECT_TRUE(at::equal(copy, local) && !copy.is_alias_of(local));
    }
    // A dim of one element has any stride; that of the spec is taken, without a copy.
    const Spec thin(mesh, {Shard(0)}, {2, 3});
    const at::Tensor row = count({1, 3}).as_strided({1, 3}, {7, 1});
    EXPECT_TRUE(lies_as(row, thin) && laid_out(row, thin).is_alias_of(row));
    EXPECT_EQ(laid_out(row, thin).strides(), thin.local_strides());
    // A slice: local dims in the same order, of stride 1 where the spec says so.
    const Spec slice(mesh, {Shard(0)}, {4, 2}, c10::IntArrayRef{3, 1});
    EXPECT_TRUE(lies_as(contiguous.narrow(1, 1, 2), slice));
    EXPECT_FALSE(lies_as(count({3, 4}).t().narrow(0, 0, 2).narrow(1, 0, 2), slice));
    EXPECT_FALSE(lies_as(count({2, 4}).slice(1, 0, 4, 2), slice));
  });
}

TEST(Memory, ThatLiesOtherwiseIsFound) {
  setenv("TESSERA_CHECK_LAYOUT", "1", /*overwrite=*/1);  // before the first check of this program
  run(2, [] {
    const Spec rows(init_device_mesh(test_device(), {2}), {Shard(0)}, {4, 3});
    check_layout(count({2, 3}), rows);
    expect_error<c10::Error>(
        [&] {
          check_layout(count({3, 2}).t(), rows);
        },
        {"shape [2, 3] and strides [1, 2]", "says strides [3, 1]", "report it"});
  });
}

TEST(Execute, SharesMemoryOnlyWithoutCommunication) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const auto spec = [&](Placement p) { return Spec(mesh, {p}, {4, 4}); };
    const auto aliases = [&](Placement from, Placement to) {
      const at::Tensor local = at::ones(spec(from).local_shape());
      return execute(plan(spec(from), spec(to)), local).is_alias_of(local);
    };
    EXPECT_TRUE(aliases(Shard(0), Shard(0)));
    EXPECT_TRUE(aliases(Replicate(), Shard(0)));
    EXPECT_FALSE(aliases(Replicate(), Shard(1)));
    EXPECT_EQ(aliases(Replicate(), Partial()), get_rank() == 0);
    EXPECT_TRUE(aliases(Replicate(), Partial(ReduceOp::max)));
    EXPECT_FALSE(aliases(Shard(0), Partial()));
    EXPECT_FALSE(aliases(Partial(), Partial(ReduceOp::avg)));
    EXPECT_FALSE(aliases(Shard(0), Replicate()));
    EXPECT_FALSE(aliases(Partial(), Replicate()));
    EXPECT_FALSE(aliases(Partial(), Shard(0)));
    EXPECT_FALSE(aliases(Shard(0), Shard(1)));
  });
}

TEST(Execute, AsyncReturnsBeforeThePeersAreThere) {
  std::atomic<bool> posted = false;
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Spec rows(mesh, {Shard(0)}, {4, 4}), columns(mesh, {Shard(1)}, {4, 4});
    const at::Tensor full = count({4, 4});
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (get_rank() == 1 && !posted && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_EQ(posted, get_rank() == 1);
    PendingTensor first = execute_async(plan(rows, columns), part_of(full, rows));
    PendingTensor second = execute_async(plan(columns, rows), part_of(full, columns));
    posted = true;
    const at::Tensor result = first.wait();
    EXPECT_TRUE(at::equal(result, part_of(full, columns)));
    EXPECT_TRUE(first.wait().is_same(result));
    EXPECT_TRUE(at::equal(second.wait(), part_of(full, rows)));
  });
}

TEST(Execute, LeavesAutogradOut) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Spec from(mesh, {Replicate()}, {4});
    const at::Tensor local = count({4}).requires_grad_();
    EXPECT_FALSE(execute(plan(from, from.with_placements({Shard(0)})), local).requires_grad());
    EXPECT_FALSE(execute(plan(from.with_placements({Partial()}), from), local).requires_grad());
    const c10::InferenceMode inference;
    EXPECT_TRUE(
        at::equal(execute(plan(from.with_placements({Partial()}), from), count({4})), count({4}) * 2));
  });
}

TEST(Execute, RanksOutsideTheMeshDoNothing) {
  run(3, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Spec from(mesh, {Shard(0)}, {4}), to(mesh, {Replicate()}, {4});
    if (get_rank() == 2) {
      const at::Tensor mine = at::ones({7});
      EXPECT_TRUE(execute(plan(from, to), mine).is_same(mine));
      EXPECT_TRUE(execute_async(plan(from, to), mine).wait().is_same(mine));
    } else {
      expect_right(from, to, count({4}));
    }
  });
}

TEST(Execute, NamesWhatIsWrongWithTheLocalTensor) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    const Spec from(mesh, {Shard(0)}, {5, 2}), to(mesh, {Replicate()}, {5, 2});
    const std::string rank = "rank " + std::to_string(get_rank());
    const std::string shape = get_rank() == 0 ? "[3, 2]" : "[2, 2]";
    expect_error<c10::ValueError>(
        [&] {
          execute(plan(from, to), at::ones({4, 2}));
        },
        {rank, "[4, 2]", shape, "[S(0)]"});
    expect_error<c10::ValueError>(
        [&] {
          execute_async(plan(from, to), at::ones({4, 2})).wait();
        },
        {rank, "[4, 2]", shape});
    expect_error<c10::ValueError>([&] { execute(plan(from, to), {}); }, {rank, "no local tensor", shape});
    const at::Tensor doubles = at::ones(from.local_shape(), at::kDouble);
    expect_error<c10::ValueError>([&] { execute(plan(from, to), doubles); }, {rank, "f64", "f32"});
    const Spec norms(mesh, {NormPartial(2)}, {2}, std::nullopt, at::kInt);
    expect_error<c10::ValueError>(
        [&] { execute(plan(norms, norms.with_placements({Replicate()})), at::ones({2}, at::kInt)); },
        {"P(norm 2)", "i32"});
  });
}

RANK_BODY(sample) {
  launch(1, [] {
    EXPECT_EQ(current_world()->backend(at::kCPU), std::getenv("TESSERA_BACKEND"));
    const DeviceMesh mesh = init_device_mesh(test_device(), {2});
    for (const c10::DimVector& shape :
         {c10::DimVector{4, 6}, c10::DimVector{5, 7}, c10::DimVector{1, 3}, c10::DimVector{0, 2}}) {
      for (const Placements& from : all_placements(1)) {
        for (const Placements& to : all_placements(1)) {
          expect_right(Spec(mesh, from, shape), Spec(mesh, to, shape), count(shape));
          expect_right(Spec(mesh, from, shape), Spec(mesh, to, shape), count(shape), true);
        }
      }
    }
    for (const at::ScalarType dtype : {at::kComplexFloat, at::kBFloat16, at::kLong}) {
      const auto spec = [&](Placement p) { return Spec(mesh, {p}, {5, 3}, std::nullopt, dtype); };
      const at::Tensor full = count({5, 3}, dtype);
      expect_right(spec(Shard(0)), spec(Shard(1)), full);
      expect_right(spec(Shard(1)), spec(Replicate()), full);
      expect_right(spec(Partial()), spec(Replicate()), full);
      expect_right(spec(Partial()), spec(Shard(0)), full);
    }
  });
}

TEST(Execute, OnProcesses) { testing::expect_ok_over_processes("sample", 2); }

}  // namespace
}  // namespace tessera
