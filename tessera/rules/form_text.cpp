// What a form says of itself: the line for people, and which arguments it reads.
#include <tessera/rules/form.h>
#include <tessera/rules/indexed_dim.h>
#include <tessera/rules/rule.h>

#include <string>
#include <variant>

#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

// --- text

/// {"a", "b", "c"} -> "a, b and c"
std::string listed(const Names& names, const char* quote = "") {
  std::string result;
  for (const size_t i : c10::irange(names.size())) {
    if (i > 0) result += i + 1 == names.size() ? " and " : ", ";
    result += quote + names[i] + quote;
  }
  return result;
}

std::string linear_text(const std::vector<Names>& linear) {
  std::string result;
  for (const Names& set : linear) {
    result += result.empty() ? ", linear in " : ", or in ";
    result += listed(set, "`");
    if (set.size() > 1) result += " together";
  }
  return result;
}

std::string keeps_text(const std::vector<ReduceOp>& keeps) {
  Names names;
  for (const ReduceOp op : keeps) names.push_back(c10::str(Partial(op)));
  return names.empty() ? "" : ", keeps " + listed(names);
}

std::string if_sharded_text(const std::optional<Decomposition>& decomposition) {
  return decomposition ? "; if sharded, by " + listed(decomposition->by) : "";
}

std::string collective_text(const std::optional<Collective>& collective) {
  return collective ? "; if sharded: " + collective->text : "";
}

std::string text_of(const Pointwise& form) {
  std::string result = "pointwise" + linear_text(form.linear) + keeps_text(form.keeps);
  if (form.integers) result += ", of integers too";
  if (form.same_dtype) result += ", among tensors of one dtype";
  if (!form.rises.empty()) result += ", rises with " + listed(form.rises, "`");
  if (!form.falls.empty()) result += ", falls with " + listed(form.falls, "`");
  if (form.joins) result += c10::str(", joins ", Partial(*form.joins));
  return result;
}

std::string text_of(const Pattern& form) {
  std::string result;
  for (const std::string& letters : form.letters) result += (result.empty() ? "" : " or ") + letters;
  if (form.product) result += ", linear in each factor";
  result += linear_text(form.linear);
  if (!form.contracted) {
    result += ", contracted dims unsharded";
  } else if (*form.contracted != Partial()) {
    result += c10::str(", contracted dims give ", *form.contracted);
  }
  if (const auto* name = std::get_if<std::string>(&form.inner)) result += ", `..` as in `" + *name + "`";
  if (form.selects) result += ", of bool P(any)";
  for (const Pattern::EmptyResults& empty : form.empty_results) {
    Names results;
    for (const size_t i : empty.results) results.push_back(c10::str(i));
    const auto* value = std::get_if<std::string>(&empty.value);
    result += ", result " + listed(results) + " empty if `" + empty.argument + "` is ";
    result += value ? *value : std::get<bool>(empty.value) ? "true" : "false";
  }
  if (!form.unread.empty()) result += ", " + listed(form.unread, "`") + " as it is";
  if (!form.unless.empty()) result += ", not if " + listed(form.unless, "`");
  if (!form.contiguous.empty()) result += ", no strided shards of " + form.contiguous;
  if (form.moves) result += ", any partial values";
  return result + if_sharded_text(form.if_sharded);
}

std::string text_of(const Reduction& form) {
  Names partial;
  for (const Placement& each : form.partial) partial.push_back(c10::str(each));
  std::string result = "`dim` reduced: ";
  result += partial.empty() ? "unsharded" : listed(partial);
  if (form.by_share) result += ", each rank's by its share";
  if (form.linear) result += ", linear";
  return result + keeps_text(form.keeps) + if_sharded_text(form.if_sharded) +
         collective_text(form.collective);
}

std::string text_of(const UnshardedDims& form) {
  Names dims;
  for (const std::string& name : form.dims) dims.push_back("`" + name + "`");
  for (const int64_t dim : form.last) dims.push_back(c10::str("dim ", dim));
  std::string result = form.all_but ? "all dims but " : "";
  result += listed(dims) + " unsharded, others " + (form.broadcasts ? "broadcast" : "alike");
  result += linear_text(form.linear);
  if (form.never_empty) result += ", no empty shards";
  return result + if_sharded_text(form.if_sharded) + collective_text(form.collective);
}

std::string text_of(const LikeInput& form) {
  std::string result = form.keeps_partial ? "placed like the input" : "placed like the input, P as R";
  return form.size == LikeInput::Size::any ? result + ", if `size` is its shape; else replicated" : result;
}

std::string text_of(const DimMap& form) {
  Names clauses;
  auto add = [&](const Names& dims, const char* what) {
    if (!dims.empty()) clauses.push_back(listed(dims, "`") + what);
  };
  add(form.swapped, " swapped");
  if (!form.order.empty()) clauses.push_back("dims in the order of `" + form.order + "`");
  add(form.unsharded, " unsharded");
  add(form.dropped, form.only_ones ? " dropped where the size is 1" : " dropped, unsharded");
  if (form.only_ones && form.dropped.empty()) clauses.emplace_back("dims of size 1 dropped");
  if (form.last_dropped > 0) clauses.emplace_back("the last dim unsharded");
  add(form.added, " added");
  if (form.last_added > 0) clauses.emplace_back("a last dim added");
  if (form.resizes) clauses.emplace_back("dims that change their size unsharded, new ones in front");
  if (form.linear) clauses.emplace_back("linear");
  std::string result;
  for (const std::string& part : clauses) result += (result.empty() ? "" : ", ") + part;
  if (form.exchanges) result += "; one alone may be sharded: what changes its rank is exchanged";
  return result + if_sharded_text(form.if_sharded);
}

std::string text_of(const Reshape& /*form*/) {
  return "dims split and joined; even shards stay, strided if not of the first dim joined";
}

std::string text_of(const Norm& form) {
  if (form.powers) return "`dim` reduced: P(sum)";
  return "`dim` reduced: P(norm `" + form.order +
         "`), or P(max), P(min), P(sum) if that is infinite, zero or one";
}

std::string text_of(const Planes& form) {
  std::string result = "batch and channels sharded";
  if (form.linear) result += ", linear in the first tensor";
  return form.spatial ? result + "; spatial dims with halos" : result;
}

std::string text_of(const AsItIs& /*form*/) { return "as it is"; }
std::string text_of(const Decomposition& form) { return "by " + listed(form.by); }
std::string text_of(const ByFunction& form) { return form.text; }

std::string text_of(const Cases& form) {
  std::string result;
  for (const Cases::Case& each : form.cases) {
    if (!result.empty()) result += "; ";
    result += "`" + form.argument + "` " + each.name + ": " + each.rule->text();
  }
  return result;
}

// --- what is read

Names reads_of(const Reduction& /*form*/) { return {"dim", "keepdim", "dtype"}; }
Names reads_of(const UnshardedDims& form) {
  Names names = form.dims;
  names.emplace_back("dtype");
  return names;
}
Names reads_of(const IndexedDim& /*form*/) { return {"dim"}; }
Names reads_of(const Cases& form) {
  Names names{form.argument};
  for (const Cases::Case& each : form.cases)
    names.insert(names.end(), each.rule->reads.begin(), each.rule->reads.end());
  return names;
}
Names reads_of(const AsItIs& /*form*/) { return {"memory_format"}; }
Names reads_of(const LikeInput& /*form*/) { return {"memory_format", "size", "stride"}; }
Names reads_of(const Reshape& /*form*/) { return {"size"}; }
Names reads_of(const Norm& form) { return {form.order, "dim", "keepdim", "dtype"}; }
Names reads_of(const DimMap& form) {
  Names reads;
  for (const Names* each : {&form.unsharded, &form.dropped, &form.added, &form.swapped})
    reads.insert(reads.end(), each->begin(), each->end());
  for (const std::string* each : {&form.order, &form.sizes}) {
    if (!each->empty()) reads.push_back(*each);
  }
  return reads;
}
Names reads_of(const Planes& form) {
  Names reads = form.spatial_reads;
  reads.emplace_back("input_size");
  return reads;
}
Names reads_of(const Pattern& form) {
  Names names = form.unless;
  if (const auto* name = std::get_if<std::string>(&form.inner)) names.push_back(*name);
  for (const Pattern::EmptyResults& empty : form.empty_results) names.push_back(empty.argument);
  return names;
}
template <class Other>
Names reads_of(const Other& /*form*/) {
  return {};
}

}  // namespace

std::string text(const Form& form) {
  return std::visit([](const auto& each) { return text_of(each); }, form);
}

Names reads(const Form& form) {
  return std::visit([](const auto& each) { return reads_of(each); }, form);
}

}  // namespace tessera::rules
