#include <tessera/bytes.h>
#include <tessera/error.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/parameter.h>
#include <tessera/sharded/sharded_tensor_impl.h>
#include <tessera/sharded/state.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

namespace tessera::sharded {

namespace {

constexpr std::string_view kMagic = "tessera sharded tensor 1", kDictMagic = "tessera state dict 1";

void write_tensor(ByteWriter& out, const at::Tensor& given) {
  const at::Tensor tensor = given.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  out.put(static_cast<int8_t>(given.scalar_type()));
  out.put_list(given.sizes());
  out.put(given.device().str());
  out.put(static_cast<int8_t>(given.requires_grad()));
  out.put(std::string_view(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()));
}

at::Tensor read_tensor(ByteReader& in) {
  const auto dtype = in.get<int8_t>();
  in.check(dtype >= 0 && dtype < static_cast<int8_t>(at::ScalarType::Undefined));
  const std::vector<int64_t> size = in.get_list();
  const at::Device device{std::string(in.get_text())};
  const bool requires_grad = in.get<int8_t>() != 0;
  const std::string_view data = in.get_text();
  size_t expected = c10::elementSize(static_cast<at::ScalarType>(dtype));
  for (const int64_t each : size) in.check(each >= 0 && !__builtin_mul_overflow(expected, each, &expected));
  in.check(expected == data.size());
  const at::Tensor tensor = at::empty(size, static_cast<at::ScalarType>(dtype));
  copy_bytes(tensor.mutable_data_ptr(), data.data(), data.size());
  return tensor.to(device).requires_grad_(requires_grad);
}

/// Whether the values of one can be copied into the other without communication.
bool is_tiled_alike(const at::Tensor& a, const at::Tensor& b) {
  if (!ShardedTensor::is_sharded_tensor(a) || !ShardedTensor::is_sharded_tensor(b)) return false;
  return ShardedTensor(a).process_group() == ShardedTensor(b).process_group() &&
         is_same_tiling(ShardedTensor(a).metadata().shards_metadata,
                        ShardedTensor(b).metadata().shards_metadata);
}

}  // namespace

LoadWithProcessGroup::LoadWithProcessGroup(Ranks process_group)
    : ranks_(std::move(process_group)), scope_(&ranks_) {
  TESSERA_CHECK(!scope_.outer(), "LoadWithProcessGroup: there is one already on this thread.");
}

LoadWithProcessGroup::~LoadWithProcessGroup() = default;

Ranks LoadWithProcessGroup::current() {
  const Ranks* ranks = ThreadScope<const Ranks*, LoadWithProcessGroup>::current();
  return ranks ? *ranks : Ranks();
}

std::string ShardedTensor::to_bytes() const {
  log_call("ShardedTensor::to_bytes", [&] { return metadata().str(); });
  const Members& members = process_group();
  ByteWriter out;
  out.put(kMagic);
  out.put(members.group_rank());
  out.put(members.rank());
  out.put(members.size());
  out.put(members.world()->size());
  out.put(metadata().to_bytes());
  out.put(sharding_spec().str());
  out.put(static_cast<int8_t>(init_rrefs()));
  out.put(static_cast<int64_t>(local_shards().size()));
  for (const LocalShard& shard : local_shards()) {
    out.put(shard.metadata.to_bytes());
    write_tensor(out, shard.tensor);
  }
  return out.take();
}

ShardedTensor ShardedTensor::from_bytes(std::string_view bytes) {
  log_call("ShardedTensor::from_bytes", [&] { return c10::str(bytes.size(), " bytes"); });
  ByteReader in(bytes, "ShardedTensor");
  in.check(in.get_text() == kMagic);
  const auto group_rank = in.get<int64_t>(), rank = in.get<int64_t>();
  const auto group_size = in.get<int64_t>(), world_size = in.get<int64_t>();
  ShardedTensorMetadata metadata = ShardedTensorMetadata::from_bytes(in.get_text());
  ShardingSpecPtr spec =
      parse_sharding_spec(in.get_text());  // null if of a class of the user's: then it is inferred
  const bool init_rrefs = in.get<int8_t>() != 0;
  std::vector<LocalShard> local_shards;
  for (int64_t count = in.get_count(1); count > 0; --count) {
    ShardMetadata where = ShardMetadata::from_bytes(in.get_text());
    at::Tensor tensor = read_tensor(in);
    local_shards.emplace_back(std::move(tensor), std::move(where));
  }
  in.check(in.done());
  metadata.tensor_properties.pin_memory = false;
  const Ranks ranks = LoadWithProcessGroup::current();
  const Members members(ranks, at::kCPU);
  auto same = [](const char* what, int64_t saved, int64_t now) {
    TESSERA_CHECK(saved == now, "This ShardedTensor was saved with ", what, " ", saved,
                  ", and is loaded with ", now,
                  ". Load it where it was saved, or save checkpoints that can be loaded on other ranks.");
  };
  same("group rank", group_rank, members.group_rank());
  same("rank", rank, members.rank());
  same("a group of size", group_size, members.size());
  same("a world of size", world_size, members.world()->size());
  return init_from_local_shards_and_global_metadata(std::move(local_shards), std::move(metadata),
                                                    {.process_group = ranks, .init_rrefs = init_rrefs},
                                                    std::move(spec));
}

// --- modules

TensorDict state_dict(const torch::nn::Module& module, const std::string& prefix) {
  TensorDict result;
  const auto parameters = module.named_parameters(), buffers = module.named_buffers();
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const auto& item : *tensors) {
      const bool sharded = ShardedTensor::is_sharded_tensor(item.value());
      result[prefix + item.key()] = sharded ? item.value() : item.value().detach();
    }
  }
  return result;
}

void state_dict_hook(const torch::nn::Module& module, TensorDict& destination, const std::string& prefix) {
  for (auto& [name, tensor] : state_dict(module, prefix)) {
    if (ShardedTensor::is_sharded_tensor(tensor)) destination[name] = tensor;
  }
}

void pre_load_state_dict_hook(torch::nn::Module& module, const TensorDict& state, const std::string& prefix) {
  std::vector<std::string> others;  // of which the module gets the tensor itself
  for (const auto& [name, old] : state_dict(module, prefix)) {
    const auto found = state.find(name);
    if (found == state.end() || !ShardedTensor::is_sharded_tensor(found->second)) continue;
    const at::Tensor& now = found->second;
    TESSERA_CHECK_VALUE(now.sizes() == old.sizes(), "load_state_dict: \"", name, "\" has size ", old.sizes(),
                        " in the module, but ", now.sizes(), " in what is loaded.");
    if (now.is_same(old)) continue;
    if (is_tiled_alike(now, old)) {
      const at::NoGradGuard no_grad;
      old.copy_(now);
    } else {
      others.push_back(name);
    }
  }
  for (const std::string& name : others) {
    TESSERA_CHECK(
        replace_parameter(module, name.substr(prefix.size()), state.at(name), /*only_if_all=*/true),
        "load_state_dict: another handle exists on \"", name,
        "\", which would keep the old tensor, as it is sharded differently in what is loaded: an optimiser "
        "or a list of parameters (make them afterwards), or a member of a class of yours (register it "
        "with tessera::register_members<M>(&M::member)).");
  }
}

void load_state_dict(torch::nn::Module& module, const TensorDict& state, bool strict,
                     const std::string& prefix) {
  log_call("sharded::load_state_dict", [&] { return c10::str(state.size(), " tensors"); });
  TensorDict mine = state_dict(module, prefix);
  std::string missing, unexpected;
  auto list = [](std::string& names, const std::string& name) {
    names += (names.empty() ? "" : ", ") + name;
  };
  for (const auto& [name, tensor] : mine) {
    if (!state.contains(name)) list(missing, name);
  }
  for (const auto& [name, tensor] : state) {
    if (name.starts_with(prefix) && !mine.contains(name)) list(unexpected, name);
  }
  TESSERA_CHECK(!strict || (missing.empty() && unexpected.empty()),
                "load_state_dict: ", missing.empty() ? "" : "missing: " + missing + ". ",
                unexpected.empty() ? "" : "not in the module: " + unexpected + ".");
  for (const auto& [name, tensor] : mine) {
    const auto found = state.find(name);
    if (found == state.end() || ShardedTensor::is_sharded_tensor(found->second)) continue;
    TESSERA_CHECK_VALUE(!ShardedTensor::is_sharded_tensor(tensor), "load_state_dict: \"", name,
                        "\" is sharded in the module, but not in what is loaded.");
    TESSERA_CHECK_VALUE(found->second.sizes() == tensor.sizes(), "load_state_dict: \"", name, "\" has size ",
                        tensor.sizes(), " in the module, but ", found->second.sizes(), " in what is loaded.");
  }
  std::erase_if(mine, [&](const auto& item) {  // what is plain, here and there
    const auto found = state.find(item.first);
    return found == state.end() || ShardedTensor::is_sharded_tensor(found->second);
  });
  pre_load_state_dict_hook(module, state, prefix);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : mine) tensor.copy_(state.at(name));
}

std::string to_bytes(const TensorDict& state) {
  ByteWriter out;
  out.put(kDictMagic);
  out.put(static_cast<int64_t>(state.size()));
  for (const auto& [name, tensor] : state) {
    const bool sharded = ShardedTensor::is_sharded_tensor(tensor);
    out.put(name);
    out.put(static_cast<int8_t>(sharded));
    sharded ? out.put(ShardedTensor(tensor).to_bytes()) : write_tensor(out, tensor);
  }
  return out.take();
}

TensorDict from_bytes(std::string_view bytes) {
  ByteReader in(bytes, "state dict");
  in.check(in.get_text() == kDictMagic);
  TensorDict result;
  for (int64_t count = in.get_count(1); count > 0; --count) {
    std::string name(in.get_text());
    result[std::move(name)] =
        in.get<int8_t>() != 0 ? ShardedTensor::from_bytes(in.get_text()) : read_tensor(in);
  }
  in.check(in.done());
  return result;
}

}  // namespace tessera::sharded
