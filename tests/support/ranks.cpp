#include "tests/support/ranks.h"

#include <cstring>
#include <iostream>
#include <map>

namespace tessera::testing {

namespace {

std::map<std::string, std::function<void()>>& bodies() {
  static std::map<std::string, std::function<void()>> instance;
  return instance;
}

constexpr const char* kFlag = "--rank-body=";

}  // namespace

RankBody::RankBody(const std::string& name, std::function<void()> body) { bodies()[name] = std::move(body); }

std::vector<support::ProcessResult> spawn_ranks(const std::string& body, int64_t count,
                                                support::SpawnOptions options) {
  return support::spawn(count, {support::this_program(), kFlag + body}, options);
}

void expect_ok(const std::vector<support::ProcessResult>& results) {
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(results[rank].ok()) << "rank " << rank << " ended with code " << results[rank].exit_code
                                    << ", signal " << results[rank].signal << ":\n"
                                    << results[rank].output;
  }
}

}  // namespace tessera::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], tessera::testing::kFlag, std::strlen(tessera::testing::kFlag)) != 0) continue;
    const std::string name = argv[i] + std::strlen(tessera::testing::kFlag);
    ::testing::RegisterTest("RankBody", name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [name]() -> ::testing::Test* {
                              class Body : public ::testing::Test {
                               public:
                                explicit Body(std::string name) : name_(std::move(name)) {}
                                void TestBody() override { tessera::testing::bodies().at(name_)(); }

                               private:
                                std::string name_;
                              };
                              return new Body(name);
                            });
    ::testing::GTEST_FLAG(filter) = "RankBody." + name;
  }
  return RUN_ALL_TESTS();
}
