#include <tessera/kernels/window.h>
#include <tessera/ops/plain_gradients.h>
#include <tessera/ops/planes.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

/// Padding with what is there: mirrored at the ends, or the ends repeated.
enum class Pad { reflection, replication };

Separable padding(int64_t inner, Pad kind) {
  const bool reflects = kind == Pad::reflection;
  auto maps = [=](const OpCall& call, c10::IntArrayRef sizes) -> std::optional<std::vector<LinearMap>> {
    const Shape pads = call.integers("padding");
    if (static_cast<int64_t>(pads.size()) != 2 * inner) return std::nullopt;
    std::vector<LinearMap> all;
    for (const int64_t i : c10::irange(inner)) {
      const int64_t size = sizes[i], before = pads[2 * (inner - 1 - i)],
                    after = pads[2 * (inner - 1 - i) + 1];
      if (size < 1 || before < 0 || after < 0) return std::nullopt;
      if (reflects && std::max(before, after) >= size) return std::nullopt;
      all.push_back({before + size + after, [=](int64_t result) -> Taps {
                       const int64_t position = result - before, last = size - 1;
                       if (!reflects) return {{std::clamp<int64_t>(position, 0, last)}};
                       return {{last - std::abs(last - std::abs(position))}};
                     }});
    }
    return all;
  };
  return {inner, /*copies=*/true, maps, {"padding"}};
}

/// Dims that are sharded in the input and the result where both are sharded evenly: `blocks` of each is the
/// largest number of shards, and divides both; 0: the dim is the same in both.
Strategies in_blocks(const OpCall& call, const Shape& shape, const Shape& blocks) {
  Strategies strategies;
  strategies.results = {{shape}};
  for (const size_t d : c10::irange(blocks.size())) {
    const Placement sharded = Shard(static_cast<int64_t>(d));
    strategies.options.push_back({Placements(call.tensors.size(), sharded), {sharded}, blocks[d]});
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    strategies.options.push_back({{Partial(op)}, {Partial(op)}});
  return strategies;
}

/// libtorch leaves the shape of what is empty as it is.
LocalCall empty_result(const ChosenSpecs& chosen) {
  LocalCall local;
  if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
  local.compute = [result = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
    return Stack{new_memory(result.local_shape(), self_tensor(arguments).options())};
  };
  return local;
}

/// Groups of channels become strided: a rank that holds some of the groups keeps what it has.
Stack channel_shuffle(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor& x = arguments.tensor("self");
  const int64_t groups = arguments["groups"].toInt(), channels = x.size(1);
  TESSERA_CHECK(groups > 0 && channels % groups == 0, "channel_shuffle: the number of channels, ", channels,
                ", must be divisible by groups, ", groups, ".");
  Shape grouped = x.sizes().vec();
  grouped[1] = channels / groups;
  grouped.insert(grouped.begin() + 1, groups);
  return {x.reshape(grouped).transpose(1, 2).reshape(x.sizes())};
}

/// Blocks of channels become blocks of positions.
std::optional<Strategies> pixel_shuffle(const OpCall& call) {
  const Spec& x = call.tensors[0];
  const int64_t factor = call.integer("upscale_factor"), n = x.ndim();
  if (n < 3 || factor < 1 || x.numel() == 0 || x.shape()[n - 3] % (factor * factor) != 0) return std::nullopt;
  Shape shape = x.shape().vec(), blocks(n, 0);
  shape[n - 3] /= factor * factor;
  for (const int64_t d : {n - 2, n - 1}) shape[d] *= factor;
  for (const int64_t d : c10::irange(n - 3, n)) blocks[d] = std::min(shape[d], x.shape()[d]);
  Strategies strategies = in_blocks(call, shape, blocks);
  strategies.localize = empty_result;
  return strategies;
}

/// The converse.
std::optional<Strategies> pixel_unshuffle(const OpCall& call) {
  const Spec& x = call.tensors[0];
  const int64_t factor = call.integer("downscale_factor"), n = x.ndim();
  if (n < 3 || factor < 1 || x.numel() == 0) return std::nullopt;
  if (x.shape()[n - 1] % factor != 0 || x.shape()[n - 2] % factor != 0) return std::nullopt;
  Shape shape = x.shape().vec(), blocks(n, 0);
  shape[n - 3] *= factor * factor;
  for (const int64_t d : {n - 2, n - 1}) shape[d] /= factor;
  for (const int64_t d : c10::irange(n - 3, n)) blocks[d] = std::min(shape[d], x.shape()[d]);
  Strategies strategies = in_blocks(call, shape, blocks);
  strategies.localize = empty_result;
  return strategies;
}

/// Windows of an image as columns, which count row by row (im2col), and back (col2im). Batch and channels may
/// be sharded; rows of windows too, evenly, with halos.
class Columns {
 public:
  enum class To { columns, image };

  /// Nothing if the call is not sane, which libtorch is to say.
  static std::optional<Strategies> strategies(const OpCall& call, To to) {
    Columns columns(call, to);
    if (!columns.measure()) return std::nullopt;
    return columns.strategies();
  }

 private:
  Columns(const OpCall& call, To to) : call_(call), to_image_(to == To::image) {}

  bool measure() {
    const Spec& x = call_.tensors[0];
    outer_ = x.ndim() - (to_image_ ? 2 : 3);
    if ((outer_ != 0 && outer_ != 1) || x.numel() == 0) return false;
    const int64_t height = outer_ + 1;
    const Shape kernel = call_.integers("kernel_size"), stride = call_.integers("stride"),
                dilation = call_.integers("dilation");
    padding_ = call_.integers("padding");
    sizes_ = to_image_ ? call_.integers("output_size") : Shape{x.shape()[height], x.shape()[height + 1]};
    for (const Shape* each :
         {&kernel, &stride, &dilation, &std::as_const(padding_), &std::as_const(sizes_)}) {
      if (each->size() != 2) return false;
    }
    for (const size_t i : {0, 1}) {
      if (kernel[i] < 1 || stride[i] < 1 || padding_[i] < 0 || dilation[i] < 1) return false;
      sliding_.push_back({kernel[i], stride[i], padding_[i], dilation[i]});
      windows_.push_back(sliding_[i].size(sizes_[i]));
    }
    area_ = kernel[0] * kernel[1];
    const int64_t count = windows_[0] * windows_[1];
    return count >= 1 && !(to_image_ && (x.shape()[outer_] % area_ != 0 || x.shape()[height] != count));
  }

  Strategies strategies() const {
    const Spec& x = call_.tensors[0];
    const int64_t given = x.shape()[outer_], channels = to_image_ ? given / area_ : given;
    Shape shape(x.shape().begin(), x.shape().begin() + outer_), blocks(outer_, 0);
    blocks.insert(blocks.end(), {channels, windows_[0]});
    Shape rows = shape;  // the columns, as rows of windows
    rows.insert(rows.end(), {channels * area_, windows_[0], windows_[1]});
    if (to_image_) {
      shape.insert(shape.end(), {channels, sizes_[0], sizes_[1]});
    } else {
      shape.insert(shape.end(), {channels * area_, windows_[0] * windows_[1]});
    }
    Strategies strategies = in_blocks(call_, shape, blocks);
    strategies.localize = with_halos(rows);
    return strategies;
  }

  Localize with_halos(const Shape& rows) const {
    return [=, to_image = to_image_, height = outer_ + 1, window = sliding_[0], width = sizes_[1],
            pad = padding_[1]](const ChosenSpecs& chosen) {
      const Spec &image = to_image ? chosen.outputs[0] : chosen.inputs[0],
                 &columns = to_image ? chosen.inputs[0] : chosen.outputs[0];
      const Spec by_rows(columns.mesh(), columns.placements(), rows, std::nullopt, columns.dtype(),
                         columns.order());
      auto halos = std::make_shared<const Halos>(
          image, by_rows, height,
          std::vector<Reach>{[window](const Range& range) { return window.reach(range); }});
      LocalCall local;
      if (halos->empty()) return local;
      local.communicates = halos->communicates();
      local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
        const NamedArguments named(op, arguments);
        named["padding"] = Shape{0, pad};  // rows bring theirs along
        if (!to_image) {
          named["self"] = halos->fetch(named.tensor("self"), 0);
          return call_operator(op, std::move(arguments));
        }
        named["output_size"] = Shape{halos->of(height)->needed().size, width};
        return Stack{halos->give_back(call_operator(op, std::move(arguments))[0].toTensor())};
      };
      return local;
    };
  }

  const OpCall& call_;
  bool to_image_;
  int64_t outer_ = 0;      // how many batch dims there are
  int64_t area_ = 0;       // of the kernel
  Shape padding_, sizes_;  // sizes: of the image
  std::vector<Sliding> sliding_;
  Shape windows_;
};

std::optional<Strategies> im2col(const OpCall& call) {
  return Columns::strategies(call, Columns::To::columns);
}
std::optional<Strategies> col2im(const OpCall& call) { return Columns::strategies(call, Columns::To::image); }

/// Padding operators and their gradients, by the number of spatial dims.
Table padding_rules() {
  Table table;
  for (const auto& [kind, name] :
       {std::pair(Pad::reflection, "reflection_pad"), std::pair(Pad::replication, "replication_pad")}) {
    for (const int64_t inner : {1, 2, 3}) {
      const std::string op = c10::str(name, inner, "d");
      table.push_back({{op}, separable(padding(inner, kind))});
      table.push_back({{op + "_backward"}, separable_backward(padding(inner, kind))});
    }
  }
  return table;
}

}  // namespace

Table spatial_rules() {
  const char* by_factor = "how many shards are even depends on the factor";
  const char* by_windows = "how many rows of windows there are depends on their geometry";
  Table table{
      {{"channel_shuffle"},
       Pattern{.letters = {"n.B->n.B"},
               .if_sharded = Decomposition{{"reshape", "transpose"}, channel_shuffle},
               .moves = true}},
      {{"grid_sampler_2d", "grid_sampler_3d"},
       Pattern{.letters = {"nc..,npq.->ncpq", "nc..,npqr.->ncpqr"}, .linear = {{"input"}}}},
      {{"grid_sampler_2d_backward", "grid_sampler_3d_backward"},
       Pattern{.letters = {"ncpq,nc..,npq.->nc..,npq.", "ncpqr,nc..,npqr.->nc..,npqr."},
               .linear = {{"grad_output"}}}},
      {{"pixel_shuffle"},
       {"batch sharded; channels and positions evenly", pixel_shuffle, {"upscale_factor"}, by_factor}},
      {{"pixel_unshuffle"},
       {"batch sharded; channels and positions evenly", pixel_unshuffle, {"downscale_factor"}, by_factor}},
      {{"im2col"},
       {"batch sharded; channels evenly; rows of windows evenly, with halos",
        im2col,
        {"kernel_size", "stride", "padding", "dilation"},
        by_windows}},
      {{"col2im"},
       {"batch sharded; channels evenly; rows of windows evenly, with halos",
        col2im,
        {"kernel_size", "stride", "padding", "dilation", "output_size"},
        by_windows}},
  };
  const Table pads = padding_rules();
  table.insert(table.end(), pads.begin(), pads.end());
  return table;
}

}  // namespace tessera::ops

// --- autograd

namespace tessera {

namespace {

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  distribute_gradients(
      library, {"reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
                "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"});
}

}  // namespace

}  // namespace tessera
