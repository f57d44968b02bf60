#include "tests/support/compare.h"

#include <tessera/comm/run.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <sstream>

namespace tessera::testing {

namespace {

std::string words(const std::vector<Placements>& placements) {
  std::ostringstream out;
  for (const Placements& list : placements) out << list << ' ';
  return out.str();
}

}  // namespace

at::Tensor numbers(at::IntArrayRef shape, int64_t seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (at::remainder(at::arange(count, at::kLong) * 7 + seed, 11) - 5).to(at::kFloat).view(shape);
}

std::vector<Placements> all_placements(int64_t mesh_ndim, int64_t ndim, bool partial) {
  std::vector<Placement> choices{Replicate()};
  for (int64_t dim = 0; dim < ndim; ++dim) choices.push_back(Shard(dim));
  if (partial) choices.push_back(Partial());
  std::vector<Placements> lists{{}};
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& choice : choices) {
        longer.push_back(list);
        longer.back().push_back(choice);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  // memcmp may not be given the null pointers of empty tensors.
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

void expect_close(const at::Tensor& given, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(given.sizes(), expected.sizes()) << what;
  const at::Tensor actual = given.to(expected.device());
  if (at::allclose(actual, expected, 1e-4, 1e-4, /*equal_nan=*/true)) return;
  const bool is_small = expected.numel() <= 64;
  ADD_FAILURE() << what << "\nlargest difference: " << (actual - expected).abs().max().item<double>()
                << "\nactual:\n"
                << (is_small ? actual : actual.flatten().slice(0, 0, 32)) << "\nexpected:\n"
                << (is_small ? expected : expected.flatten().slice(0, 0, 32));
}

void compare(const Function& function, const Tensors& inputs, const DeviceMesh& mesh,
             const std::vector<Placements>& placements, const std::vector<ShardOrder>& orders) {
  std::string what = words(placements);
  for (const ShardOrder& order : orders) what += c10::str("order ", c10::IntArrayRef(order), " ");
  what += mesh.str();
  Tensors plain, distributed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool differentiable = inputs[i].is_floating_point();
    plain.push_back(inputs[i].clone().requires_grad_(differentiable));
    DTensor input = distribute_tensor(inputs[i].clone(), mesh, placements[i], std::nullopt);
    if (!orders.empty())
      input = input.redistribute(placements[i], {.order = {orders[i].begin(), orders[i].end()}});
    distributed.push_back(input.requires_grad_(differentiable));
    ASSERT_TRUE(distributed.back().is_leaf());
  }
  const at::Tensor expected = function(plain);
  const at::Tensor actual = function(distributed);
  ASSERT_TRUE(DTensor::is_dtensor(actual)) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  expect_close(DTensor(actual).full_tensor(), expected.detach(), what);
  // Formulas of autograd choose by strides: ranks that saw different ones would call different collectives.
  const at::Tensor strides = at::tensor(actual.strides());
  const DTensor of_first = distribute_tensor(strides, mesh, replicated(mesh));
  EXPECT_TRUE(at::equal(of_first.to_local(), strides)) << what;

  ASSERT_EQ(actual.requires_grad(), expected.requires_grad()) << what;
  if (!expected.requires_grad()) return;
  const at::Tensor weights = numbers(expected.sizes(), 3);
  (expected * weights).sum().backward();
  (actual * distribute_tensor(weights, mesh, replicated(mesh), std::nullopt)).sum().backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(plain[i].grad().defined(), distributed[i].grad().defined()) << what;
    if (!plain[i].grad().defined()) continue;
    ASSERT_TRUE(DTensor::is_dtensor(distributed[i].grad())) << what;
    expect_close(DTensor(distributed[i].grad()).full_tensor(), plain[i].grad(),
                 "gradient " + std::to_string(i) + " of " + what);
  }
}

namespace {

/// Gives the items of a list in random order, all of them before any comes again.
template <class T>
class Shuffled {
 public:
  explicit Shuffled(std::vector<T> items) : items_(std::move(items)), next_(items_.size()) {}
  const T& next(std::mt19937& random) {
    if (next_ == items_.size()) {
      std::shuffle(items_.begin(), items_.end(), random);
      next_ = 0;
    }
    return items_[next_++];
  }

 private:
  std::vector<T> items_;
  size_t next_;
};

/// A sum of truth values is no truth value.
bool can_be_sum(const at::Tensor& input) { return input.scalar_type() != at::kBool; }

/// The kinds of partial values that a tensor with the values of `input` can have.
std::vector<Placement> partial_kinds(const at::Tensor& input) {
  if (input.scalar_type() == at::kBool) return {Partial(ReduceOp::any), Partial(ReduceOp::all)};
  std::vector<Placement> kinds{Partial(), Partial(ReduceOp::max), Partial(ReduceOp::min)};
  // Partial values of products, averages and norms of integers need not be integers.
  if (input.is_floating_point())
    kinds.insert(kinds.end(), {Partial(ReduceOp::avg), Partial(ReduceOp::product), NormPartial(2)});
  return kinds;
}

/// A random placement for each mesh dim, of all kinds. All partial values of a tensor are of one kind, or of
/// sum and avg.
Placements random_placements(const at::Tensor& input, int64_t mesh_ndim, bool partial, std::mt19937& random) {
  std::vector<Placement> choices{Replicate()};
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    choices.push_back(Shard(dim));
    choices.push_back(StridedShard(dim, 2));
  }
  if (partial) {
    const std::vector<Placement> kinds = partial_kinds(input);
    const Placement kind = kinds[random() % kinds.size()];
    choices.push_back(kind);
    if (kind.is_partial(ReduceOp::avg)) choices.push_back(Partial());
  }
  Placements placements;
  while (static_cast<int64_t>(placements.size()) < mesh_ndim)
    placements.push_back(choices[random() % choices.size()]);
  return placements;
}

}  // namespace

void compare_all(const Function& function, const Tensors& inputs, at::IntArrayRef mesh_shape, bool partial,
                 size_t limit) {
  constexpr size_t kMixed = 8;
  const std::vector<int64_t> shape = mesh_shape.vec();
  run(c10::multiply_integers(mesh_shape), [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), shape);
    std::mt19937 random(0);  // draws the same on every rank
    std::vector<std::vector<Placements>> choices;
    size_t count = 1;
    for (const at::Tensor& input : inputs) {
      choices.push_back(all_placements(mesh.ndim(), input.dim(), partial && can_be_sum(input)));
      count *= choices.back().size();
    }
    std::vector<Placements> chosen(inputs.size());
    if (count <= limit) {
      for (size_t turn = 0; turn < count; ++turn) {
        size_t rest = turn;
        for (size_t i = 0; i < inputs.size(); rest /= choices[i++].size())
          chosen[i] = choices[i][rest % choices[i].size()];
        compare(function, inputs, mesh, chosen);
      }
    } else {
      std::vector<Shuffled<Placements>> shuffled(choices.begin(), choices.end());
      for (size_t turn = 0; turn < limit; ++turn) {
        for (size_t i = 0; i < inputs.size(); ++i) chosen[i] = shuffled[i].next(random);
        compare(function, inputs, mesh, chosen);
      }
    }
    ShardOrder order;
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) order.push_back(dim);
    for (size_t turn = 0; turn < kMixed; ++turn) {
      std::vector<ShardOrder> orders;
      for (size_t i = 0; i < inputs.size(); ++i) {
        chosen[i] = random_placements(inputs[i], mesh.ndim(), partial, random);
        std::shuffle(order.begin(), order.end(), random);
        orders.push_back(order);
      }
      compare(function, inputs, mesh, chosen, orders);
    }
  });
}

void expect_no_communication(const Function& function, const Tensors& inputs,
                             const std::vector<Placement>& placements, const Placement& result,
                             bool gradients) {
  run(4, [&] {
    const DeviceMesh mesh = init_device_mesh(test_device(), {4});
    Tensors distributed;
    for (size_t i = 0; i < inputs.size(); ++i) {
      distributed.push_back(distribute_tensor(inputs[i], mesh, {placements[i]}, std::nullopt));
      if (gradients && inputs[i].is_floating_point()) distributed.back().requires_grad_();
    }
    const ImplicitCommunicationGuard none(ImplicitCommunication::forbidden);
    const DTensor actual(function(distributed));
    EXPECT_EQ(actual.placements(), Placements{result});
    if (!gradients) return;
    const Placement of_gradient = result.is_partial() ? Replicate() : result;
    actual.backward(distribute_tensor(numbers(actual.sizes()), mesh, {of_gradient}, std::nullopt));
  });
}

}  // namespace tessera::testing
