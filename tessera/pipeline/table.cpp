#include <tessera/error.h>
#include <tessera/pipeline/simulate.h>
#include <tessera/pipeline/table.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <ostream>
#include <tuple>
#include <utility>

namespace tessera {

namespace {

using Kind = PipelineAction::Kind;
using Actions = std::vector<PipelineAction>;

constexpr std::string_view kKindNames[] = {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"};  // by kind
constexpr const char* kDigits = "0123456789";

bool read_number(std::string_view text, int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

/// A table without actions.
PipelineTable dealt_in_turn(std::string name, int64_t ranks, int64_t stages_per_rank, int64_t microbatches) {
  TESSERA_CHECK_VALUE(ranks > 0 && stages_per_rank > 0 && microbatches > 0,
                      "A pipeline has at least one rank, ", "one stage on each and one micro-batch, not ",
                      ranks, ", ", stages_per_rank, " and ", microbatches, ".");
  PipelineTable table;
  table.name = std::move(name);
  table.microbatches = microbatches;
  for (int64_t stage = 0; stage < ranks * stages_per_rank; ++stage)
    table.rank_of_stage.push_back(stage % ranks);
  table.actions.resize(ranks);
  return table;
}

/// All actions of one kind, stage by stage, the last stage first if `reversed`.
void add_all(Actions& actions, Kind kind, std::vector<int64_t> stages, int64_t microbatches, bool reversed) {
  if (reversed) std::reverse(stages.begin(), stages.end());
  for (const int64_t stage : stages) {
    for (int64_t microbatch = 0; microbatch < microbatches; ++microbatch)
      actions.push_back({kind, stage, microbatch});
  }
}

/// How many micro-batches go through all stages of a rank before the next ones follow.
std::vector<int64_t> rounds_of(int64_t microbatches, int64_t ranks) {
  const int64_t count = std::max<int64_t>(1, microbatches / ranks);
  std::vector<int64_t> sizes(count, microbatches / count);
  for (int64_t i = 0; i < microbatches % count; ++i) ++sizes[i];
  return sizes;
}

/// All actions of one kind, round by round, and in each stage by stage.
Actions in_rounds(Kind kind, const std::vector<int64_t>& stages, const std::vector<int64_t>& rounds) {
  Actions result;
  int64_t first = 0;
  for (const int64_t size : rounds) {
    for (const int64_t stage : stages) {
      for (int64_t i = 0; i < size; ++i) result.push_back({kind, stage, first + i});
    }
    first += size;
  }
  return result;
}

/// `ahead` forwards, then one forward and one backward in turn, then the backwards that are left.
Actions in_turn(const Actions& forwards, const Actions& backwards, size_t ahead) {
  ahead = std::min(ahead, forwards.size());
  Actions result(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(ahead));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (ahead + i < forwards.size()) result.push_back(forwards[ahead + i]);
    result.push_back(backwards[i]);
  }
  return result;
}

PipelineTable in_turn(PipelineTable table) {
  const int64_t ranks = table.ranks();
  const auto rounds = rounds_of(table.microbatches, ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    auto stages = table.stages_of(rank);
    const auto per_rank = static_cast<int64_t>(stages.size());
    const Actions forwards = in_rounds(Kind::forward, stages, rounds);
    std::reverse(stages.begin(), stages.end());
    const Actions backwards = in_rounds(Kind::backward, stages, rounds);
    // With one stage, the first gradient comes when those behind it have seen one micro-batch. With more, the last of them
    // must see one first, and it takes a forward and a backward to get on by one rank.
    const int64_t behind = ranks - 1 - rank;
    const int64_t ahead = per_rank == 1 ? behind : (per_rank - 1) * rounds[0] + 2 * behind;
    table.actions[rank] = in_turn(forwards, backwards, static_cast<size_t>(ahead));
  }
  return table.with_messages();
}

/// A message, and when it is sent.
struct Message {
  int64_t time;
  PipelineAction send;
};

/// Those that computing `action`, which is done at `time`, makes necessary.
void add_messages(const PipelineTable& table, const PipelineAction& action, int64_t time,
                  std::vector<Message>& messages) {
  const bool forward = action.kind == Kind::forward;
  const int64_t receiver = action.stage + (forward ? 1 : -1);
  if (receiver < 0 || receiver >= table.stages()) return;
  if (table.rank_of_stage[receiver] == table.rank_of_stage[action.stage]) return;
  messages.push_back(
      {time, {forward ? Kind::send_forward : Kind::send_backward, action.stage, action.microbatch}});
}

PipelineAction received(const PipelineAction& send) {
  return {send.kind == Kind::send_forward ? Kind::recv_forward : Kind::recv_backward, send.other_stage(),
          send.microbatch};
}

}  // namespace

int64_t PipelineAction::other_stage() const {
  return kind == Kind::send_forward || kind == Kind::recv_backward ? stage + 1 : stage - 1;
}

std::string PipelineAction::str() const {
  return c10::str(stage, kKindNames[static_cast<size_t>(kind)], microbatch);
}

PipelineAction PipelineAction::parse(std::string_view text) {
  const size_t letters = std::min(text.find_first_not_of(kDigits), text.size());
  const size_t end = std::min(text.find_first_of(kDigits, letters), text.size());
  const auto* const kind =
      std::find(std::begin(kKindNames), std::end(kKindNames), text.substr(letters, end - letters));
  PipelineAction action;
  const bool good = kind != std::end(kKindNames) && read_number(text.substr(0, letters), action.stage) &&
                    read_number(text.substr(end), action.microbatch);
  TESSERA_CHECK_VALUE(good, "\"", text,
                      "\" is no action of a pipeline. Expected a stage, one of F, B, SEND_F, RECV_F, SEND_B ",
                      "and RECV_B, and a micro-batch: \"1F0\", \"1SEND_F0\".");
  action.kind = static_cast<Kind>(kind - std::begin(kKindNames));
  return action;
}

std::ostream& operator<<(std::ostream& out, const PipelineAction& action) { return out << action.str(); }

std::vector<int64_t> PipelineTable::stages_of(int64_t rank) const {
  std::vector<int64_t> result;
  for (int64_t stage = 0; stage < stages(); ++stage) {
    if (rank_of_stage[stage] == rank) result.push_back(stage);
  }
  return result;
}

PipelineTable PipelineTable::gpipe(int64_t stages, int64_t microbatches) {
  PipelineTable table = dealt_in_turn("GPipe", stages, 1, microbatches);
  for (int64_t rank = 0; rank < stages; ++rank) {
    add_all(table.actions[rank], Kind::forward, {rank}, microbatches, false);
    add_all(table.actions[rank], Kind::backward, {rank}, microbatches, true);
  }
  return table.with_messages();
}

PipelineTable PipelineTable::one_f_one_b(int64_t stages, int64_t microbatches) {
  return in_turn(dealt_in_turn("1F1B", stages, 1, microbatches));
}

PipelineTable PipelineTable::interleaved_1f1b(int64_t ranks, int64_t stages_per_rank, int64_t microbatches) {
  return in_turn(dealt_in_turn("Interleaved1F1B", ranks, stages_per_rank, microbatches));
}

PipelineTable PipelineTable::without_backward() const {
  PipelineTable table = *this;
  table.has_backward = false;
  for (Actions& all : table.actions)
    std::erase_if(all, [](const PipelineAction& action) { return action.kind != Kind::forward; });
  return table.with_messages();
}

PipelineTable PipelineTable::with_messages() const {
  PipelineTable result = *this;
  for (Actions& all : result.actions)
    std::erase_if(all, [](const auto& action) { return !action.computes(); });
  const auto starts = start_times(result);
  std::vector<Message> messages;
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    for (size_t i = 0; i < starts[rank].size(); ++i)
      add_messages(result, result.actions[rank][i], starts[rank][i] + 1, messages);
  }
  std::sort(messages.begin(), messages.end(), [](const Message& a, const Message& b) {
    return std::tuple(a.time, a.send.stage, a.send.kind, a.send.microbatch) <
           std::tuple(b.time, b.send.stage, b.send.kind, b.send.microbatch);
  });
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    const Actions computed = std::exchange(result.actions[rank], {});
    Actions& all = result.actions[rank];
    size_t next = 0;
    for (const auto& [time, send] : messages) {
      const bool sends = rank_of_stage[send.stage] == rank;
      if (!sends && rank_of_stage[send.other_stage()] != rank) continue;
      while (next < computed.size() && starts[rank][next] < time) all.push_back(computed[next++]);
      all.push_back(sends ? send : received(send));
    }
    all.insert(all.end(), computed.begin() + static_cast<std::ptrdiff_t>(next), computed.end());
  }
  return result;
}

std::string PipelineTable::str() const {
  std::string text =
      c10::str(name, ": ", ranks(), " ranks, ", stages(), " stages, ", microbatches, " micro-batches");
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    text += c10::str("\nrank ", rank, ":");
    for (const PipelineAction& action : actions[rank]) text += c10::str(" ", action);
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const PipelineTable& table) { return out << table.str(); }

}  // namespace tessera
