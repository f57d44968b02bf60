#include <tessera/bytes.h>
#include <tessera/comm/call.h>
#include <tessera/error.h>

#include <algorithm>
#include <sstream>

#include <ATen/ops/empty.h>
#include <c10/util/hash.h>

namespace tessera::comm {

using c10d::ReduceOp;

const char* name(Collective kind) {
  switch (kind) {
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::all_to_all:
      return "all_to_all";
    case Collective::broadcast:
      return "broadcast";
    case Collective::reduce:
      return "reduce";
    case Collective::gather:
      return "gather";
    case Collective::scatter:
      return "scatter";
    case Collective::barrier:
      return "barrier";
  }
  return "unknown";
}

const char* name(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
      return "sum";
    case ReduceOp::AVG:
      return "avg";
    case ReduceOp::PRODUCT:
      return "product";
    case ReduceOp::MIN:
      return "min";
    case ReduceOp::MAX:
      return "max";
    case ReduceOp::BAND:
      return "band";
    case ReduceOp::BOR:
      return "bor";
    case ReduceOp::BXOR:
      return "bxor";
    case ReduceOp::PREMUL_SUM:
      return "premul_sum";
    case ReduceOp::UNUSED:
      break;
  }
  return "unused";
}

std::string describe(const CollectiveCall& call) {
  if (!call.text.empty()) return call.text;
  std::ostringstream out;
  out << name(call.kind) << '(';
  const char* separator = "";
  auto item = [&](const auto& value) {
    out << separator << value;
    separator = ", ";
  };
  if (call.op != ReduceOp::UNUSED) item(name(call.op));
  if (call.root >= 0) item(c10::str("root ", call.root));
  constexpr size_t kShown = 4;
  for (size_t i = 0; i < std::min(call.tensors.size(), kShown); ++i) {
    item(c10::str(c10::toString(call.tensors[i].scalar_type()), call.tensors[i].sizes()));
  }
  if (call.tensors.size() > kShown) item(c10::str(call.tensors.size() - kShown, " more"));
  out << ')';
  if (call.within) out << " in " << *call.within;
  return out.str();
}

void CollectivePlan::clear() {
  tasks.clear();
  pointers.clear();
  owners.clear();
  op = ReduceOp::UNUSED;
  factor = 1;
}

namespace {

class Planner {
 public:
  Planner(std::span<const CollectiveCall> calls, std::span<const int64_t> members, CollectivePlan& plan)
      : calls_(calls), members_(members), plan_(plan), n_(calls.size()) {}

  void run() {
    plan_.clear();
    const CollectiveCall& first = calls_[0];
    compare_asked();
    plan_.op = first.op;
    plan_.factor = first.factor;
    for (size_t r = 1; r < n_; ++r) compare(0, r);
    switch (first.kind) {
      case Collective::all_reduce:
        return all_reduce();
      case Collective::reduce:
        return reduce();
      case Collective::broadcast:
        return broadcast();
      case Collective::all_gather:
        return all_gather();
      case Collective::reduce_scatter:
        return reduce_scatter();
      case Collective::all_to_all:
        return all_to_all();
      case Collective::gather:
        return gather();
      case Collective::scatter:
        return scatter();
      case Collective::barrier:
        return;
    }
  }

 private:
  [[noreturn]] void mismatch(size_t a, size_t b, const std::string& what) const {
    throw c10::Error(
        c10::str("The ranks of a group called collectives that do not fit together: ", what, ".\n  rank ",
                 members_[a], " called ", describe(calls_[a]), "\n  rank ", members_[b], " called ",
                 describe(calls_[b]), "\nAll ranks of a group must make the same calls in the same order."),
        /*backtrace=*/nullptr);
  }

  void compare_asked() const {
    const auto fits = [&](const CollectiveCall& call) {
      return call.asked.kind == ErrorKind::none && call.asked.call == calls_[0].asked.call;
    };
    if (std::all_of(calls_.begin(), calls_.end(), fits)) [[likely]]
      return;
    std::vector<Asked> asked;
    for (const CollectiveCall& call : calls_) {
      asked.push_back(call.asked);
      if (asked.back().call.empty()) asked.back().call = describe(call);
    }
    check_asked_alike(asked, members_);
  }

  void compare(size_t a, size_t b) const {
    const CollectiveCall &x = calls_[a], &y = calls_[b];
    if (x.kind != y.kind) mismatch(a, b, "different collectives");
    if (x.op != y.op || x.factor != y.factor) mismatch(a, b, "different reductions");
    if (x.root != y.root) mismatch(a, b, "different roots");
    const bool in_place =
        x.kind == Collective::all_reduce || x.kind == Collective::reduce || x.kind == Collective::broadcast;
    if (in_place) {
      if (x.in.size() != y.in.size()) mismatch(a, b, "different numbers of tensors");
      for (size_t i = 0; i < x.in.size(); ++i) {
        if (x.in[i].shape != y.in[i].shape || x.in[i].elements != y.in[i].elements)
          mismatch(a, b, "different shapes");
      }
    } else if (tensors_of(x) != tensors_of(y)) {
      mismatch(a, b, "different numbers of tensors");
    }
  }

  /// How many tensors go at once: the `k` of CollectiveCall.
  static size_t tensors_of(const CollectiveCall& call) {
    switch (call.kind) {
      case Collective::all_gather:
        return call.in.size();
      case Collective::reduce_scatter:
        return call.out.size();
      default:
        return 1;
    }
  }

  /// A part that rank `a` gives and rank `b` takes.
  void agree(size_t a, const Buffer& given, size_t b, const Buffer& taken) const {
    if (given.dtype != taken.dtype) mismatch(a, b, "different dtypes");
    if (given.elements != taken.elements) {
      mismatch(a, b,
               c10::str("rank ", members_[a], " gives ", given.elements, " elements where rank ", members_[b],
                        " expects ", taken.elements));
    }
  }

  void begin(const Buffer& like) {
    task_ = Task{};
    task_.elements = like.elements;
    task_.dtype = like.dtype;
    task_.first_source = static_cast<uint32_t>(plan_.pointers.size());
  }
  void point_to(size_t r, const Buffer& buffer) {
    plan_.pointers.push_back(buffer.data);
    plan_.owners.push_back(static_cast<uint32_t>(r));
  }
  void source(size_t r, const Buffer& buffer) {
    point_to(r, buffer);
    ++task_.sources;
  }
  void targets() { task_.first_target = static_cast<uint32_t>(plan_.pointers.size()); }
  void target(size_t r, const Buffer& buffer) {
    point_to(r, buffer);
    ++task_.targets;
  }
  void end() {
    if (task_.elements > 0 && task_.targets > 0) plan_.tasks.push_back(task_);
  }

  void copy(size_t a, const Buffer& given, size_t b, const Buffer& taken) {
    agree(a, given, b, taken);
    begin(given);
    source(a, given);
    targets();
    target(b, taken);
    end();
  }

  void all_reduce() {
    for (size_t i = 0; i < calls_[0].in.size(); ++i) {
      begin(calls_[0].in[i]);
      for (size_t r = 0; r < n_; ++r) {
        agree(r, calls_[r].in[i], 0, calls_[0].in[i]);
        source(r, calls_[r].in[i]);
      }
      targets();
      for (size_t r = 0; r < n_; ++r) target(r, calls_[r].out[i]);
      end();
    }
  }

  void reduce() {
    const auto root = static_cast<size_t>(calls_[0].root);
    for (size_t i = 0; i < calls_[0].in.size(); ++i) {
      begin(calls_[root].in[i]);
      for (size_t r = 0; r < n_; ++r) {
        agree(r, calls_[r].in[i], root, calls_[root].in[i]);
        source(r, calls_[r].in[i]);
      }
      targets();
      target(root, calls_[root].out[i]);
      end();
    }
  }

  void broadcast() {
    const auto root = static_cast<size_t>(calls_[0].root);
    for (size_t i = 0; i < calls_[0].in.size(); ++i) {
      begin(calls_[root].in[i]);
      source(root, calls_[root].in[i]);
      targets();
      for (size_t r = 0; r < n_; ++r) {
        agree(root, calls_[root].in[i], r, calls_[r].out[i]);
        if (r != root) target(r, calls_[r].out[i]);
      }
      end();
    }
  }

  /// Part j of tensor i on rank r, whose parts are `buffers`. In a joined buffer it has the size that the
  /// peer gives or takes and stands at `offset`.
  Buffer part(size_t r, const c10::SmallVector<Buffer, 4>& buffers, size_t i, size_t j, int64_t offset,
              int64_t elements) const {
    if (!calls_[r].joined) return buffers[i * n_ + j];
    Buffer result = buffers[i];
    if (result.data) result.data += offset * static_cast<int64_t>(c10::elementSize(result.dtype));
    result.elements = elements;
    return result;
  }

  void check_joined(size_t r, const Buffer& all, int64_t elements) const {
    TESSERA_CHECK(!calls_[r].joined || all.elements == elements, "In ", describe(calls_[r]), " on rank ",
                  members_[r], ", the joined tensor of all ranks has ", all.elements,
                  " elements, but the parts of the ", n_, " ranks have ", elements, " together.");
  }

  void all_gather() {
    for (size_t i = 0; i < calls_[0].in.size(); ++i) {
      int64_t offset = 0;
      for (size_t q = 0; q < n_; ++q) {
        const Buffer& given = calls_[q].in[i];
        begin(given);
        source(q, given);
        targets();
        for (size_t r = 0; r < n_; ++r) {
          const Buffer taken = part(r, calls_[r].out, i, q, offset, given.elements);
          agree(q, given, r, taken);
          target(r, taken);
        }
        end();
        offset += given.elements;
      }
      for (size_t r = 0; r < n_; ++r) check_joined(r, calls_[r].out[i], offset);
    }
  }

  void reduce_scatter() {
    for (size_t i = 0; i < calls_[0].out.size(); ++i) {
      int64_t offset = 0;
      for (size_t r = 0; r < n_; ++r) {
        const Buffer& taken = calls_[r].out[i];
        begin(taken);
        for (size_t q = 0; q < n_; ++q) {
          const Buffer given = part(q, calls_[q].in, i, r, offset, taken.elements);
          agree(q, given, r, taken);
          source(q, given);
        }
        targets();
        target(r, taken);
        end();
        offset += taken.elements;
      }
      for (size_t q = 0; q < n_; ++q) check_joined(q, calls_[q].in[i], offset);
    }
  }

  void all_to_all() {
    for (size_t q = 0; q < n_; ++q) {
      for (size_t r = 0; r < n_; ++r) copy(q, calls_[q].in[r], r, calls_[r].out[q]);
    }
  }

  void gather() {
    const auto root = static_cast<size_t>(calls_[0].root);
    for (size_t q = 0; q < n_; ++q) copy(q, calls_[q].in[0], root, calls_[root].out[q]);
  }

  void scatter() {
    const auto root = static_cast<size_t>(calls_[0].root);
    for (size_t r = 0; r < n_; ++r) copy(root, calls_[root].in[r], r, calls_[r].out[0]);
  }

  std::span<const CollectiveCall> calls_;
  std::span<const int64_t> members_;
  CollectivePlan& plan_;
  size_t n_;
  Task task_;
};

uint64_t shape_hash(at::IntArrayRef sizes) {
  uint64_t hash = sizes.size();
  for (int64_t size : sizes) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  return hash;
}

bool overlap(const Buffer& a, const Buffer& b) {
  const auto bytes = [](const Buffer& x) {
    return x.elements * static_cast<int64_t>(c10::elementSize(x.dtype));
  };
  return a.data < b.data + bytes(b) && b.data < a.data + bytes(a);
}

}  // namespace

void make_plan(std::span<const CollectiveCall> calls, std::span<const int64_t> members,
               CollectivePlan& result) {
  Planner(calls, members, result).run();
}

CallBuilder& CallBuilder::root(int64_t root) {
  call_.root = root;
  return *this;
}

CallBuilder& CallBuilder::reduction(const ReduceOp& op) {
  call_.op = op.op_;
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    TESSERA_CHECK_VALUE(supplement,
                        "A premul_sum reduction needs its factor; make it with c10d::makePreMulSum.");
    call_.factor = supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                                       : supplement->double_factor;
  }
  return *this;
}

CallBuilder& CallBuilder::joined() {
  call_.joined = true;
  return *this;
}

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return tensor.is_contiguous() && !tensor.key_set().has_any(lazy);
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

Buffer CallBuilder::buffer(const at::Tensor& tensor) {
  call_.tensors.push_back(tensor);
  auto* data = content_ == Content::data ? static_cast<std::byte*>(tensor.data_ptr()) : nullptr;
  return {data, tensor.numel(), tensor.scalar_type(), shape_hash(tensor.sizes())};
}

at::Tensor CallBuilder::readable(const at::Tensor& tensor) const {
  TESSERA_CHECK_VALUE(tensor.defined(), name(call_.kind),
                      ": a tensor is undefined; pass one of zero elements instead.");
  if (content_ == Content::sizes || tensor.layout() != at::kStrided || is_plain(tensor)) return tensor;
  return plain(tensor);
}

at::Tensor CallBuilder::writable(const at::Tensor& tensor, bool with_values) {
  at::Tensor dense = with_values || !tensor.defined() || is_plain(tensor) || content_ == Content::sizes
                         ? readable(tensor)
                         : at::empty(tensor.sizes(), tensor.options());
  if (!dense.is_same(tensor)) copy_back_.emplace_back(tensor, dense);
  return dense;
}

CallBuilder& CallBuilder::in(const at::Tensor& tensor) {
  call_.in.push_back(buffer(readable(tensor)));
  return *this;
}
CallBuilder& CallBuilder::out(const at::Tensor& tensor) {
  outputs_.push_back(writable(tensor, false));
  call_.out.push_back(buffer(outputs_.back()));
  return *this;
}
CallBuilder& CallBuilder::in_out(const at::Tensor& tensor) {
  call_.in.push_back(buffer(writable(tensor, true)));
  call_.out.push_back(call_.in.back());
  return *this;
}

CallBuilder& CallBuilder::in(at::TensorList tensors) {
  for (const auto& tensor : tensors) in(tensor);
  return *this;
}
CallBuilder& CallBuilder::out(at::TensorList tensors) {
  for (const auto& tensor : tensors) out(tensor);
  return *this;
}
CallBuilder& CallBuilder::in_out(at::TensorList tensors) {
  for (const auto& tensor : tensors) in_out(tensor);
  return *this;
}

void CallBuilder::split(const at::Tensor& tensor, const Buffer& all, at::IntArrayRef sizes, int64_t count,
                        const char* side, c10::SmallVector<Buffer, 4>& parts) {
  TESSERA_CHECK_VALUE(sizes.empty() || static_cast<int64_t>(sizes.size()) == count, "all_to_all: there are ",
                      sizes.size(), ' ', side, " split sizes for a group of ", count, " ranks.");
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (sizes.empty()) {
    TESSERA_CHECK_VALUE(rows % count == 0, "all_to_all: the ", side, " of shape ", tensor.sizes(),
                        " cannot be split evenly among ", count, " ranks; give split sizes.");
  } else {
    TESSERA_CHECK_VALUE(std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }),
                        "all_to_all: ", side, " split sizes ", sizes, " contain a negative one.");
    int64_t total = 0;
    for (const int64_t size : sizes) {
      TESSERA_CHECK_VALUE(size <= rows - total, "all_to_all: the ", side, " split sizes ", sizes,
                          " make more than the ", rows, " rows of the ", side, ", which has shape ",
                          tensor.sizes(), ".");
      total += size;
    }
    TESSERA_CHECK_VALUE(total == rows, "all_to_all: the ", side, " split sizes ", sizes, " make ", total,
                        ", but the ", side, " has shape ", tensor.sizes(), ".");
  }
  int64_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = sizes.empty() ? rows / count : sizes[i];
    Buffer part = all;
    part.elements = size * row;
    if (part.data) part.data += offset * row * static_cast<int64_t>(c10::elementSize(all.dtype));
    offset += size;
    parts.push_back(part);
  }
}

CallBuilder& CallBuilder::in_parts(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t count) {
  const at::Tensor dense = readable(tensor);
  split(dense, buffer(dense), sizes, count, "input", call_.in);
  return *this;
}
CallBuilder& CallBuilder::out_parts(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t count) {
  const at::Tensor dense = writable(tensor, false);
  split(dense, buffer(dense), sizes, count, "output", call_.out);
  return *this;
}

CollectiveCall CallBuilder::build() {
  const bool in_place = call_.kind == Collective::all_reduce || call_.kind == Collective::reduce ||
                        call_.kind == Collective::broadcast;
  if (!in_place && content_ == Content::data) separate_overlaps();
  return std::move(call_);
}

void CallBuilder::separate_overlaps() {
  const bool outputs_are_smaller =
      call_.kind == Collective::reduce_scatter || call_.kind == Collective::scatter;
  auto touches = [](const Buffer& buffer, const c10::SmallVector<Buffer, 4>& others) {
    return std::any_of(others.begin(), others.end(),
                       [&](const Buffer& other) { return overlap(buffer, other); });
  };
  if (outputs_are_smaller) {
    for (size_t i = 0; i < call_.out.size(); ++i) {
      if (!touches(call_.out[i], call_.in)) continue;
      at::Tensor& given = outputs_[i];
      at::Tensor dense = at::empty(given.sizes(), given.options());
      call_.out[i].data = static_cast<std::byte*>(dense.data_ptr());
      copy_back_.emplace_back(given, dense);
      call_.tensors.push_back(std::move(dense));
    }
    return;
  }
  for (Buffer& in : call_.in) {
    if (!touches(in, call_.out)) continue;
    at::Tensor copy = at::empty({in.elements}, at::TensorOptions().dtype(in.dtype));
    copy_bytes(copy.data_ptr(), in.data, copy.nbytes());
    in.data = static_cast<std::byte*>(copy.data_ptr());
    call_.tensors.push_back(std::move(copy));
  }
}

}  // namespace tessera::comm
