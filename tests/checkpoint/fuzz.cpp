// Tries what the readers of checkpoints do with files that nobody would write: seeded mutations of real ones, of bytes
// and of what they mean. A reader may read an input or refuse it with a c10::Error, soon and with little memory.
//
//   checkpoint_fuzz [--reader NAME] [--inputs N] [--seed S] [--first I]
//
// Input I of seed S is always the same: what fails is printed with the options that run it again alone.

#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/torch_archive.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <malloc.h>
#include <new>
#include <random>
#include <signal.h>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>

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
void* operator new(size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }

namespace tessera::checkpoint {
namespace {

using Random = std::mt19937_64;

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

/// A part of a file that is mutated, and what makes a file of it again.
struct Piece {
  std::string before;
  std::string text;
  std::string after;
};

struct Reader {
  const char* name;  // also the folder of its corpus
  bool is_json;
  /// The part of a file of the corpus that is to be mutated.
  Piece (*split)(const std::string& file);
  /// Puts in order what would else hide the mutation: lengths and checksums.
  std::string (*join)(const Piece& piece);
  /// Throws c10::Error for what it does not accept. Whatever it accepts must hold what it promises.
  void (*read)(std::string_view bytes);
};

Piece whole(const std::string& file) { return {"", file, ""}; }
std::string unchanged(const Piece& piece) { return piece.text; }

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

// ---- the readers

Piece split_index(const std::string& file) { return {"", file.substr(0, file.rfind("\n\"crc32c\"")), ""}; }
std::string join_index(const Piece& piece) { return seal_index(piece.text); }
void read_index(std::string_view bytes) {
  const Catalog catalog = parse_index(bytes, "index.json");
  // What was accepted can be written, and is the same when read again.
  const std::string text = write_index(catalog);
  require(write_index(parse_index(text, "index.json")) == text,
          "an accepted index is another one when written");
}

int64_t header_length(std::string_view bytes) {
  uint64_t length = 0;
  if (bytes.size() >= sizeof length) std::memcpy(&length, bytes.data(), sizeof length);
  return static_cast<int64_t>(std::min<uint64_t>(length, bytes.size() < 8 ? 0 : bytes.size() - 8));
}
Piece split_safetensors(const std::string& file) {
  const auto length = static_cast<size_t>(header_length(file));
  return {"", file.substr(8, length), file.substr(8 + length)};
}
std::string join_safetensors(const Piece& piece) {
  const uint64_t length = piece.text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + piece.text + piece.after;
}
void read_safetensors(std::string_view bytes) {
  const std::string_view header =
      bytes.size() < 8 ? bytes : bytes.substr(8, static_cast<size_t>(header_length(bytes)));
  const auto size = static_cast<int64_t>(bytes.size());
  for (const SafetensorsEntry& entry : parse_safetensors_header(header, size, "a.safetensors").tensors) {
    require(entry.offset >= 0 && entry.length >= 0 && entry.offset <= size - entry.length,
            "an accepted tensor lies outside of its file");
  }
}

void read_metadata(std::string_view bytes) {
  const DCPMetadata metadata = parse_dcp_metadata(bytes, ".metadata");
  const std::string again = write_dcp_metadata(metadata.catalog, metadata.values);
  require(parse_dcp_metadata(again, ".metadata").catalog.leaves.size() == metadata.catalog.leaves.size(),
          "accepted metadata is another one when written");
}

void read_archive(std::string_view bytes) {
  // The tensors of the corpus are of this kind; values are read in the same way up to their pickle.
  try {
    const ByteRange range = find_torch_payload(bytes, c10::ScalarType::Float, {2, 3}, "an archive");
    require(range.length == 24 && range.offset >= 0 &&
                range.offset <= static_cast<int64_t>(bytes.size()) - range.length,
            "accepted elements lie outside of their archive");
  } catch (const c10::Error&) {
    read_torch_value(bytes, "an archive");
  }
}

void read_pickle(std::string_view bytes) {
  pickle::to_value(pickle::Pickle(bytes, pickle::value_dialect(), "a pickle"));
}

constexpr Reader kReaders[] = {
    {"index", true, split_index, join_index, read_index},
    {"safetensors", true, split_safetensors, join_safetensors, read_safetensors},
    {"metadata", false, whole, unchanged, read_metadata},
    {"archive", false, whole, unchanged, read_archive},
    {"pickle", false, whole, unchanged, read_pickle},
};

// ---- mutations of bytes

constexpr int64_t kIntegers[] = {0,         1,           -1,        2,         127,       128,
                                 255,       256,         65535,     65536,     INT32_MAX, INT32_MIN,
                                 INT64_MAX, INT64_MIN,   1LL << 32, 1LL << 40, 1LL << 62, INT64_MAX - 7,
                                 100000001, -(1LL << 32)};

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

// ---- mutations of JSON

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

// ---- running

struct Corpus {
  std::vector<std::string> files;
  std::vector<Piece> pieces;
};

Corpus read_corpus(const Reader& reader) {
  Corpus corpus;
  const std::string directory = std::string(TESSERA_CHECKPOINT_CORPUS) + "/" + reader.name;
  for (const std::string& name : list_directory(directory)) {
    corpus.files.push_back(read_file(directory + "/" + name, 1 << 20));
    corpus.pieces.push_back(reader.split(corpus.files.back()));
  }
  TORCH_CHECK(!corpus.files.empty(), "There is nothing in ", directory, ".");
  return corpus;
}

std::string make_input(const Reader& reader, const Corpus& corpus, Random& random) {
  const size_t chosen = below(random, corpus.pieces.size());
  const std::string& other = corpus.pieces[below(random, corpus.pieces.size())].text;
  // Now and then without the repair of lengths and checksums.
  if (random() % 16 == 0) {
    std::string file = corpus.files[chosen];
    mutate_bytes(file, other, random);
    return file;
  }
  Piece piece = corpus.pieces[chosen];
  for (size_t count = 1 + below(random, 4); count > 0; --count) {
    if (reader.is_json && random() % 4 != 0) {
      mutate_json(piece.text, other, random);
    } else {
      mutate_bytes(piece.text, other, random);
    }
  }
  return reader.join(piece);
}

constexpr size_t kMaxMemory = size_t{64} << 20;  // beyond what was in use before
constexpr double kMaxSeconds = 5;  // milliseconds are usual; sanitizers and a busy machine take more
constexpr unsigned kHangSeconds = 60;

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

bool run(const Reader& reader, uint64_t seed, uint64_t first, uint64_t inputs) {
  using Clock = std::chrono::steady_clock;
  const Corpus corpus = read_corpus(reader);
  for (const std::string& file : corpus.files) reader.read(file);
  uint64_t accepted = 0;
  double slowest = 0;
  size_t largest = 0;
  const auto start = Clock::now();
  for (uint64_t i = first; i < first + inputs; ++i) {
    std::snprintf(current_text, sizeof current_text, "--reader %s --seed %llu --first %llu --inputs 1",
                  reader.name, static_cast<unsigned long long>(seed), static_cast<unsigned long long>(i));
    std::seed_seq sequence{seed, i >> 32, i & 0xffffffff};
    Random random(sequence);
    const std::string input = make_input(reader, corpus, random);
    const size_t before = memory_used;
    memory_peak = before;
    memory_limit = before + kMaxMemory;
    std::string wrong;
    ::alarm(kHangSeconds);
    const auto begin = Clock::now();
    try {
      reader.read(input);
      ++accepted;
    } catch (const c10::Error&) {
    } catch (const std::bad_alloc&) {
      wrong = "needs more memory than is allowed";
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    ::alarm(0);
    memory_limit = SIZE_MAX;
    slowest = std::max(slowest, seconds);
    largest = std::max<size_t>(largest, memory_peak - before);
    if (wrong.empty() && seconds > kMaxSeconds) wrong = "takes " + std::to_string(seconds) + " seconds";
    if (!wrong.empty()) {
      std::fprintf(stderr, "fuzz: %s: an input of %zu bytes %s\n", current_text, input.size(), wrong.c_str());
      return false;
    }
    if ((i - first + 1) % 100000 == 0 || i + 1 == first + inputs) {
      const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
      std::printf("%-12s %8llu inputs, %6llu accepted, %5.0f s, slowest %.0f ms, most memory %.1f MiB\n",
                  reader.name, static_cast<unsigned long long>(i - first + 1),
                  static_cast<unsigned long long>(accepted), elapsed, slowest * 1e3,
                  static_cast<double>(largest) / (1 << 20));
      std::fflush(stdout);
    }
  }
  return true;
}

}  // namespace
}  // namespace tessera::checkpoint

int main(int argc, char** argv) {
  using namespace tessera::checkpoint;
  std::string chosen;
  uint64_t inputs = 1'000'000;
  uint64_t seed = 0;
  uint64_t first = 0;
  CLI::App app("Tries the readers of checkpoints with mutated files.");
  app.add_option("--reader", chosen, "Which reader; else all");
  app.add_option("--inputs", inputs, "How many inputs for each")->capture_default_str();
  app.add_option("--seed", seed, "Other inputs")->capture_default_str();
  app.add_option("--first", first, "The number of the first input")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  report_signals();
  bool known = false;
  bool good = true;
  for (const Reader& reader : kReaders) {
    if (!chosen.empty() && chosen != reader.name) continue;
    known = true;
    good = run(reader, seed, first, inputs) && good;
  }
  if (!known) std::fprintf(stderr, "fuzz: there is no reader '%s'\n", chosen.c_str());
  return good && known ? 0 : 1;
}
