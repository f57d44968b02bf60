#include <tessera/error.h>
#include <tessera/rules/einsum.h>

#include <algorithm>
#include <string>

namespace tessera::rules {

namespace {

std::optional<int64_t> position(const Letters& letters, char letter) {
  const auto found = std::find(letters.begin(), letters.end(), letter);
  if (found == letters.end()) return std::nullopt;
  return found - letters.begin();
}

bool contains(const std::vector<size_t>& numbers, size_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
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

std::vector<Row> rows(const Einsum& einsum) {
  const size_t count = einsum.inputs.size();
  std::vector<Row> result;
  std::string order, known;
  for (const Letters& input : einsum.inputs) {
    for (const char letter : input) {
      if (letter != kWhole && known.find(letter) == std::string::npos) known += letter;
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
    Row row;
    row.ranges = einsum.ranges;
    bool contracted = false;
    for (const Letters& output : einsum.outputs) {
      const auto dim = position(output, letter);
      contracted |= !dim;
      row.outputs.push_back(dim ? Shard(*dim) : einsum.contracted.value_or(Replicate()));
    }
    if (contracted && !einsum.contracted) continue;
    for (size_t i = 0; i < count; ++i) {
      const auto dim = position(einsum.inputs[i], letter);
      const bool adds = contracted && contains(einsum.added, i);
      row.inputs.push_back(dim ? Shard(*dim) : adds ? *einsum.contracted : Replicate());
    }
    result.push_back(std::move(row));
  }
  auto add_partial = [&](const Placement& partial, const auto& is_partial) {
    Row row;
    for (size_t i = 0; i < count; ++i) row.inputs.push_back(is_partial(i) ? partial : Replicate());
    row.outputs.assign(einsum.outputs.size(), partial);
    result.push_back(std::move(row));
  };
  for (const auto& set : einsum.linear) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
      add_partial(Partial(op), [&](size_t i) { return contains(set, i); });
  }
  for (const ReduceOp op : einsum.kept) add_partial(Partial(op), [](size_t) { return true; });
  if (einsum.keeps_all) {
    add_partial(Partial(), [](size_t) { return true; });
    result.back().any_partial = true;
  }
  return result;
}

}  // namespace tessera::rules
