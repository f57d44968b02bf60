#include <tessera/comm/asked.h>
#include <tessera/error.h>

#include <algorithm>
#include <vector>

namespace tessera::comm {

namespace {

constexpr size_t kShownLetters = 600;
constexpr size_t kShownRanks = 8;
constexpr size_t kShownCalls = 4;

/// The text, or, of a long one, its beginning and where it begins to differ from the other.
std::string shown(const std::string& text, const std::string& other) {
  if (text.size() <= kShownLetters) return text;
  const auto ends = std::mismatch(text.begin(), text.end(), other.begin(), other.end());
  const auto differs = static_cast<size_t>(ends.first - text.begin());
  constexpr size_t kHead = 100, kBefore = 50;
  if (differs < kShownLetters - kBefore) return text.substr(0, kShownLetters) + " ...";
  return text.substr(0, kHead) + " ... " + text.substr(differs - kBefore, kShownLetters - kHead) + " ...";
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kShownRanks); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kShownRanks) text += c10::str(" and ", ranks.size() - kShownRanks, " more");
  return text;
}

/// "\n  ranks 0, 2 called ...\n  rank 1 called ..." of those that do not refuse.
std::string sides(std::span<const Asked> asked, std::span<const int64_t> members) {
  std::vector<std::pair<const Asked*, std::vector<int64_t>>> by_call;
  for (size_t i = 0; i < asked.size(); ++i) {
    if (asked[i].kind != ErrorKind::none) continue;
    auto known = std::find_if(by_call.begin(), by_call.end(),
                              [&](const auto& item) { return item.first->call == asked[i].call; });
    if (known == by_call.end()) known = by_call.insert(by_call.end(), {&asked[i], {}});
    known->second.push_back(members[i]);
  }
  std::string text;
  for (size_t i = 0; i < std::min(by_call.size(), kShownCalls); ++i) {
    const Asked& other = *by_call[i == 0 ? by_call.size() - 1 : 0].first;
    text += c10::str("\n  ", ranks_text(by_call[i].second), " called ",
                     shown(by_call[i].first->call, other.call));
  }
  if (by_call.size() > kShownCalls)
    text += c10::str("\n  and ", by_call.size() - kShownCalls, " other calls");
  return text;
}

}  // namespace

void check_asked_alike(std::span<const Asked> asked, std::span<const int64_t> members) {
  for (size_t i = 0; i < asked.size(); ++i) {
    if (asked[i].kind == ErrorKind::none) continue;
    throw_error(asked[i].kind, c10::str("Rank ", members[i], " refuses ", asked[i].call,
                                        ", so no rank can go on: ", asked[i].refusal, sides(asked, members)));
  }
  for (size_t i = 1; i < asked.size(); ++i) {
    TESSERA_CHECK_VALUE(asked[i].call == asked[0].call,
                        "All ranks of a group must make this call together, with the same arguments, but:",
                        sides(asked, members),
                        "\nGive the same on all ranks. Nothing was moved, and the group can be used again.");
  }
}

}  // namespace tessera::comm
