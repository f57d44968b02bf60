#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ATen.h>

namespace tessera::rules {

namespace {

/// Each matrix by itself: dims before the last `inner` are cut alike, in all inputs and results.
Rule batched(int64_t inner) {
  return {inner == 2 ? "cut along the dims before the last two" : "cut along the dims before the last",
          [inner](const Call& call) -> std::optional<Proposal> {
            const Spec& first = call.tensors[0];
            const int64_t outer = first.ndim() - inner;
            if (outer < 0) return std::nullopt;
            const Shape batch(first.shape().begin(), first.shape().begin() + outer);
            Einsum einsum;
            for (const Spec& spec : call.tensors) {
              if (spec.ndim() < outer || !std::equal(batch.begin(), batch.end(), spec.shape().begin()))
                return std::nullopt;
              Letters letters = identity(spec.ndim());
              std::fill(letters.begin() + outer, letters.end(), kWhole);
              einsum.inputs.push_back(std::move(letters));
            }
            const size_t results = call.schema->returns().size();
            einsum.outputs.assign(results, identity(outer));
            return Proposal{rows(einsum), std::vector<Result>(results, Result{batch})};
          }};
}

std::optional<Proposal> fourier(const Call& call) {
  const Spec& spec = call.tensors[0];
  const Shape dims = call.integers("dim");
  if (dims.empty()) return std::nullopt;
  Shape shape = spec.shape().vec();
  const Shape whole = wrapped(dims, spec.ndim());
  for (const int64_t dim : whole) shape[dim] = kLocal;
  if (spec.numel() == 0) return std::nullopt;
  Proposal proposal = whole_dims(call, whole, {{shape}});
  // A rank must have something to transform.
  for (Row& row : proposal.rows) row.divisor = spec.shape()[row.inputs[0].dim()];
  proposal.rows.push_back({{Partial()}, {Partial()}});
  return proposal;
}

}  // namespace

Table linalg_rules() {
  return {
      {{"_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_qr", "_linalg_eigh",
        "linalg_lu_factor_ex", "linalg_matrix_exp", "cholesky_inverse", "linalg_eig"},
       batched(2)},
      {{"_fft_c2c", "_fft_r2c", "_fft_c2r"}, {"transformed dims whole", fourier, {"dim"}}},
      {{"dist"},
       {"by sub and norm",
        [](const Call&) {
          return std::optional(Proposal{{}, {}, {}, composite()});
        }}},
  };
}

}  // namespace tessera::rules
