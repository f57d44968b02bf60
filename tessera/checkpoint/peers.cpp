#include <tessera/bytes.h>
#include <tessera/checkpoint/peers.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/shared_error.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>

#include <ATen/Functions.h>
#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

at::Tensor bytes_tensor(std::string_view bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  copy_bytes(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string_view view_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.numel())};
}

// Bytes whose number the others do not know are sent in two parts: the first, of fixed size, says how many there are,
// and holds all of them if they are few, as most are. Then the second is not sent.
constexpr int64_t kFirstBytes = 1024;
constexpr size_t kFirstContent = kFirstBytes - sizeof(int64_t);

at::Tensor first_part(const std::string& bytes) {
  at::Tensor first = at::zeros({kFirstBytes}, at::kByte);
  auto* const data = static_cast<char*>(first.mutable_data_ptr());
  const auto length = static_cast<int64_t>(bytes.size());
  std::memcpy(data, &length, sizeof length);
  std::memcpy(data + sizeof length, bytes.data(), std::min(bytes.size(), kFirstContent));
  return first;
}

size_t length_in(const at::Tensor& first) {
  int64_t length = 0;
  std::memcpy(&length, first.const_data_ptr(), sizeof length);
  return static_cast<size_t>(length);
}

std::string content_of(const at::Tensor& first) {
  return std::string(view_of(first).substr(sizeof(int64_t), std::min(length_in(first), kFirstContent)));
}

/// Memory for the second part.
at::Tensor rest_after(const at::Tensor& first) {
  const size_t length = length_in(first);
  return at::empty({static_cast<int64_t>(length - std::min(length, kFirstContent))}, at::kByte);
}

}  // namespace

Peers::Peers(const std::string& purpose) {
  if (!has_current_world()) return;
  world_ = current_world();
  rank_ = world_->rank();
  size_ = world_->size();
  if (size_ > 1) group_ = world_->group_for(purpose);
}

Peers::~Peers() = default;
Peers::Peers(Peers&&) noexcept = default;

std::vector<std::string> Peers::all_gather(const std::string& mine) const {
  if (size_ == 1) return {mine};
  const at::Tensor firsts = at::empty({size_, kFirstBytes}, at::kByte);
  comm::all_gather_into(firsts, first_part(mine), group_).wait();
  std::vector<std::string> result;
  comm::Tensors rests;
  bool is_complete = true;
  for (const int64_t rank : c10::irange(size_)) {
    result.push_back(content_of(firsts[rank]));
    rests.push_back(rest_after(firsts[rank]));
    is_complete = is_complete && rests.back().numel() == 0;
  }
  if (is_complete) return result;
  const at::Tensor rest = bytes_tensor(std::string_view(mine).substr(std::min(mine.size(), kFirstContent)));
  comm::all_gather(rests, rest, group_).wait();
  for (const int64_t rank : c10::irange(size_)) result[rank] += view_of(rests[rank]);
  return result;
}

std::string Peers::broadcast(const std::string& bytes) const {
  if (size_ == 1) return bytes;
  const at::Tensor first = first_part(bytes);
  comm::broadcast(first, 0, group_).wait();
  std::string result = content_of(first);
  at::Tensor rest = rest_after(first);
  if (rest.numel() == 0) return result;
  if (rank_ == 0) rest = bytes_tensor(std::string_view(bytes).substr(kFirstContent));
  comm::broadcast(rest, 0, group_).wait();
  return result += view_of(rest);
}

void Peers::exchange(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) const {
  if (size_ == 1) {
    received[0].copy_(sent[0]);
    return;
  }
  comm::all_to_all(received, sent, group_).wait();
}

void Peers::agree(const std::string& task, const Options& options, const std::string& what,
                  const std::function<void()>& work) const {
  const auto all = gather_together(what, [&] {
    work();
    ByteWriter out;
    out.put(std::string_view(task));
    for (const auto& [name, text] : options) out.put(std::string_view(text));
    return out.take();
  });
  const auto texts_of = [](std::string_view bytes, size_t count) {
    ByteReader in(bytes, "what a rank came for");
    std::vector<std::string> texts;
    while (texts.size() < count) texts.emplace_back(in.get_text());
    return texts;
  };
  for (const int64_t rank : c10::irange(size_)) {
    const std::string first = texts_of(all[0], 1)[0], other = texts_of(all[rank], 1)[0];
    TESSERA_CHECK_VALUE(first == other, "Rank 0 came to ", first, ", but rank ", rank, " to ", other,
                        ". All ranks must do it together.");
  }
  for (const int64_t rank : c10::irange(size_)) {
    const auto first = texts_of(all[0], options.size() + 1), other = texts_of(all[rank], options.size() + 1);
    for (const auto i : c10::irange(options.size()))
      TESSERA_CHECK_VALUE(first[i + 1] == other[i + 1], "All ranks must ", task, " with the same ",
                          options[i].first, ", but it is ", first[i + 1], " on rank 0 and ", other[i + 1],
                          " on rank ", rank, ".");
  }
}

void Peers::together(const std::string& what, const std::function<void()>& work) const {
  gather_together(what, [&] {
    work();
    return std::string();
  });
}

std::vector<std::string> Peers::gather_together(const std::string& what,
                                                const std::function<std::string()>& work) const {
  std::string mine;
  std::exception_ptr error;
  try {
    mine = work();
  } catch (...) {
    error = std::current_exception();
  }
  if (size_ == 1) {
    if (error) std::rethrow_exception(error);
    return {mine};
  }
  std::vector<std::string> results;  // each after a letter that says whether it is an error
  try {
    results = all_gather(error ? "!" + comm::message_of(error) : "." + mine);
  } catch (const std::exception&) {
    const std::string lost = comm::message_of(std::current_exception());
    TESSERA_CHECK(!error, what, " failed on rank ", rank_, ": ", comm::message_of(error),
                  "\nThe other ranks could not be notified: ", lost);
    TESSERA_CHECK(false, what, " failed, as another rank did not answer: ", lost);
  }
  std::string message;
  std::set<std::string> said;  // the same on many ranks is said once
  for (const int64_t rank : c10::irange(size_)) {
    const bool has_failed = results[rank].front() == '!';
    results[rank].erase(0, 1);
    if (!has_failed || !said.insert(results[rank]).second) continue;
    message += c10::str(message.empty() ? "" : "\n", what, " failed on rank ", rank, ": ", results[rank]);
  }
  TESSERA_CHECK(message.empty(), message);
  return results;
}

}  // namespace tessera::checkpoint
