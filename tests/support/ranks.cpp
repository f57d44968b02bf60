#include "tests/support/ranks.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstring>
#include <map>
#include <netinet/in.h>
#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>

namespace tessera::testing {

namespace {

std::map<std::string, std::function<void()>>& bodies() {
  static std::map<std::string, std::function<void()>> instance;
  return instance;
}

uint16_t free_port() {
  const int probe = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (::bind(probe, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(probe, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("there is no free port");
  ::close(probe);
  return ntohs(address.sin_port);
}

constexpr const char* kFlag = "--rank-body=";

/// What follows `flag` in each argument that starts with it.
std::vector<std::string> values_of(const std::string& flag, int argc, char** argv) {
  std::vector<std::string> values;
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], flag.c_str(), flag.size()) == 0) values.push_back(argv[i] + flag.size());
  return values;
}

/// The filter that selects the tests defined in `files`, without those that `filter` leaves out.
std::string filter_of_files(const std::vector<std::string>& files, const std::string& filter) {
  std::string names;
  const auto& program = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const auto& suite = *program.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k) {
      const auto& test = *suite.GetTestInfo(k);
      const std::string file = test.file();
      const bool wanted =
          std::any_of(files.begin(), files.end(), [&](const std::string& f) { return file.ends_with(f); });
      if (wanted) names += std::string(suite.name()) + "." + test.name() + ":";
    }
  }
  if (names.empty()) throw std::invalid_argument("No test is defined in the files of --file");
  const size_t left_out = filter.find('-');
  return left_out == std::string::npos ? names : names + filter.substr(left_out);
}

}  // namespace

RankBody::RankBody(const std::string& name, std::function<void()> body) { bodies()[name] = std::move(body); }

std::vector<support::ProcessResult> spawn_ranks(const std::string& body, int64_t count,
                                                support::SpawnOptions options) {
#ifdef __SANITIZE_THREAD__
  // gloo is not compiled with ThreadSanitizer, which so takes what it does for races.
  options.environment.emplace_back("TSAN_OPTIONS", "report_bugs=0");
#endif
  return support::spawn(count, {support::this_program(), kFlag + body}, options);
}

support::SpawnOptions over(const std::string& backend) {
  support::SpawnOptions options;
  options.environment = {{"TESSERA_BACKEND", backend}};
  return options;
}

support::SpawnOptions without_agent() {
  support::SpawnOptions options;
  options.environment = {{"TORCHELASTIC_USE_AGENT_STORE", "False"},
                         {"MASTER_PORT", std::to_string(free_port())}};
  return options;
}

void expect_ok_over_processes(const std::string& body, int64_t count) {
  for (const char* backend : {"gloo", "shm"}) {
    SCOPED_TRACE(backend);
    expect_ok(spawn_ranks(body, count, over(backend)));
  }
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
  using tessera::testing::values_of;
  const auto files = values_of("--file=", argc, argv);
  if (!files.empty())
    ::testing::GTEST_FLAG(filter) = tessera::testing::filter_of_files(files, ::testing::GTEST_FLAG(filter));
  for (const std::string& name : values_of(tessera::testing::kFlag, argc, argv)) {
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
