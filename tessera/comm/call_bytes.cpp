#include <tessera/comm/call_bytes.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <ATen/ops/empty.h>

namespace tessera::comm {

namespace {

/// As many tensors as a description shows have their shapes written.
constexpr size_t kWrittenShapes = 4;

struct CallHead {
  double factor;
  int64_t root;
  int64_t asked_kind;
  uint32_t in, out, tensors;
  uint32_t asked, refusal, within;  // letters
  uint8_t kind, joined, op;
  uint8_t unused[5];
};
static_assert(sizeof(CallHead) == 56);

struct WrittenBuffer {
  int64_t elements;
  uint64_t shape;
  int64_t dtype;
};

struct WrittenShape {
  int32_t dtype;
  uint32_t dims;  // as many sizes follow
};

void append(std::vector<std::byte>& bytes, const void* data, size_t size) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + size);
}

class CallReader {
 public:
  explicit CallReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }
  std::string take_text(size_t size) {
    const std::string text(reinterpret_cast<const char*>(bytes_.data()), size);
    bytes_ = bytes_.subspan(size);
    return text;
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace

void append_call(const CollectiveCall& call, std::vector<std::byte>& bytes) {
  const std::string_view within = call.within ? std::string_view(*call.within) : std::string_view();
  CallHead head{};
  head.factor = call.factor;
  head.root = call.root;
  head.asked_kind = static_cast<int64_t>(call.asked.kind);
  head.in = static_cast<uint32_t>(call.in.size());
  head.out = static_cast<uint32_t>(call.out.size());
  head.tensors = static_cast<uint32_t>(call.tensors.size());
  head.asked = static_cast<uint32_t>(call.asked.call.size());
  head.refusal = static_cast<uint32_t>(call.asked.refusal.size());
  head.within = static_cast<uint32_t>(within.size());
  head.kind = static_cast<uint8_t>(call.kind);
  head.joined = call.joined;
  head.op = static_cast<uint8_t>(call.op);
  append(bytes, &head, sizeof head);
  for (const auto* buffers : {&call.in, &call.out}) {
    for (const Buffer& buffer : *buffers) {
      const WrittenBuffer written{buffer.elements, buffer.shape, static_cast<int64_t>(buffer.dtype)};
      append(bytes, &written, sizeof written);
    }
  }
  for (size_t i = 0; i < std::min(call.tensors.size(), kWrittenShapes); ++i) {
    const at::Tensor& tensor = call.tensors[i];
    const WrittenShape shape{static_cast<int32_t>(tensor.scalar_type()), static_cast<uint32_t>(tensor.dim())};
    append(bytes, &shape, sizeof shape);
    append(bytes, tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t));
  }
  for (const std::string_view text :
       {std::string_view(call.asked.call), std::string_view(call.asked.refusal), within})
    append(bytes, text.data(), text.size());
}

CollectiveCall call_from_bytes(std::span<const std::byte> bytes, bool with_text) {
  CallReader reader(bytes);
  const auto head = reader.take<CallHead>();
  CollectiveCall call;
  call.kind = static_cast<Collective>(head.kind);
  call.joined = head.joined != 0;
  call.root = head.root;
  call.op = static_cast<c10d::ReduceOp::RedOpType>(head.op);
  call.factor = head.factor;
  call.in.resize(head.in);
  call.out.resize(head.out);
  for (auto* buffers : {&call.in, &call.out}) {
    for (Buffer& buffer : *buffers) {
      const auto written = reader.take<WrittenBuffer>();
      buffer.elements = written.elements;
      buffer.shape = written.shape;
      buffer.dtype = static_cast<c10::ScalarType>(written.dtype);
    }
  }
  for (size_t i = 0; i < std::min<size_t>(head.tensors, kWrittenShapes); ++i) {
    const auto shape = reader.take<WrittenShape>();
    std::vector<int64_t> sizes;
    for (uint32_t dim = 0; dim < shape.dims; ++dim) sizes.push_back(reader.take<int64_t>());
    if (with_text)
      call.tensors.push_back(at::empty(
          sizes, at::TensorOptions().dtype(static_cast<c10::ScalarType>(shape.dtype)).device(at::kMeta)));
  }
  call.asked.kind = static_cast<ErrorKind>(head.asked_kind);
  call.asked.call = reader.take_text(head.asked);
  call.asked.refusal = reader.take_text(head.refusal);
  const std::string within = reader.take_text(head.within);
  if (!with_text) return call;
  call.tensors.resize(head.tensors);
  if (!within.empty()) call.within = &within;
  call.text = describe(call);
  call.within = nullptr;
  call.tensors.clear();
  return call;
}

void make_plan_of(std::span<const std::span<const std::byte>> calls, std::span<const int64_t> members,
                  CollectivePlan& result) {
  const auto decoded = [&](bool with_text) {
    std::vector<CollectiveCall> all;
    for (const auto& bytes : calls) all.push_back(call_from_bytes(bytes, with_text));
    return all;
  };
  try {
    make_plan(decoded(false), members, result);
  } catch (const c10::Error&) {
    make_plan(decoded(true), members, result);  // throws it with the descriptions
    throw;
  }
}

}  // namespace tessera::comm
