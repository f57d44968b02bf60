#include <tessera/ops/family.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

/// Products of one matrix for each group: `offs` says where the rows, columns or summands of each group end.
/// Where groups are sharded, a rank computes with what belongs to its own, and has zeros for the rest. Gradients
/// are grouped products too.
namespace tessera::ops {

namespace {

/// Dims of the two matrices and the result: groups g, rows m, summands k, columns n. `ragged` is the one whose
/// elements belong to groups; 0 where all groups are of one size.
struct Grouped {
  Letters self, mat2, result;
  char ragged;
};

/// Whether libtorch takes a matrix so: its rows, or its columns, begin at multiples of 16 bytes.
bool is_aligned(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  const auto unit = 16 / static_cast<int64_t>(c10::elementSize(dtype));
  const size_t row = sizes.size() - 2, column = sizes.size() - 1;
  if (strides[row] == 1 && strides[column] >= std::max<int64_t>(1, sizes[row]))
    return strides[column] % unit == 0;
  return strides[column] == 1 && strides[row] >= std::max<int64_t>(1, sizes[column]) &&
         strides[row] % unit == 0;
}

/// The same values, so. Shards need not lie as the whole does.
at::Tensor aligned(const at::Tensor& matrix) {
  if (is_aligned(matrix.sizes(), matrix.strides(), matrix.scalar_type())) return matrix;
  const auto unit = 16 / static_cast<int64_t>(matrix.element_size());
  auto shape = matrix.sizes().vec();
  shape.back() = std::max<int64_t>(1, (shape.back() + unit - 1) / unit) * unit;
  return new_memory(shape, matrix.options()).narrow(-1, 0, matrix.size(-1)).copy_(matrix);
}

/// Nothing for what libtorch refuses, which then says why.
std::optional<Grouped> grouped(const OpCall& call) {
  const auto self = call.tensor("self"), mat2 = call.tensor("mat2"), offs = call.tensor("offs");
  if (!self || !mat2 || call.tensor("bias") || call.has("out_dtype")) return std::nullopt;
  const Spec &a = call.tensors[*self], &b = call.tensors[*mat2];
  for (const Spec* spec : {&a, &b}) {
    if (spec->ndim() < 2 || spec->ndim() > 3 || !is_aligned(spec->shape(), spec->strides(), spec->dtype()))
      return std::nullopt;
  }
  const bool flat_a = a.ndim() == 2, flat_b = b.ndim() == 2;
  const int64_t summands = a.shape().back();
  if (offs.has_value() != (flat_a || flat_b) || summands != b.shape()[b.ndim() - 2]) return std::nullopt;
  if (!offs) {
    if (a.shape()[0] != b.shape()[0]) return std::nullopt;
    return Grouped{letters("gmk"), letters("gkn"), letters("gmn"), 0};
  }
  const Spec& ends = call.tensors[*offs];
  if (ends.ndim() != 1 || ends.dtype() != at::kInt) return std::nullopt;
  if (flat_a && flat_b) return Grouped{letters("mk"), letters("kn"), letters("gmn"), 'k'};
  if (ends.shape()[0] != (flat_a ? b : a).shape()[0]) return std::nullopt;
  if (flat_a) return Grouped{letters("mk"), letters("gkn"), letters("mn"), 'm'};
  return Grouped{letters("gmk"), letters("kn"), letters("mn"), 'n'};
}

std::optional<int64_t> dim_of(const Letters& letters, char letter) {
  const auto* found = std::find(letters.begin(), letters.end(), letter);
  if (found == letters.end()) return std::nullopt;
  return found - letters.begin();
}

/// Sharded along a letter; replicated if the tensor lacks it.
Placement along(const Letters& letters, char letter) {
  const auto dim = dim_of(letters, letter);
  return dim ? Shard(*dim) : Replicate();
}

/// What the ragged dim and the groups are on a rank.
struct GroupRange {
  Range elements = {};  // of the ragged dim
  Range groups = {};
  bool all_groups = true;
};

/// The offsets of a rank's groups in what it has of the ragged dim; and which elements belong to these groups.
struct LocalGroups {
  at::Tensor offs;
  Range elements;

  LocalGroups(const at::Tensor& global, const GroupRange& range) {
    const at::Tensor here = global.clamp(range.elements.offset, range.elements.end()) - range.elements.offset;
    const auto end_of = [&](int64_t group) { return group < 0 ? 0 : here[group].item<int64_t>(); };
    const int64_t first = range.groups.offset, last = range.groups.end() - 1;
    const int64_t begin = range.all_groups ? 0 : end_of(first - 1);
    const int64_t end = range.all_groups ? range.elements.size : std::max(begin, end_of(last));
    elements = {begin, end - begin};
    offs = (here.narrow(0, first, range.groups.size) - begin).to(at::kInt);
  }
};

Stack grouped_product(const c10::OperatorHandle& op, Stack arguments, const Grouped& form,
                      const GroupRange& range, const Shape& shape) {
  const NamedArguments named(op, arguments);
  at::Tensor self = named.tensor("self"), mat2 = named.tensor("mat2");
  const at::Tensor result = at::zeros(shape, self.options());
  if (result.numel() == 0 || self.numel() == 0 || mat2.numel() == 0 || range.groups.size == 0)
    return {result};
  if (form.ragged == 0) {
    named["self"] = aligned(self);
    named["mat2"] = aligned(mat2);
    return call_operator(op, std::move(arguments));
  }
  const LocalGroups groups(named.tensor("offs"), range);
  if (groups.elements.size == 0) return {result};
  const auto narrowed = [&](const at::Tensor& tensor, const Letters& of) {
    const auto dim = dim_of(of, form.ragged);
    return dim ? tensor.narrow(*dim, groups.elements.offset, groups.elements.size) : tensor;
  };
  named["self"] = aligned(narrowed(self, form.self));
  named["mat2"] = aligned(narrowed(mat2, form.mat2));
  named["offs"] = groups.offs;
  narrowed(result, form.result).copy_(call_operator(op, std::move(arguments))[0].toTensor());
  return {result};
}

Localize localized(const Grouped& form, size_t self, size_t mat2) {
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec &a = chosen.inputs[self], &b = chosen.inputs[mat2], &c = chosen.outputs[0];
    // The tensors that have a letter are sharded alike along it.
    const auto range_of = [&](char letter) {
      const std::pair<const Spec*, const Letters*> all[] = {
          {&a, &form.self}, {&b, &form.mat2}, {&c, &form.result}};
      for (const auto& [spec, of] : all) {
        if (const auto dim = dim_of(*of, letter))
          return Range{spec->global_offset()[*dim], spec->local_shape()[*dim]};
      }
      return Range{};
    };
    GroupRange range{range_of(form.ragged), range_of('g')};
    const auto grouped_tensor = dim_of(form.self, 'g') ? a : dim_of(form.mat2, 'g') ? b : c;
    range.all_groups = range.groups.size == grouped_tensor.shape()[0];
    const Shape shape = c.local_shape().vec();
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      return grouped_product(op, std::move(arguments), form, range, shape);
    };
    return local;
  };
}

std::optional<Strategies> grouped_mm(const OpCall& call) {
  const auto form = grouped(call);
  if (!form) return std::nullopt;
  const size_t self = *call.tensor("self"), mat2 = *call.tensor("mat2");
  const Spec &a = call.tensors[self], &b = call.tensors[mat2];
  const auto size_of = [&](char letter) {
    if (const auto dim = dim_of(form->self, letter)) return a.shape()[*dim];
    if (const auto dim = dim_of(form->mat2, letter)) return b.shape()[*dim];
    return call.tensors[*call.tensor("offs")].shape()[0];
  };
  Strategies strategies;
  for (const char letter : {'g', 'm', 'n', 'k'}) {
    Strategy strategy{Placements(call.tensors.size(), Replicate()), {Partial()}};
    strategy.inputs[self] = along(form->self, letter);
    strategy.inputs[mat2] = along(form->mat2, letter);
    if (dim_of(form->result, letter)) strategy.outputs = {along(form->result, letter)};
    strategy.contiguous = letter == form->ragged || letter == 'g';
    strategies.options.push_back(std::move(strategy));
  }
  for (const size_t linear : {self, mat2}) {
    Strategy strategy{Placements(call.tensors.size(), Replicate()), {Partial()}};
    strategy.inputs[linear] = Partial();
    strategies.options.push_back(std::move(strategy));
  }
  Shape shape;
  for (const char letter : form->result) shape.push_back(size_of(letter));
  strategies.results = {{shape}};
  strategies.localize = localized(*form, self, mat2);
  return strategies;
}

}  // namespace

Table grouped_rules() {
  return {
      {{"_grouped_mm"},
       Rule("groups, rows and columns sharded; summands with P(sum), and so groups that the result lacks",
            grouped_mm, {"out_dtype"}, "which dims belong to groups depends on how many dims there are")}};
}

}  // namespace tessera::ops
