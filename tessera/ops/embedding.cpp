#include <tessera/kernels/embedding.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>

/// Embeddings and bags of them. In the patterns, x are the rows of the weight and y its columns.
namespace tessera::ops {

namespace {

using RowKernel = Stack (*)(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);

/// A kernel for ranks that hold some of the rows. `always`: also for one that holds all of them, of operators
/// without a kernel of their own.
Rule with_row_kernel(Form form, const char* text, RowKernel kernel, bool always = false) {
  Rule rule(std::move(form), {"mode"});
  rule.local.text = text;
  rule.local.of = [=](const OpCall& call) -> Localize {
    const bool is_largest = call.position("mode") && call.integer("mode") == kMax;
    return [=, index = *call.tensor("weight")](const ChosenSpecs& chosen) {
      const Spec& weight = chosen.inputs[index];
      if (!always && mesh_dims_of(weight, 0).empty()) return LocalCall();
      LocalCall local;
      local.communicates = is_largest && !mesh_dims_of(weight, 0).empty();
      local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
        return kernel(weight, op, std::move(arguments));
      };
      return local;
    };
  };
  return rule;
}

/// How often an index occurs is known only to who has all of them.
Cases unless_scaled(Pattern pattern) {
  Pattern scaled = pattern;
  scaled.contracted = std::nullopt;
  return {"scale_grad_by_freq", {{"false", false, std::move(pattern)}, {"true", true, std::move(scaled)}}};
}

/// By the mode of bags: sums and means, which are linear in an argument, and the largest.
Cases by_mode(Pattern sums, Pattern largest) {
  return {"mode", {{"sum", kSum, sums}, {"mean", kMean, sums}, {"max", kMax, std::move(largest)}}};
}

Cases bag() {
  return by_mode(
      {.letters = {"xy,.,.,.?->.y,=.,=.,=."}, .linear = {{"weight"}}, .contiguous = "x", .never_empty = true},
      {.letters = {"xy,.,.,.?->.y,=.,=.,.y"},
       .contracted = Replicate(),
       .contiguous = "x",
       .never_empty = true});
}

Cases bag_backward(const char* sums, const char* largest) {
  Pattern pattern{.letters = {sums}, .linear = {{"grad"}}, .unless = {"sparse"}};
  Pattern of_largest = pattern;
  of_largest.letters = {largest};
  return by_mode(std::move(pattern), std::move(of_largest));
}

}  // namespace

Table embedding_rules() {
  return {
      {{"embedding"},
       with_row_kernel(Pattern{.letters = {"xy,B->By"}, .linear = {{"weight"}}, .contiguous = "x"},
                       "zeros for rows of other ranks", embedding_of_local_rows)},
      {{"embedding_dense_backward"},
       unless_scaled({.letters = {"By,B->.y"}, .linear = {{"grad_output"}}, .broadcasts = false})},
      {{"tessera::embedding_backward"},
       with_row_kernel(
           unless_scaled(
               {.letters = {"By,B,xy->xy"}, .linear = {{"grad"}}, .contiguous = "x", .broadcasts = false}),
           "of local rows", gradient_of_local_rows)},
      {{"_embedding_bag", "_embedding_bag_forward_only"},
       with_row_kernel(bag(), "of local rows, the largest by two reductions", bags_of_local_rows)},
      {{"_embedding_bag_backward"}, bag_backward(".y,.,.,.,.,..,.?->.y", ".y,.,.,.,.,.y,.?->.y")},
      {{"_embedding_bag_dense_backward"}, bag_backward(".y,.,.,.,..,.?->.y", ".y,.,.,.,.y,.?->.y")},
      {{"tessera::embedding_bag_backward"},
       with_row_kernel(Pattern{.letters = {".y,.,.,.,.?,xy->xy"}, .linear = {{"grad"}}, .contiguous = "x"},
                       "of local rows", bag_gradient_of_local_rows, /*always=*/true)},
      {{"_embedding_bag_per_sample_weights_backward"},
       with_row_kernel(Pattern{.letters = {".y,xy,.,.,.->."},
                               .linear = {{"grad"}, {"weight"}},
                               .contiguous = "x",
                               .never_empty = true},
                       "of local rows", sample_weight_gradient_of_local_rows)},
  };
}

}  // namespace tessera::ops
