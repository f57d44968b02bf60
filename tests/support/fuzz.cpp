#include "tests/support/fuzz.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <malloc.h>
#include <new>
#include <signal.h>
#include <sstream>
#include <stdexcept>
#include <time.h>
#include <unistd.h>
#include <utility>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

// Memory that is in use, and the most that was, by operator new. Beyond the limit there is none.
namespace {
std::atomic<size_t> memory_used{0};
std::atomic<size_t> memory_peak{0};
std::atomic<size_t> memory_limit{SIZE_MAX};

void* allocate(size_t size, size_t alignment) {
  if (size > memory_limit || memory_used + size > memory_limit) throw std::bad_alloc();
  void* memory = alignment > alignof(std::max_align_t)
                     ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                     : std::malloc(size);
  if (!memory) throw std::bad_alloc();
  const size_t used = memory_used += ::malloc_usable_size(memory);
  size_t peak = memory_peak;
  while (used > peak && !memory_peak.compare_exchange_weak(peak, used)) {
  }
  return memory;
}

void release(void* memory) {
  if (memory) memory_used -= ::malloc_usable_size(memory);
  std::free(memory);
}
}  // namespace

void* operator new(size_t size) { return allocate(size, 1); }
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return allocate(size, 1);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }

// An overflow that UndefinedBehaviorSanitizer sees is reported as a crash, with the input that made it.
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options();
const char* __ubsan_default_options() { return "abort_on_error=1"; }

namespace tessera::fuzz {

namespace {

constexpr int64_t kIntegers[] = {0,         1,           -1,        2,         127,       128,
                                 255,       256,         65535,     65536,     INT32_MAX, INT32_MIN,
                                 INT64_MAX, INT64_MIN,   1LL << 32, 1LL << 40, 1LL << 62, INT64_MAX - 7,
                                 100000001, -(1LL << 32)};

// ---- JSON

struct Span {
  size_t begin;
  size_t end;
};

/// Where values lie in a text, and members of objects; of text that is no JSON, whatever looks like it.
void find_json(std::string_view text, std::vector<Span>& values, std::vector<Span>& members) {
  struct Open {
    size_t begin;
    size_t key;
  };
  std::vector<Open> open;
  size_t key = std::string_view::npos;
  const auto add = [&](size_t begin, size_t end, size_t key_begin) {
    values.push_back({begin, end});
    if (key_begin != std::string_view::npos) members.push_back({key_begin, end});
  };
  for (size_t i = 0; i < text.size();) {
    const char letter = text[i];
    if (letter == '"') {
      const size_t begin = i++;
      while (i < text.size() && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
      i = std::min(i + 1, text.size());
      if (i < text.size() && text[i] == ':') {
        key = begin;
      } else {
        add(begin, i, std::exchange(key, std::string_view::npos));
      }
    } else if (letter == '{' || letter == '[') {
      open.push_back({i++, std::exchange(key, std::string_view::npos)});
    } else if (letter == '}' || letter == ']') {
      ++i;
      if (!open.empty()) {
        add(open.back().begin, i, open.back().key);
        open.pop_back();
      }
    } else if (std::isalnum(static_cast<unsigned char>(letter)) || letter == '-') {
      const size_t begin = i;
      while (i < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[i])) || std::strchr("+-.", text[i]))) {
        ++i;
      }
      add(begin, i, std::exchange(key, std::string_view::npos));
    } else {
      ++i;
    }
  }
}

std::string some_json(Random& random) {
  static const char* const kTexts[] = {"null",
                                       "true",
                                       "0.0",
                                       "-0",
                                       "1e308",
                                       "1e999",
                                       "-1.5",
                                       "18446744073709551615",
                                       "9223372036854775808",
                                       "123456789012345678901234567890",
                                       "\"\"",
                                       "\"..\"",
                                       "\"../x\"",
                                       "\"/x\"",
                                       "\"a\\u0000b\"",
                                       "\"\\ud800\"",
                                       "\"\xff\"",
                                       "[]",
                                       "{}",
                                       "[[]]",
                                       "{\"a\":1,\"a\":2}",
                                       "{\"$bytes\":\"0\"}",
                                       "{\"$dict\":{}}",
                                       "{\"$float\":\"nan\"}",
                                       "{\"$x\":1}",
                                       "\"float64\"",
                                       "\"complex128\"",
                                       "\"F4\"",
                                       "\"BOOL\"",
                                       "\"00000000\"",
                                       "[0,0]",
                                       "[-1]",
                                       "[1,1,1,1]"};
  if (random() % 3 == 0) return std::to_string(some_integer(random));
  if (random() % 20 == 0) {
    const size_t depth = size_t{1} << below(random, 14);
    return random() % 2 ? std::string(depth, '[') + std::string(depth, ']') : std::string(depth, '[');
  }
  return kTexts[below(random, std::size(kTexts))];
}

// ---- mutations of text

/// Words and numbers, and each sign by itself.
std::vector<Span> tokens_of(std::string_view text) {
  std::vector<Span> tokens;
  const auto is_word = [](char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) || letter == '_' || letter == '-';
  };
  for (size_t i = 0; i < text.size();) {
    const size_t begin = i++;
    if (text[begin] == ' ') continue;
    while (is_word(text[begin]) && i < text.size() && is_word(text[i])) ++i;
    tokens.push_back({begin, i});
  }
  return tokens;
}

std::string some_token(Random& random) {
  static const std::vector<std::string> kTokens = {"",
                                                   "nan",
                                                   "inf",
                                                   "-0",
                                                   "+1",
                                                   "01",
                                                   "0x10",
                                                   "1e999",
                                                   "1.5",
                                                   "9223372036854775808",
                                                   "-9223372036854775809",
                                                   " ",
                                                   "\t",
                                                   "\n",
                                                   "\"",
                                                   "\\",
                                                   "%s",
                                                   "\xff\xfe",
                                                   "é",
                                                   "/",
                                                   ":",
                                                   ",",
                                                   "=",
                                                   "(",
                                                   ")",
                                                   "[",
                                                   "]",
                                                   "{",
                                                   "-",
                                                   "_",
                                                   std::string(1, '\0')};
  if (random() % 3 == 0) return std::to_string(some_integer(random));
  if (random() % 20 == 0) return std::string(size_t{1} << below(random, 13), "a1-(["[below(random, 5)]);
  return one_of(kTokens, random);
}

// ---- running

constexpr size_t kMaxMemory = size_t{64} << 20;  // beyond what was in use before
constexpr double kMaxSeconds = 5;                // milliseconds are usual; sanitizers take more
constexpr unsigned kHangSeconds = 300;

// What runs, for the handler of signals.
char current_text[200];

void report_signal(int number) {
  const char* what = number == SIGALRM ? "hung" : "crashed";
  for (const char* part : {"\nfuzz: ", what, " at ", static_cast<const char*>(current_text), "\n"}) {
    if (::write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  ::signal(number, SIG_DFL);
  ::raise(number == SIGALRM ? SIGABRT : number);
}

void report_signals() {
  // A stack of its own, since deep recursion ends the other.
  static char stack[1 << 16];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  ::sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_handler = report_signal;
  action.sa_flags = SA_ONSTACK;
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) {
    ::sigaction(number, &action, nullptr);
  }
}

/// What can be printed of an input's beginning.
std::string readable(std::string_view input) {
  std::string text;
  for (const char letter : input.substr(0, 400)) {
    std::array<char, 8> escaped{};
    std::snprintf(escaped.data(), escaped.size(), "\\x%02x", static_cast<unsigned char>(letter));
    text += std::isprint(static_cast<unsigned char>(letter)) ? std::string(1, letter) : escaped.data();
  }
  return text;
}

/// A machine that is busy with something else does not count.
double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

bool run(const Target& target, uint64_t seed, uint64_t first, uint64_t inputs) {
  using Clock = std::chrono::steady_clock;
  std::snprintf(current_text, sizeof current_text, "--target %s, what must be accepted", target.name.c_str());
  for (const std::string& input : target.valid) {
    try {
      target.read(input);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "fuzz: %s: \"%s\" is refused: %s\n", target.name.c_str(), input.c_str(),
                   error.what());
      return false;
    }
  }
  uint64_t accepted = 0;
  double slowest = 0;
  size_t largest = 0;
  const auto start = Clock::now();
  for (uint64_t i = first; i < first + inputs; ++i) {
    std::snprintf(current_text, sizeof current_text, "--target %s --seed %llu --first %llu --inputs 1",
                  target.name.c_str(), static_cast<unsigned long long>(seed),
                  static_cast<unsigned long long>(i));
    std::seed_seq sequence{seed, i >> 32, i & 0xffffffff};
    Random random(sequence);
    const std::string input = target.make(random);
    const size_t before = memory_used;
    memory_peak = before;
    memory_limit = before + kMaxMemory;
    std::string wrong;
    ::alarm(kHangSeconds);
    const double begin = cpu_seconds();
    try {
      target.read(input);
      ++accepted;
    } catch (const c10::Error&) {
    } catch (const std::bad_alloc&) {
      wrong = "needs more memory than is allowed";
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    const double seconds = cpu_seconds() - begin;
    ::alarm(0);
    memory_limit = SIZE_MAX;
    slowest = std::max(slowest, seconds);
    largest = std::max<size_t>(largest, memory_peak - before);
    if (wrong.empty() && seconds > kMaxSeconds) wrong = "takes " + std::to_string(seconds) + " seconds";
    if (!wrong.empty()) {
      std::fprintf(stderr, "fuzz: %s: an input of %zu bytes: %s\n%s\n", current_text, input.size(),
                   wrong.c_str(), readable(input).c_str());
      return false;
    }
    if ((i - first + 1) % 100000 == 0 || i + 1 == first + inputs) {
      const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
      std::printf("%-16s %8llu inputs, %6llu accepted, %5.0f s, slowest %.0f ms, most memory %.1f MiB\n",
                  target.name.c_str(), static_cast<unsigned long long>(i - first + 1),
                  static_cast<unsigned long long>(accepted), elapsed, slowest * 1e3,
                  static_cast<double>(largest) / (1 << 20));
      std::fflush(stdout);
    }
  }
  return true;
}

}  // namespace

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

const std::string& one_of(const std::vector<std::string>& all, Random& random) {
  return all[below(random, all.size())];
}

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

std::vector<std::string> files_of(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.push_back(entry.path());
  std::sort(names.begin(), names.end());
  std::vector<std::string> files;
  for (const std::string& name : names) {
    std::ostringstream content;
    content << std::ifstream(name, std::ios::binary).rdbuf();
    files.push_back(content.str());
  }
  TORCH_CHECK(!files.empty(), "There is nothing in ", directory, ".");
  return files;
}

std::vector<std::string> lines_of(const std::string& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) lines.push_back(line);
  }
  TORCH_CHECK(!lines.empty(), "There is nothing in ", file, ".");
  return lines;
}

int64_t some_integer(Random& random) { return kIntegers[below(random, std::size(kIntegers))]; }

void mutate_bytes(std::string& text, const std::string& other, Random& random) {
  const size_t at = below(random, text.size() + 1);
  const size_t count = std::min(text.size() - at, size_t{1} << below(random, 10));
  switch (random() % 10) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
      break;
    case 1:
    case 2:
      if (at < text.size()) text[at] = static_cast<char>(random());
      break;
    case 3:
      text.insert(at, 1 + below(random, 8), static_cast<char>(random()));
      break;
    case 4:
      text.erase(at, count);
      break;
    case 5:
      text.insert(below(random, text.size() + 1), text.substr(at, count));
      break;
    case 6:
      text.resize(at);
      break;
    case 7: {
      const size_t from = below(random, other.size() + 1);
      text.insert(at, other.substr(from, size_t{1} << below(random, 10)));
      break;
    }
    case 8: {
      // An integer, in as many bytes as formats have.
      const int64_t value = some_integer(random);
      const size_t bytes = size_t{1} << below(random, 4);
      for (size_t i = 0; i < bytes && at + i < text.size(); ++i) {
        text[at + i] = static_cast<char>(value >> (8 * i));
      }
      break;
    }
    default: {
      // The same byte again and again: opcodes that push, open or repeat.
      const char byte = text.empty() ? '(' : text[below(random, text.size())];
      text.insert(at, size_t{1} << below(random, 13), byte);
    }
  }
}

void mutate_json(std::string& text, const std::string& other, Random& random) {
  std::vector<Span> values;
  std::vector<Span> members;
  find_json(text, values, members);
  if (values.empty()) return mutate_bytes(text, other, random);
  const Span value = values[below(random, values.size())];
  const auto replace = [&](Span span, const std::string& by) {
    text.replace(span.begin, span.end - span.begin, by);
  };
  const auto text_of = [](const std::string& of, Span span) {
    return of.substr(span.begin, span.end - span.begin);
  };
  switch (random() % 7) {
    case 0:
    case 1:
      replace(value, some_json(random));
      break;
    case 2:
      replace(value, text_of(text, values[below(random, values.size())]));
      break;
    case 3: {
      std::vector<Span> theirs;
      std::vector<Span> ignored;
      find_json(other, theirs, ignored);
      if (!theirs.empty()) replace(value, text_of(other, theirs[below(random, theirs.size())]));
      break;
    }
    case 4: {
      // A member once more, beside itself or elsewhere.
      if (members.empty()) break;
      const std::string member = text_of(text, members[below(random, members.size())]);
      text.insert(members[below(random, members.size())].end, "," + member);
      break;
    }
    case 5: {
      // A member less, perhaps with the comma after it.
      if (members.empty()) break;
      Span member = members[below(random, members.size())];
      if (member.end < text.size() && text[member.end] == ',') ++member.end;
      replace(member, "");
      break;
    }
    default:
      text.insert(value.end, "," + (random() % 2 ? text_of(text, value) : some_json(random)));
  }
}

void mutate_text(std::string& text, const std::string& other, Random& random) {
  const std::vector<Span> tokens = tokens_of(text);
  if (tokens.empty()) return mutate_bytes(text, other, random);
  const auto text_of = [](const std::string& of, Span span) {
    return of.substr(span.begin, span.end - span.begin);
  };
  const size_t at = below(random, tokens.size());
  const Span token = tokens[at];
  // Some tokens from this one.
  const size_t last = std::min(tokens.size() - 1, at + below(random, size_t{1} << below(random, 6)));
  const Span part{token.begin, tokens[last].end};
  const auto replace = [&](Span span, const std::string& by) {
    text.replace(span.begin, span.end - span.begin, by);
  };
  switch (random() % 9) {
    case 0:
    case 1: {
      // A number, if there is one.
      std::vector<Span> numbers;
      for (const Span each : tokens) {
        if (std::isdigit(static_cast<unsigned char>(text[each.end - 1]))) numbers.push_back(each);
      }
      if (!numbers.empty())
        replace(numbers[below(random, numbers.size())], std::to_string(some_integer(random)));
      break;
    }
    case 2:
      replace(token, some_token(random));
      break;
    case 3:
      text.insert(token.begin, some_token(random));
      break;
    case 4:
      replace(token, text_of(text, tokens[below(random, tokens.size())]));
      break;
    case 5: {
      const std::vector<Span> theirs = tokens_of(other);
      if (!theirs.empty()) replace(part, text_of(other, theirs[below(random, theirs.size())]));
      break;
    }
    case 6:
      replace(part, "");
      break;
    case 7:
      text.insert(tokens[below(random, tokens.size())].begin, text_of(text, part));
      break;
    default: {
      // The same part again and again: long lists, deep nesting.
      const std::string repeated = text_of(text, part) + (random() % 2 ? ", " : "");
      const size_t count = std::min(size_t{1} << below(random, 12), (size_t{1} << 15) / repeated.size() + 1);
      std::string many;
      for (size_t i = 0; i < count; ++i) many += repeated;
      text.insert(token.begin, many);
    }
  }
}

int run(int argc, char** argv, const char* description, const std::vector<Target>& targets) {
  std::string chosen;
  uint64_t inputs = 1'000'000;
  uint64_t seed = 0;
  uint64_t first = 0;
  std::string names;
  for (const Target& target : targets) names += (names.empty() ? "" : ", ") + target.name;
  CLI::App app(description);
  app.add_option("--target", chosen, "Which of " + names + "; else all");
  app.add_option("--inputs", inputs, "How many inputs for each")->capture_default_str();
  app.add_option("--seed", seed, "Other inputs")->capture_default_str();
  app.add_option("--first", first, "The number of the first input")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  report_signals();
  bool known = false;
  bool good = true;
  for (const Target& target : targets) {
    if (!chosen.empty() && chosen != target.name) continue;
    known = true;
    good = run(target, seed, first, inputs) && good;
  }
  if (!known) std::fprintf(stderr, "fuzz: there is no target '%s'\n", chosen.c_str());
  return good && known ? 0 : 1;
}

}  // namespace tessera::fuzz
