#include <tessera/comm/left_alone.h>
#include <tessera/comm/monitor.h>
#include <tessera/comm/monitor_connections.h>
#include <tessera/error.h>

#include <algorithm>
#include <iterator>

#include <c10/util/irange.h>

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// "rank 0 (process 4242 on node7)".
std::string name_of(int64_t rank, const std::map<int64_t, std::string>& processes) {
  const auto process = processes.find(rank);
  const bool is_known = process != processes.end() && !process->second.empty();
  return is_known ? c10::str("rank ", rank, " (", describe_process(process->second), ")")
                  : c10::str("rank ", rank);
}

}  // namespace

std::set<int64_t> monitored_neighbours(int64_t rank, int64_t size) {
  std::set<int64_t> result;
  for (int64_t distance = 1; distance < size; distance *= 2) {
    result.insert((rank + distance) % size);
    result.insert((rank - distance + size) % size);
  }
  result.erase(rank);
  return result;
}

std::string first_difference(const std::map<int64_t, RankState>& states) {
  // By group and number: which rank called what.
  std::map<std::pair<uint64_t, std::string>, std::map<int64_t, const RecordedCall*>> calls;
  for (const auto& [rank, state] : states) {
    for (const RecordedCall& call : state.calls) calls[{call.number, call.group}][rank] = &call;
  }
  for (const auto& [where, by_rank] : calls) {
    const auto& [first_rank, first] = *by_rank.begin();
    for (const auto& [rank, call] : by_rank) {
      if (call->common != first->common)
        return c10::str("\nThey differ first in call ", where.first, " of group ", where.second, ": rank ",
                        first_rank, " called ", first->text, ", rank ", rank, " called ", call->text, ".");
    }
  }
  return "";
}

Monitor::Monitor(Options options, Rank rank)
    : options_(std::move(options)),
      rank_(std::move(rank)),
      connections_(std::make_unique<Connections>(*this)),
      connected_{{options_.rank, this_process()}} {
  thread_ = std::thread([this] { connections_->run(); });
}

Monitor::~Monitor() {
  leave(milliseconds(0));
  connections_->stop();
  thread_.join();
}

void Monitor::leave(milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_left_, true)) return;
  }
  News news;
  news.kind = NewsKind::Left;
  news.of = options_.rank;
  send(std::move(news));
  connections_->leave_word();
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience,
                    [&] { return !failure_.empty() || static_cast<int64_t>(left_.size()) >= options_.size; });
}

uint64_t Monitor::new_number() {
  const std::lock_guard lock(mutex_);
  return ++numbers_;
}

void Monitor::send(News news) {
  news.by = options_.rank;
  if (news.number == 0) news.number = new_number();
  take(news, /*is_own=*/true);
}

bool Monitor::take(const News& news, bool is_own) {
  bool has_failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (!seen_.emplace(news.by, news.number).second) return false;
    switch (news.kind) {
      case NewsKind::Hello:
        break;
      case NewsKind::Left:
        left_.insert(news.of);
        break;
      case NewsKind::Died:
        dead_.insert(news.of);
        [[fallthrough]];
      case NewsKind::Failed:
        has_failed = failure_.empty();
        if (has_failed) failure_ = news.text;
        break;
      case NewsKind::Answer:
        if (news.of == options_.rank) {
          const Answer answer = answer_from_bytes(news.text);
          if (const auto asked = answers_.find(answer.question); asked != answers_.end())
            asked->second[news.by] = state_from_bytes(answer.state);
        }
        break;
      case NewsKind::Ask:
        break;
      case NewsKind::Ready:
        ready_.insert(news.of);
        break;
      case NewsKind::Invitation: {
        Survivors survivors = survivors_from_bytes(news.text, options_.size);
        if (!survivors_) survivors_ = std::move(survivors);
        break;
      }
    }
    if (news.kind != NewsKind::Ask && news.kind != NewsKind::Answer) known_.push_back(news);
    // Before anybody here hears of it: what they make of it goes after it.
    if (is_own) connections_->enqueue(news);
    changed_.notify_all();
  }
  if (has_failed) rank_.interrupt();
  if (news.kind == NewsKind::Ask && news.by != options_.rank) {
    News answer;
    answer.kind = NewsKind::Answer;
    answer.of = news.by;
    answer.text = to_bytes(Answer{news.number, to_bytes(rank_.state())});
    send(std::move(answer));
  }
  return true;
}

bool Monitor::connect(const std::vector<int64_t>& ranks, milliseconds patience) const {
  const std::set<int64_t> neighbours = monitored_neighbours(options_.rank, options_.size);
  std::unique_lock lock(mutex_);
  const auto is_connected = [&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
      return !neighbours.count(rank) || connected_.count(rank) || left_.count(rank);
    });
  };
  changed_.wait_for(lock, patience, [&] { return !failure_.empty() || is_connected(); });
  return failure_.empty() && is_connected();
}

void Monitor::fail(const std::string& text) {
  News news;
  news.kind = NewsKind::Failed;
  news.of = options_.rank;
  news.text = text.substr(0, kMaxText);
  send(std::move(news));
}

std::string Monitor::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::string Monitor::wait_for_failure(milliseconds patience, const std::vector<int64_t>& ranks) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    return !failure_.empty() ||
           std::any_of(ranks.begin(), ranks.end(), [&](int64_t rank) { return left_.count(rank) > 0; });
  });
  return failure_;
}

std::vector<int64_t> Monitor::lost() const {
  const std::lock_guard lock(mutex_);
  std::set<int64_t> all = dead_;
  all.insert(left_.begin(), left_.end());
  return {all.begin(), all.end()};
}

std::vector<int64_t> Monitor::left(const std::vector<int64_t>& ranks) const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> result;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(result),
               [&](int64_t rank) { return left_.count(rank) > 0; });
  return result;
}

std::map<int64_t, std::string> Monitor::processes_of(const std::vector<int64_t>& ranks) const {
  std::map<int64_t, std::string> result;
  std::vector<int64_t> unknown;
  {
    const std::lock_guard lock(mutex_);
    for (const int64_t rank : ranks) {
      if (const auto known = connected_.find(rank); known != connected_.end())
        result.insert(*known);
      else
        unknown.push_back(rank);
    }
  }
  if (unknown.empty()) return result;
  const auto found = ask_for_at_most(kStorePatience, [store = options_.store, unknown] {
    std::map<int64_t, std::string> processes;
    try {
      for (const int64_t rank : unknown) {
        const auto presence = find_presence(*store, rank);
        processes[rank] = presence ? presence->process : "";
      }
    } catch (const std::exception&) {  // the store went with the rank that kept it
    }
    return processes;
  });
  if (found) result.insert(found->begin(), found->end());
  return result;
}

std::string Monitor::came(const std::vector<int64_t>& ranks) const {
  const auto processes = processes_of(ranks);
  std::vector<std::string> texts;
  for (const auto& [rank, process] : processes) {
    if (!process.empty()) texts.push_back(name_of(rank, processes));
  }
  return c10::Join(", ", texts);
}

std::vector<int64_t> Monitor::missing(const std::vector<int64_t>& ranks) const {
  std::vector<int64_t> result;
  for (const auto& [rank, process] : processes_of(ranks)) {
    if (process.empty()) result.push_back(rank);
  }
  return result;
}

std::string Monitor::ask(const std::vector<int64_t>& ranks, milliseconds patience) {
  News news;
  news.kind = NewsKind::Ask;
  news.of = options_.rank;
  const uint64_t question = news.number = new_number();
  RankState mine = rank_.state();
  {
    const std::lock_guard lock(mutex_);
    answers_[question].emplace(options_.rank, std::move(mine));
  }
  send(std::move(news));
  std::map<int64_t, RankState> answers;
  std::set<int64_t> dead, left;
  {
    std::unique_lock lock(mutex_);
    const auto has_all = [&] {
      return std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
        return answers_[question].count(rank) || dead_.count(rank) || left_.count(rank);
      });
    };
    changed_.wait_for(lock, patience, has_all);
    answers = std::move(answers_[question]);
    answers_.erase(question);
    dead = dead_;
    left = left_;
  }
  std::vector<int64_t> silent;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(silent),
               [&](int64_t rank) { return !answers.count(rank); });
  const auto processes = processes_of(silent);
  std::vector<std::string> lines;
  std::map<int64_t, RankState> states;
  for (const int64_t rank : ranks) {
    std::string text;
    if (const auto answer = answers.find(rank); answer != answers.end()) {
      states[rank] = answer->second;
      text = "is " + states[rank].text;
    } else if (dead.count(rank)) {
      text = "has died";
    } else if (left.count(rank)) {
      text = "has ended";
    } else {
      text = "does not answer. It may be stopped (a signal, a debugger), or not be reachable";
    }
    lines.push_back(c10::str("\n  ", name_of(rank, processes), " ", text, "."));
  }
  return c10::Join("", lines) + first_difference(states);
}

std::vector<int64_t> Monitor::alive() const {
  std::vector<int64_t> result;
  for (const int64_t rank : c10::irange(options_.size)) {
    if (!dead_.count(rank) && !left_.count(rank)) result.push_back(rank);
  }
  return result;
}

Survivors Monitor::gather_survivors(const std::function<std::string()>& invite, milliseconds patience) {
  News ready;
  ready.kind = NewsKind::Ready;
  ready.of = options_.rank;
  send(std::move(ready));
  const auto deadline = Clock::now() + patience;
  std::unique_lock lock(mutex_);
  while (!survivors_) {
    const std::vector<int64_t> ranks = alive();
    std::vector<int64_t> awaited;
    for (const int64_t rank : ranks) {
      if (!ready_.count(rank)) awaited.push_back(rank);
    }
    if (awaited.empty() && ranks.front() == options_.rank) {
      lock.unlock();
      News invitation;
      invitation.kind = NewsKind::Invitation;
      invitation.of = options_.rank;
      invitation.text = to_bytes(Survivors{ranks, invite()});
      send(std::move(invitation));
      lock.lock();
      continue;
    }
    const bool is_late = changed_.wait_until(lock, deadline) == std::cv_status::timeout;
    TESSERA_CHECK(!is_late || survivors_, "The ranks that are left cannot go on: ",
                  awaited.empty() ? c10::str("rank ", ranks.front(), " has not said where")
                                  : c10::str("ranks [", c10::Join(", ", awaited), "] have not come within ",
                                             patience.count(), " ms"),
                  ". All of them have to call shrink_process_group().");
  }
  return *survivors_;
}

void Monitor::wait_until_alone(milliseconds patience) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    const auto others = static_cast<int64_t>(left_.size() - left_.count(options_.rank));
    return !failure_.empty() || others >= options_.size - 1;
  });
  TESSERA_CHECK(failure_.empty(), failure_);
}

}  // namespace tessera
