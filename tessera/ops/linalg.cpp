#include <tessera/ops/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// Which results a call does not ask for: they have shape [0].
using Unwanted = std::function<std::vector<size_t>(const OpCall&)>;

/// Whether a tensor has something for each matrix of a batch, without being broadcast: another matrix, or
/// what comes with one.
bool has_batch(const OpCall& call, size_t i, const Shape& batch) {
  const Spec &first = call.tensors[0], &spec = call.tensors[i];
  const auto outer = static_cast<int64_t>(batch.size());
  if (spec.ndim() < outer || !std::equal(batch.begin(), batch.end(), spec.shape().begin())) return false;
  if (spec.ndim() == outer + 2) return true;
  const std::string& name = call.schema->arguments()[call.positions[i]].name();
  const std::string& op = call.schema->name();
  const bool comes_along =
      name == "tau" || name == "pivots" || name == "LU_pivots" || (op == "aten::ormqr" && name == "input2");
  // Vectors as right sides are just as long as matrices are high; else they are matrices for all.
  const bool is_side =
      op == "aten::_linalg_solve_ex" && spec.shape() == first.shape().slice(0, first.ndim() - 1);
  return spec.ndim() == outer + 1 && (comes_along || is_side);
}

/// Each matrix by itself: dims before the last two are cut alike, in all inputs and results.
Rule batched(const Unwanted& unwanted = {}, std::vector<std::string> reads = {}) {
  return {"cut along the dims before the last two",
          [unwanted](const OpCall& call) -> std::optional<Strategies> {
            const Spec& first = call.tensors[0];
            const int64_t outer = first.ndim() - 2;
            if (outer < 0) return std::nullopt;
            const Shape batch(first.shape().begin(), first.shape().begin() + outer);
            Einsum einsum;
            for (const size_t i : c10::irange(call.tensors.size())) {
              const Spec& spec = call.tensors[i];
              if (!has_batch(call, i, batch)) return std::nullopt;
              Letters letters = identity(spec.ndim());
              std::fill(letters.begin() + outer, letters.end(), kUnsharded);
              einsum.inputs.push_back(std::move(letters));
            }
            const size_t results = call.schema->returns().size();
            einsum.outputs.assign(results, identity(outer));
            std::vector<Result> shapes(results, Result{batch});
            for (const size_t empty : unwanted ? unwanted(call) : std::vector<size_t>{}) {
              einsum.outputs[empty] = Letters{kUnsharded};
              einsum.contracted = Replicate();
              shapes[empty] = {{0}};
            }
            return Strategies{strategies_of(einsum), std::move(shapes)};
          },
          std::move(reads)};
}

std::vector<size_t> no_vectors(const OpCall& call) {
  return call.flag("compute_v") ? std::vector<size_t>{} : std::vector<size_t>{1};
}

std::vector<size_t> no_q(const OpCall& call) {
  return call.value("mode").toStringRef() == "r" ? std::vector<size_t>{0} : std::vector<size_t>{};
}

std::vector<size_t> only_values(const OpCall& call) {
  return call.flag("compute_uv") ? std::vector<size_t>{} : std::vector<size_t>{0, 2};
}

std::vector<size_t> no_permutation(const OpCall& call) {
  return call.flag("pivot") ? std::vector<size_t>{} : std::vector<size_t>{0};
}

std::vector<size_t> not_unpacked(const OpCall& call) {
  std::vector<size_t> result;
  if (!call.flag("unpack_pivots")) result = {0};
  if (!call.flag("unpack_data")) result.insert(result.end(), {1, 2});
  return result;
}

/// Tolerances are of a batch too, or of some of its dims.
std::optional<Strategies> pseudoinverse(const OpCall& call) {
  const auto self = call.tensor("self");
  if (!self || call.tensors[*self].ndim() < 2) return std::nullopt;
  const Spec& x = call.tensors[*self];
  const int64_t outer = x.ndim() - 2;
  const auto batch = x.shape().slice(0, outer);
  const Letters all = identity(outer);
  Letters matrices = all;
  matrices.append(2, kUnsharded);
  Einsum einsum{.inputs = {matrices}, .outputs = {matrices}};
  for (size_t i = 1; i < call.tensors.size(); ++i) {
    if (!at::is_expandable_to(call.tensors[i].shape(), batch)) return std::nullopt;
    einsum.inputs.push_back(broadcast(call.tensors[i].shape(), batch, all));
  }
  Shape shape = x.shape().vec();
  std::swap(shape[outer], shape[outer + 1]);
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// Which results there are besides solutions depends on the driver; others have shape [0].
std::optional<Strategies> least_squares(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &a = call.tensors[0], &b = call.tensors[1];
  const int64_t outer = a.ndim() - 2;
  if (outer < 0 || b.ndim() <= outer || a.shape().slice(0, outer) != b.shape().slice(0, outer))
    return std::nullopt;
  const int64_t m = a.shape()[outer], n = a.shape()[outer + 1];
  const bool is_vector = b.ndim() == outer + 1;
  const std::string driver = call.has("driver") ? call.value("driver").toStringRef() : "gelsy";
  const bool by_values = driver == "gelss" || driver == "gelsd";
  // Then there are residuals if all matrices, of all ranks, have full rank.
  if (m > n && by_values) return std::nullopt;

  constexpr char kColumn = 'K';
  const Letters batch = identity(outer);
  Strategies strategies;
  Einsum einsum{.inputs = {batch, batch}, .outputs = {}};
  for (size_t i = 0; i < 2; ++i) einsum.inputs[i].resize(call.tensors[i].ndim(), kUnsharded);
  // Contracted are the batch dims of results that are not there.
  einsum.contracted = Replicate();
  auto add = [&](bool there, const Shape& inner, bool has_columns = false) {
    Shape shape = there ? a.shape().slice(0, outer).vec() : Shape();
    Letters output = identity(shape.size());
    shape.insert(shape.end(), inner.begin(), inner.end());
    output.resize(shape.size(), kUnsharded);
    if (there && has_columns) output.back() = kColumn;
    einsum.outputs.push_back(std::move(output));
    strategies.results.push_back({std::move(shape)});
  };
  const int64_t columns = is_vector ? 1 : b.shape().back();
  if (!is_vector) einsum.inputs[1].back() = kColumn;
  const Shape none{0};
  const bool has_residuals = m > n && driver == "gels", has_ranks = driver != "gels";
  add(true, is_vector ? Shape{n} : Shape{n, columns}, !is_vector);
  add(has_residuals, has_residuals ? Shape{columns} : none, !is_vector);
  add(has_ranks, has_ranks ? Shape{} : none);
  add(by_values, by_values ? Shape{std::min(m, n)} : none);
  strategies.options = strategies_of(einsum);
  // A rank must have a column.
  for (Strategy& strategy : strategies.options) {
    if (strategy.inputs[0].is_replicate()) strategy.divisor = columns;
  }
  return strategies;
}

/// Vectors along a dim; others are broadcast.
std::optional<Strategies> cross(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &x = call.tensors[0], &y = call.tensors[1];
  if (x.ndim() != y.ndim() || x.ndim() == 0 || !at::are_expandable(x.shape(), y.shape())) return std::nullopt;
  const Shape shape = at::infer_size(x.shape(), y.shape());
  Letters all = identity(x.ndim());
  all[wrapped(call.integer("dim"), x.ndim())] = kUnsharded;
  Einsum einsum{.inputs = {broadcast(x.shape(), shape, all), broadcast(y.shape(), shape, all)},
                .outputs = {all},
                .linear = {{0}, {1}}};
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// All look at all, so that what is wrong is an error on every rank.
std::optional<Strategies> check_errors(const OpCall& /*call*/) {
  Strategies strategies;
  strategies.options = {{{Replicate()}, {}}};
  return strategies;
}

/// Distances of rows: "bpm,brm->bpr" with m whole. What is not there in a batch dim is repeated.
std::optional<Strategies> distances(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &x = call.tensors[0], &y = call.tensors[1];
  if (x.ndim() < 2 || y.ndim() < 2 || x.numel() == 0 || y.numel() == 0) return std::nullopt;
  auto batch = [](const Spec& spec) { return spec.shape().slice(0, spec.ndim() - 2); };
  if (!at::are_expandable(batch(x), batch(y))) return std::nullopt;
  Shape shape = at::infer_size(batch(x), batch(y));
  const Letters all = identity(shape.size());
  auto with = [&](const Spec& spec, char row) {
    Letters letters = broadcast(batch(spec), shape, all);
    letters.push_back(row);
    letters.push_back(kUnsharded);
    return letters;
  };
  Einsum einsum{.inputs = {with(x, 'P'), with(y, 'R')}, .outputs = {all}, .contracted = std::nullopt};
  einsum.outputs[0].push_back('P');
  einsum.outputs[0].push_back('R');
  shape.push_back(x.shape()[x.ndim() - 2]);
  shape.push_back(y.shape()[y.ndim() - 2]);
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// "bpr,bpm,brm,bpr->bpm"
std::optional<Strategies> distances_backward(const OpCall& call) {
  if (call.tensors.size() != 4) return std::nullopt;
  const Spec &x = call.tensors[1], &y = call.tensors[2];
  const int64_t ndim = x.ndim();
  if (ndim < 2 || x.numel() == 0 || y.numel() == 0) return std::nullopt;
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() != ndim || spec.shape().slice(0, ndim - 2) != x.shape().slice(0, ndim - 2))
      return std::nullopt;
  }
  auto with = [&](char row, char column) {
    Letters letters = identity(ndim - 2);
    letters.push_back(row);
    letters.push_back(column);
    return letters;
  };
  Einsum einsum{.inputs = {with('P', 'R'), with('P', 'M'), with('R', 'M'), with('P', 'R')},
                .outputs = {with('P', 'M')},
                .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{x.shape().vec()}}};
}

std::optional<Strategies> fourier(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape dims = call.integers("dim");
  if (dims.empty()) return std::nullopt;
  Shape shape = spec.shape().vec();
  const Shape whole = wrapped(dims, spec.ndim());
  for (const int64_t dim : whole) shape[dim] = kLocal;
  if (spec.numel() == 0) return std::nullopt;
  Strategies strategies = unsharded_dims(call, whole, {{shape}});
  // A rank must have something to transform.
  for (Strategy& strategy : strategies.options) strategy.divisor = spec.shape()[strategy.inputs[0].dim()];
  strategies.options.push_back({{Partial()}, {Partial()}});
  return strategies;
}

}  // namespace

Table linalg_rules() {
  return {
      {{"_linalg_det",
        "_linalg_slogdet",
        "linalg_inv_ex",
        "linalg_cholesky_ex",
        "linalg_lu_factor_ex",
        "linalg_matrix_exp",
        "cholesky_inverse",
        "linalg_eig",
        "_linalg_eigvals",
        "cholesky",
        "_linalg_solve_ex",
        "linalg_solve_triangular",
        "triangular_solve",
        "linalg_lu_solve",
        "cholesky_solve",
        "linalg_ldl_factor_ex",
        "linalg_ldl_solve",
        "linalg_householder_product",
        "geqrf",
        "ormqr"},
       batched()},
      {{"_linalg_svd"}, batched(only_values, {"compute_uv"})},
      {{"linalg_lu"}, batched(no_permutation, {"pivot"})},
      {{"lu_unpack"}, batched(not_unpacked, {"unpack_pivots", "unpack_data"})},
      {{"_linalg_eigh"}, batched(no_vectors, {"compute_v"})},
      {{"linalg_qr"}, batched(no_q, {"mode"})},
      {{"linalg_pinv.atol_rtol_tensor"}, {"cut along the dims before the last two", pseudoinverse}},
      {{"linalg_lstsq"},
       {"cut along the dims before the last two, and evenly along the right sides",
        least_squares,
        {"driver"}}},
      {{"linalg_cross"}, {"ab.,ab.->ab., the dim whole", cross, {"dim"}}},
      {{"_fft_c2c", "_fft_r2c", "_fft_c2r"}, {"transformed dims whole", fourier, {"dim"}}},
      {{"_linalg_check_errors"}, {"whole, so that an error is one on every rank", check_errors}},
      {{"_cdist_forward"}, {"bp.,br.->bpr", distances}},
      {{"_cdist_backward"}, {"bpr,bpm,brm,bpr->bpm", distances_backward}},
      {{"dist"}, composed({"sub", "norm"})},
  };
}

}  // namespace tessera::ops
