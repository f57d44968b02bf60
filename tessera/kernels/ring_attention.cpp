#include <tessera/comm/collectives.h>
#include <tessera/kernels/ring_attention.h>
#include <tessera/redistribute/memory.h>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

namespace {

/// Keys and values, or their gradients, one after the other in one buffer, which is a message.
struct Pair {
  at::Tensor buffer, key, value;

  /// Of `length` keys like these.
  static Pair like(const at::Tensor& key, const at::Tensor& value, int64_t length, at::ScalarType dtype) {
    auto of_key = key.sizes().vec(), of_value = value.sizes().vec();
    of_key[2] = of_value[2] = length;
    const int64_t keys = c10::multiply_integers(of_key), values = c10::multiply_integers(of_value);
    const at::Tensor buffer = new_memory({keys + values}, key.options().dtype(dtype));
    return {buffer, buffer.narrow(0, 0, keys).view(of_key), buffer.narrow(0, keys, values).view(of_value)};
  }
  static Pair zeros(const at::Tensor& key, const at::Tensor& value, int64_t length, at::ScalarType dtype) {
    Pair result = like(key, value, length, dtype);
    result.buffer.zero_();
    return result;
  }
};

enum Tag : int { kKeysAndValues, kGradients };

/// Sends to the next rank of the ring, and receives from the one before. What is empty is not sent.
class Shift {
 public:
  Shift(const at::Tensor& sent, const at::Tensor& received, const AttentionRing& ring, Tag tag) {
    const auto ranks = static_cast<int64_t>(ring.keys.size()), self = static_cast<int64_t>(ring.self);
    const auto send = [&] {
      if (sent.numel() > 0) pending_.push_back(comm::send(sent, (self + 1) % ranks, ring.group, tag));
    };
    const auto receive = [&] {
      if (received.numel() > 0)
        pending_.push_back(comm::recv(received, (self + ranks - 1) % ranks, ring.group, tag));
    };
    // On backends that carry out one after the other, someone must begin by receiving.
    if (self % 2 == 0) send();
    receive();
    if (self % 2 == 1) send();
  }
  void wait() {
    for (comm::Pending& each : pending_) each.wait();
  }

 private:
  std::vector<comm::Pending> pending_;
};

/// The keys and values that a rank has, step by step: first its own, then those of the ranks before it.
class Travel {
 public:
  Travel(const at::Tensor& key, const at::Tensor& value, const AttentionRing& ring)
      : ring_(ring), now_(Pair::like(key, value, key.size(2), key.scalar_type())) {
    now_.key.copy_(key);
    now_.value.copy_(value);
  }
  size_t steps() const { return ring_.keys.size(); }
  size_t owner(size_t step) const { return (ring_.self + steps() - step) % steps(); }
  const SequenceRuns& runs(size_t step) const { return ring_.keys[owner(step)]; }
  int64_t length(size_t step) const {
    return runs(step).empty() ? 0 : runs(step).back().index + runs(step).back().size;
  }
  const at::Tensor& key() const { return now_.key; }
  const at::Tensor& value() const { return now_.value; }

  /// Calls `compute`, while the keys and values of the next step come.
  template <class Compute>
  void step(size_t step, const Compute& compute) {
    if (step + 1 == steps()) return compute();
    Pair next = Pair::like(now_.key, now_.value, length(step + 1), now_.key.scalar_type());
    Shift shift(now_.buffer, next.buffer, ring_, kKeysAndValues);
    compute();
    shift.wait();
    now_ = std::move(next);
  }

 private:
  const AttentionRing& ring_;
  Pair now_;
};

}  // namespace

Attended ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const AttentionRing& ring) {
  const Attended sum = nothing_attended(query, value.size(3));
  if (ring.keys.size() == 1) {
    attend(sum, query, key, value, attention_blocks(ring.queries, ring.keys[0], ring.causal), ring.scale);
    return sum;
  }
  Travel travel(key, value, ring);
  for (const size_t step : c10::irange(travel.steps())) {
    travel.step(step, [&] {
      attend(sum, query, travel.key(), travel.value(),
             attention_blocks(ring.queries, travel.runs(step), ring.causal), ring.scale);
    });
  }
  return sum;
}

AttentionGradients ring_attention_backward(const AttentionResult& result, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const AttentionRing& ring) {
  const auto wide = at::toOpMathType(query.scalar_type());
  const at::Tensor of_query = at::zeros(query.sizes(), query.options().dtype(wide));
  const Pair own = Pair::zeros(key, value, key.size(2), wide);
  const auto done = [&] {
    return AttentionGradients{of_query.to(query.scalar_type()), own.key.to(key.scalar_type()),
                              own.value.to(value.scalar_type())};
  };
  const auto add = [&](const Pair& sum, const at::Tensor& k, const at::Tensor& v, const SequenceRuns& runs) {
    attend_backward({of_query, sum.key, sum.value}, result, query, k, v,
                    attention_blocks(ring.queries, runs, ring.causal), ring.scale);
  };
  if (ring.keys.size() == 1) {
    add(own, key, value, ring.keys[0]);
    return done();
  }
  Travel travel(key, value, ring);
  travel.step(0, [&] { add(own, travel.key(), travel.value(), travel.runs(0)); });
  // What other ranks add to a shard's gradients begins with the rank after its own, and ends by coming home.
  Pair sum, coming;
  std::optional<Shift> shift;
  for (size_t step = 1; step < travel.steps(); ++step) {
    Pair mine = Pair::zeros(key, value, travel.length(step), wide);
    travel.step(step, [&] { add(mine, travel.key(), travel.value(), travel.runs(step)); });
    if (shift) {
      shift->wait();
      mine.buffer.add_(coming.buffer);
    }
    sum = std::move(mine);
    coming = Pair::like(key, value, travel.length((step + 1) % travel.steps()), wide);
    shift.emplace(sum.buffer, coming.buffer, ring, kGradients);
  }
  shift->wait();
  own.buffer.add_(coming.buffer);
  return done();
}

}  // namespace tessera::kernels
