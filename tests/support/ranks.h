#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/spawn.h"
#include "tests/support/errors.h"

/// Tests that need real processes: a body is registered by name, and `spawn_ranks` runs this test program
/// again, once per rank, to do nothing but that body. Expectations in it fail the test with the output of the
/// process.
namespace tessera::testing {

struct RankBody {
  RankBody(const std::string& name, std::function<void()> body);
};

/// RANK_BODY(name) { ... } runs in each of the processes of spawn_ranks("name", count).
#define RANK_BODY(name)                                                               \
  static void rank_body_##name();                                                     \
  static const ::tessera::testing::RankBody register_##name(#name, rank_body_##name); \
  static void rank_body_##name()

std::vector<support::ProcessResult> spawn_ranks(const std::string& body, int64_t count,
                                                support::SpawnOptions options = {});

/// For spawn_ranks: processes whose world has this backend, unless they name another.
support::SpawnOptions over(const std::string& backend);

/// For spawn_ranks: rank 0 keeps the store, as without torchrun.
support::SpawnOptions without_agent();

/// Runs them over gloo and over shared memory, and expects all of them to end well.
void expect_ok_over_processes(const std::string& body, int64_t count);

/// Expects all of them to have ended well.
void expect_ok(const std::vector<support::ProcessResult>& results);

}  // namespace tessera::testing
