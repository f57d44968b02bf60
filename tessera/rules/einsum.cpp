#include <tessera/error.h>
#include <tessera/rules/einsum.h>

#include <algorithm>
#include <iterator>
#include <string>

namespace tessera::rules {

namespace {

std::optional<int64_t> position(const Letters& letters, char letter) {
  const auto found = std::find(letters.begin(), letters.end(), letter);
  if (found == letters.end()) return std::nullopt;
  return found - letters.begin();
}

bool includes(const std::vector<size_t>& indices, size_t index) {
  return std::find(indices.begin(), indices.end(), index) != indices.end();
}

}  // namespace

Letters letters(std::string_view text) { return Letters(text.begin(), text.end()); }

Letters identity(size_t ndim) {
  Letters result;
  for (size_t i = 0; i < ndim; ++i) result.push_back(static_cast<char>('a' + i));
  return result;
}

Einsum einsum(std::string_view text) {
  Einsum result;
  const size_t arrow = text.find("->");
  TESSERA_CHECK_VALUE(arrow != std::string_view::npos, "the einsum \"", std::string(text),
                      "\" has no \"->\": expected one as in \"mk,kn->mn\".");
  auto split = [](std::string_view list, std::vector<Letters>& into) {
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(',', begin), list.size());
      into.push_back(letters(list.substr(begin, end - begin)));
      begin = end + 1;
    }
  };
  split(text.substr(0, arrow), result.inputs);
  split(text.substr(arrow + 2), result.outputs);
  return result;
}

std::optional<Einsum> from_equation(std::string_view equation, c10::IntArrayRef ndims) {
  constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
                             kDots = "...";
  std::string text;
  std::copy_if(equation.begin(), equation.end(), std::back_inserter(text), [](char c) { return c != ' '; });
  const size_t arrow = std::min(text.find("->"), text.size());
  std::vector<std::string> terms{""};
  for (const char letter : text.substr(0, arrow)) {
    if (letter == ',') {
      terms.emplace_back();
    } else {
      terms.back() += letter;
    }
  }
  if (terms.size() != ndims.size()) return std::nullopt;

  // Dims that "..." stands for in a term; letters for as many as there are at the most.
  std::vector<int64_t> hidden;
  int64_t most = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    const bool has_dots = terms[i].find(kDots) != std::string::npos;
    const auto named = static_cast<int64_t>(terms[i].size() - (has_dots ? kDots.size() : 0));
    hidden.push_back(has_dots ? ndims[i] - named : -1);
    if (named > ndims[i] || (!has_dots && named != ndims[i])) return std::nullopt;
    most = std::max(most, hidden.back());
  }
  std::string dots;
  for (const char letter : kAlphabet) {
    if (static_cast<int64_t>(dots.size()) < most && text.find(letter) == std::string::npos) dots += letter;
  }
  if (static_cast<int64_t>(dots.size()) < most) return std::nullopt;
  auto named = [&](std::string term, int64_t count) {
    const size_t at = term.find(kDots);
    if (at != std::string::npos) term.replace(at, kDots.size(), dots.substr(dots.size() - count));
    return term;
  };

  Einsum result;
  std::string all;
  for (size_t i = 0; i < terms.size(); ++i) {
    result.inputs.push_back(letters(named(terms[i], std::max<int64_t>(hidden[i], 0))));
    all.append(result.inputs.back().begin(), result.inputs.back().end());
  }
  std::string output = dots;
  if (arrow < text.size()) {
    output = named(text.substr(arrow + 2), most);
  } else {
    std::string once;
    for (const char letter : kAlphabet) {
      if (dots.find(letter) == std::string::npos && std::count(all.begin(), all.end(), letter) == 1)
        once += letter;
    }
    std::sort(once.begin(), once.end());
    output += once;
  }
  result.outputs.push_back(letters(output));
  auto is_plain = [&](const Letters& term) {
    return std::all_of(term.begin(), term.end(), [&](char letter) {
      return kAlphabet.find(letter) != std::string::npos &&
             std::count(term.begin(), term.end(), letter) == 1 && all.find(letter) != std::string::npos;
    });
  };
  if (!std::all_of(result.inputs.begin(), result.inputs.end(), is_plain) || !is_plain(result.outputs[0]))
    return std::nullopt;
  return result;
}

std::optional<std::map<char, int64_t>> letter_sizes(const std::vector<Letters>& tensors,
                                                    const std::vector<c10::IntArrayRef>& shapes) {
  std::map<char, int64_t> sizes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t d = 0; d < tensors[i].size(); ++d) {
      if (sizes.emplace(tensors[i][d], shapes[i][d]).first->second != shapes[i][d]) return std::nullopt;
    }
  }
  return sizes;
}

std::vector<Strategy> strategies_of(const Einsum& einsum) {
  const size_t count = einsum.inputs.size();
  std::vector<Strategy> result;
  std::string order, known;
  for (const Letters& input : einsum.inputs) {
    for (const char letter : input) {
      if (letter != kUnsharded && known.find(letter) == std::string::npos) known += letter;
    }
  }
  auto collect = [&](const Letters& of) {
    for (const char letter : of) {
      if (known.find(letter) != std::string::npos && order.find(letter) == std::string::npos) order += letter;
    }
  };
  for (const Letters& output : einsum.outputs) collect(output);
  for (const Letters& input : einsum.inputs) collect(input);

  for (const char letter : order) {
    Strategy strategy;
    strategy.contiguous = einsum.contiguous;
    bool contracted = false;
    for (const Letters& output : einsum.outputs) {
      const auto dim = position(output, letter);
      contracted |= !dim;
      strategy.outputs.push_back(dim ? Shard(*dim) : einsum.contracted.value_or(Replicate()));
    }
    if (contracted && !einsum.contracted) continue;
    for (size_t i = 0; i < count; ++i) {
      const auto dim = position(einsum.inputs[i], letter);
      const bool adds = contracted && includes(einsum.added, i);
      strategy.inputs.push_back(dim ? Shard(*dim) : adds ? *einsum.contracted : Replicate());
    }
    result.push_back(std::move(strategy));
  }
  auto add_partial = [&](const Placement& partial, const auto& is_partial) {
    Strategy strategy;
    for (size_t i = 0; i < count; ++i) strategy.inputs.push_back(is_partial(i) ? partial : Replicate());
    strategy.outputs.assign(einsum.outputs.size(), partial);
    result.push_back(std::move(strategy));
  };
  for (const auto& set : einsum.linear) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
      add_partial(Partial(op), [&](size_t i) { return includes(set, i); });
  }
  for (const ReduceOp op : einsum.kept) add_partial(Partial(op), [](size_t) { return true; });
  if (einsum.keeps_all) {
    add_partial(Partial(), [](size_t) { return true; });
    result.back().any_partial = true;
  }
  return result;
}

}  // namespace tessera::rules
