#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

/// Running sums and their like along a dim. Where it is cut, each rank begins with what those before it come
/// to.
namespace tessera::ops {

namespace {

/// Results of a part of the dim (one, or values and where they are) that follow on those of the parts before.
using Follow = std::function<Stack(const Stack& before, const Stack& part)>;

Rule scan_rule(size_t results, bool linear, const Follow& follow) {
  return {
      "the dim cut: each rank's, and what those before it come to",
      [=](const OpCall& call) -> std::optional<Strategies> {
        const Spec& x = call.tensors[0];
        if (x.ndim() == 0) return unsharded_dims(call, {}, std::vector<Result>(results));
        const int64_t dim = wrapped(call.integer("dim"), x.ndim());
        Strategies strategies = unsharded_dims(call, {dim}, std::vector<Result>(results, {x.shape().vec()}));
        strategies.options.push_back({{Shard(dim)}, Placements(results, Shard(dim)), 0, /*contiguous=*/true});
        if (linear && converts_partial_values(call) && x.dtype() != at::kBool) {
          for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
            strategies.options.push_back({{Partial(op)}, {Partial(op)}});
        }
        strategies.localize = [=](const ChosenSpecs& chosen) {
          LocalCall local;
          const Spec& x = chosen.inputs[0];
          if (mesh_dims_of(x, dim).empty()) return local;
          local.communicates = true;
          local.compute = [=, ranks = ShardGroup(x, mesh_dims_of(x, dim), dim),
                           offset = x.global_offset()[dim]](const c10::OperatorHandle& op, Stack arguments) {
            Stack part = call_operator(op, std::move(arguments));
            if (results == 2) part[1] = at::add(part[1].toTensor(), offset);
            // The last of each, where there is one.
            std::vector<int64_t> sizes;
            for (const int64_t held : ranks.held()) sizes.push_back(held > 0);
            std::vector<at::Tensor> ends;
            for (const c10::IValue& result : part) {
              const at::Tensor& all = result.toTensor();
              const int64_t count = sizes[ranks.self()];
              ends.push_back(ranks.join(all.narrow(dim, all.size(dim) - count, count), dim, sizes));
            }
            auto end = [&](int64_t i) {
              Stack result;
              for (const at::Tensor& each : ends) result.emplace_back(each.narrow(dim, i, 1));
              return result;
            };
            const int64_t count = ranks.before(sizes);
            if (count == 0 || sizes[ranks.self()] == 0) return part;
            Stack before = end(0);
            for (const int64_t i : c10::irange<int64_t>(1, count)) before = follow(before, end(i));
            return follow(before, part);
          };
          return local;
        };
        return strategies;
      },
      {"dim", "dtype"}};
}

template <at::Tensor (*combine)(const at::Tensor&, const at::Tensor&)>
Stack by(const Stack& before, const Stack& part) {
  return {combine(before[0].toTensor(), part[0].toTensor())};
}

at::Tensor sum(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
at::Tensor log_sum(const at::Tensor& a, const at::Tensor& b) { return at::logaddexp(a, b); }

/// The later one of two that are equal; once there is a NaN, the last of them.
template <at::Tensor (*reaches)(const at::Tensor&, const at::Tensor&)>
Stack extreme(const Stack& before, const Stack& part) {
  const at::Tensor old = before[0].toTensor(), now = part[0].toTensor();
  const at::Tensor later = at::logical_or(reaches(now, old), at::isnan(now));
  return {at::where(later, now, old), at::where(later, part[1].toTensor(), before[1].toTensor())};
}

at::Tensor at_least(const at::Tensor& a, const at::Tensor& b) { return at::ge(a, b); }
at::Tensor at_most(const at::Tensor& a, const at::Tensor& b) { return at::le(a, b); }

}  // namespace

Table scan_rules() {
  return tried({
      {{"cumsum"}, scan_rule(1, true, by<sum>)},
      {{"cumprod"}, scan_rule(1, false, by<product>)},
      {{"logcumsumexp", "_logcumsumexp"}, scan_rule(1, false, by<log_sum>)},
      {{"cummax"}, scan_rule(2, false, extreme<at_least>)},
      {{"cummin"}, scan_rule(2, false, extreme<at_most>)},
  });
}

}  // namespace tessera::ops
