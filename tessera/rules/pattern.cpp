#include <tessera/error.h>
#include <tessera/rules/pattern.h>
#include <tessera/rules/shape.h>

#include <algorithm>
#include <map>

#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

constexpr char kRest = '~';     // stands for ".."
constexpr char kAsInput = '*';  // of results: the dims that kRest of the first input is

bool is_group(char dim) { return dim >= 'A' && dim <= 'Z'; }

/// One tensor of a pattern.
struct Term {
  std::string dims;  // letters, groups, kUnsharded, kRest, kAsInput
  bool added = false;
  bool optional = false;
  bool same = false;  // of a result: on all ranks
};

struct Parsed {
  std::vector<Term> inputs, outputs;
};

Term term_of(std::string_view text) {
  Term term;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+') {
      term.added = true;
    } else if (text[i] == '?') {
      term.optional = true;
    } else if (text[i] == '=') {
      term.same = true;
    } else if (text.substr(i, 2) == "..") {
      term.dims += kRest;
      ++i;
    } else {
      term.dims += text[i];
    }
  }
  return term;
}

Parsed parse(std::string_view text) {
  const size_t arrow = text.find("->");
  TESSERA_CHECK_VALUE(arrow != std::string_view::npos, "the pattern \"", std::string(text),
                      "\" has no \"->\": expected one as in \"mk,kn->mn\".");
  auto split = [](std::string_view list, std::vector<Term>& into) {
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      into.push_back(term_of(list.substr(begin, end - begin)));
      begin = end + 1;
    }
  };
  Parsed result;
  split(text.substr(0, arrow), result.inputs);
  split(text.substr(arrow + 2), result.outputs);
  return result;
}

/// Whether an argument is there, and neither false nor zero.
bool is_true(const OpCall& call, const std::string& name) {
  if (!call.has(name)) return false;
  const c10::IValue& value = call.value(name);
  return value.isBool() ? value.toBool() : !value.isScalar() || value.toScalar().toDouble() != 0;
}

bool has_value(const OpCall& call, const Pattern::EmptyResults& empty) {
  const c10::IValue& given = call.value(empty.argument);
  const auto* text = std::get_if<std::string>(&empty.value);
  return text ? given.toStringRef() == *text : given.toBool() == std::get<bool>(empty.value);
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

/// One alternative of a pattern, matched with a call.
class Match {
 public:
  Match(const Pattern& pattern, const Parsed& parsed, const OpCall& call)
      : pattern_(pattern), parsed_(parsed), call_(call) {}

  std::optional<Strategies> strategies() {
    if (!applies() || !find_terms() || !solve() || !measure()) return std::nullopt;
    if (pattern_.if_sharded && is_sharded_)
      return Strategies{{}, {}, {}, pattern_.if_sharded->compute, pattern_.if_sharded->writes};
    write_outputs();
    if (!write_added()) return std::nullopt;
    einsum_.contracted = pattern_.contracted;
    einsum_.keeps_all = pattern_.moves;
    if (pattern_.selects && call_.tensors[0].dtype() == at::kBool)
      einsum_.contracted = Partial(ReduceOp::any);
    einsum_.linear = linear_tensors(call_, pattern_.linear);
    for (const size_t i : c10::irange(call_.tensors.size())) {
      if (!pattern_.product || terms_[i]->added) continue;
      einsum_.linear.push_back(einsum_.added);
      einsum_.linear.back().push_back(i);
    }
    if (pattern_.keeps_strides) results_[0].strides = dense_strides(call_.tensors[0]);
    Strategies strategies{strategies_of(einsum_),
                          pattern_.is_view ? computed_results(call_) : std::move(results_)};
    for (Strategy& option : strategies.options) complete(option);
    return strategies;
  }

 private:
  /// Whether it is for such calls at all.
  bool applies() const {
    const auto excluded = [&](const Spec& spec) {
      return (pattern_.product && spec.dtype() == at::kBool) ||
             (pattern_.no_integers && at::isIntegralType(spec.dtype(), /*includeBool=*/true)) ||
             (pattern_.never_empty && spec.numel() == 0);
    };
    return std::none_of(call_.tensors.begin(), call_.tensors.end(), excluded) &&
           std::none_of(pattern_.unless.begin(), pattern_.unless.end(),
                        [&](const std::string& name) { return is_true(call_, name); });
  }

  /// Which term each of the call's tensors is.
  bool find_terms() {
    size_t next = 0;
    for (const c10::Argument& argument : call_.schema->arguments()) {
      if (!is_tensor(argument)) continue;
      const Term* term = next < parsed_.inputs.size() ? &parsed_.inputs[next] : nullptr;
      ++next;
      const size_t position = *call_.position(argument.name());
      const bool is_plain =
          call_.arguments[position].isTensor() && call_.arguments[position].toTensor().defined();
      if (call_.tensor(argument.name())) {
        if (!term) return false;
        terms_.push_back(term);
      } else if (is_plain) {
        // A scalar is broadcast with a group, and is the same on all ranks.
        const bool meets_group =
            term && !term->added && std::all_of(term->dims.begin(), term->dims.end(), is_group);
        if (!meets_group || call_.arguments[position].toTensor().dim() > 0) return false;
      } else if (term && !term->optional) {
        return false;
      }
    }
    einsum_.inputs.resize(terms_.size());
    lengths_.resize(terms_.size());
    return terms_.size() == call_.tensors.size();
  }

  int64_t inner() const {
    if (const auto* count = std::get_if<int64_t>(&pattern_.inner)) return *count;
    return static_cast<int64_t>(call_.integers(std::get<std::string>(pattern_.inner)).size());
  }

  /// How many dims each group is in each input.
  bool solve() {
    for (const size_t i : c10::irange(terms_.size())) {
      const std::string& dims = terms_[i]->dims;
      if (terms_[i]->added) continue;
      const bool has_rest = dims.find(kRest) != std::string::npos;
      const auto group = std::find_if(dims.begin(), dims.end(), is_group);
      int64_t free = call_.tensors[i].ndim();
      for (const char dim : dims) free -= !is_group(dim) && dim != kRest;
      if (free < 0 || (free > 0 && !has_rest && group == dims.end())) return false;
      auto& lengths = lengths_[i];
      if (group != dims.end()) {
        lengths[*group] = free;
        if (has_rest) lengths[*group] -= inner();
        if (lengths[*group] < 0) return false;
        free -= lengths[*group];
        const auto [longest, is_new] = longest_.emplace(*group, lengths[*group]);
        if (!is_new && (has_rest || !pattern_.broadcasts) && longest->second != lengths[*group]) return false;
        longest->second = std::max(longest->second, lengths[*group]);
      }
      if (has_rest) lengths[kRest] = free;
    }
    return true;
  }

  /// A letter of its own for each dim of a group, counted from the last.
  static char letter_of(char group, int64_t from_last) {
    // Control characters: patterns have none.
    return static_cast<char>(1 + from_last + (group == 'B' ? 0 : 12));
  }

  /// The letters and sizes of all inputs; sizes have to agree, those of groups but for broadcasting.
  bool measure() {
    for (const size_t i : c10::irange(terms_.size())) {
      if (terms_[i]->added) continue;
      int64_t dim = 0;
      for (const char each : terms_[i]->dims) {
        const int64_t count = is_group(each) || each == kRest ? lengths_[i][each] : 1;
        for (const int64_t k : c10::irange(count)) {
          const bool is_fixed = each == kUnsharded || each == kRest;
          const char letter = is_fixed ? kUnsharded : is_group(each) ? letter_of(each, count - 1 - k) : each;
          einsum_.inputs[i].push_back(letter);
          is_sharded_ |= is_fixed && is_sharded_on(call_.tensors[i], {dim});
          const int64_t size = call_.tensors[i].shape()[dim++];
          if (i == 0 && each == kRest) rest_.push_back(size);
          if (is_fixed) continue;
          names_[letter] = each;
          const auto [known, is_new] = sizes_.emplace(letter, size);
          if (is_new || known->second == size) continue;
          const bool broadcasts = pattern_.broadcasts && is_group(each) &&
                                  (size == 1 || known->second == 1) &&
                                  terms_[i]->dims.find(kRest) == std::string::npos;
          if (!broadcasts) return false;
          known->second = size == 1 ? known->second : size;
        }
      }
    }
    // What is broadcast is not sharded in the tensor that lacks it.
    for (const size_t i : c10::irange(terms_.size())) {
      for (const size_t d : c10::irange(einsum_.inputs[i].size())) {
        char& letter = einsum_.inputs[i][d];
        if (letter != kUnsharded && call_.tensors[i].shape()[static_cast<int64_t>(d)] != sizes_[letter])
          letter = kUnsharded;
      }
    }
    return true;
  }

  /// Whether the call does not ask for a result.
  bool is_empty(size_t result) const {
    return std::any_of(pattern_.empty_results.begin(), pattern_.empty_results.end(), [&](const auto& empty) {
      return std::find(empty.results.begin(), empty.results.end(), result) != empty.results.end() &&
             has_value(call_, empty);
    });
  }

  void write_outputs() {
    for (const size_t i : c10::irange(std::min(parsed_.outputs.size(), call_.schema->returns().size()))) {
      const Term& term = parsed_.outputs[i];
      Letters output;
      Result& result = results_.emplace_back();
      for (const char each : term.dims) {
        if (each == kRest) break;
        if (each == kAsInput) {
          output.append(rest_.size(), kUnsharded);
          result.shape.insert(result.shape.end(), rest_.begin(), rest_.end());
          break;
        }
        const int64_t count = is_group(each) ? longest_[each] : 1;
        for (const int64_t k : c10::irange(count)) {
          const char letter = is_group(each) ? letter_of(each, count - 1 - k) : each;
          const auto size = sizes_.find(letter);
          output.push_back(size == sizes_.end() ? kUnsharded : letter);
          result.shape.push_back(size == sizes_.end() ? kLocal : size->second);
        }
      }
      const bool empty = is_empty(i);
      if (empty) result.shape = {0};
      if (empty || term.same) {
        same_.push_back(i);
      } else {
        einsum_.outputs.push_back(std::move(output));
      }
    }
  }

  bool write_added() {
    for (const size_t i : c10::irange(terms_.size())) {
      if (!terms_[i]->added) continue;
      const Spec& spec = call_.tensors[i];
      const auto& shape = results_[0].shape;
      if (!at::is_expandable_to(spec.shape(), shape)) return false;
      einsum_.inputs[i] = broadcast(spec.shape(), shape, einsum_.outputs[0]);
      einsum_.added.push_back(i);
    }
    return true;
  }

  /// Of the inputs and results that the einsum does not know of, and whether shards must be contiguous.
  void complete(Strategy& option) const {
    for (const size_t i : c10::irange(option.inputs.size())) {
      if (!option.inputs[i].is_shard()) continue;
      const char name = names_.at(einsum_.inputs[i][option.inputs[i].dim()]);
      option.contiguous |= pattern_.contiguous.find(name) != std::string::npos;
    }
    const bool is_linear =
        std::ranges::none_of(option.inputs, [](const Placement& placement) { return placement.is_shard(); });
    for (size_t i = pattern_.linear_results; is_linear && i > 0 && i < option.outputs.size(); ++i)
      option.outputs[i] = Replicate();
    for (const size_t i : same_)
      option.outputs.insert(option.outputs.begin() + static_cast<std::ptrdiff_t>(i), Replicate());
    for (const std::string& name : pattern_.unread) {
      if (const auto index = call_.tensor(name)) option.inputs[*index] = Partial();
    }
  }

  const Pattern& pattern_;
  const Parsed& parsed_;
  const OpCall& call_;
  std::vector<const Term*> terms_;                // by tensor of the call
  std::vector<std::map<char, int64_t>> lengths_;  // likewise: of groups and the rest
  std::map<char, int64_t> sizes_, longest_;       // by letter; by group
  std::map<char, char> names_;                    // by letter: itself, or its group
  Shape rest_;                                    // the sizes of kRest of the first input
  bool is_sharded_ = false;                       // a dim that must not be
  std::vector<size_t> same_;                      // results
  Einsum einsum_;
  std::vector<Result> results_;
};

}  // namespace

std::optional<Strategies> strategies_of(const Pattern& pattern, const OpCall& call) {
  for (const std::string& letters : pattern.letters) {
    if (auto found = Match(pattern, parse(letters), call).strategies()) return found;
  }
  return std::nullopt;
}

}  // namespace tessera::rules
