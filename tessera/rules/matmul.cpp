#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ExpandUtils.h>

namespace tessera::rules {

namespace {

/// A product of the last two tensors, as letters say; one before them, if any, is added.
Rule product(const std::string& text, bool added = false) {
  return {
      text, [text, added](const Call& call) -> std::optional<Proposal> {
        Einsum product = einsum(text.substr(text.find('+') == std::string::npos ? 0 : text.find('+') + 1));
        const size_t first = added ? 1 : 0;
        if (call.tensors.size() != 2 + first) return std::nullopt;
        Shape shape;
        for (size_t i = 0; i < 2; ++i) {
          const Spec& spec = call.tensors[first + i];
          if (spec.ndim() != static_cast<int64_t>(product.inputs[i].size())) return std::nullopt;
        }
        auto size_of = [&](char letter) -> int64_t {
          for (size_t i = 0; i < 2; ++i) {
            for (size_t d = 0; d < product.inputs[i].size(); ++d) {
              if (product.inputs[i][d] == letter) return call.tensors[first + i].shape()[d];
            }
          }
          return 1;
        };
        for (size_t i = 0; i < 2; ++i) {
          for (size_t d = 0; d < product.inputs[i].size(); ++d) {
            // Sizes that do not fit are the operator's to complain of.
            if (call.tensors[first + i].shape()[d] != size_of(product.inputs[i][d])) return std::nullopt;
          }
        }
        for (const char letter : product.outputs[0]) shape.push_back(size_of(letter));
        product.linear = {{0}, {1}};
        if (added) {
          const Spec& term = call.tensors[0];
          // libtorch refuses a factor that is no integer only where there is nothing to multiply: on some
          // ranks.
          if (c10::isIntegralType(term.dtype(), true)) return std::nullopt;
          if (term.ndim() > static_cast<int64_t>(shape.size())) return std::nullopt;
          if (!at::is_expandable_to(term.shape(), shape)) return std::nullopt;
          product.inputs.insert(product.inputs.begin(), broadcast(term.shape(), shape, product.outputs[0]));
          product.linear = {{0, 1}, {0, 2}};
          product.added = {0};
        }
        if (std::any_of(call.tensors.begin(), call.tensors.end(),
                        [](const Spec& spec) { return spec.dtype() == c10::ScalarType::Bool; }))
          return std::nullopt;
        Proposal proposal{rows(product), {{shape}}};
        // libtorch forgets to broadcast what is added to a product with an empty matrix and a vector.
        if (added && shape.size() == 1 && call.tensors[0].shape() != c10::IntArrayRef(shape)) {
          proposal.localize = [](const Chosen&) {
            Local local;
            local.compute = [](const c10::OperatorHandle& op, Stack arguments) {
              arguments[0] = arguments[0].toTensor().expand({arguments[1].toTensor().size(0)});
              op.callBoxed(arguments);
              return arguments;
            };
            return local;
          };
        }
        return proposal;
      }};
}

}  // namespace

Table matmul_rules() {
  constexpr bool kAdded = true;
  return {
      {{"mm"}, product("mk,kn->mn")},
      {{"bmm"}, product("bmk,bkn->bmn")},
      {{"mv"}, product("mk,k->m")},
      {{"dot", "vdot"}, product("k,k->")},
      {{"addmm"}, product("mn+mk,kn->mn", kAdded)},
      {{"baddbmm"}, product("bmn+bmk,bkn->bmn", kAdded)},
      {{"addbmm"}, product("mn+bmk,bkn->mn", kAdded)},
      {{"addmv"}, product("m+mk,k->m", kAdded)},
      {{"addr"}, product("mn+m,n->mn", kAdded)},
  };
}

}  // namespace tessera::rules
