#include <tessera/error.h>
#include <tessera/pipeline/simulate.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <utility>

namespace tessera {

namespace {

using Kind = PipelineAction::Kind;

/// A set of actions, or a number for each.
class ByAction {
 public:
  explicit ByAction(const PipelineTable& table)
      : stages_(table.stages()),
        microbatches_(table.microbatches),
        values_(6 * stages_ * microbatches_, -1) {}

  int64_t& operator[](const PipelineAction& action) {
    return values_[(static_cast<int64_t>(action.kind) * stages_ + action.stage) * microbatches_ +
                   action.microbatch];
  }
  bool has(const PipelineAction& action) { return (*this)[action] >= 0; }

 private:
  const int64_t stages_, microbatches_;
  std::vector<int64_t> values_;
};

bool on_one_rank(const PipelineTable& table, int64_t stage, int64_t other) {
  return table.rank_of_stage[stage] == table.rank_of_stage[other];
}

/// What must be done before `action`, whatever the messages: by the table's forwards and backwards alone.
std::vector<PipelineAction> computed_before(const PipelineTable& table, const PipelineAction& action) {
  const auto& [kind, stage, microbatch] = action;
  if (kind == Kind::forward)
    return stage == 0 ? std::vector<PipelineAction>{}
                      : std::vector<PipelineAction>{{Kind::forward, stage - 1, microbatch}};
  std::vector<PipelineAction> result{{Kind::forward, stage, microbatch}};
  if (stage + 1 < table.stages()) result.push_back({Kind::backward, stage + 1, microbatch});
  return result;
}

/// What its own rank must have done before `action`.
std::vector<PipelineAction> done_before(const PipelineTable& table, const PipelineAction& action) {
  const auto& [kind, stage, microbatch] = action;
  switch (kind) {
    case Kind::send_forward:
      return {{Kind::forward, stage, microbatch}};
    case Kind::send_backward:
      return {{Kind::backward, stage, microbatch}};
    case Kind::recv_forward:
    case Kind::recv_backward:
      return {};
    default:
      break;
  }
  auto result = computed_before(table, action);
  for (PipelineAction& before : result) {
    if (on_one_rank(table, before.stage, stage)) continue;
    before = {kind == Kind::forward ? Kind::recv_forward : Kind::recv_backward, stage, microbatch};
  }
  return result;
}

/// Whether the pipeline has that message: between two stages, of two ranks.
bool has_message(const PipelineTable& table, const PipelineAction& action) {
  const int64_t other = action.other_stage();
  return other >= 0 && other < table.stages() && !on_one_rank(table, action.stage, other) &&
         (table.has_backward || action.kind == Kind::send_forward || action.kind == Kind::recv_forward);
}

class Checker {
 public:
  explicit Checker(const PipelineTable& table) : table_(table) {}

  void run() {
    check_shape();
    for (int64_t rank = 0; rank < table_.ranks(); ++rank) {
      ByAction done(table_);
      for (const PipelineAction& action : table_.actions[rank]) {
        check_place(rank, action);
        check_order(rank, action, done);
        done[action] = 1;
      }
      check_complete(rank, done);
    }
    check_channels();
    check_deadlock();
  }

 private:
  template <class... Words>
  void require(bool condition, int64_t rank, const Words&... words) const {
    TESSERA_CHECK_VALUE(condition, "The pipeline schedule \"", table_.name, "\" cannot run: rank ", rank, " ",
                        words..., ".");
  }

  void check_shape() const {
    TESSERA_CHECK_VALUE(table_.ranks() > 0 && table_.stages() > 0 && table_.microbatches > 0,
                        "The pipeline schedule \"", table_.name, "\" cannot run: it has ", table_.ranks(),
                        " ranks, ", table_.stages(), " stages and ", table_.microbatches,
                        " micro-batches, but needs one of each.");
    for (int64_t stage = 0; stage < table_.stages(); ++stage) {
      const int64_t rank = table_.rank_of_stage[stage];
      TESSERA_CHECK_VALUE(rank >= 0 && rank < table_.ranks(), "The pipeline schedule \"", table_.name,
                          "\" cannot run: stage ", stage, " is on rank ", rank, ", but there are ",
                          table_.ranks(), " ranks.");
    }
  }

  void check_place(int64_t rank, const PipelineAction& action) const {
    const auto& [kind, stage, microbatch] = action;
    require(stage >= 0 && stage < table_.stages(), rank, "does ", action, ", but there are ", table_.stages(),
            " stages");
    require(microbatch >= 0 && microbatch < table_.microbatches, rank, "does ", action, ", but there are ",
            table_.microbatches, " micro-batches");
    require(table_.rank_of_stage[stage] == rank, rank, "does ", action, ", but stage ", stage, " is on rank ",
            table_.rank_of_stage[stage]);
    const bool goes_forward =
        kind == Kind::forward || kind == Kind::send_forward || kind == Kind::recv_forward;
    require(table_.has_backward || goes_forward, rank, "does ", action, ", but the schedule has no backward");
    if (!action.computes())
      require(has_message(table_, action), rank, "does ", action,
              ", but nothing goes that way: the stage has no such neighbour on another rank");
  }

  void check_order(int64_t rank, const PipelineAction& action, ByAction& done) const {
    require(!done.has(action), rank, "does ", action, " twice");
    for (const PipelineAction& before : done_before(table_, action))
      require(done.has(before), rank, "does ", action, " before it has done ", before);
  }

  void check_complete(int64_t rank, ByAction& done) const {
    for (const int64_t stage : table_.stages_of(rank)) {
      for (int64_t microbatch = 0; microbatch < table_.microbatches; ++microbatch) {
        for (int kind = 0; kind < 6; ++kind) {
          const PipelineAction action{static_cast<Kind>(kind), stage, microbatch};
          const bool needed = action.computes() ? table_.has_backward || action.kind == Kind::forward
                                                : has_message(table_, action);
          require(!needed || done.has(action), rank, "never does ", action);
        }
      }
    }
  }

  /// The send that belongs to a message, seen from either end.
  static PipelineAction send_of(const PipelineAction& action) {
    if (action.sends()) return action;
    return {action.kind == Kind::recv_forward ? Kind::send_forward : Kind::send_backward,
            action.other_stage(), action.microbatch};
  }

  int64_t other_rank(const PipelineAction& action) const {
    return table_.rank_of_stage[action.other_stage()];
  }

  /// All messages are there: `check_complete` has seen to it. So only their order may differ.
  void check_channels() const {
    std::map<std::pair<int64_t, int64_t>, std::vector<PipelineAction>> sent, wanted;  // from, to
    for (int64_t rank = 0; rank < table_.ranks(); ++rank) {
      for (const PipelineAction& action : table_.actions[rank]) {
        if (action.computes()) continue;
        if (action.sends())
          sent[{rank, other_rank(action)}].push_back(action);
        else
          wanted[{other_rank(action), rank}].push_back(action);
      }
    }
    for (const auto& [ranks, sends] : sent) {
      const auto& receives = wanted[ranks];
      for (size_t i = 0; i < sends.size(); ++i)
        require(send_of(receives.at(i)) == sends[i], ranks.second, "expects ", receives[i], " as message ", i,
                " from rank ", ranks.first, ", which sends ", sends[i], " then");
    }
  }

  /// Both ends of a message wait until the other one is there. If that works, so does everything that waits less.
  void check_deadlock() const {
    std::vector<size_t> next(table_.ranks(), 0);
    auto current = [&](int64_t rank) -> const PipelineAction* {
      return next[rank] < table_.actions[rank].size() ? &table_.actions[rank][next[rank]] : nullptr;
    };
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t rank = 0; rank < table_.ranks(); ++rank) {
        while (const PipelineAction* action = current(rank)) {
          if (!action->computes()) {
            const int64_t other = other_rank(*action);
            const PipelineAction* there = current(other);
            if (!there || there->computes() || !(send_of(*there) == send_of(*action)) ||
                there->sends() == action->sends())
              break;
            ++next[other];
          }
          ++next[rank];
          moved = true;
        }
      }
    }
    std::string stuck;
    for (int64_t rank = 0; rank < table_.ranks(); ++rank) {
      if (const PipelineAction* action = current(rank))
        stuck += c10::str("\n  rank ", rank, " waits in ", *action, " for rank ", other_rank(*action));
    }
    TESSERA_CHECK_VALUE(stuck.empty(), "The pipeline schedule \"", table_.name,
                        "\" cannot run: it ends in a deadlock if both ends of a message wait for each other:",
                        stuck, "\nPipelineTable::with_messages() finds an order that works.");
  }

  const PipelineTable& table_;
};

int64_t duration(const PipelineAction& action, PipelineTimes times) {
  if (!action.computes()) return 0;
  return action.kind == Kind::forward ? times.forward : times.backward;
}

std::string percent(double share) {
  std::ostringstream out;
  out << std::setprecision(3) << 100 * share << " %";
  return out.str();
}

}  // namespace

void check(const PipelineTable& table) { Checker(table).run(); }

std::vector<std::vector<int64_t>> start_times(const PipelineTable& table, PipelineTimes times) {
  ByAction ends(table);
  std::vector<std::vector<int64_t>> starts(table.ranks());
  std::vector<int64_t> free(table.ranks(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < table.ranks(); ++rank) {
      const auto& actions = table.actions[rank];
      while (starts[rank].size() < actions.size()) {
        const PipelineAction& action = actions[starts[rank].size()];
        int64_t start = free[rank];
        bool ready = true;
        if (action.computes()) {
          for (const PipelineAction& before : computed_before(table, action)) {
            ready = ready && ends.has(before);
            start = std::max(start, ends[before]);
          }
        }
        if (!ready) break;
        starts[rank].push_back(start);
        ends[action] = free[rank] = start + duration(action, times);
        moved = true;
      }
    }
  }
  for (int64_t rank = 0; rank < table.ranks(); ++rank) {
    const size_t done = starts[rank].size();
    TESSERA_CHECK_VALUE(done == table.actions[rank].size(), "The pipeline schedule \"", table.name,
                        "\" cannot run: rank ", rank, " never gets what it needs for ",
                        table.actions[rank][done], ".");
  }
  return starts;
}

double PipelineSimulation::bubble() const {
  int64_t computing = 0;
  for (const int64_t each : busy) computing += each;
  return 1 - static_cast<double>(computing) / (static_cast<double>(time) * static_cast<double>(busy.size()));
}

PipelineSimulation simulate(const PipelineTable& table, PipelineTimes times) {
  check(table);
  TESSERA_CHECK_VALUE(times.forward > 0 && times.backward > 0, "simulate: times are positive, not ",
                      times.forward, " and ", times.backward, ".");
  PipelineSimulation result;
  result.times = times;
  result.starts = start_times(table, times);
  for (int64_t rank = 0; rank < table.ranks(); ++rank) {
    int64_t live = 0, peak = 0, busy = 0;
    for (size_t i = 0; i < table.actions[rank].size(); ++i) {
      const PipelineAction& action = table.actions[rank][i];
      if (action.kind == Kind::forward && table.has_backward) peak = std::max(peak, ++live);
      if (action.kind == Kind::backward) --live;
      busy += duration(action, times);
      result.time = std::max(result.time, result.starts[rank][i] + duration(action, times));
    }
    result.peak_live.push_back(peak);
    result.busy.push_back(busy);
  }
  return result;
}

std::string grid(const PipelineTable& table, PipelineTimes times) {
  const PipelineSimulation simulation = simulate(table, times);
  std::vector<std::vector<std::string>> cells(table.ranks(), std::vector<std::string>(simulation.time, "."));
  size_t width = std::to_string(simulation.time - 1).size();
  for (int64_t rank = 0; rank < table.ranks(); ++rank) {
    for (size_t i = 0; i < table.actions[rank].size(); ++i) {
      const PipelineAction& action = table.actions[rank][i];
      if (!action.computes()) continue;
      std::string text = action.str();
      if (table.stages() == table.ranks()) text.erase(0, std::to_string(action.stage).size());
      width = std::max(width, text.size());
      const int64_t start = simulation.starts[rank][i];
      for (int64_t t = 1; t < duration(action, times); ++t) cells[rank][start + t] = std::string(1, '=');
      cells[rank][start] = std::move(text);
    }
  }
  std::ostringstream out;
  out << table.name << " on " << table.ranks() << " ranks, " << table.microbatches << " micro-batches: time "
      << simulation.time << ", bubble " << percent(simulation.bubble());
  if (table.has_backward) {
    out << ", activations of at most";
    for (const int64_t live : simulation.peak_live) out << ' ' << live;
  }
  auto line = [&](const std::string& head, const auto& cell) {
    std::ostringstream text;
    text << std::left << std::setw(8) << head;
    for (int64_t t = 0; t < simulation.time; ++t) text << std::setw(static_cast<int>(width) + 1) << cell(t);
    std::string padded = text.str();
    padded.erase(padded.find_last_not_of(' ') + 1);
    out << '\n' << padded;
  };
  line("time", [](int64_t t) { return std::to_string(t); });
  for (int64_t rank = 0; rank < table.ranks(); ++rank)
    line(c10::str("rank ", rank), [&](int64_t t) -> const std::string& { return cells[rank][t]; });
  return out.str();
}

}  // namespace tessera
