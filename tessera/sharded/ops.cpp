#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/fill.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/ops.h>
#include <tessera/sharded/registry.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>
#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

/// The built-in operators but the lookups (lookup.cpp).
namespace tessera::sharded {

namespace {

using at::Tensor;
using Format = std::optional<at::MemoryFormat>;

template <class Function>
std::vector<Tensor> of_local(const ShardedTensor& tensor, const Function& function) {
  std::vector<Tensor> result;
  for (const Tensor& local : tensor.local_tensors()) result.push_back(function(local));
  return result;
}

/// The same tiling with what `function` gives for each local shard.
template <class Function>
Tensor mapped(const ShardedTensor& tensor, bool requires_grad, const Function& function) {
  TensorProperties properties = tensor.metadata().tensor_properties;
  properties.requires_grad &= requires_grad;
  properties.pin_memory = false;
  return with_local_tensors(tensor, of_local(tensor, function), properties);
}

/// In place.
template <class Function>
Tensor written(const Tensor& tensor, const Function& function) {
  for (const Tensor& local : ShardedTensor(tensor).local_tensors()) function(local);
  static_cast<void>(
      ShardedTensor(tensor).metadata());  // learns what this did to the history of the local ones
  return tensor;
}

/// In place, with numbers that do not depend on the tiling; with a generator of libtorch's, each shard has
/// its own.
template <class Function>
Tensor drawn(const Tensor& tensor, const random::Distribution& distribution,
             const std::optional<at::Generator>& generator, const Function& function) {
  if (generator) return written(tensor, function);
  // As any write: refused where autograd could not record it.
  for (const LocalShard& shard : ShardedTensor(tensor).local_shards()) {
    TESSERA_CHECK(!shard.tensor.requires_grad() || !at::GradMode::is_enabled(),
                  "A sharded tensor that requires grad can only be filled under a NoGradGuard.");
  }
  fill_random(tensor, distribution);
  return tensor;
}

template <class Compare>
bool compared(const char* name, const Tensor& self, const Tensor& other, const Compare& compare) {
  const Members& members =
      ShardedTensor(ShardedTensor::is_sharded_tensor(self) ? self : other).process_group();
  const comm::Agreement agreement(name, members.group(), [&] {
    TESSERA_CHECK(ShardedTensor::is_sharded_tensor(self) && ShardedTensor::is_sharded_tensor(other), name,
                  ": both arguments must be sharded tensors; one is a plain one.");
    return c10::str(self.scalar_type(), self.sizes(), ", ", other.scalar_type(), other.sizes());
  });
  const ShardedTensor a(self), b(other);
  if (!members.is_member()) return true;  // has nothing to compare
  const ShardedTensorMetadata& tiling = a.metadata();
  bool same = tiling.size == b.metadata().size &&
              tiling.tensor_properties == b.metadata().tensor_properties &&
              is_same_tiling(tiling.shards_metadata, b.metadata().shards_metadata);
  if (same) {
    const auto mine = a.local_tensors(), others = local_tensors_as(tiling.shards_metadata, b, name);
    for (size_t i = 0; same && i < mine.size(); ++i) same = compare(mine[i], others[i]);
  }
  return all_agree(same, members);
}

/// What `reduce` gives for all elements of a tensor, given what it gives for the elements of each shard, as a
/// plain tensor: the same on all ranks, as all of them reduce the same numbers in the same order. Collective.
template <class Local, class Reduce>
Tensor reduced(const char* name, const Tensor& self, const Local& local, const Reduce& reduce) {
  const ShardedTensor tensor(self);
  const Members& members = tensor.process_group();
  members.check_member(name);
  TESSERA_CHECK(
      !tensor.requires_grad() || !at::GradMode::is_enabled(), name,
      " of a sharded tensor has no gradient: take it of detach(), or compute it of local_tensors().");
  std::vector<Tensor> values;
  for (const Tensor& each : tensor.local_tensors()) {
    if (each.numel() > 0) values.push_back(local(each));
  }
  std::vector<int64_t> holders;  // group ranks of those that have elements
  for (const ShardMetadata& shard : tensor.metadata().shards_metadata) {
    if (shard.numel() > 0) holders.push_back(*members.group_rank_of(rank_of(shard.placement, members)));
  }
  std::sort(holders.begin(), holders.end());
  holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
  // A rank without elements has to know the dtype of what the others have.
  const at::ScalarType dtype = local(at::zeros({1}, tensor.options().device(at::kCPU))).scalar_type();
  const at::TensorOptions options = at::TensorOptions(dtype).device(members.device());
  const Tensor mine =
      values.empty() ? at::zeros({1}, options) : reduce(at::stack(values)).view({1}).to(options);
  const Tensor all = at::empty({members.size()}, options);
  comm::all_gather_into(all, mine, members.group()).wait();
  return reduce(all.to(at::kCPU).index_select(0, at::tensor(holders, at::kLong))).to(tensor.device());
}

/// Norms of norms, but for the number of elements that are not zero. In double, as one device has one sum.
Tensor norm_of_all(const Tensor& self, const at::Scalar& p) {
  const at::Scalar of_norms = p.toDouble() == 0 ? at::Scalar(1) : p;
  return reduced(
      "norm", self, [&](const Tensor& local) { return at::norm(local, p).to(at::kDouble); },
      [&](const Tensor& norms) { return at::norm(norms, of_norms); });
}

Tensor moved(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Device> device,
             bool non_blocking, bool copy, Format format) {
  ShardedTensor::ToOptions options;
  options.dtype = dtype;
  options.device = device;
  options.non_blocking = non_blocking;
  options.copy = copy;
  options.memory_format = format.value_or(at::MemoryFormat::Preserve);
  return ShardedTensor(self).to(options);
}

void check_layout(const char* name, std::optional<at::Layout> layout) {
  TESSERA_CHECK(!layout || *layout == at::kStrided, name,
                ": sharded tensors are strided, and cannot be made ", *layout, ".");
}

/// Like `self`, but for what is given, and new.
template <class Fill>
Tensor like(const char* name, const Tensor& self, std::optional<at::ScalarType> dtype,
            std::optional<at::Layout> layout, std::optional<at::Device> device,
            std::optional<bool> pin_memory, Format format, const Fill& fill) {
  const ShardedTensor tensor(self);
  check_layout(name, layout);
  TESSERA_CHECK(!device || device->type() == tensor.device().type(), name, ": a tensor like one on ",
                tensor.device(), " cannot be made on ", *device, "; move it there afterwards.");
  TESSERA_CHECK(!format || *format == at::MemoryFormat::Preserve || *format == at::MemoryFormat::Contiguous,
                name, ": only the memory formats contiguous and preserve are supported, not ", *format, ".");
  const at::NoGradGuard no_grad;
  TensorProperties properties = tensor.metadata().tensor_properties;
  properties.dtype = dtype.value_or(properties.dtype);
  properties.requires_grad = false;
  properties.pin_memory = pin_memory.value_or(false);
  return with_local_tensors(
      tensor,
      of_local(tensor,
               [&](const Tensor& local) {
                 Tensor result =
                     at::empty(local.sizes(),
                               local.options().dtype(properties.dtype).pinned_memory(properties.pin_memory));
                 fill(result);
                 return result;
               }),
      properties);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Generator = std::optional<at::Generator>;

const bool ops_registered = [] {
  // --- comparing: the same answer on all ranks
  sharded_op_impl("aten::equal", [](const Tensor& self, const Tensor& other) {
    return compared("equal", self, other, [](const Tensor& a, const Tensor& b) { return at::equal(a, b); });
  });
  sharded_op_impl("aten::allclose",
                  [](const Tensor& self, const Tensor& other, double rtol, double atol, bool equal_nan) {
                    return compared("allclose", self, other, [&](const Tensor& a, const Tensor& b) {
                      return at::allclose(a, b, rtol, atol, equal_nan);
                    });
                  });

  // --- reducing: what clip_grad_norm_ needs, of libtorch and of Python
  sharded_op_impl("aten::norm.Scalar", [](const Tensor& self, const at::Scalar& p) {
    return norm_of_all(self, p).to(c10::toRealValueType(self.scalar_type()));
  });
  sharded_op_impl(
      "aten::linalg_vector_norm", [](const Tensor& self, const at::Scalar& p, at::OptionalIntArrayRef dim,
                                     bool keepdim, std::optional<at::ScalarType> dtype) {
        TESSERA_CHECK(!dim && !keepdim,
                      "linalg_vector_norm of a sharded tensor is that of all elements: give no dim.");
        return norm_of_all(self, p).to(dtype.value_or(c10::toRealValueType(self.scalar_type())));
      });
  sharded_op_impl("aten::max", [](const Tensor& self) {
    auto max = [](const Tensor& values) { return at::max(values); };
    return reduced("max", self, max, max);
  });
  sharded_op_impl("aten::min", [](const Tensor& self) {
    auto min = [](const Tensor& values) { return at::min(values); };
    return reduced("min", self, min, min);
  });

  // --- copying
  sharded_op_impl("aten::clone", [](const Tensor& self, Format format) {
    TESSERA_CHECK(
        !format || *format == at::MemoryFormat::Preserve || *format == at::MemoryFormat::Contiguous,
        "clone: only the memory formats contiguous and preserve are supported on sharded tensors, not ",
        *format, ".");
    return mapped(ShardedTensor(self), at::GradMode::is_enabled(),
                  [](const Tensor& local) { return local.clone(); });
  });
  sharded_op_impl("aten::detach", [](const Tensor& self) {
    return mapped(ShardedTensor(self), false, [](const Tensor& local) { return local.detach(); });
  });
  sharded_op_impl("aten::detach_", [](const Tensor& self) {
    return written(self, [](const Tensor& local) { local.detach_(); });
  });
  sharded_op_impl("aten::contiguous", [](const Tensor& self, at::MemoryFormat format) {
    TESSERA_CHECK(format == at::MemoryFormat::Contiguous,
                  "contiguous: sharded tensors have the contiguous memory format, not ", format, ".");
    return self;
  });
  sharded_op_impl("aten::copy_", [](const Tensor& self, const Tensor& src, bool non_blocking) {
    TESSERA_CHECK(ShardedTensor::is_sharded_tensor(self) && ShardedTensor::is_sharded_tensor(src),
                  "copy_: both arguments must be sharded tensors; one is a plain one.");
    const ShardedTensor to(self);
    const auto from = local_tensors_as(to.metadata().shards_metadata, src, "copy_");
    for (const size_t i : c10::irange(from.size())) to.local_tensors()[i].copy_(from[i], non_blocking);
    return self;
  });

  // --- moving and casting
  sharded_op_impl("aten::type_as", [](const Tensor& self, const Tensor& other) {
    return moved(self, other.scalar_type(), std::nullopt, false, false, std::nullopt);
  });
  sharded_op_impl("aten::to.dtype",
                  [](const Tensor& self, at::ScalarType dtype, bool non_blocking, bool copy, Format format) {
                    return moved(self, dtype, std::nullopt, non_blocking, copy, format);
                  });
  sharded_op_impl("aten::to.device", [](const Tensor& self, at::Device device, at::ScalarType dtype,
                                        bool non_blocking, bool copy, Format format) {
    return moved(self, dtype, device, non_blocking, copy, format);
  });
  sharded_op_impl("aten::to.other",
                  [](const Tensor& self, const Tensor& other, bool non_blocking, bool copy, Format format) {
                    TESSERA_CHECK(ShardedTensor::is_sharded_tensor(self),
                                  "to: a plain tensor cannot be made like a sharded one; use shard_tensor.");
                    return moved(self, other.scalar_type(), other.device(), non_blocking, copy, format);
                  });
  sharded_op_impl("aten::to.dtype_layout",
                  [](const Tensor& self, Dtype dtype, Layout layout, Device device, Flag /*pin_memory*/,
                     bool non_blocking, bool copy, Format format) {
                    check_layout("to", layout);
                    return moved(self, dtype, device, non_blocking, copy, format);
                  });
  sharded_op_impl("aten::_to_copy", [](const Tensor& self, Dtype dtype, Layout layout, Device device,
                                       Flag /*pin_memory*/, bool non_blocking, Format format) {
    check_layout("_to_copy", layout);
    return moved(self, dtype, device, non_blocking, true, format);
  });
  sharded_op_impl("aten::is_pinned",
                  [](const Tensor& self, Device /*device*/) { return ShardedTensor(self).is_pinned(); });
  sharded_op_impl("aten::pin_memory", [](const Tensor& self, Device /*device*/) -> Tensor {
    return ShardedTensor(self).pin_memory();
  });
  // Lets torch::nn::Module::to replace the data of parameters.
  sharded_op_impl("aten::_has_compatible_shallow_copy_type", [](const Tensor& self, const Tensor& from) {
    return ShardedTensor::is_sharded_tensor(self) && ShardedTensor::is_sharded_tensor(from);
  });

  // --- new ones like another
  sharded_op_impl("aten::empty_like",
                  [](const Tensor& self, Dtype dtype, Layout layout, Device device, Flag pin, Format format) {
                    return like("empty_like", self, dtype, layout, device, pin, format, [](const Tensor&) {});
                  });
  sharded_op_impl("aten::zeros_like", [](const Tensor& self, Dtype dtype, Layout layout, Device device,
                                         Flag pin, Format format) {
    return like("zeros_like", self, dtype, layout, device, pin, format, [](const Tensor& x) { x.zero_(); });
  });
  sharded_op_impl("aten::ones_like", [](const Tensor& self, Dtype dtype, Layout layout, Device device,
                                        Flag pin, Format format) {
    return like("ones_like", self, dtype, layout, device, pin, format, [](const Tensor& x) { x.fill_(1); });
  });
  sharded_op_impl("aten::full_like", [](const Tensor& self, const at::Scalar& value, Dtype dtype,
                                        Layout layout, Device device, Flag pin, Format format) {
    return like("full_like", self, dtype, layout, device, pin, format,
                [&](const Tensor& x) { x.fill_(value); });
  });
  sharded_op_impl("aten::rand_like", [](const Tensor& self, Dtype dtype, Layout layout, Device device,
                                        Flag pin, Format format) {
    const Tensor result = like("rand_like", self, dtype, layout, device, pin, format, [](const Tensor&) {});
    fill_random(result, random::Distribution::uniform());
    return result;
  });
  sharded_op_impl("aten::randn_like", [](const Tensor& self, Dtype dtype, Layout layout, Device device,
                                         Flag pin, Format format) {
    const Tensor result = like("randn_like", self, dtype, layout, device, pin, format, [](const Tensor&) {});
    fill_random(result, random::Distribution::normal());
    return result;
  });

  // --- filling
  sharded_op_impl("aten::fill_.Scalar", [](const Tensor& self, const at::Scalar& value) {
    return written(self, [&](const Tensor& local) { local.fill_(value); });
  });
  sharded_op_impl("aten::zero_", [](const Tensor& self) {
    return written(self, [](const Tensor& local) { local.zero_(); });
  });
  sharded_op_impl("aten::uniform_", [](const Tensor& self, double from, double to, Generator generator) {
    return drawn(self, random::Distribution::uniform(from, to), generator,
                 [&](const Tensor& local) { local.uniform_(from, to, generator); });
  });
  sharded_op_impl("aten::normal_", [](const Tensor& self, double mean, double std, Generator generator) {
    return drawn(self, random::Distribution::normal(mean, std), generator,
                 [&](const Tensor& local) { local.normal_(mean, std, generator); });
  });
  return true;
}();

}  // namespace

ShardedTensor deepcopy(const ShardedTensor& tensor) {
  const bool requires_grad = tensor.requires_grad();
  const ShardedTensor copy(mapped(tensor, false, [](const Tensor& local) { return local.detach().clone(); }));
  return copy.requires_grad_(requires_grad);
}

namespace init {

ShardedTensor uniform_(ShardedTensor tensor, double a, double b, Generator generator) {
  const at::NoGradGuard no_grad;
  static_cast<const Tensor&>(tensor).uniform_(a, b, std::move(generator));
  return tensor;
}

ShardedTensor normal_(ShardedTensor tensor, double mean, double std, Generator generator) {
  const at::NoGradGuard no_grad;
  static_cast<const Tensor&>(tensor).normal_(mean, std, std::move(generator));
  return tensor;
}

ShardedTensor kaiming_uniform_(ShardedTensor tensor, double a, FanMode mode, Generator generator) {
  TESSERA_CHECK_VALUE(tensor.dim() >= 2,
                      "kaiming_uniform_: fans are those of a tensor of at least 2 dims, not of ",
                      tensor.sizes(), ".");
  auto fan = static_cast<double>(tensor.size(mode == FanMode::fan_in ? 1 : 0));
  for (int64_t dim = 2; dim < tensor.dim(); ++dim) fan *= static_cast<double>(tensor.size(dim));
  if (fan == 0) return tensor;
  const double gain = std::sqrt(2 / (1 + a * a));
  const double bound = std::sqrt(3.0) * gain / std::sqrt(fan);
  return uniform_(std::move(tensor), -bound, bound, std::move(generator));
}

ShardedTensor constant_(ShardedTensor tensor, const at::Scalar& value) {
  const at::NoGradGuard no_grad;
  static_cast<const Tensor&>(tensor).fill_(value);
  return tensor;
}

}  // namespace init

}  // namespace tessera::sharded
