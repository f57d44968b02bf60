#pragma once

#include <tessera/nn/hooks.h>

#include <memory>

#include <torch/nn/module.h>

namespace tessera {

class GradientReduction;
class ShardUnit;

/// What we keep with a module: a submodule without parameters that is not saved.
struct Attachment : torch::nn::Module {
  Attachment() : torch::nn::Module("tessera::Attachment") {}
  bool is_serializable() const override { return false; }

  ModuleHooks hooks;
  std::shared_ptr<GradientReduction> reduction;
  std::shared_ptr<ShardUnit> unit;
};

/// That of a module, made if there is none.
Attachment& attachment(torch::nn::Module& module);
/// Null if there is none.
Attachment* find_attachment(const torch::nn::Module& module);

}  // namespace tessera
