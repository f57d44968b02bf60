#include <tessera/bytes.h>
#include <tessera/comm/blocking_work.h>
#include <tessera/comm/shm/messages.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>

namespace tessera::shm {

namespace {

using comm::kAnySource;

/// Copies into the ring, or out of it, at a position among all bytes that ever went through it.
void write_ring(Channel& channel, uint64_t position, const std::byte* data, uint64_t bytes) {
  const uint64_t begin = position % Channel::kRingBytes, first = std::min(bytes, Channel::kRingBytes - begin);
  write_shared(channel.ring.data() + begin, data, first);
  write_shared(channel.ring.data(), data + first, bytes - first);
}
void read_ring(const Channel& channel, uint64_t position, std::byte* data, uint64_t bytes) {
  const uint64_t begin = position % Channel::kRingBytes, first = std::min(bytes, Channel::kRingBytes - begin);
  std::memcpy(data, channel.ring.data() + begin, first);
  std::memcpy(data + first, channel.ring.data(), bytes - first);
}

bool wants(const comm::Parcel& parcel, int64_t from, int tag) {
  return parcel.tag == tag && (parcel.from == kAnySource || parcel.from == from);
}

}  // namespace

Messages::Messages(Member& member)
    : member_(member), me_(member.me()), peers_(static_cast<size_t>(member.size())) {}

std::shared_ptr<comm::Parcel> Messages::send(int64_t to, int tag, const at::Tensor& tensor) {
  const auto parcel = std::make_shared<Parcel>(me_, to, tag, tensor);
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[to];
  Sent message{parcel, {}, 0};
  message.head.number = ++peer.last;
  message.head.bytes = tensor.nbytes();
  message.head.elements = tensor.numel();
  message.head.tag = tag;
  message.head.dtype = static_cast<int32_t>(tensor.scalar_type());
  message.head.dims = std::min<uint64_t>(tensor.dim(), kDims);
  std::copy_n(tensor.sizes().begin(), message.head.dims, message.head.sizes);
  peer.queue.push_back(std::move(message));
  advance();
  return parcel;
}

std::shared_ptr<comm::Parcel> Messages::receive(int64_t from, int tag, const at::Tensor& tensor) {
  const auto parcel = std::make_shared<Parcel>(from, me_, tag, tensor);
  const std::lock_guard lock(mutex_);
  advance();
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& message) {
    return wants(*parcel, message->from, message->head.tag);
  });
  if (found == kept_.end()) {
    wanted_.push_back(parcel);
    return parcel;
  }
  const auto message = *found;
  kept_.erase(found);
  match(message, parcel);
  return parcel;
}

void Messages::advance() {
  for (int64_t peer = 0; peer < member_.size(); ++peer) {
    if (peer == me_) continue;
    const bool has_written = write_to(peer), has_read = read_from(peer);
    take_answers_of(peer);
    if (has_written || has_read) member_.ring(peer, /*always=*/false);
  }
}

bool Messages::write_to(int64_t to) {
  Peer& peer = peers_[to];
  if (peer.queue.empty()) return false;
  Channel& channel = member_.segment().channel(me_, to);
  uint64_t position = channel.written.value.load(std::memory_order_relaxed);
  const uint64_t start = position;
  while (!peer.queue.empty()) {
    Sent& message = peer.queue.front();
    if (message.head.number > Channel::kMessages && !peer.unanswered.empty() &&
        peer.unanswered.front().head.number <= message.head.number - Channel::kMessages)
      break;
    const uint64_t all = sizeof(Head) + message.head.bytes;
    const uint64_t limit = channel.read.value.load() + Channel::kRingBytes;
    while (message.written < all && position < limit) {
      const bool in_head = message.written < sizeof(Head);
      const std::byte* data = in_head
                                  ? reinterpret_cast<const std::byte*>(&message.head) + message.written
                                  : static_cast<const std::byte*>(message.parcel->tensor.const_data_ptr()) +
                                        (message.written - sizeof(Head));
      const uint64_t bytes = std::min((in_head ? sizeof(Head) : all) - message.written, limit - position);
      write_ring(channel, position, data, bytes);
      position += bytes;
      message.written += bytes;
    }
    if (message.written < all) break;
    peer.unanswered.push_back(std::move(message));
    peer.queue.pop_front();
  }
  if (position == start) return false;
  channel.written.value.store(position);
  return true;
}

bool Messages::take_answers_of(int64_t from) {
  Peer& peer = peers_[from];
  bool has_some = false;
  Channel& channel = member_.segment().channel(me_, from);
  for (auto each = peer.unanswered.begin(); each != peer.unanswered.end();) {
    const uint64_t number = each->head.number;
    const Channel::Answer& answer = channel.answers[number % Channel::kMessages];
    const uint64_t value = answer.value.load();
    if (value / 2 != number) {
      ++each;
      continue;
    }
    Parcel& parcel = *each->parcel;
    parcel.source = me_;
    const auto& ranks = member_.ranks();
    if (value % 2 == 1)
      parcel.error =
          comm::misfit_of_messages(ranks[me_], parcel.str(ranks, true), ranks[from], answer.wanted.data());
    parcel.state = value % 2 == 1 ? Parcel::failed : Parcel::done;
    each = peer.unanswered.erase(each);
    has_some = true;
  }
  return has_some;
}

bool Messages::read_from(int64_t from) {
  Channel& channel = member_.segment().channel(from, me_);
  uint64_t position = channel.read.value.load(std::memory_order_relaxed);
  const uint64_t start = position, end = channel.written.value.load();
  while (position < end) {
    auto& message = peers_[from].coming;
    if (!message) {
      message = std::make_shared<Received>();
      message->from = from;
    }
    const bool in_head = message->read < sizeof(Head);
    const uint64_t all = sizeof(Head) + message->head.bytes;
    const uint64_t bytes = std::min((in_head ? sizeof(Head) : all) - message->read, end - position);
    if (in_head) {
      read_ring(channel, position, reinterpret_cast<std::byte*>(&message->head) + message->read, bytes);
    } else if (!message->is_refused) {
      const at::Tensor& target = message->kept.defined() ? message->kept : message->parcel->tensor;
      read_ring(channel, position,
                static_cast<std::byte*>(target.mutable_data_ptr()) + (message->read - sizeof(Head)), bytes);
    }
    position += bytes;
    message->read += bytes;
    channel.read.value.store(position);  // together, whatever follows throws
    if (in_head && message->read == sizeof(Head)) {
      const auto found = std::find_if(wanted_.begin(), wanted_.end(), [&](const auto& parcel) {
        return wants(*parcel, from, message->head.tag);
      });
      if (found == wanted_.end()) {
        keep(message);
      } else {
        const auto parcel = *found;
        wanted_.erase(found);
        match(message, parcel);
      }
    }
    if (message->read >= sizeof(Head) && message->read == sizeof(Head) + message->head.bytes) {
      const auto complete = std::exchange(message, nullptr);
      if (complete->parcel) deliver(*complete);
    }
  }
  return position != start;
}

void Messages::keep(const std::shared_ptr<Received>& message) {
  try {
    message->kept = at::empty({static_cast<int64_t>(message->head.bytes)}, at::kByte);
    kept_.push_back(message);
  } catch (const std::exception&) {
    message->kept.reset();
    message->is_refused = true;  // its data is read nevertheless, and dropped
    member_.fail(c10::str("rank ", member_.ranks()[me_], " failed: it has no memory to keep ",
                          text_of(*message), " of rank ", member_.ranks()[message->from], ", ",
                          message->head.bytes, " bytes, until it is received"));
  }
}

std::string Messages::text_of(const Received& message) const {
  const Head& head = message.head;
  return c10::str("send(", c10::toString(static_cast<c10::ScalarType>(head.dtype)),
                  c10::IntArrayRef(head.sizes, head.dims), ", tag ", head.tag, ") to rank ",
                  member_.ranks()[me_]);
}

void Messages::match(const std::shared_ptr<Received>& message, const std::shared_ptr<Parcel>& parcel) {
  const Head& head = message->head;
  if (head.dtype != static_cast<int32_t>(parcel->tensor.scalar_type()) ||
      head.elements != parcel->tensor.numel()) {
    const auto& ranks = member_.ranks();
    const std::string wanted = parcel->str(ranks, false);
    message->is_refused = true;
    answer(*message, wanted);
    parcel->error = comm::misfit_of_messages(ranks[message->from], text_of(*message), ranks[me_], wanted);
    parcel->state = Parcel::failed;
    return;
  }
  message->parcel = parcel;
  if (message->read == sizeof(Head) + head.bytes && peers_[message->from].coming != message)
    deliver(*message);
}

void Messages::deliver(Received& message) {
  Parcel& parcel = *message.parcel;
  if (message.kept.defined() && message.head.bytes > 0)
    copy_bytes(parcel.tensor.mutable_data_ptr(), message.kept.const_data_ptr(), message.head.bytes);
  parcel.source = message.from;
  parcel.state = Parcel::done;
  answer(message, "");
}

void Messages::answer(const Received& message, const std::string& misfit) {
  Channel::Answer& place =
      member_.segment().channel(message.from, me_).answers[message.head.number % Channel::kMessages];
  const size_t size = std::min(misfit.size(), place.wanted.size() - 1);
  std::memcpy(place.wanted.data(), misfit.data(), size);
  place.wanted[size] = '\0';
  place.value.store(2 * message.head.number + (misfit.empty() ? 0 : 1));
  member_.ring(message.from, /*always=*/false);
}

bool Messages::poll(const Parcel& parcel) {
  help();
  return parcel.state != Parcel::waiting || member_.is_interrupted();
}

void Messages::help() {
  const std::lock_guard lock(mutex_);
  advance();
}

void Messages::wait(const std::shared_ptr<Parcel>& parcel, bool sending, Milliseconds timeout) {
  const int64_t peer = sending ? parcel->to : parcel->from;
  const auto is_done = [&] {
    help();
    return parcel->state != Parcel::waiting;
  };
  const auto give_up = [&](const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (parcel->state == Parcel::waiting && take_back(parcel, sending)) throw comm::PeerError(why);
  };
  const auto what = [&] { return parcel->str(member_.ranks(), sending); };
  const std::string who = c10::str("Rank ", member_.ranks()[me_]);
  for (int i = 0; i < member_.spins(); ++i) {
    if (is_done()) break;
    comm::pause_cpu();
  }
  const auto start = Member::Clock::now();
  while (!is_done() && Member::Clock::now() < start + comm::kYielding) std::this_thread::yield();
  const auto deadline = start + timeout;
  for (Milliseconds pause = Member::kFirstLook; !is_done(); pause = std::min(2 * pause, Member::kLastLook)) {
    for (int64_t each = 0; each < member_.size(); ++each) {
      if (each != me_ && (peer == kAnySource || peer == each)) member_.ring(each, /*always=*/true);
    }
    member_.listen(is_done, std::min<std::chrono::nanoseconds>(deadline - Member::Clock::now(), pause));
    if (is_done()) break;
    if (member_.is_interrupted()) {
      std::string why;
      try {
        member_.check_not_interrupted(what);
      } catch (const comm::PeerError& error) {
        why = error.what_without_backtrace();
      }
      give_up(why);
    }
    if (const std::string gone = peer == kAnySource ? "" : member_.why_gone(peer);
        !gone.empty() && !is_done())
      give_up(c10::str(who, " cannot complete ", what(), ": ", gone, "."));
    if (Member::Clock::now() >= deadline)
      give_up(c10::str(who, " timed out: it gave up after ", timeout.count(), " ms in ", what(),
                       ": the other side never came."));
  }
  TESSERA_CHECK(parcel->state == Parcel::done, parcel->error);
}

bool Messages::take_back(const std::shared_ptr<Parcel>& parcel, bool sending) {
  if (sending) {
    // What has been written in part is written to its end. It is only read here.
    auto& queue = peers_[parcel->to].queue;
    const auto place = std::find_if(queue.begin(), queue.end(), [&](const Sent& message) {
      return message.parcel == parcel && message.written == 0;
    });
    if (place != queue.end()) queue.erase(place);
    return true;
  }
  wanted_.remove(parcel);
  for (Peer& peer : peers_) {
    // What was to come into its tensor is dropped.
    if (!peer.coming || peer.coming->parcel != parcel) continue;
    peer.coming->parcel.reset();
    peer.coming->is_refused = true;
    answer(*peer.coming, parcel->str(member_.ranks(), false) + ", which gave up");
  }
  for (const auto& message : kept_) {
    if (message->parcel == parcel) message->parcel.reset();
  }
  return true;
}

}  // namespace tessera::shm
