// Prints docs/operators.md: every operator with a sharding rule of its own, by family, and its rule.

#include <tessera/rules/rule.h>

#include <iostream>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace {

using tessera::rules::ByFunction;

/// The rule for people; of a function, why it is one.
std::string text_of(const tessera::rules::Rule& rule) {
  const auto* function = std::get_if<ByFunction>(&rule.form);
  return function ? rule.text() + " *(a function: " + function->why + ")*" : rule.text();
}

}  // namespace

int main() {
  // By family, then by rule: its operators, in order.
  std::map<std::string, std::map<std::string, std::vector<std::string>>> families;
  size_t count = 0, functions = 0;
  for (const auto& [op, rule] : tessera::rules::all_rules()) {
    families[rule->family][text_of(*rule)].push_back(op.starts_with("aten::") ? op.substr(6) : op);
    ++count;
    functions += std::holds_alternative<ByFunction>(rule->form);
  }
  std::cout
      << "# Operators and their sharding rules\n\n"
         "Made by `make operators` from the tables in `tessera/ops`; do not edit.\n\n"
      << count << " operators have a rule of their own. The rules of " << count - functions
      << " of them are data, from which this table is printed;\nthose of the other " << functions
      << " are functions, and say why. In-place operators have the rule of the one that returns a new\n"
         "tensor. `out=` operators compute as that one does and copy the result. In all other operators "
         "that libtorch\n"
         "calls pointwise, all tensors are sharded alike. Everything else takes the replicated fallback.\n\n"
         "Letters are dims: dims with the same letter are sharded alike, and a result that lacks a sharded "
         "letter is a\n"
         "partial sum. A capital stands for any number of dims, `.` for an unsharded dim, `..` for any "
         "number of them, `?`\n"
         "for a tensor that may be left out, `+` for one that is added. Everything may also be replicated. "
         "[rules.md](rules.md)\n"
         "explains the forms.\n";
  for (const auto& [family, rules] : families) {
    std::cout << "\n## " << family << "\n\n| rule | operators |\n|---|---|\n";
    for (const auto& [text, ops] : rules) {
      std::cout << "| " << text << " |";
      for (const std::string& op : ops) std::cout << " `" << op << '`';
      std::cout << " |\n";
    }
  }
  return 0;
}
