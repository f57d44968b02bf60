#include <tessera/bytes.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/observer.h>
#include <tessera/comm/world.h>
#include <tessera/debug/trace.h>
#include <tessera/dispatch/call_text.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/error.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>
#include <tessera/span.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

namespace {

/// Nanoseconds of a clock that processes of one machine share.
int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

/// Microseconds, of which a trace is made, without rounding.
std::string microseconds(int64_t nanoseconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  return text.data();
}

/// A collective of one rank, from its call to the end of the wait for it.
struct TracedCollective {
  std::string group;   // its ranks
  int64_t number = 0;  // of those of the group
  int64_t begin = 0, posted = 0;
  int64_t wait_begin = 0, end = 0;  // of the wait; 0 if there was none
};

/// What rank 0 needs of each rank.
struct TracedRank {
  std::string host;
  int64_t meeting = 0;  // when all ranks met
  int64_t begin = 0, end = 0;
  int64_t compute = 0, dispatch = 0, communication = 0;  // without what they have in them of the others
  int64_t left_out = 0;
  std::vector<TracedCollective> collectives;
  std::string events;  // JSON, with times in a form that is made absolute by rank 0

  std::string to_bytes() const {
    ByteWriter out;
    out.put(std::string_view(host));
    for (const int64_t each : {meeting, begin, end, compute, dispatch, communication, left_out})
      out.put(each);
    out.put(static_cast<int64_t>(collectives.size()));
    for (const TracedCollective& each : collectives) {
      out.put(std::string_view(each.group));
      for (const int64_t value : {each.number, each.begin, each.posted, each.wait_begin, each.end})
        out.put(value);
    }
    out.put(std::string_view(events));
    return out.take();
  }

  static TracedRank from_bytes(std::string_view bytes) {
    ByteReader in(bytes, "trace of a rank");
    TracedRank rank;
    rank.host = in.get_text();
    for (int64_t* each : {&rank.meeting, &rank.begin, &rank.end, &rank.compute, &rank.dispatch,
                          &rank.communication, &rank.left_out})
      *each = in.get<int64_t>();
    for (int64_t count = in.get_count(1); count > 0; --count) {
      TracedCollective each;
      each.group = in.get_text();
      for (int64_t* value : {&each.number, &each.begin, &each.posted, &each.wait_begin, &each.end})
        *value = in.get<int64_t>();
      rank.collectives.push_back(std::move(each));
    }
    rank.events = in.get_text();
    in.check(in.done());
    return rank;
  }
};

/// What each rank gives, to all of them.
std::vector<std::string> all_gather_bytes(const std::string& bytes) {
  if (!has_current_world() || current_world()->size() == 1) return {bytes};
  const Group group = current_world()->group();
  const int64_t size = current_world()->size();
  const at::Tensor own = at::zeros({1}, at::kLong), sizes = at::zeros({size}, at::kLong);
  own.fill_(static_cast<int64_t>(bytes.size()));
  comm::all_gather_into(sizes, own, group).wait();
  const at::Tensor input = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  copy_bytes(input.data_ptr(), bytes.data(), bytes.size());
  comm::Tensors outputs;
  for (int64_t i = 0; i < size; ++i) outputs.push_back(at::empty({sizes[i].item<int64_t>()}, at::kByte));
  comm::all_gather(outputs, input, group).wait();
  std::vector<std::string> all;
  for (const at::Tensor& output : outputs)
    all.emplace_back(static_cast<const char*>(output.data_ptr()), static_cast<size_t>(output.numel()));
  return all;
}

const char* category_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::op:
      return "operator";
    case SpanKind::compute:
      return "compute";
    case SpanKind::redistribute:
      return "redistribute";
    case SpanKind::collective:
      return "collective";
    default:
      return "wait";
  }
}

std::string percent(int64_t part, int64_t all) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "%.1f%%",
                100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(all, 1)));
  return text.data();
}

}  // namespace

class Trace::Recorder {
 public:
  explicit Recorder(const TraceOptions& options)
      : capacity_(options.capacity), observer_(std::in_place, *this) {
    spans_.reserve(std::min<size_t>(capacity_, 1 << 14));
  }

  void stop() {
    if (!observer_) return;
    observer_.reset();
    end_ = now();
  }

  const std::vector<TracedRank>& ranks() {
    stop();
    if (ranks_.empty()) gather();
    return ranks_;
  }

 private:
  static constexpr size_t kLeftOut = ~size_t{0};

  struct Recorded {
    SpanKind kind;
    bool in_backward;
    const char* name;
    int64_t begin, end = 0;
    int64_t inner = 0;             // of it, spent in spans inside
    int64_t bytes = -1;            // that it moves; -1: none that is known
    size_t of = kLeftOut;          // a wait: the collective's index
    int64_t group = -1;            // a collective: index in groups_
    int64_t number = 0;            // a collective: of those of its group
    std::vector<Spec> specs = {};  // an operator: of its tensors; a redistribution: before and after
  };
  struct GroupCalls {
    std::string label;
    int64_t calls = 0;
  };

  class Observer final : public SpanObserver {
   public:
    explicit Observer(Recorder& recorder) : recorder_(recorder) {}
    void began(SpanKind kind, const char* name, const void* detail) override {
      recorder_.began(kind, name, detail);
    }
    void ended() override { recorder_.ended(); }

   private:
    Recorder& recorder_;
  };

  void began(SpanKind kind, const char* name, const void* detail) {
    if (kind == SpanKind::planned || kind == SpanKind::posted) {
      const size_t around = open_.empty() ? kLeftOut : open_.back();
      open_.push_back(kLeftOut);
      if (around == kLeftOut) return;
      if (kind == SpanKind::planned) {
        spans_[around].specs = static_cast<const PlannedCall*>(detail)->plan.inputs;
      } else {
        works_[detail] = around;
      }
      return;
    }
    if (spans_.size() >= capacity_) {
      ++left_out_;
      open_.push_back(kLeftOut);
      return;
    }
    Recorded span{kind, torch::autograd::get_current_graph_task_id() != -1, name, 0};
    if (kind == SpanKind::redistribute) {
      const Plan& plan = *static_cast<const Plan*>(detail);
      span.bytes = plan.bytes();
      span.specs = {plan.from, plan.to};
    } else if (kind == SpanKind::collective) {
      const auto& event = *static_cast<const comm::Event*>(detail);
      span.bytes = event.bytes;
      span.group = group_of(event.group);
      span.number = groups_[static_cast<size_t>(span.group)].calls++;
    } else if (kind == SpanKind::wait) {
      // The name of what is waited for. Another work may come to lie at the same address.
      if (const auto found = works_.extract(detail)) {
        span.of = found.mapped();
        span.name = spans_[span.of].name;
      }
    }
    span.begin = now();
    open_.push_back(spans_.size());
    spans_.push_back(std::move(span));
  }

  void ended() {
    const size_t index = open_.back();
    open_.pop_back();
    if (index == kLeftOut) return;
    Recorded& span = spans_[index];
    span.end = now();
    for (size_t i = open_.size(); i-- > 0;) {
      if (open_[i] == kLeftOut) continue;
      spans_[open_[i]].inner += span.end - span.begin;
      break;
    }
  }

  int64_t group_of(const Group& group) {
    const auto [found, is_new] = group_index_.try_emplace(group.get(), groups_.size());
    if (is_new) {
      const auto ranks = has_current_world() ? current_world()->ranks_of(group) : std::nullopt;
      groups_.push_back({ranks ? c10::str(c10::IntArrayRef(*ranks)) : c10::str(group->getSize(), " ranks")});
    }
    return static_cast<int64_t>(found->second);
  }

  std::string arguments_of(const Recorded& span) const {
    std::string text;
    const auto add = [&](const char* name, const std::string& value) {
      text += c10::str(text.empty() ? "" : ",", "\"", name, "\":", value);
    };
    if (span.bytes >= 0) add("bytes", std::to_string(span.bytes));
    if (span.group >= 0) {
      add("group", json_text(groups_[static_cast<size_t>(span.group)].label));
      add("call", std::to_string(span.number));
    }
    if (span.kind == SpanKind::redistribute) {
      add("from", json_text(tensor_text(span.specs[0])));
      add("to", json_text(c10::str(c10::ArrayRef<Placement>(span.specs[1].placements()))));
    } else if (!span.specs.empty()) {
      std::string all;
      for (const size_t i : c10::irange(std::min<size_t>(span.specs.size(), 8)))
        all.append(i == 0 ? "" : ", ").append(tensor_text(span.specs[i]));
      if (span.specs.size() > 8) all += c10::str(", and ", span.specs.size() - 8, " more");
      add("inputs", json_text(all));
    }
    if (span.in_backward) add("backward", "true");
    return c10::str("{", text, "}");
  }

  TracedRank own() const {
    TracedRank rank;
    std::array<char, 256> host{};
    gethostname(host.data(), host.size() - 1);
    rank.host = host.data();
    rank.begin = begin_;
    rank.end = end_;
    rank.left_out = left_out_;
    std::map<size_t, size_t> collectives;  // by index of the span
    for (const size_t i : c10::irange(spans_.size())) {
      const Recorded& span = spans_[i];
      if (span.end == 0) continue;  // the trace ended inside of it
      const int64_t own = span.end - span.begin - span.inner;
      if (span.kind == SpanKind::op) rank.dispatch += own;
      if (span.kind == SpanKind::compute) rank.compute += own;
      if (span.kind > SpanKind::compute) rank.communication += own;
      if (span.kind == SpanKind::collective) {
        collectives[i] = rank.collectives.size();
        rank.collectives.push_back(
            {groups_[static_cast<size_t>(span.group)].label, span.number, span.begin, span.end});
      } else if (const auto found = collectives.find(span.of);
                 span.kind == SpanKind::wait && found != collectives.end()) {
        rank.collectives[found->second].wait_begin = span.begin;
        rank.collectives[found->second].end = span.end;
      }
      rank.events += c10::str(span.begin - begin_, " ", span.end - span.begin,
                              " {\"name\":", json_text(span.name), ",\"cat\":\"", category_of(span.kind),
                              span.in_backward ? ",backward" : "", "\",\"args\":", arguments_of(span), "\n");
    }
    return rank;
  }

  void gather() {
    TracedRank rank = own();
    if (has_current_world() && current_world()->size() > 1) {
      comm::barrier(current_world()->group()).wait();
      rank.meeting = now();
    }
    for (const std::string& bytes : all_gather_bytes(rank.to_bytes()))
      ranks_.push_back(TracedRank::from_bytes(bytes));
    // Machines have clocks of their own: those elsewhere are set by the moment at which all ranks met.
    for (TracedRank& each : ranks_) {
      if (each.host == ranks_[0].host) continue;
      const int64_t shift = ranks_[0].meeting - each.meeting;
      each.begin += shift;
      each.end += shift;
      for (TracedCollective& collective : each.collectives) {
        collective.begin += shift;
        collective.posted += shift;
        if (collective.end == 0) continue;
        collective.wait_begin += shift;
        collective.end += shift;
      }
    }
  }

  const size_t capacity_;
  const int64_t begin_ = now();
  int64_t end_ = 0, left_out_ = 0;
  std::vector<Recorded> spans_;
  std::vector<size_t> open_;             // indices of those that have not ended
  std::map<const void*, size_t> works_;  // the collectives that are not waited for yet
  std::map<const void*, size_t> group_index_;
  std::vector<GroupCalls> groups_;
  std::vector<TracedRank> ranks_;
  std::optional<Observer> observer_;
};

Trace::Trace(TraceOptions options) : recorder_(std::make_unique<Recorder>(options)) {}
Trace::~Trace() = default;

void Trace::stop() { recorder_->stop(); }

std::string Trace::json() {
  const auto& ranks = recorder_->ranks();
  if (has_current_world() && current_world()->rank() != 0) return "";
  int64_t first = ranks[0].begin;
  for (const TracedRank& rank : ranks) first = std::min(first, rank.begin);
  std::string out = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
  for (const size_t r : c10::irange(ranks.size())) {
    const TracedRank& rank = ranks[r];
    out += c10::str(r == 0 ? "" : ",\n", "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", r,
                    ",\"args\":{\"name\":\"rank ", r,
                    "\"}},\n{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":", r,
                    ",\"args\":{\"sort_index\":", r, "}}");
    for (size_t begin = 0; begin < rank.events.size();) {
      const size_t end = rank.events.find('\n', begin);
      const char* next = rank.events.data() + begin;
      char* rest = nullptr;
      const int64_t at = std::strtoll(next, &rest, 10), length = std::strtoll(rest, &rest, 10);
      const auto used = static_cast<size_t>(rest + 1 - next);
      out += c10::str(",\n", std::string_view(rest + 1, end - begin - used), ",\"ph\":\"X\",\"pid\":", r,
                      ",\"tid\":0,\"ts\":", microseconds(rank.begin - first + at),
                      ",\"dur\":", microseconds(length), "}");
      begin = end + 1;
    }
  }
  return out + "\n]}\n";
}

void Trace::write(const std::string& path) {
  const std::string document = json();
  std::string problem;
  if (!document.empty()) {
    std::ofstream file(path);
    file << document;
    file.close();
    if (!file) problem = c10::str("Trace: cannot write ", path, ": ", std::strerror(errno), ".");
  }
  problem = all_gather_bytes(problem)[0];
  TESSERA_CHECK(problem.empty(), problem);
}

std::string Trace::summary() {
  const auto& ranks = recorder_->ranks();
  // Of each call of each group, who came last, and when.
  std::map<std::pair<std::string, int64_t>, std::pair<int64_t, size_t>> last;
  for (const size_t r : c10::irange(ranks.size())) {
    for (const TracedCollective& each : ranks[r].collectives) {
      auto& latest = last[{each.group, each.number}];
      latest = std::max(latest, {each.begin, r});
    }
  }
  std::vector<std::vector<std::string>> rows{
      {"rank", "time", "compute", "communication", "waiting", "dispatch", "rest"}};
  std::string notes;
  for (const size_t r : c10::irange(ranks.size())) {
    const TracedRank& rank = ranks[r];
    int64_t waiting = 0;
    std::map<size_t, int64_t> for_whom;
    for (const TracedCollective& each : rank.collectives) {
      const auto& [when, who] = last[{each.group, each.number}];
      const auto before = [when = when](int64_t begin, int64_t end) {
        return std::max<int64_t>(0, std::min(end, when) - begin);
      };
      const int64_t lost = before(each.begin, each.posted) + before(each.wait_begin, each.end);
      if (lost == 0 || who == r) continue;
      waiting += lost;
      for_whom[who] += lost;
    }
    const int64_t all = rank.end - rank.begin;
    // What is waited for is part of what communication took.
    const int64_t communication = std::max<int64_t>(0, rank.communication - waiting);
    const int64_t rest = std::max<int64_t>(0, all - rank.compute - communication - waiting - rank.dispatch);
    std::string whom;
    for (const auto& [who, lost] : for_whom)
      whom += c10::str(whom.empty() ? "for rank " : ", ", who, ": ", percent(lost, all));
    rows.push_back({std::to_string(r), seconds_text(static_cast<double>(all) * 1e-9),
                    percent(rank.compute, all), percent(communication, all), percent(waiting, all),
                    percent(rank.dispatch, all), percent(rest, all), whom});
    if (rank.left_out > 0)
      notes += c10::str("rank ", r, ": ", rank.left_out, " spans are left out, as its trace was full\n");
  }
  std::vector<size_t> widths(8, 0);
  for (const auto& row : rows) {
    for (const size_t i : c10::irange(row.size())) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (const size_t i : c10::irange(row.size())) {
      if (i == 7 && row[i].empty()) continue;
      out += c10::str(i == 0 ? "" : "  ",
                      i == 7 ? row[i] : std::string(widths[i] - row[i].size(), ' ') + row[i]);
    }
    out += "\n";
  }
  return out + notes;
}

}  // namespace tessera
