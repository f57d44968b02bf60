#include "tests/comm/collective_suite.h"

#include <tessera/comm/packed_all_to_all.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera::testing {

namespace {

using c10d::ReduceOp;
using comm::Tensors;

/// Small whole numbers, different on each rank: exact in every dtype, also when summed or multiplied.
at::Tensor values(int64_t seed, int64_t rank, at::IntArrayRef shape, at::ScalarType dtype) {
  const int64_t count = c10::multiply_integers(shape);
  const at::Tensor global = at::remainder(at::arange(count, at::kLong) * 5 + rank * 3 + seed, 3);
  if (at::isComplexType(dtype))
    return at::complex(global.to(at::kDouble), (global - 1).to(at::kDouble)).to(dtype).view(shape);
  return global.to(dtype).view(shape);
}

struct Context {
  Group group;
  int64_t n = group->getSize();
  int64_t me = group->getRank();
};

void expect_same(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::equal(actual, expected)) << what << "\nactual: " << actual << "\nexpected: " << expected;
}

/// The reduction of one tensor per rank, in rank order, as one device computes it.
at::Tensor reduced(const Tensors& inputs, ReduceOp::RedOpType op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  if (dtype == at::kBool) {
    at::Tensor result = inputs[0].clone();
    for (size_t i = 1; i < inputs.size(); ++i) {
      switch (op) {
        case ReduceOp::PRODUCT:
        case ReduceOp::MIN:
        case ReduceOp::BAND:
          result = at::logical_and(result, inputs[i]);
          break;
        case ReduceOp::BXOR:
          result = at::logical_xor(result, inputs[i]);
          break;
        default:
          result = at::logical_or(result, inputs[i]);
      }
    }
    return result;
  }
  const bool low = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor result = inputs[0].to(low ? at::kFloat : dtype, false, true);
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = inputs[i].to(result.scalar_type());
    switch (op) {
      case ReduceOp::PRODUCT:
        result = result * next;
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
      case ReduceOp::BAND:
        result = at::bitwise_and(result, next);
        break;
      case ReduceOp::BOR:
        result = at::bitwise_or(result, next);
        break;
      case ReduceOp::BXOR:
        result = at::bitwise_xor(result, next);
        break;
      default:
        result = result + next;
    }
  }
  if (op == ReduceOp::AVG) {
    const auto n = static_cast<int64_t>(inputs.size());
    result = at::isIntegralType(dtype, true) ? at::div(result, n, "trunc") : result / n;
  }
  return result.to(dtype);
}

struct Case {
  at::ScalarType dtype;
  ReduceOp::RedOpType op;
};

std::vector<Case> reductions() {
  std::vector<Case> cases;
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                           at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                          ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
      if (dtype == at::kBool && op == ReduceOp::AVG)
        continue;  // no mean of truth values on one device to compare with
      if (at::isComplexType(dtype) && op != ReduceOp::SUM && op != ReduceOp::AVG && op != ReduceOp::PRODUCT)
        continue;
      if (!at::isIntegralType(dtype, true) &&
          (op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR))
        continue;
      cases.push_back({dtype, op});
    }
  }
  return cases;
}

std::string words(const char* what, const Case& c, int64_t size) {
  return c10::str(what, " op ", static_cast<int>(c.op), " of ", size, " ", c.dtype);
}

void check_reductions(const Context& x) {
  for (const Case& c : reductions()) {
    for (const int64_t size : {0, 1, 7, 1000}) {
      Tensors all;
      for (int64_t r = 0; r < x.n; ++r) all.push_back(values(size, r, {size}, c.dtype));
      const at::Tensor expected = reduced(all, c.op);

      at::Tensor tensor = all[x.me].clone();
      comm::all_reduce(tensor, c.op, x.group).wait();
      expect_same(tensor, expected, words("all_reduce", c, size));

      const int64_t root = size % x.n;
      tensor = all[x.me].clone();
      comm::reduce(tensor, c.op, root, x.group).wait();
      expect_same(tensor, x.me == root ? expected : all[x.me], words("reduce", c, size));
    }
    for (const bool is_even : {true, false}) {
      auto size_of = [&](int64_t r) { return is_even ? int64_t{5} : (r * 2) % 5; };
      Tensors all_parts(x.n * x.n);  // [from][to]
      for (int64_t q = 0; q < x.n; ++q) {
        for (int64_t r = 0; r < x.n; ++r) all_parts[q * x.n + r] = values(r, q, {size_of(r)}, c.dtype);
      }
      const Tensors mine(all_parts.begin() + x.me * x.n, all_parts.begin() + (x.me + 1) * x.n);
      Tensors for_me;
      for (int64_t q = 0; q < x.n; ++q) for_me.push_back(all_parts[q * x.n + x.me]);
      at::Tensor output = at::empty({size_of(x.me)}, c.dtype);
      comm::reduce_scatter(output, mine, c.op, x.group).wait();
      expect_same(output, reduced(for_me, c.op), words("reduce_scatter", c, is_even));
      if (is_even) {
        output = at::empty({size_of(x.me)}, c.dtype);
        comm::reduce_scatter_from(output, at::cat(mine), c.op, x.group).wait();
        expect_same(output, reduced(for_me, c.op), words("reduce_scatter_from", c, is_even));
      }
    }
  }
}

/// An average is one of the numbers' kind, also where their sum is not.
template <class T>
void check_average(const Context& x) {
  for (const T value : {std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest()}) {
    at::Tensor tensor = at::empty({3}, c10::CppTypeToScalarType<T>::value);
    std::fill_n(tensor.mutable_data_ptr<T>(), tensor.numel(), value);
    const at::Tensor expected = tensor.clone().view(at::kByte);
    comm::all_reduce(tensor, ReduceOp::AVG, x.group).wait();
    expect_same(tensor.view(at::kByte), expected, c10::str("average of ", tensor.scalar_type()));
    comm::reduce_scatter(tensor, Tensors(x.n, tensor.clone()), ReduceOp::AVG, x.group).wait();
    expect_same(tensor.view(at::kByte), expected, c10::str("part of an average of ", tensor.scalar_type()));
  }
}

template <class... T>
void check_averages(const Context& x) {
  (check_average<T>(x), ...);
}

/// Big enough to be split into many chunks, and not a multiple of anything.
void check_large(const Context& x) {
  const int64_t size = 300007;
  Tensors all;
  for (int64_t r = 0; r < x.n; ++r) all.push_back(values(1, r, {size}, at::kFloat));
  at::Tensor tensor = all[x.me].clone();
  comm::all_reduce(tensor, ReduceOp::SUM, x.group).wait();
  expect_same(tensor, reduced(all, ReduceOp::SUM), "large all_reduce");
  tensor = at::empty({size * x.n});
  comm::all_gather_into(tensor, all[x.me], x.group).wait();
  expect_same(tensor, at::cat(all), "large all_gather_into");
  tensor = at::empty({size});
  comm::reduce_scatter_from(tensor, at::cat(Tensors(x.n, all[x.me])), ReduceOp::SUM, x.group).wait();
  expect_same(tensor, reduced(all, ReduceOp::SUM), "large reduce_scatter_from");
}

void check_moves(const Context& x) {
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                           at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble,
                           at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn}) {
    auto make = [&](int64_t seed, int64_t rank, int64_t size) { return values(seed, rank, {size}, dtype); };
    auto same = [&](const at::Tensor& a, const at::Tensor& b, const char* what) {
      ASSERT_EQ(a.numel(), b.numel());
      expect_same(a.view(at::kByte), b.view(at::kByte), c10::str(what, " of ", dtype));
    };
    auto empty = [&](int64_t size) { return at::empty({size}, dtype); };

    for (const bool is_even : {true, false}) {
      auto size_of = [&](int64_t r) { return is_even ? int64_t{6} : (r * 3) % 4; };
      Tensors outputs;
      for (int64_t r = 0; r < x.n; ++r) outputs.push_back(empty(size_of(r)));
      comm::all_gather(outputs, make(1, x.me, size_of(x.me)), x.group).wait();
      for (int64_t r = 0; r < x.n; ++r) same(outputs[r], make(1, r, size_of(r)), "all_gather");

      auto between = [&](int64_t q, int64_t r) { return is_even ? int64_t{4} : (q + 2 * r) % 3; };
      Tensors inputs;
      outputs.clear();
      for (int64_t r = 0; r < x.n; ++r) {
        inputs.push_back(make(r, x.me, between(x.me, r)));
        outputs.push_back(empty(between(r, x.me)));
      }
      comm::all_to_all(outputs, inputs, x.group).wait();
      for (int64_t q = 0; q < x.n; ++q) same(outputs[q], make(x.me, q, between(q, x.me)), "all_to_all");

      for (int64_t root = 0; root < x.n; ++root) {
        outputs.clear();
        if (x.me == root) {
          for (int64_t r = 0; r < x.n; ++r) outputs.push_back(empty(size_of(r)));
        }
        comm::gather(outputs, make(root, x.me, size_of(x.me)), root, x.group).wait();
        for (int64_t r = 0; r < static_cast<int64_t>(outputs.size()); ++r)
          same(outputs[r], make(root, r, size_of(r)), "gather");

        inputs.clear();
        if (x.me == root) {
          for (int64_t r = 0; r < x.n; ++r) inputs.push_back(make(r, root, size_of(r)));
        }
        at::Tensor output = empty(size_of(x.me));
        comm::scatter(output, inputs, root, x.group).wait();
        same(output, make(x.me, root, size_of(x.me)), "scatter");
      }
    }
    for (const int64_t size : {0, 9}) {
      at::Tensor output = empty(size * x.n);
      comm::all_gather_into(output, make(2, x.me, size), x.group).wait();
      for (int64_t r = 0; r < x.n; ++r)
        same(output.narrow(0, r * size, size), make(2, r, size), "all_gather_into");

      for (int64_t root = 0; root < x.n; ++root) {
        at::Tensor tensor = make(3, x.me, size);
        comm::broadcast(tensor, root, x.group).wait();
        same(tensor, make(3, root, size), "broadcast");
      }
    }
    if (x.n > 1) {
      const int64_t next = (x.me + 1) % x.n, previous = (x.me + x.n - 1) % x.n;
      at::Tensor received = empty(5);
      auto receiving = comm::recv(received, previous, x.group, 7);
      comm::send(make(4, x.me, 5), next, x.group, 7).wait();
      receiving.wait();
      same(received, make(4, previous, 5), "send and recv");
    }
  }
}

/// Several tensors at once, of different sizes and dtypes, where the group moves them so.
void check_lists(const Context& x) {
  Tensors inputs, outputs, parts, results;
  const std::vector<std::pair<int64_t, at::ScalarType>> kinds{
      {3, at::kFloat}, {0, at::kLong}, {70001, at::kBFloat16}, {1, at::kByte}, {8, at::kComplexFloat}};
  for (const auto& [size, dtype] : kinds) {
    inputs.push_back(values(size, x.me, {size}, dtype));
    outputs.push_back(at::empty({size * x.n}, dtype));
  }
  const std::vector<int64_t> sizes{5, 0, 40003};
  for (const int64_t size : sizes) {
    parts.push_back(values(size, x.me, {size * x.n}, at::kFloat));
    results.push_back(at::empty({size}));
  }
  if (!comm::moves_lists(x.group)) {
    expect_error<c10::ValueError>([&] { comm::all_gather_into(outputs, inputs, x.group).wait(); },
                                  {"all_gather_into", "Pack them"});
    expect_error<c10::ValueError>(
        [&] { comm::reduce_scatter_from(results, parts, ReduceOp::SUM, x.group).wait(); },
        {"reduce_scatter_from", "Pack them"});
    return;
  }
  comm::all_gather_into(outputs, inputs, x.group).wait();
  for (size_t i = 0; i < kinds.size(); ++i) {
    Tensors expected;
    for (int64_t r = 0; r < x.n; ++r)
      expected.push_back(values(kinds[i].first, r, {kinds[i].first}, kinds[i].second));
    expect_same(outputs[i], at::cat(expected), "all_gather_into of a list");
  }
  comm::reduce_scatter_from(results, parts, ReduceOp::SUM, x.group).wait();
  for (size_t i = 0; i < sizes.size(); ++i) {
    Tensors mine;
    for (int64_t r = 0; r < x.n; ++r)
      mine.push_back(values(sizes[i], r, {sizes[i] * x.n}, at::kFloat).narrow(0, x.me * sizes[i], sizes[i]));
    expect_same(results[i], reduced(mine, ReduceOp::SUM), "reduce_scatter_from of a list");
  }
  expect_error<c10::ValueError>([&] { comm::all_gather_into(Tensors(), Tensors(), x.group).wait(); },
                                {"at least one"});
}

/// The same values where neighbours in memory are not neighbours in the tensor, and where the memory has
/// other values.
at::Tensor transposed(const at::Tensor& matrix) { return matrix.t().contiguous().t(); }
at::Tensor conjugated(const at::Tensor& matrix) { return at::conj_physical(matrix).conj(); }
at::Tensor negated(const at::Tensor& matrix) { return at::_neg_view(matrix.neg()); }

void check_not_plain(const Context& x, at::ScalarType dtype, at::Tensor (*spread)(const at::Tensor&)) {
  const std::vector<int64_t> shape{3, 4};
  auto make = [&](int64_t r) { return values(5, r, shape, dtype); };
  Tensors all;
  for (int64_t r = 0; r < x.n; ++r) all.push_back(make(r));

  at::Tensor tensor = spread(make(x.me));
  comm::all_reduce(tensor, ReduceOp::SUM, x.group).wait();
  expect_same(tensor, reduced(all, ReduceOp::SUM), "all_reduce");

  tensor = spread(make(x.me));
  comm::broadcast(tensor, x.n - 1, x.group).wait();
  expect_same(tensor, all[x.n - 1], "broadcast");

  Tensors outputs;
  for (int64_t r = 0; r < x.n; ++r) outputs.push_back(spread(at::empty(shape, dtype)));
  comm::all_gather(outputs, spread(make(x.me)), x.group).wait();
  for (int64_t r = 0; r < x.n; ++r) expect_same(outputs[r], all[r], "all_gather");

  at::Tensor output = spread(at::empty(shape, dtype));
  comm::reduce_scatter(output, Tensors(x.n, spread(make(x.me))), ReduceOp::PRODUCT, x.group).wait();
  expect_same(output, reduced(all, ReduceOp::PRODUCT), "reduce_scatter");

  outputs.clear();
  for (int64_t r = 0; r < x.n; ++r) outputs.push_back(spread(at::empty(shape, dtype)));
  comm::all_to_all(outputs, Tensors(x.n, spread(make(x.me))), x.group).wait();
  for (int64_t r = 0; r < x.n; ++r) expect_same(outputs[r], all[r], "all_to_all");

  if (x.n > 1) {
    at::Tensor received = spread(at::empty(shape, dtype));
    auto receiving = comm::recv(received, (x.me + x.n - 1) % x.n, x.group);
    comm::send(spread(make(x.me)), (x.me + 1) % x.n, x.group).wait();
    receiving.wait();
    expect_same(received, all[(x.me + x.n - 1) % x.n], "send and recv");
  }
}

/// Several under way at once, waited for in the opposite order; autograd must not notice.
void check_overlapping(const Context& x) {
  Tensors tensors;
  std::vector<comm::Pending> pending;
  for (int64_t i = 0; i < 6; ++i) {
    tensors.push_back(at::full({i * 4000 + 1}, static_cast<float>(x.me + i)).requires_grad_());
    pending.push_back(comm::all_reduce(tensors.back(), ReduceOp::SUM, x.group));
  }
  for (int64_t i = 5; i >= 0; --i) {
    pending[i].wait();
    const auto expected = static_cast<float>(x.n * (x.n - 1) / 2 + i * x.n);
    expect_same(tensors[i].detach(), at::full_like(tensors[i], expected), "overlapping all_reduce");
    EXPECT_TRUE(tensors[i].is_leaf());
  }
  comm::barrier(x.group).wait();
}

/// Tensor i that rank `from` has for rank `to`; some are empty.
at::Tensor item(int64_t from, int64_t to, int64_t i, at::ScalarType dtype) {
  const int64_t rows = (from + 2 * to + i) % 3;
  return (at::arange(rows * 4, at::kLong) + 5 * from + to + 3 * i).view({rows, 4}).to(dtype);
}

/// Lists of different lengths, of views with other strides, received into views of one tensor.
void check_packed(const Context& x) {
  const auto count = [](int64_t from, int64_t to) { return (from + to) % 3; };
  for (const at::ScalarType dtype : {at::kFloat, at::kLong, at::kBool, at::kComplexFloat}) {
    for (const comm::Write write : {comm::Write::copy, comm::Write::add}) {
      if (write == comm::Write::add && dtype == at::kBool) continue;
      std::vector<comm::Tensors> inputs(x.n), outputs(x.n), expected(x.n);
      int64_t rows = 0;
      for (int64_t r = 0; r < x.n; ++r) {
        for (int64_t i = 0; i < count(x.me, r); ++i) inputs[r].push_back(transposed(item(x.me, r, i, dtype)));
        for (int64_t i = 0; i < count(r, x.me); ++i) {
          expected[r].push_back(item(r, x.me, i, dtype));
          rows += expected[r].back().size(0);
        }
      }
      const at::Tensor target = at::ones({4, rows}, dtype);  // its columns are not contiguous
      int64_t row = 0;
      for (int64_t r = 0; r < x.n; ++r) {
        for (const at::Tensor& each : expected[r]) {
          outputs[r].push_back(target.t().narrow(0, row, each.size(0)));
          row += each.size(0);
        }
      }
      comm::packed_all_to_all(outputs, inputs, at::TensorOptions(dtype), x.group, write);
      for (int64_t r = 0; r < x.n; ++r) {
        for (size_t i = 0; i < expected[r].size(); ++i) {
          expect_same(outputs[r][i], write == comm::Write::add ? expected[r][i] + 1 : expected[r][i],
                      "packed_all_to_all");
        }
      }
    }
  }
  // One contiguous tensor for each rank is sent and received without packing, and converted.
  std::vector<comm::Tensors> inputs(x.n), outputs(x.n);
  for (int64_t r = 0; r < x.n; ++r) {
    inputs[r] = {at::full({2}, static_cast<double>(x.me), at::kDouble)};
    outputs[r] = {at::zeros({2})};
  }
  comm::packed_all_to_all(outputs, inputs, at::kFloat, x.group);
  for (int64_t r = 0; r < x.n; ++r)
    expect_same(outputs[r][0], at::full({2}, static_cast<float>(r)), "packed_all_to_all, converted");
  // Without a group, a rank is alone.
  comm::packed_all_to_all({{outputs[0][0]}}, {{at::full({2}, 9.f)}}, at::kFloat, {}, comm::Write::add);
  expect_same(outputs[0][0], at::full({2}, 9.f), "packed_all_to_all without a group");
}

}  // namespace

void run_collective_suite(const Group& group) {
  const Context context{group};
  check_reductions(context);
  check_averages<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(context);
  check_large(context);
  check_moves(context);
  check_not_plain(context, at::kFloat, transposed);
  check_not_plain(context, at::kFloat, negated);
  check_not_plain(context, at::kComplexFloat, conjugated);
  check_overlapping(context);
  check_packed(context);
  check_lists(context);
}

void run_collective_suite_on_all_groups() {
  const auto world = current_world();
  run_collective_suite(world->group());
  if (world->size() == 1) return;
  std::vector<int64_t> reversed, half;
  for (int64_t r = world->size() - 1; r >= 0; --r) reversed.push_back(r);
  for (int64_t r = world->rank() % 2; r < world->size(); r += 2) half.push_back(r);
  run_collective_suite(world->group(reversed, at::kCPU));
  run_collective_suite(world->group(half, at::kCPU));
  comm::barrier(world->group()).wait();
}

}  // namespace tessera::testing
