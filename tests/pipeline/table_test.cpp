// Schedules as tables: all of them run, cost what the documentation says, and broken ones are refused.

#include <tessera/pipeline/simulate.h>

#include <algorithm>
#include <functional>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using Kind = PipelineAction::Kind;
using testing::expect_error;

/// All tables of 1 to 8 ranks and 1 to 16 micro-batches; interleaved ones have 1 to 4 stages on each rank.
void for_all_tables(const std::function<void(const PipelineTable&, int64_t ranks, int64_t per_rank,
                                             int64_t microbatches)>& test) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t microbatches = 1; microbatches <= 16; ++microbatches) {
      test(PipelineTable::gpipe(ranks, microbatches), ranks, 1, microbatches);
      test(PipelineTable::one_f_one_b(ranks, microbatches), ranks, 1, microbatches);
      for (int64_t per_rank = 1; per_rank <= 4; ++per_rank)
        test(PipelineTable::interleaved_1f1b(ranks, per_rank, microbatches), ranks, per_rank, microbatches);
    }
  }
}

TEST(PipelineTable, AllCanRun) {
  int64_t tables = 0;
  for_all_tables([&](const PipelineTable& table, int64_t ranks, int64_t per_rank, int64_t microbatches) {
    EXPECT_NO_THROW(check(table)) << table;
    const PipelineTable forward = table.without_backward();
    EXPECT_NO_THROW(check(forward)) << forward;
    // Each rank computes each of its stages for each micro-batch, forward and backward, and nothing twice.
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto computed = std::count_if(table.actions[rank].begin(), table.actions[rank].end(),
                                          [](const PipelineAction& action) { return action.computes(); });
      EXPECT_EQ(computed, 2 * per_rank * microbatches) << table;
    }
    ++tables;
  });
  EXPECT_EQ(tables, 8 * 16 * 6);
}

/// The formulae of docs/pipeline.md, of p ranks with v stages each and m micro-batches.
TEST(PipelineTable, CostsWhatTheDocumentationSays) {
  for_all_tables([&](const PipelineTable& table, int64_t p, int64_t v, int64_t m) {
    const PipelineSimulation simulation = simulate(table);
    const int64_t time = 2 * (v * std::max(m, p) + std::min(m, p) - 1);
    EXPECT_EQ(simulation.time, time) << table;
    EXPECT_DOUBLE_EQ(simulation.bubble(), 1 - 2.0 * static_cast<double>(m * v) / static_cast<double>(time))
        << table;
    if (m >= p) {
      EXPECT_NEAR(simulation.bubble(), static_cast<double>(p - 1) / static_cast<double>(m * v + p - 1), 1e-12)
          << table;
    }
    const int64_t rounds = std::max<int64_t>(1, m / p), largest = (m + rounds - 1) / rounds;
    for (int64_t rank = 0; rank < p; ++rank) {
      const int64_t live = table.name == "GPipe" ? m
                           : v == 1              ? std::min(m, p - rank)
                                    : std::min(m * v, (v - 1) * largest + 2 * (p - 1 - rank) + 1);
      EXPECT_EQ(simulation.peak_live[rank], live) << "rank " << rank << " of " << table;
    }
  });
}

/// Backward takes twice as long as forward, as it does: 1F1B is never slower than GPipe.
TEST(PipelineTable, TakesAsLongWithOtherTimes) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t microbatches = 1; microbatches <= 16; ++microbatches) {
      const auto gpipe = simulate(PipelineTable::gpipe(ranks, microbatches), {.forward = 1, .backward = 2});
      const auto one =
          simulate(PipelineTable::one_f_one_b(ranks, microbatches), {.forward = 1, .backward = 2});
      EXPECT_EQ(gpipe.time, 3 * (microbatches + ranks - 1));
      EXPECT_EQ(one.time, gpipe.time);
    }
  }
}

TEST(PipelineTable, Prints) {
  EXPECT_EQ(c10::str(PipelineTable::one_f_one_b(2, 2)),
            "1F1B: 2 ranks, 2 stages, 2 micro-batches\n"
            "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
            "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
  EXPECT_EQ(grid(PipelineTable::one_f_one_b(2, 3)),
            "1F1B on 2 ranks, 3 micro-batches: time 8, bubble 25 %, activations of at most 2 1\n"
            "time    0  1  2  3  4  5  6  7\n"
            "rank 0  F0 F1 .  B0 F2 B1 .  B2\n"
            "rank 1  .  F0 B0 F1 B1 F2 B2 .");
  EXPECT_EQ(grid(PipelineTable::one_f_one_b(4, 6)),  // that of docs/pipeline.md
            "1F1B on 4 ranks, 6 micro-batches: time 18, bubble 33.3 %, activations of at most 4 3 2 1\n"
            "time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17\n"
            "rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5\n"
            "rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .\n"
            "rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .\n"
            "rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .");
  EXPECT_EQ(grid(PipelineTable::gpipe(2, 2), {.forward = 1, .backward = 2}),
            "GPipe on 2 ranks, 2 micro-batches: time 9, bubble 33.3 %, activations of at most 2 2\n"
            "time    0  1  2  3  4  5  6  7  8\n"
            "rank 0  F0 F1 .  .  .  B0 =  B1 =\n"
            "rank 1  .  F0 F1 B0 =  B1 =  .  .");
  EXPECT_EQ(grid(PipelineTable::interleaved_1f1b(2, 2, 2).without_backward()),
            "Interleaved1F1B on 2 ranks, 2 micro-batches: time 5, bubble 20 %\n"
            "time    0   1   2   3   4\n"
            "rank 0  0F0 0F1 2F0 2F1 .\n"
            "rank 1  .   1F0 1F1 3F0 3F1");
}

TEST(PipelineTable, ActionsAreText) {
  for (int kind = 0; kind < 6; ++kind) {
    const PipelineAction action{static_cast<Kind>(kind), 12, 305};
    EXPECT_EQ(PipelineAction::parse(action.str()), action);
  }
  for (const std::string text : {"", "1", "F", "1F", "F0", "1X0", "1SEND_F", "1F0 ", " 1F0", "-1F0", "1F-0",
                                 "1FF0", "99999999999999999999F0"})
    expect_error<c10::ValueError>([&] { PipelineAction::parse(text); }, {"\"" + text + "\" is no action"});
}

/// A table of one's own: stages that go forth and back over the ranks, so that the last one is beside the first.
TEST(PipelineTable, TakesStagesInAnyPlace) {
  PipelineTable table;
  table.name = "V";
  table.microbatches = 2;
  table.rank_of_stage = {0, 1, 1, 0};
  table.actions.resize(2);
  for (const int64_t stage : {0, 1, 2, 3}) {
    for (const int64_t microbatch : {0, 1})
      table.actions[table.rank_of_stage[stage]].push_back({Kind::forward, stage, microbatch});
  }
  for (const int64_t stage : {3, 2, 1, 0}) {
    for (const int64_t microbatch : {0, 1})
      table.actions[table.rank_of_stage[stage]].push_back({Kind::backward, stage, microbatch});
  }
  table = table.with_messages();
  EXPECT_NO_THROW(check(table)) << table;
  EXPECT_EQ(table.stages_of(0), (std::vector<int64_t>{0, 3}));
  // Nothing is sent from stage 1 to stage 2.
  for (const auto& actions : table.actions) {
    for (const PipelineAction& action : actions)
      EXPECT_TRUE(action.computes() || action.stage + action.other_stage() != 1 + 2) << action;
  }
}

size_t position(const PipelineTable& table, int64_t rank, const PipelineAction& action) {
  const auto& actions = table.actions[rank];
  return std::find(actions.begin(), actions.end(), action) - actions.begin();
}

void swap(PipelineTable& table, int64_t rank, const PipelineAction& a, const PipelineAction& b) {
  std::swap(table.actions[rank].at(position(table, rank, a)),
            table.actions[rank].at(position(table, rank, b)));
}

void erase(PipelineTable& table, int64_t rank, const PipelineAction& action) {
  table.actions[rank].erase(table.actions[rank].begin() +
                            static_cast<std::ptrdiff_t>(position(table, rank, action)));
}

void expect_refused(PipelineTable table, const std::function<void(PipelineTable&)>& damage,
                    const std::string& text) {
  damage(table);
  expect_error<c10::ValueError>([&] { check(table); }, {"\"" + table.name + "\" cannot run", text});
  expect_error<c10::ValueError>([&] { simulate(table); }, {text});
}

TEST(PipelineTable, RefusesWhatIsIncomplete) {
  const auto table = PipelineTable::one_f_one_b(2, 3);
  auto refused = [&](const auto& damage, const std::string& text) { expect_refused(table, damage, text); };
  refused([](auto& t) { erase(t, 1, {Kind::send_backward, 1, 2}); }, "rank 1 never does 1SEND_B2");
  refused([](auto& t) { erase(t, 0, {Kind::backward, 0, 2}); }, "rank 0 never does 0B2");
  refused([](auto& t) { t.actions[0].push_back({Kind::forward, 0, 1}); }, "rank 0 does 0F1 twice");
  refused(
      [](auto& t) {
        t.actions[0].push_back({Kind::forward, 1, 1});
      },
      "does 1F1, but stage 1 is on rank 1");
  refused([](auto& t) { t.actions[0].push_back({Kind::forward, 2, 1}); }, "does 2F1, but there are 2 stages");
  refused(
      [](auto& t) {
        t.actions[0].push_back({Kind::forward, 0, 3});
      },
      "does 0F3, but there are 3 micro-batches");
  refused([](auto& t) { t.actions[0].push_back({Kind::forward, -1, 0}); }, "but there are 2 stages");
  refused(
      [](auto& t) {
        t.actions[0].push_back({Kind::send_backward, 0, 0});
      },
      "does 0SEND_B0, but nothing goes that way");
  refused([](auto& t) { t.has_backward = false; }, "but the schedule has no backward");
  refused([](auto& t) { t.rank_of_stage[1] = 2; }, "stage 1 is on rank 2, but there are 2 ranks");
  refused([](auto& t) { t.microbatches = 0; }, "0 micro-batches, but needs one of each");
}

TEST(PipelineTable, RefusesWhatComesTooEarly) {
  const auto table = PipelineTable::one_f_one_b(2, 3);
  auto refused = [&](const auto& damage, const std::string& text) { expect_refused(table, damage, text); };
  refused(
      [](auto& t) {
        swap(t, 0, {Kind::forward, 0, 0}, {Kind::backward, 0, 0});
      },
      "rank 0 does 0B0 before it has done 0F0");
  refused(
      [](auto& t) {
        swap(t, 1, {Kind::forward, 1, 0}, {Kind::recv_forward, 1, 0});
      },
      "rank 1 does 1F0 before it has done 1RECV_F0");
  refused(
      [](auto& t) {
        swap(t, 0, {Kind::recv_backward, 0, 1}, {Kind::backward, 0, 1});
      },
      "rank 0 does 0B1 before it has done 0RECV_B1");
  const auto interleaved = PipelineTable::interleaved_1f1b(1, 2, 1);
  expect_refused(
      interleaved,
      [](auto& t) {
        swap(t, 0, {Kind::forward, 0, 0}, {Kind::forward, 1, 0});
      },
      "rank 0 does 1F0 before it has done 0F0");
}

TEST(PipelineTable, RefusesMessagesInAnotherOrder) {
  expect_refused(
      PipelineTable::gpipe(2, 3),
      [](auto& t) {
        // Stage 1 would take micro-batch 1 for micro-batch 0.
        std::erase_if(t.actions[1], [](const auto& action) { return action.kind == Kind::recv_forward; });
        t.actions[1].insert(
            t.actions[1].begin(),
            {{Kind::recv_forward, 1, 1}, {Kind::recv_forward, 1, 0}, {Kind::recv_forward, 1, 2}});
      },
      "rank 1 expects 1RECV_F1 as message 0 from rank 0, which sends 0SEND_F0 then");
}

/// Where both neighbours send first, and each waits until the other receives.
TEST(PipelineTable, RefusesDeadlocks) {
  expect_refused(
      PipelineTable::one_f_one_b(2, 3),
      [](auto& t) {
        erase(t, 1, {Kind::recv_forward, 1, 1});
        const auto after = static_cast<std::ptrdiff_t>(position(t, 1, {Kind::send_backward, 1, 0})) + 1;
        t.actions[1].insert(t.actions[1].begin() + after, {Kind::recv_forward, 1, 1});
      },
      "deadlock if both ends of a message wait for each other:\n"
      "  rank 0 waits in 0SEND_F1 for rank 1\n"
      "  rank 1 waits in 1SEND_B0 for rank 0");
  // Every rank is fine by itself, but backward is never reached: each waits for a gradient first.
  expect_refused(
      PipelineTable::one_f_one_b(2, 2),
      [](auto& t) {
        erase(t, 0, {Kind::recv_backward, 0, 0});
        t.actions[0].insert(t.actions[0].begin(), {Kind::recv_backward, 0, 0});
      },
      "rank 0 waits in 0RECV_B0 for rank 1");
}

TEST(PipelineTable, RefusesWhatWaitsForItself) {
  PipelineTable table;
  table.name = "circle";
  table.microbatches = 2;
  table.rank_of_stage = {0, 1};
  table.has_backward = false;
  table.actions = {{{Kind::forward, 0, 0}}, {{Kind::forward, 1, 0}, {Kind::forward, 1, 1}}};
  expect_error<c10::ValueError>([&] { table.with_messages(); },
                                {"\"circle\"", "rank 1 never gets what it needs for 1F1"});
  expect_error<c10::ValueError>([] { PipelineTable::gpipe(0, 1); }, {"at least one rank"});
  expect_error<c10::ValueError>([] { PipelineTable::interleaved_1f1b(2, 0, 1); }, {"at least one rank"});
  expect_error<c10::ValueError>([] { simulate(PipelineTable::gpipe(2, 2), {.forward = 0}); },
                                {"times are positive"});
}

/// Two actions of one rank in the other order: what is accepted still runs to the end, if messages wait for both ends.
TEST(PipelineTable, NeverAcceptsWhatStops) {
  std::mt19937 random(20);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    PipelineTable table =
        i % 2 ? PipelineTable::one_f_one_b(1 + random() % 4, 1 + random() % 5)
              : PipelineTable::interleaved_1f1b(1 + random() % 3, 1 + random() % 3, 1 + random() % 5);
    auto& actions = table.actions[random() % table.actions.size()];
    const size_t at = random() % actions.size();
    if (at + 1 == actions.size()) continue;
    std::swap(actions[at], actions[at + 1]);
    try {
      check(table);
    } catch (const c10::ValueError&) {
      ++refused;
      continue;
    }
    ++accepted;
    // The oracle: pick any rank that can go on, at random, until all are done.
    std::vector<size_t> next(table.actions.size(), 0);
    auto at_of = [&](int64_t rank) -> const PipelineAction* {
      return next[rank] < table.actions[rank].size() ? &table.actions[rank][next[rank]] : nullptr;
    };
    for (int idle = 0; idle < 10000; ++idle) {
      const auto rank = static_cast<int64_t>(random() % table.actions.size());
      const PipelineAction* action = at_of(rank);
      if (!action) continue;
      if (action->computes()) {
        ++next[rank];
        continue;
      }
      const int64_t other = table.rank_of_stage[action->other_stage()];
      const PipelineAction* there = at_of(other);
      if (there && !there->computes() && there->stage == action->other_stage() &&
          action->stage == there->other_stage() && there->microbatch == action->microbatch &&
          there->sends() != action->sends()) {
        ++next[rank];
        ++next[other];
      }
    }
    for (size_t rank = 0; rank < next.size(); ++rank)
      EXPECT_EQ(next[rank], table.actions[rank].size()) << table;
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace tessera
