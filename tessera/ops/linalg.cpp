#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

/// Each matrix by itself, with what comes with it: B are the dims of the batch, and `..` a matrix.
Pattern matrices(Names letters, std::vector<Pattern::EmptyResults> empty_results = {}) {
  return {.letters = std::move(letters),
          .contracted = std::nullopt,
          .inner = 2,
          .broadcasts = false,
          .empty_results = std::move(empty_results)};
}

/// Solutions, which are linear in the right sides; other results depend on the matrices only.
Pattern solutions(Names letters, const char* right_sides) {
  Pattern pattern = matrices(std::move(letters));
  pattern.linear = {{right_sides}};
  pattern.linear_results = 1;
  return pattern;
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

}  // namespace

Table linalg_rules() {
  return {
      {{"linalg_matrix_exp", "cholesky_inverse", "_linalg_eigvals", "cholesky"}, matrices({"B..->B.."})},
      {{"linalg_inv_ex", "linalg_cholesky_ex", "linalg_eig", "geqrf"}, matrices({"B..->B..,B.."})},
      {{"_linalg_det", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"}, matrices({"B..->B..,B..,B.."})},
      {{"_linalg_slogdet"}, matrices({"B..->B..,B..,B..,B.."})},
      {{"linalg_solve_triangular"}, solutions({"B..,B..->B.."}, "B")},
      {{"cholesky_solve"}, solutions({"B..,B..->B.."}, "self")},
      {{"triangular_solve"}, solutions({"B..,B..->B..,B.."}, "self")},
      // Vectors as right sides are just as long as matrices are high; else they are matrices for all.
      {{"_linalg_solve_ex"}, solutions({"B..,B..->B..,B..,B..,B..", "Bm.,Bm->B..,B..,B..,B.."}, "B")},
      {{"linalg_householder_product"}, matrices({"B..,B.->B.."})},
      // Matrices and right sides that are broadcast against each other are unsharded.
      {{"linalg_lu_solve", "linalg_ldl_solve"}, solutions({"B..,B.,B..->B..", "..,..,..->.."}, "B")},
      {{"ormqr"}, solutions({"B..,B.,B..->B.."}, "input3")},
      {{"_linalg_svd"}, matrices({"B..->B..,B..,B.."}, {{"compute_uv", false, {0, 2}}})},
      {{"linalg_lu"}, matrices({"B..->B..,B..,B.."}, {{"pivot", false, {0}}})},
      {{"lu_unpack"},
       matrices({"B..,B.->B..,B..,B.."}, {{"unpack_pivots", false, {0}}, {"unpack_data", false, {1, 2}}})},
      {{"_linalg_eigh"}, matrices({"B..->B..,B.."}, {{"compute_v", false, {1}}})},
      {{"linalg_qr"}, matrices({"B..->B..,B.."}, {{"mode", "r", {0}}})},
      // Tolerances are of a batch too, or of some of its dims. For those of nothing there is no other batch.
      {{"linalg_pinv.atol_rtol_tensor"},
       Pattern{.letters = {"B..,B?,B?->B.."}, .inner = 2, .never_empty = true}},
      {{"linalg_lstsq"},
       {"sharded along the dims before the last two, and evenly along the right sides",
        least_squares,
        {"driver"},
        "which results there are depends on the driver and the shape of the matrices"}},
      {{"linalg_cross"}, UnshardedDims{.dims = {"dim"}, .broadcasts = true, .linear = {{"self"}, {"other"}}}},
      {{"_fft_c2c", "_fft_r2c", "_fft_c2r"},
       UnshardedDims{.dims = {"dim"}, .same_size = false, .never_empty = true, .linear = {{"self"}}}},
      // All ranks look at all, so that an error is one on every rank.
      {{"_linalg_check_errors"}, Pattern{{"..->"}}},
      {{"_cdist_forward"},
       Pattern{.letters = {"Bp.,Br.->Bpr"}, .contracted = std::nullopt, .never_empty = true}},
      {{"_cdist_backward"},
       Pattern{.letters = {"Bpr,Bpm,Brm,Bpr->Bpm"},
               .linear = {{"grad"}},
               .broadcasts = false,
               .never_empty = true}},
      {{"dist"}, composed({"sub", "norm"})},
  };
}

}  // namespace tessera::ops

// --- autograd and composites

namespace tessera {

namespace {

/// Its gradient is a corner of the exponential of [[A^H, G], [0, A^H]].
struct MatrixExp : torch::autograd::Function<MatrixExp> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({self});
    return at::linalg_matrix_exp(self);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor transposed = context->get_saved_variables()[0].mH();
    const int64_t size = transposed.size(-1);
    const at::Tensor upper = at::cat({transposed, gradients[0]}, -1);
    const at::Tensor lower = at::cat({at::zeros_like(transposed), transposed}, -1);
    const at::Tensor block = at::linalg_matrix_exp(at::cat({upper, lower}, -2));
    return {block.narrow(-2, 0, size).narrow(-1, size, size)};
  }
};

at::Tensor linalg_matrix_exp(const at::Tensor& self) { return MatrixExp::apply(self); }

void register_linalg_composites(torch::Library& library) {
  register_composed(library,
                    {"linalg_matrix_power", "linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float",
                     "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor"});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_linalg_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_linalg_composites(library);
  library.impl("linalg_matrix_exp", linalg_matrix_exp);
}

}  // namespace

}  // namespace tessera
