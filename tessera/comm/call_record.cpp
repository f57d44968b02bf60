#include <tessera/bytes.h>
#include <tessera/comm/call_record.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include <c10/util/StringUtil.h>

namespace tessera {

namespace {

std::string seconds_text(std::chrono::steady_clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

std::string to_bytes(const RankState& state) {
  ByteWriter out;
  out.put(std::string_view(state.text));
  out.put(static_cast<int64_t>(state.calls.size()));
  for (const RecordedCall& call : state.calls) {
    out.put(std::string_view(call.group));
    out.put(call.number);
    out.put(std::string_view(call.text));
    out.put(std::string_view(call.common));
  }
  return out.take();
}

RankState state_from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "what a rank says of itself");
  RankState state;
  state.text = in.get_text();
  for (int64_t count = in.get_count(1); count > 0; --count) {
    RecordedCall call;
    call.group = in.get_text();
    call.number = in.get<uint64_t>();
    call.text = in.get_text();
    call.common = in.get_text();
    state.calls.push_back(std::move(call));
  }
  in.check(in.done());
  return state;
}

std::string CallRecord::text_of(const Entry& entry) {
  if (!entry.has_tensor) return c10::str(entry.name, "()");
  const at::IntArrayRef sizes(entry.sizes.data(), std::min(entry.dims, kDims));
  return c10::str(entry.name, "(", entry.dtype, "[", c10::Join(", ", sizes),
                  entry.dims > kDims ? ", ..." : "", "])");
}

std::string CallRecord::common_of(const Entry& entry) {
  // Others may be about different numbers of elements on each rank, or about none on some.
  const std::string_view name = entry.name;
  const bool has_one_shape = name == "all_reduce" || name == "reduce" || name == "broadcast";
  return has_one_shape ? text_of(entry) : std::string(name);
}

std::string CallRecord::full_text_of(const Entry& entry) {
  return c10::str(text_of(entry), entry.is_message ? ", message " : ", call ", entry.number, " of group ",
                  entry.group->label);
}

const CallRecord::Entry* CallRecord::find(uint64_t id) const {
  const Entry& entry = entries_[id % kCalls];
  return entry.id == id && id != 0 ? &entry : nullptr;
}

uint64_t CallRecord::begin(const char* name, const at::Tensor* tensor, const Group& group,
                           const std::vector<int64_t>& ranks, const std::string& label) {
  const std::lock_guard lock(mutex_);
  GroupCalls& calls = groups_[group.get()];
  if (calls.ranks.empty()) {
    calls.ranks = ranks;
    if (calls.label.empty()) calls.label = label;
  }
  const uint64_t id = ++count_;
  Entry& entry = entries_[id % kCalls];
  entry.id = id;
  entry.name = name;
  entry.group = &calls;
  entry.is_message = std::strcmp(name, "send") == 0 || std::strcmp(name, "recv") == 0;
  entry.number = entry.is_message ? ++calls.messages : ++calls.collectives;
  entry.begin = Clock::now();
  entry.parts = 1;
  entry.has_tensor = tensor && tensor->defined();
  if (entry.has_tensor) {
    entry.dtype = tensor->scalar_type();
    entry.dims = static_cast<size_t>(tensor->dim());
    std::copy_n(tensor->sizes().begin(), std::min(entry.dims, kDims), entry.sizes.begin());
  }
  return id;
}

void CallRecord::join(uint64_t id) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[id % kCalls];
  if (entry.id == id) ++entry.parts;
}

void CallRecord::set_label(const Group& group, std::string label) {
  const std::lock_guard lock(mutex_);
  groups_[group.get()].label = std::move(label);
}

void CallRecord::end(uint64_t id) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[id % kCalls];
  if (entry.id != id) return;
  --entry.parts;
  entry.end = Clock::now();
}

std::string CallRecord::describe(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const Entry* entry = find(id);
  return entry ? full_text_of(*entry) : "a collective";
}

RankState CallRecord::state() const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  RankState state;
  const Entry* under_way = nullptr;
  const Entry* last = nullptr;
  for (uint64_t id = count_ >= kCalls ? count_ - kCalls + 1 : 1; id <= count_; ++id) {
    const Entry* entry = find(id);
    if (!entry) continue;
    if (!entry->is_message)
      state.calls.push_back({entry->group->label, entry->number, text_of(*entry), common_of(*entry)});
    if (entry->parts > 0 && !under_way) under_way = entry;
    last = entry;
  }
  if (under_way) {
    state.text = c10::str("in ", full_text_of(*under_way), ", for ", seconds_text(now - under_way->begin));
  } else if (last) {
    state.text = c10::str("in no collective; its last one, ", full_text_of(*last), ", ended ",
                          seconds_text(now - last->end), " ago");
  } else {
    state.text = "in no collective, and has been in none";
  }
  return state;
}

std::string CallRecord::call_with(int64_t rank) const {
  const std::lock_guard lock(mutex_);
  for (uint64_t id = count_ >= kCalls ? count_ - kCalls + 1 : 1; id <= count_; ++id) {
    const Entry* entry = find(id);
    if (!entry || entry->parts <= 0) continue;
    const auto& ranks = entry->group->ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return full_text_of(*entry);
  }
  return "";
}

}  // namespace tessera
