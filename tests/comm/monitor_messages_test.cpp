#include <tessera/comm/monitor_messages.h>

#include <numeric>

#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;

TEST(MonitorMessages, CutTextsOfUsersAndNothingElse) {
  News news{NewsKind::Failed, 1, 2, 3, std::string(1 << 20, 'x')};
  EXPECT_EQ(news_from_bytes(to_bytes(news), 4).text.size(), kMaxText);

  // As many ranks as a message can name, which is more than kMaxText bytes.
  Survivors survivors;
  survivors.ranks.resize(100000);
  std::iota(survivors.ranks.begin(), survivors.ranks.end(), 0);
  survivors.invitation = "here";
  news = {NewsKind::Invitation, 1, 2, 3, to_bytes(survivors)};
  std::string come = framed(to_bytes(news));
  const auto message = take_framed(come, kMaxMessage);
  ASSERT_TRUE(message);
  const Survivors read = survivors_from_bytes(news_from_bytes(*message, 100000).text, 100000);
  EXPECT_EQ(read.ranks, survivors.ranks);
  EXPECT_EQ(read.invitation, "here");
}

TEST(MonitorMessages, NameRanksOfTheWorld) {
  for (const std::vector<int64_t>& ranks :
       {std::vector<int64_t>{}, {-1, 0}, {0, 4}, {1, 0}, {2, 2}, {INT64_MIN, INT64_MAX}}) {
    const std::string bytes = to_bytes(Survivors{ranks, ""});
    expect_error<c10::ValueError>([&] { survivors_from_bytes(bytes, 4); }, {"invitation"});
  }
  for (const auto& [by, of] : {std::pair<int64_t, int64_t>{4, 0}, {-1, 0}, {0, 4}, {0, INT64_MIN}}) {
    const std::string bytes = to_bytes(News{NewsKind::Left, by, 1, of, ""});
    expect_error<c10::ValueError>([&] { news_from_bytes(bytes, 4); }, {"message between monitors"});
  }
}

TEST(MonitorMessages, ComeWhole) {
  std::string come;
  std::vector<std::string> taken;
  for (const char letter : framed("one") + framed("") + framed("three")) {
    come += letter;
    if (auto message = take_framed(come, 5)) taken.push_back(*message);
  }
  EXPECT_EQ(taken, (std::vector<std::string>{"one", "", "three"}));
  EXPECT_EQ(come, "");
  come = framed("longer").substr(0, 4);
  expect_error<c10::ValueError>([&] { take_framed(come, 5); }, {"6 bytes", "at most 5"});
}

}  // namespace
}  // namespace tessera
