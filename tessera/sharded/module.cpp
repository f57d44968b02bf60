#include <tessera/comm/agreement.h>
#include <tessera/error.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/module.h>
#include <tessera/sharded/parameter.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace tessera::sharded {

namespace {

using Hook = std::function<at::Tensor(const ShardedTensor&)>;

constexpr const char* kHooks = "_tessera_sharded_hooks";

/// Hooks are kept in a submodule without parameters that is not saved.
struct OutputHooks : torch::nn::Module {
  bool is_serializable() const override { return false; }
  std::vector<Hook> hooks;
};

void add_hook(torch::nn::Module& module, Hook hook) {
  const auto children = module.named_children();
  if (!children.contains(kHooks)) module.register_module(kHooks, std::make_shared<OutputHooks>());
  std::dynamic_pointer_cast<OutputHooks>(module.named_children()[kHooks])->hooks.push_back(std::move(hook));
}

std::string parent_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string own_name(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

/// "fc.weight: ChunkShardingSpec(...), attention: a sharder"
std::string plan_text(const ShardingPlan& plan) {
  std::string text;
  for (const auto& [name, entry] : plan.plan) {
    const auto* spec = std::get_if<ShardingSpecPtr>(&entry);
    text += c10::str(text.empty() ? "" : ", ", name, ": ", spec ? (*spec)->str() : "a sharder");
  }
  return text;
}

/// Whether a module is another one or below it.
bool is_within(const std::string& path, const std::string& root) {
  return path == root || path.starts_with(root + ".");
}

/// Where the parameters are, as far as that can be known of a name that may be wrong.
at::DeviceType device_type_in(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined()) return parameter.device().type();
  }
  return at::kCPU;
}

/// Shards the parameter of that dotted name, for all modules below `root` that have it.
void shard_below(torch::nn::Module& root, const std::string& name, const ShardingSpec& spec, int64_t src_rank,
                 const Ranks& process_group) {
  log_call("sharded::shard_parameter", [&] { return c10::str(name, " ", spec); });
  const torch::nn::Module* module = nullptr;
  const std::string own = own_name(name);
  ShardedTensor sharded;
  {
    at::Tensor parameter;
    const Members members(process_group, device_type_in(root));
    const comm::Agreement agreement("shard_parameter", members.group(), [&] {
      module = &submodule(root, parent_of(name));
      const auto parameters = module->named_parameters(/*recurse=*/false);
      const at::Tensor* found = parameters.find(own);
      std::string names;
      for (const auto& item : parameters) names += (names.empty() ? "" : ", ") + item.key();
      TESSERA_CHECK_VALUE(found, "shard_parameter: ", module->name(), " has no parameter \"", own,
                          "\"; it has: ", names, ".");
      TESSERA_CHECK_VALUE(found->defined(), "shard_parameter: \"", own, "\" of ", module->name(),
                          " is undefined.");
      TESSERA_CHECK_VALUE(!ShardedTensor::is_sharded_tensor(*found), "shard_parameter: \"", own, "\" of ",
                          module->name(), " is sharded already; use reshard.");
      TESSERA_CHECK_VALUE(found->is_contiguous(), "shard_parameter: \"", own, "\" of ", module->name(),
                          " is not contiguous; call contiguous() on it.");
      parameter = *found;
      return name;
    });
    sharded = shard_tensor(parameter, spec, src_rank, process_group);
  }
  TESSERA_CHECK(
      replace_parameter(root, name, sharded, /*only_if_all=*/true),
      "shard_parameter: another handle exists on \"", own, "\" of ", module->name(),
      ", which would keep the old tensor: a member of a class of yours (register it with "
      "tessera::register_members<M>(&M::member)), or an optimiser or a list of parameters (make them "
      "afterwards).");
}

}  // namespace

Sharder::~Sharder() = default;
ShardingPlanner::~ShardingPlanner() = default;

void shard_parameter(torch::nn::Module& module, const std::string& name, const ShardingSpec& spec,
                     int64_t src_rank, const Ranks& process_group) {
  shard_below(module, name, spec, src_rank, process_group);
}

void reshard_output(torch::nn::Module& module, const ShardingSpec& spec) {
  add_hook(module, [spec = spec.clone()](const ShardedTensor& output) -> at::Tensor {
    return output.reshard(*spec);
  });
}

void collect_local_shard(torch::nn::Module& module) {
  add_hook(module, [](const ShardedTensor& output) {
    at::Tensor local = output.local_tensor();
    const auto* chunks = dynamic_cast<const ChunkShardingSpec*>(&output.sharding_spec());
    return chunks && local.size(chunks->dim()) == 1 ? local.squeeze(chunks->dim()) : local;
  });
}

at::Tensor with_output_hooks(const torch::nn::Module& module, at::Tensor output) {
  const auto children = module.named_children();
  const auto* found = children.find(kHooks);
  if (!found) return output;
  for (const Hook& hook : std::dynamic_pointer_cast<OutputHooks>(*found)->hooks) {
    if (ShardedTensor::is_sharded_tensor(output)) output = hook(output);
  }
  return output;
}

void shard_module(torch::nn::Module& module, const ShardingPlan& plan, int64_t src_rank,
                  const Ranks& process_group) {
  log_call("sharded::shard_module", [&] { return c10::str(plan.plan.size(), " entries"); });
  comm::together(
      "shard_module", has_current_world() ? Members(process_group, device_type_in(module)).group() : Group(),
      [&] {
        // All of the plan is looked at before anything is changed.
        std::vector<std::string> sharders;
        for (const auto& [name, entry] : plan.plan) {
          std::visit(
              [&](const auto& given) {
                TESSERA_CHECK_VALUE(given, "shard_module: the entry \"", name, "\" is null.");
              },
              entry);
          if (std::holds_alternative<ShardingSpecPtr>(entry)) continue;
          TESSERA_CHECK_VALUE(!name.empty(),
                              "shard_module: a sharder needs the name of a submodule; the root itself "
                              "cannot be replaced.");
          submodule(module, name);
          sharders.push_back(name);
        }
        for (const auto& [name, entry] : plan.plan) {
          if (!std::holds_alternative<ShardingSpecPtr>(entry)) continue;
          for (const std::string& sharder : sharders) {
            TESSERA_CHECK(!is_within(parent_of(name), sharder),
                          "shard_module: the plan shards the parameter \"", name, "\", which is inside \"",
                          sharder, "\", for which it has a sharder. Leave one of them out.");
          }
          submodule(module, parent_of(name));
        }
        for (const auto& [name, spec] : plan.output_plan) {
          TESSERA_CHECK_VALUE(spec, "shard_module: the output of \"", name, "\" has no spec.");
          submodule(module, name);
        }
        for (const std::string& name : plan.return_local_tensor) submodule(module, name);
        return plan_text(plan);
      },
      [&] {
        for (const auto& [name, entry] : plan.plan) {
          if (const auto* spec = std::get_if<ShardingSpecPtr>(&entry)) {
            shard_below(module, name, **spec, src_rank, process_group);
          } else {
            torch::nn::Module& parent = submodule(module, parent_of(name));
            const std::string own = own_name(name);
            const auto before = parent.named_children()[own];
            const auto after = std::get<std::shared_ptr<Sharder>>(entry)->shard(before);
            TESSERA_CHECK(after, "shard_module: the sharder of \"", name, "\" returned nothing.");
            if (after != before) parent.replace_module(own, after);
          }
        }
        for (const auto& [name, spec] : plan.output_plan) reshard_output(submodule(module, name), *spec);
        for (const std::string& name : plan.return_local_tensor) collect_local_shard(submodule(module, name));
      });
}

}  // namespace tessera::sharded
