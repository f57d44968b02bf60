#include <tessera/bytes.h>
#include <tessera/comm/threads/mailbox.h>
#include <tessera/error.h>

#include <algorithm>
#include <optional>

#include <c10/util/irange.h>

namespace tessera::threads {

std::shared_ptr<Parcel> Mailbox::send(int64_t from, int64_t to, int tag, const at::Tensor& tensor) {
  return post(std::make_shared<Parcel>(from, to, tag, tensor), true);
}

std::shared_ptr<Parcel> Mailbox::receive(int64_t to, int64_t from, int tag, const at::Tensor& tensor) {
  return post(std::make_shared<Parcel>(from, to, tag, tensor), false);
}

std::shared_ptr<Parcel> Mailbox::post(std::shared_ptr<Parcel> parcel, bool sending) {
  collectives_.acts(sending ? parcel->from : parcel->to, sending ? "send" : "recv");
  std::shared_ptr<Parcel> other;
  {
    std::lock_guard lock(mutex_);
    Queue& others = sending ? wanted_ : sent_;
    const auto match = std::find_if(others.begin(), others.end(), [&](const auto& candidate) {
      const Parcel& s = sending ? *parcel : *candidate;
      const Parcel& w = sending ? *candidate : *parcel;
      return s.to == w.to && s.tag == w.tag && (w.from == kAnySource || w.from == s.from);
    });
    if (match == others.end()) {
      (sending ? sent_ : wanted_).push_back(parcel);
      return parcel;
    }
    other = *match;
    others.erase(match);
  }
  deliver(sending ? *parcel : *other, sending ? *other : *parcel);
  return parcel;
}

void Mailbox::deliver(Parcel& sent, Parcel& wanted) {
  const auto& members = collectives_.members();
  Parcel::State state = Parcel::done;
  if (sent.tensor.scalar_type() != wanted.tensor.scalar_type() ||
      sent.tensor.numel() != wanted.tensor.numel()) {
    state = Parcel::failed;
    sent.error = wanted.error = comm::misfit_of_messages(members[sent.from], sent.str(members, true),
                                                         members[sent.to], wanted.str(members, false));
  } else if (sent.tensor.numel() > 0) {
    copy_bytes(wanted.tensor.data_ptr(), sent.tensor.data_ptr(), sent.tensor.nbytes());
  }
  sent.source = wanted.source = sent.from;
  sent.state = state;
  wanted.state = state;
  collectives_.room().wake();
}

void Mailbox::wait(const std::shared_ptr<Parcel>& parcel, bool sending, std::chrono::milliseconds timeout,
                   bool is_final) {
  const int64_t me = sending ? parcel->from : parcel->to;
  const int64_t peer = sending ? parcel->to : parcel->from;
  const auto& members = collectives_.members();
  auto hopeless = [&] {
    return collectives_.aborted() || (peer != kAnySource && collectives_.has_left(peer));
  };
  auto awaited = [&]() -> std::optional<std::vector<int64_t>> {
    if (parcel->state != Parcel::waiting || hopeless()) return std::nullopt;
    std::vector<int64_t> ranks;
    for (const size_t i : c10::irange(members.size())) {
      const auto member = static_cast<int64_t>(i);
      const bool may_match =
          peer == kAnySource ? member != me && !collectives_.has_left(member) : member == peer;
      if (may_match) ranks.push_back(members[i]);
    }
    return ranks;
  };
  std::optional<Roster::Sleeping> sleeping;
  auto stalled = [&] {
    sleeping.emplace(
        collectives_.roster(),
        Roster::Sleep{.rank = members[me],
                      .where = "in " + parcel->str(members, sending) + ",",
                      .awaited = awaited,
                      .any = peer == kAnySource,
                      .is_final = is_final,
                      .fail = [this](const std::string& reason) { collectives_.abort(reason); }});
  };
  const bool in_time = collectives_.room().wait_for(
      timeout, [&] { return parcel->state != Parcel::waiting || hopeless(); }, stalled);
  sleeping.reset();
  if (parcel->state == Parcel::waiting) {
    Queue& queue = sending ? sent_ : wanted_;
    std::unique_lock lock(mutex_);
    const auto place = std::find(queue.begin(), queue.end(), parcel);
    const bool taken_back = place != queue.end();
    if (taken_back) queue.erase(place);
    lock.unlock();
    if (taken_back) {
      const std::string what = parcel->str(members, sending);
      if (collectives_.aborted()) collectives_.throw_aborted(me, what);
      if (in_time) {
        throw comm::PeerError(c10::str("Rank ", members[me], " cannot complete ", what, ": rank ",
                                       members[peer], " has ended and takes part in no more."));
      }
      TESSERA_CHECK(false, "Rank ", members[me], " gave up after ", timeout.count(), " ms in ", what,
                    ": the other side never came.");
    }
    while (parcel->state == Parcel::waiting) std::this_thread::yield();  // being delivered
  }
  TESSERA_CHECK(parcel->state == Parcel::done, parcel->error);
}

}  // namespace tessera::threads
