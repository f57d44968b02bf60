#include <tessera/bytes.h>
#include <tessera/error.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/optimizer.h>

#include <sstream>
#include <unordered_set>

#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

namespace tessera::sharded {

namespace {

/// What is trained of the parameters here.
std::vector<at::Tensor> local_tensors(const NamedParameters& named) {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : named) {
    if (!ShardedTensor::is_sharded_tensor(parameter)) {
      result.push_back(parameter);
      continue;
    }
    for (const LocalShard& shard : ShardedTensor(parameter).local_shards()) result.push_back(shard.tensor);
  }
  return result;
}

/// What a state belongs to.
std::string names_of(const NamedParameters& named) {
  std::ostringstream out;
  for (const auto& [name, parameter] : named) {
    out << name << ' ' << parameter.sizes();
    if (ShardedTensor::is_sharded_tensor(parameter)) {
      for (const LocalShard& shard : ShardedTensor(parameter).local_shards()) out << ' ' << shard.metadata;
    }
    out << '\n';
  }
  return out.str();
}

constexpr std::string_view kMagic = "tessera sharded optimizer 1";

}  // namespace

NamedParameters named_params_with_sharded_tensor(const torch::nn::Module& module, const std::string& prefix,
                                                 bool recurse) {
  NamedParameters result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters(recurse)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.emplace_back(prefix.empty() ? item.key() : prefix + "." + item.key(), item.value());
  }
  return result;
}

ShardedOptimizer::ShardedOptimizer(NamedParameters named_params, const Make& make)
    : named_params_(std::move(named_params)), optimizer_(make(local_tensors(named_params_))) {
  TESSERA_CHECK(optimizer_, "ShardedOptimizer: no optimiser was made.");
  TESSERA_CHECK(
      !dynamic_cast<const torch::optim::LBFGS*>(optimizer_.get()),
      "ShardedOptimizer: LBFGS computes with all elements together, not with each by itself, and so "
      "cannot run on local shards. Gather the parameters, or use another optimiser.");
  log_call("ShardedOptimizer", [&] { return c10::str(named_params_.size(), " parameters"); });
}

void ShardedOptimizer::zero_grad(bool set_to_none) {
  optimizer_->zero_grad(set_to_none);
  if (!set_to_none) return;
  // Where this rank has no shard of a parameter, the optimiser has nothing of it.
  for (const auto& [name, parameter] : named_params_) {
    if (!ShardedTensor::is_sharded_tensor(parameter)) continue;
    for (const at::Tensor& local : ShardedTensor(parameter).local_tensors()) local.mutable_grad().reset();
  }
}

at::Tensor ShardedOptimizer::step(const torch::optim::Optimizer::LossClosure& closure) {
  local_tensors(named_params_);  // which learn what was done with the parameters' gradients
  return optimizer_->step(closure);
}

void ShardedOptimizer::add_param_group(NamedParameters named_params,
                                       std::unique_ptr<torch::optim::OptimizerOptions> options) {
  std::vector<at::Tensor> tensors = local_tensors(named_params);
  optimizer_->add_param_group(options
                                  ? torch::optim::OptimizerParamGroup(std::move(tensors), std::move(options))
                                  : torch::optim::OptimizerParamGroup(std::move(tensors)));
  for (auto& each : named_params) named_params_.push_back(std::move(each));
}

std::string ShardedOptimizer::state_dict() const {
  torch::serialize::OutputArchive archive;
  optimizer_->save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  ByteWriter out;
  out.put(kMagic);
  out.put(names_of(named_params_));
  out.put(stream.str());
  return out.take();
}

void ShardedOptimizer::load_state_dict(const std::string& state) {
  ByteReader in(state, "state of a ShardedOptimizer");
  in.check(in.get_text() == kMagic);
  const std::string_view saved = in.get_text();
  const std::string mine = names_of(named_params_);
  TESSERA_CHECK(
      saved == mine,
      "ShardedOptimizer::load_state_dict: this is the state of other parameters, or of other shards. "
      "Saved:\n",
      saved, "here:\n", mine);
  std::istringstream stream{std::string(in.get_text())};
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer_->load(archive);
}

}  // namespace tessera::sharded
