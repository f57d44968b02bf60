// Prints docs/operators.md: every operator with a sharding rule of its own, by family, and its rule.

#include <tessera/rules/rule.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

int main() {
  // By family, then by rule: its operators, in order.
  std::map<std::string, std::map<std::string, std::vector<std::string>>> families;
  size_t count = 0;
  for (const auto& [op, rule] : tessera::rules::all_rules()) {
    families[rule->family][rule->text()].push_back(op.starts_with("aten::") ? op.substr(6) : op);
    ++count;
  }
  std::cout << "# Operators and their sharding rules\n\n"
               "Made by `make operators` from the tables in `tessera/rules`; do not edit.\n\n"
            << count
            << " operators have a rule of their own. In-place operators have that of the one that "
               "returns a new\n"
               "tensor; `out=` operators compute as that one does and copy the result. All others that "
               "libtorch calls\n"
               "pointwise are cut alike in all tensors. Everything else is computed on replicas.\n\n"
               "Letters are dims: dims with the same letter are cut alike, one that the result lacks leaves "
               "a partial sum,\n"
               "and `.` is whole. That everything may be replicated goes without saying.\n";
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
