// Prints what a rank holds, for compare_with_torch.py. Reads one case a line: the global shape, the mesh
// shape, the placements and the coordinate; prints the local shape and the global offset.
//   10 3;4;[S(0)];3  ->  1 3;9 0
#include <tessera/placement/layout.h>
#include <tessera/placement/text.h>

#include <iostream>
#include <sstream>
#include <string>

namespace {

c10::DimVector numbers(const std::string& text) {
  std::istringstream in(text);
  c10::DimVector out;
  for (int64_t number = 0; in >> number;) out.push_back(number);
  return out;
}

void print(c10::IntArrayRef numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) std::cout << (i == 0 ? "" : " ") << numbers[i];
}

}  // namespace

int main() {
  std::string shape, mesh_shape, placements, coordinate;
  while (std::getline(std::cin, shape, ';') && std::getline(std::cin, mesh_shape, ';') &&
         std::getline(std::cin, placements, ';') && std::getline(std::cin, coordinate)) {
    const auto box = tessera::local_shape_and_global_offset(
        numbers(shape), numbers(mesh_shape), tessera::parse_placements(placements), {}, numbers(coordinate));
    print(box.shape);
    std::cout << ';';
    print(box.offset);
    std::cout << '\n';
  }
}
