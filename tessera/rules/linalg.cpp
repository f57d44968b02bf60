#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ATen.h>

namespace tessera::rules {

namespace {

/// Which result a call does not ask for: it has shape [0].
using Unwanted = std::function<std::optional<size_t>(const Call&)>;

/// Each matrix by itself: dims before the last two are cut alike, in all inputs and results.
Rule batched(const Unwanted& unwanted = {}, std::vector<std::string> reads = {}) {
  return {"cut along the dims before the last two",
          [unwanted](const Call& call) -> std::optional<Proposal> {
            const Spec& first = call.tensors[0];
            const int64_t outer = first.ndim() - 2;
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
            std::vector<Result> shapes(results, Result{batch});
            if (const auto empty = unwanted ? unwanted(call) : std::nullopt) {
              einsum.outputs[*empty] = Letters{kWhole};
              einsum.contracted = Replicate();
              shapes[*empty] = {{0}};
            }
            return Proposal{rows(einsum), std::move(shapes)};
          },
          std::move(reads)};
}

std::optional<size_t> no_vectors(const Call& call) {
  return call.flag("compute_v") ? std::nullopt : std::optional<size_t>(1);
}

std::optional<size_t> no_q(const Call& call) {
  return call.value("mode").toStringRef() == "r" ? std::optional<size_t>(0) : std::nullopt;
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
      {{"_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex",
        "linalg_matrix_exp", "cholesky_inverse", "linalg_eig"},
       batched()},
      {{"_linalg_eigh"}, batched(no_vectors, {"compute_v"})},
      {{"linalg_qr"}, batched(no_q, {"mode"})},
      {{"_fft_c2c", "_fft_r2c", "_fft_c2r"}, {"transformed dims whole", fourier, {"dim"}}},
      {{"dist"},
       {"by sub and norm",
        [](const Call&) {
          return std::optional(Proposal{{}, {}, {}, composite()});
        }}},
  };
}

}  // namespace tessera::rules
