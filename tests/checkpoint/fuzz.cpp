// Tries what the readers of checkpoints do with files that nobody would write: seeded mutations of real ones, of bytes
// and of what they mean. A reader may read an input or refuse it with a c10::Error, soon and with little memory.
// See tests/support/fuzz.h for its options.

#include "tests/support/fuzz.h"

#include <tessera/checkpoint/catalog_bytes.h>
#include <tessera/checkpoint/dcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/native.h>
#include <tessera/checkpoint/pickle.h>
#include <tessera/checkpoint/safetensors.h>
#include <tessera/checkpoint/save_plan.h>
#include <tessera/checkpoint/torch_archive.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {
namespace {

using fuzz::below;
using fuzz::mutate_bytes;
using fuzz::mutate_json;
using fuzz::Random;
using fuzz::require;

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

Piece global(const std::string& file) { return {"", file, ""}; }
std::string unchanged(const Piece& piece) { return piece.text; }

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
    {"metadata", false, global, unchanged, read_metadata},
    {"archive", false, global, unchanged, read_archive},
    {"pickle", false, global, unchanged, read_pickle},
};

// ---- what ranks send each other

void read_catalog(std::string_view bytes) {
  const Catalog catalog = catalog_from_bytes(bytes);
  require(to_bytes(catalog_from_bytes(to_bytes(catalog))) == to_bytes(catalog),
          "an accepted catalog is another one when written");
  check(catalog);
}

void read_description(std::string_view bytes) {
  const Description description = description_from_bytes(bytes);
  require(description_from_bytes(to_bytes(description)) == description,
          "an accepted description is another one when written");
  plan_save({description, description});
}

std::string some_description() {
  Description description;
  description["weight"] = {{std::string("weight")},
                           true,
                           {4, 6},
                           c10::ScalarType::Float,
                           {{{0, 0}, {4, 3}}, {{0, 3}, {4, 3}}},
                           ""};
  description["big"] = {{std::string("big")},      true, {1 << 20, 16}, c10::ScalarType::Half,
                        {{{0, 0}, {1 << 20, 16}}}, ""};
  description["steps/0"] = {
      {std::string("steps"), int64_t{0}}, false, {}, c10::ScalarType::Float, {}, "[1,\"a\",null]"};
  return to_bytes(description);
}

fuzz::Target message_target(const char* name, std::vector<std::string> valid,
                            void (*read)(std::string_view)) {
  auto make = [valid](Random& random) {
    std::string bytes = fuzz::one_of(valid, random);
    for (size_t count = 1 + below(random, 4); count > 0; --count)
      mutate_bytes(bytes, fuzz::one_of(valid, random), random);
    return bytes;
  };
  return {name, valid, make, read};
}

// ---- running

struct Corpus {
  std::vector<std::string> files;
  std::vector<Piece> pieces;
};

Corpus read_corpus(const Reader& reader) {
  Corpus corpus;
  corpus.files = fuzz::files_of(std::string(TESSERA_CHECKPOINT_CORPUS) + "/" + reader.name);
  for (const std::string& file : corpus.files) corpus.pieces.push_back(reader.split(file));
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

}  // namespace
}  // namespace tessera::checkpoint

int main(int argc, char** argv) {
  using namespace tessera::checkpoint;
  std::vector<tessera::fuzz::Target> targets;
  for (const Reader& reader : kReaders) {
    const Corpus corpus = read_corpus(reader);
    targets.push_back({reader.name, corpus.files,
                       [&reader, corpus](Random& random) { return make_input(reader, corpus, random); },
                       reader.read});
  }
  std::vector<std::string> catalogs;
  for (const std::string& file : read_corpus(kReaders[0]).files)
    catalogs.push_back(to_bytes(parse_index(file, "index.json")));
  targets.push_back(message_target("catalog", catalogs, read_catalog));
  targets.push_back(message_target("description", {some_description()}, read_description));
  return tessera::fuzz::run(argc, argv, "Tries the readers of checkpoints with mutated files.", targets);
}
