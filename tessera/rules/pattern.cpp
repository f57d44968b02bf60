#include <tessera/error.h>
#include <tessera/rules/pattern.h>
#include <tessera/rules/shape.h>

#include <algorithm>
#include <map>

#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

constexpr char kRest = '~';  // stands for ".."

bool is_group(char dim) { return dim >= 'A' && dim <= 'Z'; }

/// One tensor of a pattern.
struct Term {
  std::string dims;  // letters, groups, kUnsharded, kRest
  bool added = false;
  bool optional = false;
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

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

/// One alternative of a pattern, matched with a call.
class Match {
 public:
  Match(const Pattern& pattern, const Parsed& parsed, const OpCall& call)
      : pattern_(pattern), parsed_(parsed), call_(call) {}

  std::optional<Strategies> strategies() {
    if (!find_terms() || !solve() || !measure() || !write_outputs() || !write_added()) return std::nullopt;
    const bool excluded = std::any_of(call_.tensors.begin(), call_.tensors.end(), [&](const Spec& spec) {
      return (pattern_.product && spec.dtype() == at::kBool) ||
             (pattern_.no_integers && at::isIntegralType(spec.dtype(), /*includeBool=*/true));
    });
    if (excluded) return std::nullopt;
    einsum_.contracted = pattern_.contracted;
    einsum_.contiguous = pattern_.contiguous;
    einsum_.linear = linear_tensors(call_, pattern_.linear);
    for (const size_t i : c10::irange(call_.tensors.size())) {
      if (!pattern_.product || terms_[i]->added) continue;
      einsum_.linear.push_back(einsum_.added);
      einsum_.linear.back().push_back(i);
    }
    return Strategies{strategies_of(einsum_), std::move(results_)};
  }

 private:
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
      } else if (is_plain || !term || !term->optional) {
        if (is_plain || term) return false;
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

  /// How many dims each group is in each input. Groups of an input with `..` besides are those of the first.
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
        if (has_rest) lengths[*group] = i == 0 ? free - inner() : lengths_[0][*group];
        free -= lengths[*group];
        if (lengths[*group] < 0 || free < 0) return false;
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
          const int64_t size = call_.tensors[i].shape()[dim++];
          if (is_fixed) continue;
          const auto [known, is_new] = sizes_.emplace(letter, size);
          if (is_new || known->second == size) continue;
          const bool broadcasts = is_group(each) && terms_[i]->dims.find(kRest) == std::string::npos &&
                                  (size == 1 || known->second == 1);
          if (!broadcasts) return false;
          known->second = size == 1 ? known->second : size;
        }
        if (is_group(each)) longest_[each] = std::max(longest_[each], count);
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

  bool write_outputs() {
    for (const Term& term : parsed_.outputs) {
      Letters& output = einsum_.outputs.emplace_back();
      Result& result = results_.emplace_back();
      for (const char each : term.dims) {
        if (each == kRest) break;
        const int64_t count = is_group(each) ? longest_[each] : 1;
        for (const int64_t k : c10::irange(count)) {
          const char letter = is_group(each) ? letter_of(each, count - 1 - k) : each;
          const auto size = sizes_.find(letter);
          output.push_back(size == sizes_.end() ? kUnsharded : letter);
          result.shape.push_back(size == sizes_.end() ? kLocal : size->second);
        }
      }
    }
    return true;
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

  const Pattern& pattern_;
  const Parsed& parsed_;
  const OpCall& call_;
  std::vector<const Term*> terms_;                // by tensor of the call
  std::vector<std::map<char, int64_t>> lengths_;  // likewise: of groups and the rest
  std::map<char, int64_t> sizes_, longest_;       // by letter; by group
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
