#include <tessera/kernels/unique.h>

#include <ATen/ATen.h>

namespace tessera::kernels {

namespace {

Stack without_unwanted(Stack results, const UniqueResults& wanted) {
  const at::Tensor nothing = at::empty({0}, results[1].toTensor().options());
  if (!wanted.inverse) results[1] = nothing;
  if (wanted.has_counts && !wanted.counts) results[2] = nothing;
  return results;
}

}  // namespace

Stack unique(const c10::OperatorHandle& op, Stack arguments, const UniqueResults& wanted) {
  return without_unwanted(call_operator(op, std::move(arguments)), wanted);
}

Stack unique_of_all(const c10::OperatorHandle& op, Stack arguments, const UniqueResults& wanted,
                    const ShardGroup& ranks, int64_t dim) {
  const NamedArguments named(op, arguments);
  named["return_inverse"] = true;
  if (wanted.has_counts) named["return_counts"] = true;
  const Stack own = call_operator(op, arguments);
  const at::Tensor values = own[0].toTensor();
  const std::vector<int64_t> sizes = ranks.sizes(values, dim);
  named["self"] = ranks.join(values, dim, sizes);
  Stack results = call_operator(op, std::move(arguments));
  const at::Tensor where = results[1].toTensor();
  if (wanted.inverse) results[1] = at::take(where, at::add(own[1].toTensor(), ranks.before(sizes)));
  if (wanted.counts) {
    const at::Tensor counts = at::zeros_like(results[2].toTensor());
    results[2] = counts.index_add_(0, where, ranks.join(own[2].toTensor(), 0, sizes));
  }
  return without_unwanted(std::move(results), wanted);
}

}  // namespace tessera::kernels
