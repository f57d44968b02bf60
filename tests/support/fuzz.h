#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

/// What programs have in common that try a reader with inputs that nobody would write. A reader may read an input or refuse it
/// with a c10::Error, soon and with little memory. Whatever else happens is a fault, and ends the program.
///
///   program [--target NAME] [--inputs N] [--seed S] [--first I]
///
/// Input I of seed S is always the same: what fails is printed with the options that run it again alone.
///
/// Memory is counted by an operator new of this program's own, so that all it links is counted.
namespace tessera::fuzz {

using Random = std::mt19937_64;

struct Target {
  std::string name;
  /// What has to be accepted as it is.
  std::vector<std::string> valid;
  /// An input.
  std::function<std::string(Random& random)> make;
  /// Throws c10::Error for what it does not accept. Whatever it accepts must hold what it promises (`require`).
  std::function<void(std::string_view input)> read;
};

/// The program: its exit code.
int run(int argc, char** argv, const char* description, const std::vector<Target>& targets);

/// Throws what no reader may.
void require(bool condition, const char* what);

/// The files of a directory, and the lines of a file that are not empty.
std::vector<std::string> files_of(const std::string& directory);
std::vector<std::string> lines_of(const std::string& file);

// ---- to make inputs

/// A number from 0, below `limit`.
size_t below(Random& random, size_t limit);
/// One of those at which formats and sums change: 0, -1, 255, 2^31, the largest, ...
int64_t some_integer(Random& random);
const std::string& one_of(const std::vector<std::string>& all, Random& random);

/// Each changes `text` once. `other` is another input, to take from.
void mutate_bytes(std::string& text, const std::string& other, Random& random);
/// Values replaced, members repeated and left out, deep nesting.
void mutate_json(std::string& text, const std::string& other, Random& random);
/// Of words, numbers and signs: numbers replaced by extremes, words exchanged, parts repeated and left out, deep nesting.
void mutate_text(std::string& text, const std::string& other, Random& random);

}  // namespace tessera::fuzz
