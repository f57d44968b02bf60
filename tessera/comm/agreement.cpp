#include <tessera/bytes.h>
#include <tessera/comm/agreement.h>
#include <tessera/comm/asked.h>
#include <tessera/comm/call_backend.h>
#include <tessera/comm/hierarchical.h>
#include <tessera/comm/posting.h>
#include <tessera/comm/shared_error.h>
#include <tessera/comm/staged.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace tessera::comm {

namespace {

using Transport = c10::intrusive_ptr<c10d::Backend>;

thread_local uint64_t shared_error_count = 0;

/// The innermost one of the calling thread, or null.
const Agreement* innermost_agreement() { return ThreadScope<const Agreement*, Agreement>::current(); }

/// What goes before the data of a rank, or beside it.
struct Head {
  uint64_t hash = 0;  // of what it asks for
  int64_t bytes = 0;  // that it sends to the receiver
  int64_t text_bytes = 0;
  ErrorKind kind = ErrorKind::none;
};

// Messages of one tag between two ranks arrive in order. These tags are ours alone.
constexpr int kHeadTag = 0x7e55e7a0;
constexpr int kDataTag = kHeadTag + 1;
constexpr int kTextTag = kHeadTag + 2;

/// Between a call and why a rank refuses it.
constexpr char kRefuses = '\0';

/// FNV-1a: the same in every process.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return hash;
}

/// Where small tensors of our own can be: on the CPU if the group can.
at::Device device_for(const Group& group) {
  const auto types = group->getDeviceTypes();
  if (types.empty() || std::find(types.begin(), types.end(), at::Device(at::kCPU)) != types.end())
    return at::kCPU;
  return c10::impl::getDeviceGuardImpl(types[0].type())->getDevice();
}

Transport backend_for(const Group& group) { return group->getBackend(device_for(group).type()); }

at::Tensor new_bytes(int64_t count) { return at::empty({count}, at::kByte); }

at::Tensor bytes_of_text(const std::string& text) {
  at::Tensor bytes = new_bytes(static_cast<int64_t>(text.size()));
  copy_bytes(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

/// The messages of one exchange on gloo.
class Messages {
 public:
  Messages(const Group& group, Transport backend) : group_(group), backend_(std::move(backend)) {}

  void send(const at::Tensor& bytes, int to, int tag) {
    if (bytes.nbytes() == 0) return;
    Tensors tensors{bytes};
    under_way_.emplace_back(group_, post_message(group_, [&] { return backend_->send(tensors, to, tag); }));
  }
  void receive(const at::Tensor& bytes, int from, int tag) {
    if (bytes.nbytes() == 0) return;
    under_way_.push_back(receiving(bytes, from, tag));
  }
  Pending receiving(const at::Tensor& bytes, int from, int tag) {
    Tensors tensors{bytes};
    return Pending(group_, post_message(group_, [&] { return backend_->recv(tensors, from, tag); }));
  }
  void wait() {
    for (Pending& each : under_way_) each.wait();
    under_way_.clear();
  }

 private:
  const Group& group_;
  const Transport backend_;
  std::vector<Pending> under_way_;
};

std::vector<int64_t> members_of(const Group& group) {
  if (has_current_world()) {
    if (const auto known = current_world()->ranks_of(group)) return *known;
  }
  std::vector<int64_t> ranks(group->getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Throws the error that the heads and texts of all ranks make.
[[noreturn]] void throw_disagreement(const std::vector<Head>& heads, const std::vector<std::string>& texts,
                                     const Group& group) {
  std::vector<Asked> asked(heads.size());
  for (size_t rank = 0; rank < heads.size(); ++rank) {
    asked[rank].kind = heads[rank].kind;
    asked[rank].call = texts[rank].substr(0, texts[rank].find(kRefuses));
    asked[rank].refusal = texts[rank].substr(std::min(texts[rank].size(), asked[rank].call.size() + 1));
  }
  check_asked_alike(asked, members_of(group));
  TORCH_INTERNAL_ASSERT(false, "two texts have the same hash");
}

}  // namespace

Agreement::Agreement(const char* call, Group group) : group_(std::move(group)), asked_(call), scope_(this) {
  if (group_ && group_->getSize() > 1) {
    backend_ = carrier_of(backend_for(group_));
    const std::string name = backend_->getBackendName();
    const auto* calls = dynamic_cast<const CallBackend*>(backend_.get());
    if (calls && calls->compares()) {
      comparison_ = Comparison::posts;
    } else if (name != "fake") {
      const bool sends = name == "gloo" || name == hierarchical::kBackendName;
      comparison_ = sends && device_for(group_).is_cpu() ? Comparison::heads : Comparison::all_gather;
    }
  }
  settled_ = comparison_ == Comparison::none;
}

Agreement::~Agreement() = default;

void Agreement::say(std::string text) {
  asked_ += '(';
  asked_ += text;
  asked_ += ')';
  const Agreement* const outer = scope_.outer();
  if (outer && !outer->settled_ && outer->group_ == group_) asked_ = outer->asked_ + ": " + asked_;
}

void Agreement::refuse(const std::exception_ptr& error) {
  refusal_ = message_of(error);
  kind_ = kind_of(error);
  try {
    settle();
  } catch (const std::exception&) {  // says that this one refuses
  }
  if (comparison_ != Comparison::none) count_shared_error();
  std::rethrow_exception(error);
}

const Agreement* Agreement::open(const Group& group) {
  const Agreement* const innermost = innermost_agreement();
  return innermost && !innermost->settled_ && innermost->group_ == group ? innermost : nullptr;
}

Asked Agreement::asked(const c10d::Backend& backend) {
  const Agreement* const innermost = innermost_agreement();
  if (!innermost) return {};
  if (innermost->backend_.get() == &backend) innermost->mark_settled();
  return {innermost->asked_, innermost->refusal_, innermost->kind_};
}

uint64_t Agreement::shared_errors() { return shared_error_count; }
void Agreement::count_shared_error() { ++shared_error_count; }

void Agreement::mark_settled() const {
  settled_ = true;
  for (const Agreement* each = scope_.outer(); each && each->group_ == group_; each = each->scope_.outer())
    each->settled_ = true;
}

bool Agreement::can_exchange(const at::Tensor& tensor) const {
  return comparison_ == Comparison::heads && tensor.device().is_cpu();
}

void Agreement::settle() const {
  if (settled_) return;
  if (comparison_ == Comparison::posts) Pending(group_, backend_->barrier()).wait();
  if (comparison_ == Comparison::heads) exchange({}, {});
  if (comparison_ == Comparison::all_gather) compare_by_all_gather();
}

void Agreement::settle_before_data() const {
  if (comparison_ != Comparison::posts) settle();
}

void Agreement::exchange(const Tensors& outputs, const Tensors& inputs) const {
  const int size = group_->getSize(), self = group_->getRank();
  const std::string text = kind_ == ErrorKind::none ? asked_ : asked_ + kRefuses + refusal_;
  const auto bytes_in = [](const Tensors& tensors, int rank) {
    return tensors.empty() ? 0 : static_cast<int64_t>(tensors[rank].nbytes());
  };
  const Head mine{hash_of(asked_), 0, static_cast<int64_t>(text.size()), kind_};
  const at::Tensor sent = at::empty({size, sizeof(Head)}, at::kByte);
  const at::Tensor received = at::empty({size, sizeof(Head)}, at::kByte);
  auto* const sent_heads = static_cast<Head*>(sent.mutable_data_ptr());
  const auto* const heads = static_cast<const Head*>(received.const_data_ptr());

  // Nothing waits for the heads but who receives: data is sent beside them.
  Messages messages(group_, backend_);
  std::vector<Pending> heads_under_way;
  std::vector<int> peers;  // each rank begins with the one after it
  for (int i = 1; i < size; ++i) peers.push_back((self + i) % size);
  for (const int rank : peers) {
    sent_heads[rank] = mine;
    sent_heads[rank].bytes = bytes_in(inputs, rank);
    heads_under_way.push_back(messages.receiving(received[rank], rank, kHeadTag));
    messages.send(sent[rank], rank, kHeadTag);
    if (!inputs.empty()) messages.send(inputs[rank], rank, kDataTag);
  }
  if (!outputs.empty() && outputs[self].nbytes() > 0) outputs[self].copy_(inputs[self]);

  // What comes has the size that its head says. It is received also where it is not wanted, so that nothing remains.
  bool agree = mine.kind == ErrorKind::none, fit = true;
  for (size_t i = 0; i < peers.size(); ++i) {
    const int rank = peers[i];
    heads_under_way[i].wait();
    const Head& head = heads[rank];
    const bool fits = head.bytes == bytes_in(outputs, rank);
    agree = agree && head.hash == mine.hash && head.kind == ErrorKind::none;
    fit = fit && fits;
    if (head.bytes > 0) messages.receive(fits ? outputs[rank] : new_bytes(head.bytes), rank, kDataTag);
  }
  messages.wait();
  mark_settled();
  // All ranks have all heads, so all of them see it.
  if (agree) {
    TESSERA_CHECK(fit, asked_, ": another rank sends another number of bytes than this one expects of it.");
    return;
  }
  Tensors texts(size);
  std::vector<Head> all(heads, heads + size);
  all[self] = mine;
  for (const int rank : peers) {
    messages.send(bytes_of_text(text), rank, kTextTag);
    texts[rank] = new_bytes(heads[rank].text_bytes);
    messages.receive(texts[rank], rank, kTextTag);
  }
  texts[self] = bytes_of_text(text);
  messages.wait();
  std::vector<std::string> said;
  for (const at::Tensor& each : texts) said.push_back(text_of(each));
  count_shared_error();
  throw_disagreement(all, said, group_);
}

void Agreement::compare_by_all_gather() const {
  const int size = group_->getSize();
  const std::string text = kind_ == ErrorKind::none ? asked_ : asked_ + kRefuses + refusal_;
  const auto gathered = [&](const at::Tensor& mine) {
    at::Tensor input = mine.to(device_for(group_));
    at::Tensor output = at::empty({size, mine.numel()}, input.options());
    Pending(group_, backend_->_allgather_base(output, input)).wait();
    return output.cpu();
  };
  const Head mine{hash_of(asked_), 0, static_cast<int64_t>(text.size()), kind_};
  at::Tensor head = new_bytes(sizeof(Head));
  std::memcpy(head.mutable_data_ptr(), &mine, sizeof(Head));
  head = gathered(head);
  const auto* const first = static_cast<const Head*>(head.const_data_ptr());
  const std::vector<Head> heads(first, first + size);
  mark_settled();
  const bool agree = std::all_of(heads.begin(), heads.end(), [&](const Head& each) {
    return each.hash == heads[0].hash && each.kind == ErrorKind::none;
  });
  if (agree) return;
  int64_t longest = 0;
  for (const Head& each : heads) longest = std::max(longest, each.text_bytes);
  const at::Tensor padded = at::empty({longest}, at::kByte);
  copy_bytes(padded.mutable_data_ptr(), text.data(), text.size());
  const at::Tensor texts = gathered(padded);
  std::vector<std::string> said;
  for (int rank = 0; rank < size; ++rank)
    said.push_back(text_of(texts[rank]).substr(0, heads[rank].text_bytes));
  count_shared_error();
  throw_disagreement(heads, said, group_);
}

}  // namespace tessera::comm
