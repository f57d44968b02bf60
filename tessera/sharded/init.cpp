#include <tessera/error.h>
#include <tessera/redistribute/memory.h>
#include <tessera/sharded/fill.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/sharded_tensor_impl.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

void check_size(at::IntArrayRef size, const char* call) {
  for (const int64_t each : size)
    TESSERA_CHECK_VALUE(each >= 0, call, ": a size is 0 or more, not ", size, ".");
}

at::DeviceType device_type_of(const std::vector<ShardMetadata>& shards) {
  for (const ShardMetadata& shard : shards) {
    if (shard.placement) return shard.placement->device().type();
  }
  return at::kCPU;
}

/// Fills each local shard.
template <class Fill>
ShardedTensor made(const char* call, const ShardingSpec& spec, at::IntArrayRef size, const Options& options,
                   const Fill& fill) {
  log_call(call, [&] { return c10::str(size, " ", spec); });
  check_size(size, call);
  TESSERA_CHECK_VALUE(options.layout == at::kStrided, call, ": only strided tensors can be sharded, not ",
                      options.layout, " ones.");
  TESSERA_CHECK_VALUE(options.memory_format == at::MemoryFormat::Contiguous, call,
                      ": only the contiguous memory format is supported, not ", options.memory_format, ".");
  TensorProperties properties;
  if (options.dtype) properties.dtype = *options.dtype;
  properties.requires_grad = options.requires_grad;
  properties.pin_memory = options.pin_memory;

  ShardedTensorState state;
  state.metadata = spec.build_metadata(size, properties);
  state.spec = spec.clone();
  state.members =
      std::make_shared<const Members>(options.process_group, device_type_of(state.metadata.shards_metadata));
  state.init_rrefs = options.init_rrefs;
  for (ShardMetadata& shard : local_part(state.metadata.shards_metadata, *state.members)) {
    const at::NoGradGuard no_grad;
    at::Tensor tensor = new_memory(shard.shard_sizes, at::TensorOptions()
                                                          .dtype(properties.dtype)
                                                          .device(shard.placement->device())
                                                          .pinned_memory(options.pin_memory));
    fill(tensor);
    tensor.requires_grad_(options.requires_grad);
    state.local_shards.emplace_back(std::move(tensor), std::move(shard));
  }
  return make_sharded_tensor(std::move(state));
}

// --- from local shards

/// Throws unless local shards can be part of one tensor, and are this rank's.
void check_local_shards(const std::vector<LocalShard>& shards, const Members& members) {
  const at::Tensor& first = shards[0].tensor;
  for (const size_t i : c10::irange(shards.size())) {
    const at::Tensor& tensor = shards[i].tensor;
    const ShardMetadata& metadata = shards[i].metadata;
    auto same = [&](const char* what, const auto& mine, const auto& its) {
      TESSERA_CHECK_VALUE(mine == its, "the local shards differ in ", what, ": ", its, " of shard 0 and ",
                          mine, " of shard ", i, " (", metadata, ")");
    };
    TESSERA_CHECK_VALUE(tensor.defined(), "shard ", i, " (", metadata, ") has no tensor");
    const int64_t rank = rank_of(metadata.placement, members);
    TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, "only strided tensors can be sharded, but shard ", i,
                        " (", metadata, ") is ", tensor.layout());
    TESSERA_CHECK_VALUE(tensor.is_contiguous(), "the tensor of shard ", i, " (", metadata,
                        ") is not contiguous; call contiguous() on it");
    TESSERA_CHECK_VALUE(rank == members.rank(), "shard ", i, " (", metadata, ") is placed on rank ", rank);
    TESSERA_CHECK_VALUE(tensor.device() == metadata.placement->device(), "the tensor of shard ", i, " (",
                        metadata, ") lies on ", tensor.device());
    TESSERA_CHECK_VALUE(tensor.sizes() == at::IntArrayRef(metadata.shard_sizes), "the tensor of shard ", i,
                        " (", metadata, ") has size ", tensor.sizes());
    same("pin_memory", tensor.is_pinned(), first.is_pinned());
    same("dtype", tensor.scalar_type(), first.scalar_type());
    same("requires_grad", tensor.requires_grad(), first.requires_grad());
  }
}

/// What ranks exchange.
struct Report {
  std::optional<ShardedTensorMetadata> metadata;  // nothing if it has no shards
  std::string error;
};

std::string report_bytes(const Report& report) {
  if (!report.error.empty()) return "e" + report.error;
  return report.metadata ? "m" + report.metadata->to_bytes() : "";
}

Report report_from_bytes(const std::string& bytes) {
  if (bytes.empty()) return {};
  if (bytes[0] == 'e') return {std::nullopt, bytes.substr(1)};
  return {ShardedTensorMetadata::from_bytes(std::string_view(bytes).substr(1)), ""};
}

/// All ranks' shards as one tensor's. The same on all ranks, and so are its errors.
ShardedTensorMetadata merged(const std::vector<Report>& reports, const Members& members) {
  std::optional<ShardedTensorMetadata> result;
  int64_t first = 0;
  for (const size_t i : c10::irange(reports.size())) {
    const int64_t rank = members.ranks()[i];
    TESSERA_CHECK_VALUE(reports[i].error.empty(), "init_from_local_shards: on rank ", rank, " ",
                        reports[i].error, ".");
    if (!reports[i].metadata) continue;
    const ShardedTensorMetadata& metadata = *reports[i].metadata;
    if (!result) {
      result = metadata;
      first = rank;
      continue;
    }
    auto same = [&](const char* what, const auto& expected, const auto& actual) {
      TESSERA_CHECK_VALUE(expected == actual, "init_from_local_shards: ", what, " is ", expected, " on rank ",
                          first, ", but ", actual, " on rank ", rank, ".");
    };
    const TensorProperties& mine = result->tensor_properties;
    const TensorProperties& its = metadata.tensor_properties;
    same("global_size", at::IntArrayRef(result->size), at::IntArrayRef(metadata.size));
    same("dtype", mine.dtype, its.dtype);
    same("requires_grad", mine.requires_grad, its.requires_grad);
    same("pin_memory", mine.pin_memory, its.pin_memory);
    result->shards_metadata.insert(result->shards_metadata.end(), metadata.shards_metadata.begin(),
                                   metadata.shards_metadata.end());
  }
  TESSERA_CHECK_VALUE(result, "init_from_local_shards: no rank of ", at::IntArrayRef(members.ranks()),
                      " has a shard.");
  return *std::move(result);
}

/// One shard of each rank, one after the other along dim 0.
void find_sizes(ShardedTensorMetadata& metadata, const Members& members) {
  auto& shards = metadata.shards_metadata;
  std::stable_sort(shards.begin(), shards.end(), [&](const ShardMetadata& a, const ShardMetadata& b) {
    return rank_of(a.placement, members) < rank_of(b.placement, members);
  });
  TESSERA_CHECK_VALUE(static_cast<int64_t>(shards.size()) == members.size(),
                      "init_from_local_shards: with an unknown size each of the ", members.size(),
                      " ranks must have one shard, but there are ", shards.size(), ".");
  int64_t end = 0;
  for (const size_t i : c10::irange(shards.size())) {
    TESSERA_CHECK_VALUE(
        i == 0 || rank_of(shards[i].placement, members) != rank_of(shards[i - 1].placement, members),
        "init_from_local_shards: with an unknown size each rank must have one shard, but ", shards[i - 1],
        " and ", shards[i], " are on one rank.");
    TESSERA_CHECK_VALUE(shards[i].dim() > 0 && shards[i].dim() == shards[0].dim(),
                        "init_from_local_shards: the shards differ in their number of dims.");
    std::fill(shards[i].shard_offsets.begin(), shards[i].shard_offsets.end(), 0);
    shards[i].shard_offsets[0] = end;
    TESSERA_CHECK_VALUE(!__builtin_add_overflow(end, shards[i].shard_sizes[0], &end),
                        "init_from_local_shards: the shards are longer together than 64 bits can count.");
  }
  metadata.size = shards[0].shard_sizes;
  metadata.size[0] = end;
}

}  // namespace

// --- factories

ShardedTensor empty(const ShardingSpec& spec, at::IntArrayRef size, const Options& options) {
  return made("sharded::empty", spec, size, options, [](at::Tensor&) {});
}

ShardedTensor full(const ShardingSpec& spec, at::IntArrayRef size, const at::Scalar& value,
                   const Options& options) {
  return made("sharded::full", spec, size, options, [&](at::Tensor& tensor) { tensor.fill_(value); });
}

ShardedTensor zeros(const ShardingSpec& spec, at::IntArrayRef size, const Options& options) {
  return made("sharded::zeros", spec, size, options, [](at::Tensor& tensor) { tensor.zero_(); });
}

ShardedTensor ones(const ShardingSpec& spec, at::IntArrayRef size, const Options& options) {
  return made("sharded::ones", spec, size, options, [](at::Tensor& tensor) { tensor.fill_(1); });
}

ShardedTensor rand(const ShardingSpec& spec, at::IntArrayRef size, const Options& options) {
  const ShardedTensor tensor = made("sharded::rand", spec, size, options, [](at::Tensor&) {});
  fill_random(tensor, random::Distribution::uniform());
  return tensor;
}

ShardedTensor randn(const ShardingSpec& spec, at::IntArrayRef size, const Options& options) {
  const ShardedTensor tensor = made("sharded::randn", spec, size, options, [](at::Tensor&) {});
  fill_random(tensor, random::Distribution::normal());
  return tensor;
}

// --- from what ranks have

ShardedTensor init_from_local_shards(std::vector<LocalShard> local_shards, at::IntArrayRef global_size,
                                     const InitOptions& options) {
  log_call("sharded::init_from_local_shards",
           [&] { return c10::str(local_shards.size(), " shards of ", global_size); });
  auto members = std::make_shared<const Members>(options.process_group, at::kCPU);
  members->check_member("init_from_local_shards");
  const bool is_unknown =
      std::any_of(global_size.begin(), global_size.end(), [](int64_t size) { return size == kUnknownSize; });
  Report mine;
  try {
    if (!is_unknown) check_size(global_size, "the global size is wrong");
    if (!local_shards.empty()) {
      check_local_shards(local_shards, *members);
      mine.metadata.emplace();
      mine.metadata->size = global_size.vec();
      mine.metadata->tensor_properties = TensorProperties::of(local_shards[0].tensor);
      for (const LocalShard& shard : local_shards) mine.metadata->shards_metadata.push_back(shard.metadata);
    }
  } catch (const c10::Error& error) {
    mine.error = error.what_without_backtrace();
    while (!mine.error.empty() && mine.error.back() == '.') mine.error.pop_back();
  }
  std::vector<Report> reports;
  for (const std::string& bytes : all_gather_text(report_bytes(mine), *members))
    reports.push_back(report_from_bytes(bytes));

  ShardedTensorState state;
  state.metadata = merged(reports, *members);
  if (is_unknown) {
    find_sizes(state.metadata, *members);
    local_shards[0].metadata = local_part(state.metadata.shards_metadata, *members)[0];
  }
  validate_non_overlapping_shards_metadata(state.metadata.shards_metadata);
  check_tensor(state.metadata.shards_metadata, state.metadata.size);
  state.spec = infer_sharding_spec(state.metadata.shards_metadata);
  state.local_shards = std::move(local_shards);
  if (const at::DeviceType device = device_type_of(state.metadata.shards_metadata); device != at::kCPU)
    members = std::make_shared<const Members>(options.process_group, device);
  state.members = std::move(members);
  state.init_rrefs = options.init_rrefs;
  return make_sharded_tensor(std::move(state));
}

ShardedTensor init_from_local_tensor(const at::Tensor& local_tensor, const ShardingSpec& spec,
                                     at::IntArrayRef global_size, const InitOptions& options) {
  TESSERA_CHECK_VALUE(
      local_tensor.defined() && local_tensor.is_contiguous(),
      "init_from_local_tensor: the local tensor must be contiguous; call contiguous() on it.");
  check_size(global_size, "init_from_local_tensor");
  auto metadata = spec.build_metadata(global_size, TensorProperties::of(local_tensor));
  const Members members(options.process_group, local_tensor.device().type());
  std::vector<LocalShard> local_shards;
  for (ShardMetadata& shard : local_part(metadata.shards_metadata, members)) {
    TESSERA_CHECK_VALUE(local_shards.empty(), "init_from_local_tensor: ", spec, " gives rank ",
                        members.rank(), " more than one shard; use init_from_local_shards.");
    local_shards.emplace_back(local_tensor, std::move(shard));
  }
  return init_from_local_shards_and_global_metadata(std::move(local_shards), std::move(metadata), options,
                                                    spec.clone());
}

ShardedTensor init_from_local_shards_and_global_metadata(std::vector<LocalShard> local_shards,
                                                         ShardedTensorMetadata metadata,
                                                         const InitOptions& options, ShardingSpecPtr spec) {
  constexpr const char* call = "init_from_local_shards_and_global_metadata";
  log_call(call, [&] { return metadata.str(); });
  const auto& shards = metadata.shards_metadata;
  const TensorProperties& properties = metadata.tensor_properties;
  TESSERA_CHECK_VALUE(!shards.empty(), call, ": the metadata has no shards.");
  TESSERA_CHECK_VALUE(properties.layout == at::kStrided, call, ": only strided tensors can be sharded, not ",
                      properties.layout, " ones.");
  auto members = std::make_shared<const Members>(options.process_group, device_type_of(shards));
  const std::vector<ShardMetadata> expected = local_part(shards, *members);
  TESSERA_CHECK(local_shards.size() == expected.size(), call, ": rank ", members->rank(), " has ",
                local_shards.size(), " local shards, but the metadata says ", expected.size(), ".");
  std::vector<LocalShard> in_order(expected.size());
  for (const size_t i : c10::irange(local_shards.size())) {
    LocalShard& shard = local_shards[i];
    const at::Tensor& tensor = shard.tensor;
    auto same = [&](const char* what, const auto& said, const auto& actual) {
      TESSERA_CHECK_VALUE(said == actual, call, ": on rank ", members->rank(), " the metadata says ", what,
                          " ", said, ", but the tensor of shard ", i, " (", shard.metadata, ") has ", actual,
                          ".");
    };
    TESSERA_CHECK_VALUE(tensor.defined() && shard.metadata.placement, call, ": on rank ", members->rank(),
                        " shard ", i, " (", shard.metadata, ") has no tensor or no placement.");
    size_t index = 0;  // shards that hold nothing may be equal
    while (index < expected.size() &&
           (in_order[index].tensor.defined() || expected[index] != shard.metadata)) {
      ++index;
    }
    TESSERA_CHECK_VALUE(index < expected.size(), call, ": shard ", i, " (", shard.metadata,
                        ") is not in the metadata of rank ", members->rank(), ", or was given already.");
    same("layout", properties.layout, tensor.layout());
    TESSERA_CHECK_VALUE(tensor.is_contiguous(), call, ": on rank ", members->rank(), " the tensor of shard ",
                        i, " (", shard.metadata, ") is not contiguous; call contiguous() on it.");
    same("size", at::IntArrayRef(shard.metadata.shard_sizes), tensor.sizes());
    same("pin_memory", properties.pin_memory, tensor.is_pinned());
    same("device", shard.metadata.placement->device(), tensor.device());
    same("dtype", properties.dtype, tensor.scalar_type());
    same("requires_grad", properties.requires_grad, tensor.requires_grad());
    in_order[index] = std::move(shard);
  }
  validate_non_overlapping_shards_metadata(shards);
  check_tensor(shards, metadata.size);
  if (!spec) spec = infer_sharding_spec(shards);

  ShardedTensorState state;
  state.metadata = std::move(metadata);
  state.spec = std::move(spec);
  state.local_shards = std::move(in_order);
  state.members = std::move(members);
  state.init_rrefs = options.init_rrefs;
  return make_sharded_tensor(std::move(state));
}

}  // namespace tessera::sharded
