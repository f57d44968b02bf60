#include <tessera/bytes.h>
#include <tessera/comm/monitor_messages.h>

#include <algorithm>
#include <cstring>
#include <functional>

namespace tessera {

std::string to_bytes(const Presence& presence) {
  ByteWriter out;
  out.put(std::string_view(presence.process));
  out.put(std::string_view(presence.address));
  out.put(std::string_view(presence.failure));
  out.put(presence.port);
  return out.take();
}

Presence presence_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "presence of a rank");
  Presence presence;
  presence.process = in.get_text();
  presence.address = in.get_text();
  presence.failure = in.get_text();
  presence.port = in.get<uint16_t>();
  in.check(in.done());
  return presence;
}

std::string to_bytes(const Hello& hello) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(NewsKind::Hello));
  out.put(std::string_view(hello.token));
  out.put(hello.rank);
  out.put(std::string_view(hello.process));
  return out.take();
}

Hello hello_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "hello of a monitor");
  in.check(in.get<uint8_t>() == static_cast<uint8_t>(NewsKind::Hello));
  Hello hello;
  hello.token = in.get_text();
  hello.rank = in.get<int64_t>();
  hello.process = in.get_text();
  in.check(in.done());
  return hello;
}

std::string to_bytes(const News& news) {
  const bool is_free_text = news.kind == NewsKind::Failed || news.kind == NewsKind::Died;
  ByteWriter out;
  out.put(static_cast<uint8_t>(news.kind));
  out.put(news.by);
  out.put(news.number);
  out.put(news.of);
  out.put(std::string_view(news.text).substr(0, is_free_text ? kMaxText : std::string::npos));
  return out.take();
}

News news_from_bytes(std::string_view bytes, int64_t size) {
  ByteReader in(bytes, "message between monitors");
  const auto kind = in.get<uint8_t>();
  in.check(kind >= static_cast<uint8_t>(NewsKind::Left) &&
           kind <= static_cast<uint8_t>(NewsKind::Invitation));
  News news;
  news.kind = static_cast<NewsKind>(kind);
  news.by = in.get<int64_t>();
  news.number = in.get<uint64_t>();
  news.of = in.get<int64_t>();
  news.text = in.get_text();
  in.check(in.done() && news.by >= 0 && news.by < size && news.of >= 0 && news.of < size);
  return news;
}

std::string to_bytes(const Answer& answer) {
  ByteWriter out;
  out.put(answer.question);
  out.put(std::string_view(answer.state));
  return out.take();
}

Answer answer_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "answer of a monitor");
  Answer answer;
  answer.question = in.get<uint64_t>();
  answer.state = in.get_text();
  in.check(in.done());
  return answer;
}

std::string to_bytes(const Survivors& survivors) {
  ByteWriter out;
  out.put_list(survivors.ranks);
  out.put(std::string_view(survivors.invitation));
  return out.take();
}

Survivors survivors_from_bytes(std::string_view bytes, int64_t size) {
  ByteReader in(bytes, "invitation of ranks that are left");
  Survivors survivors;
  survivors.ranks = in.get_list();
  survivors.invitation = in.get_text();
  const auto& ranks = survivors.ranks;
  const bool ascends = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  in.check(in.done() && ascends && !ranks.empty() && ranks.front() >= 0 && ranks.back() < size);
  return survivors;
}

std::string framed(const std::string& message) {
  const auto length = static_cast<uint32_t>(message.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + message;
}

std::optional<std::string> take_framed(std::string& come, size_t longest) {
  uint32_t length = 0;
  if (come.size() < sizeof length) return std::nullopt;
  std::memcpy(&length, come.data(), sizeof length);
  TESSERA_CHECK_VALUE(length <= longest, "A message between monitors has ", length, " bytes, but at most ",
                      longest, " are allowed.");
  if (come.size() - sizeof length < length) return std::nullopt;
  std::string message = come.substr(sizeof length, length);
  come.erase(0, sizeof length + length);
  return message;
}

}  // namespace tessera
