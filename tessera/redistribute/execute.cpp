#include <tessera/comm/log.h>
#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/overlap.h>
#include <tessera/redistribute/pieces.h>
#include <tessera/span.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace tessera {

namespace {

using comm::Tensors;

// A part of a local tensor: ranges of each of its dims.
using Box = std::vector<Pieces>;

// What ranks that hold `a` and `b` have in common, seen in the local tensor of each.
struct SharedBox {
  SharedBox(const std::vector<Pieces>& a, const std::vector<Pieces>& b) {
    for (size_t d = 0; d < a.size(); ++d) {
      Overlap shared = overlap(a[d], b[d]);
      in_a.push_back(std::move(shared.in_a));
      in_b.push_back(std::move(shared.in_b));
    }
  }
  Box in_a, in_b;
};

c10::DimVector shape_of(const Box& box) {
  c10::DimVector shape;
  for (const Pieces& ranges : box) shape.push_back(length(ranges));
  return shape;
}

// The box as a view, or undefined if it has gaps.
at::Tensor window(at::Tensor tensor, const Box& box) {
  for (size_t d = 0; d < box.size(); ++d) {
    if (box[d].size() > 1) return {};
    const Range range = box[d].empty() ? Range{} : box[d].front();
    if (range.size != tensor.size(d)) tensor = tensor.narrow(d, range.offset, range.size);
  }
  return tensor;
}

// How the tensors of a step lie in memory: densely, in the dim order of their spec. What is communicated is
// seen with the dims in that order, as collectives want contiguous memory.
class Memory {
 public:
  explicit Memory(const Spec& spec)
      : strides_(spec.strides()),
        order_(outer_to_inner(strides_)),
        in_order_(std::is_sorted(order_.begin(), order_.end())) {}
  at::Tensor contiguous_view(const at::Tensor& tensor) const {
    return in_order_ ? tensor : tensor.permute(order_);
  }
  bool is_dense(const at::Tensor& tensor) const { return contiguous_view(tensor).is_contiguous(); }
  at::Tensor dense(const at::Tensor& tensor) const {
    return is_dense(tensor) ? tensor : empty(tensor.sizes(), tensor.options()).copy_(tensor);
  }
  at::Tensor empty(c10::IntArrayRef shape, const at::TensorOptions& options) const {
    if (in_order_) return new_memory(shape, options);
    return new_memory(shape, local_strides(strides_, shape), options);
  }
  Tensors contiguous_views(const Tensors& tensors) const {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(contiguous_view(tensor));
    return views;
  }

 private:
  c10::DimVector strides_;  // of the global tensor
  c10::DimVector order_;
  bool in_order_;
};

// Whether the tensors are `all`, one after the other in equal parts.
bool lie_evenly_in(const at::Tensor& all, const Tensors& parts) {
  int64_t offset = all.storage_offset();
  for (const at::Tensor& part : parts) {
    if (part.numel() != parts[0].numel() || part.storage_offset() != offset) return false;
    offset += part.numel();
  }
  return parts[0].numel() > 0;
}

// How c10d reduces over some mesh dims, and what is to be done before and after.
struct Reduction {
  c10d::ReduceOp op;
  std::function<at::Tensor(const at::Tensor&)> prepare = {};
  std::function<at::Tensor(const at::Tensor&)> finish = {};
};

Reduction reduction_of(const Spec& spec, c10::IntArrayRef mesh_dims) {
  const Placement first = spec.placement(mesh_dims[0]);
  const auto dtype = spec.dtype();
  switch (first.op()) {
    case ReduceOp::product:
      return {c10d::ReduceOp::PRODUCT};
    case ReduceOp::min:
      return {c10d::ReduceOp::MIN};
    case ReduceOp::max:
      return {c10d::ReduceOp::MAX};
    case ReduceOp::any:
    case ReduceOp::all: {
      const c10d::ReduceOp op = first.op() == ReduceOp::any ? c10d::ReduceOp::BOR : c10d::ReduceOp::BAND;
      if (dtype == at::kBool) return {op};
      return {op, [](const at::Tensor& x) { return x.ne(0); },
              [dtype](const at::Tensor& x) { return x.to(dtype); }};
    }
    case ReduceOp::norm: {
      TESSERA_CHECK_VALUE(at::isFloatingType(dtype) || at::isComplexType(dtype), "cannot reduce ", first,
                          " values of dtype ", to_text(dtype), ": expected a floating point dtype");
      // In double, as powers soon leave the range of smaller types; with the sign, so that a value that is no
      // norm (written into one, or stacked with one) can be represented too.
      auto power = [](const at::Tensor& x, double p) {
        const at::Tensor wide = x.is_complex() ? x.abs().to(at::kDouble) : x.to(at::kDouble);
        return wide.abs().pow_(p).copysign_(wide);
      };
      const double p = first.norm();
      return {c10d::ReduceOp::SUM, [=](const at::Tensor& x) { return power(x, p); },
              [=](const at::Tensor& x) { return power(x, 1 / p).to(dtype); }};
    }
    case ReduceOp::sum:
    case ReduceOp::avg:
      break;
  }
  int64_t averaged = 1;
  bool all_average = true;
  for (const int64_t i : mesh_dims) {
    const bool averages = spec.placement(i).op() == ReduceOp::avg;
    all_average &= averages;
    if (averages) averaged *= spec.mesh().shape()[i];
  }
  if (all_average) return {c10d::ReduceOp::AVG};
  if (averaged == 1) return {c10d::ReduceOp::SUM};
  const bool exact = at::isFloatingType(dtype) || at::isComplexType(dtype);
  return {c10d::ReduceOp::SUM, {}, [=](const at::Tensor& x) {
            return exact ? x.div(averaged) : at::div(x, averaged, "trunc");
          }};
}

// What a rank with nothing to contribute holds.
at::Scalar neutral_of(const Placement& partial, c10::ScalarType dtype) {
  if (partial.op() == ReduceOp::norm && partial.norm() < 0) return std::numeric_limits<double>::infinity();
  return neutral(partial.op(), dtype).value_or(0);
}

// One step of a plan, on one rank.
class Runner {
 public:
  /// `owned`: `local` is seen by nobody else and may be overwritten.
  Runner(const Step& step, const Spec& before, at::Tensor local, bool owned)
      : step_(step),
        before_(before),
        after_(step.after),
        memory_(step.after),
        local_(std::move(local)),
        owned_(owned) {}

  PendingTensor post() const;

 private:
  const DeviceMesh& mesh() const { return before_.mesh(); }
  c10::IntArrayRef coordinate() const { return *mesh().get_coordinate(); }
  Group group() const { return mesh().get_group({step_.mesh_dims.begin(), step_.mesh_dims.end()}); }
  at::Tensor empty(c10::IntArrayRef shape) const { return memory_.empty(shape, local_.options()); }
  // The coordinates of the ranks that take part, in the order of the group.
  std::vector<c10::DimVector> peers() const { return mesh().coordinates_along(step_.mesh_dims); }

  PendingTensor all_reduce() const;
  PendingTensor all_gather() const;
  PendingTensor reduce_scatter() const;
  PendingTensor all_to_all() const;
  at::Tensor slice() const;
  at::Tensor to_partial() const;
  at::Tensor rescale() const;

  const Step& step_;
  const Spec& before_;
  const Spec& after_;
  const Memory memory_;
  at::Tensor local_;
  bool owned_;
};

// Parts that are received into `output`: right where they belong if they lie together there, else beside.
class Arrivals {
 public:
  Arrivals(at::Tensor output, std::vector<Box> boxes, const Memory& memory)
      : output_(std::move(output)), boxes_(std::move(boxes)) {
    for (const Box& box : boxes_) {
      at::Tensor part = window(output_, box);
      in_place_.push_back(part.defined() && memory.is_dense(part));
      parts_.push_back(in_place_.back() ? part : memory.empty(shape_of(box), output_.options()));
    }
  }
  const Tensors& parts() const { return parts_; }
  bool fill_evenly() const {
    return std::find(in_place_.begin(), in_place_.end(), false) == in_place_.end() &&
           lie_evenly_in(output_, parts_);
  }
  at::Tensor finish() const {
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (!in_place_[i]) copy_into_pieces(output_, boxes_[i], parts_[i]);
    }
    return output_;
  }

 private:
  at::Tensor output_;
  std::vector<Box> boxes_;
  Tensors parts_;
  std::vector<bool> in_place_;
};

PendingTensor Runner::all_reduce() const {
  const Reduction reduction = reduction_of(before_, step_.mesh_dims);
  at::Tensor values = memory_.dense(reduction.prepare ? reduction.prepare(local_) : local_);
  if (!owned_ && values.is_alias_of(local_)) values = empty(values.sizes()).copy_(values);
  return PendingTensor(comm::all_reduce(memory_.contiguous_view(values), reduction.op, group()),
                       [values, finish = reduction.finish] { return finish ? finish(values) : values; });
}

PendingTensor Runner::all_gather() const {
  const std::vector<Pieces> mine = after_.local_pieces();
  std::vector<Box> boxes;
  for (const auto& peer : peers()) boxes.push_back(SharedBox(before_.local_pieces(peer), mine).in_b);
  const at::Tensor output = empty(after_.local_shape());
  const auto arrivals = std::make_shared<const Arrivals>(output, std::move(boxes), memory_);
  const at::Tensor input = memory_.contiguous_view(memory_.dense(local_));
  return PendingTensor(arrivals->fill_evenly()
                           ? comm::all_gather_into(memory_.contiguous_view(output), input, group())
                           : comm::all_gather(memory_.contiguous_views(arrivals->parts()), input, group()),
                       [arrivals, input] { return arrivals->finish(); });
}

PendingTensor Runner::reduce_scatter() const {
  const Reduction reduction = reduction_of(before_, step_.mesh_dims);
  const at::Tensor values = memory_.dense(reduction.prepare ? reduction.prepare(local_) : local_);
  const std::vector<Pieces> mine = before_.local_pieces();
  Tensors inputs;
  for (const auto& peer : peers()) {
    inputs.push_back(memory_.dense(select_pieces(values, SharedBox(mine, after_.local_pieces(peer)).in_a)));
  }
  const at::Tensor output = memory_.empty(after_.local_shape(), values.options());
  const bool even =
      std::all_of(inputs.begin(), inputs.end(), [&](const at::Tensor& x) { return x.is_alias_of(values); }) &&
      lie_evenly_in(values, inputs);
  return PendingTensor(
      even ? comm::reduce_scatter_from(memory_.contiguous_view(output), memory_.contiguous_view(values),
                                       reduction.op, group())
           : comm::reduce_scatter(memory_.contiguous_view(output), memory_.contiguous_views(inputs),
                                  reduction.op, group()),
      [values, inputs, output, finish = reduction.finish] { return finish ? finish(output) : output; });
}

// What a rank has itself does not go through the group.
PendingTensor Runner::all_to_all() const {
  const std::vector<Pieces> local_pieces = before_.local_pieces();
  const std::vector<Pieces> needed = after_.local_pieces();
  const at::Tensor output = empty(after_.local_shape());
  Tensors inputs;
  std::vector<Box> boxes;
  for (const auto& peer : peers()) {
    if (coordinate() == c10::IntArrayRef(peer)) {
      const SharedBox kept(local_pieces, needed);
      copy_into_pieces(output, kept.in_b, select_pieces(local_, kept.in_a));
      inputs.push_back(empty(c10::DimVector(output.dim(), 0)));
      boxes.emplace_back(output.dim());
      continue;
    }
    inputs.push_back(
        memory_.dense(select_pieces(local_, SharedBox(local_pieces, after_.local_pieces(peer)).in_a)));
    boxes.push_back(SharedBox(before_.local_pieces(peer), needed).in_b);
  }
  const auto arrivals = std::make_shared<const Arrivals>(output, std::move(boxes), memory_);
  return PendingTensor(comm::all_to_all(memory_.contiguous_views(arrivals->parts()),
                                        memory_.contiguous_views(inputs), group()),
                       [arrivals, inputs] { return arrivals->finish(); });
}

at::Tensor Runner::slice() const {
  if (c10::multiply_integers(after_.local_shape()) == 0) return empty(after_.local_shape());
  return select_pieces(local_, SharedBox(before_.local_pieces(), after_.local_pieces()).in_a);
}

// The value belongs to the first of the ranks that replicate it, unless all may keep it; of a shard, to the
// ranks that have it, as often as they are averaged.
at::Tensor Runner::to_partial() const {
  bool mine = true;
  bool grows = false;
  int64_t factor = 1;
  for (const int64_t i : step_.mesh_dims) {
    const ReduceOp op = after_.placement(i).op();
    if (before_.placement(i).is_shard_like()) {
      grows = true;
      if (op == ReduceOp::avg) factor *= mesh().shape()[i];
    } else {
      mine &= is_idempotent(op) || coordinate()[i] == 0;
    }
  }
  if (mine && !grows) return local_;
  const at::Tensor output = empty(after_.local_shape());
  output.fill_(neutral_of(after_.placement(step_.mesh_dims[0]), after_.dtype()));
  if (mine) {
    const SharedBox kept(before_.local_pieces(), after_.local_pieces());
    const at::Tensor value = select_pieces(local_, kept.in_a);
    copy_into_pieces(output, kept.in_b, factor == 1 ? value : value.mul(factor));
  }
  return output;
}

at::Tensor Runner::rescale() const {
  double factor = 1;
  for (const int64_t i : step_.mesh_dims) {
    const auto count = static_cast<double>(mesh().shape()[i]);
    factor = after_.placement(i).op() == ReduceOp::avg ? factor * count : factor / count;
  }
  return local_.mul(factor);
}

PendingTensor Runner::post() const {
  switch (step_.kind) {
    case StepKind::all_gather:
      return all_gather();
    case StepKind::all_reduce:
      return all_reduce();
    case StepKind::reduce_scatter:
      return reduce_scatter();
    case StepKind::all_to_all:
      return all_to_all();
    case StepKind::slice:
      return PendingTensor({}, [result = slice()] { return result; });
    case StepKind::to_partial:
      return PendingTensor({}, [result = to_partial()] { return result; });
    case StepKind::rescale:
      return PendingTensor({}, [result = rescale()] { return result; });
  }
  TESSERA_CHECK(false, "there is no step of kind ", static_cast<int>(step_.kind));
}

// Runs steps [begin, end); `before` is what `local` is.
at::Tensor run(const Plan& plan, size_t begin, size_t end, at::Tensor local, bool owned) {
  for (size_t i = begin; i < end; ++i) {
    const Spec& before = i == 0 ? plan.from : plan.steps[i - 1].after;
    local = Runner(plan.steps[i], before, local, owned).post().wait();
    owned |= plan.steps[i].communicates();
  }
  return local;
}

// What has no values need not be sent, unless somebody wants to see what would be.
bool communicates(const Plan& plan, const at::Tensor& local) {
  return !local.is_meta() || plan.from.mesh().world()->is_dry_run();
}

// The values as they lie in memory, and nothing else.
at::Tensor plain(const at::Tensor& local) {
  return (local.requires_grad() ? local.detach() : local).resolve_conj().resolve_neg();
}

}  // namespace

PendingTensor::PendingTensor(std::optional<comm::Pending> collective, std::function<at::Tensor()> finish)
    : collective_(std::move(collective)), finish_(std::move(finish)) {}

at::Tensor PendingTensor::wait() {
  if (!finish_) return result_;
  const at::NoGradGuard no_grad;
  if (collective_) collective_->wait();
  result_ = finish_();
  finish_ = {};
  collective_.reset();
  return result_;
}

at::Tensor execute(const Plan& plan, const at::Tensor& local) {
  if (!plan.from.mesh().is_member()) return local;
  check_local(local, plan.from, "redistribute");
  if (plan.steps.empty()) return local;
  TESSERA_LOG(debug, "redistribute", plan);
  const Span span(SpanKind::redistribute, "redistribute", &plan);
  if (!communicates(plan, local)) return new_memory(plan.to, local.options());
  const at::NoGradGuard no_grad;
  return laid_out(run(plan, 0, plan.steps.size(), plain(local), false), plan.to);
}

PendingTensor execute_async(const Plan& plan, const at::Tensor& local) {
  size_t last = plan.steps.size();
  while (last > 0 && !plan.steps[last - 1].communicates()) --last;
  if (last == 0 || !plan.from.mesh().is_member() || !communicates(plan, local)) {
    return PendingTensor({}, [result = execute(plan, local)] { return result; });
  }
  check_local(local, plan.from, "redistribute");
  const Span span(SpanKind::redistribute, "redistribute", &plan);
  const at::NoGradGuard no_grad;
  const at::Tensor values = run(plan, 0, last - 1, plain(local), false);
  const bool owned = std::any_of(plan.steps.begin(), plan.steps.begin() + last - 1,
                                 [](const Step& step) { return step.communicates(); });
  const Spec& before = last == 1 ? plan.from : plan.steps[last - 2].after;
  PendingTensor posted = Runner(plan.steps[last - 1], before, values, owned).post();
  return PendingTensor({}, [plan, last, posted = std::make_shared<PendingTensor>(std::move(posted))] {
    return laid_out(run(plan, last, plan.steps.size(), posted->wait(), true), plan.to);
  });
}

}  // namespace tessera
