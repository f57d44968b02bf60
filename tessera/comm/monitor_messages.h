#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// What the monitors of ranks say to each other, as bytes. What comes from a socket or from the store is not trusted: whatever
/// is read here throws c10::ValueError for bytes that are none, and needs no more memory than they have.
namespace tessera {

/// The longest message; who has not said hello yet gets less.
inline constexpr size_t kMaxMessage = 1 << 20;
inline constexpr size_t kMaxHello = 64 << 10;
/// Texts of users may be of any length; so much of them is sent.
inline constexpr size_t kMaxText = 64 << 10;

/// What a rank leaves in the store.
struct Presence {
  std::string process;
  std::string address;
  uint16_t port = 0;         // 0: it has left
  std::string failure = {};  // of the world, as it knew when it left
};
std::string to_bytes(const Presence& presence);
Presence presence_from_bytes(std::string_view bytes);

enum class NewsKind : uint8_t { Hello, Left, Failed, Died, Ask, Answer, Ready, Invitation };

/// The first message on a connection.
struct Hello {
  std::string token;
  int64_t rank = 0;
  std::string process;
};
std::string to_bytes(const Hello& hello);
Hello hello_from_bytes(std::string_view bytes);

/// All others: news of a rank, which goes to all. `by` made it, and gave it a number.
struct News {
  NewsKind kind = NewsKind::Left;
  int64_t by = 0;
  uint64_t number = 0;
  int64_t of = 0;  // Ask and Answer: the rank that asked
  std::string text;
};
std::string to_bytes(const News& news);
/// Its ranks are those of a world of that size.
News news_from_bytes(std::string_view bytes, int64_t size);

/// The text of an Answer.
struct Answer {
  uint64_t question = 0;
  std::string state;  // a RankState
};
std::string to_bytes(const Answer& answer);
Answer answer_from_bytes(std::string_view bytes);

/// The text of an Invitation: where the ranks that are left, in ascending order, go on.
struct Survivors {
  std::vector<int64_t> ranks;
  std::string invitation;
};
std::string to_bytes(const Survivors& survivors);
/// Of a world of that size.
Survivors survivors_from_bytes(std::string_view bytes, int64_t size);

/// A message as it goes over a connection, after its length.
std::string framed(const std::string& message);
/// Takes the next message out of what has come; nothing if it is not all there. Throws if it is longer than `longest`.
std::optional<std::string> take_framed(std::string& come, size_t longest);

}  // namespace tessera
